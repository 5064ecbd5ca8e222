#include <algorithm>
#include <numeric>

#include "comm/call_check.h"
#include "comm/links.h"
#include "tensor/kernels.h"

namespace tessera::comm {

void fail_for(int rank, const std::string& message, Site site) {
  throw RankFailure(message, rank, site.file, site.line);
}

std::string disagreement(const Call& ours, int our_rank, const Call& theirs, int their_rank) {
  const bool ours_first = our_rank < their_rank;
  const auto side = [](int rank, const Call& call) {
    return "rank " + std::to_string(rank) + " calls " + call.text();
  };
  // The last size of these two calls is a digest of what their text does not show.
  const bool same_kind = ours.kind == theirs.kind && ours.sizes.back() != theirs.sizes.back();
  const char* const difference = !same_kind                        ? ""
                                 : ours.kind == Kind::share        ? ", with other owners, shapes or dtypes"
                                 : ours.kind == Kind::reduce_parts ? ", with other ends"
                                                                   : "";
  return "the ranks disagree: " + (ours_first ? side(our_rank, ours) : side(their_rank, theirs)) + ", " +
         (ours_first ? side(their_rank, theirs) : side(our_rank, ours)) +
         (ours.communicator != theirs.communicator ? ", of another communicator" : "") + difference +
         "; all ranks must make the same calls with the same shapes and dtypes";
}

void Links::check_thread(Kind kind) const {
  const std::thread::id only = only_;
  check(
      only == std::thread::id() || only == std::this_thread::get_id(), name_of(kind),
      ": another thread makes calls of this job's communicators until they are joined (gradients are summed "
      "next to the backward pass); leave out DataParallel::overlap() where the pass makes calls of its own");
}

CallCheck& Links::call_check() {
  fail_at(Site::here(), name(), ": calls cannot be compared after they were made");
}

void sum_in_tree(std::vector<Tensor>& parts) {
  for (size_t step = 1; step < parts.size(); step *= 2)
    for (size_t i = 0; i + step < parts.size(); i += 2 * step) accumulate(parts[i], parts[i + step]);
}

namespace {

/// Elements that are reduced at a time. Scratch memory for what is received: all_reduce at most one block in
/// all (16 MiB of f32), reduce_scatter a block per other rank. reduce_parts does not use blocks.
constexpr int64_t kBlock = int64_t{1} << 22;

class HostTransport : public Transport {
 public:
  HostTransport(std::shared_ptr<Links> links, std::vector<int> ranks, int rank)
      : links_(std::move(links)), ranks_(std::move(ranks)), rank_(rank) {}

  const char* name() const override { return links_->name(); }
  int rank() const override { return rank_; }
  int size() const override { return int(ranks_.size()); }
  bool takes(Device device) const override { return device == links_->device(); }
  Device device() const override { return links_->device(); }
  void fail(const std::string& cause) override { links_->fail(cause); }
  void keep_to(std::thread::id thread) override { links_->keep_to(thread); }
  void check_thread(Kind kind) const override { links_->check_thread(kind); }
  CallCheck& call_check() override { return links_->call_check(); }

  std::shared_ptr<Transport> part(const std::vector<int>& ranks, uint64_t) override {
    std::vector<int> inner;
    for (const int rank : ranks) inner.push_back(ranks_[size_t(rank)]);
    const int own = int(std::ranges::find(ranks, rank_) - ranks.begin());
    return std::make_shared<HostTransport>(links_, std::move(inner), own);
  }

  void run(const Call& call, const Tensor& in, const Tensor& out) override {
    begin(call);
    switch (call.kind) {
      case Kind::all_reduce:
        return all_reduce(out);
      case Kind::reduce_scatter:
        return reduce_scatter(in, out);
      case Kind::all_gather:
        return all_gather(in, out);
      case Kind::broadcast:
        return broadcast(out, call.peer);
      case Kind::all_to_all:
        return all_to_all(in, out);
      case Kind::send:
        return exchange({send_to(call.peer, in)});
      case Kind::receive:
        return exchange({receive_from(call.peer, out)});
      case Kind::barrier:
        return barrier();
      case Kind::reduce_parts:
      case Kind::share:
        break;  // functions of their own
    }
  }

  void reduce_parts(const Call& call, const Tensor& x, std::span<const int64_t> ends) override {
    begin(call);
    if (x.count() == 0) return barrier();
    std::vector<Tensor> parts;
    for (size_t r = 0; r < ends.size(); ++r)
      parts.push_back(x.detach().slice(0, r == 0 ? 0 : ends[r - 1], ends[r]));
    if (links_->sum_parts(call, parts, ranks_)) return;
    sum_of_parts(parts[size_t(rank_)], [&](int rank) { return parts[size_t(rank)]; });
  }

  void share(const Call& call, std::span<const Tensor> tensors, std::span<const int> owners) override {
    begin(call);
    std::vector<Transfer> transfers;
    for (size_t i = 0; i < tensors.size(); ++i)
      if (owners[i] != rank_)
        transfers.push_back(receive_from(owners[i], tensors[i]));
      else
        for (const int peer : others()) transfers.push_back(send_to(peer, tensors[i]));
    // A rank that owns nothing sends an empty message, so that every rank also learns of calls with other
    // owners.
    const auto owns = [&](int rank) { return std::ranges::find(owners, rank) != owners.end(); };
    for (const int peer : others()) {
      if (!owns(rank_)) transfers.push_back(empty(Transfer::Direction::send, peer));
      if (!owns(peer)) transfers.push_back(empty(Transfer::Direction::receive, peer));
    }
    exchange(transfers);
  }

 private:
  void begin(const Call& call) {
    call_ = &call;
    // The exchange has a deadline of its own.
    if (links_->has_call_check() && size() == links_->size() && call.kind != Kind::send &&
        call.kind != Kind::receive)
      links_->call_check().post(call, 0);
  }
  Transfer send_to(int peer, const Tensor& part) const {
    return {Transfer::Direction::send, ranks_[size_t(peer)], part.raw(), part.bytes()};
  }
  Transfer receive_from(int peer, const Tensor& part) const {
    return {Transfer::Direction::receive, ranks_[size_t(peer)], part.raw(), part.bytes()};
  }
  Transfer empty(Transfer::Direction direction, int peer) const {
    return {direction, ranks_[size_t(peer)], nullptr, 0};
  }
  void exchange(const std::vector<Transfer>& transfers) { links_->exchange(*call_, transfers, ranks_); }

  /// The other ranks, beginning after this one, so that not all send to the same one first.
  std::vector<int> others() const {
    std::vector<int> list;
    for (int i = 1; i < size(); ++i) list.push_back((rank_ + i) % size());
    return list;
  }

  static Tensor flat(const Tensor& x) { return x.detach().reshape({x.count()}); }

  /// Sums the elements of `mine`, this rank's part, over all ranks; of_rank(r) are the elements of this
  /// rank's tensor that rank r sums. The result is in `mine`, which is also scratch.
  template <class Part>
  void sum_of_parts(const Tensor& mine, Part&& of_rank) {
    std::vector<Tensor> parts(size_t(size()), mine);
    std::vector<Transfer> transfers;
    for (const int peer : others()) {
      const Tensor part = of_rank(peer);
      if (part.count() > 0) transfers.push_back(send_to(peer, part));
      if (mine.count() == 0) continue;
      parts[size_t(peer)] = Tensor::empty_packed({mine.count()}, mine.dtype(), mine.device());
      transfers.push_back(receive_from(peer, parts[size_t(peer)]));
    }
    exchange(transfers);
    if (mine.count() == 0) return;
    sum_in_tree(parts);
    if (rank_ != 0) mine.copy_from(parts[0]);
  }

  void all_reduce(const Tensor& tensor) {
    const Tensor x = flat(tensor);
    if (x.count() == 0) return barrier();
    if (links_->sum(*call_, x, ranks_)) return;
    for (int64_t begin = 0; begin < x.count(); begin += kBlock) {
      const Tensor block = x.slice(0, begin, std::min(begin + kBlock, x.count()));
      const auto part = [&](int rank) {
        return block.slice(0, block.count() * rank / size(), block.count() * (rank + 1) / size());
      };
      const Tensor mine = part(rank_);
      sum_of_parts(mine, part);
      std::vector<Transfer> transfers;
      for (const int peer : others()) {
        if (mine.count() > 0) transfers.push_back(send_to(peer, mine));
        if (part(peer).count() > 0) transfers.push_back(receive_from(peer, part(peer)));
      }
      exchange(transfers);
    }
  }

  void reduce_scatter(const Tensor& in, const Tensor& out) {
    const Tensor from = flat(in), to = flat(out);
    if (to.count() == 0) return barrier();
    if (links_->sum_scatter(*call_, from, to, ranks_)) return;
    for (int64_t begin = 0; begin < to.count(); begin += kBlock) {
      const int64_t end = std::min(begin + kBlock, to.count());
      const auto part = [&](int rank) {
        return from.slice(0, rank * to.count() + begin, rank * to.count() + end);
      };
      const Tensor mine = to.slice(0, begin, end);
      mine.copy_from(part(rank_));
      sum_of_parts(mine, part);
    }
  }

  void all_gather(const Tensor& in, const Tensor& out) {
    const Tensor from = flat(in), to = flat(out);
    if (from.count() == 0) return barrier();
    const auto part = [&](int rank) { return to.slice(0, rank * from.count(), (rank + 1) * from.count()); };
    std::vector<Transfer> transfers;
    for (const int peer : others())
      transfers.push_back(send_to(peer, from)), transfers.push_back(receive_from(peer, part(peer)));
    exchange(transfers);
    part(rank_).copy_from(from);
  }

  void broadcast(const Tensor& x, int root) {
    if (x.count() == 0) return barrier();
    // The others send an empty message back, so that the root also learns if a rank makes another call.
    if (rank_ != root) return exchange({empty(Transfer::Direction::send, root), receive_from(root, x)});
    std::vector<Transfer> transfers;
    for (const int peer : others())
      transfers.push_back(send_to(peer, x)), transfers.push_back(empty(Transfer::Direction::receive, peer));
    exchange(transfers);
  }

  void all_to_all(const Tensor& in, const Tensor& out) {
    const Tensor from = flat(in), to = flat(out);
    if (from.count() == 0) return barrier();
    const int64_t each = from.count() / size();
    const auto part = [&](const Tensor& whole, int rank) {
      return whole.slice(0, rank * each, (rank + 1) * each);
    };
    std::vector<Transfer> transfers;
    for (const int peer : others()) {
      transfers.push_back(send_to(peer, part(from, peer)));
      transfers.push_back(receive_from(peer, part(to, peer)));
    }
    exchange(transfers);
    part(to, rank_).copy_from(part(from, rank_));
  }

  /// Exchanges empty messages: a rank returns when it has received one from every other rank.
  void barrier() {
    std::vector<Transfer> transfers;
    for (const int peer : others()) {
      transfers.push_back(empty(Transfer::Direction::send, peer));
      transfers.push_back(empty(Transfer::Direction::receive, peer));
    }
    exchange(transfers);
  }

  std::shared_ptr<Links> links_;
  std::vector<int> ranks_;  // rank of the links by rank of this transport
  int rank_;
  const Call* call_ = nullptr;
};

}  // namespace

std::shared_ptr<Transport> make_host_transport(std::shared_ptr<Links> links) {
  std::vector<int> ranks(size_t(links->size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  const int rank = links->rank();
  return std::make_shared<HostTransport>(std::move(links), std::move(ranks), rank);
}

}  // namespace tessera::comm

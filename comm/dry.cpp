#include "comm/dry.h"

#include <algorithm>

namespace tessera::comm {

struct DryRun::Shared {
  std::mutex mutex;
  std::map<std::string, DryCounts> counts;
};

class DryTransport : public Transport {
 public:
  DryTransport(std::shared_ptr<DryRun::Shared> shared, int rank, int size)
      : shared_(std::move(shared)), rank_(rank), size_(size) {}
  const char* name() const override { return "dry"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool takes(Device) const override { return true; }
  void fail(const std::string&) override {}
  std::shared_ptr<Transport> part(const std::vector<int>& ranks, uint64_t) override {
    const int own = int(std::ranges::find(ranks, rank_) - ranks.begin());
    return std::make_shared<DryTransport>(shared_, own, int(ranks.size()));
  }

  void reduce_parts(const Call& call, const Tensor& x, std::span<const int64_t> ends) override {
    const int64_t own = ends[size_t(rank_)] - (rank_ == 0 ? 0 : ends[size_t(rank_ - 1)]);
    add(call, (x.count() - own) * int64_t(size_of(x.dtype())));
  }
  void share(const Call& call, std::span<const Tensor> tensors, std::span<const int> owners) override {
    int64_t bytes = 0;
    for (size_t i = 0; i < tensors.size(); ++i)
      if (owners[i] == rank_) bytes += (size_ - 1) * int64_t(tensors[i].bytes());
    add(call, bytes);
  }

  void run(const Call& call, const Tensor& in, const Tensor& out) override {
    add(call, bytes_sent(call, in.defined() ? int64_t(in.bytes()) : 0));
    if (call.kind == Kind::all_gather)
      for (int r = 0; r < size_; ++r)
        out.detach().slice(0, r * in.size(0), (r + 1) * in.size(0)).copy_from(in.detach());
    if (call.kind == Kind::all_to_all || call.kind == Kind::reduce_scatter) {
      const int64_t n = in.size(0) / size_;
      const Tensor own = in.detach().slice(0, rank_ * n, (rank_ + 1) * n);
      (call.kind == Kind::reduce_scatter ? out.detach() : out.detach().slice(0, rank_ * n, (rank_ + 1) * n))
          .copy_from(own);
    }
  }

 private:
  void add(const Call& call, int64_t bytes) {
    const std::lock_guard lock(shared_->mutex);
    DryCounts& counts = shared_->counts[name_of(call.kind)];
    counts.calls += 1;
    counts.bytes += bytes;
  }

  int64_t bytes_sent(const Call& call, int64_t given) const {
    const int64_t others = size_ - 1;
    switch (call.kind) {
      case Kind::all_reduce:
        return 2 * others * given / size_;
      case Kind::reduce_scatter:
      case Kind::all_to_all:
        return others * given / size_;
      case Kind::all_gather:
        return others * given;
      case Kind::broadcast:
        return call.peer == rank_ ? others * given : 0;
      case Kind::send:
        return given;
      case Kind::receive:
      case Kind::barrier:
      case Kind::reduce_parts:
      case Kind::share:
        return 0;
    }
    return 0;
  }

  std::shared_ptr<DryRun::Shared> shared_;
  int rank_, size_;
};

DryRun::DryRun(int rank, int size)
    : shared_(std::make_shared<Shared>()),
      communicator_(std::make_shared<DryTransport>(shared_, rank, size)) {
  check(size >= 1 && rank >= 0 && rank < size, "dry run: rank ", rank, " of ", size, " ranks");
}

std::map<std::string, DryCounts> DryRun::counts() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->counts;
}

}  // namespace tessera::comm

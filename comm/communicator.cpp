#include "comm/communicator.h"

#include <algorithm>

#include "comm/status.h"
#include "runtime/call_site.h"

namespace tessera::comm {

struct Communicator::Counts {
  uint64_t id = 0;     // of the communicator
  uint64_t calls = 0;  // sends and receives are not counted: not all ranks make them
  uint64_t splits = 0;
};

namespace {

/// The transport of a communicator of one rank.
class Alone : public Transport {
 public:
  const char* name() const override { return "alone"; }
  int rank() const override { return 0; }
  int size() const override { return 1; }
  bool takes(Device) const override { return true; }
  void run(const Call& call, const Tensor& in, const Tensor& out) override {
    if (in.defined() && out.defined() && in.raw() != out.raw())
      out.detach().reshape({out.count()}).copy_from(in.detach().reshape({in.count()}));
    (void)call;
  }
  void reduce_parts(const Call&, const Tensor&, std::span<const int64_t>) override {}
  void share(const Call&, std::span<const Tensor>, std::span<const int>) override {}
  std::shared_ptr<Transport> part(const std::vector<int>&, uint64_t) override {
    return std::make_shared<Alone>();
  }
  void fail(const std::string&) override {}
};

uint64_t mix(uint64_t a, uint64_t b) {
  uint64_t h = a * 0x9E37'79B9'7F4A'7C15u + b + 1;
  h = (h ^ (h >> 31)) * 0xBF58'476D'1CE4'E5B9u;
  return h ^ (h >> 29);
}

/// For what share and reduce_parts give besides their few sizes: the digest travels as the last size.
void add_to_digest(Call& call, int64_t value) {
  call.sizes.back() = int64_t(mix(uint64_t(call.sizes.back()), uint64_t(value)));
}

Tensor bytes_of(const std::string& text) {
  std::vector<uint8_t> bytes(text.begin(), text.end());
  return Tensor::from(bytes, {int64_t(bytes.size())});
}

}  // namespace

Communicator::Communicator() : Communicator(std::make_shared<Alone>()) {}

Communicator::Communicator(std::shared_ptr<Transport> transport)
    : transport_(std::move(transport)), counts_(std::make_shared<Counts>()) {}

void Communicator::check_tensor(Kind kind, const Tensor& tensor) const {
  check(tensor.defined(), name_of(kind), ": the tensor is undefined");
  check(tensor.layout().is_packed(), name_of(kind), ": ", describe(tensor),
        " is not packed; call packed(), or Tensor::empty_packed to make it");
  check(transport_->takes(tensor.device()), name_of(kind), ": ", describe(tensor), " is on ",
        tensor.device().name(), ", which the transport ", transport(), " does not take",
        tensor.device().is_cpu() ? "; move it to the GPU" : "; GPUs need nccl, or move it to the CPU");
}

Call Communicator::begin(Kind kind, const Tensor& given, int peer) const {
  transport_->check_thread(kind);
  Call call(kind, given, peer);
  call.communicator = counts_->id;
  if (kind != Kind::send && kind != Kind::receive) call.number = ++counts_->calls;
  return call;
}

void Communicator::run(Kind kind, const Tensor& in, const Tensor& out, int peer) const {
  if (out.defined()) out.check_writable(name_of(kind));
  const Call call = begin(kind, in.defined() ? in : out, peer);
  if (size() == 1 && kind == Kind::barrier) return;
  const StatusScope status(call);
  transport_->run(call, in, out);
  if (out.defined()) out.bump_version();
}

namespace {

void check_sum(Kind kind, const Tensor& x) {
  check(is_floating(x.dtype()) && x.dtype() != DType::f8e4m3, name_of(kind), ": ", describe(x),
        " cannot be summed; expected f64, f32, bf16 or f16");
}

const char* bytes_of(const Tensor& packed) {
  return static_cast<const char*>(packed.raw());
}

/// Whether two packed tensors have a byte in common.
bool overlap(const Tensor& a, const Tensor& b) {
  if (!a.shares_storage(b) || a.count() == 0 || b.count() == 0) return false;
  return bytes_of(a) < bytes_of(b) + b.bytes() && bytes_of(b) < bytes_of(a) + a.bytes();
}

void check_parts(Kind kind, const Tensor& whole, const Tensor& part, int size) {
  check(whole.dtype() == part.dtype() && whole.device() == part.device() && whole.rank() >= 1 &&
            part.rank() == whole.rank() && whole.size(0) == part.size(0) * size &&
            whole.count() == part.count() * size,
        name_of(kind), ": ", describe(whole), " is not ", size, " times ", describe(part),
        " along dimension 0, one for each rank");
}

}  // namespace

void Communicator::all_reduce(const Tensor& x, Site site) const {
  const CallScope scope(site);
  check_tensor(Kind::all_reduce, x);
  check_sum(Kind::all_reduce, x);
  run(Kind::all_reduce, x, x);
}

void Communicator::reduce_scatter(const Tensor& in, const Tensor& out, Site site) const {
  const CallScope scope(site);
  check_tensor(Kind::reduce_scatter, in), check_tensor(Kind::reduce_scatter, out);
  check_sum(Kind::reduce_scatter, in);
  check_parts(Kind::reduce_scatter, in, out, size());
  // A rank reads its own part last, and no other rank reads it, so `out` may be that part of `in`.
  check(!overlap(in, out) || bytes_of(out) == bytes_of(in) + size_t(rank()) * out.bytes(),
        "reduce_scatter: ", describe(out), " overlaps ", describe(in), " elsewhere than at this rank's part");
  run(Kind::reduce_scatter, in, out);
}

void Communicator::reduce_parts(const Tensor& x, std::span<const int64_t> ends, Site site) const {
  const CallScope scope(site);
  check_tensor(Kind::reduce_parts, x);
  x.check_writable(name_of(Kind::reduce_parts));
  check_sum(Kind::reduce_parts, x);
  check(x.rank() == 1 && int(ends.size()) == size() && std::ranges::is_sorted(ends) && ends.front() >= 0 &&
            ends.back() == x.count(),
        "reduce_parts: ", describe(x), " in ", ends.size(), " parts; expected one dimension, and ", size(),
        " ends that rise to ", x.count());
  Call call = begin(Kind::reduce_parts, x);
  for (const int64_t end : ends) add_to_digest(call, end);
  const StatusScope status(call);
  transport_->reduce_parts(call, x, ends);
  x.bump_version();
}

void Communicator::share(std::span<const Tensor> tensors, std::span<const int> owners, Site site) const {
  const CallScope scope(site);
  check(tensors.size() == owners.size(), "share: ", tensors.size(), " tensors of ", owners.size(), " owners");
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_tensor(Kind::share, tensors[i]);
    tensors[i].check_writable(name_of(Kind::share));
    check(owners[i] >= 0 && owners[i] < size(), "share: there is no rank ", owners[i], " of ", size());
  }
  Call call = begin(Kind::share, Tensor());
  call.dims = 2;
  call.sizes[0] = int64_t(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    call.sizes[1] += int64_t(tensors[i].bytes());
    add_to_digest(call, owners[i]), add_to_digest(call, int64_t(tensors[i].dtype()));
    for (const int64_t size : tensors[i].shape().sizes()) add_to_digest(call, size);
  }
  const StatusScope status(call);
  transport_->share(call, tensors, owners);
  for (const Tensor& tensor : tensors) tensor.bump_version();
}

void Communicator::all_gather(const Tensor& in, const Tensor& out, Site site) const {
  const CallScope scope(site);
  check_tensor(Kind::all_gather, in), check_tensor(Kind::all_gather, out);
  check_parts(Kind::all_gather, out, in, size());
  // The other parts of `out` are received while `in` is sent.
  check(!overlap(in, out) || bytes_of(in) == bytes_of(out) + size_t(rank()) * in.bytes(),
        "all_gather: ", describe(in), " overlaps ", describe(out), " elsewhere than at this rank's part");
  run(Kind::all_gather, in, out);
}

void Communicator::broadcast(const Tensor& x, int root, Site site) const {
  const CallScope scope(site);
  check_tensor(Kind::broadcast, x);
  check(root >= 0 && root < size(), "broadcast: there is no rank ", root, " of ", size());
  run(Kind::broadcast, x, x, root);
}

void Communicator::all_to_all(const Tensor& in, const Tensor& out, Site site) const {
  const CallScope scope(site);
  check_tensor(Kind::all_to_all, in), check_tensor(Kind::all_to_all, out);
  check(in.dtype() == out.dtype() && in.device() == out.device() && in.shape() == out.shape() &&
            in.rank() >= 1 && in.size(0) % size() == 0,
        "all_to_all: ", describe(in), " to ", describe(out),
        "; expected equal shapes, dtypes and devices, and a first dimension that ", size(), " ranks divide");
  check(size() == 1 || !overlap(in, out), "all_to_all: ", describe(in), " and ", describe(out),
        " overlap; give the result memory of its own");
  run(Kind::all_to_all, in, out);
}

void Communicator::send(const Tensor& x, int to, Site site) const {
  const CallScope scope(site);
  check_tensor(Kind::send, x);
  check(to >= 0 && to < size() && to != rank(), "send: rank ", rank(), " of ", size(),
        " cannot send to rank ", to);
  run(Kind::send, x, Tensor(), to);
}

void Communicator::receive(const Tensor& x, int from, Site site) const {
  const CallScope scope(site);
  check_tensor(Kind::receive, x);
  check(from >= 0 && from < size() && from != rank(), "receive: rank ", rank(), " of ", size(),
        " cannot receive from rank ", from);
  run(Kind::receive, Tensor(), x, from);
}

void Communicator::barrier(Site site) const {
  const CallScope scope(site);
  run(Kind::barrier, Tensor(), Tensor());
}

Communicator Communicator::split(int color, int key, Site site) const {
  const CallScope scope(site);
  const Device device = transport_->device();
  const Tensor all = Tensor::empty_packed({size(), 2}, DType::i64, device);
  all_gather(Tensor::from(std::vector<int64_t>{color, key}, {1, 2}).to(device), all);
  const std::vector<int64_t> values = all.to_vector<int64_t>();
  std::vector<int> ranks;
  for (int r = 0; r < size(); ++r)
    if (values[size_t(2 * r)] == color) ranks.push_back(r);
  std::ranges::stable_sort(ranks, {}, [&](int r) { return values[size_t(2 * r + 1)]; });
  const uint64_t id = mix(mix(counts_->id, ++counts_->splits), uint64_t(color));
  Communicator result(ranks.size() == 1 ? std::make_shared<Alone>() : transport_->part(ranks, id));
  result.counts_->id = id;
  return result;
}

int64_t Communicator::largest(int64_t value, Site site) const {
  const CallScope scope(site);
  if (size() == 1) return value;
  const Tensor all = Tensor::empty_packed({size()}, DType::i64, Device::cpu());
  all_gather(Tensor::from(std::vector<int64_t>{value}, {1}), all);
  return std::ranges::max(all.to_vector<int64_t>());
}

std::vector<std::string> Communicator::gather_texts(const std::string& text, Site site) const {
  const CallScope scope(site);
  constexpr int64_t kMost = 1 << 20;
  check(int64_t(text.size()) <= kMost, "gather_texts: ", text.size(), " bytes; at most ", kMost);
  const int64_t longest = largest(int64_t(text.size()));
  const Tensor sizes = Tensor::empty_packed({size()}, DType::i64, Device::cpu());
  all_gather(Tensor::from(std::vector<int64_t>{int64_t(text.size())}, {1}), sizes);
  std::string padded = text;
  padded.resize(size_t(longest));
  const Tensor all = Tensor::empty_packed({size() * longest}, DType::u8, Device::cpu());
  all_gather(bytes_of(padded), all);
  const std::vector<uint8_t> bytes = all.to_vector<uint8_t>();
  const std::vector<int64_t> lengths = sizes.to_vector<int64_t>();
  std::vector<std::string> texts;
  for (int r = 0; r < size(); ++r) {
    const auto begin = bytes.begin() + r * longest;
    texts.emplace_back(begin, begin + lengths[size_t(r)]);
  }
  return texts;
}

}  // namespace tessera::comm

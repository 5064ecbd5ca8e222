#include "comm/peer_sums.h"

#include <algorithm>
#include <exception>
#include <thread>

#include "comm/peer_memory.h"
#include "comm/status.h"
#include "tensor/kernels.h"

#if defined(TESSERA_WITH_CUDA)
#include <cuda.h>

#include "comm/deadline.h"
#include "runtime/cuda.h"
#include "runtime/device.h"
#endif

namespace tessera::comm {

#if defined(TESSERA_WITH_CUDA)

namespace {

/// Bytes that a rank sets aside for the other's values: ranges of which a rank owns more go in several
/// rounds.
constexpr size_t kReceived = size_t{64} << 20;
/// Parts of a range begin at multiples of so many elements.
constexpr int64_t kElements = 256;

/// After the received values: the other rank sets `arrived` when they are complete and `returned` when it
/// has added its own part, and may be sent further values. A stream waits for a flag and clears it, so that
/// the launches of a graph, which write constants, can use it again. `one` is what is copied to a flag of the
/// other.
enum Flag : size_t { kArrived, kReturned, kOne, kFlags };
constexpr size_t kFlagBytes = 256;  // each on lines of its own

using StreamMemory = CUresult(CUstream, unsigned, CUstreamBatchMemOpParams*, unsigned);
StreamMemory* stream_memory() {
  static StreamMemory* const function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check(cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &found, 12000, cudaEnableDefault, &result));
    return result == cudaDriverEntryPointSuccess ? reinterpret_cast<StreamMemory*>(found) : nullptr;
  }();
  return function;
}

}  // namespace

struct PeerSums::State {
  State(const Communicator& host, const Tensor& arena)
      : other(1 - host.rank()),
        arena(arena),
        received(Tensor::zeros({int64_t(kReceived + kFlags * kFlagBytes) / int64_t(size_of(arena.dtype()))},
                               arena.dtype(), arena.device())),
        arenas(host, arena),
        blocks(host, received),
        done(arena.device()) {
    const Device device = arena.device();
    const unsigned one = 1;
    check(cudaMemcpyAsync(flag(1 - other, kOne), &one, sizeof(one), cudaMemcpyHostToDevice, device.stream()));
    device.synchronize();
    check(cudaStreamCreateWithFlags(&releases, cudaStreamNonBlocking));
    host.barrier();  // the flags are clear
  }
  ~State() {
    try {
      if (std::uncaught_exceptions() > 0) release();
    } catch (const std::exception&) {  // the device has failed: nothing waits on it any more
    }
    cudaStreamDestroy(releases);
  }

  std::byte* flag(int rank, Flag which) const { return blocks.of(rank) + kReceived + which * kFlagBytes; }
  std::byte* arena_at(int rank, int64_t element) const {
    return arenas.of(rank) + element * int64_t(size_of(arena.dtype()));
  }
  cudaStream_t stream() const { return arena.device().stream(); }

  void copy(void* to, const void* from, int64_t elements) const {
    const size_t bytes = size_t(elements) * size_of(arena.dtype());
    if (bytes > 0) check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream()));
  }

  void raise(Flag which) const {
    check(cudaMemcpyAsync(flag(other, which), flag(1 - other, kOne), sizeof(unsigned),
                          cudaMemcpyDeviceToDevice, stream()));
  }

  void wait(Flag which) const {
    const auto address = reinterpret_cast<CUdeviceptr>(flag(1 - other, which));
    CUstreamBatchMemOpParams steps[2] = {};
    steps[0].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    steps[0].waitValue.address = address;
    steps[0].waitValue.value = 1;
    steps[0].waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
    steps[1].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    steps[1].writeValue.address = address;
    steps[1].writeValue.value = 0;
    const CUresult result = stream_memory()(stream(), 2, steps, 0);
    check(result == CUDA_SUCCESS, "peer sums: cuStreamBatchMemOp: CUDA driver error ", int(result));
  }

  /// Elements [begin, middle) of the arena are rank 0's, [middle, end) rank 1's. `returns`: sums go to both.
  void sum(int64_t begin, int64_t middle, int64_t end, bool returns) {
    const int64_t most = int64_t(kReceived / size_of(arena.dtype()));
    int64_t own = begin, theirs = middle, own_left = middle - begin, their_left = end - middle;
    if (other == 0) std::swap(own, theirs), std::swap(own_left, their_left);
    do {
      const int64_t kept = std::min(own_left, most), sent = std::min(their_left, most);
      copy(blocks.of(other), arena_at(1 - other, theirs), sent);
      raise(kArrived);
      wait(kArrived);
      if (kept > 0) {
        accumulate(arena.slice(0, own, own + kept), received.slice(0, 0, kept));
        if (returns) copy(arena_at(other, own), arena_at(1 - other, own), kept);
      }
      raise(kReturned);
      wait(kReturned);
      own += kept, own_left -= kept, theirs += sent, their_left -= sent;
    } while (own_left > 0 || their_left > 0);
    if (!arena.device().capturing()) done.record(stream());  // a graph is launched on the device's own stream
  }

  /// The other rank raises no flag any more: what waits for one goes on.
  void release() const {
    const unsigned one = 1;
    for (const Deadline deadline; !deadline.passed(); std::this_thread::yield()) {
      if (done.done() && is_done(cudaStreamQuery(arena.device().stream()))) return;
      for (const Flag which : {kArrived, kReturned})
        cudaMemcpyAsync(flag(1 - other, which), &one, sizeof(one), cudaMemcpyHostToDevice, releases);
    }
  }

  /// Where `x` begins in the arena.
  int64_t begin_of(const Tensor& x) const {
    const auto* const start = static_cast<const std::byte*>(arena.raw());
    const auto* const own = static_cast<const std::byte*>(x.raw());
    const int64_t begin = (own - start) / int64_t(size_of(arena.dtype()));
    check(x.dtype() == arena.dtype() && x.layout().is_packed() && own >= start &&
              begin + x.count() <= arena.count(),
          "peer sums: ", describe(x), " is not a range of ", describe(arena));
    return begin;
  }

  const int other;  // rank
  const Tensor arena;
  const Tensor received;  // values, then flags
  const PeerMemory arenas, blocks;
  cudaStream_t releases = nullptr;
  Event done;  // of the last call outside a graph; its stream may be gone by then
};

std::string PeerSums::lacks(const Communicator& host, const Tensor& arena) {
  if (host.size() != 2) return "sums over copy engines are of two ranks";
  const std::string reason = PeerMemory::lacks(host, arena.device());
  if (!reason.empty()) return reason;
  return host.largest(stream_memory() ? 0 : 1) ? "the CUDA driver has no cuStreamBatchMemOp" : "";
}

PeerSums::PeerSums(const Communicator& host, const Tensor& arena)
    : state_(std::make_unique<State>(host, arena)) {}
PeerSums::~PeerSums() = default;

void PeerSums::all_reduce(const Tensor& x) const {
  const StatusScope status(Call(Kind::all_reduce, x));
  const int64_t begin = state_->begin_of(x), end = begin + x.count();
  state_->sum(begin, std::min(end, begin + (x.count() / 2 + kElements - 1) / kElements * kElements), end,
              true);
  x.bump_version();
}

void PeerSums::reduce_parts(const Tensor& x, std::span<const int64_t> ends) const {
  const StatusScope status(Call(Kind::reduce_parts, x));
  const int64_t begin = state_->begin_of(x);
  check(ends.size() == 2 && ends[0] >= 0 && ends[0] <= ends[1] && ends[1] == x.count(),
        "reduce_parts: ", describe(x), " in ", ends.size(), " parts; expected two ends that rise to ",
        x.count());
  state_->sum(begin, begin + ends[0], begin + ends[1], false);
  x.bump_version();
}

#else

struct PeerSums::State {};

std::string PeerSums::lacks(const Communicator&, const Tensor&) {
  return "this build has no CUDA";
}
PeerSums::PeerSums(const Communicator&, const Tensor&) {
  fail_at(Site::here(), "peer sums: this build has no CUDA");
}
PeerSums::~PeerSums() = default;
void PeerSums::all_reduce(const Tensor&) const {}
void PeerSums::reduce_parts(const Tensor&, std::span<const int64_t>) const {}

#endif

}  // namespace tessera::comm

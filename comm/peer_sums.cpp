#include "comm/peer_sums.h"

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "comm/peer_memory.h"
#include "comm/status.h"
#include "tensor/kernels.h"

#if defined(TESSERA_WITH_CUDA)
#include <cuda.h>

#include <chrono>

#include "comm/call_check.h"
#include "comm/deadline.h"
#include "comm/ending_internal.h"
#include "runtime/cuda.h"
#include "runtime/device.h"
#include "runtime/integers.h"
#include "runtime/interrupt.h"
#endif

namespace tessera::comm {

#if defined(TESSERA_WITH_CUDA)

namespace {

/// Parts of a range, and the slots of the receive buffer, start at multiples of this many elements.
constexpr int64_t kElements = 256;

/// After the receive buffer: two flags per other rank, set by that rank when its values have arrived here,
/// and when it has returned its sums and may be sent further values. A stream waits for a flag and then
/// clears it, so that a graph, whose launches write constants, can be replayed.
enum Flag : size_t { kArrived, kReturned, kFlags };
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
      : host(host),
        rank(host.rank()),
        ranks(host.size()),
        arena(arena),
        slot(int64_t(kReceived / size_of(arena.dtype())) / (ranks - 1) / kElements * kElements),
        received(Tensor::zeros({int64_t(kReceived + (kFlags * size_t(ranks) + 1) * kFlagBytes) /
                                int64_t(size_of(arena.dtype()))},
                               arena.dtype(), arena.device())),
        arenas(host, arena),
        blocks(host, received),
        done(arena.device()) {
    // From the next rank on, so that not all send to the same one first.
    for (int i = 1; i < ranks; ++i) others.push_back((rank + i) % ranks);
    const Device device = arena.device();
    const unsigned one = 1;
    check(cudaMemcpyAsync(flag_source(), &one, sizeof(one), cudaMemcpyHostToDevice, device.stream()));
    device.synchronize();
    check(cudaStreamCreateWithFlags(&releases, cudaStreamNonBlocking));
    host.barrier();  // the flags are clear
    // Nothing else ends a wait for a rank that has failed, in a graph or not: the host waits for the stream,
    // in calls or in a destructor of the graph.
    host.call_check().on_failure(this, [this] { release(); });
  }
  ~State() {
    const bool together = std::uncaught_exceptions() == 0 && all_end(host);
    host.call_check().forget(this);
    if (!together) {
      release();
      await_idle();
    }
    releasing = {};
    cudaStreamDestroy(releases);
  }

  /// The flag on rank `at` that rank `from` sets.
  std::byte* flag(int at, Flag which, int from) const {
    return blocks.of(at) + kReceived + (which * size_t(ranks) + size_t(from)) * kFlagBytes;
  }
  /// The source of the copies that set flags: a constant 1.
  std::byte* flag_source() const { return flag(rank, kFlags, 0); }
  std::byte* arena_at(int rank, int64_t element) const {
    return arenas.of(rank) + element * int64_t(size_of(arena.dtype()));
  }
  /// On rank `at`, the first element of the memory for the values of `from`.
  int64_t slot_of(int at, int from) const { return (from < at ? from : from - 1) * slot; }
  cudaStream_t stream() const { return arena.device().stream(); }

  void copy(void* to, const void* from, int64_t elements) const {
    const size_t bytes = size_t(elements) * size_of(arena.dtype());
    if (bytes > 0) check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream()));
  }

  void set_flag(Flag which, int at) const {
    check(cudaMemcpyAsync(flag(at, which, rank), flag_source(), sizeof(unsigned), cudaMemcpyDeviceToDevice,
                          stream()));
  }

  /// The stream waits until every other rank has set this flag, then clears it.
  void wait(Flag which) const {
    std::vector<CUstreamBatchMemOpParams> steps(2 * others.size());
    for (size_t i = 0; i < others.size(); ++i) {
      const auto address = reinterpret_cast<CUdeviceptr>(flag(rank, which, others[i]));
      auto& wait = steps[i].waitValue;
      auto& write = steps[others.size() + i].writeValue;
      wait.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
      wait.address = address;
      wait.value = 1;
      wait.flags = CU_STREAM_WAIT_VALUE_EQ;
      write.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
      write.address = address;
      write.value = 0;
    }
    const CUresult result = stream_memory()(stream(), unsigned(steps.size()), steps.data(), 0);
    check(result == CUDA_SUCCESS, "peer sums: cuStreamBatchMemOp: CUDA driver error ", int(result));
  }

  /// Rank r sums elements begin[r] to begin[r + 1] of the arena. `returns`: the sums are then copied to all
  /// ranks.
  void sum(const std::vector<int64_t>& begin, bool returns) {
    int64_t rounds = 1;
    for (int r = 0; r < ranks; ++r)
      rounds = std::max(rounds, ceil_div(begin[size_t(r) + 1] - begin[size_t(r)], slot));
    for (int64_t round = 0; round < rounds; ++round) {
      const auto range_of = [&](int r) {
        const int64_t first = begin[size_t(r)] + round * slot;
        return std::pair(first, std::clamp<int64_t>(begin[size_t(r) + 1] - first, 0, slot));
      };
      for (const int to : others) {
        const auto [first, count] = range_of(to);
        copy(blocks.of(to) + slot_of(to, rank) * int64_t(size_of(arena.dtype())), arena_at(rank, first),
             count);
        set_flag(kArrived, to);
      }
      wait(kArrived);
      const auto [first, count] = range_of(rank);
      if (count > 0) add_received(arena.slice(0, first, first + count));
      for (const int to : others) {
        if (returns) copy(arena_at(to, first), arena_at(rank, first), count);
        set_flag(kReturned, to);
      }
      wait(kReturned);
    }
    if (!arena.device().capturing()) done.record(stream());  // a graph is launched on the device's own stream
  }

  /// own = the sum over all ranks by the tree of Communicator. Addition is commutative: `own` takes the place
  /// of the partial sum that it is added to, so that the result is in `own`.
  void add_received(const Tensor& own) const {
    std::vector<Tensor> parts;
    for (int r = 0; r < ranks; ++r) {
      const int64_t first = slot_of(rank, r);
      parts.push_back(r == rank ? own : received.slice(0, first, first + own.count()));
    }
    size_t mine = size_t(rank);
    for (size_t step = 1; step < parts.size(); step *= 2)
      for (size_t i = 0; i + step < parts.size(); i += 2 * step) {
        if (i + step == mine) std::swap(parts[mine], parts[i]), mine = i;
        accumulate(parts[i], parts[i + step]);
      }
  }

  /// From now on a thread sets the flags that other ranks may not set any more.
  void release() {
    if (releasing.joinable()) return;
    const WithoutSignals scope;
    releasing = std::jthread([this](const std::stop_token& stop) { set_flags(stop); });
  }
  /// Again and again: a stream clears them, and waits for those of the next round.
  void set_flags(const std::stop_token& stop) const {
    const unsigned one = 1;
    cudaError_t state = cudaSetDevice(arena.device().index());
    while (!stop.stop_requested() && (state == cudaSuccess || state == cudaErrorNotReady)) {
      if (state == cudaSuccess)
        for (const Flag which : {kArrived, kReturned})
          for (const int from : others)
            cudaMemcpyAsync(flag(rank, which, from), &one, sizeof(one), cudaMemcpyHostToDevice, releases);
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      state = cudaStreamQuery(releases);
    }
  }
  void await_idle() const noexcept try {
    for (const Deadline deadline; !deadline.passed(); std::this_thread::yield())
      if (done.done() && is_done(cudaStreamQuery(arena.device().stream()))) return;
  } catch (const std::exception&) {  // the device has failed: nothing waits on it any more
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

  const Communicator host;
  const int rank, ranks;
  std::vector<int> others;
  const Tensor arena;
  const int64_t slot;     // elements per slot, that is received from a rank per round
  const Tensor received;  // values, then flags
  const PeerMemory arenas, blocks;
  cudaStream_t releases = nullptr;
  Event done;  // of the last call outside a graph; its stream may be gone by then
  std::jthread releasing;
};

std::string PeerSums::lacks(const Communicator& host, Device device) {
  const std::string reason = PeerMemory::lacks(host, device);
  if (!reason.empty()) return reason;
  return host.largest(stream_memory() ? 0 : 1) ? "the CUDA driver has no cuStreamBatchMemOp" : "";
}

PeerSums::PeerSums(const Communicator& host, const Tensor& arena)
    : state_(std::make_unique<State>(host, arena)) {}
PeerSums::~PeerSums() = default;

void PeerSums::all_reduce(const Tensor& x) const {
  const StatusScope status(Call(Kind::all_reduce, x));
  const int64_t begin = state_->begin_of(x), ranks = state_->ranks;
  const int64_t part = ceil_div(x.count(), ranks * kElements) * kElements;
  std::vector<int64_t> bounds;
  for (int64_t r = 0; r <= ranks; ++r) bounds.push_back(begin + std::min(r * part, x.count()));
  state_->sum(bounds, true);
  x.bump_version();
}

void PeerSums::reduce_parts(const Tensor& x, std::span<const int64_t> ends) const {
  const StatusScope status(Call(Kind::reduce_parts, x));
  std::vector<int64_t> bounds{0};
  bounds.insert(bounds.end(), ends.begin(), ends.end());
  check(bounds.size() == size_t(state_->ranks) + 1 && std::ranges::is_sorted(bounds) &&
            bounds.back() == x.count(),
        "reduce_parts: ", describe(x), " in ", ends.size(), " parts; expected ", state_->ranks,
        " ends that rise to ", x.count());
  for (int64_t& bound : bounds) bound += state_->begin_of(x);
  state_->sum(bounds, false);
  x.bump_version();
}

#else

struct PeerSums::State {};

std::string PeerSums::lacks(const Communicator&, Device) {
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

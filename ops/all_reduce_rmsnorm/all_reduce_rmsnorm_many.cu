#include <algorithm>

#include "ops/all_reduce_rmsnorm/all_reduce_rmsnorm_kernels.h"
#include "ops/all_reduce_rmsnorm/all_reduce_rmsnorm_row.cuh"

/// The sum over ranks of a whole prompt.
///
/// Algorithm. Blocks that stay walk the rows: block b has rows b, b + G, b + 2 G, ... of a grid of G, two of
/// which fit on an SM. A row is stored to the other ranks' memory as it is, 16 bytes per thread; one thread
/// then writes the row's flag there with release. Two rows later the block waits for the other ranks' flags
/// of the first, adds the shares in the order of the ranks, and normalises. So the links are busy while
/// earlier rows are added, and the time of a flag to arrive is hidden by the rows between.
///
/// Bytes. Of 2,048 rows of 4,096 f16 elements 16.8 MB leave each of two ranks: 35 us at the 478 GB/s of a
/// direction of the links of two H200. Meanwhile the GPU's own memory reads share, residual and what came,
/// and writes what came, sum and y: 101 MB, 24 us at 4.28 TB/s if none of it stays in the L2 cache. The links
/// bound it: predicted are 45 us, where NCCL's all-reduce of 16 MiB takes 78 us and the norm after it 20
/// (both measured, the latter as part of a step). R ranks send (R - 1) times the bytes, where a
/// reduce-scatter and an all-gather would send 2 (R - 1) / R of them: for more than two ranks this is the
/// wrong algorithm, but it is not worse than NCCL by more than R / 2 on links without a switch. None of this
/// was measured yet.
///
/// A block waits for the block of the same index on other ranks only, and has sent a row before it waits for
/// it. All blocks of the grid are resident, since it has no more of them than fit on the SMs that kernels
/// plan for.

namespace tessera::ops {
namespace {

using gpu::kPackOf;
using gpu::Words;
using peer::Rows;

constexpr int kAhead = 2;
/// Of rows of so many 16-byte words per thread: more than two take too many registers for two blocks.
template <int kSteps>
constexpr int kBlocksPerSm = kSteps <= 2 ? 2 : 1;

/// st.release.sys and ld.acquire.sys ("st", "ld") of 32 bits.
__device__ __forceinline__ void store_release_sys(uint32_t* to, uint32_t value) {
  asm volatile("st.release.sys.global.b32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire_sys(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

/// Sends this rank's share of a row to all others. All threads of the block call it.
template <int kSteps, class T>
__device__ __forceinline__ void send_row(const PeerRows& peers, const peer::RowArgs<T>& args, int64_t row) {
  const int thread = int(threadIdx.x);
  const uint32_t count = peers.counts[row] + 1;
  Words<T> own[kSteps];
  Rows::load(own, args.share + row * args.share_stride, thread, args.width);
  for (int i = 1; i < peers.ranks; ++i) {
    const int other = peers.rank + i < peers.ranks ? peers.rank + i : peers.rank + i - peers.ranks;
    T* const to = reinterpret_cast<T*>(peers.memory[other] + peers.at(count, peers.rank, row));
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
      if (const int first = peer::column_of<T, kPeerThreads>(s, thread); first < args.width)
        gpu::store_words(to + first, own[s]);  // whole words: past the row's end zeros
  }
  __syncthreads();  // what the block has stored, the release of one thread covers
  if (thread == 0)
    for (int r = 0; r < peers.ranks; ++r)
      if (r != peers.rank) store_release_sys(peers.flags[r] + peers.flag_at(count, peers.rank, row), count);
}

/// Waits for a row of all other ranks. All threads of the block call it; false if one did not come in time.
__device__ __forceinline__ bool await_row(const PeerRows& peers, int64_t row, uint32_t count) {
  constexpr uint32_t kPolls = 256;  // between two looks at the clock
  const int from = int(threadIdx.x);
  bool here = true;
  if (from < peers.ranks && from != peers.rank) {
    const uint32_t* const flag = peers.flags[peers.rank] + peers.flag_at(count, from, row);
    const bool waits = *peers.lost == 0;
    uint64_t begin = 0;
    for (uint32_t polls = 1; load_acquire_sys(flag) != count; ++polls) {
      if (!waits) {  // an earlier wait has told the host
        here = false;
        break;
      }
      if (polls % kPolls != 0 || peers.patience_ns == 0) continue;
      const uint64_t now = peer::nanoseconds();
      if (begin == 0) begin = now;
      if (now - begin < peers.patience_ns) continue;
      *peers.lost = 1;
      asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(peers.report), "r"(from + 1) : "memory");
      here = false;
      break;
    }
  }
  return __syncthreads_and(here) != 0;
}

template <class T, int kSteps>
__global__ void __launch_bounds__(kPeerThreads, kBlocksPerSm<kSteps>)
    sum_many_rows(const __grid_constant__ PeerRows peers, const __grid_constant__ peer::RowArgs<T> args) {
  __shared__ float scratch[peer::Sums::kScratch];
  peer::Sums add(scratch);
  gpu::wait_and_launch_dependents();
  const int thread = int(threadIdx.x);
  const int64_t step = gridDim.x;
  for (int64_t row = blockIdx.x; row < args.rows + kAhead * step; row += step) {
    if (row < args.rows) send_row<kSteps>(peers, args, row);
    const int64_t done = row - kAhead * step;
    if (done < 0) continue;
    const uint32_t count = peers.counts[done] + 1;
    const bool whole = await_row(peers, done, count);

    Words<T> residual[kSteps];
    Rows::load_vector(residual, args.residual(done), 0.0f, thread, args.width);
    float total[kSteps][kPackOf<T>] = {};
    for (int r = 0; r < peers.ranks; ++r) {
      Words<T> share[kSteps];
      const T* const from =
          r == peers.rank ? args.share + done * args.share_stride
                          : reinterpret_cast<const T*>(peers.memory[peers.rank] + peers.at(count, r, done));
      Rows::load(share, from, thread, args.width);
      peer::add_share<T>(total, share);
    }
    Words<T> weight[kSteps];
    Rows::load(weight, args.weight, thread, args.width);
    peer::finish_row<T>(args, done, total, residual, weight, whole, add);
    if (thread == 0) peers.counts[done] = count;  // all threads have read it: finish_row has a barrier
  }
}

}  // namespace

void all_reduce_rmsnorm_rows_cuda(const PeerRows& rows, const Tensor& y, const Tensor& sum, const Tensor& x,
                                  const Tensor& share, const Tensor& weight, double eps) {
  dispatch_floating_cuda(share.dtype(), "all_reduce_rmsnorm", [&]<class T>() {
    const Device device = share.device();
    const int64_t count = share.size(0);
    for (int64_t begin = 0; begin < count; begin += rows.rows) {
      const int64_t end = std::min<int64_t>(begin + rows.rows, count);
      const auto part = [&](const Tensor& all) {
        return all.defined() ? all.detach().slice(0, begin, end) : all;
      };
      const auto args = peer::row_args<T>(part(y), part(sum), part(x), part(share), weight, eps);
      peer::with_steps<T>(args.width, [&]<int kSteps>() {
        const int64_t blocks =
            std::min<int64_t>(args.rows, int64_t(device.multiprocessors()) * kBlocksPerSm<kSteps>);
        gpu::launch_dependent(device, {dim3(unsigned(blocks)), kPeerThreads}, sum_many_rows<T, kSteps>, rows,
                              args);
      });
    }
  });
}

}  // namespace tessera::ops

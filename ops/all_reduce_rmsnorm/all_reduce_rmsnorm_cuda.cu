#include "ops/all_reduce_rmsnorm/all_reduce_rmsnorm_kernels.h"
#include "ops/all_reduce_rmsnorm/all_reduce_rmsnorm_row.cuh"

/// The sum over ranks between two linear layers of a token's step, over NVLink.
///
/// Algorithm. A block makes one row. It loads its rank's share, sends it to all other ranks
/// (peer_channels.h), loads the residual and the norm's weight while the messages travel, receives the shares
/// of the others, adds all in the order of the ranks, rounds the sum, and normalises it from registers.
/// Every rank sends its whole share to all others ("one shot"): with few rows that is one way over the links,
/// where a reduce-scatter and an all-gather would be two.
///
/// Bytes. A row of 4,096 f16 elements is 8 KiB, and 16 KiB on a link with the calls' numbers; (R - 1) of them
/// leave each of R ranks. At 478 GB/s that is 0.034 us: the time is latency alone. One way from a store on
/// one GPU to a load that sees it on another is taken to be 1 to 1.5 us, to which come the loads of the share
/// (0.6 us), the sum of squares of the block (0.3 us) and the stores: predicted are 3 us for the kernel, of
/// which the next kernel's launch and the prefetch of its weights hide a part (programmatic dependent
/// launch). What it replaces is NCCL's all-reduce, 7 to 8 us within a graph for these sizes, and the kernel
/// of the norm, 2.6 us. None of these was measured for this kernel yet.
///
/// Blocks wait for the blocks of the same index on other ranks only, never for others of their own grid, and
/// send before they wait. A grid has at most 8 blocks, or 192 where columns are gathered, two of which fit on
/// an SM: the variants ask for as many SMs as let all of a grid run at once.
///
/// all_gather_columns is the same exchange without a sum: a block has 512 words of 16 bytes of one row of
/// each rank. 16,000 f16 logits are 32 KB from each rank, 64 KB on the link: 0.13 us, and again the latency
/// counts.

namespace tessera::ops {
namespace {

using gpu::ceil_div;
using gpu::kPackOf;
using gpu::Words;
using peer::Channel;
using peer::Rows;

template <class T, int kSteps>
__global__ void __launch_bounds__(kPeerThreads)
    sum_rows(const __grid_constant__ PeerChannels channels, const __grid_constant__ peer::RowArgs<T> args) {
  __shared__ float scratch[peer::Sums::kScratch];
  peer::Sums add(scratch);
  gpu::wait_and_launch_dependents();
  const int64_t row = blockIdx.x;
  const int thread = int(threadIdx.x), width = args.width;
  const Channel channel(channels, row);

  // Send this rank's share.
  Words<T> own[kSteps];
  Rows::load(own, args.share + row * args.share_stride, thread, width);
  channel.send(own, thread, width);

  // Residual and weight, while the messages travel.
  Words<T> residual[kSteps], weight[kSteps];
  constexpr bool kWeightAhead = kSteps <= 2;  // of longer rows it would take registers that are not there
  Rows::load_vector(residual, args.residual(row), 0.0f, thread, width);
  if constexpr (kWeightAhead) Rows::load(weight, args.weight, thread, width);

  // Shares in the order of the ranks.
  float total[kSteps][kPackOf<T>] = {};
  bool whole = true;
  for (int r = 0; r < channels.ranks; ++r) {
    if (r == channels.rank) {
      peer::add_share<T>(total, own);
      continue;
    }
    Words<T> share[kSteps];
    whole = channel.receive(share, r, thread, width) && whole;
    peer::add_share<T>(total, share);
  }
  if constexpr (!kWeightAhead) Rows::load(weight, args.weight, thread, width);
  peer::finish_row<T>(args, row, total, residual, weight, whole, add);
  channel.finish();  // after the barrier of the sum of squares: all threads have read the channel's count
}

template <class T>
struct GatherArgs {
  PeerChannels channels;
  T* y;
  const T* part;
  int64_t y_stride, part_stride;
  int32_t width, columns;  // of a part, of y
};

template <class T>
__global__ void __launch_bounds__(kPeerThreads, kColumnBlocksPerSm)
    all_gather_columns_rows(const __grid_constant__ GatherArgs<T> args) {
  constexpr int kPack = kPackOf<T>;
  gpu::wait_and_launch_dependents();
  const int64_t row = blockIdx.y;
  const int thread = int(threadIdx.x), first = int(blockIdx.x) * kPeerThreads * kPack,
            width = args.width - first, column = thread * kPack;
  const Channel channel(args.channels, row * gridDim.x + blockIdx.x);
  Words<T> own[1] = {};
  if (column < width) own[0] = gpu::load_words(args.part + row * args.part_stride + first + column);
  channel.send(own, thread, width);
  T* const y = args.y + row * args.y_stride;
  for (int i = 0; i < args.channels.ranks; ++i) {
    const int r = (args.channels.rank + i) % args.channels.ranks;  // its own first
    Words<T> words[1] = {own[0]};
    if (i > 0 && !channel.receive(words, r, thread, width)) {
      float values[kPack];
#pragma unroll
      for (int k = 0; k < kPack; ++k) values[k] = __int_as_float(0x7FC00000);
      words[0] = gpu::round_to_words<T>(values);
    }
    const int at = r * args.width + first + column, inside = min(args.columns - at, kPack);
    if (column >= width || inside <= 0) continue;
    if (inside == kPack) {
      gpu::store_words(y + at, words[0]);
    } else {
      gpu::store_part(y + at, words[0], inside);
    }
  }
  __syncthreads();  // all threads have read the channel's count
  channel.finish();
}

}  // namespace

void all_reduce_rmsnorm_cuda(const PeerChannels& channels, const Tensor& y, const Tensor& sum,
                             const Tensor& x, const Tensor& share, const Tensor& weight, double eps) {
  dispatch_floating_cuda(share.dtype(), "all_reduce_rmsnorm", [&]<class T>() {
    const auto args = peer::row_args<T>(y, sum, x, share, weight, eps);
    peer::with_steps<T>(args.width, [&]<int kSteps>() {
      gpu::launch_dependent(share.device(), {dim3(unsigned(args.rows)), kPeerThreads}, sum_rows<T, kSteps>,
                            channels, args);
    });
  });
}

void all_gather_columns_cuda(const PeerChannels& channels, const Tensor& y, const Tensor& part) {
  dispatch_floating_cuda(part.dtype(), "all_gather_columns", [&]<class T>() {
    const GatherArgs<T> args{.channels = channels,
                             .y = y.data<T>(),
                             .part = part.data<T>(),
                             .y_stride = y.row_stride(),
                             .part_stride = part.row_stride(),
                             .width = int32_t(part.size(1)),
                             .columns = int32_t(y.size(1))};
    const dim3 grid(unsigned(ceil_div(part.size(1), kPeerThreads * kPackOf<T>)), unsigned(part.size(0)));
    gpu::launch_dependent(part.device(), {grid, kPeerThreads}, all_gather_columns_rows<T>, args);
  });
}

}  // namespace tessera::ops

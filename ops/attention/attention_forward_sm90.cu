#include "ops/attention/attention_forward_sm90.cuh"
#include "ops/attention/attention_variants.h"

namespace tessera::ops {
namespace {

/// Clears the ticket counter from which the kernel for packed sequences takes its tiles.
__global__ void attention_clear_kernel(int* ticket) {
  gpu::launch_dependents();
  gpu::grid_dependency_wait();
  *ticket = 0;
}

/// Slices of a head's columns when partial results are combined: few tiles may have many of them, and the
/// latency of their loads adds up.
constexpr int kSlices = 4;

/// Combines the partial results of a split tile: one block per tile, warpgroup and slice of the columns; each
/// thread combines the elements that the thread of the same index stored.
template <class T, class Shape>
__global__ void __launch_bounds__(128) attention_combine_kernel(ForwardSm90<T> args) {
  gpu::grid_dependency_wait();
  const AttentionSchedule& schedule = args.schedule;
  constexpr int kChunks = Shape::kD / 8 / kSlices;
  const int slice = int(blockIdx.x) % kSlices, group = int(blockIdx.x) / kSlices % Shape::kGroups,
            tile_of_rest = int(blockIdx.x) / kSlices / Shape::kGroups;
  const AttentionSplits pieces(schedule, tile_of_rest / schedule.tiles_of_job(),
                               tile_of_rest % schedule.tiles_of_job());
  if (pieces.none && !pieces.blind) return;
  const int first_block = pieces.first, last_block = pieces.none ? pieces.first - 1 : pieces.last;
  const int head_row = pieces.head_row, tile = pieces.tile;
  const int warp = group * 4 + int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const int row = warp * 16 + lane / 4;
  if (tile * Shape::kRows + warp * 16 >= schedule.queries) return;  // padding rows have no partial results
  const auto split_at = [&](int block) {
    return args.partial + pieces.split_of(schedule, block) * Shape::kSplitFloats;
  };
  float base[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
#pragma unroll 4
  for (int block = first_block; block <= last_block; ++block) {
    const float* const statistics = split_at(block) + Shape::kRows * Shape::kD;
    for (int half = 0; half < 2; ++half) base[half] = fmaxf(base[half], statistics[row + 8 * half]);
  }
  float acc[4 * kChunks] = {};
#pragma unroll 4
  for (int block = first_block; block <= last_block; ++block) {
    const float* const piece = split_at(block);
    const float* const statistics = piece + Shape::kRows * Shape::kD;
    float factor[2];
    for (int half = 0; half < 2; ++half) {
      const float own = statistics[row + 8 * half];
      factor[half] = own == -INFINITY ? 0.0f : exp2f(own - base[half]);
      sum[half] = fmaf(statistics[Shape::kRows + row + 8 * half], factor[half], sum[half]);
    }
    const float4* const from =
        reinterpret_cast<const float4*>(piece) + (warp * (Shape::kD / 8) + slice * kChunks) * 32 + lane;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const float4 x = from[j * 32];
      acc[4 * j] = fmaf(x.x, factor[0], acc[4 * j]);
      acc[4 * j + 1] = fmaf(x.y, factor[0], acc[4 * j + 1]);
      acc[4 * j + 2] = fmaf(x.z, factor[1], acc[4 * j + 2]);
      acc[4 * j + 3] = fmaf(x.w, factor[1], acc[4 * j + 3]);
    }
  }
  for (int half = 0; half < 2; ++half) {
    const int query = tile * Shape::kRows + row + 8 * half;
    if (query >= schedule.queries) continue;
    float inverse = sum[half] == 0 ? 0.0f : 1 / sum[half];
    if constexpr (Shape::kDrops) inverse *= args.drop.scale / 2;
    if (slice == 0 && lane % 4 == 0)
      args.lse[head_row * args.lse_stride + query] =
          sum[half] == 0 ? -INFINITY : fmaf(base[half], 0.693147180559945f, logf(sum[half]));
    T* const to = args.o.at(head_row / args.heads, head_row % args.heads, query) + slice * kChunks * 8;
#pragma unroll
    for (int j = 0; j < kChunks; ++j)
      if (8 * (slice * kChunks + j) < args.dim)
        *reinterpret_cast<uint32_t*>(to + 8 * j + lane % 4 * 2) =
            gpu::pack_halves<T>(acc[4 * j + 2 * half] * inverse, acc[4 * j + 2 * half + 1] * inverse);
  }
}

template <class T, class Shape>
void launch_forward(const Tensor& o, const Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                    const AttentionProblem& problem) {
  constexpr double kLog2E = 1.44269504088896340736;
  const Device device = q.device();
  ForwardSm90<T> args{};
  args.seqlens = cu_seqlens(problem, q, k);
  const bool packed = problem.packed();
  const int64_t heads = q.size(0) * q.size(2), tiles = args.seqlens.slots(q.size(1), Shape::kRows);
  check(heads * tiles <= int64_t{0x3FFFFFFF}, "attention: ", describe(q), " has ", heads * tiles,
        " tiles; expected at most 2^30 - 1 (split the batch)");
  const int64_t grid = device.multiprocessors();
  int64_t blocks = std::min(grid, heads * tiles);
  Tensor pieces, ticket;
  if (packed) {
    ticket = Tensor::empty({1}, DType::i32, device);
    args.ticket = ticket.data<int32_t>();
    gpu::launch(device, {dim3(1), dim3(1), 0, 1, true}, attention_clear_kernel, args.ticket);
    // As many heads as give every block a tile of a sequence of mean length; those of a key head stay
    // together.
    const int64_t mean = gpu::ceil_div(q.size(1), std::max(1, args.seqlens.count) * int64_t{Shape::kRows});
    const int64_t group = q.size(2) / k.size(2);
    args.heads_at_once = int(
        std::min(q.size(2), gpu::ceil_div(gpu::ceil_div(grid, std::max<int64_t>(1, mean)), group) * group));
    // Where most slots are empty or nearly so, tickets dominate the time: then a ticket covers several heads,
    // as long as each block takes eight tickets.
    args.ticket_heads = 1;
    if (args.seqlens.count >= 32 && q.size(1) < args.seqlens.count * int64_t{Shape::kRows} / 3)
      args.ticket_heads = int(std::clamp<int64_t>(tiles * q.size(2) / (8 * grid), 1, args.heads_at_once));
  } else {
    args.schedule =
        attention_schedule(q.size(1), k.size(1), heads, problem.causal, Shape::kRows, Shape::kKeys, grid);
    blocks = args.schedule.rest() > 0 ? grid : std::min<int64_t>(grid, args.schedule.whole);
  }
  const bool cut = !packed && args.schedule.rest() > 0;
  if (cut) {
    pieces = Tensor::empty_packed({blocks * kSplitsPerBlock, Shape::kSplitFloats}, DType::f32, device);
    args.partial = pieces.data<float>();
  }
  args.o = head_rows<T>(o);
  args.lse = lse.data<float>();
  args.lse_stride = lse.row_stride();
  args.heads = int(q.size(2));
  args.group = args.heads / int(k.size(2));
  args.dim = int(q.size(3));
  args.causal = problem.causal;
  args.scale2 = float(problem.scale * kLog2E);
  args.drop = problem.drop;
  gpu::launch(device, {dim3(unsigned(blocks)), dim3(Shape::kThreads), Shape::kSharedBytes, 1, true},
              attention_forward_sm90_kernel<T, Shape>, head_map<T>(q, 64), head_map<T>(k, Shape::kKeys),
              head_map<T>(v, Shape::kKeys), head_map<T>(o, 16), args);
  if (cut)
    gpu::launch(
        device,
        {dim3(unsigned(args.schedule.rest() * args.schedule.tiles_of_job() * Shape::kGroups * kSlices)),
         dim3(128), 0, 1, true},
        attention_combine_kernel<T, Shape>, args);
}

}  // namespace

void attention_forward_wgmma_cuda(const Tensor& o, const Tensor& lse, const Tensor& q, const Tensor& k,
                                  const Tensor& v, const AttentionProblem& problem) {
  if (k.size(1) <= kShortKeys && !problem.packed() && !problem.drop.drops())
    return attention_short_sm90(o, lse, q, k, v, problem);
  dispatch_floating_cuda(q.dtype(), "attention", [&]<class T>() {
    if constexpr (!std::is_same_v<T, float>) {
      const auto run = [&]<class Shape>() { launch_forward<T, Shape>(o, lse, q, k, v, problem); };
      const bool narrow = q.size(3) <= 64, drops = problem.drop.drops();
      if (narrow && drops) return run.template operator()<ForwardShape<64, 128, 2, true>>();
      if (narrow) return run.template operator()<ForwardShape<64, 128, 2>>();
      if (drops) return run.template operator()<ForwardShape<128, 64, 2, true>>();
      run.template operator()<ForwardShape<128, 80, 2>>();
    }
  });
}

}  // namespace tessera::ops

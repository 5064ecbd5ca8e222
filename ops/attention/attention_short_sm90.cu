#include "gpu/approx.cuh"
#include "gpu/dependent_launch.cuh"
#include "ops/attention/attention_sm90.cuh"
#include "ops/attention/attention_variants.h"

/// Forward for few keys (up to 128), sm_90a. All keys of a head are one tile, so the softmax is not online: S
/// = Q K^T, maximum, exponentials, O = P V, once. At (Lq, Lk) = (564, 64) a query costs 2 x 128 bytes of Q
/// and O but only 64 scores, so the kernel is a copy that hides some arithmetic: bound by the bytes of Q and
/// O, then by latency.
///
/// A block owns some tokens and some heads of one batch element. K and V of its heads stay in shared memory.
/// One thread streams 64-token tiles of Q, all heads of the same tokens before the next (they are adjacent in
/// memory, so DRAM pages are read whole), into multistage pipelines, one per consumer warpgroup. O replaces Q
/// in its stage and is TMA-stored from there, which frees the stage. Each warp stores its own 16 rows, so
/// that a block's tokens need only be a multiple of 16, and the work divides evenly.

namespace tessera::ops {
namespace {

using enum gpu::TileOrder;

struct ShortArgs {
  float* lse;
  int64_t lse_stride;
  int heads, group, queries, keys;  // group: query heads that read one key head
  int head_groups, splits, tokens;  // blocks: batch x head group x split of `tokens` tokens
  bool causal;
  float scale2;  // scale * log2(e)

  __device__ __forceinline__ int key_limit(int i) const {
    return causal ? max(0, min(keys, i + 1 + keys - queries)) : keys;
  }
};

/// Head size and keys in shared memory, consumer warpgroups, resident heads, stages of each warpgroup.
template <int kHead, int kKeyRows, int kWarpgroups, int kResident, int kRing>
struct ShortShape {
  static constexpr int kD = kHead, kKeys = kKeyRows, kGroups = kWarpgroups, kHeads = kResident,
                       kSlots = kRing;
  static constexpr int kThreads = kGroups * 128 + 32;
  static constexpr int kKeyBytes = kKeys * kD * 2, kSlotBytes = 64 * kD * 2;
  static constexpr int kSlotOffset = kHeads * 2 * kKeyBytes,
                       kBarrierOffset = kSlotOffset + kGroups * kSlots * kSlotBytes,
                       kSharedBytes = kBarrierOffset + (kHeads + 2 * kGroups * kSlots) * 8;
  static_assert(kSharedBytes <= 227 * 1024 && kSlots >= 2);
};

/// The block's tokens and heads.
struct ShortBlock {
  int b, first_head, heads, begin, end;

  __device__ __forceinline__ ShortBlock(const ShortArgs& args, int most_heads) {
    const int unit = int(blockIdx.x), batch_unit = unit / args.splits;
    b = batch_unit / args.head_groups;
    first_head = batch_unit % args.head_groups * most_heads;
    heads = min(most_heads, args.heads - first_head);
    begin = unit % args.splits * args.tokens;
    end = min(args.queries, begin + args.tokens);
  }
};

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    attention_short_kernel(const __grid_constant__ gpu::TensorMap q_map,
                           const __grid_constant__ gpu::TensorMap k_map,
                           const __grid_constant__ gpu::TensorMap v_map,
                           const __grid_constant__ gpu::TensorMap o_map,
                           const __grid_constant__ ShortArgs args) {
  constexpr int kD = Shape::kD, kKeys = Shape::kKeys, kGroups = Shape::kGroups, kSlots = Shape::kSlots;
  using QueryTile = HeadTile<T, 64, kD>;
  using KeyTile = HeadTile<T, kKeys, kD>;
  extern __shared__ __align__(1024) char shared[];
  auto* const keys_full = reinterpret_cast<gpu::Barrier*>(shared + Shape::kBarrierOffset);
  auto* const rings = reinterpret_cast<gpu::Ring<kSlots>*>(keys_full + Shape::kHeads);

  const int warp = gpu::uniform(int(threadIdx.x) / 32), lane = int(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    gpu::prefetch_map(q_map);
    gpu::prefetch_map(k_map);
    gpu::prefetch_map(v_map);
    gpu::prefetch_map(o_map);
    for (int head = 0; head < Shape::kHeads; ++head) keys_full[head].init(1);
    for (int group = 0; group < kGroups; ++group) rings[group].init(1, 4);
    gpu::fence_barrier_init();
  }
  __syncthreads();
  gpu::wait_and_launch_dependents();

  const ShortBlock block(args, Shape::kHeads);
  if (warp == 4 * kGroups) {  // the producer
    if (!gpu::elect_one()) return;
    gpu::RingState<kSlots> state;
    int item = 0;
    for (int first = block.begin; first < block.end; first += 64) {
      const int parts = min(4, int(gpu::ceil_div(block.end - first, 16)));  // boxes of 16 tokens
      for (int head = 0; head < block.heads; ++head) {
        if (first == block.begin) {
          keys_full[head].arrive_expect(2 * Shape::kKeyBytes);
          char* const keys = shared + head * 2 * Shape::kKeyBytes;
          const int kv_head = (block.first_head + head) / args.group;
          KeyTile::load(keys, k_map, keys_full[head], 0, kv_head, block.b);
          KeyTile::load(keys + Shape::kKeyBytes, v_map, keys_full[head], 0, kv_head, block.b);
        }
        const int group = item % kGroups;
        gpu::Ring<kSlots>& ring = rings[group];
        ring.empty[state.stage].wait(state.parity ^ 1);
        ring.full[state.stage].arrive_expect(uint32_t(parts * (Shape::kSlotBytes / 4)));
        char* const slot = shared + Shape::kSlotOffset + (group * kSlots + state.stage) * Shape::kSlotBytes;
        for (int part = 0; part < parts; ++part)
#pragma unroll
          for (int box = 0; box < QueryTile::kBoxes; ++box)
            gpu::tma_load(slot + box * QueryTile::kBoxBytes + part * 16 * 128, q_map, ring.full[state.stage],
                          box * kBoxWidth, first + part * 16, block.first_head + head, block.b);
        if (group == kGroups - 1) state.advance();
        ++item;
      }
    }
    return;
  }

  const int group = warp / 4, warp_row = warp % 4 * 16;
  gpu::Ring<kSlots>& ring = rings[group];
  gpu::RingState<kSlots> state;
  int previous = -1;  // the stage whose store may still be reading it
  int head = group, first = block.begin;
  for (;; head += kGroups) {
    for (; head >= block.heads; head -= block.heads) first += 64;
    if (first >= block.end) break;
    char* const slot = shared + Shape::kSlotOffset + (group * kSlots + state.stage) * Shape::kSlotBytes;
    const uint32_t keys = gpu::shared_address(shared) + head * 2 * Shape::kKeyBytes;
    float s[kKeys / 2];
    keys_full[head].wait(0);
    ring.full[state.stage].wait(state.parity);
    const uint64_t q_tile = gpu::tile_descriptor<k_major>(gpu::shared_address(slot));
    const uint64_t k_tile = gpu::tile_descriptor<k_major>(keys);
    gpu::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kD / 16; ++step)
      gpu::wgmma<T, k_major, k_major>(s, q_tile + QueryTile::k_step_offset(step),
                                      k_tile + KeyTile::k_step_offset(step), step > 0);
    gpu::warpgroup_commit();
    if (lane == 0 && previous >= 0) {
      gpu::wait_stores_read<0>();
      ring.empty[previous].arrive();
    }
    gpu::warpgroup_wait<0>();
    gpu::warpgroup_fence_operand(s);

    const int row = first + warp_row + lane / 4;  // and row + 8
    if (args.causal || args.keys < kKeys) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int seen = args.key_limit(row + 8 * half) - lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (8 * j + e >= seen) s[4 * j + 2 * half + e] = -INFINITY;
      }
    }
    float base[2], total[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = s[2 * half];
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j)
        top = fmaxf(top, fmaxf(s[4 * j + 2 * half], s[4 * j + 2 * half + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 2));
      base[half] = top == -INFINITY ? 0.0f : top * args.scale2;  // -inf - -inf would be NaN
      float a = 0, b = 0;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
        float& even = s[4 * j + 2 * half];
        float& odd = s[4 * j + 2 * half + 1];
        even = gpu::exp2_approx(fmaf(even, args.scale2, -base[half]));
        odd = gpu::exp2_approx(fmaf(odd, args.scale2, -base[half]));
        a += even;
        b += odd;
      }
      total[half] = a + b;
    }
    uint32_t p[kKeys / 16][4];
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        p[step][i] = gpu::pack_halves<T>(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);

    float o[kD / 2];
    const uint64_t v_tile = gpu::tile_descriptor<mn_major>(keys + Shape::kKeyBytes, KeyTile::kBoxBytes);
    gpu::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step)
      gpu::wgmma<T, mn_major>(o, p[step], v_tile + step * gpu::kDescriptorStep<mn_major>, step > 0);
    gpu::warpgroup_commit();
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      total[half] += __shfl_xor_sync(0xFFFFFFFFu, total[half], 1);
      total[half] += __shfl_xor_sync(0xFFFFFFFFu, total[half], 2);
      inverse[half] = total[half] == 0 ? 0.0f : 1 / total[half];
      const int query = row + 8 * half;
      if (lane % 4 == 0 && query < block.end)
        args.lse[(int64_t(block.b) * args.heads + block.first_head + head) * args.lse_stride + query] =
            total[half] == 0 ? -INFINITY : fmaf(base[half], 0.693147180559945f, logf(total[half]));
    }
    gpu::warpgroup_wait<0>();
    gpu::warpgroup_fence_operand(o);
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) gpu::warpgroup_fence_operand(p[step]);

    gpu::sync_named(1 + group, 128);  // all four warps have read Q
    char* const o_rows = slot + warp_row * 128;
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
      uint32_t values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        values[i] = gpu::pack_halves<T>(o[8 * step + 2 * i] * inverse[i % 2],
                                        o[8 * step + 2 * i + 1] * inverse[i % 2]);
      gpu::stmatrix_x4(gpu::shared_address(o_rows) + step / 4 * QueryTile::kBoxBytes +
                           gpu::swizzled_offset(lane % 16, step % 4 * 2 + lane / 16),
                       values);
    }
    gpu::fence_async_shared();
    __syncwarp();
    if (lane == 0) {
      if (first + warp_row < block.end) {
#pragma unroll
        for (int box = 0; box < kD / kBoxWidth; ++box)
          gpu::tma_store(o_map, o_rows + box * QueryTile::kBoxBytes, box * kBoxWidth, first + warp_row,
                         block.first_head + head, block.b);
      }
      gpu::commit_stores();
    }
    previous = state.stage;
    state.advance();
  }
  if (lane == 0) gpu::wait_stores_read<0>();
}

template <class T, class Shape>
void launch_short(const Tensor& o, const Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                  const AttentionProblem& problem) {
  constexpr double kLog2E = 1.44269504088896340736;
  const Device device = q.device();
  ShortArgs args{};
  args.lse = lse.data<float>();
  args.lse_stride = lse.row_stride();
  args.heads = int(q.size(2));
  args.group = args.heads / int(k.size(2));
  args.queries = int(q.size(1));
  args.keys = int(k.size(1));
  args.causal = problem.causal;
  args.scale2 = float(problem.scale * kLog2E);
  args.head_groups = int(gpu::ceil_div(args.heads, Shape::kHeads));
  // Tokens per block: the fewest waves of the grid times the time of a block, in tiles, its loads of K and V
  // and its prologue counting as two.
  const int64_t units = q.size(0) * args.head_groups, tiles = gpu::ceil_div(args.queries, 64);
  double best = INFINITY;
  const int64_t at_once = device.multiprocessors();
  for (int64_t splits = 1; splits <= std::min<int64_t>(tiles, 4 * at_once); ++splits) {
    const int64_t tokens = gpu::ceil_div(gpu::ceil_div(args.queries, splits), 16) * 16;
    const double time = double(gpu::ceil_div(units * splits, at_once)) * (double(tokens) / 64 + 2);
    if (time < best) {
      best = time;
      args.splits = int(gpu::ceil_div(args.queries, tokens));
      args.tokens = int(tokens);
    }
  }
  const int64_t blocks = units * args.splits;
  check(blocks <= int64_t{0x7FFFFFFF}, "attention: ", describe(q), " needs ", blocks,
        " blocks; expected at most 2^31 - 1 (split the batch)");
  gpu::launch(device, {dim3(unsigned(blocks)), dim3(Shape::kThreads), Shape::kSharedBytes, 1, true},
              attention_short_kernel<T, Shape>, head_map<T>(q, 16), head_map<T>(k, Shape::kKeys),
              head_map<T>(v, Shape::kKeys), head_map<T>(o, 16), args);
}

}  // namespace

void attention_short_sm90(const Tensor& o, const Tensor& lse, const Tensor& q, const Tensor& k,
                          const Tensor& v, const AttentionProblem& problem) {
  dispatch_floating_cuda(q.dtype(), "attention", [&]<class T>() {
    if constexpr (!std::is_same_v<T, float>) {
      const auto run = [&]<class Shape>() { launch_short<T, Shape>(o, lse, q, k, v, problem); };
      const bool narrow = q.size(3) <= 64, few = k.size(1) <= 64;
      if (narrow && few) return run.template operator()<ShortShape<64, 64, 3, 4, 5>>();
      if (narrow) return run.template operator()<ShortShape<64, 128, 2, 4, 4>>();
      if (few) return run.template operator()<ShortShape<128, 64, 2, 2, 4>>();
      if (k.size(1) <= 96) return run.template operator()<ShortShape<128, 96, 2, 2, 3>>();
      run.template operator()<ShortShape<128, 128, 1, 2, 4>>();
    }
  });
}

}  // namespace tessera::ops

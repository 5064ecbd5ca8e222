#pragma once

#include "ops/mlp/linear_activation24_kernels.h"
#include "ops/mlp/mlp_sm90.cuh"
#include "ops/sparse24/packed24.cuh"

/// Variant "epilogue" of linear_activation24: a GEMM on the main loop of ops/gemm/gemm_sm90.cuh whose
/// epilogue stores S(a) in fragment order from registers, with its counts and dense columns: 2 T D F
/// FLOPs, 1.125 T F bytes where linear_activation, take_columns and compress24 move 5.2.
///
/// The accumulators of a thread are pairs of columns. One exchange with the neighbouring lane makes groups of
/// four, the selection works on rows 16 w + g and + 8 at once (packed24_math.h), and one more exchange brings
/// what is kept to the lane whose fragment has it: a warp then stores 512 adjacent bytes per step, without
/// shared memory. 19 shuffles per warp and 64 x 64, and in all 8,700 instructions per warp and tile of 128 x
/// 192 (counted in the SASS), under the 49,152 clocks of MMA that a tile of the other warpgroup takes with D
/// = 4096: ping-pong hides them.
///
/// Without panels in shared memory the ring has five stages of 128 x 192. That tile needs 832 clocks of
/// shared memory per 768 of MMA, 128 x 128 needs 640 per 512. Predicted for T = 16,384, 4,096 -> 16,384: 1.02
/// times the time of the GEMM alone.

namespace tessera::ops {
namespace {

template <class Tile, class T, Activation kKind>
class CompressEpilogue {
  static constexpr int kStrips = Tile::kN / 64;
  static_assert(Tile::kN % 64 == 0 && Tile::kMBlocks <= 7);  // a byte counts 16 rows per part and warp

 public:
  static constexpr int kSharedBytes = 0, kBarriers = 0;
  struct Params {
    Activate<T, kKind, false> math;
    Matrix24<T> kept;
    int* counts;
    const int* slots;  // per column its index in `dense`, or -1; null: none is dense
    T* dense;
    int64_t dense_stride;
    int m, n;
  };

  __device__ __forceinline__ CompressEpilogue(const Params& params, char*, gpu::Barrier*, int)
      : params_(params) {}
  __device__ __forceinline__ void begin(const WorkTile&, int) {}
  __device__ __forceinline__ void end() {}

  __device__ __forceinline__ void finish(const WorkTile& work, int row,
                                         float (&sums)[Tile::kMBlocks][Tile::kN / 2]) {
    const int k_tiles = (params_.n + 63) / 64;
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      const int column = work.n + strip * 64;
      if (column >= params_.n) break;
      uint32_t found[4] = {};  // per pair of blocks, a byte per column
#pragma unroll
      for (int p = 0; p < Tile::kMBlocks; ++p) {
        const int first_row = work.m + row + p * 64;
        if (first_row < params_.m)
          store_tile_of(sums[p], strip, first_row, column, int64_t(first_row / 64) * k_tiles + column / 64,
                        found);
      }
#pragma unroll
      for (int number = 0; number < 4; ++number) add_counts(found[number], column + number * 16);
    }
  }

 private:
  /// 64 x 64 of the sums, number `tile` of S(a).
  __device__ __forceinline__ void store_tile_of(const float (&sums)[Tile::kN / 2], int strip, int first_row,
                                                int first_column, int64_t tile, uint32_t (&found)[4]) const {
    const int thread = gpu::reread_thread() % 128, lane = thread % 32, c = lane % 4,
              top = first_row + thread / 32 * 16 + lane / 4,
              source = lane - c + group_of_lane(c);  // what this lane stores
    uint32_t nibbles = 0;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t stored[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int number = step * 2 + half;
        uint32_t pairs[2][2];  // of row g + 8 down and block
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          const int column = first_column + (number * 2 + block) * 8 + c * 2;
          const float2 bias = params_.math.columns(0, column);
          const uint32_t inside = column + 1 < params_.n ? ~0u : column < params_.n ? 0xFFFFu : 0;
#pragma unroll
          for (int down = 0; down < 2; ++down) {
            const int i = (strip * 8 + number * 2 + block) * 4 + down * 2;
            uint32_t out[1];
            params_.math(sums[i], sums[i + 1], bias, 0u, out);
            // Rows past the last hold f(bias), columns past it what an infinite x makes of zeros.
            pairs[down][block] = top + down * 8 < params_.m ? out[0] & inside : 0;
            found[number] += nonzero(pairs[down][block]) << (block * 16);
          }
          if (params_.slots) take_dense(pairs[0][block], pairs[1][block], top, column);
        }
        GroupWords groups[2];
#pragma unroll
        for (int down = 0; down < 2; ++down) {
          const uint32_t received =
              __shfl_xor_sync(0xFFFFFFFFu, sent_pair(pairs[down][0], pairs[down][1], c), 1);
          groups[down] = group_of_pairs(pairs[down][0], pairs[down][1], received, c);
        }
        const TwoGroups two = TwoGroups::of(groups[0].x01, groups[0].x23, groups[1].x01, groups[1].x23);
        const TwoChoices choices = choose_largest(two);
        const TwoPairs kept = choices.of(two);
        nibbles |= choices.nibbles() << 4 * number;
        stored[half * 2] = __shfl_sync(0xFFFFFFFFu, kept.low, source);
        stored[half * 2 + 1] = __shfl_sync(0xFFFFFFFFu, kept.high, source);
      }
      *reinterpret_cast<uint4*>(params_.kept.values + tile * kTileValues + step * kStepValues +
                                thread * 8) = {stored[0], stored[1], stored[2], stored[3]};
    }
    nibbles = __shfl_sync(0xFFFFFFFFu, nibbles, source);
    params_.kept.metadata[tile * kTileWords + thread] = int32_t(transposed_nibbles(nibbles));
  }

  /// 1 for each of the two halves that is not zero: in bytes 0 and 1.
  static __device__ __forceinline__ uint32_t nonzero(uint32_t halves) {
    return uint32_t((halves & 0x7FFFu) != 0) | uint32_t((halves & 0x7FFF0000u) != 0) << 8;
  }

  /// Columns `column` and the next one of rows `top` and + 8: what is dense goes to its slot and leaves zero.
  __device__ __forceinline__ void take_dense(uint32_t& upper, uint32_t& lower, int top, int column) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int slot = column + i < params_.n ? params_.slots[column + i] : -1;
      if (slot < 0) continue;
      const uint32_t mask = 0xFFFFu << 16 * i;
      uint16_t* const to = reinterpret_cast<uint16_t*>(params_.dense) + slot;
      if (top < params_.m) to[top * params_.dense_stride] = uint16_t(upper >> 16 * i);
      if (top + 8 < params_.m) to[(top + 8) * params_.dense_stride] = uint16_t(lower >> 16 * i);
      upper &= ~mask, lower &= ~mask;
    }
  }

  /// The counts of two blocks, a byte for each of a thread's four columns, to global memory.
  __device__ __forceinline__ void add_counts(uint32_t found, int first_column) const {
    const int lane = int(threadIdx.x) % 32;
    found += __shfl_xor_sync(0xFFFFFFFFu, found, 4);
    found += __shfl_xor_sync(0xFFFFFFFFu, found, 8);
    found += __shfl_xor_sync(0xFFFFFFFFu, found, 16);
    // All eight lanes of a quad position hold the same four counts; four of them add one each.
    const int which = lane / 4;
    if (which >= 4) return;
    const int column = first_column + which / 2 * 8 + lane % 4 * 2 + which % 2;
    const int total = int(found >> (which * 8) & 0xFFu);
    if (total > 0 && column < params_.n) atomicAdd(params_.counts + column, total);
  }

  const Params& params_;
};

template <class T, Activation kKind>
void run_compressed(const LinearActivation24& to, const LinearActivation24Call& call, const Tensor& slots,
                    const GemmBias<T>& bias) {
  using enum gpu::TileOrder;
  using Tile = GemmTile<T, k_major, k_major, 128, 192, 5, true, 2>;
  using Epilogue = CompressEpilogue<Tile, T, kKind>;
  const Tensor &x = call.x, &weight = call.weight;
  const int64_t m = x.size(0), n = weight.size(0), k = x.size(1);
  const GemmMaps maps{operand_map<T, k_major>(operand_of<T>(x), m, k, 1, Tile::kM),
                      operand_map<T, k_major>(operand_of<T>(weight), n, k, 1, Tile::kN)};
  typename Epilogue::Params params{};
  params.math = {bias};
  params.kept = matrix_of<T>(to.kept);
  params.counts = to.counts.data<int32_t>();
  if (slots.defined() && to.dense.count() > 0) {
    params.slots = slots.data<int32_t>();
    params.dense = to.dense.data<T>();
    params.dense_stride = to.dense.layout().stride(0);
  }
  params.m = int(m), params.n = int(n);
  launch_gemm<Tile, Epilogue>(x.device(), maps, gemm_plan<Tile>(m, n, k, 1, 1), params);
}

}  // namespace

template <class T>
void linear_activation24_sm90(const LinearActivation24& to, const LinearActivation24Call& call,
                              const Tensor& slots) {
  GemmBias<T> bias;
  Tensor dense = call.bias;
  if (dense.defined()) {
    if (dense.layout().stride(0) != 1) dense = dense.clone();
    bias = {dense.data<T>(), 0, int(call.weight.size(0))};
  }
  if (call.kind == Activation::relu)
    run_compressed<T, Activation::relu>(to, call, slots, bias);
  else
    run_compressed<T, Activation::relu_squared>(to, call, slots, bias);
}

}  // namespace tessera::ops

#pragma once

#include "gpu/mma.cuh"
#include "gpu/reduce.cuh"
#include "ops/decoder_layers/decoder_ring.cuh"
#include "ops/swiglu/swiglu_math.h"

/// Dense weights in decoder_layers_sm90.cuh: [rows, columns] of 16 bits.
///
/// A warp has two rows at a time (gate and up of one hidden feature; else neighbours), 1,024 columns of each
/// per stage. The input vector is in shared memory in 16 bits. A lane's 16 bytes of the two rows and of the
/// vector are operands of an MMA whose diagonal elements are the sums, in f32; the 32 lanes are reduced once
/// per row. Units of two rows are assigned round-robin to all warps of the grid: the last round may leave
/// warps without work, but their share of the bandwidth goes to the others.

namespace tessera::ops::decoder {
namespace {

template <class Element>
class DenseWeights {
 public:
  using T = Element;
  static constexpr int64_t kMaxLayers = kMaxDenseLayers;
  static constexpr int kStageBytes = 4096;

  struct Layer {
    const T* weight[kPhases];  // weight[kKeys] is null
  };
  struct Plan {
    int64_t stride[kPhases];  // of rows
    int units[kPhases];       // of two rows
  };

  __device__ __forceinline__ DenseWeights(int warp, int lane)
      : first_(warp * int(gridDim.x) + int(blockIdx.x)), lane_(lane) {}

  /// The input of the output projection, or of the last GEMV.
  static __device__ __forceinline__ void load_vector(const Args<DenseWeights>& args, int phase, T* vector) {
    copy_vector(vector, phase == kOut ? args.mixed : args.hidden, args.columns[phase]);
  }
  static __device__ __forceinline__ void pad_vector(const Args<DenseWeights>&, int, T*) {}

  // ---- Load cursor ----

  /// Moves to the warp's first stage of the phase; false if it has none.
  __device__ __forceinline__ bool begin(const Args<DenseWeights>& args, int, int phase) {
    unit_ = first_, column_ = 0;
    return unit_ < args.plan.units[phase];
  }
  /// Loads a stage; false if it was the warp's last one in the phase.
  __device__ __forceinline__ bool issue(const Args<DenseWeights>& args, int layer, int phase, char* stage,
                                        gpu::Barrier& full, uint64_t policy) {
    const int columns = args.columns[phase];
    if (lane_ == 0) {
      const T* const weight = args.layer[layer].weights.weight[phase];
      // Gate and up of one feature are F rows apart; elsewhere the two rows are neighbours.
      const bool gated = phase == kUp;
      const int64_t upper = gated ? unit_ : 2 * int64_t(unit_);
      const int64_t lower = gated ? upper + args.plan.units[kUp] : upper + 1;
      const uint32_t bytes = uint32_t(min(kColumns, columns - column_)) * uint32_t(sizeof(T));
      const int64_t stride = args.plan.stride[phase];
      T* const to = reinterpret_cast<T*>(stage);
      full.arrive_expect(2 * bytes);
      gpu::bulk_load(to, weight + upper * stride + column_, bytes, full, policy);
      gpu::bulk_load(to + kColumns, weight + lower * stride + column_, bytes, full, policy);
    }
    column_ += kColumns;
    if (column_ < columns) return true;
    column_ = 0, unit_ += kWarps * int(gridDim.x);
    return unit_ < args.plan.units[phase];
  }

  // ---- GEMV ----

  /// Computes the warp's rows of the phase's GEMV and stores the sums: q, k and v as f32; silu(gate) up as a
  /// hidden feature; the others are added to the residual stream and, in the last layer, also written as y.
  template <int kDim>
  static __device__ __forceinline__ void multiply(const Args<DenseWeights>& args,
                                                  Ring<DenseWeights, kDim>& ring, int layer, int phase,
                                                  const T* vector, char*, int warp, int lane) {
    const int columns = args.columns[phase];
    const bool diagonal = lane % 4 == lane / 8, odd = lane / 4 % 2;  // has elements (g, g), in which of two
    for (int unit = warp * int(gridDim.x) + int(blockIdx.x); unit < args.plan.units[phase];
         unit += kWarps * int(gridDim.x)) {
      float sum[4] = {};
      for (int column = 0; column < columns; column += kColumns) {
        add_tile(reinterpret_cast<const T*>(ring.wait()), vector + column, columns - column, lane, sum);
        ring.refill(args);
      }
      const float upper = gpu::warp_reduce<gpu::Sum>(diagonal ? (odd ? sum[1] : sum[0]) : 0);
      const float lower = gpu::warp_reduce<gpu::Sum>(diagonal ? (odd ? sum[3] : sum[2]) : 0);
      if (lane != 0) continue;
      if (phase == kQkv) {
        reinterpret_cast<float2*>(args.qkv)[unit] = {upper, lower};
      } else if (phase == kUp) {
        args.hidden[unit] = T(swiglu_value(upper, lower));
      } else {
        // No other thread writes these two elements: they were written by this one, or come from the input.
        float2* const at = reinterpret_cast<float2*>(args.stream) + unit;
        float2 total = *at;
        if (layer == 0 && phase == kOut) total = {float(args.x[2 * unit]), float(args.x[2 * unit + 1])};
        total.x += upper, total.y += lower;
        *at = total;
        if (layer + 1 == args.layers && phase == kDown)
          args.y[2 * unit] = T(total.x), args.y[2 * unit + 1] = T(total.y);
      }
    }
  }

 private:
  /// Adds the products of one tile with `vector` to the sums of its two rows. Every lane has 8 neighbouring
  /// elements of each: with g = lane / 4 these are row g (upper), row g + 8 (lower) and column g (the vector)
  /// of mma.m16n8k16, in which the order of k is free, so that elements (g, g) and (g + 8, g) of the
  /// accumulators are the sums of the four lanes of g. The other elements are not used.
  static __device__ __forceinline__ void add_tile(const T* tile, const T* vector, int count, int lane,
                                                  float (&sum)[4]) {
#pragma unroll
    for (int step = 0; step < kColumns / (kWarp * kPackOf<T>); ++step) {
      if (step * kWarp * kPackOf<T> >= count) break;
      const int k = (step * kWarp + lane) * kPackOf<T>;
      Words<T> x = {}, upper = {}, lower = {};
      if (k < count) {
        x = gpu::load_words(vector + k);
        upper = gpu::load_words(tile + k), lower = gpu::load_words(tile + kColumns + k);
      }
#pragma unroll
      for (int half = 0; half < 4; half += 2) {
        const uint32_t rows[4] = {upper.word[half], lower.word[half], upper.word[half + 1],
                                  lower.word[half + 1]};
        gpu::mma_m16n8k16<T>(sum, rows, x.word[half], x.word[half + 1]);
      }
    }
  }

  int first_, lane_, unit_ = 0, column_ = 0;
};

}  // namespace
}  // namespace tessera::ops::decoder

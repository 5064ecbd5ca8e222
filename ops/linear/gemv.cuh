#pragma once

#include "gpu/barrier.cuh"
#include "gpu/global.cuh"
#include "gpu/mma.cuh"
#include "gpu/row.cuh"
#include "ops/linear/gemv_kernels.h"
#include "ops/swiglu/swiglu_math.h"

/// GEMV: y[t] = W x[t] (+ bias) for up to 8 tokens t. Every weight is read once from memory and used for all
/// tokens: 2 T FLOPs per weight of 2 or 4 bytes, so bound by memory. It needs (1) enough loads in flight at
/// any time, some 40 KB per SM, (2) no idle time between kernels, since one GEMV of a 7B model takes 10 to 60
/// us.
///
/// 16 bits: mma.m16n8k16 with rows of W as its rows and tokens as its 8 columns, so that arithmetic costs
/// nothing at 8 tokens either (8 FMAs and a conversion per weight would not keep up with memory). A lane
/// loads 16 bytes of a row, 8 neighbours along k, directly into the fragment's registers: which elements of k
/// these are does not matter as long as x's are the same. No shared memory and no barrier in the loop. A
/// block has 8 rows of W, the upper half of the fragment, whose lower half is zero (with SwiGLU: 8 rows of
/// up); its warps take k alternately, and their sums are added through shared memory, in order. Each warp has
/// kAhead steps of 32 of k in flight, 512 bytes of W each (1 KiB with SwiGLU), and reloads a step as soon as
/// it has used it.
///
/// f32: FMA; a warp has 128 of k of four or eight rows at a time, and adds its lanes up at the end.
///
/// Overlap (PDL): the kernel lets the next one start as soon as all its blocks run, and before it waits for
/// the previous one it prefetches the first kilobyte of its rows into L2: the memory is busy while earlier
/// kernels finish, and small kernels between two GEMVs cost little. A prefetch into L2 is correct even where
/// the weights are still being written, since all writes go through L2.

namespace tessera::ops::gemv {

using gpu::kPackOf;
using gpu::kWarp;
using gpu::Words;

inline constexpr int kWarps = 8, kThreads = kWarps * kWarp;  // of a block

template <class T>
struct Args {
  T* y;
  const T *x, *weight, *bias;  // bias: null for none
  int64_t y_stride, x_stride, weight_stride;
  int64_t second;  // rows between the two halves of the rows of a block; see kGated
  int tokens, in, out;
  uint32_t ahead;  // bytes of each row to prefetch into L2, a multiple of 16
};

/// `count` elements from `from` on, at most a pack; zeros for the others. kWhole: count is no part of a pack.
template <class T, bool kWhole, bool kOnce>
__device__ __forceinline__ Words<T> load_some(const T* from, int count) {
  Words<T> words;
  if (count >= kPackOf<T>) words = kOnce ? gpu::load_no_allocate(from) : gpu::load_words(from);
  if (!kWhole && count > 0 && count < kPackOf<T>) words = gpu::load_tail(from, count);
  return words;
}

/// 8 rows of W per block, the upper half of the fragment, whose lower half is 0. kGated: the lower half holds
/// the rows `second` further on; y = silu(upper) lower. kBlocks blocks per SM.
template <class T, int kAhead, int kBlocks, bool kGated, bool kWhole>
__global__ void __launch_bounds__(kThreads, kBlocks) gemv_mma(Args<T> args) {
  constexpr int kStep = 32, kTurn = kWarps * kAhead * kStep, kHalves = kGated ? 2 : 1;
  __shared__ float partial[kWarps][kHalves * 8][8];
  gpu::launch_dependents();
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp, g = lane / 4, t = lane % 4;
  const int first = int(blockIdx.x) * 8;
  const auto row_at = [&](int row) {  // of the block
    const int64_t at = min(first + row % 8, args.out - 1) + row / 8 * args.second;
    return args.weight + at * args.weight_stride;
  };
  if (int(threadIdx.x) < kHalves * 8 && args.ahead > 0)
    gpu::bulk_prefetch_l2(row_at(int(threadIdx.x)), args.ahead);
  gpu::grid_dependency_wait();

  const T* rows[kHalves];
#pragma unroll
  for (int half = 0; half < kHalves; ++half) rows[half] = row_at(half * 8 + g);
  const bool has_token = g < args.tokens;
  const T* const x = args.x + (has_token ? g : 0) * args.x_stride;

  Words<T> w[kAhead][kHalves], token[kAhead];
  float sum[4] = {};
  const auto load = [&](int slot, int k) {  // k: this lane's
    const int left = args.in - k;
    token[slot] = load_some<T, kWhole, false>(x + k, has_token ? left : 0);
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
      w[slot][half] = load_some<T, kWhole, true>(rows[half] + k, left);
  };
  int k = warp * (kAhead * kStep) + t * 8;
#pragma unroll
  for (int slot = 0; slot < kAhead; ++slot) load(slot, k + slot * kStep);
  for (; k - t * 8 < args.in; k += kTurn) {
#pragma unroll
    for (int slot = 0; slot < kAhead; ++slot) {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const Words<T>&upper = w[slot][0], &lower = w[slot][kHalves - 1];
        const uint32_t a[4] = {upper.word[step * 2], kGated ? lower.word[step * 2] : 0,
                               upper.word[step * 2 + 1], kGated ? lower.word[step * 2 + 1] : 0};
        gpu::mma_m16n8k16<T>(sum, a, token[slot].word[step * 2], token[slot].word[step * 2 + 1]);
      }
      load(slot, k + kTurn + slot * kStep);
    }
  }

#pragma unroll
  for (int i = 0; i < kHalves * 2; ++i) partial[warp][i / 2 * 8 + g][2 * t + i % 2] = sum[i];
  __syncthreads();
  const int row = int(threadIdx.x) % 8, n = int(threadIdx.x) / 8, to = first + row;
  if (n >= args.tokens || to >= args.out) return;
  const auto total = [&](int r) {
    float value = partial[0][r][n];
#pragma unroll
    for (int other = 1; other < kWarps; ++other) value += partial[other][r][n];
    return value;
  };
  float value = total(row);
  if constexpr (kGated)
    value = swiglu_value(value, total(row + 8));
  else if (args.bias)
    value += float(args.bias[to]);
  args.y[n * args.y_stride + to] = T(value);
}

/// kRows rows per block, up to kTokens tokens; in f32.
template <int kTokens, int kRows, int kAhead, bool kWhole>
__global__ void __launch_bounds__(kThreads, 2) gemv_fma(Args<float> args) {
  constexpr int kStep = kWarp * 4, kTurn = kWarps * kAhead * kStep;
  __shared__ float partial[kWarps][kRows * kTokens];
  gpu::launch_dependents();
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const int first = int(blockIdx.x) * kRows;
  if (int(threadIdx.x) < kRows && args.ahead > 0)
    gpu::bulk_prefetch_l2(args.weight + min(first + int(threadIdx.x), args.out - 1) * args.weight_stride,
                          args.ahead);
  gpu::grid_dependency_wait();

  Words<float> w[kAhead][kRows];
  float sum[kRows][kTokens] = {};
  const auto load = [&](int slot, int k) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      w[slot][r] = load_some<float, kWhole, true>(
          args.weight + min(first + r, args.out - 1) * args.weight_stride + k, args.in - k);
  };
  int k = warp * (kAhead * kStep) + lane * 4;
#pragma unroll
  for (int slot = 0; slot < kAhead; ++slot) load(slot, k + slot * kStep);
  for (; k - lane * 4 < args.in; k += kTurn) {
#pragma unroll
    for (int slot = 0; slot < kAhead; ++slot) {
      const int at = k + slot * kStep;
#pragma unroll
      for (int n = 0; n < kTokens; ++n) {
        float x[4];
        gpu::unpack(x, load_some<float, kWhole, false>(args.x + n * args.x_stride + at,
                                                       n < args.tokens ? args.in - at : 0));
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float weight[4];
          gpu::unpack(weight, w[slot][r]);
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[r][n] += weight[i] * x[i];
        }
      }
      load(slot, at + kTurn);
    }
  }

#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int n = 0; n < kTokens; ++n) {
      const float whole = gpu::warp_reduce<gpu::Sum>(sum[r][n]);
      if (lane == 0) partial[warp][n * kRows + r] = whole;
    }
  __syncthreads();
  const int at = int(threadIdx.x), row = first + at % kRows, n = at / kRows;
  if (n >= args.tokens || row >= args.out) return;
  float value = partial[0][at];
#pragma unroll
  for (int other = 1; other < kWarps; ++other) value += partial[other][at];
  args.y[n * args.y_stride + row] = args.bias ? value + args.bias[row] : value;
}

}  // namespace tessera::ops::gemv

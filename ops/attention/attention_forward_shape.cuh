#pragma once

#include "gpu/approx.cuh"
#include "gpu/barrier.cuh"
#include "ops/attention/attention_schedule.h"
#include "ops/attention/attention_sequences.cuh"

/// The configuration of the sm_90a forward kernel, its arguments, and the softmax of a warpgroup.

namespace tessera::ops {

/// Kernel arguments other than the tensor maps.
template <class T>
struct ForwardSm90 {
  AttentionSchedule schedule;  // of fixed lengths
  CuSeqlens seqlens;
  HeadRows<T> o;
  float* lse;  // [B * H, lse_stride], natural logarithm
  int64_t lse_stride;
  float* partial;                   // partial results of split tiles: see ForwardShape
  int* ticket;                      // packed sequences: tickets that blocks have taken
  int heads, group;                 // heads: query heads; group: how many of them read one key head
  int heads_at_once, ticket_heads;  // packed sequences: see attention_forward_sm90.cuh
  int dim;
  bool causal;
  float scale2;  // scale * log2(e)
  AttentionDropout drop;
};

/// A work tile, as the scheduler warp publishes it to the other warps. A negative `tile` ends the loop.
struct ForwardWork : AttentionWork {
  int b, h;
  int q_first, queries, k_first, keys;  // of its sequence

  /// Keys that query i sees, for i up to a tile past the last query.
  __device__ __forceinline__ int key_limit(bool causal, int i) const {
    return causal ? max(0, min(keys, i + 1 + keys - queries)) : keys;
  }
};

/// A configuration of the kernel: head size in shared memory (64 or 128), keys of a step, stages of K and of
/// V, and whether probabilities are dropped.
template <int kHead, int kKeyRows, int kDepth, bool kDropout = false>
struct ForwardShape {
  static constexpr bool kDrops = kDropout;
  static constexpr int kD = kHead, kKeys = kKeyRows, kStages = kDepth;
  static constexpr int kGroups = 3;   // consumer warpgroups, 64 queries each
  static constexpr int kQStages = 2;  // tiles of Q
  static constexpr int kRows = kGroups * 64;
  static constexpr int kThreads = (kGroups + 1) * 128;
  static constexpr int kProducerRegisters = 32, kConsumerRegisters = 160;
  static constexpr int kGroupBytes = 64 * kD * 2;
  static constexpr int kTileBytes = kKeys * kD * 2;
  static constexpr int kQOffset = 0, kOOffset = kQStages * kGroups * kGroupBytes,
                       kKOffset = kOOffset + kGroups * kGroupBytes,
                       kVOffset = kKOffset + kStages * kTileBytes,
                       kBarrierOffset = kVOffset + kStages * kTileBytes;
  struct Barriers {
    gpu::Ring<kStages> k, v;
    gpu::Ring<kQStages> q[kGroups];  // of the warpgroups
    gpu::Ring<kQStages> work;
    gpu::Barrier near_end;  // the producer is near the end of its tile: the scheduler may take the next one
  };
  static constexpr int kWorkOffset = kBarrierOffset + int(sizeof(Barriers));
  static constexpr int kStreamOffset = kWorkOffset + kQStages * int(sizeof(ForwardWork));  // of dropout
  static constexpr int kSharedBytes = kStreamOffset + (kDrops ? 4 : 0);
  static_assert(kSharedBytes <= 227 * 1024 && (!kDrops || kKeys % 64 == 0));
  // Floats of a piece of a split tile: O in fragment order, then the base and the sum of every row.
  static constexpr int64_t kSplitFloats = int64_t(kRows) * kD + 2 * kRows;
};

/// A warpgroup's softmax over the steps of its tile, two rows per thread: g and g + 8 of the warp's 16.
template <class Shape>
struct OnlineSoftmax {
  // P = 2^(scale2 s - base). The base is an integer, so a change of it scales by an exact power of two, and
  // follows the largest score only when that grew by more than 2^8: P stays below 2^9, far from any overflow.
  float base[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0, 0};  // of this thread's columns
  float rescale[2];
  bool needs_rescale = false;  // O must be multiplied by `rescale`

  __device__ __forceinline__ void apply(float (&s)[Shape::kKeys / 2], float scale2) {
    constexpr float kSlack = 8;
    float top[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float a = s[2 * half], b = s[2 * half + 1];
#pragma unroll
      for (int j = 1; j < Shape::kKeys / 8; ++j) {
        a = fmaxf(a, s[4 * j + 2 * half]);
        b = fmaxf(b, s[4 * j + 2 * half + 1]);
      }
      top[half] = fmaxf(a, b) * scale2;
    }
    const bool grew = top[0] > base[0] + kSlack || top[1] > base[1] + kSlack;
    needs_rescale = __any_sync(0xFFFFFFFFu, grew);
    if (needs_rescale) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float highest = fmaxf(top[half], __shfl_xor_sync(0xFFFFFFFFu, top[half], 1));
        highest = fmaxf(highest, __shfl_xor_sync(0xFFFFFFFFu, highest, 2));
        const float next = highest > base[half] ? ceilf(highest) : base[half];
        // No key seen yet: -inf - -inf would be NaN.
        rescale[half] = next == -INFINITY ? 1.0f : gpu::exp2_approx(base[half] - next);
        base[half] = next;
        sum[half] *= rescale[half];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float minus = base[half] == -INFINITY ? 0.0f : -base[half];
      float a = 0, b = 0;
#pragma unroll
      for (int j = 0; j < Shape::kKeys / 8; ++j) {
        float& first = s[4 * j + 2 * half];
        float& second = s[4 * j + 2 * half + 1];
        first = gpu::exp2_approx(fmaf(first, scale2, minus));
        second = gpu::exp2_approx(fmaf(second, scale2, minus));
        a += first;
        b += second;
      }
      sum[half] += a + b;
    }
  }
};

}  // namespace tessera::ops

#pragma once

#include "gpu/approx.cuh"
#include "gpu/mma.cuh"
#include "ops/decoder_layers/decoder_ring.cuh"
#include "ops/rope/rope_rotate.cuh"

/// The attention phase of decoder_layers_sm90.cuh. A unit is one key head, up to 4 of its query heads, and
/// one split of the keys. Its warps take batches of 8 (D = 128) or 16 (D = 64) keys with their values from
/// their rings, which began to load them during the qkv GEMV; the key and value of the new token come from
/// that GEMV. With several splits the block that finishes last adds the partial results in the order of the
/// splits.

namespace tessera::ops::decoder {
namespace {

/// Shared memory of the attention phase, in place of the input vector of a GEMV.
template <class T, int kDim>
struct AttentionShared {
  alignas(16) T q[kGroup][kDim];
  alignas(16) T newest[2][kDim];  // key, value
  float top[kWarps][kGroup], sum[kWarps][kGroup];
  float values[kWarps][kGroup][kDim];
};

/// Element i of a rotated head, from its f32 projection. `angles`: cosines, then sines, of the position.
template <class T>
__device__ __forceinline__ float rotated(const Shared<T>& args, const float* head, const float* angles,
                                         int i) {
  const int half = args.rotary / 2;
  if (i >= args.rotary) return __ldcg(head + i);
  const int pair = i < half ? i : i - half;
  float a = __ldcg(head + pair), b = __ldcg(head + pair + half);
  rotate_pair(a, b, angles[pair], angles[half + pair]);
  return i < half ? a : b;
}

/// Softmax statistics and an element of the weighted values of one query, over some keys.
struct Running {
  float top = gpu::Max::kIdentity, sum = 0, value = 0;

  __device__ __forceinline__ void add(const Running& other) {
    const float most = fmaxf(top, other.top), base = most == gpu::Max::kIdentity ? 0.0f : most;
    const float mine = gpu::exp2_approx(top - base), theirs = gpu::exp2_approx(other.top - base);
    sum = sum * mine + other.sum * theirs;
    value = value * mine + other.value * theirs;
    top = most;
  }
};

/// One warp's part of the attention of up to kGroup queries, by mma.m16n8k16: S = Q K^T, queries as rows,
/// then O^T = V^T P^T, so that the accumulators of S are the B fragment of P^T. The order of k is free: a
/// lane reads 16 bytes of a key, or of a value, at a time (as in
/// ops/decode_attention/decode_attention_mma.cu).
template <class T, int kDim>
class WarpAttention {
  static constexpr int kBatch = Keys<kDim>::kBatch, kBlocks = kBatch / 8;  // of 8 keys
  static constexpr int kKeyChunks = kDim / 32, kValueChunks = kDim / 64;
  static_assert(kBlocks == 1 || kBlocks == 2);

 public:
  /// q: (kGroup, kDim), of which the first `queries` rows exist.
  __device__ __forceinline__ WarpAttention(const T (&q)[kGroup][kDim], int queries, int lane)
      : g_(lane / 4), t_(lane % 4) {
#pragma unroll
    for (int c = 0; c < kKeyChunks; ++c) {
      q_[c] = {};
      if (g_ < queries) q_[c] = gpu::load_words(&q[min(g_, kGroup - 1)][c * 32 + t_ * 8]);
    }
  }

  /// Adds `count` keys and values of the (kBatch, kDim) in the stage; the others are not read.
  __device__ __forceinline__ void add(const T* keys, const T* values, int count, float scale) {
    // S = Q K^T, (8, kBatch): this lane has query g and keys 2t, 2t + 1 of every block
    float s[kBlocks][4] = {};
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
      for (int c = 0; c < kKeyChunks; ++c) {
        const Words<T> key = load(keys, block * 8 + g_, count, c * 32 + t_ * 8);
#pragma unroll
        for (int half = 0; half < 4; half += 2) {
          const uint32_t rows[4] = {q_[c].word[half], 0, q_[c].word[half + 1], 0};
          gpu::mma_m16n8k16<T>(s[block], rows, key.word[half], key.word[half + 1]);
        }
      }
    // Online softmax
    float most = top_;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        s[block][i] = block * 8 + 2 * t_ + i < count ? s[block][i] * scale : gpu::Max::kIdentity;
        most = fmaxf(most, s[block][i]);
      }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const float base = most == gpu::Max::kIdentity ? 0.0f : most;
    if (__any_sync(~0u, most > top_)) {
      const float rescale = gpu::exp2_approx(top_ - base);
      sum_ *= rescale;
      // Queries 2t and 2t + 1 are columns of O^T.
      const float even = __shfl_sync(~0u, rescale, t_ * 8), odd = __shfl_sync(~0u, rescale, t_ * 8 + 4);
#pragma unroll
      for (int w = 0; w < kValueChunks * 4; ++w)
#pragma unroll
        for (int i = 0; i < 4; ++i) o_[w][i] *= i % 2 ? odd : even;
    }
    top_ = most;
    uint32_t p[kBlocks];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const float first = gpu::exp2_approx(s[block][0] - base), second = gpu::exp2_approx(s[block][1] - base);
      sum_ += first + second;
      p[block] = gpu::pack_halves<T>(first, second);
    }
    // O^T += V^T P^T, (kDim, 8)
#pragma unroll
    for (int c = 0; c < kValueChunks; ++c) {
      Words<T> v[kBlocks][2];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          v[block][i] = load(values, block * 8 + 2 * t_ + i, count, c * 64 + g_ * 8);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const auto low = [&](int block) {
          return __byte_perm(v[block][0].word[w], v[block][1].word[w], 0x5410);
        };
        const auto high = [&](int block) {
          return __byte_perm(v[block][0].word[w], v[block][1].word[w], 0x7632);
        };
        if constexpr (kBlocks == 1) {
          gpu::mma_m16n8k8<T>(o_[c * 4 + w], low(0), high(0), p[0]);
        } else {
          const uint32_t rows[4] = {low(0), high(0), low(kBlocks - 1), high(kBlocks - 1)};
          gpu::mma_m16n8k16<T>(o_[c * 4 + w], rows, p[0], p[kBlocks - 1]);
        }
      }
    }
  }

  /// Writes the warp's partial results to shared memory, for the other warps.
  __device__ __forceinline__ void store(float (&top)[kGroup], float (&sum)[kGroup],
                                        float (&values)[kGroup][kDim]) {
    sum_ += __shfl_xor_sync(~0u, sum_, 1);
    sum_ += __shfl_xor_sync(~0u, sum_, 2);
    if (t_ == 0 && g_ < kGroup) top[g_] = top_, sum[g_] = sum_;
#pragma unroll
    for (int c = 0; c < kValueChunks; ++c)
#pragma unroll
      for (int w = 0; w < 4; ++w)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (2 * t_ + i % 2 < kGroup)
            values[2 * t_ + i % 2][c * 64 + g_ * 8 + w * 2 + i / 2] = o_[c * 4 + w][i];
  }

 private:
  static __device__ __forceinline__ Words<T> load(const T* from, int key, int count, int element) {
    Words<T> words = {};
    if (key < count) words = gpu::load_words(from + key * kDim + element);
    return words;
  }

  int g_, t_;
  Words<T> q_[kKeyChunks];
  float top_ = gpu::Max::kIdentity, sum_ = 0;  // of query g; `sum_`: over this lane's keys only
  float o_[kValueChunks * 4][4] = {};
};

/// Computes one unit. `angles`: those of the new token's position.
template <class Weights, int kDim, class T = typename Weights::T>
__device__ __forceinline__ void attend(const Args<Weights>& args, const Layer<Weights>& layer,
                                       Ring<Weights, kDim>& ring, AttentionShared<T, kDim>& shared,
                                       const float* angles, int& ticket, int unit) {
  constexpr int kBatch = Keys<kDim>::kBatch;
  const Keys<kDim> own(args, unit);
  const int group = args.heads / args.kv_heads, first_head = own.kv * group + own.tile * kGroup;
  const int heads = min(kGroup, group - own.tile * kGroup);
  if (!own.valid) {  // by contract: the result is NaN, and the cache is not accessed
    for (int i = int(threadIdx.x); own.split == 0 && i < heads * kDim; i += kThreads)
      args.mixed[first_head * kDim + i] = T(__int_as_float(0x7FC00000));
    return;
  }
  if (own.split >= own.used) return;

  // Rotates q. Units with the last keys also compute the new key and value; one of them stores these to the
  // cache.
  for (int i = int(threadIdx.x); i < heads * kDim; i += kThreads)
    shared.q[i / kDim][i % kDim] =
        T(rotated(args, args.qkv + (first_head + i / kDim) * kDim, angles, i % kDim));
  if (own.end == own.length)
    for (int i = int(threadIdx.x); i < kDim; i += kThreads) {
      const T key(rotated(args, args.qkv + (args.heads + own.kv) * kDim, angles, i));
      const T value(__ldcg(args.qkv + (args.heads + args.kv_heads + own.kv) * kDim + i));
      shared.newest[0][i] = key, shared.newest[1][i] = value;
      if (own.tile == 0) {
        const int64_t to = own.kv * args.key_stride[1] + (own.length - 1) * args.key_stride[0] + i;
        layer.keys[to] = key, layer.values[to] = value;
      }
    }
  __syncthreads();

  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  WarpAttention<T, kDim> found(shared.q, heads, lane);
  // The new key is a batch of its own, after those from the cache.
  const int batches = (own.stored - own.begin + kBatch - 1) / kBatch;
  bool newest = own.end == own.length && warp == batches % kWarps;
  for (int j = own.begin + warp * kBatch; j < own.stored || newest; j += Keys<kDim>::kKeysPerStep) {
    if (j < own.stored) {
      const T* const tile = reinterpret_cast<const T*>(ring.wait());
      found.add(tile, tile + kColumns, min(kBatch, own.stored - j), args.scale);
      gpu::fence_async_shared();
      ring.refill(args);
    } else {
      found.add(shared.newest[0], shared.newest[1], 1, args.scale);
      newest = false;
    }
  }
  found.store(shared.top[warp], shared.sum[warp], shared.values[warp]);
  __syncthreads();

  // Combine the warps: one element of a head per thread.
  for (int at = int(threadIdx.x); at < heads * kDim; at += kThreads) {
    const int g = at / kDim, i = at % kDim;
    Running all;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) all.add({shared.top[w][g], shared.sum[w][g], shared.values[w][g][i]});
    if (own.used == 1) {
      args.mixed[first_head * kDim + at] = T(all.sum == 0 ? 0.0f : all.value / all.sum);
    } else {
      const int64_t to = int64_t(first_head + g) * args.splits + own.split;
      args.partial[to * kDim + i] = all.value;
      if (i == 0) args.stats[to] = {all.top, all.sum};
    }
  }
  __syncthreads();  // also because the next unit of this block overwrites the shared memory
  if (own.used == 1) return;

  // The block that finishes last combines the splits, in their order.
  int* const done = args.done + own.kv * args.tiles + own.tile;
  if (threadIdx.x == 0) {
    __threadfence();
    ticket = gpu::atomic_add_acq_rel(done, 1);
  }
  __syncthreads();
  if (ticket != own.used - 1) return;
  if (threadIdx.x == 0) *done = 0;  // for the next layer, which starts after grid barriers
  for (int at = int(threadIdx.x); at < heads * kDim; at += kThreads) {
    constexpr int kTogether = 4;  // splits whose loads are in flight together
    const int64_t from = int64_t(first_head + at / kDim) * args.splits;
    Running all;
    for (int first = 0; first < own.used; first += kTogether) {
      Running some[kTogether];
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        const int64_t other = from + min(first + n, own.used - 1);
        const float2 stats = __ldcg(args.stats + other);
        some[n] = {stats.x, stats.y, __ldcg(args.partial + other * kDim + at % kDim)};
      }
#pragma unroll
      for (int n = 0; n < kTogether; ++n)
        if (first + n < own.used) all.add(some[n]);
    }
    args.mixed[first_head * kDim + at] = T(all.sum == 0 ? 0.0f : all.value / all.sum);
  }
}

}  // namespace
}  // namespace tessera::ops::decoder

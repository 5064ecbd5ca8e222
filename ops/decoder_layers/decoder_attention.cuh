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

/// A head of q, k or v in one warp: each lane has as many neighbouring elements.
template <class T, int kDim>
class WarpHead {
 public:
  static constexpr int kEach = kDim / kWarp;
  using Elements = gpu::Pack<T, kEach>;

  /// `head`, of all heads of qkv: the f32 projection, and its bias if there is one.
  __device__ __forceinline__ WarpHead(const Shared<T>& args, int head, const T* bias, int lane)
      : first_(lane * kEach), lane_(lane) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) x_[i] = __ldcg(args.qkv + head * kDim + first_ + i);
    if (!bias) return;
    const Elements added = gpu::load_pack<kEach>(bias + head * kDim + first_);
#pragma unroll
    for (int i = 0; i < kEach; ++i) x_[i] += float(added.at[i]);
  }

  /// RMSNorm, if there is a weight.
  __device__ __forceinline__ void normalise(const T* weight, float eps) {
    if (!weight) return;
    const Elements gain = gpu::load_pack<kEach>(weight + first_);
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) squares += x_[i] * x_[i];
    const float rstd = rsqrtf(gpu::warp_reduce<gpu::Sum>(squares) / float(kDim) + eps);
#pragma unroll
    for (int i = 0; i < kEach; ++i) x_[i] *= rstd * float(gain.at[i]);
  }

  /// `angles`: cosines, then sines, of the position. Half of `rotary` is a multiple of kEach.
  __device__ __forceinline__ void rotate(const float* angles, int rotary) {
    const int half = rotary / 2, pair = first_ < half ? first_ : first_ - half;
    const int other = first_ >= rotary ? lane_ : first_ < half ? lane_ + half / kEach : lane_ - half / kEach;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float partner = __shfl_sync(~0u, x_[i], other);
      if (first_ >= rotary) continue;
      float a = first_ < half ? x_[i] : partner, b = first_ < half ? partner : x_[i];
      rotate_pair(a, b, angles[pair + i], angles[half + pair + i]);
      x_[i] = first_ < half ? a : b;
    }
  }

  __device__ __forceinline__ Elements rounded() const {
    Elements pack;
#pragma unroll
    for (int i = 0; i < kEach; ++i) pack.at[i] = T(x_[i]);
    return pack;
  }
  /// Stores the rounded elements at their places in `to`.
  __device__ __forceinline__ void store(T* to) const {
    gpu::store_pack(to + first_, rounded());
  }

 private:
  int first_, lane_;
  float x_[kEach];
};

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

  // A warp for each query head. In units with the last keys two more make the new key and value; one of these
  // units stores them to the cache.
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  static_assert(kGroup + 2 <= kWarps);
  if (warp < heads) {
    WarpHead<T, kDim> head(args, first_head + warp, layer.qkv_bias, lane);
    head.normalise(layer.q_norm, args.eps);
    head.rotate(angles, args.rotary);
    head.store(shared.q[warp]);
  } else if (warp == kGroup || warp == kGroup + 1) {
    const bool is_key = warp == kGroup;
    if (own.end == own.length) {
      WarpHead<T, kDim> head(args, args.heads + (is_key ? 0 : args.kv_heads) + own.kv, layer.qkv_bias, lane);
      if (is_key) head.normalise(layer.k_norm, args.eps), head.rotate(angles, args.rotary);
      head.store(shared.newest[is_key ? 0 : 1]);
      if (own.tile == 0)
        head.store((is_key ? layer.keys : layer.values) + own.kv * args.key_stride[1] +
                   (own.length - 1) * args.key_stride[0]);
    }
  }
  __syncthreads();

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

#pragma once

#include <algorithm>

#include "gpu/mma.cuh"
#include "gpu/pack.cuh"
#include "gpu/reread.cuh"
#include "ops/attention/attention_device.cuh"

/// A bias in the kernels of variants mma and f32: how it comes to the scores, and how its gradient is summed.
///
/// Kernels with a bias have scores S = scale Q K^T + bias, and log2(e) is the factor of the exponent; kernels
/// without one keep all factors of Q K^T in the exponent. In 16 bits the bias of the next tile of scores is
/// copied to shared memory while a tile is computed, as K and V are: in packs of 16 bytes, which the operator
/// sees to (AttentionProblem). ldmatrix then gives each lane the bias of its accumulators, or .trans that of
/// the transposed ones. There is one tile, not two: its next copy starts as soon as it has been read. In TF32
/// shared memory has no room for it: each lane reads the bias of its accumulators from global memory, two
/// adjacent keys in one word. Queries and keys past the last read zeros or the last: their probabilities are
/// made 0, or their rows are not stored.
///
/// The gradient of the bias is dS summed over what broadcasts. It comes from one of three kernels:
/// - Nothing broadcasts: the kernel that owns queries stores its dS.
/// - The queries do (padding masks, a bias per key): the kernel that owns keys adds up its dS over the
///   queries. Its sums per batch and head, [B, H, 1, Lk] in f32, are then added by sum_to.
/// - Else, batches or heads do, and a kernel of its own sums over them in registers: a block owns 64 queries
///   and 64 keys and walks the batches and heads that are added up there, in order. S and dP are computed
///   once more, 2 GEMMs next to the 7 of backward, but no [B, H, Lq, Lk] is ever in memory, unless the bias
///   itself has that size. Where few tiles would leave the GPU idle, the walk is cut into pieces whose
///   partial sums, in f32, are added in order by sum_to.

namespace tessera::ops {

/// Factor of the scores in the exponent of base 2, and in the natural logarithm.
template <bool kBias, class T>
__device__ __forceinline__ float exponent_scale(const AttentionArgs<T>& args) {
  return kBias ? 1.44269504f : args.scale2;
}
template <bool kBias, class T>
__device__ __forceinline__ float score_scale(const AttentionArgs<T>& args) {
  return kBias ? 1.0f : args.scale;
}
/// Whether a row whose highest score is that has seen no key. Times log2(e), a finite score below -2.3e38
/// would be -inf.
template <bool kBias>
__device__ __forceinline__ bool sees_no_key(float highest) {
  return kBias ? highest < -2.3e38f : highest == -INFINITY;
}

/// Elements from one query to the next of a tile of kKeys keys: ldmatrix reads eight without bank conflicts.
template <int kKeys>
inline constexpr int kBiasPitch = kKeys + 8;

/// Issues the copy of kQueries x kKeys values of the bias of head h, from (query, key) on, by kThreads
/// threads, of which this is `thread`. If all queries have the same, one row is copied.
template <int kQueries, int kKeys, int kThreads, class T>
__device__ __forceinline__ void load_bias(T* tile, const AttentionArgs<T>& args, const AttentionCoord& coord,
                                          int h, int query, int key, int thread) {
  constexpr int kPack = gpu::kPackOf<T>, kLanes = kKeys / kPack;  // lanes per row, 16 bytes each
  constexpr int kRowStep = kThreads / kLanes;
  static_assert(kKeys % kPack == 0 && kQueries % kRowStep == 0);
  const int own_row = thread / kLanes, own_key = thread % kLanes * kPack;
  const int rows = args.bias.query == 0 ? 1 : kQueries;
  const int left = coord.sequence.queries - query;
  const int bytes = max(0, min(coord.sequence.keys - key - own_key, kPack)) * int(sizeof(T));
  const T* source = args.bias.row(coord.b, h, query + own_row) + (key + own_key) * args.bias.key;
  const uint32_t to = gpu::shared_address(tile) + uint32_t(own_row * kBiasPitch<kKeys> + own_key) * sizeof(T);
#pragma unroll
  for (int i = 0; i < kQueries / kRowStep; ++i) {
    const int row = own_row + i * kRowStep;
    if (row < rows)
      gpu::cp_async_zfill(to + uint32_t(i * kRowStep * kBiasPitch<kKeys>) * sizeof(T), source,
                          row < left ? bytes : 0);
    source += kRowStep * args.bias.query;
  }
}

/// Accumulators of 16 rows and columns 16 n ... 16 n + 15 times `scale`, plus the bias, as ldmatrix gives it.
template <class T, int kN>
__device__ __forceinline__ void add_bias_pairs(float (&s)[kN][4], int n, const uint32_t (&pairs)[4],
                                               float scale) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = gpu::unpack_halves<T>(pairs[i]);
    float(&own)[4] = s[2 * n + i / 2];
    own[i % 2 * 2] = fmaf(own[i % 2 * 2], scale, pair.x);
    own[i % 2 * 2 + 1] = fmaf(own[i % 2 * 2 + 1], scale, pair.y);
  }
}

/// S [kM * 16 queries, kN * 8 keys] of a warp, accumulators of m16n8 MMAs, from Q K^T and a tile of the bias
/// with kKeys keys, from its row `row` on.
template <int kKeys, class T, int kM, int kN>
__device__ __forceinline__ void add_bias(float (&s)[kM][kN][4], const AttentionArgs<T>& args, const T* tile,
                                         int row) {
  const int lane = gpu::reread_lane(), pitch = args.bias.query == 0 ? 0 : kBiasPitch<kKeys>;
  const uint32_t base = gpu::shared_address(tile) + 2 * uint32_t((row + lane % 16) * pitch + lane / 16 * 8);
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
      uint32_t pairs[4];
      gpu::ldmatrix_x4(pairs, base + 2 * uint32_t(m * 16 * pitch + n * 16));
      add_bias_pairs<T>(s[m], n, pairs, args.scale);
    }
}
/// The same of S^T [kM * 16 keys, kN * 8 queries]: all rows of the tile, from its column `column` on.
template <int kKeys, class T, int kM, int kN>
__device__ __forceinline__ void add_bias_transposed(float (&s)[kM][kN][4], const AttentionArgs<T>& args,
                                                    const T* tile, int column) {
  const int lane = gpu::reread_lane(), pitch = args.bias.query == 0 ? 0 : kBiasPitch<kKeys>;
  const uint32_t base = gpu::shared_address(tile) +
                        2 * uint32_t((lane / 16 * 8 + lane % 8) * pitch + column + lane / 8 % 2 * 8);
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
      uint32_t pairs[4];
      gpu::ldmatrix_x4_trans(pairs, base + 2 * uint32_t(n * 16 * pitch + m * 16));
      add_bias_pairs<T>(s[m], n, pairs, args.scale);
    }
}

/// S [queries, keys] of a warp in TF32, from global memory. `query` and `key` (even) are the warp's first.
template <int kM, int kN>
__device__ __forceinline__ void add_bias(float (&s)[kM][kN][4], const AttentionArgs<float>& args,
                                         const AttentionCoord& coord, int h, int query, int key) {
  const int lane = gpu::reread_lane(), last_pair = (coord.sequence.keys - 1) / 2 * 2;
  const int own_key = key + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = min(query + m * 16 + half * 8 + lane / 4, coord.sequence.queries - 1);
      const float* const row = args.bias.row(coord.b, h, i);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const auto pair = gpu::load_pack<2>(row + min(own_key + n * 8, last_pair) * args.bias.key);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = s[m][n][2 * half + e];
          score = fmaf(score, args.scale, pair.at[e]);
        }
      }
    }
}
/// The same of S^T [keys, queries]. Neighbours in a row are queries there, so each element is read by itself.
template <int kM, int kN>
__device__ __forceinline__ void add_bias_transposed(float (&s)[kM][kN][4], const AttentionArgs<float>& args,
                                                    const AttentionCoord& coord, int h, int query, int key) {
  const int lane = gpu::reread_lane();
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int parity = 0; parity < 2; ++parity) {
      const int i = min(query + n * 8 + lane % 4 * 2 + parity, coord.sequence.queries - 1);
      const float* const row = args.bias.row(coord.b, h, i);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int j = min(key + m * 16 + half * 8 + lane / 4, coord.sequence.keys - 1);
          float& score = s[m][n][2 * half + parity];
          score = fmaf(score, args.scale, row[j * args.bias.key]);
        }
    }
}

/// Row (head, query) of the gradient of a bias that does not broadcast.
template <class T>
__device__ __forceinline__ T* dbias_row(const AttentionArgs<T>& args, const AttentionCoord& coord,
                                        int query) {
  return args.dbias + ((int64_t(coord.b) * args.heads + coord.head) * args.queries + query) * args.dbias_row;
}
/// Stores dS of a warp's 16 queries and kN * 8 keys, from (query, key) on, times `factor` as that gradient.
/// May write to the padding of rows.
template <class T, int kN>
__device__ __forceinline__ void store_dbias(const float (&ds)[kN][4], float factor,
                                            const AttentionArgs<T>& args, const AttentionCoord& coord,
                                            int query, int key) {
  const int lane = gpu::reread_lane(), parity = lane % 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = query + half * 8 + lane / 4;
    T* const row = dbias_row(args, coord, i);
    const bool exists = i < args.queries;
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      const auto low = [&](int block) { return ds[n + block][2 * half] * factor; };
      const auto high = [&](int block) { return ds[n + block][2 * half + 1] * factor; };
      if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int block = 0; block < 2; ++block)
          if (const int j = key + (n + block) * 8 + lane % 4 * 2; exists && j < args.keys)
            *reinterpret_cast<float2*>(row + j) = {low(block), high(block)};
      } else {
        // Neighbouring lanes exchange pairs, for four adjacent keys each: 32 bytes of a row per store.
        const uint32_t pairs[2] = {gpu::pack_halves<T>(low(0), high(0)),
                                   gpu::pack_halves<T>(low(1), high(1))};
        const uint32_t own = parity ? pairs[1] : pairs[0];
        const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, parity ? pairs[0] : pairs[1], 1);
        if (const int j = key + (n + parity) * 8 + lane % 4 / 2 * 4; exists && j < args.keys)
          *reinterpret_cast<uint2*>(row + j) = parity ? uint2{other, own} : uint2{own, other};
      }
    }
  }
}
/// Zeros for the block's queries `first` ... `first` + rows - 1 and the keys from `key` (a multiple of 64)
/// on, which none of them sees.
template <class T>
__device__ __forceinline__ void clear_dbias(const AttentionArgs<T>& args, const AttentionCoord& coord,
                                            int first, int rows, int key) {
  constexpr int kPack = gpu::kPackOf<T>;
  const int lane = int(threadIdx.x) % 32, warps = int(blockDim.x) / 32;
  for (int i = int(threadIdx.x) / 32; i < rows; i += warps)
    for (int j = key + lane * kPack; j < args.keys; j += 32 * kPack)
      gpu::store_pack(dbias_row(args, coord, first + i) + j, gpu::Pack<T, kPack>{});
}

/// Adds up dS^T of a warp's 16 keys over kN * 8 queries: rows lane / 4 and lane / 4 + 8.
template <int kN>
__device__ __forceinline__ void add_key_sums(float (&sum)[2], const float (&ds)[kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[e / 2] += ds[n][e];
}
/// Stores the sums of head h, the warp's first key being `key`, and starts again from 0.
template <class T>
__device__ __forceinline__ void store_key_sums(float (&sum)[2], float factor, const AttentionArgs<T>& args,
                                               const AttentionCoord& coord, int h, int key) {
  const int lane = gpu::reread_lane();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] += __shfl_xor_sync(0xFFFFFFFFu, sum[half], 1);
    sum[half] += __shfl_xor_sync(0xFFFFFFFFu, sum[half], 2);
    const int j = key + half * 8 + lane / 4;
    if (lane % 4 == 0 && j < args.keys)
      args.key_sums[(int64_t(coord.b) * args.heads + h) * args.key_sums_row + j] = sum[half] * factor;
    sum[half] = 0;
  }
}

/// Tiles of the kernel that sums the gradient of a bias over batches and heads.
inline constexpr int kBiasTile = 64;
static_assert(kBiasTile == kAttentionPad);

/// The tile of a block, and the (batch, head) that it adds up.
struct BiasTile {
  int piece, b, h, query_tile, key_tile;  // the first of the batches and heads
  int begin, end;                         // of what is added up
};

template <class T>
struct BiasGradient {
  T* whole;                            // the gradient, if there is one piece
  float* partial;                      // else [pieces, batches, heads, queries, keys]
  int64_t row;                         // elements from one row of either to the next
  int batches, heads;                  // sizes of the bias: 1, or those of the scores
  int added_heads, added;              // heads, and all that is added up into an element
  int query_tiles, key_tiles, pieces;  // of the grid

  __device__ __forceinline__ BiasTile tile() const {
    unsigned rest = blockIdx.x;
    const auto next = [&rest](int count) {
      const int own = int(rest % unsigned(count));
      rest /= unsigned(count);
      return own;
    };
    BiasTile tile;
    tile.key_tile = next(key_tiles);
    tile.query_tile = next(query_tiles);
    tile.h = next(heads);
    tile.b = next(batches);
    tile.piece = int(rest);
    tile.begin = int(int64_t(added) * tile.piece / pieces);
    tile.end = int(int64_t(added) * (tile.piece + 1) / pieces);
    return tile;
  }
  /// The coordinates of number `index` of what is added up.
  __device__ __forceinline__ AttentionCoord coord(const AttentionArgs<T>& args, const BiasTile& tile,
                                                  int index) const {
    const int h = tile.h + index % added_heads, b = tile.b + index / added_heads;
    return {b, h, h / args.group, {0, 0, args.queries, 0, args.keys, tile.query_tile, true}};
  }
  __device__ __forceinline__ void store(const AttentionArgs<T>& args, const BiasTile& tile, int query,
                                        int key, float value) const {
    if (query >= args.queries || key >= args.keys) return;
    const int64_t at =
        (((int64_t(tile.piece) * batches + tile.b) * heads + tile.h) * args.queries + query) * row + key;
    if (partial)
      partial[at] = value;
    else
      whole[at] = T(value);
  }
};

/// Fills problem.dbias, where it has all queries, by launch(blocks, gradient). q [B, Lq, H, D] and k with at
/// least one element each.
template <class T, class Launch>
void sum_bias_gradient(const Tensor& q, const Tensor& k, const AttentionProblem& problem, Launch&& launch) {
  const Tensor& dbias = problem.dbias;
  BiasGradient<T> gradient{};
  gradient.batches = int(dbias.size(0));
  gradient.heads = int(dbias.size(1));
  gradient.query_tiles = int(gpu::ceil_div(q.size(1), kBiasTile));
  gradient.key_tiles = int(gpu::ceil_div(k.size(1), kBiasTile));
  gradient.added_heads = int(q.size(2)) / gradient.heads;
  const int64_t added = q.size(0) / gradient.batches * gradient.added_heads;
  const int64_t blocks = dbias.size(0) * dbias.size(1) * int64_t(gradient.query_tiles) * gradient.key_tiles;
  // About three blocks per SM of an H100. The bits depend on it, so it is not a property of the GPU.
  constexpr int64_t kBlocks = 400;
  const int64_t pieces = std::clamp<int64_t>(kBlocks / blocks, 1, added);
  check(blocks * pieces <= int64_t{0x7FFFFFFF} && added <= int64_t{0x7FFFFFFF},
        "attention: the gradient of bias ", describe(dbias), " needs ", blocks,
        " blocks; expected at most 2^31 - 1 (split the batch)");
  gradient.added = int(added);
  gradient.pieces = int(pieces);
  if (pieces == 1) {
    gradient.whole = dbias.data<T>();
    gradient.row = dbias.row_stride();
    return launch(unsigned(blocks), gradient);
  }
  const Shape shape{pieces, dbias.size(0), dbias.size(1), dbias.size(2), dbias.size(3)};
  const Tensor partial = Tensor::empty(shape, DType::f32, dbias.device());
  gradient.partial = partial.data<float>();
  gradient.row = partial.row_stride();
  launch(unsigned(blocks * pieces), gradient);
  write_dbias(problem, partial);
}

}  // namespace tessera::ops

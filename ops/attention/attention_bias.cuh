#pragma once

#include <algorithm>

#include "gpu/pack.cuh"
#include "gpu/reread.cuh"
#include "ops/attention/attention_device.cuh"

/// A bias in the kernels of variants mma and f32: how it comes to the scores, and how its gradient is summed.
///
/// Kernels with a bias have the scores in base 2 once it is added, S2 = scale2 Q K^T + log2(e) bias, so the
/// softmax needs no factor; kernels without one keep theirs in the exponent's multiply-add. Each lane reads
/// the bias of its own accumulators from global memory, two adjacent keys in one word: the operator sees to
/// it that rows have whole pairs (AttentionProblem). Queries and keys past the last read the last: their
/// probabilities are made 0, or their rows are not stored.
///
/// The gradient of the bias is dS summed over what broadcasts. A block owns 64 queries and 64 keys of it and
/// walks the batches, heads and (if queries broadcast) tiles of queries that are added up there, in order: S
/// and dP are computed once more, 2 GEMMs next to the 7 of backward, but no [B, H, Lq, Lk] is ever in memory,
/// and only a bias that needs a gradient pays. Where few tiles would leave the GPU idle, the walk is cut into
/// pieces whose partial sums, in f32, are added in order by sum_to.

namespace tessera::ops {

inline constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

/// Factor of the scores in the exponent.
template <bool kBias, class T>
__device__ __forceinline__ float exponent_scale(const AttentionArgs<T>& args) {
  return kBias ? 1.0f : args.scale2;
}

/// S [queries, keys] of a warp, accumulators of m16n8 MMAs, in base 2 with the bias of head h added. `query`
/// and `key` (even) are the first of the warp's.
template <class T, int kM, int kN>
__device__ __forceinline__ void add_bias(float (&s)[kM][kN][4], const AttentionArgs<T>& args,
                                         const AttentionCoord& coord, int h, int query, int key) {
  const int lane = gpu::reread_lane(), last_pair = (coord.sequence.keys - 1) / 2 * 2;
  const int own_key = key + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = min(query + m * 16 + half * 8 + lane / 4, coord.sequence.queries - 1);
      const T* const row = args.bias.row(coord.b, h, i);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const auto pair = gpu::load_pack<2>(row + min(own_key + n * 8, last_pair) * args.bias.key);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = s[m][n][2 * half + e];
          score = fmaf(score, args.scale2, float(pair.at[e]) * kLog2E);
        }
      }
    }
}

/// The same of S^T [keys, queries]. Neighbours in a row are queries there, so each element is read by itself.
template <class T, int kM, int kN>
__device__ __forceinline__ void add_bias_transposed(float (&s)[kM][kN][4], const AttentionArgs<T>& args,
                                                    const AttentionCoord& coord, int h, int query, int key) {
  const int lane = gpu::reread_lane();
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int parity = 0; parity < 2; ++parity) {
      const int i = min(query + n * 8 + lane % 4 * 2 + parity, coord.sequence.queries - 1);
      const T* const row = args.bias.row(coord.b, h, i);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int j = min(key + m * 16 + half * 8 + lane / 4, coord.sequence.keys - 1);
          float& score = s[m][n][2 * half + parity];
          score = fmaf(score, args.scale2, float(row[j * args.bias.key]) * kLog2E);
        }
    }
}

/// Tiles of the gradient of a bias.
inline constexpr int kBiasTile = 64;
static_assert(kBiasTile == kAttentionPad);

/// The tile of a block, and the (batch, head, tile of queries) that it adds up.
struct BiasTile {
  int piece, b, h, query_tile, key_tile;  // the first of the batches, heads and tiles of queries
  int begin, end;                         // of what is added up
};

template <class T>
struct BiasGradient {
  T* whole;                             // the gradient, if there is one piece
  float* partial;                       // else [pieces, batches, heads, queries, keys]
  int64_t row;                          // elements from one row of either to the next
  int batches, heads, queries;          // sizes of the bias: 1, or those of the scores
  int added_heads, added_tiles, added;  // heads, tiles of queries, and all that is added up into an element
  int query_tiles, key_tiles, pieces;   // of the grid

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
    const int query_tile = tile.query_tile + index % added_tiles, rest = index / added_tiles;
    const int h = tile.h + rest % added_heads, b = tile.b + rest / added_heads;
    return {b, h, h / args.group, {0, 0, args.queries, 0, args.keys, query_tile, true}};
  }
  /// Whether all queries of the bias have one value, whose gradient is the sum of a tile's rows.
  __device__ __forceinline__ bool sums_rows() const { return queries == 1; }
  __device__ __forceinline__ void store(const BiasTile& tile, int query, int key, float value) const {
    const int64_t row_index = ((int64_t(tile.piece) * batches + tile.b) * heads + tile.h) * queries + query;
    if (partial)
      partial[row_index * row + key] = value;
    else
      whole[row_index * row + key] = T(value);
  }
};

/// Fills problem.dbias by launch(blocks, gradient). q [B, Lq, H, D] and k with at least one element each.
template <class T, class Launch>
void sum_bias_gradient(const Tensor& q, const Tensor& k, const AttentionProblem& problem, Launch&& launch) {
  const Tensor& dbias = problem.dbias;
  BiasGradient<T> gradient{};
  gradient.batches = int(dbias.size(0));
  gradient.heads = int(dbias.size(1));
  gradient.queries = int(dbias.size(2));
  const int tiles = int(gpu::ceil_div(q.size(1), kBiasTile));
  gradient.query_tiles = gradient.queries == 1 ? 1 : tiles;
  gradient.key_tiles = int(gpu::ceil_div(k.size(1), kBiasTile));
  gradient.added_tiles = tiles / gradient.query_tiles;
  gradient.added_heads = int(q.size(2)) / gradient.heads;
  const int64_t added = q.size(0) / gradient.batches * gradient.added_heads * gradient.added_tiles;
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

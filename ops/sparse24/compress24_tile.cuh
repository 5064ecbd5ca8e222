#pragma once

#include <algorithm>

#include "gpu/dependent_launch.cuh"
#include "gpu/grid.cuh"
#include "ops/sparse24/sparse24_kernels.h"
#include "ops/sparse24/sparse24_math.h"

/// A tile of 64 tokens x 64 features in shared memory, of a block of 128 threads: x is read once for both
/// directions, in whole lines. Thread (w, g, c) then owns the groups whose values it stores: group c and c +
/// 4 of both steps in rows 16 w + g and + 8 of A (sparse24_layout.h), so that what it writes are 16 adjacent
/// bytes per step, and only metadata bits are exchanged, among the four lanes of a row.
///
/// Four adjacent elements are a chunk, whose index in its row is permuted by the row's number: whole rows
/// (loads), four chunks of eight rows (groups along features), four rows 4 apart of eight columns (groups
/// along tokens) and the rows of a transposed 8 x 8 matrix (packed24_math.h) each lie in different banks.

namespace tessera::ops {

using namespace sparse24;

namespace {

constexpr int kThreads = 128;
constexpr int kChunks = int(kTileDepth) / 4;

template <class T>
using Chunk = std::conditional_t<sizeof(T) == 2, uint2, uint4>;

/// A tile of x, element by element as it is, zeros past the edge.
template <class T>
class TileOfX {
 public:
  __device__ __forceinline__ T* chunk(int token, int index) {
    const int permuted = index ^ (token & 3) << 2 ^ (token >> 2 & 1) << 1 ^ (token >> 3 & 1) << 3;
    return elements_ + (token * kChunks + permuted) * 4;
  }
  __device__ __forceinline__ T& at(int token, int feature) { return chunk(token, feature / 4)[feature % 4]; }

 private:
  alignas(16) T elements_[kTileRows * kTileDepth];
};

/// x [tokens, features] with dense rows; `vectors`: they start on 16-byte boundaries.
template <class T>
struct Rows24 {
  T* data;
  int64_t tokens, features, stride;
  bool vectors;
};

/// Coordinates of a block's tile of x, and its index in each of the two compressed matrices.
struct TileCoord {
  int64_t token, feature;  // the first of each
  int64_t by_features, by_tokens;

  __device__ __forceinline__ TileCoord(int64_t tokens, int64_t features) {
    const int64_t across = (features + kTileDepth - 1) / kTileDepth,
                  down = (tokens + kTileRows - 1) / kTileRows;
    by_features = int64_t(blockIdx.x) + int64_t(blockIdx.y) * gridDim.x;
    const int64_t row = by_features / across, column = by_features - row * across;
    token = row * kTileRows, feature = column * kTileDepth;
    by_tokens = column * down + row;
  }
};

/// Calls visit(token and chunk in the tile, its first element in x, elements inside x) for this thread's
/// share of the tile: 16 bytes of a row at a time.
template <class T, class Visit>
__device__ __forceinline__ void for_each_vector(const Rows24<T>& x, const TileCoord& coord, Visit&& visit) {
  constexpr int kPerVector = 16 / int(sizeof(T)), kAcross = int(kTileDepth) / kPerVector;
#pragma unroll
  for (int i = 0; i < int(kTileRows) * kAcross / kThreads; ++i) {
    const int vector = i * kThreads + int(threadIdx.x), token = vector / kAcross,
              feature = vector % kAcross * kPerVector;
    const int64_t row = coord.token + token, column = coord.feature + feature;
    const int inside =
        row < x.tokens ? int(max(int64_t{0}, min(int64_t{kPerVector}, x.features - column))) : 0;
    visit(token, feature / 4, x.data + row * x.stride + column, inside);
  }
}

template <class T>
__device__ __forceinline__ void load_tile(TileOfX<T>& tile, const Rows24<const T>& x,
                                          const TileCoord& coord) {
  constexpr int kPerVector = 16 / int(sizeof(T));
  for_each_vector(x, coord, [&](int token, int chunk, const T* from, int inside) {
    uint4 words{};
    if (x.vectors && inside == kPerVector) {
      words = __ldcs(reinterpret_cast<const uint4*>(from));
    } else if (inside > 0) {
      T elements[kPerVector];
#pragma unroll
      for (int i = 0; i < kPerVector; ++i) elements[i] = i < inside ? from[i] : T(0.0f);
      memcpy(&words, elements, 16);
    }
    *reinterpret_cast<uint4*>(tile.chunk(token, chunk)) = words;
  });
}

template <class T>
__device__ __forceinline__ void store_tile(TileOfX<T>& tile, const Rows24<T>& y, const TileCoord& coord) {
  constexpr int kPerVector = 16 / int(sizeof(T));
  for_each_vector(y, coord, [&](int token, int chunk, T* to, int inside) {
    const uint4 words = *reinterpret_cast<const uint4*>(tile.chunk(token, chunk));
    if (y.vectors && inside == kPerVector) {
      __stcs(reinterpret_cast<uint4*>(to), words);
    } else if (inside > 0) {
      T elements[kPerVector];
      memcpy(elements, &words, 16);
#pragma unroll
      for (int i = 0; i < kPerVector; ++i)
        if (i < inside) to[i] = elements[i];
    }
  });
}

/// The four elements of a group of A: row `row` and group `group` of the tile.
template <Along24 kAlong, class T>
__device__ __forceinline__ void read_group(TileOfX<T>& tile, int row, int group, T (&x)[4]) {
  if constexpr (kAlong == Along24::features) {
    const Chunk<T> words = *reinterpret_cast<const Chunk<T>*>(tile.chunk(row, group));
    memcpy(x, &words, sizeof words);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = tile.at(group * 4 + i, row);
  }
}
template <Along24 kAlong, class T>
__device__ __forceinline__ void write_group(TileOfX<T>& tile, int row, int group, const T (&x)[4]) {
  if constexpr (kAlong == Along24::features) {
    Chunk<T> words;
    memcpy(&words, x, sizeof words);
    *reinterpret_cast<Chunk<T>*>(tile.chunk(row, group)) = words;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) tile.at(group * 4 + i, row) = x[i];
  }
}

/// Of this thread's groups: byte 2 step + half holds the positions of row 16 w + g (low) and of row + 8. The
/// word that it stores or loads has those of step c / 2, half c % 2 of all four lanes.
__device__ __forceinline__ uint32_t word_of_nibbles(uint32_t nibbles) {
  const int lane = int(threadIdx.x) % 32, c = lane % 4;
  uint32_t word = 0;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const uint32_t both = __shfl_sync(0xFFFFFFFFu, nibbles, lane - c + q) >> 8 * c;
    word |= (both & 0xF) << 4 * q | (both >> 4 & 0xF) << (16 + 4 * q);
  }
  return word;
}
__device__ __forceinline__ uint32_t nibbles_of_word(uint32_t word) {
  const int lane = int(threadIdx.x) % 32, c = lane % 4;
  uint32_t nibbles = 0;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const uint32_t other = __shfl_sync(0xFFFFFFFFu, word, lane - c + q) >> 4 * c;
    nibbles |= ((other & 0xF) | (other >> 16 & 0xF) << 4) << 8 * q;
  }
  return nibbles;
}

/// One direction's matrix.
template <class T>
struct Matrix24 {
  T* values;
  int32_t* metadata;
};

/// The values of one step: 8 elements.
template <class T>
__device__ __forceinline__ void store_values(T* to, const T (&values)[8]) {
  uint4 words[sizeof(T) / 2];
  memcpy(words, values, sizeof values);
#pragma unroll
  for (int i = 0; i < int(sizeof(T) / 2); ++i) reinterpret_cast<uint4*>(to)[i] = words[i];
}
template <class T>
__device__ __forceinline__ void load_values(T (&values)[8], const T* from) {
  uint4 words[sizeof(T) / 2];
#pragma unroll
  for (int i = 0; i < int(sizeof(T) / 2); ++i) words[i] = __ldcs(reinterpret_cast<const uint4*>(from) + i);
  memcpy(values, words, sizeof values);
}

template <class T, class Given>
Rows24<Given> rows_of(const Tensor& x) {
  const int64_t stride = x.size(0) > 1 ? x.layout().stride(0) : x.size(1);
  T* const data = x.data<T>();
  return {data, x.size(0), x.size(1), stride,
          reinterpret_cast<uintptr_t>(data) % 16 == 0 && (x.size(0) == 1 || stride * sizeof(T) % 16 == 0)};
}

/// x itself if its rows are dense, else a copy.
Tensor dense_rows(const Tensor& x) {
  return x.size(1) <= 1 || x.layout().stride(1) == 1 ? x : x.clone();
}

dim3 tiles_of(const Tensor& x) {
  return gpu::grid_of(gpu::ceil_div(x.size(0), kTileRows) * gpu::ceil_div(x.size(1), kTileDepth));
}

template <class T>
Matrix24<T> matrix_of(const Sparse24& x) {
  if (!x.defined()) return {};
  return {x.values.data<T>(), x.metadata.data<int32_t>()};
}

}  // namespace
}  // namespace tessera::ops

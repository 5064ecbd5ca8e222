#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "runtime/integers.h"
#include "runtime/parallel.h"
#include "tensor/convert.h"
#include "tensor/layout.h"
#include "tensor/tensor.h"

namespace tessera {

/// An iteration space over N operands with their strides: drops dimensions of size 1 and merges neighbours
/// that are contiguous in every operand, so packed tensors have one dimension and pitched ones two. The last
/// dimension is the innermost. Trivially copyable: a kernel argument.
template <int N>
struct StridedLoop {
  int rank = 0;       // 1 ... kMaxRank (a scalar has one dimension of size 1)
  int64_t count = 0;  // product of the sizes
  int64_t sizes[kMaxRank] = {};
  int64_t strides[N][kMaxRank] = {};  // in elements
};

/// The loop over `shape`, to which every operand's layout broadcasts (aligned at the end).
template <int N>
StridedLoop<N> make_loop(const Shape& shape, const std::array<const Layout*, N>& operands) {
  StridedLoop<N> loop;
  loop.count = shape.count();
  for (int dim = 0; dim < shape.rank(); ++dim) {
    const int64_t size = shape[dim];
    if (size == 1) continue;
    int64_t strides[N];
    for (int n = 0; n < N; ++n) {
      const Layout& layout = *operands[size_t(n)];
      const int own = dim - (shape.rank() - layout.rank());
      strides[n] = own < 0 || layout.shape[own] == 1 ? 0 : layout.strides[size_t(own)];
    }
    bool merges = loop.rank > 0;
    for (int n = 0; n < N && merges; ++n) merges = loop.strides[n][loop.rank - 1] == strides[n] * size;
    if (merges) {
      loop.sizes[loop.rank - 1] *= size;
    } else {
      loop.sizes[loop.rank++] = size;
    }
    for (int n = 0; n < N; ++n) loop.strides[n][loop.rank - 1] = strides[n];
  }
  if (loop.rank == 0) {
    loop.rank = 1;
    loop.sizes[0] = 1;
  }
  return loop;
}

template <class... Tensors>
StridedLoop<int(sizeof...(Tensors))> make_loop(const Shape& shape, const Tensors&... tensors) {
  return make_loop<int(sizeof...(Tensors))>(shape, {&tensors.layout()...});
}

/// Which dimensions a loop on the CPU walks along: `inner`, along which operand 0, the result, is contiguous
/// (else the last one), and `crossing`, along which another operand is whose elements lie far apart along
/// `inner`, as a transposed one's do; -1: none.
struct Directions {
  int inner, crossing = -1;
};

template <int N>
Directions directions_of(const StridedLoop<N>& loop) {
  constexpr int64_t kFar = 16, kLong = 32;  // elements: of four bytes, one and two cache lines
  const auto runs_along = [&](int n, int dim) {
    return loop.strides[n][dim] == 1 && loop.sizes[dim] >= kLong;
  };
  Directions found{.inner = loop.rank - 1};
  for (int dim = 0; dim < loop.rank - 1; ++dim)
    if (runs_along(0, dim) && loop.strides[0][loop.rank - 1] >= kFar) found.inner = dim;
  for (int n = 0; n < N; ++n)
    for (int dim = 0; dim < loop.rank; ++dim)
      if (loop.strides[n][found.inner] >= kFar && runs_along(n, dim)) found.crossing = dim;
  return found;
}

constexpr int64_t kTileSide = 32;  // elements: as many lines of a transposed operand stay in the cache

/// Runs the loop on the CPU's threads: `run(offsets, strides, n, across, rows)` handles `rows` rows of n
/// elements: element i of row r is at offsets[k] + i * strides[k] + r * across[k] in operand k. Tiles are
/// disjoint and run in any order. Where an operand is transposed, they have at most kTileSide rows and
/// columns and the rows are neighbours in it, so that its cache lines are used while they are there; else
/// they are one row.
template <int N, class Run>
void for_each_tile(const StridedLoop<N>& loop, Run&& run) {
  if (loop.count == 0) return;
  constexpr int64_t kGrain = 8192;  // elements per block: 2 us of additions, 8 us of exponentials
  const Directions directions = directions_of(loop);
  const int inner = directions.inner, crossing = directions.crossing;
  const int64_t length = loop.sizes[inner], most = crossing >= 0 ? kTileSide : kGrain;
  const int64_t pieces_per_row = ceil_div(length, most), pieces = loop.count / length * pieces_per_row;
  const int64_t abreast = crossing >= 0 ? loop.sizes[crossing] : 1;
  std::array<int64_t, N> strides, across{};
  for (int n = 0; n < N; ++n) {
    strides[size_t(n)] = loop.strides[n][inner];
    if (crossing >= 0) across[size_t(n)] = loop.strides[n][crossing];
  }
  const auto block = [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end;) {
      const int64_t at = piece % abreast, first = piece / abreast % pieces_per_row * most;
      int64_t row = piece / abreast / pieces_per_row;
      std::array<int64_t, N> offsets;
      for (int n = 0; n < N; ++n) offsets[size_t(n)] = at * across[size_t(n)] + first * strides[size_t(n)];
      for (int dim = loop.rank - 1; dim >= 0; --dim) {
        if (dim == inner || dim == crossing) continue;
        const int64_t index = row % loop.sizes[dim];
        row /= loop.sizes[dim];
        for (int n = 0; n < N; ++n) offsets[size_t(n)] += index * loop.strides[n][dim];
      }
      const int64_t rows = std::min({kTileSide, end - piece, abreast - at});
      run(std::as_const(offsets), std::as_const(strides), std::min(most, length - first),
          std::as_const(across), rows);
      piece += rows;
    }
  };
  parallel_for(pieces, std::max<int64_t>(1, kGrain / std::min(length, most)), block);
}

/// The same row by row: `run(offsets, strides, n)`.
template <int N, class Run>
void for_each_run(const StridedLoop<N>& loop, Run&& run) {
  for_each_tile(loop, [&](std::array<int64_t, N> offsets, const auto& strides, int64_t n, const auto& across,
                          int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) {
      run(std::as_const(offsets), strides, n);
      for (size_t k = 0; k < N; ++k) offsets[k] += across[k];
    }
  });
}

}  // namespace tessera

#include <algorithm>
#include <limits>

#include "ops/gemm/gemm.h"
#include "ops/gemm/sgemm_internal.h"
#include "runtime/integers.h"
#include "runtime/parallel.h"

/// The plain loops are the specification: each element is a sum over k in ascending order, in blocks of
/// kDepth whose sums are added up, whatever the threads. They run over panels of B (kDepth x kWidth, copied
/// together so that a panel stays in the second-level cache while all rows pass), four rows of A at a time.

namespace tessera::ops {
namespace {

constexpr int64_t kDepth = 256, kWidth = 32;  // a panel of doubles: 64 KiB
constexpr int64_t kBlas = 32 * 32 * 32;       // multiply-adds above which OpenBLAS's set-up is paid back

template <class T>
struct Matrix {
  T* data;
  int64_t row, column;  // strides
  T& at(int64_t r, int64_t c) const { return data[r * row + c * column]; }
};

/// d (kRows rows, `width` columns) += alpha a panel
template <int kRows, class T>
void add_rows(const Matrix<T>& d, const Matrix<const T>& a, const T* panel, int64_t depth, int64_t width,
              T alpha) {
  T sum[kRows][kWidth] = {};
  for (int64_t k = 0; k < depth; ++k)
    for (int r = 0; r < kRows; ++r) {
      const T factor = a.at(r, k);
      for (int64_t c = 0; c < kWidth; ++c) sum[r][c] += factor * panel[k * kWidth + c];
    }
  for (int r = 0; r < kRows; ++r)
    for (int64_t c = 0; c < width; ++c) d.at(r, c) += alpha * sum[r][c];
}

template <class T>
void plain_rows(const Matrix<T>& d, const Matrix<const T>& a, const Matrix<const T>& b, int64_t rows,
                int64_t n, int64_t k, T alpha, T beta) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < n; ++c) d.at(r, c) = beta == T(0) ? T(0) : beta * d.at(r, c);
  T panel[kDepth * kWidth];
  for (int64_t k0 = 0; k0 < k; k0 += kDepth) {
    const int64_t depth = std::min(kDepth, k - k0);
    for (int64_t c0 = 0; c0 < n; c0 += kWidth) {
      const int64_t width = std::min(kWidth, n - c0);
      for (int64_t i = 0; i < depth; ++i)
        for (int64_t c = 0; c < kWidth; ++c) panel[i * kWidth + c] = c < width ? b.at(k0 + i, c0 + c) : T(0);
      const auto d_at = [&](int64_t r) { return Matrix<T>{&d.at(r, c0), d.row, d.column}; };
      const auto a_at = [&](int64_t r) { return Matrix<const T>{&a.at(r, k0), a.row, a.column}; };
      int64_t r = 0;
      for (; r + 4 <= rows; r += 4) add_rows<4>(d_at(r), a_at(r), panel, depth, width, alpha);
      for (; r < rows; ++r) add_rows<1>(d_at(r), a_at(r), panel, depth, width, alpha);
    }
  }
}

/// The partition of the GEMMs into tiles of `rows` x `columns` of D, each with all of k. It follows from the
/// shape alone, never from the number of threads: in sgemm an element's bits depend on its place in the tile.
struct Tiling {
  int64_t rows, columns;
};

struct TilingLimits {
  Tiling largest, smallest;
  int64_t work;  // multiply-adds below which a tile is not cut for the sake of another thread: about 14 us
};

int64_t tiles_of(const Gemm& g, const Tiling& tiling) {
  return g.batch * ceil_div(g.m, tiling.rows) * ceil_div(g.n, tiling.columns);
}

/// The largest tiles that give kTiles of them, so that 8 threads are balanced; fewer if those would be small.
Tiling tiling_of(const Gemm& g, const TilingLimits& limits) {
  constexpr int64_t kTiles = 16;
  constexpr int64_t kMultiple = 16;  // rows and columns of OpenBLAS's innermost loops
  Tiling tiling{std::min(g.m, limits.largest.rows), std::min(g.n, limits.largest.columns)};
  while (tiles_of(g, tiling) < kTiles && tiling.rows * tiling.columns * g.k >= 2 * limits.work) {
    const bool rows = tiling.rows > limits.smallest.rows, columns = tiling.columns > limits.smallest.columns;
    if (!rows && !columns) break;
    int64_t& side = rows && (!columns || tiling.rows >= tiling.columns) ? tiling.rows : tiling.columns;
    side = round_up(ceil_div(side, 2), kMultiple);
  }
  return tiling;
}

/// Calls tile(matrix, row, rows, column, columns) for all tiles, on the CPU's threads.
template <class Tile>
void for_each_tile(const Gemm& g, const TilingLimits& limits, Tile&& tile) {
  const Tiling tiling = tiling_of(g, limits);
  const int64_t across = ceil_div(g.n, tiling.columns), down = ceil_div(g.m, tiling.rows);
  const int64_t grain =
      std::max<int64_t>(1, limits.work / std::max<int64_t>(1, tiling.rows * tiling.columns * g.k));
  parallel_for(g.batch * down * across, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / across % down * tiling.rows, column = i % across * tiling.columns;
      tile(i / across / down, row, std::min(tiling.rows, g.m - row), column,
           std::min(tiling.columns, g.n - column));
    }
  });
}

template <class T>
void plain_gemm(const Gemm& g) {
  // A tile copies its panels of B: with 32 rows that is a tenth of its time.
  constexpr TilingLimits kLimits{{128, 256}, {32, kWidth}, 64 * 1024};
  const auto matrix = [](const void* base, int64_t offset, int64_t ld, bool transposed) {
    return Matrix<const T>{static_cast<const T*>(base) + offset, transposed ? 1 : ld, transposed ? ld : 1};
  };
  for_each_tile(g, kLimits, [&](int64_t i, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    const Matrix<const T> a = matrix(g.a, i * g.stride_a, g.lda, g.transpose_a),
                          b = matrix(g.b, i * g.stride_b, g.ldb, g.transpose_b);
    plain_rows<T>({static_cast<T*>(g.d) + i * g.stride_d + row * g.ldd + column, g.ldd, 1},
                  {&a.at(row, 0), a.row, a.column}, {&b.at(0, column), b.row, b.column}, rows, columns, g.k,
                  T(g.alpha), T(g.beta));
  });
}

bool fits_blas(const Gemm& g) {
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  return std::max({g.m, g.n, g.k, g.lda, g.ldb, g.ldd}) <= kMost && g.m * g.n >= kBlas / g.k;
}

void blas_gemm(const Gemm& g) {
  // Each tile packs its parts of A and B: tiles of 256 x 512 cost up to 12 % of one whole sgemm's time, 128 x
  // 256 up to 17 %, 64 x 64 up to 36 % (EPYC of the third generation, sizes from 256 to 2048).
  constexpr TilingLimits kLimits{{256, 512}, {32, 64}, 512 * 1024};
  for_each_tile(g, kLimits, [&](int64_t i, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    sgemm(rows, columns, g.k, float(g.alpha),
          {static_cast<const float*>(g.a) + i * g.stride_a + row * (g.transpose_a ? 1 : g.lda), g.lda,
           g.transpose_a},
          {static_cast<const float*>(g.b) + i * g.stride_b + column * (g.transpose_b ? g.ldb : 1), g.ldb,
           g.transpose_b},
          float(g.beta), static_cast<float*>(g.d) + i * g.stride_d + row * g.ldd + column, g.ldd);
  });
}

}  // namespace

void gemm_cpu(const Gemm& gemm) {
  if (gemm.in == DType::f64) return plain_gemm<double>(gemm);
  check(gemm.in == DType::f32, "gemm: dtype ", gemm.in, " is not supported on device cpu; widen it to f32");
  if (fits_blas(gemm)) return blas_gemm(gemm);
  plain_gemm<float>(gemm);
}

}  // namespace tessera::ops

#include <cblas.h>

#include <algorithm>
#include <limits>

#include "ops/matmul/gemm.h"
#include "runtime/parallel.h"

/// The plain loops are the specification: each element is a sum over k in ascending order, in blocks of
/// kDepth whose sums are added up, whatever the threads. They run over panels of B (kDepth x kWidth, copied
/// together so that a panel stays in the second-level cache while all rows pass), four rows of A at a time.

namespace tessera::ops {
namespace {

constexpr int64_t kDepth = 256, kWidth = 32;  // a panel of doubles: 64 KiB
constexpr int64_t kBlas = 32 * 32 * 32;       // multiply-adds above which OpenBLAS's set-up is paid back
constexpr int64_t kGrain = 64 * 1024;         // multiply-adds below which a thread is not worth waking

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

template <class T>
void plain_gemm(const Gemm& g) {
  const auto matrix = [](const void* base, int64_t offset, int64_t ld, bool transposed) {
    return Matrix<const T>{static_cast<const T*>(base) + offset, transposed ? 1 : ld, transposed ? ld : 1};
  };
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, g.n * g.k));
  parallel_for(g.batch * g.m, grain, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t i = begin / g.m, row = begin % g.m, rows = std::min(end - begin, g.m - row);
      const Matrix<const T> a = matrix(g.a, i * g.stride_a, g.lda, g.transpose_a);
      plain_rows<T>({static_cast<T*>(g.d) + i * g.stride_d + row * g.ldd, g.ldd, 1},
                    {&a.at(row, 0), a.row, a.column}, matrix(g.b, i * g.stride_b, g.ldb, g.transpose_b), rows,
                    g.n, g.k, T(g.alpha), T(g.beta));
      begin += rows;
    }
  });
}

bool fits_blas(const Gemm& g) {
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  return std::max({g.m, g.n, g.k, g.lda, g.ldb, g.ldd}) <= kMost && g.m * g.n >= kBlas / g.k;
}

void blas_gemm(const Gemm& g) {
  const auto one = [&](int64_t i) {
    cblas_sgemm(CblasRowMajor, g.transpose_a ? CblasTrans : CblasNoTrans,
                g.transpose_b ? CblasTrans : CblasNoTrans, int(g.m), int(g.n), int(g.k), float(g.alpha),
                static_cast<const float*>(g.a) + i * g.stride_a, int(g.lda),
                static_cast<const float*>(g.b) + i * g.stride_b, int(g.ldb), float(g.beta),
                static_cast<float*>(g.d) + i * g.stride_d, int(g.ldd));
  };
  // A thread a product, if there are enough: OpenBLAS's OpenMP build starts no threads inside a parallel
  // region. Its other builds would, so there each product gets all threads in turn.
  if (g.batch < cpu_threads() || openblas_get_parallel() != OPENBLAS_OPENMP) {
    for (int64_t i = 0; i < g.batch; ++i) one(i);
  } else {
    const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, g.m * g.n * g.k));
    parallel_for(g.batch, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) one(i);
    });
  }
}

}  // namespace

void gemm_cpu(const Gemm& gemm) {
  if (gemm.in == DType::f64) return plain_gemm<double>(gemm);
  check(gemm.in == DType::f32, "gemm: dtype ", gemm.in, " is not supported on device cpu; widen it to f32");
  if (fits_blas(gemm)) return blas_gemm(gemm);
  plain_gemm<float>(gemm);
}

}  // namespace tessera::ops

#include "ops/gemm/inner_products.h"

#include <algorithm>
#include <limits>

#include "ops/gemm/gemm.h"
#include "ops/gemm/sgemm_internal.h"
#include "runtime/integers.h"
#include "runtime/parallel.h"

namespace tessera::ops {
namespace {

/// A matrix of doubles in host memory, row by row.
struct Rows {
  double* data;
  int64_t ld;

  explicit Rows(const Tensor& x)
      : data(x.data<double>()), ld(x.size(0) > 1 ? x.layout().stride(0) : x.size(1)) {}
  double* at(int64_t row, int64_t column) const { return data + row * ld + column; }
};

bool by_blas(const Tensor& d) {
  return d.device().is_cpu() && d.dtype() == DType::f64;
}

void check_features(const char* op, const Tensor& d, const Tensor& x, const Tensor& y) {
  const auto is_matrix = [](const Tensor& t) { return t.defined() && t.rank() == 2; };
  check(is_matrix(d) && is_matrix(x) && is_matrix(y) && x.size(0) == y.size(0) && d.size(0) == x.size(1) &&
            d.size(1) == y.size(1),
        op, ": d is ", describe(d), ", x ", describe(x), ", y ", describe(y),
        "; expected [p, q], [tokens, p] and [tokens, q]");
  if (!by_blas(d)) return;
  for (const Tensor* t : {&d, &x, &y}) {
    check(t->dtype() == DType::f64 && t->device() == d.device(), op, ": ", describe(*t),
          "; expected f64 on the CPU, as d has it");
    check(t->size(1) <= 1 || t->layout().stride(1) == 1, op, ": ", describe(*t),
          " has rows that are not dense; clone() it first");
    check(std::max({t->size(0), t->size(1), Rows(*t).ld}) <= std::numeric_limits<int>::max(), op, ": ",
          describe(*t), " is larger than BLAS counts");
  }
}

/// Side of the square tiles of D: 256, which costs little packing, or less so that 8 threads have some 16
/// tiles (36 of a triangle of 1,024 columns), but not below 64.
int64_t tile_side(int64_t rows, int64_t columns) {
  constexpr int64_t kMost = 256, kLeast = 64, kTiles = 16;
  int64_t side = kMost;
  const auto tiles = [&] { return ceil_div(rows, side) * ceil_div(columns, side); };
  while (side > kLeast && tiles() < 2 * kTiles) side /= 2;
  return side;
}

/// One tile of the triangle, and its mirror image below the diagonal.
void gram_tile(const Rows& d, const Rows& x, int64_t tokens, int64_t row, int64_t rows, int64_t column,
               int64_t columns) {
  if (row == column) {
    dsyrk(rows, tokens, x.at(0, row), x.ld, d.at(row, row), d.ld);
  } else {
    dgemm_at_b(rows, columns, tokens, {x.at(0, row), x.ld}, {x.at(0, column), x.ld}, d.at(row, column), d.ld);
  }
  for (int64_t r = row; r < row + rows; ++r)
    for (int64_t c = std::max(column, r + 1); c < column + columns; ++c) *d.at(c, r) = *d.at(r, c);
}

}  // namespace

void add_inner_products(const Tensor& d, const Tensor& x, const Tensor& y) {
  check_features("add_inner_products", d, x, y);
  if (!by_blas(d)) {
    multiply(d, x.transpose(0, 1), y, {.accumulate = true});
    return;
  }
  const int64_t tokens = x.size(0), p = d.size(0), q = d.size(1);
  if (d.count() == 0 || tokens == 0) return;
  const Rows sums(d), left(x), right(y);
  const int64_t side = tile_side(p, q), across = ceil_div(q, side), down = ceil_div(p, side);
  parallel_for(down * across, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / across * side, column = i % across * side;
      dgemm_at_b(std::min(side, p - row), std::min(side, q - column), tokens, {left.at(0, row), left.ld},
                 {right.at(0, column), right.ld}, sums.at(row, column), sums.ld);
    }
  });
}

void add_gram(const Tensor& d, const Tensor& x) {
  check_features("add_gram", d, x, x);
  if (!by_blas(d)) {
    multiply(d, x.transpose(0, 1), x, {.accumulate = true});
    return;
  }
  const int64_t tokens = x.size(0), n = d.size(0);
  if (n == 0 || tokens == 0) return;
  const Rows sums(d), rows(x);
  const int64_t side = tile_side(n, n), across = ceil_div(n, side);
  // Tiles on and above the diagonal, row by row: the row of tiles that tile i lies in is found by counting.
  parallel_for(across * (across + 1) / 2, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      int64_t down = 0, at = i;
      while (at >= across - down) at -= across - down++;
      const int64_t row = down * side, column = (down + at) * side;
      gram_tile(sums, rows, tokens, row, std::min(side, n - row), column, std::min(side, n - column));
    }
  });
}

}  // namespace tessera::ops

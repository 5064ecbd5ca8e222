#pragma once

#include "runtime/integers.h"
#include "tensor/tensor.h"

/// The kernels of Muon other than GEMMs. All matrices of a batch [B, rows, columns] at once; rows are dense,
/// the matrices and their rows any distances apart.

namespace tessera::optim {

/// x = d / |d|_F, each matrix by its own norm, or zeros where that is 0: d f32 (f64), x f32, bf16 (f64).
/// Squares are added in f64 in a fixed order. `partials`: f64, normalize_parts(d) per matrix.
void normalize_cpu(const Tensor& x, const Tensor& d, const Tensor& partials);
void normalize_cuda(const Tensor& x, const Tensor& d, const Tensor& partials);
int64_t normalize_parts(const Tensor& d);

/// p = b a_ + a I, square, of one dtype; c a_^2 remains to be added.
void begin_polynomial_cpu(const Tensor& p, const Tensor& gram, double a, double b);
void begin_polynomial_cuda(const Tensor& p, const Tensor& gram, double a, double b);

/// Rows of a matrix that one block of threads takes: about 16,384 elements.
inline int64_t rows_per_part(int64_t columns) {
  return columns >= 16384 ? 1 : ceil_div(16384, columns);
}

}  // namespace tessera::optim

#pragma once

#include "tensor/tensor.h"

/// Sums over tokens of products of two features: the statistics that pruning and calibration collect.

namespace tessera::ops {

/// d += x^T y, of x [tokens, p], y [tokens, q] and d [p, q], all of one device, each with dense rows or rows
/// with a stride. In f64 on the CPU where d has it, else by `multiply` in the dtypes that it takes. No
/// gradient.
///
/// In f64 on the CPU this is OpenBLAS, where `multiply` is the plain loops of the oracle. d is cut into tiles
/// that follow from its shape alone, each of them one call of OpenBLAS on one thread with all tokens, so the
/// number of threads changes no bit. Throws if the sizes do not agree, or if d alone is f64 on the CPU.
void add_inner_products(const Tensor& d, const Tensor& x, const Tensor& y);

/// d += x^T x of x [tokens, n] and a symmetric d [n, n]. In f64 on the CPU the triangle above the diagonal,
/// which is then mirrored, so that d is symmetric to the bit; of d only that triangle is read.
void add_gram(const Tensor& d, const Tensor& x);

}  // namespace tessera::ops

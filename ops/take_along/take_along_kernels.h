#pragma once

#include "ops/take_along/take_along.h"

namespace tessera::ops {

/// y = the elements of x that the indices name along `dim`; y is not empty.
void take_along_cpu(const Tensor& y, const Tensor& x, const Tensor& indices, int dim);
void take_along_cuda(const Tensor& y, const Tensor& x, const Tensor& indices, int dim);

/// dx [L, R] = the sums of dy [L, N] by the indices [L, N], all packed; dx is not empty, N may be 0. On a GPU
/// only if put_along_compares(N).
void put_along_cpu(const Tensor& dx, const Tensor& dy, const Tensor& indices);
void put_along_cuda(const Tensor& dx, const Tensor& dy, const Tensor& indices);
bool put_along_compares(int64_t n);

/// On a GPU for more indices: their numbers in all of dx, i64 [L N] for an indices
/// packed [L, N] and lines of `length`; -1 for those outside.
void number_in_lines_cuda(const Tensor& numbers, const Tensor& indices, int64_t length);

/// last [L, R] = the largest n with indices [L, n] == r, or -1: i64; all packed, last is not empty.
void last_along_cpu(const Tensor& last, const Tensor& indices);
void last_along_cuda(const Tensor& last, const Tensor& indices);
/// dsrc [L, N] = dy [L, R] at the indices [L, N] of which n is the last, else 0; all packed, dsrc not empty.
void last_gradient_cpu(const Tensor& dsrc, const Tensor& dy, const Tensor& last, const Tensor& indices);
void last_gradient_cuda(const Tensor& dsrc, const Tensor& dy, const Tensor& last, const Tensor& indices);

/// y [..., classes] = 1 at the indices [...], else 0; y is not empty.
void one_hot_cpu(const Tensor& y, const Tensor& indices);
void one_hot_cuda(const Tensor& y, const Tensor& indices);

}  // namespace tessera::ops

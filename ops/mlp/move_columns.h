#pragma once

#include "tensor/tensor.h"

/// Some columns of a matrix (or, of transposed views, rows): x [R, C] and part [R, N] of one floating dtype,
/// any strides; indices i32 [N], packed, on their device, each column at most once and, on the
/// CPU, all of them columns of x; a GPU skips one that is not. Internal to ops/mlp.

namespace tessera::ops {

/// part[r, i] = x[r, indices[i]]; `clears`: and x[r, indices[i]] = 0.
void take_columns(const Tensor& part, const Tensor& x, const Tensor& indices, bool clears);
/// x[r, indices[i]] += part[r, i], rounded once.
void add_columns(const Tensor& x, const Tensor& part, const Tensor& indices);

enum class Move : uint8_t { take, take_and_clear, add };
void move_columns_cpu(const Tensor& x, const Tensor& part, const Tensor& indices, Move how);
void move_columns_cuda(const Tensor& x, const Tensor& part, const Tensor& indices, Move how);

}  // namespace tessera::ops

#pragma once

#include "ops/reduce/reduce.h"
#include "ops/reduce/reduce_plan.h"

namespace tessera::ops {

enum class ReduceKind : uint8_t { sum, mean, max, min, norm };
const char* name_of(ReduceKind kind);

/// y = the reduction of x that the plan (of x's and y's layouts) describes; plan.length >= 1. A sum or
/// norm may be written to an f32 y from a 16-bit x.
void reduce_cpu(const Tensor& y, const Tensor& x, const ReducePlan& plan, ReduceKind kind);
void reduce_cuda(const Tensor& y, const Tensor& x, const ReducePlan& plan, ReduceKind kind);

/// dx = dy / count, dy broadcasting to dx.
void spread_cpu(const Tensor& dx, const Tensor& dy, int64_t count);
void spread_cuda(const Tensor& dx, const Tensor& dy, int64_t count);

/// dx = dy x / y, 0 where y is 0; dy and y broadcast to x.
void l2_backward_cpu(const Tensor& dx, const Tensor& dy, const Tensor& x, const Tensor& y);
void l2_backward_cuda(const Tensor& dx, const Tensor& dy, const Tensor& x, const Tensor& y);

/// Of max and min. dx = dy at the first element along `dim` that equals y (or is NaN, if y is), else 0. y is
/// packed.
void max_backward_cpu(const Tensor& dx, const Tensor& dy, const Tensor& x, const Tensor& y, int dim);
/// The index of that element. y and index are packed.
void find_first_cpu(const Tensor& index, const Tensor& x, const Tensor& y, int dim);

/// On a GPU both at once: y, unless it is undefined, and the index of that element in row-major order of what
/// the plan reduces; index [outputs] is i64 and packed. `most`: the maximum. Only if is_one_pass(plan).
void choose_cuda(const Tensor& y, const Tensor& index, const Tensor& x, const ReducePlan& plan, bool most);
/// dx = dy at those elements, else 0; the plan is that of dx's and dy's layouts.
void choose_backward_cuda(const Tensor& dx, const Tensor& dy, const Tensor& index, const ReducePlan& plan);

}  // namespace tessera::ops

#pragma once

#include <optional>
#include <vector>

#include "ops/linear/sliced_backward.h"
#include "ops/op.h"

/// The slice of an operator as attributes of its declaration: what linear and mlp have in common.

namespace tessera::ops {

/// slice, rows, share, threshold, weight_grad and seed.
std::vector<AttrSpec> slice_attrs();
/// What they say, drawing from `rng`; none if slice is "none". Throws, beginning with `op`, if they do not go
/// together.
std::optional<SlicedBackward> slice_of(const char* op, const Attrs& attrs, const Rng& rng);
/// How many of `rows` rows a backward pass multiplies.
int64_t sliced_rows(const Attrs& attrs, int64_t rows);

/// Attributes of a case: `count` rows, or a threshold that some rows of a test reach.
Attrs slice_case(SelectMode mode, int64_t count, WeightGrad kind = WeightGrad::slice);
/// The case in every mode and kind, at `count` rows.
void add_slice_cases(std::vector<Case>& cases, const Case& plain, int64_t count);
/// For OpSpec::sweep: a slice of a random share of the rows for one in five. Only modes whose rows do not
/// depend on norms, since those differ between the precisions that are compared.
void draw_slice(Draw& draw, Case& drawn);

}  // namespace tessera::ops

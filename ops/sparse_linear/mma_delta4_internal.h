#pragma once

#include <string>

#include "ops/sparse_linear/sparse_weight.h"

/// The arrays of format mma_delta4 (sparse_weight.h).

namespace tessera::ops {

/// Sets the arrays and `stored` of a weight of which the other fields are given. `dense`: its matrix, on the
/// CPU, with dense rows.
void compress_mma_delta4(SparseWeight& made, const Tensor& dense);

/// validate() of one.
SparseCounts validate_mma_delta4(const SparseWeight& weight, const std::string& name);

/// Throws unless the array is there, of that dtype and so long.
void check_array(const std::string& name, const char* what, const Tensor& array, DType dtype, int64_t count);

/// Throws unless `count` slices or streams (`what`) have chunks one after the other, and all of these are
/// there.
void check_chunks(const SparseWeight& weight, const std::string& name, const char* what, int64_t count);

}  // namespace tessera::ops

#pragma once

#include "ops/select/select.h"
#include "ops/select/select_math.h"
#include "ops/variant.h"

namespace tessera::ops {

/// How rows are chosen on a GPU, in the order of the variants: by one block, or by a grid.
enum class SelectWay : uint8_t { block, grid };
SelectWay select_way(int64_t rows, const Gpu& gpu);
std::vector<std::string> select_variants();

/// One selection, its operands checked. An undefined tensor: not used by the mode, or not given.
struct SelectCall {
  SelectMode mode = SelectMode::first;
  Selection result;        // to be written; packed
  Tensor norms = {};       // f32 [M], packed
  SelectionCounts counts;  // i32 [1]
  int64_t n = 0;           // at most this many; the capacity
  float threshold = 0;
  RandomStream stream = {};
};

void select_cpu(const SelectCall& call);
void select_cuda(const SelectCall& call);

/// y[n] = x[indices[n]] (times scales[n] if defined), 0 for an index outside x.
void gather_selected_cpu(const Tensor& y, const Tensor& x, const Tensor& indices, const Tensor& scales);
void gather_selected_cuda(const Tensor& y, const Tensor& x, const Tensor& indices, const Tensor& scales);
/// y[indices[n]] = x[n] (times scales[n] if defined), 0 in the other rows; an index outside y is skipped.
/// `indices` ascends.
void scatter_selected_cpu(const Tensor& y, const Tensor& x, const Tensor& indices, const Tensor& scales);
void scatter_selected_cuda(const Tensor& y, const Tensor& x, const Tensor& indices, const Tensor& scales);

}  // namespace tessera::ops

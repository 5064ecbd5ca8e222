#pragma once

#include "ops/select/select.h"
#include "ops/select/select_math.h"
#include "ops/variant.h"

namespace tessera::ops {

/// How rows are chosen on a GPU, in the order of the variants: by one block, a grid, or a cluster of blocks.
enum class SelectWay : uint8_t { block, grid, cluster };
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
/// What the functions of Selection come down to: allocates and runs, its operands checked. `norms` is
/// undefined for the modes that read none.
Selection run_selection(SelectMode mode, const Tensor& norms, int64_t rows, int64_t n, Device device,
                        const SelectionCounts& counts, float threshold, const RandomStream& stream);

/// Norms of the rows of x [M, C], dense rows on 16-byte boundaries, in f32: variant "warp".
void row_norms_cuda(const Tensor& norms, const Tensor& x);
/// "reduce", the reduction of ops/reduce, and "warp".
std::vector<std::string> row_norms_variants();
/// What row_norms chooses on a GPU; x is not empty.
std::string_view row_norms_variant(const Tensor& x, const Gpu& gpu);

/// y[n] = x[indices[n]] (times scales[n] if defined), 0 for an index outside x.
void gather_selected_cpu(const Tensor& y, const Tensor& x, const Tensor& indices, const Tensor& scales);
void gather_selected_cuda(const Tensor& y, const Tensor& x, const Tensor& indices, const Tensor& scales);
/// y[indices[n]] = x[n] (times scales[n] if defined), 0 in the other rows; an index outside y is skipped.
/// `indices` ascends.
void scatter_selected_cpu(const Tensor& y, const Tensor& x, const Tensor& indices, const Tensor& scales);
void scatter_selected_cuda(const Tensor& y, const Tensor& x, const Tensor& indices, const Tensor& scales);
/// y[indices[n]] += x[n], in x's dtype, rounded once to y's: matrices with dense rows, x [capacity, C] in
/// sum_dtype of y's. An index outside y is skipped; each index occurs once.
void add_selected_cpu(const Tensor& y, const Tensor& x, const Tensor& indices);
void add_selected_cuda(const Tensor& y, const Tensor& x, const Tensor& indices);

}  // namespace tessera::ops

#pragma once

#include "runtime/config.h"
#include "tensor/layout.h"

namespace tessera::ops {

/// A reduction as kernels see it: the dimensions of x that stay, with the strides of x and y, and those that
/// are reduced, with the strides of x; both outermost first. A tensor of y's shape that is read with each
/// output has strides of its own: kept_z. Sizes of 1 are dropped and neighbours merged
/// where strides allow, so the usual tensors have one of each. Outputs are numbered in row-major order of
/// what stays. A plain value: it travels to a GPU as a kernel argument.
struct ReducePlan {
  int kept_rank = 0, reduced_rank = 0;
  int64_t outputs = 1;  // product of the kept sizes
  int64_t length = 1;   // product of the reduced sizes
  int64_t kept_sizes[kMaxRank] = {}, kept_x[kMaxRank] = {}, kept_y[kMaxRank] = {}, kept_z[kMaxRank] = {};
  int64_t reduced_sizes[kMaxRank] = {}, reduced_x[kMaxRank] = {};

  void keep(int64_t size, int64_t x, int64_t y, int64_t z = 0) {
    outputs *= size;
    if (size == 1) return;
    const int last = kept_rank - 1;
    if (last >= 0 && kept_x[last] == x * size && kept_y[last] == y * size && kept_z[last] == z * size) {
      kept_sizes[last] *= size, kept_x[last] = x, kept_y[last] = y, kept_z[last] = z;
    } else {
      kept_sizes[kept_rank] = size, kept_x[kept_rank] = x, kept_y[kept_rank] = y, kept_z[kept_rank++] = z;
    }
  }
  void reduce(int64_t size, int64_t x) {
    length *= size;
    if (size == 1) return;
    const int last = reduced_rank - 1;
    if (last >= 0 && reduced_x[last] == x * size) {
      reduced_sizes[last] *= size, reduced_x[last] = x;
    } else {
      reduced_sizes[reduced_rank] = size, reduced_x[reduced_rank++] = x;
    }
  }
  /// A plan that reduces nothing has one reduced dimension of size 1, so that kernels need not ask.
  void complete() {
    if (reduced_rank == 0) reduced_sizes[reduced_rank++] = 1;
  }
  /// The same outputs, written densely in their order.
  void pack_outputs() {
    int64_t stride = 1;
    for (int dim = kept_rank - 1; dim >= 0; --dim) {
      kept_y[dim] = stride;
      stride *= kept_sizes[dim];
    }
  }
  /// Where the output lies in y, and its first element in x.
  TESSERA_HD void offsets(int64_t output, int64_t& x, int64_t& y) const {
    x = y = 0;
#pragma unroll 1  // a division each: copies of it only cost registers
    for (int dim = kept_rank - 1; dim > 0; --dim) {
      const int64_t rest = quotient(output, kept_sizes[dim]), index = output - rest * kept_sizes[dim];
      x += index * kept_x[dim], y += index * kept_y[dim];
      output = rest;
    }
    if (kept_rank > 0) x += output * kept_x[0], y += output * kept_y[0];
  }
  /// Where its element of the other tensor lies.
  TESSERA_HD int64_t z_offset(int64_t output) const {
    int64_t z = 0;
#pragma unroll 1
    for (int dim = kept_rank - 1; dim > 0; --dim) {
      const int64_t rest = quotient(output, kept_sizes[dim]);
      z += (output - rest * kept_sizes[dim]) * kept_z[dim];
      output = rest;
    }
    return kept_rank > 0 ? z + output * kept_z[0] : z;
  }
  /// Where an element lies in x, seen from the first one of its output; `index` in row-major order of what is
  /// reduced.
  TESSERA_HD int64_t reduced_offset(int64_t index) const {
    int64_t x = 0;
    for (int dim = reduced_rank - 1; dim > 0; --dim) {
      const int64_t rest = quotient(index, reduced_sizes[dim]);
      x += (index - rest * reduced_sizes[dim]) * reduced_x[dim];
      index = rest;
    }
    return x + index * reduced_x[0];
  }

  /// a / b for a, b >= 0: in 32 bits, a third of the instructions of a GPU, where they suffice.
  static TESSERA_HD int64_t quotient(int64_t a, int64_t b) {
    return (a | b) >> 32 == 0 ? int64_t(uint32_t(a) / uint32_t(b)) : a / b;
  }
};

/// Whether one pass on a GPU takes the plan.
inline bool is_one_pass(const ReducePlan& plan) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;  // elements that a gpu::Divider splits
  return plan.reduced_rank == 1 || (plan.reduced_rank == 2 && plan.length <= kMost);
}

/// x reduced over one dimension; y lacks it or has it with size 1.
inline ReducePlan plan_dim(const Layout& x, int dim, const Layout& y) {
  ReducePlan plan;
  const int reduced = x.shape.resolve(dim);
  const bool keeps = y.rank() == x.rank();
  for (int d = 0; d < x.rank(); ++d) {
    const int64_t size = x.shape[d], stride = x.strides[size_t(d)];
    if (d == reduced) {
      plan.reduce(size, stride);
    } else {
      plan.keep(size, stride, y.strides[size_t(keeps || d < reduced ? d : d - 1)]);
    }
  }
  plan.complete();
  return plan;
}

/// x reduced to y, whose shape broadcasts to x's (rank 0: over all elements); z has y's shape.
inline ReducePlan plan_to(const Layout& x, const Layout& y, const Layout* z = nullptr) {
  ReducePlan plan;
  for (int d = 0; d < x.rank(); ++d) {
    const int64_t size = x.shape[d], stride = x.strides[size_t(d)];
    const int own = d - (x.rank() - y.rank());
    if (own < 0 || y.shape[own] != size) {
      plan.reduce(size, stride);
    } else {
      plan.keep(size, stride, y.strides[size_t(own)], z ? z->strides[size_t(own)] : 0);
    }
  }
  plan.complete();
  return plan;
}

}  // namespace tessera::ops

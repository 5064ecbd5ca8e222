#include "ops/rope/rope.h"

#include "autograd/tape.h"
#include "ops/reduction.h"
#include "ops/rope/rope_kernels.h"
#include "ops/rope/rope_table.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {
namespace {

void check_arguments(const Tensor& x, const Tensor& table, const Tensor& positions, int64_t offset) {
  check(x.defined() && table.defined(), "rope: ", x.defined() ? "table" : "x", " is undefined");
  check(x.rank() == 4, "rope: x is ", describe(x), "; expected [B, T, H, D]");
  check(table.rank() == 2 && table.size(1) % 2 == 0 && table.size(1) <= x.size(3), "rope: table is ",
        describe(table), "; expected [P, R] with R even and at most ", x.size(3),
        ", the size of a head of x ", x.shape());
  check(table.dtype() == sum_dtype(x.dtype()) && table.device() == x.device(), "rope: table is ",
        describe(table), "; expected ", sum_dtype(x.dtype()), " on the device of x, which is ", describe(x));
  if (positions.defined()) {
    const bool fits =
        positions.shape() == Shape{x.size(1)} || positions.shape() == Shape{x.size(0), x.size(1)};
    check(fits && (positions.dtype() == DType::i64 || positions.dtype() == DType::i32), "rope: positions is ",
          describe(positions), "; expected i64 or i32 [", x.size(1), "] or [", x.size(0), ", ", x.size(1),
          "]");
    check(positions.device() == x.device(), "rope: positions is ", describe(positions), ", but x is ",
          describe(x));
  } else {
    check(offset >= 0 && offset <= table.size(0) - x.size(1), "rope: ", x.size(1), " tokens from position ",
          offset, " do not fit table ", describe(table), " of ", table.size(0), " positions");
  }
}

Tensor with_heads(const Tensor& x) {
  return x.layout().stride(3) == 1 || x.size(3) == 1 ? x : x.clone();
}

/// Writes all of y, whose heads' elements are adjacent.
void rotate(const Tensor& y, const Tensor& x, const Tensor& table, const Tensor& positions, int64_t offset,
            bool inverse) {
  const RopeProblem problem{.y = y,
                            .x = with_heads(x),
                            .table = table.with_rows(),
                            .positions = positions.defined() ? positions.packed() : Tensor(),
                            .offset = offset,
                            .inverse = inverse};
  if (x.device().is_cpu()) {
    rope_cpu(problem);
  } else if constexpr (kCuda) {
    rope_cuda(problem);
  }
}

Tensor apply(const Tensor& x, const Tensor& table, const Tensor& positions, int64_t offset, Site site) {
  const CallScope call(site);
  check_arguments(x, table, positions, offset);
  Tensor y = Tensor::empty(x.shape(), x.dtype(), x.device());
  rotate(y, x.detach(), table.detach(), positions, offset, false);
  if (Tape* tape = Tape::recording(x)) {
    tape->record("rope", {&x, &table, &positions}, {&y},
                 [table = Saved(table), positions = Saved(positions), offset](Backward& b) {
                   const Tensor dy = b.grad();
                   GradTarget dx = b.target(0);
                   if (!dx.part || dx.grad.dtype() != dy.dtype() || dx.grad.layout().stride(3) != 1)
                     dx = {Tensor::empty(dy.shape(), dy.dtype(), dy.device())};
                   rotate(dx.grad, dy, table.get(), positions.get(), offset, true);
                   b.written(0, dx);
                 });
  }
  return y;
}

}  // namespace

Tensor rope(const Tensor& x, const Tensor& table, int64_t offset, Site site) {
  return apply(x, table, {}, offset, site);
}

Tensor rope(const Tensor& x, const Tensor& table, const Tensor& positions, Site site) {
  const CallScope call(site);
  check(positions.defined(), "rope: positions is undefined");
  return apply(x, table, positions, 0, site);
}

}  // namespace tessera::ops

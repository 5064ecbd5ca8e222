#include "ops/gather/gather.h"

#include "autograd/tape.h"
#include "ops/gather/gather_kernels.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {
namespace {

void check_operands(const char* name, const Tensor& x, const Tensor& indices) {
  check(x.defined() && indices.defined(), name, ": ", x.defined() ? "indices" : "x", " is undefined");
  check(x.rank() >= 1, name, ": x is ", describe(x), "; expected at least one dimension");
  check(indices.rank() == 1 && (indices.dtype() == DType::i64 || indices.dtype() == DType::i32), name,
        ": indices is ", describe(indices), "; expected i64 or i32 of rank 1");
  check(indices.device() == x.device(), name, ": x is ", describe(x), ", indices is ", describe(indices),
        "; both must be on one device");
}

/// On the CPU alone: see the contract.
void check_range(const char* name, const Tensor& indices, int64_t rows) {
  if (!indices.device().is_cpu()) return;
  dispatch_index(indices.dtype(), name, [&]<class I>() {
    const I* const at = indices.data<I>();
    const int64_t stride = indices.layout().stride(0);
    for (int64_t n = 0; n < indices.count(); ++n)
      check(0 <= at[n * stride] && at[n * stride] < rows, name, ": index ", at[n * stride], " at position ",
            n, " is outside the ", rows, " rows");
  });
}

Tensor gathered(const Tensor& x, const Tensor& indices, OutOfRange rule) {
  Tensor y = Tensor::empty(x.shape().with(0, indices.count()), x.dtype(), x.device());
  if (y.count() == 0) return y;
  if (x.device().is_cpu()) {
    gather_rows_cpu(y, x, indices);
  } else if constexpr (kCuda) {
    gather_rows_cuda(y, x, indices, rule);
  }
  return y;
}

Tensor scattered(const Tensor& x, const Tensor& indices, int64_t rows) {
  Tensor y = Tensor::empty(x.shape().with(0, rows), x.dtype(), x.device());
  if (y.count() == 0) return y;
  if (x.device().is_cpu()) {
    scatter_rows_cpu(y, x, indices);
  } else if constexpr (kCuda) {
    scatter_rows_cuda(y, x, indices);
  }
  return y;
}

}  // namespace

Tensor gather_rows(const Tensor& x, const Tensor& indices, Site site) {
  const CallScope call(site);
  check_operands("gather_rows", x, indices);
  check_range("gather_rows", indices, x.size(0));
  Tensor y = gathered(x.detach(), indices, OutOfRange::ones);
  if (Tape* tape = Tape::recording(x))
    tape->record("gather_rows", {&x, &indices}, {&y},
                 [rows = x.size(0), indices = Saved(indices)](Backward& b) {
                   b.give(0, scattered(b.grad(), indices.get(), rows));
                 });
  return y;
}

Tensor scatter_rows(const Tensor& x, const Tensor& indices, int64_t rows, Site site) {
  const CallScope call(site);
  check_operands("scatter_rows", x, indices);
  check(x.size(0) == indices.count(), "scatter_rows: x ", describe(x), " has ", x.size(0), " rows, indices ",
        describe(indices), " has ", indices.count(), "; expected one index a row");
  check(rows >= 0, "scatter_rows: ", rows, " rows; expected 0 or more");
  check(is_floating(x.dtype()) && x.dtype() != DType::f8e4m3, "scatter_rows: dtype ", x.dtype(),
        " is not supported on device ", x.device().name(), "; expected f64, f32, bf16 or f16");
  check_range("scatter_rows", indices, rows);
  Tensor y = scattered(x.detach(), indices, rows);
  if (Tape* tape = Tape::recording(x))
    tape->record("scatter_rows", {&x, &indices}, {&y}, [indices = Saved(indices)](Backward& b) {
      b.give(0, gathered(b.grad(), indices.get(), OutOfRange::zeros));
    });
  return y;
}

}  // namespace tessera::ops

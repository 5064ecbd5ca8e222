#include "autograd/tape.h"
#include "ops/reduce/reduce_kernels.h"
#include "ops/select/select_kernels.h"
#include "runtime/has_cuda.h"

/// What a selection moves, and the norms that most of them are made from.

namespace tessera::ops {
namespace {

void check_tensor(const char* name, const char* what, const Tensor& tensor, const Tensor& x, int64_t count,
                  DType dtype) {
  check(tensor.dtype() == dtype && tensor.shape() == Shape{count}, name, ": ", what, " is ", describe(tensor),
        "; expected ", dtype, " [", count, "]");
  check(tensor.device() == x.device(), name, ": x is ", describe(x), ", ", what, " is ", describe(tensor),
        "; both must be on one device");
}

/// On the CPU alone: a GPU cannot report it without making the host wait.
void check_indices(const char* name, const Tensor& indices, int64_t rows) {
  if (!indices.device().is_cpu()) return;
  int64_t last = -1;
  for (int64_t n = 0; n < indices.count(); ++n) {
    const int64_t at = indices.data<int32_t>()[n];
    check(at == rows || (last < at && at < rows), name, ": index ", at, " at position ", n, " follows ", last,
          "; expected indices of ", rows, " rows in ascending order, each once, then ", rows, " as padding");
    last = at;
  }
}

void check_operands(const char* name, const Tensor& x, const Selection& selection, RowScale scale,
                    bool gathers) {
  check(x.defined(), name, ": x is undefined");
  const bool scaled = scale == RowScale::selection;
  check(selection.indices.defined() && (!scaled || selection.scales.defined()), name,
        ": the selection has no ", selection.indices.defined() ? "scales" : "indices",
        "; make one with Selection::first, top_norm, threshold, random or importance");
  check(x.rank() >= 1 && is_floating(x.dtype()) && x.dtype() != DType::f8e4m3, name, ": x is ", describe(x),
        "; expected f64, f32, bf16 or f16 with at least one dimension");
  const int64_t capacity = selection.capacity();
  check_tensor(name, "indices", selection.indices, x, capacity, DType::i32);
  if (scaled) check_tensor(name, "scales", selection.scales, x, capacity, DType::f32);
  const int64_t rows = gathers ? selection.rows : capacity;
  check(x.size(0) == rows, name, ": x is ", describe(x), "; expected ", rows, " rows, as the selection of ",
        capacity, " of ", selection.rows, gathers ? " chooses from" : " has entries");
}

/// y of `rows` rows, by one of the two kernels. `scales` is undefined for a plain copy.
Tensor moved(const Tensor& x, int64_t rows, const Tensor& indices, const Tensor& scales, bool gathers) {
  Tensor y = Tensor::empty(x.shape().with(0, rows), x.dtype(), x.device());
  if (y.count() == 0) return y;
  if (x.device().is_cpu()) {
    (gathers ? gather_selected_cpu : scatter_selected_cpu)(y, x, indices, scales);
  } else if constexpr (kCuda) {
    (gathers ? gather_selected_cuda : scatter_selected_cuda)(y, x, indices, scales);
  }
  return y;
}

Tensor move_selected(const char* name, const Tensor& x, const Selection& selection, RowScale scale,
                     bool gathers, Site site) {
  const CallScope call(site);
  check_operands(name, x, selection, scale, gathers);
  const int64_t capacity = selection.capacity(), rows = selection.rows;
  const Tensor indices = selection.indices.packed();
  check_indices(name, indices, rows);
  const Tensor scales = scale == RowScale::selection ? selection.scales.packed() : Tensor();
  Tensor y = moved(x.detach(), gathers ? capacity : rows, indices, scales, gathers);
  if (Tape* tape = Tape::recording(x))
    tape->record(
        name, {&x}, {&y},
        [back = gathers ? rows : capacity, indices = Saved(indices), scales = Saved(scales),
         gathers](Backward& b) { b.give(0, moved(b.grad(), back, indices.get(), scales.get(), !gathers)); });
  return y;
}

}  // namespace

Tensor gather_selected(const Tensor& x, const Selection& selection, RowScale scale, Site site) {
  return move_selected("gather_selected", x, selection, scale, true, site);
}

Tensor scatter_selected(const Tensor& x, const Selection& selection, RowScale scale, Site site) {
  return move_selected("scatter_selected", x, selection, scale, false, site);
}

namespace {

/// norms [M] of the rows of x, neither empty.
struct RowNorms {
  const Tensor &norms, &x;
};

std::string describe_problem(const RowNorms& problem) {
  return text_of(describe(problem.x));
}

void reduce_rows(const RowNorms& problem) {
  const Tensor& x = problem.x;
  ReducePlan plan;
  plan.keep(x.size(0), x.layout().stride(0), 1);
  for (int dim = 1; dim < x.rank(); ++dim) plan.reduce(x.size(dim), x.layout().stride(dim));
  plan.complete();
  if (x.device().is_cpu()) {
    reduce_cpu(problem.norms, x, plan, ReduceKind::norm);
  } else if constexpr (kCuda) {
    reduce_cuda(problem.norms, x, plan, ReduceKind::norm);
  }
}

constexpr Variant<RowNorms> kNormVariants[] = {
    {"reduce", lacks_nothing<RowNorms>, is_otherwise<RowNorms>, reduce_rows},
    {"warp",
     [](const RowNorms& problem, const Gpu&) -> Reason {
       const Tensor& x = problem.x;
       if (x.rank() != 2 || (x.size(1) > 1 && x.layout().stride(1) != 1)) return "a matrix with dense rows";
       const int64_t bytes = int64_t(size_of(x.dtype()));
       if (reinterpret_cast<uintptr_t>(x.raw()) % 16 != 0 || x.layout().stride(0) * bytes % 16 != 0)
         return "rows that start on 16-byte boundaries";
       return {};
     },
     // H200: 0.60 to 0.84 of the time of reduce for 16,384 rows and more. A warp reads a row alone, so that
     // few rows leave memory idle: 8 KiB in flight per two rows reach the bandwidth from some 6 rows per SM
     // on.
     [](const RowNorms& problem, const Gpu& gpu) {
       return problem.x.size(0) >= 8 * int64_t(gpu.multiprocessors) ? Estimate::preferred()
                                                                    : Estimate::slower();
     },
     [](const RowNorms& problem) {
       if constexpr (kCuda) row_norms_cuda(problem.norms, problem.x);
     }}};

}  // namespace

std::vector<std::string> row_norms_variants() {
  return names_of(kNormVariants);
}

std::string_view row_norms_variant(const Tensor& x, const Gpu& gpu) {
  return ops::choose("row_norms", kNormVariants, RowNorms{x, x}, gpu).name;
}

Tensor row_norms(const Tensor& x, Site site) {
  const CallScope call(site);
  check(x.defined(), "row_norms: x is undefined");
  check(x.rank() >= 1 && is_floating(x.dtype()) && x.dtype() != DType::f8e4m3, "row_norms: x is ",
        describe(x), "; expected f64, f32, bf16 or f16 with at least one dimension");
  const DType dtype = x.dtype() == DType::f64 ? DType::f64 : DType::f32;
  const Tensor norms = Tensor::empty_packed({x.size(0)}, dtype, x.device());
  if (norms.count() == 0) return norms;
  if (x.count() == 0) {
    norms.fill(0);
    return norms;
  }
  const Tensor plain = x.detach();
  const RowNorms problem{norms, plain};
  if (x.device().is_cpu())
    reduce_rows(problem);
  else
    choose("row_norms", kNormVariants, problem, Gpu(x.device())).launch(problem);
  return norms;
}

}  // namespace tessera::ops

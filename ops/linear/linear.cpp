#include "ops/linear/linear.h"

#include <algorithm>

#include "autograd/tape.h"
#include "ops/gemm/gemm_models_internal.h"
#include "ops/gemm/gemm_names_internal.h"
#include "ops/linear/gemv_kernels.h"
#include "ops/linear/linear_kernels.h"
#include "ops/linear/sliced_rows_internal.h"
#include "ops/norm/norm_kernels.h"
#include "runtime/has_cuda.h"
#include "tensor/kernels.h"

namespace tessera::ops {
namespace {

/// A vector as a matrix of one row, off the tape.
Tensor as_matrix(const Tensor& x) {
  return x.rank() >= 2 ? x.detach() : x.detach().reshape({1, x.count()});
}

/// A call of linear; `rows` is x as a matrix.
struct Call {
  const Tensor &y, &x, &rows, &weight, &bias, &residual;
};

std::string describe_problem(const Call& call) {
  return text_of("x ", describe(call.x), " and weight ", describe(call.weight));
}

/// How linear runs forward on a GPU. Its gradients are GEMMs.
constexpr Variant<Call> kVariants[] = {
    {"gemv", [](const Call& call, const Gpu& gpu) { return gemv_lacks(call.rows, call.weight, gpu); },
     [](const Call& call, const Gpu& gpu) {
       return gemv_pays(call.rows, call.weight, gpu) ? Estimate::preferred() : Estimate::slower();
     },
     [](const Call& call) {  // gemv.cu
       const Tensor bias = call.bias.defined() ? call.bias.packed() : call.bias;
       if constexpr (kCuda) gemv_cuda(flatten_leading(call.y, 1), call.rows, call.weight.detach(), bias);
       if (call.residual.defined()) accumulate(call.y, call.residual.detach());
     }},
    {"gemm", lacks_nothing<Call>, is_otherwise<Call>,
     [](const Call& call) {  // multiply in ops/gemm/gemm.cpp
       const PassVariant pass("linear", call.x);
       linear_forward(call.y, call.x, call.weight, call.bias, call.residual);
     },
     kForcedVariants}};

}  // namespace

std::string_view linear_variant(const Tensor& rows, const Tensor& weight, const Gpu& gpu) {
  return choose("linear", kVariants, Call{rows, rows, rows, weight, rows, rows}, gpu).name;
}

void check_linear(const char* op, const char* weight_name, const Tensor& x, int64_t in, const Tensor& weight,
                  const Tensor& bias) {
  check_operand(op, weight_name, weight, x);
  check(weight.rank() == 2, op, ": ", weight_name, " ", weight.shape(),
        " is not a matrix; expected [out, in]");
  check(weight.size(1) == in, op, ": ", weight_name, " ", weight.shape(), " takes ", weight.size(1),
        " features, but its input has ", in, "; expected [out, ", in, "]");
  if (!bias.defined()) return;
  check_operand(op, "bias", bias, x);
  check(bias.rank() == 1 && bias.size(0) == weight.size(0), op, ": bias ", bias.shape(), " does not go with ",
        weight_name, " ", weight.shape(), "; expected [", weight.size(0), "]");
}

void check_residual(const char* op, const Tensor& x, const Shape& y, const Tensor& residual) {
  if (!residual.defined()) return;
  check_operand(op, "residual", residual, x);
  check(residual.shape() == y, op, ": residual ", residual.shape(), " is not of the result's shape ", y);
}

Shape check_linear_call(const char* op, const Tensor& x, const Tensor& weight, const Tensor& bias,
                        const Tensor& residual) {
  check_operand(op, "x", x, x);
  check(x.rank() >= 1, op, ": x is a scalar; expected [..., in]");
  check_linear(op, "weight", x, x.size(-1), weight, bias);
  const Shape shape = x.shape().with(-1, weight.size(0));
  check_residual(op, x, shape, residual);
  return shape;
}

void linear_forward(const Tensor& y, const Tensor& x, const Tensor& weight, const Tensor& bias,
                    const Tensor& residual) {
  multiply(as_matrix(y), as_matrix(x), weight.detach().transpose(0, 1),
           {.bias = bias, .residual = residual.defined() ? as_matrix(residual) : residual});
}

Tensor linear_input_gradient(const Tensor& dy, const Tensor& weight) {
  const Tensor dx = Tensor::empty(dy.shape().with(-1, weight.size(1)), dy.dtype(), dy.device());
  multiply(as_matrix(dx), as_matrix(dy), weight);
  return dx;
}

void linear_input_gradient(Backward& entry, int input, const Shape& shape, const Tensor& dy,
                           const Tensor& weight) {
  if (!entry.needs(input)) return;
  GradTarget target = entry.target(input);
  if (target.grad.defined()) {
    const DType held = target.grad.dtype();
    if ((held != dy.dtype() && held != sum_dtype(dy.dtype())) || !writable(as_matrix(target.grad)))
      target = {};
  }
  if (!target.grad.defined()) target = {Tensor::empty(shape, dy.dtype(), dy.device()), false};
  multiply(as_matrix(target.grad), as_matrix(dy), weight, {.accumulate = target.accumulate});
  entry.written(input, target);
}

namespace {

/// x as [rows, groups, columns] with dense columns.
Tensor rows_of_groups(const Tensor& x, bool groups) {
  Tensor rows = flatten_leading(x, groups ? 2 : 1);
  if (!groups) rows = rows.reshape({rows.size(0), 1, rows.size(1)});
  return rows.size(2) > 1 && rows.layout().stride(2) != 1 ? rows.clone() : rows;
}

/// The sums of the columns of x [rows, groups, columns] as a product with a row of ones (gemm_narrow.h).
Gemm sums_as_gemm(const Tensor& sums, const Tensor& x, bool accumulate) {
  Gemm g{.m = 1, .n = x.size(2), .k = x.size(0), .batch = x.size(1), .in = x.dtype(), .out = sums.dtype()};
  g.b = x.raw(), g.ldb = x.layout().stride(0), g.stride_b = x.layout().stride(1);
  g.d = sums.raw(), g.ldd = g.stride_d = x.size(2);
  g.beta = accumulate ? 1 : 0;
  return g;
}

/// The sums of the columns of x [rows, groups, columns], as a problem: one launch of variant "narrow" of
/// GEMMs, at half of memory's speed, or two of a kernel of their own.
struct ColumnSums {
  const Tensor& x;
  Gemm gemm() const { return {.m = 1, .n = x.size(2), .k = x.size(0), .batch = x.size(1), .in = x.dtype()}; }
};

std::string describe_problem(const ColumnSums& sums) {
  return text_of("x ", describe(sums.x));
}

constexpr Variant<ColumnSums, void()> kColumnSums[] = {
    {"kernel", lacks_nothing<ColumnSums>,
     [](const ColumnSums& sums, const Gpu& gpu) -> Estimate {
       const ColumnSumCosts& c = gemm_costs(gpu).column_sums;
       return {c.two_launches +
               double(sums.x.count() * int64_t(size_of(sums.x.dtype()))) / c.bytes_per_second};
     },
     nullptr},
    {"narrow", [](const ColumnSums& sums, const Gpu&) -> Reason { return gemm_narrow_lacks(sums.gemm()); },
     [](const ColumnSums& sums, const Gpu& gpu) -> Estimate {
       return {gemm_on_gpu(sums.gemm(), gpu).narrow().seconds};
     },
     nullptr}};

}  // namespace

std::string_view column_sums_variant(const Tensor& x, const Gpu& gpu) {
  return choose("column sums", kColumnSums, ColumnSums{x}, gpu).name;
}

namespace {

bool sums_by_gemm(const Tensor& x) {
  return x.device().is_cuda() && x.count() > 0 && column_sums_variant(x, Gpu(x.device())) == "narrow";
}

/// sums [groups, columns], packed, of x [rows, groups, columns]
void sum_columns(const Tensor& sums, const Tensor& rows) {
  if (rows.count() == 0) {
    sums.fill(0);
  } else if (rows.device().is_cpu()) {
    column_sums_cpu(sums, rows);
  } else if (sums_by_gemm(rows)) {
    gemm_narrow(sums_as_gemm(sums, rows, false), rows.device());
  } else if constexpr (kCuda) {
    column_sums_cuda(sums, rows);
  }
}

/// `target` if column sums of dy can be written into it as they are, else new memory for them.
GradTarget sums_target(const GradTarget& target, const Shape& shape, const Tensor& dy) {
  const DType wide = sum_dtype(dy.dtype());
  if (target.grad.defined() && !target.accumulate && target.grad.dtype() == wide &&
      target.grad.layout().is_packed())
    return target;
  return {Tensor::empty_packed(shape, wide, dy.device()), false};
}

/// bias_gradient with what entry.target(input) gave.
void bias_gradient_into(Backward& entry, int input, GradTarget target, const Tensor& dy, bool groups) {
  const DType wide = sum_dtype(dy.dtype());
  const Tensor rows = rows_of_groups(dy, groups);
  const Shape shape = groups ? Shape{rows.size(1), rows.size(2)} : Shape{rows.size(2)};
  if (!sums_by_gemm(rows)) {
    const GradTarget sums = sums_target(target, shape, dy);
    sum_columns(sums.grad.reshape({rows.size(1), rows.size(2)}), rows);
    return entry.written(input, sums);
  }
  if (target.grad.defined() && (!target.grad.layout().is_packed() ||
                                (target.grad.dtype() != wide && target.grad.dtype() != dy.dtype())))
    target = {};
  if (!target.grad.defined()) {
    const DType dtype = entry.grad_dtype(input) == dy.dtype() ? dy.dtype() : wide;
    target = {Tensor::empty_packed(shape, dtype, dy.device()), false};
  }
  gemm_narrow(sums_as_gemm(target.grad, rows, target.accumulate), dy.device());
  entry.written(input, target);
}

/// Adds up partial sums of `columns` columns of dy (Backward::give_summed) as the gradient of input `input`:
/// at the end of the pass where that may wait, since a launch takes longer than the additions.
void give_partial_sums(Backward& entry, int input, const Tensor& partial, int64_t columns) {
  if (partial.device().is_cpu()) {
    check(partial.size(0) == 1 && partial.size(1) == columns, "linear: partial sums of dy ", partial.shape(),
          " on a CPU; expected [1, ", columns, "]");
    return entry.give(input, partial.reshape({columns}));
  }
  if constexpr (kCuda) {
    const GradTarget target = entry.target(input), sums = sums_target(target, {columns}, partial);
    if (sums.grad.shares_storage(target.grad) && entry.may_wait(input)) {
      entry.at_end<NormSums>().add({partial, sums.grad});
    } else {
      NormSums now;
      now.add({partial, sums.grad});
      now.finish();
    }
    entry.written(input, sums);
  }
}

}  // namespace

void linear_parameter_gradients(Backward& entry, int weight_input, int bias_input, const Tensor& weight,
                                const Tensor& x, const Tensor& dy, const Tensor& dy_sums) {
  if (dy_sums.defined() && entry.needs(bias_input)) {
    linear_weight_gradient(entry, weight_input, weight, x, flatten_leading(dy, 1));
    return give_partial_sums(entry, bias_input, dy_sums, dy.size(-1));
  }
  if (!entry.needs(weight_input)) return bias_gradient(entry, bias_input, dy);
  const Tensor rows = flatten_leading(dy, 1);
  const auto weight_gradient = [&](const Tensor& sums) {
    return multiply_gradient(entry, weight_input, weight, GradientDType::f32, rows.transpose(0, 1),
                             flatten_leading(x, 1), sums);
  };
  if (!entry.needs(bias_input)) {
    weight_gradient({});
    return;
  }
  const GradTarget target = entry.target(bias_input);
  const GradTarget sums = dy.device().is_cuda() ? sums_target(target, {rows.size(1)}, dy) : GradTarget();
  if (weight_gradient(sums.grad)) return entry.written(bias_input, sums);
  bias_gradient_into(entry, bias_input, target, rows, false);
}

void linear_weight_gradient(Backward& entry, int input, const Tensor& weight, const Tensor& x,
                            const Tensor& dy) {
  if (!entry.needs(input)) return;
  multiply_gradient(entry, input, weight, GradientDType::f32, dy.transpose(0, 1), flatten_leading(x, 1));
}

GradTarget bias_sums(Backward& entry, int input, const Tensor& dy) {
  return entry.needs(input) ? sums_target(entry.target(input), {dy.size(1)}, dy) : GradTarget();
}

void bias_gradient(Backward& entry, int input, const Tensor& dy, bool groups) {
  if (entry.needs(input)) bias_gradient_into(entry, input, entry.target(input), dy, groups);
}

Tensor column_sums(const Tensor& x, bool groups) {
  const Tensor rows = rows_of_groups(x, groups);
  const Tensor sums = Tensor::empty_packed({rows.size(1), rows.size(2)}, sum_dtype(x.dtype()), x.device());
  sum_columns(sums, rows);
  return groups ? sums : sums.reshape({rows.size(2)});
}

namespace {

/// Checks and computes y, off the tape.
Tensor linear_output(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& residual) {
  const Shape shape = check_linear_call("linear", x, weight, bias, residual);
  Tensor y = Tensor::empty(shape, x.dtype(), x.device());
  if (x.device().is_cpu()) {
    linear_forward(y, x, weight, bias, residual);
  } else {
    const Tensor rows = flatten_leading(x, 1);
    const Call call{y, x, rows, weight, bias, residual};
    choose("linear", kVariants, call, Gpu(x.device())).launch(call);
  }
  return y;
}

void record_dense(Tape& tape, Tensor& y, const Tensor& x, const Tensor& weight, const Tensor& bias,
                  const Tensor& residual) {
  const Saved kept_x = requires_grad(weight) ? Saved(x) : Saved();
  tape.record("linear", {&x, &weight, &bias, &residual}, {&y},
              [x = kept_x, weight = Saved(weight)](Backward& b) {
                const Tensor dy = b.grad();
                const PassVariant pass("linear", dy);
                const Tensor dy_sums = b.column_sums();
                linear_input_gradient(b, 0, dy.shape().with(-1, weight.get().size(1)), dy, weight.get());
                linear_parameter_gradients(b, 1, 2, weight.get(), x.get(), dy, dy_sums);
                b.pass(0, {3});
              });
  if (requires_grad(weight) && requires_grad(bias)) want_column_sums(y);
}

void record_sliced(Tape& tape, Tensor& y, const Tensor& x, const Tensor& weight, const Tensor& bias,
                   const Tensor& residual, SlicedRows rows, WeightGrad weight_grad) {
  const bool whole = weight_grad == WeightGrad::full;
  const bool keeps = requires_grad(weight) && weight_grad != WeightGrad::none;
  const Saved kept_x = keeps ? Saved(whole ? x : rows.keep(x)) : Saved();
  tape.record("linear", {&x, &weight, &bias, &residual}, {&y},
              [rows = std::move(rows), x = kept_x, weight = Saved(weight), whole](Backward& b) mutable {
                const Tensor dy = b.grad();
                const PassVariant pass("linear", dy);
                if (b.needs(0) || (b.needs(1) && x.defined())) rows.choose(dy);
                const bool full = whole && rows.weight_grad() == WeightGrad::full;
                const bool slices = b.needs(1) && x.defined() && !full;
                const Tensor dy_rows = b.needs(0) || slices ? rows.take_scaled(dy) : Tensor();
                rows.give_input_gradient(b, 0, dy.shape().with(-1, weight.get().size(1)), dy_rows,
                                         weight.get());
                if (slices)
                  linear_weight_gradient(b, 1, weight.get(),
                                         whole ? rows.take(x.get()) : rows.take_kept(x.get()), dy_rows);
                if (full)
                  linear_parameter_gradients(b, 1, 2, weight.get(), x.get(), dy);
                else
                  bias_gradient(b, 2, dy);
                b.pass(0, {3});
              });
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& residual, Site site) {
  const CallScope call(site);
  Tensor y = linear_output(x, weight, bias, residual);
  if (Tape* tape = Tape::recording(x, weight, bias, residual))
    record_dense(*tape, y, x, weight, bias, residual);
  return y;
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& residual,
              const SlicedBackward& slice, Site site) {
  const CallScope call(site);
  slice.validate("linear");
  Tensor y = linear_output(x, weight, bias, residual);
  Tape* const tape = Tape::recording(x, weight, bias, residual);
  if (!tape) return y;
  SlicedRows rows("linear", slice, flatten_leading(y, 1).size(0), y.device());
  if (rows.is_dense())
    record_dense(*tape, y, x, weight, bias, residual);
  else
    record_sliced(*tape, y, x, weight, bias, residual, std::move(rows), slice.weight_grad);
  return y;
}

}  // namespace tessera::ops

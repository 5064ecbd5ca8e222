#include "ops/linear/linear_swiglu.h"

#include "autograd/tape.h"
#include "ops/gemm/gemm.h"
#include "ops/linear/gemv_kernels.h"
#include "ops/linear/linear.h"
#include "ops/linear/linear_kernels.h"
#include "ops/linear/sliced_rows_internal.h"
#include "ops/swiglu/swiglu_kernels.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {
namespace {

/// A call of linear_swiglu; `rows` is x as a matrix.
struct Call {
  const Tensor &x, &rows, &weight;
};

std::string describe_problem(const Call& call) {
  return text_of("x ", describe(call.x), " and weight ", describe(call.weight));
}

/// What the kernels with the activation in their epilogue need.
Reason fused_lacks(const Call& call) {
  if (call.x.dtype() != DType::bf16 && call.x.dtype() != DType::f16) return "bf16 or f16";
  if (Tape::recording(call.x, call.weight)) return "no gradient";
  return {};
}

/// Runs one of them on y as a matrix.
template <class Kernel>
Tensor run_fused(const Call& call, Kernel&& kernel) {
  const Tensor y =
      Tensor::empty(call.x.shape().with(-1, call.weight.size(0) / 2), call.x.dtype(), call.x.device());
  kernel(flatten_leading(y, 1), call.rows, call.weight.detach());
  return y;
}

constexpr Variant<Call, Tensor(const Call&)> kVariants[] = {
    {"gemv",
     [](const Call& call, const Gpu& gpu) {
       Reason lacks = fused_lacks(call);
       return lacks.empty() ? gemv_lacks(call.rows, call.weight, gpu) : lacks;
     },
     is_preferred<Call>,
     [](const Call& call) {
       return run_fused(call, [](const Tensor& y, const Tensor& x, const Tensor& weight) {
         if constexpr (kCuda) gemv_swiglu_cuda(y, x, weight);
       });
     }},
    {"wgmma",
     [](const Call& call, const Gpu& gpu) {
       Reason lacks = fused_lacks(call);
       return lacks.empty() ? Reason(multiply_swiglu_lacks(call.rows, call.weight, gpu)) : lacks;
     },
     [](const Call& call, const Gpu& gpu) {
       return multiply_swiglu_pays(call.rows, call.weight, gpu) ? Estimate::preferred() : Estimate::slower();
     },
     [](const Call& call) { return run_fused(call, multiply_swiglu); }},
    {"parts", lacks_nothing<Call>, is_otherwise<Call>,
     [](const Call& call) { return swiglu(linear(call.x, call.weight)); }}};

void check_operands(const Tensor& x, const Tensor& weight) {
  check_linear_call("linear_swiglu", x, weight, {}, {});
  check(weight.size(0) % 2 == 0, "linear_swiglu: weight ", weight.shape(),
        " has an odd number of rows; expected [2F, in]: gate and up");
}

/// A sliced backward pass, and what it needs of the forward pass.
struct SlicedPass {
  SlicedRows rows;
  bool whole;  // x and h are of all rows, over which the weight's gradient is summed; else as rows.keep gave
  Saved x;     // only if the weight gets a gradient
  Saved h, weight;
  Shape shape;  // of x

  void operator()(Backward& b) {
    const Tensor dy = b.grad();
    const PassVariant pass("linear", dy);
    rows.choose(dy);
    Tensor dh_rows;
    if (whole && rows.weight_grad() == WeightGrad::full) {
      const Tensor dh = swiglu_gradient(dy, h.get());
      linear_weight_gradient(b, 1, weight.get(), x.get(), flatten_leading(dh, 1));
      if (b.needs(0)) dh_rows = rows.take_scaled(dh);
    } else {
      dh_rows = swiglu_gradient(rows.take_scaled(dy), chosen(h));
      if (x.defined()) linear_weight_gradient(b, 1, weight.get(), chosen(x), dh_rows);
    }
    rows.give_input_gradient(b, 0, shape, dh_rows, weight.get());
  }
  Tensor chosen(const Saved& kept) const {
    return whole ? rows.take(kept.get()) : rows.take_kept(kept.get());
  }
};

void record_sliced(Tape& tape, Tensor& y, const Tensor& x, const Tensor& weight, const Tensor& h,
                   SlicedRows rows, WeightGrad weight_grad) {
  const bool whole = weight_grad == WeightGrad::full && requires_grad(weight);
  const auto kept = [&](const Tensor& all) { return Saved(whole ? all : rows.keep(all)); };
  const bool trains = weight_grad != WeightGrad::none && requires_grad(weight);
  const Saved kept_x = trains ? kept(x) : Saved(), kept_h = kept(h);
  tape.record("linear_swiglu", {&x, &weight}, {&y},
              SlicedPass{.rows = std::move(rows),
                         .whole = whole,
                         .x = kept_x,
                         .h = kept_h,
                         .weight = Saved(weight),
                         .shape = x.shape()});
}

}  // namespace

Tensor linear_swiglu(const Tensor& x, const Tensor& weight, Site site) {
  const CallScope scope(site);
  check_operands(x, weight);
  if (x.device().is_cpu()) return swiglu(linear(x, weight));
  const Tensor rows = flatten_leading(x, 1);
  const Call call{x, rows, weight};
  return choose("linear_swiglu", kVariants, call, Gpu(x.device())).launch(call);
}

Tensor linear_swiglu(const Tensor& x, const Tensor& weight, const Slice& slice, Site site) {
  const CallScope scope(site);
  slice.validate("linear_swiglu");
  Tape* const tape = Tape::recording(x, weight);
  if (!tape) return linear_swiglu(x, weight);
  check_operands(x, weight);
  SlicedRows rows("linear_swiglu", slice, flatten_leading(x, 1).size(0), x.device());
  if (rows.is_dense()) return linear_swiglu(x, weight);
  const Tensor h = linear(x.detach(), weight.detach());
  Tensor y = swiglu(h);
  record_sliced(*tape, y, x, weight, h, std::move(rows), slice.weight_grad);
  return y;
}

std::vector<std::string> linear_swiglu_variants() {
  return names_of(kVariants);
}

std::string_view linear_swiglu_variant(const Tensor& rows, const Tensor& weight, const Gpu& gpu) {
  return choose("linear_swiglu", kVariants, Call{rows, rows, weight}, gpu).name;
}

}  // namespace tessera::ops

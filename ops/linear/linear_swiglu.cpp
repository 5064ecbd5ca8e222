#include "ops/linear/linear_swiglu.h"

#include "autograd/tape.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/gemm_fused_internal.h"
#include "ops/gemm/gemm_models_internal.h"
#include "ops/linear/gemv_kernels.h"
#include "ops/linear/linear.h"
#include "ops/linear/linear_kernels.h"
#include "ops/linear/linear_swiglu_kernels.h"
#include "ops/linear/sliced_rows_internal.h"
#include "ops/swiglu/swiglu_kernels.h"
#include "runtime/has_cuda.h"
#include "tensor/pads.h"

namespace tessera::ops {
namespace {

/// y [T, F] of x [T, in] and weight. `h`, unless null, gets gate and up, [T, 2F].
struct Call {
  const Tensor &y, &x, &weight;
  Tensor* h;
};

std::string describe_problem(const Call& call) {
  return text_of("x ", describe(call.x), " and weight ", describe(call.weight));
}

/// What the kernels need that keep neither gate nor up.
Reason few_rows_lack(const Call& call) {
  if (call.x.dtype() != DType::bf16 && call.x.dtype() != DType::f16) return "bf16 or f16";
  if (call.h) return "no gradient";
  return {};
}

FusedGemm as_fused(const Call& call) {
  return {"swiglu", true, true, 1, 3, {&call.y}, {&call.x, &call.weight}};
}

void run_epilogue(const Call& call) {
  const Tensor &y = call.y, &x = call.x, &weight = call.weight;
  if (call.h) *call.h = as_scratch(Tensor::empty({x.size(0), weight.size(0)}, x.dtype(), x.device()));
  const bool wide = fused_gemm_is_wide(as_fused(call), Gpu(x.device()));
  if constexpr (kCuda) {
    if (x.dtype() == DType::bf16)
      linear_swiglu_sm90<bf16>(y, call.h ? *call.h : Tensor(), x, weight, wide);
    else
      linear_swiglu_sm90<f16>(y, call.h ? *call.h : Tensor(), x, weight, wide);
  }
}

void run_parts(const Call& call) {
  const Tensor h = linear(call.x, call.weight);
  swiglu_forward(call.y, h);
  if (call.h) *call.h = h;
}

constexpr Variant<Call> kVariants[] = {
    {"gemv",
     [](const Call& call, const Gpu& gpu) {
       Reason lacks = few_rows_lack(call);
       return lacks.empty() ? gemv_lacks(call.x, call.weight, gpu) : lacks;
     },
     [](const Call& call, const Gpu& gpu) {
       return gemv_pays(call.x, call.weight, gpu) || !multiply_swiglu_lacks(call.x, call.weight, gpu).empty()
                  ? Estimate::preferred()
                  : Estimate::slower();
     },
     [](const Call& call) {
       if constexpr (kCuda) gemv_swiglu_cuda(call.y, call.x, call.weight);
     }},
    {"wgmma",
     [](const Call& call, const Gpu& gpu) {
       Reason lacks = few_rows_lack(call);
       return lacks.empty() ? Reason(multiply_swiglu_lacks(call.x, call.weight, gpu)) : lacks;
     },
     [](const Call& call, const Gpu& gpu) {
       return call.x.size(0) <= kGemvTokens || multiply_swiglu_pays(call.x, call.weight, gpu)
                  ? Estimate::preferred()
                  : Estimate::slower();
     },
     [](const Call& call) { multiply_swiglu(call.y, call.x, call.weight); }},
    {"epilogue",
     [](const Call& call, const Gpu& gpu) -> Reason {
       Reason lacks = fused_gemm_lacks(as_fused(call), gpu);
       return lacks.empty() && call.y.size(1) % 8 != 0 ? "features that are a multiple of 8" : lacks;
     },
     [](const Call& call, const Gpu& gpu) {
       return fused_gemm_runs(as_fused(call), gpu) ? Estimate::preferred() : Estimate::slower();
     },
     run_epilogue},
    {"parts", lacks_nothing<Call>, is_otherwise<Call>, run_parts}};

void forward(const Tensor& y, Tensor* h, const Tensor& x, const Tensor& weight) {
  const Call call{y, x, weight, h};
  if (x.device().is_cpu()) return run_parts(call);
  choose("linear_swiglu", kVariants, call, Gpu(x.device())).launch(call);
}

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
  Tape* const tape = Tape::recording(x, weight);
  Tensor y = Tensor::empty(x.shape().with(-1, weight.size(0) / 2), x.dtype(), x.device()), h;
  forward(flatten_leading(y, 1), tape ? &h : nullptr, flatten_leading(x, 1), weight.detach());
  if (tape) {
    const Saved kept_x = requires_grad(weight) ? Saved(x) : Saved();
    tape->record("linear_swiglu", {&x, &weight}, {&y},
                 [x = kept_x, weight = Saved(weight), h = Saved(h)](Backward& b) {
                   const Tensor dy = b.grad();
                   const PassVariant pass("linear", dy);
                   const Tensor dh = swiglu_gradient(flatten_leading(dy, 1), h.get());
                   const Tensor& w = weight.get();
                   linear_input_gradient(b, 0, dy.shape().with(-1, w.size(1)),
                                         dh.reshape(dy.shape().with(-1, w.size(0))), w);
                   linear_weight_gradient(b, 1, w, x.get(), dh);
                 });
  }
  return y;
}

Tensor linear_swiglu(const Tensor& x, const Tensor& weight, const SlicedBackward& slice, Site site) {
  const CallScope scope(site);
  slice.validate("linear_swiglu");
  Tape* const tape = Tape::recording(x, weight);
  if (!tape) return linear_swiglu(x, weight);
  check_operands(x, weight);
  SlicedRows rows("linear_swiglu", slice, flatten_leading(x, 1).size(0), x.device());
  if (rows.is_dense()) return linear_swiglu(x, weight);
  Tensor y = Tensor::empty(x.shape().with(-1, weight.size(0) / 2), x.dtype(), x.device()), h;
  forward(flatten_leading(y, 1), &h, flatten_leading(x, 1), weight.detach());
  h = h.reshape(x.shape().with(-1, weight.size(0)));
  record_sliced(*tape, y, x, weight, h, std::move(rows), slice.weight_grad);
  return y;
}

std::vector<std::string> linear_swiglu_variants() {
  return names_of(kVariants);
}

std::string_view linear_swiglu_variant(const Tensor& y, const Tensor& x, const Tensor& weight, bool keeps,
                                       const Gpu& gpu) {
  Tensor h;
  return choose("linear_swiglu", kVariants, Call{y, x, weight, keeps ? &h : nullptr}, gpu).name;
}

}  // namespace tessera::ops

#include "ops/linear/linear_activation.h"

#include <limits>

#include "autograd/tape.h"
#include "ops/activation/activation_internal.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/gemm_fused_internal.h"
#include "ops/linear/linear_activation_kernels.h"
#include "ops/linear/linear_kernels.h"
#include "runtime/has_cuda.h"
#include "runtime/integers.h"
#include "tensor/pads.h"

namespace tessera::ops {
namespace {

constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();  // a count is an i32

void count_columns(const Tensor& counts, const Tensor& x) {
  if (x.device().is_cpu()) {
    column_counts_cpu(counts, x);
  } else if constexpr (kCuda) {
    column_counts_cuda(counts, x);
  }
}

/// The operands of a forward pass as matrices.
struct Call {
  const Tensor &y, &counts, &x, &weight, &bias;
  Activation kind;
};

std::string describe_problem(const Call& call) {
  return text_of("a counted GEMM with ", name_of(call.kind), " of ", describe(call.x), " and ",
                 describe(call.weight));
}

Reason epilogue_lacks(const Call& call, const Gpu& gpu) {
  const DType dtype = call.x.dtype();
  if (gpu.major != 9) return "a GPU of compute capability 9.0";
  if (dtype != DType::bf16 && dtype != DType::f16) return "bf16 or f16";
  if (call.kind == Activation::none) return "relu or relu_squared";
  if (!call.counts.defined()) return "counts that are wanted";
  if (!is_tma_writable(call.y)) return "a result that TMA can write";
  if (!is_tma_readable(call.x) || !is_tma_readable(call.weight)) return "operands that TMA can read";
  return {};
}

Reason wide_lacks(const Call& call, const Gpu& gpu) {
  if (gpu.multiprocessors < 2) return "two SMs, for clusters of two blocks";
  return epilogue_lacks(call, gpu);
}

template <bool kWide>
void run_epilogue(const Call& call) {
  if constexpr (kCuda) {
    call.counts.fill(0);
    if (call.x.dtype() == DType::bf16)
      linear_activation_sm90<bf16>(call.y, call.counts, call.x, call.weight, call.bias, call.kind, kWide);
    else
      linear_activation_sm90<f16>(call.y, call.counts, call.x, call.weight, call.bias, call.kind, kWide);
  }
}

void run_separate(const Call& call) {
  linear_forward(call.y, call.x, call.weight, call.bias);
  activation_forward(call.y, call.y, call.kind);
  if (call.counts.defined()) count_columns(call.counts, call.y);
}

/// Where tiles fill the GPU some times over, and clusters share the weight in both.
Estimate estimate_wide(const Call& call, const Gpu& gpu) {
  const int64_t tiles = ceil_div(call.y.size(0), 128) * ceil_div(call.y.size(1), 128);
  return tiles > 8 * gpu.multiprocessors ? Estimate::preferred() : Estimate::slower();
}

constexpr Variant<Call> kVariants[] = {{"epilogue wide", wide_lacks, estimate_wide, run_epilogue<true>},
                                       {"epilogue", epilogue_lacks, is_preferred<Call>, run_epilogue<false>},
                                       {"separate", lacks_nothing<Call>, is_otherwise<Call>, run_separate}};

}  // namespace

void linear_activation_forward(const Tensor& y, const Tensor& counts, const Tensor& x, const Tensor& weight,
                               const Tensor& bias, Activation kind) {
  const Call call{y, counts, x, weight, bias, kind};
  if (x.device().is_cpu()) return run_separate(call);
  const PassVariant pass("linear_activation", x);
  choose("linear_activation", kVariants, call, Gpu(x.device())).launch(call);
}

void activation_gradient_of_result(const Tensor& dh, const Tensor& dy, const Tensor& y, Activation kind) {
  if (kind == Activation::none) {
    if (dh.raw() != dy.raw()) dh.copy_from(dy);
  } else if (y.device().is_cpu()) {
    activation_gradient_of_result_cpu(dh, dy, y, kind);
  } else if constexpr (kCuda) {
    activation_gradient_of_result_cuda(dh, dy, y, kind);
  }
}

Tensor column_counts(const Tensor& x, Site site) {
  const CallScope call(site);
  check(x.defined() && is_floating(x.dtype()), "column_counts: x is ", describe(x),
        "; expected a floating tensor [..., C]");
  check(x.rank() >= 1, "column_counts: x is a scalar; expected [..., C]");
  const Tensor rows = flatten_leading(x, 1);
  check(rows.size(0) <= kMostRows, "column_counts: x ", x.shape(), " has ", rows.size(0), " rows; at most ",
        kMostRows, " can be counted");
  const Tensor counts = Tensor::empty_packed({rows.size(1)}, DType::i32, x.device());
  count_columns(counts, rows);
  return counts;
}

ActivatedLinear linear_activation(const Tensor& x, const Tensor& weight, Activation kind, const Tensor& bias,
                                  Site site) {
  const CallScope call(site);
  check(kind == Activation::none || kind == Activation::relu || kind == Activation::relu_squared,
        "linear_activation: the activation is ", name_of(kind), "; expected none, relu or relu_squared");
  const Shape shape = check_linear_call("linear_activation", x, weight, bias, {});
  const Tensor rows = flatten_leading(x, 1);
  check(rows.size(0) <= kMostRows, "linear_activation: x ", x.shape(), " has ", rows.size(0),
        " rows; at most ", kMostRows, " can be counted");
  Tensor y = Tensor::empty(shape, x.dtype(), x.device());
  const Tensor counts = Tensor::empty_packed({weight.size(0)}, DType::i32, x.device());
  linear_activation_forward(flatten_leading(y, 1), counts, rows, weight.detach(), bias.detach(), kind);
  if (Tape* tape = Tape::recording(x, weight, bias)) {
    const Saved kept_x = requires_grad(weight) ? Saved(x) : Saved();
    const Saved kept_y = kind == Activation::none ? Saved() : Saved(y);
    tape->record("linear_activation", {&x, &weight, &bias}, {&y},
                 [x = kept_x, weight = Saved(weight), y = kept_y, kind](Backward& b) {
                   Tensor dh = b.grad();
                   const PassVariant pass("linear_activation", dh);
                   if (kind != Activation::none) {
                     const Tensor dy = dh;
                     dh = as_scratch(Tensor::empty_like(dy));
                     activation_gradient_of_result(dh, dy, y.get(), kind);
                   }
                   linear_input_gradient(b, 0, dh.shape().with(-1, weight.get().size(1)), dh, weight.get());
                   linear_parameter_gradients(b, 1, 2, weight.get(), x.get(), dh);
                 });
  }
  return {y, counts};
}

}  // namespace tessera::ops

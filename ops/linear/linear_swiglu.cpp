#include "ops/linear/linear_swiglu.h"

#include "autograd/tape.h"
#include "ops/gemm/gemm.h"
#include "ops/linear/gemv_kernels.h"
#include "ops/linear/linear.h"
#include "ops/linear/linear_kernels.h"
#include "ops/op.h"
#include "ops/swiglu/swiglu.h"

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

}  // namespace

Tensor linear_swiglu(const Tensor& x, const Tensor& weight, Site site) {
  const CallScope scope(site);
  check_operand("linear_swiglu", "x", x, x);
  check(x.rank() >= 1, "linear_swiglu: x is a scalar; expected [..., in]");
  check_linear("linear_swiglu", "weight", x, x.size(-1), weight, {});
  check(weight.size(0) % 2 == 0, "linear_swiglu: weight ", weight.shape(),
        " has an odd number of rows; expected [2F, in]: gate and up");
  if (x.device().is_cpu()) return swiglu(linear(x, weight));
  const Tensor rows = flatten_leading(x, 1);
  const Call call{x, rows, weight};
  return choose("linear_swiglu", kVariants, call, Gpu(x.device())).launch(call);
}

std::string_view linear_swiglu_variant(const Tensor& rows, const Tensor& weight, const Gpu& gpu) {
  return choose("linear_swiglu", kVariants, Call{rows, rows, weight}, gpu).name;
}

std::vector<OpSpec> linear_swiglu_specs() {
  OpSpec spec;
  spec.name = "linear_swiglu";
  spec.summary = "y = silu(x gate^T) (x up^T)";
  // Its gradients are those of linear and swiglu; a tape would keep the cases from the fused variants.
  spec.inputs = {{"x", "[..., in]", false, false}, {"weight", "[2F, in]", false, false}};
  spec.outputs = {{"y", "[..., F]", false}};
  spec.variants = names_of(kVariants);
  spec.variant_dtypes = {{DType::bf16, DType::f16}, {DType::bf16, DType::f16}, {}};
  spec.honours_f32_math = true;
  spec.tolerance_factor_f32 = 8;
  spec.tolerance_reason = "as linear";
  spec.run = [](const std::vector<Tensor>& in, const Attrs&) {
    return std::vector{linear_swiglu(in[0], in[1])};
  };
  spec.problem = [](const Dims& d, const Attrs&) {
    const int64_t rows = d.at("T"), in = d.at("in"), width = d.at("F");
    const double t = double(rows), i = double(in), f = double(width);
    return Problem{.inputs = {{.shape = {rows, in}}, {.shape = {2 * width, in}}},
                   .forward_flops = 4 * t * i * f,
                   .forward_elements = t * i + 2 * i * f + t * f};
  };
  const auto dims = [](int64_t rows, int64_t in, int64_t width) {
    return Dims{{"T", rows}, {"in", in}, {"F", width}};
  };
  spec.cases = {{.dims = dims(1, 8, 3)},
                {.dims = dims(3, 5, 7)},
                {.dims = dims(8, 40, 17)},
                {.dims = dims(0, 4, 3)},
                {.dims = dims(4, 24, 9), .placement = Placement::strided},
                {.dims = dims(4, 24, 9), .placement = Placement::transposed},
                {.dims = dims(5, 1100, 65), .gradcheck = false},
                {.dims = dims(20, 64, 40), .gradcheck = false},
                {.dims = dims(33, 1032, 700), .gradcheck = false},
                {.dims = dims(64, 136, 4360), .gradcheck = false}};
  for (const int64_t tokens : {1, 8, 32}) spec.benches.push_back({.dims = dims(tokens, 4096, 11008)});
  return {std::move(spec)};
}

}  // namespace tessera::ops

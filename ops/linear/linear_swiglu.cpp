#include "ops/linear/linear_swiglu.h"

#include "autograd/tape.h"
#include "ops/gemm/gemm.h"
#include "ops/linear/gemv_kernels.h"
#include "ops/linear/linear.h"
#include "ops/linear/linear_kernels.h"
#include "ops/op.h"
#include "ops/swiglu/swiglu.h"
#include "runtime/tuning.h"

namespace tessera::ops {
namespace {

enum Row { kParts = 0, kGemv = 1, kWgmma = 2 };

/// What a fused kernel needs and the operands lack, or an empty string. `rows` is x as a matrix.
std::string fused_lacks(Row row, const Tensor& x, const Tensor& rows, const Tensor& weight) {
  if (x.dtype() != DType::bf16 && x.dtype() != DType::f16) return "bf16 or f16";
  if (Tape::recording(x, weight)) return "no gradient";
  return row == kGemv ? gemv_lacks(rows, weight) : multiply_swiglu_lacks(rows, weight);
}

Row choose_row(const Tensor& x, const Tensor& rows, const Tensor& weight) {
  if (const auto forced = tuning::ForceRow::forced("linear_swiglu")) {
    if (*forced == kParts) return kParts;
    const std::string lacks = fused_lacks(Row(*forced), x, rows, weight);
    check(lacks.empty(), "linear_swiglu: row ", *forced == kGemv ? "gemv" : "wgmma", " needs ", lacks,
          ", not ", describe(x), " and ", describe(weight));
    return Row(*forced);
  }
  if (fused_lacks(kGemv, x, rows, weight).empty()) return kGemv;
  return fused_lacks(kWgmma, x, rows, weight).empty() && multiply_swiglu_pays(rows, weight) ? kWgmma : kParts;
}

}  // namespace

Tensor linear_swiglu(const Tensor& x, const Tensor& weight, Site site) {
  const CallScope call(site);
  check_operand("linear_swiglu", "x", x, x);
  check(x.rank() >= 1, "linear_swiglu: x is a scalar; expected [..., in]");
  check_linear("linear_swiglu", "weight", x, x.size(-1), weight, {});
  check(weight.size(0) % 2 == 0, "linear_swiglu: weight ", weight.shape(),
        " has an odd number of rows; expected [2F, in]: gate and up");
  if constexpr (kCuda) {
    const Tensor rows = flatten_leading(x, 1);
    const Row row = x.device().is_cpu() ? kParts : choose_row(x, rows, weight);
    if (row != kParts) {
      const Tensor y = Tensor::empty(x.shape().with(-1, weight.size(0) / 2), x.dtype(), x.device());
      if (row == kGemv)
        gemv_swiglu_cuda(flatten_leading(y, 1), rows, weight.detach());
      else
        multiply_swiglu(flatten_leading(y, 1), rows, weight.detach());
      return y;
    }
  }
  return swiglu(linear(x, weight, {}, {}, site), site);
}

std::vector<OpSpec> linear_swiglu_specs() {
  OpSpec spec;
  spec.name = "linear_swiglu";
  spec.summary = "y = silu(x gate^T) (x up^T)";
  // Its gradients are those of linear and swiglu; a tape would keep the cases from the fused row.
  spec.inputs = {{"x", "[..., in]", false, false}, {"weight", "[2F, in]", false, false}};
  spec.outputs = {{"y", "[..., F]", false}};
  spec.rows = {"parts", "gemv", "wgmma"};
  spec.row_dtypes = {{}, {DType::bf16, DType::f16}, {DType::bf16, DType::f16}};
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

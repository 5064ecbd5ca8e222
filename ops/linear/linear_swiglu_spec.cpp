#include "ops/linear/linear_swiglu.h"
#include "ops/linear/linear_swiglu_kernels.h"
#include "ops/op.h"

namespace tessera::ops {

std::vector<OpSpec> linear_swiglu_specs() {
  OpSpec spec;
  spec.name = "linear_swiglu";
  spec.summary = "y = silu(x gate^T) (x up^T)";
  // Its gradients are those of linear and swiglu; a tape would keep the cases from the fused variants.
  spec.inputs = {{"x", "[..., in]", false, false}, {"weight", "[2F, in]", false, false}};
  spec.outputs = {{"y", "[..., F]", false}};
  spec.variants = linear_swiglu_variants();
  spec.variant_dtypes = {{DType::bf16, DType::f16}, {DType::bf16, DType::f16}, {DType::bf16, DType::f16}, {}};
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
                {.dims = dims(64, 136, 4360), .gradcheck = false},
                {.dims = dims(130, 136, 344), .gradcheck = false},
                {.dims = dims(300, 72, 264), .placement = Placement::strided, .gradcheck = false},
                {.dims = dims(2100, 40, 4168), .gradcheck = false}};
  for (const int64_t tokens : {1, 8, 32, 2048}) spec.benches.push_back({.dims = dims(tokens, 4096, 11008)});
  // The steps of LLaMAs of 130 million and a billion parameters.
  spec.benches.push_back({.dims = dims(65536, 768, 2048)});
  spec.benches.push_back({.dims = dims(16384, 2048, 5632)});
  spec.sweep = [dims](Draw& draw) {
    return Case{.dims = dims(draw.size(1, 100000), draw.size(1, 8192), draw.size(1, 16384))};
  };
  return {std::move(spec)};
}

}  // namespace tessera::ops

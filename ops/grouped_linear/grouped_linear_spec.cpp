#include <algorithm>

#include "ops/gemm/gemm.h"
#include "ops/grouped_linear/grouped_linear.h"
#include "ops/op.h"

namespace tessera::ops {

std::vector<OpSpec> grouped_linear_specs() {
  OpSpec spec;
  spec.name = "grouped_linear";
  spec.summary = "y[..., k, :] = x weight[k]^T + bias[k], x shared by the groups or x[..., k, :]";
  spec.inputs = {{"x", "[..., in], or [..., K, in] if not shared"},
                 {"weight", "[K, out, in]"},
                 {"bias", "[K, out]", true}};
  spec.attrs = {{"shared", true, "every group sees all of x"}};
  spec.outputs = {{"y", "[..., K, out]"}};
  spec.honours_f32_math = true;
  spec.tolerance_factor_f32 = 8;
  spec.variants = gemm_variants();
  spec.variant_dtypes = {{}, {}, {DType::bf16, DType::f16}};
  spec.tolerance_reason = "as linear: one long f32 chain on the GPU, blocks on the CPU";
  spec.run = [](const std::vector<Tensor>& in, const Attrs& attrs) {
    return std::vector{grouped_linear(in[0], in[1], in[2], attrs.flag("shared"))};
  };
  // B batches (0: none) of T rows.
  spec.problem = [](const Dims& d, const Attrs& attrs) {
    const int64_t batch = d.at("B"), rows = d.at("T"), groups = d.at("K"), in = d.at("in"), out = d.at("out");
    const bool shared = attrs.flag("shared"), bias = d.at("bias") != 0;
    Shape x = batch ? Shape{batch, rows} : Shape{rows};
    if (!shared) x = x.inserted(x.rank(), groups);
    x = x.inserted(x.rank(), in);
    const double t = double(rows) * double(std::max<int64_t>(batch, 1)), k = double(groups);
    const double of_x = double(x.count()), of_y = t * k * double(out), weights = k * double(out) * double(in);
    const double products = 2 * of_y * double(in), of_bias = bias ? k * double(out) : 0;
    return Problem{.inputs = {{.shape = x},
                              {.shape = {groups, out, in}},
                              {.shape = {groups, out}, .fill = bias ? Fill::normal : Fill::absent}},
                   .forward_flops = products + (bias ? of_y : 0),
                   .backward_flops = 2 * products + (bias ? of_y : 0),
                   .forward_elements = of_x + weights + of_bias + of_y,
                   .backward_elements = of_y + 2 * (of_x + weights) + of_bias};
  };
  const auto dims = [](int64_t batch, int64_t rows, int64_t groups, int64_t in, int64_t out, int64_t bias) {
    return Dims{{"B", batch}, {"T", rows}, {"K", groups}, {"in", in}, {"out", out}, {"bias", bias}};
  };
  for (const bool shared : {true, false}) {
    const Attrs attrs{{"shared", shared}};
    const std::vector<Case> cases = {
        {.dims = dims(0, 5, 3, 4, 2, 1), .attrs = attrs},  // rows of y fill 16 bytes in f64: one long GEMM
        {.dims = dims(0, 5, 3, 4, 3, 0), .attrs = attrs},  // and here they are pitched
        {.dims = dims(2, 3, 2, 5, 3, 1), .attrs = attrs},
        {.dims = dims(0, 1, 1, 1, 1, 1), .attrs = attrs},
        {.dims = dims(0, 1, 4, 3, 5, 1), .attrs = attrs},
        {.dims = dims(0, 4, 1, 3, 5, 1), .attrs = attrs},
        {.dims = dims(0, 0, 2, 3, 4, 1), .attrs = attrs},
        {.dims = dims(0, 3, 0, 3, 4, 1), .attrs = attrs},
        {.dims = dims(0, 3, 2, 0, 4, 1), .attrs = attrs},
        {.dims = dims(0, 3, 2, 4, 0, 1), .attrs = attrs},
        {.dims = dims(2, 3, 2, 5, 3, 1), .attrs = attrs, .placement = Placement::strided},
        {.dims = dims(2, 3, 2, 5, 3, 1), .attrs = attrs, .placement = Placement::transposed},
        {.dims = dims(0, 65, 10, 129, 31, 1), .attrs = attrs, .gradcheck = false},
        {.dims = dims(0, 127, 10, 1365, 3, 1), .attrs = attrs, .gradcheck = false},
        {.dims = dims(0, 1003, 1, 48, 5, 1), .attrs = attrs, .gradcheck = false},
        {.dims = dims(0, 7, 16, 3, 257, 1), .attrs = attrs, .gradcheck = false},
        {.dims = dims(2, 33, 3, 64, 1365, 0),
         .attrs = attrs,
         .placement = Placement::strided,
         .gradcheck = false}};
    spec.cases.insert(spec.cases.end(), cases.begin(), cases.end());
  }
  for (const int64_t tokens : {1000, 5000, 32000}) {
    spec.benches.push_back({.dims = dims(0, tokens, 10, 512, 1365, 0)});
    spec.benches.push_back({.dims = dims(0, tokens, 10, 1365, 3, 0), .attrs = {{"shared", false}}});
  }
  spec.sweep = [dims](Draw& draw) {
    const bool shared = draw.chance(0.5);
    const int64_t out = draw.chance(0.3) ? draw.size(1, 16) : draw.size(1, 4096);
    return Case{
        .dims = dims(0, draw.size(1, 50000), draw.size(1, 16), draw.size(1, 4096), out, draw.chance(0.5)),
        .attrs = {{"shared", shared}}};
  };
  return {std::move(spec)};
}

}  // namespace tessera::ops

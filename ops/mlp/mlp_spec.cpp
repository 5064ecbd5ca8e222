#include <algorithm>

#include "ops/gemm/gemm.h"
#include "ops/linear/sliced_backward_spec_internal.h"
#include "ops/mlp/mlp.h"
#include "ops/op.h"

namespace tessera::ops {

std::vector<OpSpec> mlp_specs() {
  OpSpec spec;
  spec.name = "mlp";
  spec.summary = "y = f(x up^T + up_bias) down^T + down_bias + residual";
  spec.inputs = {{"x", "[..., D]"},        {"up", "[F, D]"},           {"down", "[E, F]"},
                 {"up_bias", "[F]", true}, {"down_bias", "[E]", true}, {"residual", "[..., E]", true}};
  std::vector<std::string> kinds;
  for (const Activation kind : {Activation::none, Activation::relu, Activation::relu_squared,
                                Activation::silu, Activation::gelu, Activation::gelu_tanh})
    kinds.push_back(name_of(kind));
  spec.attrs = slice_attrs();
  spec.attrs.insert(spec.attrs.begin(), {"activation", std::string("silu"), "f", kinds});
  spec.seed = "seed";
  spec.outputs = {{"y", "[..., E]"}};
  spec.honours_f32_math = true;
  spec.tolerance_factor_f32 = 8;
  spec.variants = gemm_variants();
  spec.variants.push_back("wgmma scatter");
  spec.variant_dtypes = {{}, {}, {DType::bf16, DType::f16}, {}, {DType::bf16, DType::f16}};
  spec.tolerance_reason = "as linear: one long f32 chain on the GPU, blocks on the CPU";
  spec.cpu_extra_ulp = 2;
  spec.cpu_extra_reason =
      "h, a, da and dh are rounded before the products that use them; no sum hides that where F = 1";
  spec.run = [](const std::vector<Tensor>& in, const Attrs& attrs) {
    SeededRng seeded(attrs.integer("seed"));
    const auto slice = slice_of("mlp", attrs, seeded.rng());
    const Activation kind = parse_activation(attrs.word("activation"));
    return std::vector{slice ? mlp(in[0], in[1], in[2], kind, in[3], in[4], in[5], *slice)
                             : mlp(in[0], in[1], in[2], kind, in[3], in[4], in[5])};
  };
  // B batches (0: none) of T rows.
  spec.problem = [](const Dims& d, const Attrs& attrs) {
    const int64_t batch = d.at("B"), rows = d.at("T"), wide = d.at("F"), in = d.at("D"), out = d.at("E");
    const Fill bias = d.at("bias") ? Fill::normal : Fill::absent;
    const int64_t tokens = rows * std::max<int64_t>(batch, 1);
    const double t = double(tokens), n = double(sliced_rows(attrs, tokens));
    const std::string& weight_grad = attrs.word("weight_grad");
    const bool sliced = attrs.word("slice") != "none";
    // Rows that the gradients of up and of down are summed over.
    const double of_up = sliced && weight_grad == "none" ? 0 : n;
    const double of_down = sliced && weight_grad == "full" ? t : of_up;
    const double io = double(in) + double(out), weights = double(wide) * io, hidden = t * double(wide);
    const double extra = d.at("bias") ? hidden + t * double(out) : 0;
    const auto of_rows = [&](int64_t width) {
      return batch ? Shape{batch, rows, width} : Shape{rows, width};
    };
    const Fill residual = is_set(d, "residual") ? Fill::normal : Fill::absent;
    const double added = is_set(d, "residual") ? t * double(out) : 0;
    return Problem{.inputs = {{.shape = of_rows(in)},
                              {.shape = {wide, in}, .scale = 0.5},
                              {.shape = {out, wide}, .scale = 0.5},
                              {.shape = {wide}, .fill = bias},
                              {.shape = {out}, .fill = bias},
                              {.shape = of_rows(out), .fill = residual}},
                   .forward_flops = 2 * t * weights + hidden + extra + added,
                   .backward_flops = 2 * n * weights +
                                     2 * double(wide) * (of_up * double(in) + of_down * double(out)) +
                                     2 * n * double(wide) + extra,
                   .forward_elements = t * io + weights + hidden + added,
                   .backward_elements = (d.at("bias") ? t : n) * double(out) + n * double(in) +
                                        (of_up > 0 ? 2 : 1) * weights + std::max(n, of_down) * double(wide) +
                                        t * double(in)};
  };
  const auto dims = [](int64_t batch, int64_t rows, int64_t in, int64_t wide, int64_t out, int64_t bias) {
    return Dims{{"B", batch}, {"T", rows}, {"D", in}, {"F", wide}, {"E", out}, {"bias", bias}};
  };
  for (const std::string& kind : kinds)
    spec.cases.push_back({.dims = dims(0, 5, 3, 7, 4, 1), .attrs = {{"activation", kind}}});
  const std::vector<Case> more = {
      {.dims = dims(0, 6, 4, 5, 3, 0)},
      {.dims = dims(2, 3, 4, 5, 2, 1)},
      {.dims = dims(0, 1, 1, 1, 1, 1)},
      {.dims = dims(0, 0, 3, 4, 2, 1)},
      {.dims = dims(0, 3, 0, 4, 2, 1)},
      {.dims = dims(0, 3, 2, 0, 4, 1)},
      {.dims = dims(0, 3, 2, 4, 0, 1)},
      {.dims = dims(2, 3, 5, 7, 4, 1), .placement = Placement::strided},
      {.dims = dims(0, 4, 5, 7, 3, 1), .placement = Placement::transposed},
      {.dims = dims(0, 129, 64, 171, 65, 1), .gradcheck = false},
      {.dims = dims(3, 31, 33, 1365, 17, 0), .placement = Placement::strided, .gradcheck = false},
      {.dims = dims(0, 130, 136, 345, 264, 1), .gradcheck = false},  // edges of all tiles
      {.dims = dims(0, 130, 3000, 40, 2056, 1),
       .gradcheck = false},  // few tiles, long sums: split, then a pass
      {.dims = dims(0, 1000, 264, 345, 264, 0),
       .gradcheck = false},  // both weights' gradients as one product,
      {.dims = dims(0, 1000, 264, 345, 264, 1), .gradcheck = false}};  // and both biases'
  spec.cases.insert(spec.cases.end(), more.begin(), more.end());
  for (const Case& plain : {Case{.dims = dims(0, 6, 4, 5, 3, 0)},
                            {.dims = dims(2, 3, 4, 5, 4, 1)},
                            {.dims = dims(0, 3, 2, 0, 4, 1)},
                            {.dims = dims(2, 3, 5, 7, 4, 1), .placement = Placement::strided},
                            {.dims = dims(0, 129, 64, 171, 64, 0), .gradcheck = false},
                            {.dims = dims(2, 70, 72, 300, 136, 1), .gradcheck = false}}) {
    spec.cases.push_back(plain);
    spec.cases.back().dims["residual"] = 1;
  }
  add_slice_cases(spec.cases, {.dims = dims(0, 9, 3, 7, 4, 1)}, 4);
  add_slice_cases(
      spec.cases,
      {.dims = {{"B", 3}, {"T", 31}, {"D", 33}, {"F", 129}, {"E", 33}, {"bias", 1}, {"residual", 1}},
       .placement = Placement::strided},
      17);
  add_slice_cases(spec.cases, {.dims = dims(0, 150, 136, 172, 136, 1)}, 40);
  for (const int64_t tokens : {11000, 36096, 205000})
    spec.benches.push_back({.dims = dims(0, tokens, 512, 1365, 512, 0)});
  spec.sweep = [dims](Draw& draw) {
    const int64_t in = draw.size(1, 2048), out = draw.chance(0.8) ? in : draw.size(1, 2048);
    Case drawn{.dims = dims(0, draw.size(1, 200000), in, draw.size(1, 8192), out, draw.chance(0.3))};
    if (in == out && draw.chance(0.2)) drawn.dims["residual"] = 1;
    draw_slice(draw, drawn);
    return drawn;
  };
  return {std::move(spec)};
}

}  // namespace tessera::ops

#include <algorithm>

#include "ops/grouped_mlp/grouped_mlp_kernels.h"
#include "ops/op.h"

namespace tessera::ops {

std::vector<OpSpec> grouped_mlp_specs() {
  OpSpec spec;
  spec.name = "grouped_mlp";
  spec.summary = "y[..., k, :] = f(x up[k]^T) down[k]^T";
  spec.inputs = {{"x", "[..., D]"}, {"up", "[K, F, D]"}, {"down", "[K, E, F]"}};
  std::vector<std::string> kinds;
  for (const Activation kind : {Activation::none, Activation::relu, Activation::relu_squared,
                                Activation::silu, Activation::gelu, Activation::gelu_tanh})
    kinds.push_back(name_of(kind));
  spec.attrs = {{"activation", std::string("silu"), "f", kinds}};
  spec.outputs = {{"y", "[..., K, E]"}};
  spec.variants = grouped_mlp_variants();
  spec.variant_dtypes = {{DType::bf16, DType::f16}, {}};
  spec.honours_f32_math = true;
  spec.tolerance_factor_f32 = 8;
  spec.tolerance_reason = "as linear: one long f32 chain on the GPU, blocks on the CPU";
  spec.run = [](const std::vector<Tensor>& in, const Attrs& attrs) {
    return std::vector{grouped_mlp(in[0], in[1], in[2], parse_activation(attrs.word("activation")))};
  };
  // B batches (0: none) of T rows.
  spec.problem = [](const Dims& d, const Attrs&) {
    const int64_t batch = d.at("B"), rows = d.at("T"), groups = d.at("K"), in = d.at("D"), wide = d.at("F"),
                  out = d.at("E");
    const double t = double(rows) * double(std::max<int64_t>(batch, 1)), k = double(groups), f = double(wide);
    const double first = 2 * t * k * f * double(in), second = 2 * t * k * f * double(out);
    const double weights = k * f * (double(in) + double(out)), ends = t * (double(in) + k * double(out));
    return Problem{.inputs = {{.shape = batch ? Shape{batch, rows, in} : Shape{rows, in}},
                              {.shape = {groups, wide, in}, .scale = 0.5},
                              {.shape = {groups, out, wide}, .scale = 0.5}},
                   .forward_flops = first + second + t * k * f,
                   .backward_flops = 2 * (first + second) + 2 * t * k * f,
                   .forward_elements = weights + ends,
                   .backward_elements = 2 * weights + ends + t * double(in)};
  };
  const auto dims = [](int64_t batch, int64_t rows, int64_t groups, int64_t in, int64_t wide, int64_t out) {
    return Dims{{"B", batch}, {"T", rows}, {"K", groups}, {"D", in}, {"F", wide}, {"E", out}};
  };
  for (const std::string& kind : kinds)
    spec.cases.push_back({.dims = dims(0, 4, 3, 5, 6, 2), .attrs = {{"activation", kind}}});
  const std::vector<Case> more = {
      {.dims = dims(2, 3, 2, 5, 3, 3)},
      {.dims = dims(0, 1, 1, 1, 1, 1)},
      {.dims = dims(0, 4, 1, 3, 5, 2)},
      {.dims = dims(0, 0, 2, 3, 4, 1)},
      {.dims = dims(0, 3, 0, 3, 4, 1)},
      {.dims = dims(0, 3, 2, 0, 4, 1)},
      {.dims = dims(0, 3, 2, 4, 0, 1)},
      {.dims = dims(0, 3, 2, 4, 3, 0)},
      {.dims = dims(2, 3, 2, 5, 3, 1), .placement = Placement::strided},
      {.dims = dims(2, 3, 2, 5, 3, 2), .placement = Placement::transposed},
      {.dims = dims(0, 127, 10, 64, 165, 3), .gradcheck = false},
      {.dims = dims(0, 129, 3, 72, 257, 3),
       .attrs = {{"activation", std::string("gelu")}},
       .gradcheck = false},
      {.dims = dims(3, 65, 4, 40, 128, 4),
       .attrs = {{"activation", std::string("relu")}},
       .gradcheck = false},
      {.dims = dims(0, 300, 2, 512, 600, 3), .gradcheck = false},
      {.dims = dims(2, 33, 3, 64, 136, 5), .placement = Placement::strided, .gradcheck = false},
      {.dims = dims(0, 700, 3, 530, 171, 16), .gradcheck = false}};
  spec.cases.insert(spec.cases.end(), more.begin(), more.end());
  for (const int64_t tokens : {1000, 5000, 32000})
    spec.benches.push_back({.dims = dims(0, tokens, 10, 512, 1365, 3)});
  spec.sweep = [dims](Draw& draw) {
    const int64_t out = draw.chance(0.5) ? 3 : draw.size(1, 16);
    return Case{
        .dims = dims(0, draw.size(1, 50000), draw.size(1, 16), draw.size(1, 1024), draw.size(1, 4096), out)};
  };
  return {std::move(spec)};
}

}  // namespace tessera::ops

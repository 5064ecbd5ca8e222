#include <algorithm>

#include "ops/gemm/gemm.h"
#include "ops/linear/linear.h"
#include "ops/linear/sliced_backward_spec_internal.h"
#include "ops/op.h"

namespace tessera::ops {

std::vector<OpSpec> linear_specs() {
  OpSpec spec;
  spec.name = "linear";
  spec.summary = "y = x weight^T + bias + residual";
  spec.inputs = {
      {"x", "[..., in]"}, {"weight", "[out, in]"}, {"bias", "[out]", true}, {"residual", "[..., out]", true}};
  spec.outputs = {{"y", "[..., out]"}};
  spec.attrs = slice_attrs();
  spec.seed = "seed";
  spec.honours_f32_math = true;
  spec.tolerance_factor_f32 = 8;
  spec.variants = gemm_variants();
  spec.variants.push_back("gemv");
  spec.variants.push_back("wgmma scatter");
  spec.variant_dtypes = {{}, {}, {DType::bf16, DType::f16}, {}, {}, {DType::bf16, DType::f16}};
  spec.tolerance_reason =
      "cuBLASLt adds the products of one output in a single f32 chain; the CPU adds in blocks, whose error "
      "grows with the square root of a block";
  spec.cpu_extra_ulp = 2;
  spec.cpu_extra_reason = "the chosen rows of dy are rounded after they were multiplied by their scales";
  spec.run = [](const std::vector<Tensor>& in, const Attrs& attrs) {
    SeededRng seeded(attrs.integer("seed"));
    const auto slice = slice_of("linear", attrs, seeded.rng());
    return std::vector{slice ? linear(in[0], in[1], in[2], in[3], *slice)
                             : linear(in[0], in[1], in[2], in[3])};
  };
  // B batches (0: none) of T rows.
  spec.problem = [](const Dims& d, const Attrs& attrs) {
    const int64_t batch = d.at("B"), rows = d.at("T"), in = d.at("in"), out = d.at("out");
    const bool bias = d.at("bias") != 0, residual = is_set(d, "residual");
    const auto of_rows = [&](int64_t width) {
      return batch ? Shape{batch, rows, width} : Shape{rows, width};
    };
    const int64_t tokens = rows * std::max<int64_t>(batch, 1);
    const double t = double(tokens), i = double(in), o = double(out);
    // Of the gradients of x and of the weight.
    const std::string& kind = attrs.word("weight_grad");
    const double n = double(sliced_rows(attrs, tokens));
    const bool trains = attrs.word("slice") == "none" || kind != "none";
    const double summed = !trains ? 0 : kind == "full" ? t : n;
    return Problem{.inputs = {{.shape = of_rows(in)},
                              {.shape = {out, in}},
                              {.shape = {out}, .fill = bias ? Fill::normal : Fill::absent},
                              {.shape = of_rows(out), .fill = residual ? Fill::normal : Fill::absent}},
                   .forward_flops = 2 * t * i * o + (bias ? t * o : 0) + (residual ? t * o : 0),
                   .backward_flops = 2 * (n + summed) * i * o + (bias ? t * o : 0),
                   .forward_elements = t * i + i * o + t * o + (bias ? o : 0) + (residual ? t * o : 0),
                   .backward_elements = (bias ? t : std::max(n, summed)) * o + (t + summed) * i +
                                        (trains ? 2 : 1) * i * o + (bias ? o : 0)};
  };
  const auto dims = [](int64_t batch, int64_t rows, int64_t in, int64_t out, int64_t bias) {
    return Dims{{"B", batch}, {"T", rows}, {"in", in}, {"out", out}, {"bias", bias}};
  };
  spec.cases = {{.dims = dims(0, 7, 5, 3, 1)},
                {.dims = dims(0, 7, 5, 3, 0)},
                {.dims = dims(3, 2, 4, 8, 1)},
                {.dims = dims(0, 1, 1, 1, 1)},
                {.dims = dims(0, 1, 9, 4, 1)},
                {.dims = dims(0, 6, 1, 5, 0)},
                {.dims = dims(0, 5, 4, 1, 1)},
                {.dims = dims(0, 0, 3, 2, 1)},
                {.dims = dims(0, 4, 0, 3, 1)},
                {.dims = dims(0, 4, 0, 3, 0)},
                {.dims = dims(0, 4, 3, 0, 1)},
                {.dims = dims(2, 0, 3, 4, 1)},
                {.dims = dims(2, 3, 5, 4, 1), .placement = Placement::strided},
                {.dims = dims(0, 6, 5, 7, 1), .placement = Placement::transposed},
                {.dims = dims(2, 3, 5, 4, 0), .placement = Placement::transposed},
                {.dims = dims(0, 2645, 5, 3, 1), .gradcheck = false},  // narrow sides
                {.dims = dims(0, 513, 200, 2, 1), .gradcheck = false},
                {.dims = dims(0, 300, 3, 511, 1), .placement = Placement::strided, .gradcheck = false},
                {.dims = dims(0, 129, 257, 65, 1), .gradcheck = false},
                {.dims = dims(0, 127, 64, 1365, 0), .gradcheck = false},
                {.dims = dims(3, 85, 1365, 31, 1), .placement = Placement::strided, .gradcheck = false},
                {.dims = dims(0, 1000, 33, 3, 1), .placement = Placement::transposed, .gradcheck = false},
                {.dims = dims(0, 1, 2056, 130, 1), .gradcheck = false},  // few rows: see gemv.cuh
                {.dims = dims(0, 8, 1365, 77, 0), .gradcheck = false},
                {.dims = dims(2, 3, 520, 33, 1), .gradcheck = false}};
  for (const Case& plain : {Case{.dims = dims(0, 7, 5, 3, 1)},
                            {.dims = dims(3, 2, 4, 8, 0)},
                            {.dims = dims(0, 0, 3, 2, 1)},
                            {.dims = dims(0, 4, 0, 3, 1)},
                            {.dims = dims(0, 1, 9, 4, 1)},
                            {.dims = dims(2, 3, 5, 4, 1), .placement = Placement::strided},
                            {.dims = dims(0, 6, 5, 7, 0), .placement = Placement::transposed},
                            {.dims = dims(0, 129, 257, 65, 1), .gradcheck = false},
                            {.dims = dims(0, 300, 64, 1365, 0), .gradcheck = false}}) {
    spec.cases.push_back(plain);
    spec.cases.back().dims["residual"] = 1;
  }
  add_slice_cases(spec.cases, {.dims = dims(0, 9, 5, 3, 1)}, 4);
  add_slice_cases(spec.cases, {.dims = dims(3, 43, 65, 31, 1), .placement = Placement::strided}, 17);
  add_slice_cases(spec.cases, {.dims = dims(0, 300, 136, 264, 0)}, 300);
  for (const int64_t tokens : {11000, 36096, 205000}) {
    spec.benches.push_back({.dims = dims(0, tokens, 512, 1365, 0)});
    spec.benches.push_back({.dims = dims(0, tokens, 1365, 512, 0)});
  }
  for (const int64_t tokens : {1, 8})
    for (const auto& [in, out] : {std::pair{4096, 4096}, {4096, 11008}, {11008, 4096}, {4096, 32000}})
      spec.benches.push_back({.dims = dims(0, tokens, in, out, 0)});
  spec.sweep = [dims](Draw& draw) {
    Case drawn{.dims =
                   dims(0, draw.size(1, 200000), draw.size(1, 8192), draw.size(1, 8192), draw.chance(0.5))};
    if (draw.chance(0.2)) drawn.dims["residual"] = 1;
    draw_slice(draw, drawn);
    return drawn;
  };
  return {std::move(spec)};
}

}  // namespace tessera::ops

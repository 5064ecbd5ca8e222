#include <algorithm>

#include "ops/linear/linear_activation.h"
#include "ops/op.h"

namespace tessera::ops {
namespace {

Dims linear_activation_sizes(int64_t batch, int64_t rows, int64_t in, int64_t out, int64_t bias) {
  return {{"B", batch}, {"T", rows}, {"in", in}, {"out", out}, {"bias", bias}};
}

OpSpec linear_activation_spec() {
  OpSpec spec;
  spec.name = "linear_activation";
  spec.summary = "y = f(x weight^T + bias); counts: the elements of each column of y that are not zero";
  spec.inputs = {{"x", "[..., in]"}, {"weight", "[out, in]"}, {"bias", "[out]", true}};
  spec.attrs = {{"activation", std::string("relu_squared"), "f", {"none", "relu", "relu_squared"}},
                {"counts", true, "off: zeros in place of the counts"}};
  spec.outputs = {{"y", "[..., out]"}, {"counts", "[out]", false, {DType::i32}, true}};
  spec.tolerance_factor_f32 = 8;
  spec.tolerance_reason = "as linear; relu_squared doubles the relative error of h";
  spec.tolerance_factor = 4;
  spec.variants = {"epilogue wide", "epilogue", "separate"};
  spec.variant_dtypes = {{DType::bf16, DType::f16}, {DType::bf16, DType::f16}, {}};
  spec.cpu_extra_ulp = 4;
  spec.cpu_extra_reason = "h and dh are rounded; relu_squared doubles the relative error of h";
  spec.run = [](const std::vector<Tensor>& in, const Attrs& attrs) {
    const ActivatedLinear result =
        linear_activation(in[0], in[1], parse_activation(attrs.word("activation")), in[2]);
    // Near 0 the sign of a sum is a matter of its order: such counts are compared with their own y elsewhere.
    if (!attrs.flag("counts")) result.counts.fill(0);
    return std::vector{result.y, result.counts};
  };
  // B batches (0: none) of T rows.
  spec.problem = [](const Dims& d, const Attrs&) {
    const int64_t batch = d.at("B"), rows = d.at("T"), in = d.at("in"), out = d.at("out");
    const bool bias = d.at("bias") != 0;
    // A product of two such numbers has a sign, and a square that no dtype rounds to 0.
    const Fill fill = in == 1 && !bias ? Fill::away_from_0 : Fill::normal;
    const double t = double(rows * std::max<int64_t>(batch, 1)), i = double(in), o = double(out);
    return Problem{.inputs = {{.shape = batch ? Shape{batch, rows, in} : Shape{rows, in}, .fill = fill},
                              {.shape = {out, in}, .fill = fill},
                              {.shape = {out}, .fill = bias ? Fill::normal : Fill::absent}},
                   .forward_flops = 2 * t * i * o + t * o,
                   .backward_flops = 4 * t * i * o + t * o,
                   .forward_elements = t * i + i * o + t * o,
                   .backward_elements = 2 * t * o + 2 * t * i + 2 * i * o,
                   .forward_bytes = 4 * o};
  };
  for (const char* const kind : {"none", "relu", "relu_squared"}) {
    spec.cases.push_back(
        {.dims = linear_activation_sizes(0, 7, 5, 3, 1), .attrs = {{"activation", std::string(kind)}}});
    spec.cases.push_back({.dims = linear_activation_sizes(0, 131, 72, 200, 1),
                          .attrs = {{"activation", std::string(kind)}},
                          .gradcheck = false});
  }
  const std::vector<Case> more = {
      {.dims = linear_activation_sizes(0, 6, 4, 5, 0)},
      {.dims = linear_activation_sizes(2, 3, 4, 8, 1)},
      {.dims = linear_activation_sizes(0, 1, 1, 1, 1)},
      {.dims = linear_activation_sizes(0, 0, 3, 4, 1)},
      {.dims = linear_activation_sizes(0, 3, 0, 4, 1)},
      {.dims = linear_activation_sizes(0, 3, 2, 0, 1)},
      {.dims = linear_activation_sizes(2, 3, 5, 7, 1), .placement = Placement::strided},
      {.dims = linear_activation_sizes(0, 6, 5, 7, 0), .placement = Placement::transposed},
      {.dims = linear_activation_sizes(0, 129, 257, 65, 1), .gradcheck = false},
      {.dims = linear_activation_sizes(3, 85, 33, 264, 0),
       .placement = Placement::strided,
       .gradcheck = false},
      {.dims = linear_activation_sizes(0, 1, 64, 1365, 1), .gradcheck = false},
      {.dims = linear_activation_sizes(0, 700, 136, 345, 1), .gradcheck = false}};
  spec.cases.insert(spec.cases.end(), more.begin(), more.end());
  for (Case& one : spec.cases) one.attrs.set("counts", false);
  for (const char* const kind : {"none", "relu", "relu_squared"})
    spec.cases.push_back({.dims = linear_activation_sizes(0, 700, 1, 345, 0),
                          .attrs = {{"activation", std::string(kind)}},
                          .gradcheck = false});
  spec.cases.push_back({.dims = linear_activation_sizes(3, 43, 1, 65, 0),
                        .placement = Placement::strided,
                        .gradcheck = false});
  for (const auto& [rows, in, out] :
       {std::tuple{16384, 4096, 16384}, {16384, 2048, 8192}, {11000, 512, 1365}})
    spec.benches.push_back({.dims = linear_activation_sizes(0, rows, in, out, 0)});
  spec.sweep = [](Draw& draw) {
    return Case{.dims = linear_activation_sizes(0, draw.size(1, 100000), draw.size(1, 4096),
                                                draw.size(1, 8192), draw.chance(0.5))};
  };
  return spec;
}

OpSpec column_counts_spec() {
  OpSpec spec;
  spec.name = "column_counts";
  spec.summary = "the number of elements of each column that are not zero";
  spec.inputs = {{"x", "[..., C]", false, false}};
  spec.outputs = {{"counts", "[C]", false, {DType::i32}}};
  spec.run = [](const std::vector<Tensor>& in, const Attrs&) { return std::vector{column_counts(in[0])}; };
  spec.problem = [](const Dims& d, const Attrs&) {
    const double elements = double(d.at("R")) * double(d.at("C"));
    return Problem{.inputs = {{.shape = {d.at("R"), d.at("C")}, .density = 0.3}},
                   .forward_elements = elements,
                   .forward_bytes = 4 * double(d.at("C"))};
  };
  const auto dims = [](int64_t rows, int64_t columns) { return Dims{{"R", rows}, {"C", columns}}; };
  spec.cases = {{.dims = dims(7, 5)},
                {.dims = dims(1, 1)},
                {.dims = dims(0, 3)},
                {.dims = dims(4, 0)},
                {.dims = dims(9, 67), .placement = Placement::strided},
                {.dims = dims(9, 67), .placement = Placement::transposed},
                {.dims = dims(1000, 264)},
                {.dims = dims(131, 1365)}};
  spec.benches = {{.dims = dims(16384, 16384)}, {.dims = dims(16384, 8192)}};
  spec.sweep = [dims](Draw& draw) { return Case{.dims = dims(draw.size(1, 50000), draw.size(1, 16384))}; };
  return spec;
}

}  // namespace

std::vector<OpSpec> linear_activation_specs() {
  return {linear_activation_spec(), column_counts_spec()};
}

}  // namespace tessera::ops

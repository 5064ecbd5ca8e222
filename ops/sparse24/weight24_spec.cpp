#include "ops/op.h"
#include "ops/sparse24/weight24.h"
#include "runtime/integers.h"

namespace tessera::ops {
namespace {

Dims weight24_dims(int64_t rows, int64_t columns) {
  return {{"out", rows}, {"in", columns}};
}

constexpr const char* kMask = "[out, ceil(in / 32)]";

InputSpec mask_input() {
  return {.name = "mask", .shape = kMask, .dtypes = {DType::i32}, .from = {"weight"}};
}

Shape mask_shape(const Dims& d) {
  return {d.at("out"), ceil_div(d.at("in"), 32)};
}

OpSpec mask_spec() {
  OpSpec op{.name = "transposable24",
            .summary = "the mask of two per row and column of each 4 x 4 block of largest magnitudes",
            .inputs = {{.name = "weight", .shape = "[out, in]", .differentiable = false}},
            .outputs = {{.name = "mask", .shape = kMask, .differentiable = false, .dtypes = {DType::i32}}}};
  op.run = [](const std::vector<Tensor>& in, const Attrs&) { return std::vector{transposable24(in[0])}; };
  op.problem = [](const Dims& d, const Attrs&) {
    const double n = double(d.at("out")) * double(d.at("in"));
    return Problem{
        .inputs = {{.shape = {d.at("out"), d.at("in")}}}, .forward_elements = n, .forward_bytes = n / 8};
  };
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{4, 4},
                                      {1, 1},
                                      {5, 7},
                                      {64, 64},
                                      {63, 33},
                                      {130, 4},
                                      {3, 257},
                                      {0, 5},
                                      {6, 0},
                                      {68, 132}})
    op.cases.push_back({.dims = weight24_dims(rows, columns), .gradcheck = false});
  for (const Placement placement : {Placement::strided, Placement::transposed})
    op.cases.push_back({.dims = weight24_dims(37, 70), .placement = placement, .gradcheck = false});
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{8192, 2048}, {4096, 11008}})
    op.benches.push_back({.dims = weight24_dims(rows, columns), .gradcheck = false});
  return op;
}

OpSpec masked_linear_spec() {
  OpSpec op{.name = "weight24_linear",
            .summary = "y = x (M . weight)^T + bias + residual, M a transposable mask; dweight = dy^T x",
            .inputs = {{"x", "[..., in]"},
                       {"weight", "[out, in]"},
                       mask_input(),
                       {"bias", "[out]", true},
                       {"residual", "[..., out]", true}},
            .attrs = {{"gradient",
                       std::string("dense"),
                       "dy in dweight: whole, or two of every four tokens (mvue)",
                       {"dense", "mvue"}},
                      {"seed", int64_t{0}, "random seed of mvue"}},
            .outputs = {{"y", "[..., out]"}}};
  op.run = [](const std::vector<Tensor>& in, const Attrs& attrs) {
    SeededRng seeded(attrs.integer("seed"));
    std::optional<Rng> mvue;
    if (attrs.word("gradient") == "mvue") mvue = seeded.rng();
    return std::vector{weight24_linear(in[0], in[1], in[2], in[3], in[4], mvue)};
  };
  op.seed = "seed";
  op.derive = [](const std::vector<Tensor>& in, const Attrs&) { return std::vector{transposable24(in[1])}; };
  op.problem = [](const Dims& d, const Attrs&) {
    const int64_t rows = d.at("T"), in = d.at("in"), out = d.at("out");
    const auto of_rows = [&](int64_t width) {
      return d.contains("B") ? Shape{d.at("B"), rows, width} : Shape{rows, width};
    };
    const auto given = [&](const char* name, const Shape& shape) {
      return InputCase{.shape = shape, .fill = d.contains(name) ? Fill::normal : Fill::absent};
    };
    const double t = double(of_rows(1).count()), i = double(in), o = double(out);
    // FLOPs are those of the dense layer, as a share of which a sparse one is judged.
    return Problem{.inputs = {{.shape = of_rows(in)},
                              {.shape = {out, in}},
                              {.shape = mask_shape(d)},
                              given("bias", {out}),
                              given("residual", of_rows(out))},
                   .forward_flops = 2 * t * i * o,
                   .backward_flops = 4 * t * i * o,
                   .forward_elements = t * i + i * o + t * o,
                   .backward_elements = 2 * (t * i + i * o) + t * o,
                   .forward_bytes = i * o / 8,
                   .backward_bytes = i * o / 8};
  };
  const auto sized = [](int64_t rows, int64_t in, int64_t out) {
    return Dims{{"T", rows}, {"in", in}, {"out", out}};
  };
  // Central differences of the weight are those of the masked function, which its gradient is not; see
  // tests/ops/weight24_test.cpp.
  const auto add = [&](const Dims& dims, Placement placement = Placement::pitched,
                       const char* gradient = "dense") {
    op.cases.push_back({.dims = dims,
                        .attrs = {{"gradient", std::string(gradient)}, {"seed", dims.at("T")}},
                        .placement = placement,
                        .gradcheck = false});
  };
  add(sized(7, 9, 5));
  add({{"B", 2}, {"T", 3}, {"in", 8}, {"out", 4}, {"bias", 1}, {"residual", 1}});
  add({{"T", 6}, {"in", 5}, {"out", 7}, {"bias", 1}}, Placement::transposed);
  add({{"B", 2}, {"T", 3}, {"in", 40}, {"out", 4}, {"residual", 1}}, Placement::strided);
  for (const auto& [rows, in, out] :
       {std::tuple<int64_t, int64_t, int64_t>{0, 3, 2}, {4, 0, 3}, {4, 3, 0}, {1, 1, 1}}) {
    Dims dims = sized(rows, in, out);
    dims["bias"] = 1;
    add(dims);
  }
  add({{"T", 129}, {"in", 200}, {"out", 66}, {"bias", 1}, {"residual", 1}});
  add(sized(7, 9, 5), Placement::pitched, "mvue");
  add({{"T", 12}, {"in", 5}, {"out", 7}, {"bias", 1}}, Placement::transposed, "mvue");
  add({{"B", 2}, {"T", 3}, {"in", 40}, {"out", 4}, {"residual", 1}}, Placement::strided, "mvue");
  for (const auto& [rows, in, out] : {std::tuple<int64_t, int64_t, int64_t>{0, 3, 2}, {4, 0, 3}, {4, 3, 0}})
    add(sized(rows, in, out), Placement::pitched, "mvue");
  add({{"T", 129}, {"in", 200}, {"out", 66}, {"bias", 1}}, Placement::pitched, "mvue");
  op.honours_f32_math = true;
  op.tolerance_factor_f32 = 8;
  op.tolerance_reason = "the GEMMs are those of multiply24 and linear";
  for (const auto& [in, out] : {std::pair<int64_t, int64_t>{2048, 8192}, {4096, 16384}})
    op.benches.push_back({.dims = sized(16384, in, out), .gradcheck = false});
  op.benches.push_back(
      {.dims = sized(16384, 4096, 16384), .attrs = {{"gradient", std::string("mvue")}}, .gradcheck = false});
  return op;
}

OpSpec decay_spec() {
  OpSpec op{.name = "masked_decay24",
            .summary = "half the sum of the squares of what a transposable mask prunes",
            .inputs = {{"weight", "[out, in]"}, mask_input()},
            .outputs = {{.name = "decay", .shape = "[]", .dtypes = sum_dtypes()}}};
  op.run = [](const std::vector<Tensor>& in, const Attrs&) {
    return std::vector{masked_decay24(in[0], in[1])};
  };
  op.derive = [](const std::vector<Tensor>& in, const Attrs&) { return std::vector{transposable24(in[0])}; };
  op.problem = [](const Dims& d, const Attrs&) {
    const double n = double(d.at("out")) * double(d.at("in"));
    return Problem{.inputs = {{.shape = {d.at("out"), d.at("in")}}, {.shape = mask_shape(d)}},
                   .forward_flops = 2 * n,
                   .backward_flops = n,
                   .forward_elements = n,
                   .backward_elements = n,
                   .forward_bytes = n / 8,
                   .backward_bytes = n / 8 + 4 * n};
  };
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{5, 7}, {8, 12}, {1, 1}, {0, 5}, {6, 0}})
    op.cases.push_back({.dims = weight24_dims(rows, columns)});
  op.cases.push_back({.dims = weight24_dims(9, 34), .placement = Placement::strided});
  op.cases.push_back({.dims = weight24_dims(130, 200), .gradcheck = false});
  op.tolerance_factor_f32 = 8;
  op.tolerance_reason = "one long sum, in another order";
  op.benches.push_back({.dims = weight24_dims(8192, 2048), .gradcheck = false});
  return op;
}

}  // namespace

std::vector<OpSpec> weight24_specs() {
  return {mask_spec(), masked_linear_spec(), decay_spec()};
}

}  // namespace tessera::ops

#include <algorithm>

#include "ops/mlp/mlp_sparse24.h"
#include "ops/op.h"

namespace tessera::ops {
namespace {

MlpSparse24 settings_of(const Attrs& attrs, const Rng& rng) {
  MlpSparse24 how{.activation = parse_activation(attrs.word("activation")),
                  .y = parse_gemm24(attrs.word("y")),
                  .dx = parse_gemm24(attrs.word("dx")),
                  .dup = parse_gemm24(attrs.word("dup")),
                  .ddown = parse_gemm24(attrs.word("ddown")),
                  .dense_share = attrs.number("dense_share"),
                  .method = parse_method24(attrs.word("method")),
                  .token_method = parse_method24(attrs.word("token_method")),
                  .masks_gradient = attrs.flag("masks_gradient"),
                  .required = attrs.flag("required")};
  how.rng = rng;
  return how;
}

Dims mlp_sparse24_sizes(int64_t rows, int64_t in, int64_t wide, int64_t out, int64_t bias) {
  return {{"T", rows}, {"D", in}, {"F", wide}, {"E", out}, {"bias", bias}};
}

Attrs forms(const char* y, const char* dx, const char* dup, const char* ddown) {
  return {{"y", std::string(y)},
          {"dx", std::string(dx)},
          {"dup", std::string(dup)},
          {"ddown", std::string(ddown)}};
}

Problem mlp_sparse24_problem(const Dims& d, const Attrs& attrs) {
  const int64_t rows = d.at("T"), wide = d.at("F"), in = d.at("D"), out = d.at("E");
  const Fill bias = d.at("bias") ? Fill::normal : Fill::absent;
  const double t = double(rows), f = double(wide), io = double(in + out);
  // FLOPs are those of the dense layer, as a share of which a sparse one is judged.
  return Problem{.inputs = {{.shape = {rows, in}},
                            {.shape = {wide, in}, .scale = 0.5},
                            {.shape = {out, wide}, .scale = 0.5},
                            {.shape = {wide}, .fill = bias},
                            {.shape = {out}, .fill = bias},
                            {.shape = {rows, out}, .fill = bias},
                            {.shape = {wide},
                             .fill = is_set(d, "counts") ? Fill::index : Fill::absent,
                             .high = std::max<int64_t>(1, rows)}},
                 .forward_flops = 2 * t * f * io,
                 .backward_flops = 4 * t * f * io,
                 .forward_elements = t * io + f * io + t * f,
                 .backward_elements = 2 * t * io + 2 * f * io + 2 * t * f,
                 .forward_bytes = 4 * f + (attrs.word("y") == "dense" ? 0 : t * f / 8)};
}

/// The same with the mean magnitude as a result: a declaration of its own, since it costs a pass over the
/// activations in each direction.
OpSpec with_l1(OpSpec spec) {
  spec.name = "mlp_sparse24_l1";
  spec.variants = {}, spec.variant_dtypes = {};  // they bear the name of mlp_sparse24
  spec.summary += ", with l1, the mean of |S(a)|";
  spec.outputs.push_back({.name = "l1", .shape = "[]", .dtypes = sum_dtypes()});
  spec.run = [](const std::vector<Tensor>& in, const Attrs& attrs) {
    SeededRng seeded(attrs.integer("seed"), 4);
    MlpSparse24 how = settings_of(attrs, seeded.rng());
    how.previous = in[6];
    how.l1 = true;
    const MlpSparse24Result result = mlp_sparse24(in[0], in[1], in[2], how, in[3], in[4], in[5]);
    if (!attrs.flag("counts")) result.counts.fill(0);
    return std::vector{result.y, result.counts, result.l1};
  };
  return spec;
}

void add_cases(OpSpec& spec) {
  // Where weight gradients keep every token, all gradients are those of the masked function, to first order.
  for (const char* const form : {"dense", "sparse", "split"})
    for (const char* const kind : {"relu", "relu_squared"}) {
      Attrs attrs = forms(form, form, "dense", "dense");
      attrs.set("activation", std::string(kind));
      attrs.set("dense_share", 0.25);
      spec.cases.push_back({.dims = mlp_sparse24_sizes(6, 4, 9, 3, 1), .attrs = attrs});
      spec.cases.back().dims["counts"] = 1;
    }
  for (const char* const method : {"naive", "mvue", "fast"}) {
    Attrs attrs = forms("sparse", "sparse", "sparse", "sparse");
    attrs.set("method", std::string(method)), attrs.set("token_method", std::string(method));
    spec.cases.push_back({.dims = mlp_sparse24_sizes(21, 8, 33, 8, 0), .attrs = attrs, .gradcheck = false});
  }
  const Attrs all = {{"dense_share", 0.1}};
  const std::vector<Case> more = {
      {.dims = mlp_sparse24_sizes(0, 3, 8, 2, 0), .attrs = all, .gradcheck = false},
      {.dims = mlp_sparse24_sizes(3, 2, 0, 4, 0), .attrs = all, .gradcheck = false},
      {.dims = mlp_sparse24_sizes(1, 1, 1, 1, 1), .attrs = all, .gradcheck = false},
      {.dims = mlp_sparse24_sizes(131, 72, 200, 64, 1), .attrs = all, .gradcheck = false},
      {.dims = mlp_sparse24_sizes(64, 33, 130, 65, 0),
       .attrs = all,
       .placement = Placement::strided,
       .gradcheck = false},
      {.dims = mlp_sparse24_sizes(40, 16, 72, 24, 1),
       .attrs = forms("split", "sparse", "dense", "split"),
       .gradcheck = false},
      {.dims = mlp_sparse24_sizes(40, 16, 72, 24, 1),
       .attrs = forms("dense", "split", "sparse", "split"),
       .gradcheck = false},
      {.dims = mlp_sparse24_sizes(256, 128, 512, 128, 0), .attrs = all, .gradcheck = false}};
  for (Case one : more) {
    spec.cases.push_back(one);
    one.dims["counts"] = 1;
    if (one.dims["F"] > 1) spec.cases.push_back(one);
  }
}

}  // namespace

std::vector<OpSpec> mlp_sparse24_specs() {
  OpSpec spec;
  spec.name = "mlp_sparse24";
  spec.summary = "y = S(f(x up^T + up_bias)) down^T + down_bias + residual, S keeping two of four (2:4)";
  spec.inputs = {{"x", "[..., D]"},
                 {"up", "[F, D]"},
                 {"down", "[E, F]"},
                 {"up_bias", "[F]", true},
                 {"down_bias", "[E]", true},
                 {"residual", "[..., E]", true},
                 {"previous", "[F]", true, false, {DType::i32}}};
  const std::vector<std::string> gemm = {"dense", "sparse", "split"};
  spec.attrs = {{"activation", std::string("relu_squared"), "f", {"relu", "relu_squared"}},
                {"y", std::string("split"), "GEMM of the second layer", gemm},
                {"dx", std::string("split"), "GEMM of the input's gradient", gemm},
                {"dup", std::string("split"), "GEMM of the first weight's gradient", gemm},
                {"ddown", std::string("split"), "GEMM of the second weight's gradient", gemm},
                {"dense_share", 0.05, "share of the columns, the densest by `previous`, of split GEMMs"},
                {"method", std::string("naive"), "what is kept of four features", {"naive", "mvue", "fast"}},
                {"token_method",
                 std::string("naive"),
                 "what weight gradients keep of four tokens",
                 {"naive", "mvue", "fast"}},
                {"masks_gradient", true, "the hidden gradient is restricted to what forward kept"},
                {"required", false, "an error where sparse tensor cores cannot run a sparse GEMM"},
                {"counts", true, "off: zeros in place of the counts"},
                {"seed", int64_t{0}, "of mvue"}};
  spec.seed = "seed";
  spec.outputs = {{"y", "[..., E]"}, {"counts", "[F]", false, {DType::i32}, true}};
  spec.variants = {"fused", "composed"};
  spec.variant_dtypes = {{DType::bf16, DType::f16}, {}};
  spec.cpu_dtypes = {DType::f64, DType::f32};
  spec.tolerance_factor = 4;
  spec.tolerance_factor_f32 = 8;
  spec.tolerance_reason =
      "which of two nearly equal elements is kept depends on their rounding, which no two summation orders "
      "share";
  spec.run = [](const std::vector<Tensor>& in, const Attrs& attrs) {
    SeededRng seeded(attrs.integer("seed"), 4);
    MlpSparse24 how = settings_of(attrs, seeded.rng());
    how.previous = in[6];
    const MlpSparse24Result result = mlp_sparse24(in[0], in[1], in[2], how, in[3], in[4], in[5]);
    // As of linear_activation: near 0 the sign of a sum is a matter of its order.
    if (!attrs.flag("counts")) result.counts.fill(0);
    return std::vector{result.y, result.counts};
  };
  spec.problem = mlp_sparse24_problem;
  add_cases(spec);
  for (Case& one : spec.cases) one.attrs.set("counts", false);
  for (const auto& [tokens, in, wide] : {std::tuple{16384, 4096, 16384}, {16384, 2048, 8192}})
    spec.benches.push_back({.dims = mlp_sparse24_sizes(tokens, in, wide, in, 0)});
  OpSpec l1 = with_l1(spec);
  return {std::move(spec), std::move(l1)};
}

}  // namespace tessera::ops

#include "ops/op.h"
#include "ops/sparse24/sparse24_kernels.h"
#include "ops/sparse24/sparse24_linear.h"

namespace tessera::ops {
namespace {

AttrSpec along_attr() {
  return {
      "along", std::string("features"), "side of x along which four form a group", {"features", "tokens"}};
}
AttrSpec method_attr() {
  return {"method",
          std::string("naive"),
          "how two of four are chosen",
          {"naive", "mvue", "soft_threshold", "soft_dynamic", "fast"}};
}
AttrSpec seed_attr() {
  return {"seed", int64_t{0}, "random seed of mvue"};
}

Along24 along_of(const Attrs& attrs) {
  return parse_along24(attrs.word("along"));
}
/// Of a call on `device`, with the scale that soft methods take.
Selection24 selection_of(const Attrs& attrs, const Tensor& scale, Device device) {
  Selection24 selection{.method = parse_method24(attrs.word("method"))};
  if (selection.method == Method24::mvue) {
    SeededRng seeded(attrs.integer("seed"));
    selection = Selection24::mvue(seeded.rng(), device);
  }
  const bool is_soft =
      selection.method == Method24::soft_threshold || selection.method == Method24::soft_dynamic;
  check(is_soft || !scale.defined(), "compress24: scale is given, and method is ", attrs.word("method"),
        ", which has no use for it; leave it out");
  if (is_soft) selection.scale = scale;
  return selection;
}

/// The matrix of x's shape with those tensors.
Sparse24 given_matrix(const char* op, const Tensor& x, Along24 along, const Tensor& values,
                      const Tensor& metadata) {
  check(x.rank() == 2, op, ": x is ", describe(x), "; expected a matrix [tokens, features]");
  Sparse24 made;
  made.along = along, made.tokens = x.size(0), made.features = x.size(1);
  made.values = values.packed(), made.metadata = metadata.packed();
  return made;
}

std::vector<std::pair<int64_t, int64_t>> matrix_sizes() {
  return {{1, 1}, {5, 7}, {64, 64}, {63, 65}, {130, 4}, {3, 257}, {0, 5}, {6, 0}, {67, 131}, {128, 192}};
}
Dims matrix_dims(int64_t tokens, int64_t features) {
  return {{"T", tokens}, {"F", features}};
}
/// The shapes of activations in feed-forward layers of LLaMA-1B and 7B.
std::vector<std::pair<int64_t, int64_t>> bench_sizes() {
  return {{16384, 8192}, {16384, 16384}, {8192, 4096}};
}
Case draw_matrix(Draw& draw) {
  return {.dims = matrix_dims(draw.size(1, 20000), draw.size(1, 20000)), .gradcheck = false};
}

constexpr const char* kValuesShape = "[m tiles, k tiles, 2048]";
constexpr const char* kMetadataShape = "[m tiles, k tiles, 128]";

// ---- compress24, compress24_both, compress24_like ----

Problem compress_problem(const Dims& d, const Attrs& attrs, int results) {
  const double n = double(d.at("T")) * double(d.at("F"));
  const std::string& method = attrs.word("method");
  const bool soft = method == "soft_threshold" || method == "soft_dynamic";
  return {.inputs = {{.shape = {d.at("T"), d.at("F")}},
                     {.shape = {1}, .fill = soft ? Fill::positive : Fill::absent}},
          .forward_elements = n + results * n / 2,
          .forward_bytes = results * n / 8};
}

std::vector<Case> compress_cases(bool both) {
  std::vector<Case> cases;
  for (const char* const along : {"features", "tokens"}) {
    if (both && std::string(along) == "tokens") break;
    const auto add = [&](int64_t tokens, int64_t features, const char* method,
                         Placement placement = Placement::pitched) {
      Attrs attrs{{"method", std::string(method)}, {"seed", tokens}};
      if (!both) attrs.set("along", std::string(along));
      cases.push_back({.dims = matrix_dims(tokens, features),
                       .attrs = attrs,
                       .placement = placement,
                       .gradcheck = false});
    };
    for (const char* const method : {"naive", "mvue", "soft_threshold", "soft_dynamic", "fast"}) {
      // What the other methods keep is rounded, so that the second choice depends on the dtype.
      if (both && std::string(method) != "naive" && std::string(method) != "fast") continue;
      add(67, 131, method);
      add(128, 192, method);
    }
    if (both) add(1, 131, "mvue");  // of one token the second choice is among zeros, whatever the rounding
    for (const auto& [tokens, features] : matrix_sizes()) add(tokens, features, "naive");
    add(70, 90, "naive", Placement::strided);
    add(70, 90, both ? "fast" : "mvue", Placement::transposed);
  }
  return cases;
}

std::vector<Case> compress_benches(bool both) {
  std::vector<Case> benches;
  for (const auto& [tokens, features] : bench_sizes())
    for (const char* const along : {"features", "tokens"}) {
      if (both && std::string(along) == "tokens") break;
      Case one{.dims = matrix_dims(tokens, features), .gradcheck = false};
      if (!both) one.attrs.set("along", std::string(along));
      benches.push_back(one);
    }
  return benches;
}

InputSpec scale_input() {
  return {.name = "scale", .shape = "[1]", .optional = true, .differentiable = false, .dtypes = {DType::f32}};
}

OpSpec compress_spec(bool both) {
  OpSpec op{.name = both ? "compress24_both" : "compress24",
            .summary = both ? "x in 2:4 by features, and what that keeps by tokens"
                            : "x in 2:4: values and metadata in the order of wgmma.sp",
            .inputs = {{.name = "x", .shape = "[tokens, features]", .differentiable = false}, scale_input()},
            .attrs = {method_attr(), seed_attr()},
            .outputs = {{"values", kValuesShape, false}, {"metadata", kMetadataShape, false, {DType::i32}}},
            .seed = "seed",
            .cases = compress_cases(both),
            .benches = compress_benches(both),
            .sweep = draw_matrix,
            .variants = compress24_variants(),
            .variant_dtypes = {{DType::bf16, DType::f16}, {}}};
  op.problem = [both](const Dims& d, const Attrs& attrs) { return compress_problem(d, attrs, both ? 2 : 1); };
  if (both) {
    op.outputs = {{"values", kValuesShape, false},
                  {"metadata", kMetadataShape, false, {DType::i32}},
                  {"values_by_tokens", kValuesShape, false},
                  {"metadata_by_tokens", kMetadataShape, false, {DType::i32}}};
    op.run = [](const std::vector<Tensor>& in, const Attrs& attrs) {
      const BothWays24 y = compress24_both(in[0], selection_of(attrs, in[1], in[0].device()));
      return std::vector{y.by_features.values, y.by_features.metadata, y.by_tokens.values,
                         y.by_tokens.metadata};
    };
  } else {
    op.attrs.insert(op.attrs.begin(), along_attr());
    op.run = [](const std::vector<Tensor>& in, const Attrs& attrs) {
      const Sparse24 y = compress24(in[0], along_of(attrs), selection_of(attrs, in[1], in[0].device()));
      return std::vector{y.values, y.metadata};
    };
  }
  return op;
}

OpSpec compress_like_spec() {
  OpSpec op{.name = "compress24_like",
            .summary = "the elements of x at the places that the 2:4 pattern keeps",
            .inputs = {{.name = "x", .shape = "[tokens, features]", .differentiable = false},
                       {.name = "pattern", .shape = "[tokens, features]", .differentiable = false}},
            .attrs = {along_attr()},
            .outputs = {{"values", kValuesShape, false}},
            .variants = compress24_variants(),
            .variant_dtypes = {{DType::bf16, DType::f16}, {}}};
  op.run = [](const std::vector<Tensor>& in, const Attrs& attrs) {
    return std::vector{compress24_like(in[0], compress24(in[1], along_of(attrs))).values};
  };
  op.problem = [](const Dims& d, const Attrs&) {
    const Shape shape{d.at("T"), d.at("F")};
    const double n = double(shape.count());
    return Problem{
        .inputs = {{.shape = shape}, {.shape = shape}}, .forward_elements = 3 * n, .forward_bytes = n / 8};
  };
  for (const char* const along : {"features", "tokens"})
    for (const auto& [tokens, features] : matrix_sizes())
      op.cases.push_back({.dims = matrix_dims(tokens, features),
                          .attrs = {{"along", std::string(along)}},
                          .placement = tokens == 67 ? Placement::strided : Placement::pitched,
                          .gradcheck = false});
  op.sweep = draw_matrix;
  return op;
}

// ---- decompress24 ----

OpSpec decompress_spec() {
  OpSpec op{.name = "decompress24",
            .summary = "a 2:4 matrix with its zeros",
            .inputs = {{.name = "x",
                        .shape = "[tokens, features]: only its shape is used",
                        .differentiable = false},
                       {.name = "values", .shape = kValuesShape, .differentiable = false, .from = {"x"}},
                       {.name = "metadata",
                        .shape = kMetadataShape,
                        .differentiable = false,
                        .dtypes = {DType::i32},
                        .from = {"x"}}},
            .attrs = {along_attr()},
            .outputs = {{"y", "[tokens, features]", false}}};
  op.run = [](const std::vector<Tensor>& in, const Attrs& attrs) {
    return std::vector{decompress24(given_matrix("decompress24", in[0], along_of(attrs), in[1], in[2]))};
  };
  op.derive = [](const std::vector<Tensor>& in, const Attrs& attrs) {
    const Sparse24 x = compress24(in[0], along_of(attrs));
    return std::vector{x.values, x.metadata};
  };
  op.problem = [](const Dims& d, const Attrs&) {
    const double n = double(d.at("T")) * double(d.at("F"));
    return Problem{.inputs = {{.shape = {d.at("T"), d.at("F")}}, {}, {}},
                   .forward_elements = n + n / 2,
                   .forward_bytes = n / 8};
  };
  for (const char* const along : {"features", "tokens"}) {
    for (const auto& [tokens, features] : matrix_sizes())
      op.cases.push_back({.dims = matrix_dims(tokens, features),
                          .attrs = {{"along", std::string(along)}},
                          .gradcheck = false});
    op.benches.push_back(
        {.dims = matrix_dims(16384, 8192), .attrs = {{"along", std::string(along)}}, .gradcheck = false});
  }
  op.sweep = draw_matrix;
  return op;
}

// ---- soft_scale ----

OpSpec soft_scale_spec() {
  OpSpec op{.name = "soft_scale",
            .summary = "the scale that makes soft-thresholded 2:4 the nearest to x: sum x s / sum s^2",
            .inputs = {{.name = "x", .shape = "[tokens, features]", .differentiable = false}},
            .attrs = {along_attr(),
                      {"samples", int64_t{0}, "tokens to look at, at equal distances; 0: all"},
                      {"clamped", false, "to [0.5, 2]"}},
            .outputs = {{"scale", "[1]", false, {DType::f32}}}};
  op.run = [](const std::vector<Tensor>& in, const Attrs& attrs) {
    return std::vector{soft_scale(in[0], along_of(attrs), attrs.integer("samples"), attrs.flag("clamped"))};
  };
  op.problem = [](const Dims& d, const Attrs&) {
    return Problem{.inputs = {{.shape = {d.at("T"), d.at("F")}}},
                   .forward_elements = double(d.at("T")) * double(d.at("F")),
                   .forward_bytes = 4};
  };
  for (const char* const along : {"features", "tokens"})
    for (const auto& [tokens, features] : matrix_sizes())
      for (const int64_t samples : {0, 17})
        op.cases.push_back(
            {.dims = matrix_dims(tokens, features),
             .attrs = {{"along", std::string(along)}, {"samples", samples}, {"clamped", samples != 0}},
             .placement = tokens == 67 ? Placement::strided : Placement::pitched,
             .gradcheck = false});
  return op;
}

// ---- multiply24 ----

struct MultiplyInput {
  enum : size_t { kX, kB, kBias, kResidual, kValues, kMetadata };
};

/// T, F of x; n; 1 if there are a bias along n ("bias"), one along m ("bias_m"), a residual.
Problem multiply_problem(const Dims& d, const Attrs& attrs) {
  const bool features = attrs.word("along") == "features";
  const int64_t tokens = d.at("T"), width = d.at("F"), n = d.at("n");
  const int64_t m = features ? tokens : width, k = features ? width : tokens;
  const double a = double(m) * double(k), out = double(m) * double(n);
  const auto given = [&](bool present, const Shape& shape) {
    return InputCase{.shape = shape, .fill = present ? Fill::normal : Fill::absent};
  };
  const bool along_m = is_set(d, "bias_m");
  return {.inputs = {{.shape = {tokens, width}},
                     {.shape = attrs.flag("b_transposed") ? Shape{n, k} : Shape{k, n}},
                     given(along_m || is_set(d, "bias"), along_m ? Shape{m, 1} : Shape{n}),
                     given(is_set(d, "residual"), {m, n}),
                     {},
                     {}},
          .forward_flops = 2 * a * double(n),
          .forward_elements = a / 2 + double(k) * double(n) + out,
          .forward_bytes = a / 8};
}

std::vector<Tensor> run_multiply(const std::vector<Tensor>& in, const Attrs& attrs) {
  const Sparse24 a = given_matrix("multiply24", in[MultiplyInput::kX], along_of(attrs),
                                  in[MultiplyInput::kValues], in[MultiplyInput::kMetadata]);
  check(in[MultiplyInput::kB].rank() == 2, "multiply24: b is ", describe(in[MultiplyInput::kB]),
        "; expected a matrix [k, n], or [n, k]");
  const Tensor b = attrs.flag("b_transposed") ? in[MultiplyInput::kB].transpose(0, 1) : in[MultiplyInput::kB];
  const int64_t m = a.m(), n = b.size(1);
  const bool turned = attrs.flag("d_transposed"), adds = attrs.flag("accumulate");
  const Tensor memory = Tensor::empty(turned ? Shape{n, m} : Shape{m, n}, a.dtype(), a.device());
  const Tensor d = turned ? memory.transpose(0, 1) : memory;
  if (adds) {
    check(in[MultiplyInput::kResidual].defined(),
          "multiply24: accumulate=true adds to the residual, which is missing");
    d.copy_from(in[MultiplyInput::kResidual]);
  }
  multiply24(d, a, b,
             {.alpha = attrs.number("alpha"),
              .accumulate = adds,
              .bias = in[MultiplyInput::kBias],
              .residual = adds ? Tensor() : in[MultiplyInput::kResidual]});
  return {d};
}

std::vector<Case> multiply_cases() {
  std::vector<Case> cases;
  struct Size {
    int64_t tokens, features, n;
  };
  const Size sizes[] = {{1, 1, 1},       {5, 7, 3},       {64, 64, 64},   {65, 66, 67},    {128, 256, 256},
                        {257, 130, 129}, {0, 5, 3},       {5, 0, 3},      {5, 3, 0},       {300, 520, 136},
                        {136, 515, 264}, {264, 1032, 24}, {8, 4100, 520}, {520, 192, 1000}};
  const auto add = [&](const Size& size, bool tokens, bool b_transposed, bool d_transposed,
                       std::initializer_list<const char*> with, bool accumulate = false, double alpha = 1,
                       Placement placement = Placement::pitched) {
    Dims dims{{"T", size.tokens}, {"F", size.features}, {"n", size.n}};
    for (const char* const name : with) dims[name] = 1;
    cases.push_back({.dims = dims,
                     .attrs = {{"along", std::string(tokens ? "tokens" : "features")},
                               {"b_transposed", b_transposed},
                               {"d_transposed", d_transposed},
                               {"accumulate", accumulate},
                               {"alpha", alpha}},
                     .placement = placement,
                     .gradcheck = false});
  };
  for (const Size& size : sizes)
    for (const bool tokens : {false, true}) add(size, tokens, !tokens, false, {});
  for (const Size& size : {sizes[5], sizes[9], sizes[13]})
    for (const bool b_transposed : {false, true})
      for (const bool d_transposed : {false, true}) {
        add(size, false, b_transposed, d_transposed, {"bias", "residual"});
        add(size, true, b_transposed, d_transposed, {"residual"}, true, 0.5);
        add(size, false, b_transposed, d_transposed, {"bias_m", "residual"});
      }
  add(sizes[5], false, true, false, {"bias"}, false, 1, Placement::strided);
  add(sizes[5], true, true, true, {"residual"}, false, 1, Placement::transposed);
  return cases;
}

/// The GEMMs of the feed-forward layers that 2:4 is measured on: y = x W^T with x [T, F] sparse and W [n, F].
std::vector<Case> multiply_benches() {
  std::vector<Case> benches;
  for (const auto& [tokens, features, n] : {std::tuple<int64_t, int64_t, int64_t>{4096, 4096, 8192},
                                            {14336, 4096, 8192},
                                            {16384, 4096, 16384},
                                            {8192, 8192, 8192},
                                            {4096, 16384, 16384},
                                            {8192, 2048, 16384},
                                            {2048, 8192, 16384}})
    benches.push_back({.dims = {{"T", tokens}, {"F", features}, {"n", n}},
                       .attrs = {{"b_transposed", true}},
                       .gradcheck = false});
  return benches;
}

OpSpec multiply_spec() {
  OpSpec op{.name = "multiply24",
            .summary = "d = alpha A b + bias + residual, A the 2:4 matrix of x",
            .inputs = {{.name = "x",
                        .shape = "[tokens, features]: only its shape is used",
                        .differentiable = false},
                       {.name = "b", .shape = "[k, n], or [n, k]", .differentiable = false},
                       {.name = "bias", .shape = "[n] or [m, 1]", .optional = true, .differentiable = false},
                       {.name = "residual", .shape = "[m, n]", .optional = true, .differentiable = false},
                       {.name = "values", .shape = kValuesShape, .differentiable = false, .from = {"x"}},
                       {.name = "metadata",
                        .shape = kMetadataShape,
                        .differentiable = false,
                        .dtypes = {DType::i32},
                        .from = {"x"}}},
            .attrs = {along_attr(),
                      {"b_transposed", false, "whether b is given as [n, k]"},
                      {"d_transposed", false, "whether d is written with m along its rows"},
                      {"accumulate", false, "whether d starts as the residual and is added to"},
                      {"alpha", 1.0, "factor of the product"}},
            .outputs = {{"d", "[m, n]", false}},
            .run = run_multiply};
  op.derive = [](const std::vector<Tensor>& in, const Attrs& attrs) {
    const Sparse24 a = compress24(in[MultiplyInput::kX], along_of(attrs));
    return std::vector{a.values, a.metadata};
  };
  op.problem = multiply_problem;
  op.cases = multiply_cases();
  op.benches = multiply_benches();
  op.variants = multiply24_variants();
  op.variant_dtypes = {{DType::bf16, DType::f16}, {}, {}, {}, {}};
  op.honours_f32_math = true;
  op.tolerance_factor_f32 = 8;
  op.tolerance_reason =
      "cuBLASLt adds the products of one output in a single f32 chain; the CPU adds in blocks, whose error "
      "grows with the square root of a block; a residual is added to the rounded sum where it does not lie "
      "as d";
  op.sweep = [](Draw& draw) {
    return Case{.dims = {{"T", draw.size(1, 20000)}, {"F", draw.size(1, 20000)}, {"n", draw.size(1, 20000)}},
                .attrs = {{"along", std::string(draw.chance(0.5) ? "features" : "tokens")},
                          {"b_transposed", draw.chance(0.5)},
                          {"d_transposed", draw.chance(0.3)}},
                .gradcheck = false};
  };
  return op;
}

// ---- sparse24_linear ----

OpSpec linear_spec() {
  OpSpec op{.name = "sparse24_linear",
            .summary = "y = S(x) weight^T + bias + residual, S keeps two of four features",
            .inputs = {{"x", "[..., in]"},
                       {"weight", "[out, in]"},
                       {"bias", "[out]", true},
                       {"residual", "[..., out]", true}},
            .attrs = {method_attr(), seed_attr()},
            .outputs = {{"y", "[..., out]"}}};
  op.run = [](const std::vector<Tensor>& in, const Attrs& attrs) {
    const std::string& method = attrs.word("method");
    const bool soft = method == "soft_threshold" || method == "soft_dynamic";
    const Tensor scale = soft ? soft_scale(in[1], Along24::features, 0, method == "soft_dynamic") : Tensor();
    return std::vector{
        sparse24_linear(in[0], in[1], in[2], in[3], selection_of(attrs, scale, in[0].device()))};
  };
  op.seed = "seed";
  op.problem = [](const Dims& d, const Attrs&) {
    const int64_t rows = d.at("T"), in = d.at("in"), out = d.at("out");
    const bool batch = d.contains("B");
    const auto of_rows = [&](int64_t width) {
      return batch ? Shape{d.at("B"), rows, width} : Shape{rows, width};
    };
    const auto given = [&](const char* name, const Shape& shape) {
      return InputCase{.shape = shape, .fill = d.contains(name) ? Fill::normal : Fill::absent};
    };
    const double t = double(of_rows(1).count()), i = double(in), o = double(out);
    return Problem{.inputs = {{.shape = of_rows(in)},
                              {.shape = {out, in}},
                              given("bias", {out}),
                              given("residual", of_rows(out))},
                   .forward_flops = 2 * t * i * o,
                   .backward_flops = 4 * t * i * o,
                   .forward_elements = t * i + i * o + t * o,
                   .backward_elements = 2 * (t * i + i * o) + t * o};
  };
  const auto add = [&](const Dims& dims, const char* method = "naive", bool check = true,
                       Placement placement = Placement::pitched) {
    op.cases.push_back({.dims = dims,
                        .attrs = {{"method", std::string(method)}, {"seed", int64_t{3}}},
                        .placement = placement,
                        .gradcheck = check});
  };
  const auto sized = [](int64_t rows, int64_t in, int64_t out) {
    return Dims{{"T", rows}, {"in", in}, {"out", out}};
  };
  for (const char* const method : {"naive", "fast"}) {
    add(sized(7, 9, 5), method);
    add({{"B", 2}, {"T", 3}, {"in", 8}, {"out", 4}, {"bias", 1}, {"residual", 1}}, method);
  }
  add({{"T", 6}, {"in", 5}, {"out", 7}, {"bias", 1}}, "naive", true, Placement::transposed);
  add({{"B", 2}, {"T", 3}, {"in", 5}, {"out", 4}, {"residual", 1}}, "naive", true, Placement::strided);
  for (const auto& [rows, in, out] :
       {std::tuple<int64_t, int64_t, int64_t>{0, 3, 2}, {4, 0, 3}, {4, 3, 0}, {1, 1, 1}}) {
    Dims dims = sized(rows, in, out);
    dims["bias"] = 1;
    add(dims);
  }
  add(sized(17, 36, 9), "mvue", false);
  for (const char* const method : {"naive", "mvue", "soft_threshold", "soft_dynamic"})
    add({{"T", 129}, {"in", 200}, {"out", 66}, {"bias", 1}, {"residual", 1}}, method, false);
  op.honours_f32_math = true;
  op.tolerance_factor_f32 = 8;
  op.cpu_extra_ulp = 2;
  op.cpu_extra_reason = "what mvue and the soft methods keep is rounded before it is multiplied";
  op.tolerance_reason = "the GEMMs are those of multiply24 and linear";
  for (const auto& [in, out] : {std::pair<int64_t, int64_t>{8192, 2048}, {16384, 4096}})
    op.benches.push_back({.dims = sized(16384, in, out), .gradcheck = false});
  return op;
}

}  // namespace

std::vector<OpSpec> sparse24_specs() {
  return {compress_spec(false), compress_spec(true), compress_like_spec(), decompress_spec(),
          soft_scale_spec(),    multiply_spec(),     linear_spec()};
}

}  // namespace tessera::ops

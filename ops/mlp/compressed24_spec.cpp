#include <algorithm>

#include "ops/mlp/hidden_gradient24_kernels.h"
#include "ops/mlp/linear_activation24_kernels.h"
#include "ops/op.h"
#include "runtime/philox.h"

/// The parts of mlp_sparse24 that make 2:4 matrices: hidden_gradient24 and linear_activation24.

namespace tessera::ops {
namespace {

constexpr const char* kValuesShape = "[m tiles, k tiles, 2048]";
constexpr const char* kMetadataShape = "[m tiles, k tiles, 128]";

AttrSpec activation_attr() {
  return {"activation", std::string("relu_squared"), "f", {"relu", "relu_squared"}};
}

// ---- hidden_gradient24 ----

OpSpec hidden_gradient24_spec() {
  OpSpec op{.name = "hidden_gradient24",
            .summary = "dh = da f'(S(a)) in 2:4 along features and along tokens, and S(a) along tokens",
            .inputs = {{.name = "da", .shape = "[T, F]", .differentiable = false},
                       {.name = "a",
                        .shape = "[T, F], not negative: what the next two are made from",
                        .differentiable = false},
                       {.name = "values", .shape = kValuesShape, .differentiable = false, .from = {"a"}},
                       {.name = "metadata",
                        .shape = kMetadataShape,
                        .differentiable = false,
                        .dtypes = {DType::i32},
                        .from = {"a"}}},
            .attrs = {activation_attr()},
            .outputs = {{"dh", kValuesShape, false},
                        {"act_by_tokens", kValuesShape, false},
                        {"metadata_by_tokens", kMetadataShape, false, {DType::i32}},
                        {"dh_by_tokens", kValuesShape, false}},
            .variants = hidden_gradient24_variants(),
            .variant_dtypes = {{DType::bf16, DType::f16}, {}}};
  op.run = [](const std::vector<Tensor>& in, const Attrs& attrs) {
    const Sparse24 kept{.along = Along24::features,
                        .tokens = in[1].size(0),
                        .features = in[1].size(1),
                        .values = in[2].packed(),
                        .metadata = in[3].packed(),
                        .scales = {}};
    const HiddenGradient24 made = hidden_gradient24(in[0], kept, parse_activation(attrs.word("activation")));
    return std::vector{made.dh.values, made.act_by_tokens.values, made.act_by_tokens.metadata,
                       made.dh_by_tokens.values};
  };
  op.derive = [](const std::vector<Tensor>& in, const Attrs&) {
    const Sparse24 kept = compress24(in[1], Along24::features);
    return std::vector{kept.values, kept.metadata};
  };
  op.problem = [](const Dims& d, const Attrs&) {
    const Shape shape{d.at("T"), d.at("F")};
    const double n = double(shape.count());
    return Problem{
        .inputs = {{.shape = shape}, {.shape = shape, .fill = Fill::positive, .density = 0.3}, {}, {}},
        .forward_elements = 3 * n,  // da; S(a), dh, S(a)^T and dh^T are half of that each
        .forward_bytes = n / 4};
  };
  const auto dims = [](int64_t tokens, int64_t features) { return Dims{{"T", tokens}, {"F", features}}; };
  for (const char* const kind : {"relu", "relu_squared"})
    for (const auto& [tokens, features] : {std::pair{1, 1},
                                           {5, 7},
                                           {64, 64},
                                           {63, 65},
                                           {130, 4},
                                           {3, 257},
                                           {0, 5},
                                           {6, 0},
                                           {67, 131},
                                           {200, 328}})
      op.cases.push_back({.dims = dims(tokens, features),
                          .attrs = {{"activation", std::string(kind)}},
                          .placement = tokens == 67 ? Placement::strided : Placement::pitched,
                          .gradcheck = false});
  for (const int64_t features : {16384, 8192}) op.benches.push_back({.dims = dims(16384, features)});
  op.sweep = [dims](Draw& draw) {
    return Case{.dims = dims(draw.size(1, 20000), draw.size(1, 20000)), .gradcheck = false};
  };
  return op;
}

// ---- linear_activation24 ----

/// Every `every`-th column is dense; 0: none.
std::vector<int64_t> dense_columns(int64_t hidden, int64_t every) {
  if (every > 0) check_listed("linear_activation24", double(hidden) / double(every));
  std::vector<int64_t> columns;
  for (int64_t i = every / 2; every > 0 && i < hidden; i += every) columns.push_back(i);
  return columns;
}

/// -1, 0 and 1, two thirds of them 0: sums of some hundred products are integers below 16 whose squares every
/// dtype has, so that what is kept, of ties too, and every count are the same in all of them.
std::vector<int64_t> small_integers(const Shape& shape, uint64_t seed) {
  check_listed("linear_activation24", double(shape.count()));
  std::vector<int64_t> values;
  for (int64_t i = 0; i < shape.count(); ++i) {
    const uint32_t word = philox(seed, 0, uint64_t(i)).word[0];
    values.push_back(word % 3 != 0 ? 0 : word / 3 % 2 == 0 ? 1 : -1);
  }
  return values;
}

OpSpec linear_activation24_spec() {
  OpSpec op{.name = "linear_activation24",
            .summary = "S(f(x weight^T + bias)) in 2:4, counts of its columns, and those that are kept dense",
            .inputs = {{.name = "x", .shape = "[T, D]", .differentiable = false},
                       {.name = "weight", .shape = "[F, D]", .differentiable = false},
                       {.name = "bias", .shape = "[F]", .optional = true, .differentiable = false},
                       {.name = "columns",
                        .shape = "[n]",
                        .optional = true,
                        .differentiable = false,
                        .dtypes = {DType::i32}}},
            .attrs = {activation_attr()},
            .outputs = {{"values", kValuesShape, false},
                        {"metadata", kMetadataShape, false, {DType::i32}},
                        {"counts", "[F]", false, {DType::i32}},
                        {"dense", "[T, n]", false}},
            .variants = linear_activation24_variants(),
            .variant_dtypes = {{DType::bf16, DType::f16}, {}}};
  op.run = [](const std::vector<Tensor>& in, const Attrs& attrs) {
    const LinearActivation24 made =
        linear_activation24(in[0], in[1], parse_activation(attrs.word("activation")), in[2], in[3]);
    const Tensor dense =
        made.dense.defined() ? made.dense : Tensor::empty({in[0].size(0), 0}, in[0].dtype(), in[0].device());
    return std::vector{made.kept.values, made.kept.metadata, made.counts, dense};
  };
  op.problem = [](const Dims& d, const Attrs&) {
    const int64_t rows = d.at("T"), in = d.at("D"), hidden = d.at("F");
    const std::vector<int64_t> columns = dense_columns(hidden, d.at("every"));
    const double t = double(rows), f = double(hidden);
    const auto given = [&](const Shape& shape, uint64_t seed) {
      InputCase one{.shape = shape};
      if (d.at("exact")) one.values = small_integers(shape, seed);
      return one;
    };
    InputCase bias = given({hidden}, 3);
    if (!d.at("bias")) bias.fill = Fill::absent;
    InputCase indices{.shape = {int64_t(columns.size())},
                      .fill = columns.empty() ? Fill::absent : Fill::index,
                      .high = std::max<int64_t>(1, hidden),
                      .values = columns};
    return Problem{
        .inputs = {given({rows, in}, 1), given({hidden, in}, 2), bias, indices},
        .forward_flops = 2 * t * f * double(in),
        .forward_elements = t * double(in) + f * double(in) + t * f / 2 + t * double(columns.size()),
        .forward_bytes = t * f / 8 + 4 * f};
  };
  const auto dims = [](int64_t rows, int64_t in, int64_t hidden, int64_t bias, int64_t every,
                       int64_t exact = 1) {
    return Dims{{"T", rows}, {"D", in}, {"F", hidden}, {"bias", bias}, {"every", every}, {"exact", exact}};
  };
  for (const char* const kind : {"relu", "relu_squared"})
    for (const Dims& one : {dims(7, 8, 5, 1, 2), dims(131, 72, 200, 1, 17), dims(64, 64, 192, 0, 0),
                            dims(129, 40, 193, 0, 3), dims(300, 136, 345, 1, 20)})
      op.cases.push_back({.dims = one, .attrs = {{"activation", std::string(kind)}}, .gradcheck = false});
  for (const Dims& one : {dims(1, 1, 1, 1, 0), dims(0, 3, 8, 0, 2), dims(3, 2, 0, 0, 0), dims(3, 0, 4, 1, 2),
                          dims(700, 24, 64, 1, 1), dims(2600, 64, 776, 0, 9)})
    op.cases.push_back({.dims = one, .gradcheck = false});
  op.cases.push_back({.dims = dims(67, 33, 70, 1, 4), .placement = Placement::strided, .gradcheck = false});
  for (const auto& [in, hidden] : {std::pair{4096, 16384}, {2048, 8192}})
    op.benches.push_back({.dims = dims(16384, in, hidden, 0, 20, 0)});
  return op;
}

}  // namespace

std::vector<OpSpec> compressed24_specs() {
  return {hidden_gradient24_spec(), linear_activation24_spec()};
}

}  // namespace tessera::ops

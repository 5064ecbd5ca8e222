#include <algorithm>
#include <cmath>
#include <iterator>

#include "ops/decoder_layers/decoder_layers_kernels.h"
#include "ops/generation/sample.h"
#include "ops/op.h"
#include "ops/sum_dtype.h"

namespace tessera::ops {

namespace {

Dims decoder_layers_dims(int64_t d, int64_t f, int64_t h, int64_t hk, int64_t e, int64_t r,
                         int64_t capacity) {
  return {{"d", d}, {"F", f}, {"H", h}, {"Hk", hk}, {"D", e}, {"R", r}, {"capacity", capacity}};
}

/// With biases of q, k and v, or norms of the heads of q and k.
Dims with(const char* const what, Dims dims) {
  dims[what] = 1;
  return dims;
}

/// qkv_bias, q_norm and k_norm of a case.
std::vector<InputCase> optional_cases(const Dims& dims) {
  const int64_t h = dims.at("H"), hk = dims.at("Hk"), e = dims.at("D");
  const auto given = [&](const char* what, const InputCase& input) {
    return dims.contains(what) ? input : InputCase{.shape = {}, .fill = Fill::absent};
  };
  const InputCase norm{.shape = {e}, .fill = Fill::positive};
  return {given("bias", {.shape = {(h + 2 * hk) * e}}), given("norms", norm), given("norms", norm)};
}

std::vector<InputSpec> optional_inputs() {
  return {{"qkv_bias", "[(H + 2 Hk) D]", true, false},
          {"q_norm", "[D], of each head of q", true, false},
          {"k_norm", "[D], of each head of k", true, false}};
}

Tensor detached(const Tensor& given) {
  return given.defined() ? given.detach() : given;
}

std::vector<Case> decoder_layers_cases() {
  return {{.dims = decoder_layers_dims(6, 5, 2, 1, 8, 4, 3)},
          {.dims = decoder_layers_dims(8, 7, 3, 3, 8, 2, 1)},
          {.dims = decoder_layers_dims(64, 40, 2, 2, 64, 64, 5)},
          {.dims = decoder_layers_dims(72, 88, 4, 1, 64, 32, 70)},
          {.dims = decoder_layers_dims(64, 40, 3, 1, 128, 128, 33), .attrs = {{"layers", int64_t{3}}}},
          {.dims = decoder_layers_dims(64, 40, 8, 1, 128, 64, 9), .attrs = {{"layers", int64_t{2}}}},
          {.dims = decoder_layers_dims(256, 696, 8, 8, 64, 64, 300), .gradcheck = false},
          {.dims = with("bias", decoder_layers_dims(64, 40, 7, 1, 128, 128, 33)),
           .attrs = {{"layers", int64_t{2}}}},
          {.dims = with("norms", decoder_layers_dims(64, 40, 4, 2, 128, 64, 20)),
           .attrs = {{"layers", int64_t{2}}}},
          {.dims = with("bias", with("norms", decoder_layers_dims(72, 88, 6, 2, 64, 64, 700))),
           .gradcheck = false},
          // An input vector that leaves room for five stages.
          {.dims = with("bias", decoder_layers_dims(64, 18944, 2, 1, 64, 64, 12)), .gradcheck = false},
          // Several splits of the keys; more key heads than an H200 has SMs; 4 + 1 query heads per key head.
          {.dims = decoder_layers_dims(72, 88, 4, 1, 64, 32, 2600), .gradcheck = false},
          {.dims = decoder_layers_dims(64, 40, 150, 150, 64, 64, 40), .gradcheck = false},
          {.dims = decoder_layers_dims(64, 40, 10, 2, 128, 128, 900), .gradcheck = false},
          {.dims = decoder_layers_dims(1032, 2056, 16, 2, 128, 128, 1500),
           .attrs = {{"layers", int64_t{2}}},
           .gradcheck = false},
          {.dims = decoder_layers_dims(4096, 1032, 32, 8, 128, 128, 700), .gradcheck = false}};
}

/// Calls decoder_layers as often as attribute "layers" says with copies of `layer`, each with a cache of its
/// own.
template <class Layer>
std::vector<Tensor> run_layers(const Layer& layer, const Tensor& x, const Tensor& table, const Tensor& past,
                               const Attrs& attrs) {
  constexpr int64_t kMost = 10'000;  // of which each is a copy, and a mistyped number would fill the memory
  const int64_t count = attrs.integer("layers");
  check(count >= 1 && count <= kMost, "decoder_layers: layers is ", count, "; expected 1 to ", kMost);
  std::vector<Layer> layers;
  for (int64_t i = 0; i < count; ++i) {
    layers.push_back(layer);
    layers.back().keys = layer.keys.detach().clone(), layers.back().values = layer.values.detach().clone();
  }
  const Tensor length = past.detach().to(DType::i32).clone();
  advance(length, 1);
  const Tensor y = decoder_layers(x.detach(), std::span<const Layer>(layers),
                                  table.detach().to(sum_dtype(x.dtype())), length, attrs.number("eps"));
  return {y, layers.back().keys, layers.back().values};
}

/// What both operators share: attributes, outputs, variants, tolerances.
OpSpec decoder_spec(const char* name, const char* summary) {
  OpSpec spec;
  spec.name = name;
  spec.summary = summary;
  spec.attrs = {{"eps", 1e-5, "added to the mean square in both norms"},
                {"layers", int64_t{1}, "how often the layer is applied, each time with its own cache"}};
  spec.outputs = {{"y", "[1, d]", false},
                  {"keys", "[1, capacity, Hk, D], of the last layer", false},
                  {"values", "[1, capacity, Hk, D], of the last layer", false}};
  spec.variants = decoder::variants();
  spec.variant_dtypes = {{DType::bf16, DType::f16}, {}};
  spec.tolerance_factor_f32 = 8;
  spec.tolerance_factor = 3;
  spec.tolerance_reason = "as linear in f32; in 16 bits as decode_attention, whose P is rounded elsewhere";
  return spec;
}

/// Weights are scaled so that the residual stream stays of the size of x.
InputCase weight_case(int64_t rows, int64_t columns, double density = 1) {
  return {.shape = {rows, columns}, .scale = 1 / std::sqrt(double(columns) * density), .density = density};
}

// ---- sparse_decoder_layers ----

enum SparseInput : size_t {
  kX,
  kNorm1,
  kNorm2,
  kKeys,
  kValues,
  kTable,
  kPast,
  kBias,
  kQNorm,
  kKNorm,
  kMatrices
};
constexpr const char* kMatrixNames[] = {"q", "k", "v", "out", "gate", "up", "down"};
constexpr size_t kMatrixCount = std::size(kMatrixNames), kArrays = 4, kFirstArray = kMatrices + kMatrixCount;

std::vector<SparseWeight> weights_of(const std::vector<Tensor>& in) {
  std::vector<SparseWeight> weights;
  for (size_t i = 0; i < kMatrixCount; ++i) {
    const Tensor* const arrays = &in[kFirstArray + i * kArrays];
    weights.push_back({.format = SparseFormat::sell_delta4,
                       .out = in[kMatrices + i].size(0),
                       .in = in[kMatrices + i].size(1),
                       .values = arrays[0],
                       .gaps = arrays[1],
                       .offsets = arrays[2],
                       .info = arrays[3]});
  }
  return weights;
}

void check_weights(const std::vector<Tensor>& in, const Attrs&) {
  const std::vector<SparseWeight> weights = weights_of(in);
  for (size_t i = 0; i < kMatrixCount; ++i)
    validate_arrays(weights[i], std::string("sparse_decoder_layers: ") + kMatrixNames[i]);
}

std::vector<Tensor> run_sparse(const std::vector<Tensor>& in, const Attrs& attrs) {
  const std::vector<SparseWeight> weights = weights_of(in);
  const SparseDecoderLayer layer{.norm1 = in[kNorm1].detach(),
                                 .qkv = {weights[0], weights[1], weights[2]},
                                 .qkv_bias = detached(in[kBias]),
                                 .q_norm = detached(in[kQNorm]),
                                 .k_norm = detached(in[kKNorm]),
                                 .out = {weights[3]},
                                 .norm2 = in[kNorm2].detach(),
                                 .up = {weights[4], weights[5]},
                                 .down = {weights[6]},
                                 .keys = in[kKeys],
                                 .values = in[kValues]};
  return run_layers(layer, in[kX], in[kTable], in[kPast], attrs);
}

Problem sparse_problem(const Dims& dims, const Attrs& attrs) {
  const int64_t d = dims.at("d"), f = dims.at("F"), h = dims.at("H"), hk = dims.at("Hk"), e = dims.at("D"),
                capacity = dims.at("capacity");
  const Shape cache{1, capacity, hk, e};
  const double density = double(dims.at("density")) / 100, layers = double(attrs.integer("layers")),
               stored = density * double(d) * double((h + 2 * hk) * e + h * e + 3 * f);
  std::vector<InputCase> inputs = {{.shape = {1, d}},
                                   {.shape = {d}, .fill = Fill::positive},
                                   {.shape = {d}, .fill = Fill::positive},
                                   {.shape = cache},
                                   {.shape = cache},
                                   {.shape = {capacity, dims.at("R")}},
                                   {.shape = {1}, .fill = Fill::index, .high = capacity}};
  std::ranges::copy(optional_cases(dims), std::back_inserter(inputs));
  for (const auto& [rows, columns] :
       {std::pair{h * e, d}, {hk * e, d}, {hk * e, d}, {d, h * e}, {f, d}, {f, d}, {d, f}})
    inputs.push_back(weight_case(rows, columns, density));
  inputs.resize(kFirstArray + kMatrixCount * kArrays);
  return {.inputs = std::move(inputs),
          .forward_flops = layers * (2 * stored + 4 * double(capacity * h * e)),
          .forward_elements = layers * (stored + 2 * double(cache.count())),
          .forward_bytes = layers * stored / 2};  // distances of 4 bits
}

Case sparse_case(int64_t density, Dims dims, int64_t layers = 1) {
  dims["density"] = density;
  return {.dims = std::move(dims), .attrs = {{"layers", layers}}, .gradcheck = false};
}

OpSpec sparse_decoder_spec() {
  OpSpec spec = decoder_spec(
      "sparse_decoder_layers",
      "one token through a LLaMA layer whose weights are compressed (sell-delta4), over a cache");
  spec.inputs = {{"x", "[1, d]", false, false},
                 {"norm1", "[d]", false, false},
                 {"norm2", "[d]", false, false},
                 {"keys", "[1, capacity, Hk, D]", false, false},
                 {"values", "[1, capacity, Hk, D]", false, false},
                 {"table", "[P, R]: R/2 cosines, R/2 sines", false, false},
                 {"past", "[1]: tokens before the new one", false, false, index_dtypes()}};
  std::ranges::copy(optional_inputs(), std::back_inserter(spec.inputs));
  constexpr const char* kShapes[] = {"[H D, d]", "[Hk D, d]", "[Hk D, d]", "[d, H D]",
                                     "[F, d]",   "[F, d]",    "[d, F]"};
  for (size_t i = 0; i < kMatrixCount; ++i)
    spec.inputs.push_back({.name = kMatrixNames[i],
                           .shape = std::string(kShapes[i]) + ": only its shape is used",
                           .differentiable = false});
  for (const std::string name : kMatrixNames) {
    const auto add = [&](const char* array, const char* shape, std::vector<DType> dtypes = {}) {
      spec.inputs.push_back({.name = name + "_" + array,
                             .shape = shape,
                             .differentiable = false,
                             .dtypes = std::move(dtypes),
                             .from = {name}});
    };
    add("values", "[chunks * 256]");
    add("gaps", "[chunks * 32]", {DType::i32});
    add("offsets", "[groups * 8 + 1]", {DType::i32});
    add("info", "[groups * 64]", {DType::i32});
  }
  spec.cpu_dtypes = {DType::f32, DType::bf16, DType::f16};
  spec.cuda_dtypes = {DType::bf16, DType::f16};
  spec.run = run_sparse;
  spec.derive = [](const std::vector<Tensor>& in, const Attrs&) {
    std::vector<Tensor> arrays;
    for (size_t i = 0; i < kMatrixCount; ++i) {
      const SparseWeight weight = compress(in[kMatrices + i], SparseFormat::sell_delta4);
      for (const Tensor& array : {weight.values, weight.gaps, weight.offsets, weight.info})
        arrays.push_back(array);
    }
    return arrays;
  };
  spec.check_given = check_weights;
  spec.problem = sparse_problem;
  const auto dims = decoder_layers_dims;
  spec.cases = {
      sparse_case(60, dims(8, 16, 2, 1, 8, 4, 3)), sparse_case(50, dims(64, 40, 2, 2, 64, 64, 5)),
      sparse_case(100, dims(72, 88, 4, 1, 64, 32, 70)),
      sparse_case(3, dims(64, 40, 3, 1, 128, 128, 33), 3),  // slices without entries, long distances
      sparse_case(0, dims(64, 40, 2, 1, 64, 64, 9)), sparse_case(50, dims(256, 696, 8, 8, 64, 64, 300), 2),
      sparse_case(40, dims(72, 88, 4, 1, 64, 32, 2600)),
      sparse_case(50, with("bias", dims(64, 40, 7, 1, 128, 128, 33)), 2),
      sparse_case(50, with("norms", dims(256, 88, 4, 2, 64, 32, 300)), 2),
      // Windows that several blocks share, and blocks with tiles of several windows.
      sparse_case(50, dims(1032, 2056, 8, 2, 128, 128, 70)),
      sparse_case(50, dims(2048, 520, 16, 4, 128, 128, 40)),
      sparse_case(30, dims(256, 11272, 4, 1, 64, 64, 40))};
  spec.benches = {sparse_case(50, dims(4096, 11008, 32, 32, 128, 128, 32), 4),
                  sparse_case(50, dims(4096, 14336, 32, 8, 128, 128, 2112), 4)};
  return spec;
}

}  // namespace

std::vector<OpSpec> decoder_layers_specs() {
  OpSpec spec = decoder_spec("decoder_layers",
                             "one token through a LLaMA layer, over a cache with a length on the device");
  spec.inputs = {{"x", "[1, d]", false, false},
                 {"norm1", "[d]", false, false},
                 {"qkv", "[(H + 2 Hk) D, d]", false, false},
                 {"out", "[d, H D]", false, false},
                 {"norm2", "[d]", false, false},
                 {"up", "[2F, d]: gate rows, up rows", false, false},
                 {"down", "[d, F]", false, false},
                 {"keys", "[1, capacity, Hk, D]", false, false},
                 {"values", "[1, capacity, Hk, D]", false, false},
                 {"table", "[P, R]: R/2 cosines, R/2 sines", false, false},
                 {"past", "[1]: tokens before the new one", false, false, index_dtypes()}};
  std::ranges::copy(optional_inputs(), std::back_inserter(spec.inputs));
  spec.run = [](const std::vector<Tensor>& in, const Attrs& attrs) {
    const DecoderLayer layer{.norm1 = in[1].detach(),
                             .qkv = in[2].detach(),
                             .qkv_bias = detached(in[11]),
                             .q_norm = detached(in[12]),
                             .k_norm = detached(in[13]),
                             .out = in[3].detach(),
                             .norm2 = in[4].detach(),
                             .up = in[5].detach(),
                             .down = in[6].detach(),
                             .keys = in[7],
                             .values = in[8]};
    return run_layers(layer, in[0], in[9], in[10], attrs);
  };
  spec.problem = [](const Dims& dims, const Attrs& attrs) {
    const int64_t d = dims.at("d"), f = dims.at("F"), h = dims.at("H"), hk = dims.at("Hk"), e = dims.at("D"),
                  capacity = dims.at("capacity");
    const Shape cache{1, capacity, hk, e};
    const double weights = double(d) * double((h + 2 * hk) * e + h * e + 3 * f);
    const double layers = double(attrs.integer("layers"));
    std::vector<InputCase> inputs = {{.shape = {1, d}},
                                     {.shape = {d}, .fill = Fill::positive},
                                     weight_case((h + 2 * hk) * e, d),
                                     weight_case(d, h * e),
                                     {.shape = {d}, .fill = Fill::positive},
                                     weight_case(2 * f, d),
                                     weight_case(d, f),
                                     {.shape = cache},
                                     {.shape = cache},
                                     {.shape = {capacity, dims.at("R")}},
                                     {.shape = {1}, .fill = Fill::index, .high = capacity}};
    std::ranges::copy(optional_cases(dims), std::back_inserter(inputs));
    return Problem{.inputs = std::move(inputs),
                   .forward_flops = layers * (2 * weights + 4 * double(capacity * h * e)),
                   .forward_elements = layers * (weights + 2 * double(cache.count()))};
  };
  spec.cases = decoder_layers_cases();
  spec.benches = {
      {.dims = decoder_layers_dims(4096, 11008, 32, 32, 128, 128, 32), .attrs = {{"layers", int64_t{4}}}},
      {.dims = decoder_layers_dims(4096, 11008, 32, 32, 128, 128, 2112), .attrs = {{"layers", int64_t{4}}}},
      {.dims = decoder_layers_dims(4096, 14336, 32, 8, 128, 128, 2112), .attrs = {{"layers", int64_t{4}}}}};
  return {std::move(spec), sparse_decoder_spec()};
}

}  // namespace tessera::ops

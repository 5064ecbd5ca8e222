#include <cmath>

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

std::vector<Case> decoder_layers_cases() {
  return {{.dims = decoder_layers_dims(6, 5, 2, 1, 8, 4, 3)},
          {.dims = decoder_layers_dims(8, 7, 3, 3, 8, 2, 1)},
          {.dims = decoder_layers_dims(64, 40, 2, 2, 64, 64, 5)},
          {.dims = decoder_layers_dims(72, 88, 4, 1, 64, 32, 70)},
          {.dims = decoder_layers_dims(64, 40, 3, 1, 128, 128, 33), .attrs = {{"layers", int64_t{3}}}},
          {.dims = decoder_layers_dims(64, 40, 8, 1, 128, 64, 9), .attrs = {{"layers", int64_t{2}}}},
          {.dims = decoder_layers_dims(256, 696, 8, 8, 64, 64, 300), .gradcheck = false},
          // Several splits of the keys; more key heads than an H200 has SMs; 4 + 1 query heads per key head.
          {.dims = decoder_layers_dims(72, 88, 4, 1, 64, 32, 2600), .gradcheck = false},
          {.dims = decoder_layers_dims(64, 40, 150, 150, 64, 64, 40), .gradcheck = false},
          {.dims = decoder_layers_dims(64, 40, 10, 2, 128, 128, 900), .gradcheck = false},
          {.dims = decoder_layers_dims(1032, 2056, 16, 2, 128, 128, 1500),
           .attrs = {{"layers", int64_t{2}}},
           .gradcheck = false},
          {.dims = decoder_layers_dims(4096, 1032, 32, 8, 128, 128, 700), .gradcheck = false}};
}

}  // namespace

std::vector<OpSpec> decoder_layers_specs() {
  OpSpec spec;
  spec.name = "decoder_layers";
  spec.summary = "one token through a LLaMA layer, over a cache with a length on the device";
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
  spec.run = [](const std::vector<Tensor>& in, const Attrs& attrs) {
    std::vector<DecoderLayer> layers;
    for (int64_t layer = 0; layer < attrs.integer("layers"); ++layer)
      layers.push_back({.norm1 = in[1].detach(),
                        .qkv = in[2].detach(),
                        .out = in[3].detach(),
                        .norm2 = in[4].detach(),
                        .up = in[5].detach(),
                        .down = in[6].detach(),
                        .keys = in[7].detach().clone(),
                        .values = in[8].detach().clone()});
    const Tensor length = in[10].detach().to(DType::i32).clone();
    advance(length, 1);
    const Tensor y = decoder_layers(in[0].detach(), layers, in[9].detach().to(sum_dtype(in[0].dtype())),
                                    length, attrs.number("eps"));
    return std::vector{y, layers.back().keys, layers.back().values};
  };
  spec.problem = [](const Dims& dims, const Attrs& attrs) {
    const int64_t d = dims.at("d"), f = dims.at("F"), h = dims.at("H"), hk = dims.at("Hk"), e = dims.at("D"),
                  capacity = dims.at("capacity");
    const Shape cache{1, capacity, hk, e};
    const double weights = double(d) * double((h + 2 * hk) * e + h * e + 3 * f);
    const double layers = double(attrs.integer("layers"));
    // Weights are scaled so that the residual stream stays of the size of x.
    const auto weight = [](int64_t rows, int64_t columns) {
      return InputCase{.shape = {rows, columns}, .scale = 1 / std::sqrt(double(columns))};
    };
    return Problem{.inputs = {{.shape = {1, d}},
                              {.shape = {d}, .fill = Fill::positive},
                              weight((h + 2 * hk) * e, d),
                              weight(d, h * e),
                              {.shape = {d}, .fill = Fill::positive},
                              weight(2 * f, d),
                              weight(d, f),
                              {.shape = cache},
                              {.shape = cache},
                              {.shape = {capacity, dims.at("R")}},
                              {.shape = {1}, .fill = Fill::index, .high = capacity}},
                   .forward_flops = layers * (2 * weights + 4 * double(capacity * h * e)),
                   .forward_elements = layers * (weights + 2 * double(cache.count()))};
  };
  spec.cases = decoder_layers_cases();
  spec.benches = {
      {.dims = decoder_layers_dims(4096, 11008, 32, 32, 128, 128, 32), .attrs = {{"layers", int64_t{4}}}},
      {.dims = decoder_layers_dims(4096, 11008, 32, 32, 128, 128, 2112), .attrs = {{"layers", int64_t{4}}}},
      {.dims = decoder_layers_dims(4096, 14336, 32, 8, 128, 128, 2112), .attrs = {{"layers", int64_t{4}}}}};
  return {std::move(spec)};
}

}  // namespace tessera::ops

#include <gtest/gtest.h>

#include "ops/decoder_layers/sell_decoder_plan.h"
#include "ops/random/random.h"
#include "ops/rope/rope_table.h"
#include "tests/errors.h"

/// What of the persistent decoder with compressed weights runs on the host: its plan, and what is refused.

namespace tessera::ops {
namespace {

constexpr int kDecoderSms = 132;

/// A layer of d features, H query heads and Hk key heads of D elements, and F hidden features; without
/// arrays.
SparseDecoderLayer layer_of(int64_t d, int64_t f, int64_t h, int64_t hk, int64_t e) {
  const auto weight = [](int64_t out, int64_t in) {
    return SparseWeight{.format = SparseFormat::sell_delta4, .out = out, .in = in};
  };
  return {.qkv = {weight(h * e, d), weight(hk * e, d), weight(hk * e, d)},
          .out = {weight(d, h * e)},
          .up = {weight(f, d), weight(f, d)},
          .down = {weight(d, f)}};
}

TEST(SellDecoderPlan, GivesEveryLayerOfKnownModelsRoomForItsWeights) {
  struct Model {
    const char* name;
    int64_t d, f, h, hk, e;
    int stages;
  };
  for (const Model& m : {Model{"Llama-2-7B", 4096, 11008, 32, 32, 128, 3},
                         {"Llama-3-8B", 4096, 14336, 32, 8, 128, 3},
                         {"Llama-2-13B", 5120, 13824, 40, 40, 128, 3},
                         {"Llama-2-70B", 8192, 28672, 64, 8, 128, 2},
                         {"TinyLlama", 2048, 5632, 32, 4, 64, 3}}) {
    const decoder::SellDecoderPlan plan =
        decoder::plan_sell_decoder(layer_of(m.d, m.f, m.h, m.hk, m.e), kDecoderSms);
    EXPECT_EQ(plan.stages, m.stages) << m.name;
    EXPECT_GE(plan.stages, decoder::kLeastSellStages) << m.name;
    // The vector holds the widest input, and what the entries that pad a row reach past it.
    EXPECT_GE(plan.vector_bytes, (std::max(m.d, m.f) + 8) * 2) << m.name;
    EXPECT_EQ(plan.gemv[0].slices, (m.h + 2 * m.hk) * m.e / 32) << m.name;
    EXPECT_EQ(plan.gemv[2].slices, 2 * m.f / 32) << m.name;
    EXPECT_EQ(plan.first_slice[1], m.h * m.e / 32) << m.name;
    EXPECT_EQ(plan.first_row[2], (m.h + m.hk) * m.e) << m.name;
    EXPECT_EQ(plan.first_row[5], m.f) << m.name;
  }
}

TEST(SellDecoderPlan, HasWholeSlicesOfEachMatrixAndOthersFirstInEachGemv) {
  const decoder::SellDecoderPlan plan = decoder::plan_sell_decoder(layer_of(72, 1000, 3, 1, 24), kDecoderSms);
  // q has 72 rows, k and v 24; gate and up 1,000, in 32 slices each.
  EXPECT_EQ(plan.first_slice[1], 3);
  EXPECT_EQ(plan.first_slice[2], 4);
  EXPECT_EQ(plan.gemv[0].slices, 5);
  EXPECT_EQ(plan.first_slice[5], 32);
  EXPECT_EQ(plan.gemv[2].slices, 64);
  EXPECT_EQ(plan.gemv[1].first, 5);
  EXPECT_EQ(plan.gemv[2].first, 5 + 3);
  EXPECT_EQ(plan.gemv[3].first, 5 + 3 + 64);
  // Fewer parts of qkv than three: the others begin where nothing is.
  SparseDecoderLayer fused = layer_of(72, 1000, 3, 1, 24);
  fused.qkv = {{.format = SparseFormat::sell_delta4, .out = 120, .in = 72}};
  const decoder::SellDecoderPlan other = decoder::plan_sell_decoder(fused, kDecoderSms);
  EXPECT_EQ(other.gemv[0].slices, 4);
  EXPECT_GT(other.first_slice[1], 1 << 30);
}

TEST(SparseDecoderLayers, RefusesWhatIsNoLayer) {
  Rng rng(1);
  const int64_t d = 16, f = 24, e = 8;
  const auto parts = [&](int64_t rows, int64_t columns, int64_t count = 1) {
    std::vector<SparseWeight> all;
    for (int64_t i = 0; i < count; ++i) {
      const Tensor weight = Tensor::empty({rows, columns}, DType::f32, Device::cpu());
      fill_normal(weight, 0, 1, rng);
      all.push_back(compress(weight, SparseFormat::sell_delta4));
    }
    return all;
  };
  const auto good = [&] {
    const Tensor ones = Tensor::full({d}, 1.0, DType::f32, Device::cpu());
    return SparseDecoderLayer{.norm1 = ones,
                              .qkv = parts(2 * e, d, 3),
                              .out = parts(d, 2 * e),
                              .norm2 = ones,
                              .up = parts(f, d, 2),
                              .down = parts(d, f),
                              .keys = Tensor::zeros({1, 4, 2, e}, DType::f32, Device::cpu()),
                              .values = Tensor::zeros({1, 4, 2, e}, DType::f32, Device::cpu())};
  };
  const Tensor x = Tensor::full({1, d}, 0.5, DType::f32, Device::cpu()), table = rope_table({}, e, 4),
               lengths = Tensor::from(std::vector<int32_t>{1}, {1});
  const auto run = [&](const SparseDecoderLayer& layer) {
    return decoder_layers(x, std::span(&layer, 1), table, lengths, 1e-5);
  };
  EXPECT_EQ(run(good()).shape(), (Shape{1, d}));
  const SparseDecoderLayer any = good();
  const std::string empty =
      message_of([&] { decoder_layers(x.slice(1, 0, 0), std::span(&any, 1), table, lengths, 1e-5); });
  EXPECT_NE(empty.find("x is f32[1, 0] on cpu; expected one token [1, d] of one feature or more"),
            std::string::npos)
      << empty;
  const auto refused = [&](const char* says, auto&& change) {
    SparseDecoderLayer layer = good();
    change(layer);
    const std::string message = message_of([&] { run(layer); });
    EXPECT_NE(message.find(says), std::string::npos) << message;
  };
  refused("qkv is compressed [32, 16] in 2 parts; expected [48, 16]", [](auto& l) { l.qkv.pop_back(); });
  refused("expected two parts of 24 rows, gate and up", [&](auto& l) { l.up = parts(2 * f, d); });
  refused("expected [d, H D] and [d, F] of one column or more",
          [&](auto& l) { l.up = parts(0, d, 2), l.down = parts(d, 0); });
  refused("out is without parts", [](auto& l) { l.out.clear(); });
  refused("a part of down is sell-delta4 [16, 24] with values",
          [&](auto& l) { l.down[0].values = l.down[0].values.to(DType::f16); });
  refused("a part of qkv is sell-delta4 [16, 24]", [&](auto& l) { l.qkv[1] = parts(2 * e, f)[0]; });
}

}  // namespace
}  // namespace tessera::ops

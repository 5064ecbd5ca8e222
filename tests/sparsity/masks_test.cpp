#include "sparsity/masks.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "io/npy.h"
#include "io/torch_file.h"
#include "pretrained/load.h"
#include "tests/io/files.h"
#include "tests/io/torch_bytes.h"
#include "tests/models/small_models.h"

namespace tessera::sparsity {
namespace {

using io::test::throws;

/// [rows, columns] in which element (r, c) is 0 where (3 r + c) % 4 == 0.
Tensor sample(int64_t rows, int64_t columns, DType dtype = DType::f32) {
  std::vector<float> values;
  for (int64_t i = 0; i < rows * columns; ++i)
    values.push_back((3 * (i / columns) + i % columns) % 4 == 0 ? 0.0f : float(i % 7) + 4);
  return Tensor::from(values, {rows, columns}).to(dtype);
}

Masks two_masks() {
  return {.info = {.fingerprint = "f1", .model = "m", .method = "wanda", .sparsity = "0.25", .seed = "0"},
          .layers = {{"z.proj", mask_of(sample(3, 33))}, {"a.proj", mask_of(sample(2, 64))}}};
}

TEST(Mask, IsOneWhereAWeightIsNotZero) {
  for (const int64_t columns : {1, 31, 32, 33, 64, 70}) {
    const Tensor weight = sample(5, columns);
    const Mask mask = mask_of(weight);
    EXPECT_EQ(mask.words.shape(), (Shape{5, (columns + 31) / 32}));
    const std::vector<float> values = weight.to_vector<float>();
    int64_t ones = 0;
    for (int64_t i = 0; i < 5 * columns; ++i) {
      EXPECT_EQ(mask.at(i / columns, i % columns), values[size_t(i)] != 0) << columns << ": " << i;
      ones += values[size_t(i)] != 0;
    }
    EXPECT_EQ(mask.ones(), ones);
    EXPECT_DOUBLE_EQ(mask.sparsity(), 1 - double(ones) / double(5 * columns));
    for (const DType dtype : {DType::f64, DType::bf16, DType::f16, DType::i32, DType::u8, DType::boolean})
      EXPECT_TRUE(io::test::same(mask_of(sample(5, columns, dtype)).words, mask.words)) << dtype;
    EXPECT_TRUE(io::test::same(mask_of(mask.unpacked()).words, mask.words));
    EXPECT_TRUE(io::test::same(mask_of(weight.transpose(0, 1).clone().transpose(0, 1)).words, mask.words));
  }
}

TEST(Mask, NegativeZeroIsZeroAndNanIsNot) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), tiny = std::numeric_limits<float>::denorm_min();
  const Mask mask = mask_of(Tensor::from(std::vector<float>{0.0f, -0.0f, nan, -nan, tiny}, {1, 5}));
  EXPECT_EQ(mask.words.to_vector<int32_t>(), std::vector<int32_t>{0b11100});
}

TEST(Masks, ComeBackFromTheirFileInTheirOrder) {
  const TemporaryFolder folder;
  const Masks masks = two_masks();
  save_masks(folder / "masks.safetensors", masks);
  const Masks read = load_masks(folder / "masks.safetensors");
  EXPECT_EQ(read.info, masks.info);
  ASSERT_EQ(read.layers.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(read.layers[i].first, masks.layers[i].first);
    EXPECT_EQ(read.layers[i].second.columns, masks.layers[i].second.columns);
    EXPECT_TRUE(io::test::same(read.layers[i].second.words, masks.layers[i].second.words));
  }
  check_same_model(masks, read);
  EXPECT_TRUE(throws([&] { read.at("z.prok"); }, "there is no mask of 'z.prok'; did you mean 'z.proj'?"));
}

TEST(Masks, OfAnotherModelAreRefused) {
  const Masks masks = two_masks();
  Masks other = two_masks();
  other.info.fingerprint = "f2";
  EXPECT_TRUE(throws([&] { check_same_model(masks, other); }, "of two models"));
  other.info.fingerprint = "";
  check_same_model(masks, other);
  other.layers[1].second = mask_of(sample(2, 63));
  EXPECT_TRUE(throws([&] { check_same_model(masks, other); }, "'a.proj' is 2 x 64 in one and 2 x 63"));
  other.layers.pop_back();
  EXPECT_TRUE(throws([&] { check_same_model(other, masks); }, "there is no mask of 'a.proj'"));
}

TEST(Masks, DamagedFilesAreRefused) {
  const TemporaryFolder folder;
  const auto file = [&](const std::string& columns, const std::string& order, const Tensor& words) {
    io::save_safetensors(folder / "m", io::NamedTensors{{"a", words}},
                         {{"format", "tessera masks 1"}, {"columns", columns}, {"order", order}});
    return [&] { load_masks(folder / "m"); };
  };
  const Tensor words = mask_of(sample(2, 40)).words;
  EXPECT_EQ(message_of(file("{\"a\": 40}", "[\"a\"]", words)), "");
  EXPECT_TRUE(throws(file("{\"a\": 39}", "[\"a\"]", words), "row 0 has bits past its 39 columns"));
  for (const char* columns : {"{\"a\": 70}", "{\"a\": 20}", "{\"a\": 0}", "{\"a\": -1}"})
    EXPECT_TRUE(throws(file(columns, "[\"a\"]", words), "expected i32 [rows, ceil(columns / 32)]"))
        << columns;
  for (const char* columns : {"{\"a\": 40.5}", "{\"b\": 40}", "{\"a\": \"40\"}"})
    EXPECT_TRUE(throws(file(columns, "[\"a\"]", words), "does not describe 'a'")) << columns;
  EXPECT_TRUE(throws(file("[]", "[\"a\"]", words), "does not list its 1 matrices"));
  EXPECT_TRUE(throws(file("{\"a\": 40", "[\"a\"]", words), "\"columns\" is no JSON"));
  EXPECT_TRUE(throws(file("{\"a\": 40}", "[3]", words), "does not describe ''"));
  EXPECT_TRUE(throws(file("{\"a\": 40}", "[\"a\"]", words.to(DType::i64)), "expected i32"));
  io::save_safetensors(folder / "m", io::NamedTensors{{"a", words}});
  EXPECT_TRUE(throws([&] { load_masks(folder / "m"); }, "is no file of masks"));
}

TEST(Masks, AreReadFromArraysAndPicturesOfTorch) {
  const TemporaryFolder folder;
  const Tensor weight = sample(4, 6);
  io::save_npy(folder / "layer1-down_proj-0-0-0.5.npy", weight);
  Masks masks = read_masks(folder / "layer1-down_proj-0-0-0.5.npy");
  ASSERT_EQ(masks.layers.size(), 1u);
  EXPECT_EQ(masks.layers[0].first, "layers.1.down_proj");
  EXPECT_EQ(masks.info.sparsity, "0.5");
  EXPECT_TRUE(io::test::same(masks.layers[0].second.words, mask_of(weight).words));
  EXPECT_EQ(masks.info.pattern, "unstructured");
  io::save_npy(folder / "layer12-self_attn.q_proj-2-4-0_5.npy", weight);
  masks = read_masks(folder / "layer12-self_attn.q_proj-2-4-0_5.npy");
  EXPECT_EQ(masks.layers[0].first, "layers.12.self_attn.q_proj");
  EXPECT_EQ(masks.info.pattern, "2:4");
  io::save_npy(folder / "w.npy", weight);
  EXPECT_EQ(read_masks(folder / "w.npy").layers[0].first, "w");
  io::save_npy(folder / "v.npy", weight.packed().reshape({24}));
  EXPECT_TRUE(throws([&] { read_masks(folder / "v.npy"); }, "expected a matrix [rows, columns]"));
  weight.at({2, 5}).fill(std::numeric_limits<double>::quiet_NaN());
  io::save_npy(folder / "nan.npy", weight);
  EXPECT_TRUE(
      throws([&] { read_masks(folder / "nan.npy"); }, "nan.npy has a value that is not finite at [2, 5]"));
  if (!io::has_torch_files()) return;
  namespace pickle = io::test::pickle;
  const std::string bare = io::test::torch_bytes(pickle::kProto + pickle::matrix() + pickle::kStop);
  put(folder / "layer0-up_proj-0-0-0.5.pt", bare);
  masks = read_masks(folder / "layer0-up_proj-0-0-0.5.pt");
  EXPECT_EQ(masks.layers[0].first, "layers.0.up_proj");
  EXPECT_EQ(masks.layers[0].second.ones(), 6);
  for (size_t bytes = 1; bytes < bare.size(); bytes += 7) {
    put(folder / "cut.pt", bare.substr(0, bytes));
    EXPECT_NE(message_of([&] { read_masks(folder / "cut.pt"); }), "") << bytes;
  }
}

TEST(Masks, AreReadFromTheFolderOfAModel) {
  const TemporaryFolder folder;
  Rng rng(3);
  models::GptConfig small = models::small_gpt();
  small.dtype = DType::f32;
  const models::Gpt gpt(small, rng, kCpu);
  gpt.blocks[1].mlp.up.weight.detach().slice(0, 2, 3).fill(0);
  pretrained::save(gpt, folder / "gpt");
  const Masks masks = read_masks(folder / "gpt");
  EXPECT_EQ(masks.info.model, "gpt");
  ASSERT_EQ(masks.layers.size(), 8u);
  const Mask& up = masks.at("transformer.h.1.mlp.c_fc");
  EXPECT_EQ(up.rows(), gpt.config.d_ff);
  EXPECT_EQ(up.columns, gpt.config.d_model);
  EXPECT_EQ(up.count() - up.ones(), gpt.config.d_model);
  EXPECT_FALSE(up.at(2, 0));
  models::LlamaConfig small_llama = models::small_llama();
  small_llama.dtype = DType::f32;
  const models::Llama llama(small_llama, rng, kCpu);
  pretrained::save(llama, folder / "llama");
  EXPECT_EQ(read_masks(folder / "llama").at("model.layers.0.self_attn.k_proj").sparsity(), 0);
}

}  // namespace
}  // namespace tessera::sparsity

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/parity/language_run.h"
#include "tests/place.h"
#include "tests/tensors.h"

/// What transformers computed with small models that it wrote: the essence of
/// tests/parity/language_parity.py, which made these files (--golden).

namespace tessera::pretrained {
namespace {

const std::string kGolden =
    tessera::test::place("TESSERA_TEST_DATA", TESSERA_TEST_DATA) + "/pretrained/golden";

double largest(const Tensor& tensor) {
  double most = 0;
  for (const double value : tensor.to_vector<double>()) most = std::max(most, std::abs(value));
  return most;
}

/// Limits as there: logits and losses 1e-4 (measured 1e-6), gradients 1e-3 of the largest.
void expect_equal(const io::NamedTensors& list, const std::string& folder) {
  const std::map<std::string, Tensor> ours(list.begin(), list.end());
  const auto truth = io::load_safetensors(folder + "/truth.safetensors");
  int gradients = 0;
  for (const auto& [name, want] : truth) {
    if (name == "untrained") continue;
    ASSERT_TRUE(ours.contains(name)) << name;
    if (name == "generated") {
      EXPECT_EQ(ours.at(name).to_vector<int64_t>(), want.to_vector<int64_t>());
    } else if (name.starts_with("gradient.")) {
      // A bias of keys changes no softmax: its gradient is rounding.
      const double scale = largest(want);
      EXPECT_LE(largest_difference(ours.at(name), want), scale < 1e-6 ? 1e-6 : 1e-3 * scale) << name;
      ++gradients;
    } else {
      EXPECT_LE(largest_difference(ours.at(name), want), 1e-4) << name;
    }
  }
  EXPECT_GE(gradients, 9);  // of phi3's one block and its tables
}

class GoldenModels : public ::testing::TestWithParam<const char*> {
 protected:
  const std::string folder = kGolden + "/" + GetParam();
  Rng rng{1};

  io::NamedTensors run() {
    const auto model = read_config(folder).model;
    if (std::holds_alternative<models::LlamaConfig>(model))
      return parity::run(load_llama(folder, rng, Device::cpu()), folder);
    if (std::holds_alternative<models::BertConfig>(model))
      return parity::run(load_bert(folder, rng, Device::cpu()), folder);
    return parity::run(load_gpt(folder, rng, Device::cpu()), folder);
  }
};

TEST_P(GoldenModels, LogitsGradientsLossesAndTextAreThoseOfTransformers) {
  expect_equal(run(), folder);
}

INSTANTIATE_TEST_SUITE_P(All, GoldenModels,
                         ::testing::Values("gpt2", "opt", "llama-3", "qwen2-tied", "qwen3", "phi3-partial",
                                           "bert-classify", "bert-regress", "roberta-masked"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(GoldenTorch, WeightsOfTorchSaveInShardsAreTheSame) {
  if (!io::has_torch_files()) GTEST_SKIP() << "skipped: this build has no libzip";
  const io::WeightSource torch(kGolden + "/gpt2-torch"), safetensors(kGolden + "/gpt2");
  ASSERT_EQ(torch.entries().size(), safetensors.entries().size());
  for (const io::WeightEntry& entry : safetensors.entries()) {
    EXPECT_EQ(torch.entry(entry.name).shape, entry.shape) << entry.name;
    EXPECT_EQ(torch.load(entry.name).to_vector<float>(), safetensors.load(entry.name).to_vector<float>());
  }
}

}  // namespace
}  // namespace tessera::pretrained

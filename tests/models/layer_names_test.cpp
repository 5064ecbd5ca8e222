#include <gtest/gtest.h>

#include "models/gpt.h"
#include "tests/errors.h"

/// Errors name the layer of a bundled model.

namespace tessera::models {
namespace {

TEST(LayerNames, AnErrorNamesTheUsersLineAndThePathOfTheLayer) {
  GptConfig config;
  config.vocabulary = 11, config.d_model = 8, config.heads = 2, config.layers = 4, config.positions = 8;
  config.d_ff = 16;
  Rng rng(1);
  Gpt model(config, rng, Device::cpu());
  model.blocks[3].mlp.down = nn::Linear(5, 8, rng);  // takes 5 features, gets 16
  const Tensor tokens = Tensor::zeros({2, 4}, DType::i64, Device::cpu());
  int line = 0;
  const std::string said = report_of([&] {
    line = __LINE__ + 1;
    model(tokens);
  });
  EXPECT_TRUE(said.ends_with("; called at " + std::string(__FILE__) + ":" + std::to_string(line) +
                             " in blocks.3.mlp"))
      << said;
}

}  // namespace
}  // namespace tessera::models

#include <gtest/gtest.h>

#include <thread>

#include "tests/models/small_models.h"

/// Models that several threads call at once.

namespace tessera::models {
namespace {

TEST(SharedModels, ThreadsMayCallALlamaWhoseAnglesDependOnTheLength) {
  LlamaConfig config = small_llama(ops::RopeScaling::dynamic);
  config.positions = 64;
  Rng rng(3);
  const Llama model(config, rng, kCpu);
  std::vector<Tensor> expected;
  for (int64_t length = 0; length < 40; ++length)
    expected.push_back(model.begin(Tensor::zeros({length + 1}, DType::i64, kCpu), {{length + 1}}).rope_table);
  std::vector<std::thread> threads;
  std::vector<int> wrong(4, 0);
  for (size_t thread = 0; thread < wrong.size(); ++thread)
    threads.emplace_back([&, thread] {
      for (int64_t call = 0; call < 4000; ++call) {
        const int64_t length = (call * 37 + int64_t(thread) * 11) % 40;
        const Tensor table =
            model.begin(Tensor::zeros({length + 1}, DType::i64, kCpu), {{length + 1}}).rope_table;
        const Tensor& right = expected[size_t(length)];
        if (table.at({length, 0}).item() != right.at({length, 0}).item()) ++wrong[thread];
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
}

}  // namespace
}  // namespace tessera::models

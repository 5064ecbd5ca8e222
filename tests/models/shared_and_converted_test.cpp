#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include "models/generate.h"
#include "tests/models/small_models.h"

/// Models after nn::to(), and models that several threads call at once.

namespace tessera::models {
namespace {

constexpr DType kDTypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};

/// Calls f(model) with each causal model, made in `from` and converted to `to`.
template <class F>
void for_each_converted(DType from, DType to, F&& f) {
  Rng rng(3);
  GptConfig gpt = small_gpt();
  LlamaConfig llama = small_llama();
  gpt.dtype = llama.dtype = from;
  Gpt first(gpt, rng, kCpu);
  Llama second(llama, rng, kCpu);
  const Tensor tokens = tokens_of({4, 7, 2}, {1, 3});
  first(tokens), second(tokens);  // what they keep for later calls is of the former dtype
  nn::to(first, to), nn::to(second, to);
  f(first), f(second);
}

TEST(ConvertedModels, ComputeTrainAndGenerateInTheirNewDType) {
  const Tensor tokens = tokens_of({4, 7, 2}, {1, 3}), targets = tokens_of({7, 2, 5}, {1, 3});
  const std::vector<int64_t> prompt{4, 7, 2};
  for (const DType from : kDTypes)
    for (const DType to : kDTypes)
      for_each_converted(from, to, [&](const auto& model) {
        EXPECT_EQ(model.config.dtype, to);
        EXPECT_EQ(model(tokens).dtype(), to);
        Tape tape;
        tape.backward(model.loss(tokens, targets));
        EXPECT_TRUE(grad(model.token.weight).defined());
        EXPECT_EQ(generate(model, prompt, {.most_tokens = 4}).size(), 4u);
      });
}

TEST(ConvertedModels, ATnpTakesItsTokensInTheNewDType) {
  Rng rng(3);
  for (const DType to : kDTypes) {
    Tnp model(small_tnp(), rng, kCpu);
    nn::to(model, to);
    const auto drawn = [&](int64_t points, int64_t width) {
      const Tensor x = Tensor::empty({2, points, width}, DType::f32, kCpu);
      ops::fill_normal(x, 0, 1, rng);
      return x;
    };
    EXPECT_TRUE(std::isfinite(model.loss({drawn(5, 2), drawn(5, 1), drawn(3, 2), drawn(3, 1)}).item()))
        << name_of(to);
  }
}

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

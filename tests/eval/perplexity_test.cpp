#include "eval/perplexity.h"

#include <gtest/gtest.h>

#include <csignal>
#include <numeric>

#include "models/gpt.h"
#include "runtime/interrupt.h"
#include "tests/tensors.h"

namespace tessera::eval {
namespace {

models::Gpt small_gpt(Rng& rng) {
  return {{.vocabulary = 19,
           .positions = 16,
           .d_model = 12,
           .d_ff = 20,
           .heads = 3,
           .layers = 2,
           .init_deviation = 0.5,
           .dtype = DType::f64},
          rng,
          kCpu};
}

/// -log p of token `at` of the window, from all logits of it.
double nats_of(const models::Gpt& model, std::span<const int64_t> window, int64_t at) {
  const Tensor logits = model(Tensor::from(window, {1, int64_t(window.size())}));
  const auto row = logits.select(1, at - 1).to_vector<double>();
  double sum = 0;
  for (const double logit : row) sum += std::exp(logit);
  return std::log(sum) - row[size_t(window[size_t(at)])];
}

TEST(Perplexity, IsTheMeanOverThePredictedTokensOfEveryWindow) {
  Rng rng(3);
  const models::Gpt model = small_gpt(rng);
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < 29; ++i) tokens.push_back(i * i * 7 % 19);
  for (const auto& [stride, windows, first] :
       {std::array<int64_t, 3>{0, 3, 1}, {3, 8, 5}, {7, 4, 1}, {1, 22, 7}}) {
    const int64_t length = 8, step = stride ? stride : length;
    double sum = 0;
    int64_t predicted = 0;
    for (int64_t begin = 0; begin + length <= 29; begin += step)
      for (int64_t at = first; at < length; ++at, ++predicted)
        sum += nats_of(model, std::span(tokens).subspan(size_t(begin), size_t(length)), at);
    for (const int64_t batch : {1, 3, 50}) {
      const Perplexity result =
          measure_perplexity(model, perplexity_windows(tokens, {length, stride}), kCpu, batch);
      EXPECT_EQ(result.windows, windows) << stride;
      EXPECT_EQ(result.predicted, predicted) << stride;
      EXPECT_NEAR(result.nats, sum / double(predicted), 1e-12) << stride;
    }
  }
}

TEST(Perplexity, AloneIsThatOfTheMeasurement) {
  Rng rng(3);
  const models::LanguageModel model = small_gpt(rng);
  const std::vector<int64_t> tokens(40, 2);
  const auto windows = perplexity_windows(tokens, {.length = 8});
  const Perplexity measured = measure_perplexity(model, windows, kCpu, 2);
  EXPECT_EQ(measured.windows, 5);
  EXPECT_EQ(perplexity_of(model, windows, 2), std::exp(measured.nats));
}

TEST(Perplexity, EndsWhenItIsTold) {
  Rng rng(3);
  const models::Gpt model = small_gpt(rng);
  const std::vector<int64_t> tokens(40, 2);
  const Perplexity result = measure_perplexity(model, perplexity_windows(tokens, {.length = 8}), kCpu, 1,
                                               [](const Perplexity& p) { return p.windows < 2; });
  EXPECT_EQ(result.windows, 2);
  EXPECT_EQ(perplexity_windows(tokens, {.length = 8, .most_windows = 3}).size(), 3u);
}

TEST(Perplexity, EndsAtASignal) {
  Rng rng(3);
  const models::Gpt model = small_gpt(rng);
  const std::vector<int64_t> tokens(40, 2);
  const InterruptGuard guard;
  std::raise(SIGINT);
  EXPECT_THROW(measure_perplexity(model, perplexity_windows(tokens, {.length = 8}), kCpu, 1), Interrupted);
}

TEST(Perplexity, RefusesWhatHasNoWindow) {
  const std::vector<int64_t> tokens(9, 1);
  EXPECT_THROW(perplexity_windows(std::span(tokens).first(7), {.length = 8}), Error);
  EXPECT_THROW(perplexity_windows(tokens, {.length = 1}), Error);
  EXPECT_THROW(perplexity_windows(tokens, {.length = 8, .stride = 8}), Error);
  EXPECT_THROW(perplexity_windows(tokens, {.length = 8, .stride = -1}), Error);
  EXPECT_THROW(perplexity_windows(tokens, {.length = 8, .batch = 0}), Error);
  EXPECT_EQ(perplexity_windows(std::span(tokens).first(8), {.length = 8}).size(), 1u);
}

TEST(Perplexity, SlidingWindowsPredictEachTokenOnceBehindEnoughOthers) {
  std::vector<int64_t> tokens(50);
  std::iota(tokens.begin(), tokens.end(), 0);
  for (const auto& [first, length, stride] :
       {std::array<int64_t, 3>{1, 8, 7}, {1, 8, 3}, {20, 9, 4}, {3, 60, 59}, {49, 5, 1}, {50, 5, 1}}) {
    std::vector<int64_t> predicted;
    for (const PerplexityWindow& window : sliding_windows(tokens, first, length, stride)) {
      EXPECT_LE(int64_t(window.tokens.size()), length);
      for (int64_t at = window.first; at < int64_t(window.tokens.size()); ++at) {
        const int64_t token = window.tokens[size_t(at)];
        EXPECT_GE(at, std::min(token, length - stride)) << "context of token " << token;
        predicted.push_back(token);
      }
    }
    EXPECT_EQ(predicted, std::vector<int64_t>(tokens.begin() + first, tokens.end()))
        << first << " " << stride;
  }
}

}  // namespace
}  // namespace tessera::eval

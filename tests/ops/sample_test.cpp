#include "ops/generation/sample.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ops/generation/sample_math.h"
#include "ops/random/random.h"
#include "tests/errors.h"

namespace tessera::ops {
namespace {

TEST(SampleWeight, IsTheExponentialToHalfAUnit) {
  // The polynomial is good to 2.2e-13 of the result, which is at most 2^40: 0.25; rounding adds 0.5.
  for (double x = 0; x > -31; x -= 0.0317) {
    for (const double temperature : {0.3, 1.0, 7.0}) {
      const float logit = float(x * temperature);
      const double exact = std::exp2(40) * std::exp(double(logit) / temperature);
      EXPECT_NEAR(double(logit_weight(logit, 0, temperature)), exact, 0.75) << x << " " << temperature;
    }
  }
  EXPECT_EQ(logit_weight(3.5f, 3.5f, 0.1), uint64_t{1} << 40);
  EXPECT_EQ(logit_weight(-INFINITY, 0, 1), 0u);
  EXPECT_EQ(logit_weight(-3e38f, 3e38f, 1e-300), 0u);
  EXPECT_EQ(logit_weight(INFINITY, INFINITY, 0.1), uint64_t{1} << 40);
  EXPECT_EQ(logit_weight(3e38f, INFINITY, 1), 0u);
}

TEST(SampleWeight, RanksAsFloatsCompare) {
  const float ordered[] = {-INFINITY, -3e38f, -1, -1e-40f, 0, 1e-40f, 2, INFINITY};
  for (size_t i = 1; i < std::size(ordered); ++i)
    EXPECT_LT(logit_rank(ordered[i - 1]), logit_rank(ordered[i])) << i;
  EXPECT_EQ(logit_rank(-0.0f), logit_rank(0.0f));
  EXPECT_EQ(logit_rank(-INFINITY), kRankOfNothing);
}

TEST(SampleWeight, PlacesAreProductsOf128Bits) {
  const uint64_t bits[] = {0, 1, (uint64_t{1} << 53) - 1, 0x123456789ABCDull};
  const uint64_t totals[] = {1, uint64_t{1} << 40, (uint64_t{1} << 63) - 1, 0x7654321FEDCBA987ull};
  for (const uint64_t b : bits)
    for (const uint64_t total : totals)
      EXPECT_EQ(place_of(b, total), uint64_t((static_cast<unsigned __int128>(b) * total) >> 53));
}

TEST(Sample, InfiniteLogitsShareAllProbability) {
  const std::vector<float> logits{1, INFINITY, 2, INFINITY, -INFINITY};
  for (const Sampling& sampling :
       {Sampling{}, Sampling{.temperature = 0.1}, Sampling{.top_k = 3}, Sampling{.top_p = 0.9}}) {
    EXPECT_EQ(sample(logits, sampling, 0.49), 1);
    EXPECT_EQ(sample(logits, sampling, 0.51), 3);
  }
  EXPECT_EQ(sample(logits, {.temperature = 0}, 0.9), 1);
  EXPECT_EQ(sample(logits, {.top_p = 0.5}, 0.9), 1);
}

TEST(Choices, FollowTheHostAndCount) {
  Choices choices(2, 3, Device::cpu());
  choices.restart(7);
  const Tensor logits = Tensor::from(std::vector<float>{0, 1, 2, 3, 2, 1, 0, 0}, {2, 4});
  const Sampling sampling{.temperature = 2};
  for (int64_t i = 0; i < 4; ++i) {  // one more than history holds
    sample(choices, logits, sampling);
    for (int64_t b = 0; b < 2; ++b) {
      const auto row = logits.select(0, b).to_vector<float>();
      const int64_t expected = sample(row, sampling, choice_number(7, uint64_t(i), uint64_t(b)));
      EXPECT_EQ(choices.next.at({b, 0}).item<int64_t>(), expected);
      if (i < 3) EXPECT_EQ(choices.history.at({b, i}).item<int64_t>(), expected);
    }
  }
  EXPECT_EQ(choices.counts.to_vector<int64_t>(), (std::vector<int64_t>{4, 4}));
}

TEST(Choices, AdvanceGivesThePlacesOfTheNewTokens) {
  const Tensor lengths = Tensor::from(std::vector<int32_t>{4, 0}, {2});
  EXPECT_EQ(advance(lengths, 3).to_vector<int32_t>(), (std::vector<int32_t>{4, 5, 6, 0, 1, 2}));
  EXPECT_EQ(lengths.to_vector<int32_t>(), (std::vector<int32_t>{7, 3}));
  const Tensor pairs = Tensor::zeros({2, 2}, DType::i32, Device::cpu());
  expect_error([&] { advance(pairs.select(1, 0), 1); }, {"advance: lengths", "not packed"});
  expect_error([&] { advance(pairs.reshape({4}).slice(0, 0, 1).expand({64}), 1); }, {"not packed"});
}

TEST(Choices, OnTheGpuAreThoseOfTheHost) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const Device gpu = Device::cuda();
  const Sampling samplings[] = {{.temperature = 0},
                                {},
                                {.temperature = 0.3},
                                {.temperature = 5, .top_k = 1},
                                {.top_k = 50},
                                {.top_p = 0.9},
                                {.temperature = 3, .top_p = 0.05},
                                {.temperature = 1.7, .top_k = 40, .top_p = 0.7},
                                {.top_k = 5000000}};
  Rng rng(3);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const int64_t vocabulary : {1, 3, 31, 1023, 1024, 1025, 32000, 50257}) {
      Tensor logits = Tensor::empty({5, vocabulary}, DType::f32, Device::cpu());
      fill_normal(logits, 0, 2.5, rng);
      logits = logits.to(dtype);  // of 16 bits: many equal ones
      if (vocabulary > 3) {
        logits.select(0, 1).fill(0.5);
        logits.select(0, 2).slice(0, 1, vocabulary - 1).fill(-INFINITY);
        logits.select(0, 3).slice(0, 0, vocabulary / 2).fill(-1);
      }
      for (const Sampling& sampling : samplings) {
        const Choices choices(5, 4, gpu);
        choices.restart(11);
        for (int i = 0; i < 4; ++i) sample(choices, logits.to(gpu), sampling);
        gpu.synchronize();
        for (int64_t b = 0; b < 5; ++b) {
          const auto row = logits.to(DType::f32).select(0, b).to_vector<float>();
          for (int64_t i = 0; i < 4; ++i)
            ASSERT_EQ(choices.history.at({b, i}).item<int64_t>(),
                      sample(row, sampling, choice_number(11, uint64_t(i), uint64_t(b))))
                << name_of(dtype) << " V=" << vocabulary << " b=" << b << " i=" << i
                << " T=" << sampling.temperature << " k=" << sampling.top_k << " p=" << sampling.top_p;
        }
        EXPECT_EQ(choices.counts.to_vector<int64_t>(), std::vector<int64_t>(5, 4));
      }
    }
  }
  const Choices choices(2, 1, gpu);
  const Tensor bad =
      Tensor::from(std::vector<float>{0, NAN, 1, -INFINITY, -INFINITY, -INFINITY}, {2, 3}, gpu);
  sample(choices, bad, {});
  gpu.synchronize();
  EXPECT_EQ(choices.history.to_vector<int64_t>(), (std::vector<int64_t>{-1, -1}));
  const Tensor lengths = Tensor::from(std::vector<int32_t>{4, 0}, {2}, gpu);
  EXPECT_EQ(advance(lengths, 3).to_vector<int32_t>(), (std::vector<int32_t>{4, 5, 6, 0, 1, 2}));
  EXPECT_EQ(lengths.to_vector<int32_t>(), (std::vector<int32_t>{7, 3}));
}

}  // namespace
}  // namespace tessera::ops

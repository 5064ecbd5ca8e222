#include "datasets/ngram.h"

#include <gtest/gtest.h>

#include <cmath>

#include "runtime/error.h"
#include "runtime/philox.h"

namespace tessera::datasets {
namespace {

/// Text of a chain: the next token is mostly the last one plus one.
std::vector<int64_t> chain(size_t count, int64_t vocabulary, uint64_t stream) {
  std::vector<int64_t> tokens{0};
  for (size_t i = 1; i < count; ++i) {
    const Uint4 random = philox(9, stream, i);
    tokens.push_back(random.word[0] % 4 ? (tokens.back() + 1) % vocabulary
                                        : int64_t(random.word[1] % uint64_t(vocabulary)));
  }
  return tokens;
}

double loss(const NgramModel& model, const std::vector<int64_t>& tokens) {
  double sum = 0;
  for (size_t i = 0; i < tokens.size(); ++i) sum -= model.log_probability(tokens, i);
  return sum / double(tokens.size());
}

TEST(NgramModel, ProbabilitiesAddUpToOneInEveryContext) {
  constexpr int64_t kTokens = 11;  // of which the text has 9
  for (const int order : {1, 2, 3, 5}) {
    NgramModel model(order, kTokens);
    model.add(chain(500, 9, 1));
    model.add(chain(3, 9, 2));
    model.finish();
    const std::vector<int64_t> contexts = chain(200, kTokens, 3);  // seen ones and others
    for (size_t at = 0; at < contexts.size(); ++at) {
      double total = 0;
      std::vector<int64_t> text(contexts.begin(), contexts.begin() + ptrdiff_t(at) + 1);
      for (int64_t token = 0; token < kTokens; ++token) {
        text[at] = token;
        const double p = std::exp(model.log_probability(text, at));
        EXPECT_GT(p, 0);
        total += p;
      }
      // Sums of a dozen f64 numbers, each rounded some ten times.
      EXPECT_NEAR(total, 1, 1e-13) << "order " << order << " at " << at;
    }
  }
}

TEST(NgramModel, IsTheFormulaOnASmallText) {
  // Bigrams of 0 1 0 1 0 2: (0 1) twice, (1 0) twice, (0 2) once. Counts of counts with one half added:
  // n1 = 1.5, n2 = 2.5, n3 = n4 = 0.5.
  NgramModel model(2, 3);
  model.add(std::vector<int64_t>{0, 1, 0, 1, 0, 2});
  model.finish();
  const double y = 1.5 / (1.5 + 2 * 2.5);
  const double d1 = 1 - 2 * y * 2.5 / 1.5, d2 = 2 - 3 * y * 0.5 / 2.5;
  // Single tokens: how many different tokens stand in front: 0: {1}, 1: {0}, 2: {0}; all are 1.
  const double n1 = 3.5, n2 = 0.5, y1 = n1 / (n1 + 2 * n2), e1 = 1 - 2 * y1 * n2 / n1;
  const double unigram = (1 - e1) / 3 + (3 * e1 / 3) / 3;
  const double given_away = (d1 + d2) / 3;
  const std::vector<int64_t> seen{0, 1}, once{0, 2}, never{0, 0};
  EXPECT_NEAR(std::exp(model.log_probability(seen, 1)), (2 - d2) / 3 + given_away * unigram, 1e-14);
  EXPECT_NEAR(std::exp(model.log_probability(once, 1)), (1 - d1) / 3 + given_away * unigram, 1e-14);
  EXPECT_NEAR(std::exp(model.log_probability(never, 1)), given_away * unigram, 1e-14);
  EXPECT_EQ(model.ngrams(), 6u);
  EXPECT_EQ(model.tokens(), 6u);
}

TEST(NgramModel, LearnsWhatTheTextHas) {
  const auto text = chain(20'000, 20, 4), other = chain(2'000, 20, 5);
  double last = std::log(20.0);
  for (const int order : {1, 2}) {
    NgramModel model(order, 20);
    model.add(text);
    model.finish();
    if (order == 2) {
      EXPECT_LT(loss(model, other), 0.7 * last);
      // The chain's entropy: 0.75 + 0.25/20 for the next number, else 0.25/20 each.
      const double next = 0.75 + 0.25 / 20, rest = 0.25 / 20;
      const double entropy = -next * std::log(next) - 19 * rest * std::log(rest);
      EXPECT_NEAR(loss(model, other), entropy, 0.1);
    }
    last = loss(model, other);
  }
}

TEST(NgramModel, DoesNotReachIntoTheNextStretch) {
  NgramModel together(2, 4), apart(2, 4);
  together.add(std::vector<int64_t>{0, 1, 2, 3});
  apart.add(std::vector<int64_t>{0, 1});
  apart.add(std::vector<int64_t>{2, 3});
  EXPECT_EQ(together.ngrams(), 7u);
  EXPECT_EQ(apart.ngrams(), 6u);
}

TEST(NgramModel, RefusesWhatItCannotDo) {
  EXPECT_THROW(NgramModel(0, 5), Error);
  EXPECT_THROW(NgramModel(17, 5), Error);
  EXPECT_THROW(NgramModel(2, 0), Error);
  NgramModel model(2, 5);
  EXPECT_THROW(model.add(std::vector<int64_t>{5}), Error);
  EXPECT_THROW(model.add(std::vector<int64_t>{-1}), Error);
  EXPECT_THROW(model.log_probability(std::vector<int64_t>{1}, 0), Error);
  model.finish();
  EXPECT_THROW(model.add(std::vector<int64_t>{1}), Error);
  EXPECT_THROW(model.finish(), Error);
  // Nothing was counted: every token is as likely.
  EXPECT_NEAR(model.log_probability(std::vector<int64_t>{1}, 0), -std::log(5.0), 1e-15);
}

}  // namespace
}  // namespace tessera::datasets

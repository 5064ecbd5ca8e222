#include "eval/choice.h"

#include <gtest/gtest.h>

#include "io/file.h"
#include "models/gpt.h"
#include "tests/folder.h"
#include "tests/io/files.h"
#include "tests/models/small_models.h"

// Multiple choice by log-likelihood.

namespace tessera::eval {
namespace {

using io::test::throws;

/// A token per byte, "ab" as one.
std::vector<int64_t> pairs(const std::string& text) {
  std::vector<int64_t> tokens;
  for (size_t i = 0; i < text.size(); ++i)
    if (text.substr(i, 2) == "ab")
      tokens.push_back(0), ++i;
    else
      tokens.push_back(int64_t(text[i]));
  return tokens;
}

TEST(Choice, TheChoiceBeginsWhereTheTokensDiffer) {
  const ChoiceItem item{.context = "xy ", .choices = {"abc", "b"}, .answer = 0};
  const ChoiceText text = choice_text(item, 0, pairs, 100, {});
  EXPECT_EQ(text.tokens, (std::vector<int64_t>{'x', 'y', ' ', 0, 'c'}));
  EXPECT_EQ(text.first, 2);  // with the blank
  EXPECT_EQ(text.bytes, 3);
  // "a" and "b" are one token together: it is part of the choice.
  const ChoiceText joined = choice_text({.context = "xa", .choices = {"b"}}, 0, pairs, 100, {});
  EXPECT_EQ(joined.tokens, (std::vector<int64_t>{'x', 0}));
  EXPECT_EQ(joined.first, 1);
  const ChoiceText begun = choice_text({.context = "", .choices = {"q"}}, 0, pairs, 100, 7);
  EXPECT_EQ(begun.tokens, (std::vector<int64_t>{7, 'q'}));
  EXPECT_EQ(begun.first, 1);
  EXPECT_TRUE(
      throws([] { choice_text({.context = "", .choices = {"q"}}, 0, pairs, 100, {}); }, "bos_token_id"));
  // Of five tokens with the choice's two, four may be run: the last is never run.
  EXPECT_EQ(choice_text({.context = "vwx", .choices = {"yz"}}, 0, pairs, 4, {}).tokens.size(), 5u);
  const ChoiceText cut = choice_text({.context = "vwx", .choices = {"yz"}}, 0, pairs, 2, {});
  EXPECT_EQ(cut.tokens, (std::vector<int64_t>{'x', 'y', 'z'}));
  EXPECT_EQ(cut.first, 1);
  EXPECT_TRUE(
      throws([] { choice_text({.context = "vwx", .choices = {"yz"}}, 0, pairs, 1, {}); }, "does not fit"));
}

TEST(Choice, ScoresAreLogLikelihoods) {
  Rng rng(1);
  const models::Gpt model(models::small_gpt(), rng, kCpu);
  const std::vector<ChoiceText> texts{{{1, 2, 3, 4}, 2, 5}, {{1, 2, 6}, 2, 1}};
  const ChoiceScores scores = score_choices(model, texts, kCpu);
  const NoTape no_tape;
  const auto log_likelihood = [&](const std::vector<int64_t>& tokens, size_t first) {
    double sum = 0;
    for (size_t i = first; i < tokens.size(); ++i) {
      const std::vector<int64_t> seen(tokens.begin(), tokens.begin() + std::ptrdiff_t(i));
      const Tensor logits = model(models::tokens_of(seen, {1, int64_t(i)}));
      double all = 0;
      for (int64_t v = 0; v < 19; ++v) all += std::exp(logits.at({0, int64_t(i) - 1, v}).item());
      sum += logits.at({0, int64_t(i) - 1, tokens[i]}).item() - std::log(all);
    }
    return sum;
  };
  for (size_t i = 0; i < texts.size(); ++i) {
    EXPECT_NEAR(scores.sums[i], log_likelihood(texts[i].tokens, size_t(texts[i].first)), 1e-9);
    EXPECT_NEAR(scores.per_byte[i], scores.sums[i] / double(texts[i].bytes), 1e-12);
  }
  EXPECT_EQ(best_choice({-2, -1, -1}), 1);
}

TEST(Choice, IntervalsAreWilsons) {
  // 81 of 263, an example of Newcombe, Statistics in Medicine 17, 1998: 0.2553 to 0.3662.
  const Accuracy accuracy{.items = 263, .right = 81};
  EXPECT_NEAR(accuracy.low(), 0.2553, 5e-5);
  EXPECT_NEAR(accuracy.high(), 0.3662, 5e-5);
  EXPECT_EQ((Accuracy{.items = 5, .right = 5}.high()), 1);
  EXPECT_GT((Accuracy{.items = 5, .right = 5}.low()), 0.5);
  EXPECT_EQ((Accuracy{}.low()), 0);
  for (int64_t items = 1; items < 100; ++items) {
    EXPECT_EQ((Accuracy{.items = items, .right = 0}.low()), 0) << items;
    EXPECT_EQ((Accuracy{.items = items, .right = items}.high()), 1) << items;
  }
}

TEST(Choice, ReadersNameTheLine) {
  const TemporaryFolder folder;
  const auto read = [&](const std::string& text) {
    io::write_file(folder / "f", text);
    return read_choices(folder / "f");
  };
  const std::string good = R"({"context": "a", "choices": ["b", "c"], "answer": 1, "id": 7})";
  const auto items = read(good + "\n\n" + good + "\r\n");
  ASSERT_EQ(items.size(), 2u);
  EXPECT_EQ(items[1].answer, 1);
  for (const auto& [line, says] : std::initializer_list<std::pair<const char*, const char*>>{
           {"x", "is not valid JSON at byte 1"},
           {"[]", "is not a JSON object"},
           {R"({"context": "a", "choices": ["b", "c"], "answer": 1, "answer": 0})",
            "\"answer\" occurs twice"},
           {R"({"choices": ["b", "c"], "answer": 1})", "no text \"context\""},
           {R"({"context": 3, "choices": ["b", "c"], "answer": 1})", "no text \"context\""},
           {R"({"context": "a", "choices": ["b"], "answer": 0})", "two or more"},
           {R"({"context": "a", "choices": "bc", "answer": 0})", "two or more"},
           {R"({"context": "a", "choices": ["b", ""], "answer": 0})", "empty"},
           {R"({"context": "a", "choices": ["b", 2], "answer": 0})", "not a string"},
           {R"({"context": "a", "choices": ["b", "c"]})", "\"answer\""},
           {R"({"context": "a", "choices": ["b", "c"], "answer": 2})", "2 of 2 choices"},
           {R"({"context": "a", "choices": ["b", "c"], "answer": -1})", "-1"},
           {R"({"context": "a", "choices": ["b", "c"], "answer": "b"})", "whole number"}})
    EXPECT_TRUE(throws([&, line = line] { read(good + "\n" + line + "\n"); }, says)) << line;
  EXPECT_TRUE(throws([&] { read(good + "\nx\n"); }, "line 2"));
  EXPECT_TRUE(throws([&] { read("\n\n"); }, "no items"));
}

}  // namespace
}  // namespace tessera::eval

#include "train/held_out.h"

#include <gtest/gtest.h>

#include "datasets/ngram.h"
#include "tests/train/small_language.h"

namespace tessera::train {
namespace {

/// The text of a stretch's targets, and of what stands before them.
std::pair<std::string, std::string> text_of(const LanguageData& data, const HeldOut::Stretch& stretch) {
  const std::vector<int32_t> tokens(stretch.tokens.begin(), stretch.tokens.end());
  const auto decode = [&](auto begin, auto end) { return data.tokenizer().decode(std::vector(begin, end)); };
  return {decode(tokens.begin() + stretch.first, tokens.end()),
          decode(tokens.begin(), tokens.begin() + stretch.first)};
}

TEST(HeldOut, IsEachDocumentBehindItsTrainingPart) {
  const TemporaryFolder root;
  const LanguageData data = small_language_data(root);
  const HeldOut all = held_out(data, 1 << 20);
  EXPECT_TRUE(all.continued);
  EXPECT_EQ(all.targets, int64_t(data.validation()->tokens())) << "the first of a document, too";
  ASSERT_EQ(all.stretches.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    const std::string whole = language_text(i == 0 ? 60 : 9);
    const auto [targets, before] = text_of(data, all.stretches[i]);
    EXPECT_EQ(before.size(), 16u);
    EXPECT_GT(targets.size(), 20u);
    EXPECT_TRUE(whole.ends_with(before + targets)) << before;
    EXPECT_EQ(all.stretches[i].tokens.back(), *data.tokenizer().special().eos);
  }
  EXPECT_EQ(target_text(data, all).size(), size_t(all.targets) - 2);  // bytes are tokens, but for the ends
  const HeldOut few = held_out(data, 50);
  ASSERT_EQ(few.stretches.size(), 1u);
  EXPECT_EQ(few.targets, 50);
  EXPECT_EQ(few.stretches[0].tokens.size(), 66u);
}

TEST(HeldOut, ADocumentWithoutATrainingOrHeldOutPartMovesNoOther) {
  const TemporaryFolder root;
  std::ofstream(root / "a.txt") << language_text(60);
  std::ofstream(root / "b.txt") << "short\n";  // nothing of it is held out
  std::ofstream(root / "c.txt") << language_text(50);
  const std::string folder = root / "data";
  const datasets::Tokenized done =
      write_language_data({.files = {root / "a.txt", root / "b.txt", root / "c.txt"},
                           .tokenizer = {},
                           .kind = "byte",
                           .validation = 0.2},
                          folder);
  EXPECT_EQ(done.train.documents, 3u);
  EXPECT_EQ(done.validation.documents, 3u);
  EXPECT_EQ(done.validation.empty_documents, 1u);
  const LanguageData data(folder, folder, 16, false);
  const HeldOut all = held_out(data, 1 << 20);
  EXPECT_TRUE(all.continued);
  ASSERT_EQ(all.stretches.size(), 2u);
  const auto [targets, before] = text_of(data, all.stretches[1]);
  EXPECT_NE(language_text(50).find(before + targets.substr(0, 40)), std::string::npos) << before;
}

TEST(HeldOut, WithoutAKnownTrainingPartIsTheWholeOrDocumentsApart) {
  const TemporaryFolder root;
  small_language_data(root);
  const std::string folder = root / "data";
  // Shards of another text stand for the training part: how they belong together is not known.
  const std::string other = root / "other";
  write_language_data({.files = {root / "a.txt"}, .tokenizer = {}, .kind = "byte"}, other);
  std::filesystem::copy_file(other + "/train-00000.tokens", folder + "/train-00000.tokens",
                             std::filesystem::copy_options::overwrite_existing);
  const LanguageData together(folder, folder, 16, false), apart(folder, folder, 16, true);
  const int64_t tokens = int64_t(together.validation()->tokens());
  const HeldOut one = held_out(together, 1 << 20), two = held_out(apart, 1 << 20);
  EXPECT_FALSE(one.continued);
  ASSERT_EQ(one.stretches.size(), 1u);
  EXPECT_EQ(one.targets, tokens - 1) << "nothing stands before the first";
  EXPECT_FALSE(two.continued);
  ASSERT_EQ(two.stretches.size(), 2u);
  EXPECT_EQ(two.targets, tokens - 2);
  EXPECT_EQ(held_out(apart, tokens - 3).targets, tokens - 3);
}

TEST(NgramBaseline, IsOfTheTargetsThatTheModelIsEvaluatedOn) {
  const TemporaryFolder root;
  const LanguageData data = small_language_data(root);
  const HeldOut part = held_out(data, 50);
  const NgramBaseline all = ngram_baseline(data, 5, part, 1 << 20), few = ngram_baseline(data, 5, part, 100);
  EXPECT_EQ(all.trained, data.train().tokens());
  EXPECT_EQ(few.trained, 100u);
  EXPECT_LT(all.nll, few.nll);
  EXPECT_GT(all.nll, 0);
  // The mean of what each target costs after the text before it.
  datasets::NgramModel model(5, data.tokenizer().vocab_size());
  model.add(read_tokens(data.train(), 0, data.train().tokens()));
  model.finish();
  double nll = 0;
  for (size_t at = 16; at < 66; ++at) nll -= model.log_probability(part.stretches[0].tokens, at);
  EXPECT_DOUBLE_EQ(all.nll, nll / 50);
}

TEST(NgramBaseline, KeepsDocumentsApartWhereTheModelDoes) {
  const TemporaryFolder root;
  const LanguageData together = small_language_data(root), apart = small_language_data(root, true);
  const HeldOut all = held_out(together, 1 << 20);
  EXPECT_NE(ngram_baseline(together, 3, all, 1 << 20).nll, ngram_baseline(apart, 3, all, 1 << 20).nll);
}

}  // namespace
}  // namespace tessera::train

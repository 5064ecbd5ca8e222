#include "train/mlm_job.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "io/checkpoint_folder.h"
#include "io/tokenizer/train.h"
#include "tests/errors.h"
#include "tests/folder.h"
#include "tests/train/measured_peak.h"
#include "train/trainer.h"

namespace tessera::train {
namespace {

using nlohmann::json;

/// Sentences of which a word follows from those around it.
std::string sample_text(int sentences) {
  const char* const things[] = {"cat", "dog", "bird", "fish"};
  const char* const places[] = {"house", "yard", "tree", "lake"};
  std::string text;
  for (int i = 0; i < sentences; ++i)
    text += std::string("the ") + things[i % 4] + " is in the " + places[i % 4] + " and the " +
            things[i % 4] + " likes the " + places[i % 4] + "\n";
  return text;
}

/// Shards and tokenizer of that text.
struct Text {
  explicit Text(int sentences = 400, double validation = 0.1) {
    put(folder / "text", sample_text(sentences));
    write_language_data(
        {.files = {folder / "text"}, .kind = "bert", .vocab_size = 300, .validation = validation}, path());
  }
  std::string path() const { return folder / "data"; }
  LanguageData data(int64_t length) const { return {path(), path(), length, false, length}; }
  TemporaryFolder folder;
};

MlmSettings small_settings(const LanguageData& data) {
  MlmSettings settings;
  settings.bert = {.vocabulary = data.tokenizer().vocab_size(),
                   .positions = 32,
                   .d_model = 32,
                   .d_ff = 64,
                   .heads = 2,
                   .layers = 1,
                   .hidden_dropout = 0.1,
                   .head = models::BertHead::masked_lm};
  settings.fingerprint = data.tokenizer().fingerprint();
  settings.batch = 8, settings.max_length = data.length() + 2, settings.steps = 6, settings.warmup = 0;
  settings.lr = 3e-3;
  return settings;
}

TEST(MlmSettings, ComeBackFromJsonExactly) {
  const Text text;
  MlmSettings settings = small_settings(text.data(14));
  settings.mask = 0.25, settings.seed = 7;
  const MlmSettings back = job_settings<MlmSettings>(json::parse(to_json(settings).dump()));
  EXPECT_EQ(to_json(back), to_json(settings));
  const json good = to_json(settings);
  for (const auto& [name, value] : good.items()) {
    json missing = good;
    missing.erase(name);
    if (name == "optimizer" || name == "momentum" || name == "f32_math" || name == "data_order")
      continue;  // newer than other runs
    EXPECT_NE(message_of([&] { job_settings<MlmSettings>(missing); }).find("\"" + name + "\""),
              std::string::npos)
        << name;
  }
  MlmSettings bad = settings;
  bad.max_length = 33;
  EXPECT_NE(message_of([&] { bad.validate(); }).find("positions for 32"), std::string::npos);
}

TEST(MlmSettings, PlanWhatAStepTakes) {
  const Text text;
  const LanguageData data = text.data(62);
  for (const int64_t layers : {2, 3}) {
    MlmSettings settings = small_settings(data);
    settings.bert.positions = 64, settings.bert.d_model = 128, settings.bert.d_ff = 512;
    settings.bert.layers = layers, settings.batch = 64;
    settings.mask = 32.0 / 62;  // 2,048 rows: tensors that the allocator does not round
    const size_t before = Device::cpu().allocator().stats().allocated;
    MlmJob job(settings, Device::cpu(), data, 64, {}, false);
    job.batch(0);
    const double planned = settings.planned(Device::cpu()).total(), took = measured_peak(job, before);
    EXPECT_NEAR(planned / took, 1, 0.03) << layers << " blocks: planned " << planned << ", took " << took;
  }
}

TEST(Masking, EveryTextHasItsShareAndTheKindsAreEightyTenTen) {
  const Text text;
  const io::Tokenizer tokenizer = io::Tokenizer::load(text.path());
  const Masking masking(tokenizer, 0.15);
  EXPECT_EQ(masked_tokens(126, 0.15), 19);
  EXPECT_EQ(masked_tokens(1, 0.15), 1);
  const int64_t mask = *tokenizer.special().mask;
  std::vector<std::vector<int64_t>> texts(64, std::vector<int64_t>(126));
  for (size_t i = 0; i < texts.size(); ++i)
    for (size_t t = 0; t < 126; ++t) texts[i][t] = 5 + int64_t((i * 126 + t) % 256);
  int64_t masked = 0, kept = 0, other = 0;
  std::map<int64_t, int64_t> places;
  for (uint64_t index = 0; index < 40; ++index) {
    const MaskedBatch batch = masking.batch(texts, 3, index);
    ASSERT_EQ(batch.tokens.size(), 64u * 128);
    ASSERT_EQ(batch.rows.size(), 64u * 19);
    ASSERT_TRUE(std::ranges::is_sorted(batch.rows));
    ASSERT_EQ(std::set<int64_t>(batch.rows.begin(), batch.rows.end()).size(), batch.rows.size());
    for (size_t i = 0; i < batch.rows.size(); ++i) {
      const int64_t row = batch.rows[i], token = batch.tokens[size_t(row)], in_text = row % 128 - 1;
      ASSERT_EQ(batch.targets[i], texts[size_t(row / 128)][size_t(in_text)]);
      ASSERT_EQ(row / 128, int64_t(i / 19));  // so many of each text
      places[in_text] += 1;
      token == mask ? ++masked : token == batch.targets[i] ? ++kept : ++other;
      ASSERT_TRUE(token == mask || !tokenizer.is_special(int32_t(token)));
    }
  }
  // Of n = 48,640 draws a share p is off by less than 5 sqrt(p (1 - p) / n) but once in two million times.
  const double n = double(masked + kept + other);
  const auto near = [&](double count, double p) {
    EXPECT_LT(std::abs(count / n - p), 5 * std::sqrt(p * (1 - p) / n)) << count;
  };
  near(double(masked), 0.8);
  near(double(kept), 0.1 + 0.1 / double(tokenizer.vocab_size() - 5));  // another token may be the same
  near(double(other), 0.1 - 0.1 / double(tokenizer.vocab_size() - 5));
  // Every place is chosen about as often: 386 times each, deviation 18.
  EXPECT_EQ(places.size(), 126u);
  for (const auto& [place, count] : places) EXPECT_NEAR(double(count), n / 126, 110) << place;
}

TEST(Masking, IsAPureFunctionOfTextsSeedAndIndex) {
  const Text text;
  const io::Tokenizer tokenizer = io::Tokenizer::load(text.path());
  const Masking masking(tokenizer, 0.3);
  const std::vector<std::vector<int64_t>> texts = {{10, 11, 12, 13, 14, 15, 16}, {20, 21, 22}};
  const MaskedBatch a = masking.batch(texts, 1, 5), b = masking.batch(texts, 1, 5);
  EXPECT_EQ(a.tokens, b.tokens);
  EXPECT_EQ(a.rows, b.rows);
  EXPECT_EQ(a.lengths, (std::vector<int64_t>{9, 5}));
  EXPECT_EQ(a.rows.size(), 3u);
  int different = 0;
  for (uint64_t index = 6; index < 16; ++index) different += masking.batch(texts, 1, index).rows != a.rows;
  for (uint64_t seed = 2; seed < 12; ++seed) different += masking.batch(texts, seed, 5).rows != a.rows;
  EXPECT_GT(different, 15);
  // Not those of a neighbouring row of a neighbouring seed either.
  const std::vector<std::vector<int64_t>> equal(4, std::vector<int64_t>(100, 10));
  std::set<std::vector<int64_t>> places;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    const MaskedBatch batch = masking.batch(equal, seed, 5);
    for (ptrdiff_t row = 0; row < 4; ++row) {
      std::vector<int64_t> own(batch.rows.begin() + 30 * row, batch.rows.begin() + 30 * (row + 1));
      for (int64_t& place : own) place -= 102 * row;
      places.insert(own);
    }
  }
  EXPECT_EQ(places.size(), 16u);
  const std::string bytes = io::byte_tokenizer();
  EXPECT_NE(message_of([&] { Masking(io::Tokenizer::parse("bytes", bytes), 0.15); }).find("[MASK]"),
            std::string::npos);
}

struct Trained {
  Values values;
  std::vector<StepRecord> records;
};

Trained train_mlm(const MlmSettings& settings, const LanguageData& data, const RunFolder& run, int64_t steps,
                  int64_t first = 0) {
  MlmJob job(settings, Device::cpu(), data, 1 << 18, "");
  if (first > 0) job.restore(io::CheckpointFolder(run.checkpoints().string()).file_of(first));
  report::Progress quiet(report::Progress::Mode::quiet);
  const TrainResult result =
      train(job, run, {.steps = steps, .log_every = 1, .eval_every = 3, .schedule = settings.make_schedule()},
            first, quiet);
  return {result.evaluation, run.metrics()};
}

TEST(MlmJob, LearnsWordsFromThoseAroundThem) {
  const Text text;
  const LanguageData data = text.data(22);
  MlmSettings settings = small_settings(data);
  settings.steps = 400, settings.batch = 16, settings.bert.hidden_dropout = 0;
  settings.bert.init_deviation = 0.1;  // 0.02 is for widths near 1,000
  const TemporaryFolder root;
  const Trained trained = train_mlm(settings, data, RunFolder::create(root.path(), "run"), settings.steps);
  EXPECT_GT(trained.records.front().values.at("loss"), 0.8 * std::log(double(settings.bert.vocabulary)));
  // Without the words around it, a token can be told no better than by the entropy of single tokens.
  std::map<int64_t, double> counts;
  const auto tokens = read_tokens(data.train(), 0, data.train().tokens());
  for (const int64_t token : tokens) counts[token] += 1;
  double entropy = 0;
  for (const auto& [token, count] : counts)
    entropy -= count / double(tokens.size()) * std::log(count / double(tokens.size()));
  EXPECT_LT(trained.values.at("eval_nll"), entropy - 0.2);
  EXPECT_GT(trained.values.at("eval_accuracy"), 0.3);
}

TEST(MlmJob, AResumedRunContinuesToTheSameBits) {
  const Text text;
  const LanguageData data = text.data(14);
  const MlmSettings settings = small_settings(data);
  const TemporaryFolder root;
  const RunFolder whole = RunFolder::create(root.path(), "whole"),
                  parts = RunFolder::create(root.path(), "parts");
  train_mlm(settings, data, whole, 6);
  train_mlm(settings, data, parts, 3);
  train_mlm(settings, data, parts, 6, 3);
  const auto file = [](const RunFolder& run) {
    return get(io::CheckpointFolder(run.checkpoints().string()).file_of(6));
  };
  EXPECT_EQ(file(whole), file(parts));
  EXPECT_EQ(whole.metrics().back().values.at("eval_nll"), parts.metrics().back().values.at("eval_nll"));
}

TEST(MlmJob, IsEvaluatedOnTheSameMaskedTokensWhateverItsSeed) {
  const Text text;
  const LanguageData data = text.data(14);
  MlmSettings settings = small_settings(data);
  MlmJob job(settings, Device::cpu(), data, 1 << 18, "");
  const Values first = job.evaluate();
  EXPECT_EQ(job.evaluate(), first);
  EXPECT_EQ(first.size(), 2u);
  MlmSettings pairs = settings;
  pairs.batch = 2;
  const Values by_pairs = MlmJob(pairs, Device::cpu(), data, 1 << 18, "").evaluate();
  EXPECT_EQ(by_pairs.at("eval_accuracy"), first.at("eval_accuracy"));
  EXPECT_NEAR(by_pairs.at("eval_nll"), first.at("eval_nll"), 1e-6);
  EXPECT_NEAR(first.at("eval_nll"), std::log(double(settings.bert.vocabulary)), 0.5);
  EXPECT_EQ(job.held_out().size(), size_t(data.validation()->tokens() / 14));
  EXPECT_EQ(MlmJob(settings, Device::cpu(), data, 30, "").held_out().size(), 2u);
  settings.batch = 5000;
  EXPECT_NE(message_of([&] { MlmJob(settings, Device::cpu(), data, 30, ""); }).find("--batch-size"),
            std::string::npos);
}

TEST(MlmJob, ARunOfBeforeGoesOnWithItsOwnOrdersAndMasks) {
  const Text text;
  const LanguageData data = text.data(14);
  MlmSettings settings = small_settings(data);
  settings.bert.hidden_dropout = 0;
  MlmSettings before = settings;
  before.data_order = 1;
  MlmJob job(settings, Device::cpu(), data, 1 << 18, ""), old(before, Device::cpu(), data, 1 << 18, "");
  EXPECT_NE(job.evaluate(), old.evaluate());
  const NoTape off;
  const auto loss = [](MlmJob& of, uint64_t index) { return of.batch(index), of.loss().item<double>(); };
  EXPECT_NE(loss(job, 0), loss(old, 0));  // of the same texts
}

TEST(MlmJob, WithoutAValidationPartThereIsNothingToEvaluate) {
  const Text text(100, 0);
  const LanguageData data = text.data(14);
  MlmJob job(small_settings(data), Device::cpu(), data, 1 << 18, "");
  EXPECT_FALSE(job.info().evaluates);
}

}  // namespace
}  // namespace tessera::train

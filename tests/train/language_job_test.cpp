#include "train/language_job.h"

#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <csignal>
#include <nlohmann/json.hpp>

#include "autograd/tape.h"
#include "datasets/ngram.h"
#include "io/checkpoint_folder.h"
#include "io/file.h"
#include "io/tokenizer/train.h"
#include "pretrained/load.h"
#include "runtime/allocator.h"
#include "runtime/interrupt.h"
#include "tests/errors.h"
#include "tests/folder.h"
#include "train/step.h"

namespace tessera::train {
namespace {

using nlohmann::json;

LanguageSettings small_job(bool llama = false) {
  LanguageSettings job;
  if (llama)
    job.model = models::LlamaConfig{.vocabulary = 257,
                                    .positions = 16,
                                    .d_model = 16,
                                    .d_ff = 20,
                                    .heads = 4,
                                    .kv_heads = 2,
                                    .layers = 2};
  else
    job.model = models::GptConfig{
        .vocabulary = 257, .positions = 16, .d_model = 16, .d_ff = 24, .heads = 2, .layers = 2};
  job.length = 16, job.batch = 2, job.steps = 20, job.warmup = 2;
  return job;
}

std::string some_text(int lines) {
  std::string text;
  for (int i = 0; i < lines; ++i) text += "line " + std::to_string(i * 7 % 23) + " is free, as in speech\n";
  return text;
}

/// Byte tokens of two texts, the second short.
LanguageData small_data(const TemporaryFolder& root, bool documents = false) {
  const std::string folder = root / "data";
  if (!std::filesystem::exists(folder)) {
    std::ofstream(root / "a.txt") << some_text(60);
    std::ofstream(root / "b.txt") << some_text(9);
    write_language_data(
        {.files = {root / "a.txt", root / "b.txt"}, .tokenizer = {}, .kind = "byte", .validation = 0.2},
        folder);
  }
  return LanguageData(folder, folder, 16, documents);
}

/// Nats a token of all of them but the first.
double loss_of(LanguageJob& session, std::span<const int64_t> tokens) {
  return session.measure(std::vector<eval::PerplexityWindow>{{tokens, 1}}).nats;
}

datasets::TokenBatch batch_of(const LanguageData& data, std::vector<int64_t> windows) {
  return data.train().batch(windows);
}

TEST(LanguageSettings, ComesBackFromJsonExactly) {
  for (const bool llama : {false, true}) {
    LanguageSettings job = small_job(llama);
    job.lr = 0.1, job.seed = (uint64_t(1) << 62) + 1, job.documents = true, job.beta2 = 0.987654321;
    std::visit([](auto& model) { model.dtype = DType::bf16; }, job.model);
    const json out = json::parse(to_json(job).dump());
    const LanguageSettings back = language_settings_from_json(out);
    EXPECT_EQ(to_json(back), to_json(job));
    EXPECT_EQ(back.is_llama(), llama);
    EXPECT_EQ(back.dtype(), DType::bf16);
  }
}

TEST(LanguageSettings, EverySettingMustBeThereAndOfItsType) {
  const json good = to_json(small_job());
  for (const auto& [name, value] : good.items()) {
    json missing = good;
    missing.erase(name);
    if (name == "data_order") {  // newer than other runs
      EXPECT_EQ(language_settings_from_json(missing).data_order, 1);
      missing[name] = datasets::kDataOrder + 1;
    }
    EXPECT_NE(message_of([&] {
                language_settings_from_json(missing);
              }).find(name == "data_order" ? "this build knows" : "\"" + name + "\" is missing"),
              std::string::npos);
    if (name == "model") continue;
    json bad = good;
    bad[name] = value.is_string() ? json(1) : json("1");
    EXPECT_NE(message_of([&] { language_settings_from_json(bad); }).find("\"" + name + "\""),
              std::string::npos);
  }
  json extra = good;
  extra["colour"] = 1;
  EXPECT_NE(message_of([&] { language_settings_from_json(extra); }).find("\"colour\""), std::string::npos);
}

TEST(LanguageSettings, SaysWhatDoesNotFit) {
  const auto refuses = [](auto&& change, const char* part) {
    LanguageSettings job = small_job();
    change(job);
    EXPECT_NE(message_of([&] { job.validate(); }).find(part), std::string::npos)
        << part << " in: " << message_of([&] { job.validate(); });
  };
  refuses([](LanguageSettings& job) { job.length = 17; }, "17");
  refuses([](LanguageSettings& job) { job.batch = 0; }, "batch");
  refuses([](LanguageSettings& job) { job.accumulate = 0; }, "accumulate");
  refuses([](LanguageSettings& job) { job.lr = 0; }, "lr");
  refuses([](LanguageSettings& job) { job.galore_scale = 0; },
          "galore_scale (--galore-scale) is 0; expected 1e-06 to");
  refuses([](LanguageSettings& job) { job.min_lr_ratio = 2; }, "min_lr_ratio");
  refuses([](LanguageSettings& job) { job.beta2 = 1; }, "beta2");
  refuses([](LanguageSettings& job) { job.schedule = "spiral"; }, "spiral");
  refuses([](LanguageSettings& job) { job.ema = 1; }, "ema (--ema) is 1");
  refuses([](LanguageSettings& job) { job.ema = -0.5; }, "ema (--ema) is -0.5");
  refuses([](LanguageSettings& job) { job.dropout = 1; }, "dropout (--dropout) is 1");
  EXPECT_EQ(message_of([] { small_job().validate(); }), "");
}

/// Which elements are dropped depends on the seed alone, not on how many numbers the first weights took.
TEST(LanguageJob, DropsTheSameElementsWithWeightsThatWereLoaded) {
  const TemporaryFolder root;
  const LanguageData data = small_data(root);
  LanguageSettings job = small_job();
  std::get<models::GptConfig>(job.model).residual_dropout = 0.5;
  LanguageJob drawn(job, Device::cpu());
  const std::string folder = root / "weights";
  drawn.save(folder);
  LanguageJob loaded(job, Device::cpu(), folder);
  std::vector<float> losses;
  for (LanguageJob* const session : {&drawn, &loaded, &drawn}) {
    session->load(batch_of(data, {0, 1}));
    losses.push_back(session->loss().item());
  }
  EXPECT_EQ(losses[0], losses[1]);
  EXPECT_NE(losses[0], losses[2]);  // the next masks are others
}

/// A model of another depth meets the same batches, and another dropout leaves the first weights alone.
TEST(LanguageJob, InitialisationDataAndDropoutShareNoRandomNumbers) {
  const TemporaryFolder root;
  const LanguageData data = small_data(root);
  const auto first_batch = [&](auto change) {
    LanguageSettings job = small_job();
    change(std::get<models::GptConfig>(job.model));
    LanguageJob session(job, Device::cpu());
    session.set_data(data, {.ngram = 0}, {}, {});
    session.batch(0);
    const io::Checkpoint state = session.checkpoint(0);
    return std::tuple(state.get<Rng>("rng").state(),
                      state.get<Tensor>("model.blocks.0.mlp.up.weight").to_vector<float>());
  };
  const auto plain = first_batch([](auto&) {});
  const auto deep = first_batch([](models::GptConfig& config) { config.layers = 5; });
  const auto dropping = first_batch([](models::GptConfig& config) { config.residual_dropout = 0.5; });
  EXPECT_EQ(std::get<0>(plain), std::get<0>(deep));
  EXPECT_EQ(std::get<0>(plain), std::get<0>(dropping));
  EXPECT_EQ(std::get<1>(plain), std::get<1>(dropping));
  EXPECT_EQ(std::get<1>(plain), std::get<1>(deep));
}

TEST(LanguageSizes, AreThoseOfThePapers) {
  // 124M (Radford et al. counted 117M without what is tied twice), and 6.7B.
  LanguageConfig small = models::GptConfig{}, large = models::LlamaConfig{};
  apply_size(small, "small");
  apply_size(large, "7b");
  EXPECT_EQ(plan::count_parameters(small), 124'439'808);
  EXPECT_EQ(plan::count_parameters(large), 6'738'415'616);
}

TEST(LanguageData, PartsOfEachTextAndATokenizerThatHasSeenTheFirstOnly) {
  const TemporaryFolder root;
  const LanguageData data = small_data(root);
  ASSERT_NE(data.validation(), nullptr);
  const uint64_t bytes = some_text(60).size() + some_text(9).size();
  EXPECT_EQ(data.train().tokens() + data.validation()->tokens(), bytes + 4);  // two ends in each part
  const auto begins = document_begins(data.train(), 0, data.train().tokens());
  ASSERT_EQ(begins.size(), 2u);
  EXPECT_EQ(begins[0], 0u);
  const auto tokens = read_tokens(data.train(), begins[1] - 1, begins[1] + 1);
  EXPECT_EQ(tokens[0], *data.tokenizer().special().eos);
  // A character that stands in the held-out part alone is no token of its own.
  const std::string own = root / "own";
  std::ofstream(root / "c.txt") << "abc abc abc abc\nabc abc\nabc xyz\n";
  write_language_data({.files = {root / "c.txt"}, .tokenizer = {}, .validation = 0.3}, own);
  EXPECT_TRUE(io::Tokenizer::load(own).id_of("a").has_value());
  EXPECT_FALSE(io::Tokenizer::load(own).id_of("x").has_value());
  EXPECT_EQ(io::Tokenizer::load(own).decode(io::Tokenizer::load(own).encode("x").ids), "x");
}

TEST(LanguageData, RefusesShardsOfAnotherTokenizer) {
  const TemporaryFolder root;
  small_data(root);
  const std::string other = root / "other";
  write_language_data({.files = {root / "a.txt"}, .tokenizer = {}}, other);
  const std::string error = message_of([&] { LanguageData(root / "data", other, 16, false); });
  EXPECT_NE(error.find("fingerprint"), std::string::npos) << error;
}

TEST(LanguageData, RefusesATokenizerWithAnotherEndToken) {
  const TemporaryFolder root;
  put(root / "t.json", io::byte_tokenizer({"<|endoftext|>", "<end>"}));
  std::ofstream(root / "a.txt") << some_text(60);
  write_language_data({.files = {root / "a.txt"}, .tokenizer = root / "t.json"}, root / "data");
  put(root / "data/tokenizer_config.json", R"({"eos_token": "<end>"})");
  const std::string error = message_of([&] { small_data(root); });
  EXPECT_NE(error.find("end with token 0"), std::string::npos) << error;
  EXPECT_NE(
      error.find("tokenizer.json is " + std::to_string(*io::Tokenizer::load(root / "data").special().eos)),
      std::string::npos)
      << error;
}

TEST(LanguageData, ComesFromTheModelsTokenizerIfNoneLiesNextToTheShards) {
  const TemporaryFolder root;
  small_data(root);
  const std::string data = root / "data", model = root / "model";
  copy_tokenizer(data, model);
  EXPECT_EQ(tokenizer_folder(data, model), data);
  std::filesystem::remove(root / "data/tokenizer.json");
  EXPECT_EQ(tokenizer_folder(data, model), model);
  EXPECT_EQ(tokenizer_folder(data, ""), data);
}

/// The text of a stretch's targets, and of what stands before them.
std::pair<std::string, std::string> text_of(const LanguageData& data, const HeldOut::Stretch& stretch) {
  const std::vector<int32_t> tokens(stretch.tokens.begin(), stretch.tokens.end());
  const auto decode = [&](auto begin, auto end) { return data.tokenizer().decode(std::vector(begin, end)); };
  return {decode(tokens.begin() + stretch.first, tokens.end()),
          decode(tokens.begin(), tokens.begin() + stretch.first)};
}

TEST(HeldOut, IsEachDocumentBehindItsTrainingPart) {
  const TemporaryFolder root;
  const LanguageData data = small_data(root);
  const HeldOut all = held_out(data, 1 << 20);
  EXPECT_TRUE(all.continued);
  EXPECT_EQ(all.targets, int64_t(data.validation()->tokens())) << "the first of a document, too";
  ASSERT_EQ(all.stretches.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    const std::string whole = some_text(i == 0 ? 60 : 9);
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
  std::ofstream(root / "a.txt") << some_text(60);
  std::ofstream(root / "b.txt") << "short\n";  // nothing of it is held out
  std::ofstream(root / "c.txt") << some_text(50);
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
  EXPECT_NE(some_text(50).find(before + targets.substr(0, 40)), std::string::npos) << before;
}

TEST(HeldOut, WithoutAKnownTrainingPartIsTheWholeOrDocumentsApart) {
  const TemporaryFolder root;
  small_data(root);
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
  const LanguageData data = small_data(root);
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
  const LanguageData together = small_data(root), apart = small_data(root, true);
  const HeldOut all = held_out(together, 1 << 20);
  EXPECT_NE(ngram_baseline(together, 3, all, 1 << 20).nll, ngram_baseline(apart, 3, all, 1 << 20).nll);
}

TEST(LanguageJob, ARunOfBeforeGoesOnWithItsOwnOrders) {
  const TemporaryFolder root;
  const LanguageData data = small_data(root);
  LanguageSettings settings = small_job(), before = settings;
  before.data_order = 1;
  LanguageJob job(settings, Device::cpu()), old(before, Device::cpu());
  for (LanguageJob* const of : {&job, &old}) of->set_data(data, {.sample_tokens = 0}, {}, {});
  const NoTape off;
  const auto loss = [](LanguageJob& of, uint64_t index) { return of.batch(index), of.loss().item<double>(); };
  EXPECT_EQ(loss(job, 0), loss(old, 0));
  const auto second_epoch = uint64_t(data.train().size() / settings.batch);
  EXPECT_NE(loss(job, second_epoch), loss(old, second_epoch));
}

TEST(LanguageJob, RestoresEverythingThatContinuesTheCurve) {
  for (const bool llama : {false, true}) {
    const TemporaryFolder root;
    const LanguageData data = small_data(root);
    const LanguageSettings job = small_job(llama);
    const auto step = [&](LanguageJob& session, int64_t window) {
      Step one(session);
      one([&](int) { session.load(batch_of(data, {window, window + 1})); });
      return one.loss().item<double>();
    };
    LanguageJob whole(job, Device::cpu()), other(job, Device::cpu());
    step(whole, 0), step(whole, 2);
    const datasets::LoaderState state{.batch = 2, .seed = 3, .stream = 4};
    const std::string file = root / "c.safetensors";
    whole.position() = state;
    whole.checkpoint(2).save(file);
    EXPECT_EQ(other.restore(file), 2);
    EXPECT_EQ(other.position(), state);
    for (int64_t window = 4; window < 10; window += 2) EXPECT_EQ(step(whole, window), step(other, window));
  }
}

TEST(LanguageJob, RestoresOnlyItsOwnJob) {
  const TemporaryFolder root;
  const LanguageSettings job = small_job();
  const std::string file = root / "c.safetensors";
  LanguageJob(job, Device::cpu()).checkpoint(7).save(file);
  LanguageSettings longer = job, other = job;
  longer.steps = 2 * job.steps;
  std::get<models::GptConfig>(other.model).residual_dropout = 0.5;
  EXPECT_EQ(LanguageJob(longer, Device::cpu()).restore(file), 7);
  const std::string error = message_of([&] { LanguageJob(other, Device::cpu()).restore(file); });
  EXPECT_NE(error.find("\"model\""), std::string::npos) << error;
}

TEST(LanguageJob, DecaysMatricesAlone) {
  // With gradients of zero all that a step changes is what decays.
  LanguageSettings job = small_job(true);
  job.lr = 0.1, job.weight_decay = 0.5;
  LanguageJob session(job, Device::cpu());
  std::map<std::string, std::vector<float>> before;
  for (const auto& [name, tensor] : session.optimizer().parameters())
    before[name] = tensor.detach().to_vector<float>();
  session.optimizer().zero_grad();
  session.optimizer().complete_gradients();
  session.optimizer().step();
  for (const auto& [name, tensor] : session.optimizer().parameters()) {
    const bool fixed = name == "token.weight" || name.find("norm") != std::string::npos;
    EXPECT_EQ(tensor.detach().to_vector<float>() == before.at(name), fixed) << name;
  }
}

TEST(LanguageJob, EvaluatesWithoutDropoutAndGoesOnWithIt) {
  const TemporaryFolder root;
  const LanguageData data = small_data(root);
  const std::vector<int64_t> tokens = read_tokens(data.train(), 0, 17);
  for (const bool llama : {false, true}) {
    LanguageSettings job = small_job(llama);
    if (llama)
      job.dropout = 0.5;
    else
      std::get<models::GptConfig>(job.model).residual_dropout = 0.5;
    LanguageJob session(job, Device::cpu());
    EXPECT_EQ(loss_of(session, tokens), loss_of(session, tokens));
    session.load(batch_of(data, {0, 1}));
    EXPECT_NE(session.loss().item<double>(), session.loss().item<double>());
  }
}

TEST(LanguageJob, DropoutOfALlamaIsOfTheJobAndNotOfItsFolder) {
  const TemporaryFolder root;
  LanguageSettings job = small_job(true);
  job.dropout = 0.25;
  EXPECT_EQ(language_settings_from_json(to_json(job)).dropout, 0.25);
  LanguageJob session(job, Device::cpu());
  const std::string folder = root / "model";
  session.save(folder);
  EXPECT_EQ(io::read_file(folder + "/config.json", 1 << 20).find("0.25"), std::string::npos);
  LanguageSettings gpt = small_job();
  gpt.dropout = 0.25;
  EXPECT_NE(message_of([&] { gpt.validate(); }).find("dropout is 0.25"), std::string::npos);
  std::get<models::GptConfig>(gpt.model).residual_dropout = 0.25;
  EXPECT_EQ(language_settings_from_json(to_json(gpt)).dropout, 0.25);
  gpt.dropout = 0;  // as earlier versions wrote it
  EXPECT_EQ(language_settings_from_json(to_json(gpt)).dropout, 0);
}

TEST(LanguageJob, AveragesAreWhatIsEvaluatedSavedAndRestored) {
  const TemporaryFolder root;
  const LanguageData data = small_data(root);
  const std::vector<int64_t> tokens = read_tokens(data.train(), 0, 17);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    LanguageSettings job = small_job(true);
    std::get<models::LlamaConfig>(job.model).dtype = dtype;
    job.lr = 0.05;
    LanguageSettings with = job;
    with.ema = 0.99;
    LanguageJob plain(job, Device::cpu()), averaged(with, Device::cpu()), again(with, Device::cpu());
    const auto step = [&](LanguageJob& session, int64_t window) {
      Step one(session);
      one([&](int) { session.load(batch_of(data, {window, window + 1})); });
      return one.loss().item<double>();
    };
    EXPECT_EQ(loss_of(averaged, tokens), loss_of(plain, tokens)) << "they begin as the weights";
    for (int64_t window = 0; window < 6; window += 2) {
      EXPECT_EQ(step(averaged, window), step(plain, window)) << "they do not change the training";
      EXPECT_NE(loss_of(averaged, tokens), loss_of(plain, tokens));
    }
    const std::string file = root / "c.safetensors";
    averaged.checkpoint(3).save(file);
    EXPECT_EQ(again.restore(file), 3);
    EXPECT_EQ(step(again, 8), step(averaged, 8));
    EXPECT_EQ(loss_of(again, tokens), loss_of(averaged, tokens));
    const std::string folder = root / name_of(dtype);
    averaged.save(folder);
    LanguageJob exported(job, Device::cpu(), folder);
    EXPECT_EQ(loss_of(exported, tokens), loss_of(averaged, tokens));
    // A checkpoint without averages is none of a job that has them.
    plain.checkpoint(3).save(file);
    EXPECT_NE(message_of([&] { again.restore(file); }).find("\"ema\""), std::string::npos);
  }
}

TEST(LanguageTraining, DocumentsApartAreSequencesOfTheirOwn) {
  const TemporaryFolder root;
  const LanguageData data = small_data(root, true);
  LanguageSettings job = small_job(true);
  job.documents = true;
  // The window with the border between the two texts.
  const uint64_t border = document_begins(data.train(), 0, data.train().tokens())[1];
  const int64_t window = int64_t(border - 1) / job.length;
  const datasets::TokenBatch batch = batch_of(data, {window, 0});
  ASSERT_EQ(batch.lengths.size(0), 4) << "three segments";
  LanguageJob session(job, Device::cpu());
  session.load(batch);
  // The mean of what each segment costs by itself, over the targets that count.
  double sum = 0;
  int64_t counted = 0;
  const auto ends = batch.lengths.to_vector<int64_t>();
  const auto inputs = batch.inputs.reshape({32}).to_vector<int64_t>(),
             targets = batch.targets.reshape({32}).to_vector<int64_t>();
  for (size_t i = 1; i < ends.size(); ++i) {
    std::vector<int64_t> segment(inputs.begin() + ends[i - 1], inputs.begin() + ends[i]);
    if (const int64_t behind = targets[size_t(ends[i] - 1)]; behind >= 0) segment.push_back(behind);
    const int64_t there = int64_t(segment.size()) - 1;
    if (there > 0) sum += loss_of(session, segment) * double(there);
    counted += there;
  }
  EXPECT_EQ(counted, 31);
  // f32: 31 losses near 5.5, each rounded a few times, in another order.
  EXPECT_NEAR(session.loss().item<double>(), sum / double(counted), 1e-5);
}

TEST(LanguageExport, IsAFolderThatLoadsAsTheSameModel) {
  for (const bool llama : {false, true}) {
    const TemporaryFolder root;
    const LanguageData data = small_data(root);
    LanguageJob session(small_job(llama), Device::cpu());
    const std::string folder = root / "model", tokenizer = root / "data";
    export_language(session, data, tokenizer, folder);
    export_language(session, data, tokenizer, folder);  // a second end of the run replaces it
    EXPECT_EQ(io::Tokenizer::load(folder).fingerprint(), data.tokenizer().fingerprint());
    const pretrained::Config config = pretrained::read_config(folder);
    EXPECT_EQ(config.end_tokens, std::vector<int64_t>{*data.tokenizer().special().eos});
    LanguageSettings job = small_job(llama);
    job.seed = 5;
    LanguageJob again(job, Device::cpu(), folder), drawn(job, Device::cpu());
    LanguageJob first(small_job(llama), Device::cpu());
    const std::vector<int64_t> tokens = read_tokens(data.train(), 0, 17);
    EXPECT_EQ(loss_of(again, tokens), loss_of(first, tokens));
    EXPECT_NE(loss_of(drawn, tokens), loss_of(first, tokens));
  }
}

TEST(LanguageExport, KeepsTheEndTokensOfTheModelThatItBeganWith) {
  const TemporaryFolder root;
  const LanguageData data = small_data(root);
  const std::string base = root / "base", own = root / "data";
  copy_tokenizer(own, base);
  put(root / "base/config.json", R"({"eos_token_id": [0, 5, 7], "bos_token_id": 3})");
  put(root / "base/generation_config.json", R"({"eos_token_id": 9, "top_p": 0.9})");
  keep_base_configs(base, own);
  LanguageJob session(small_job(), Device::cpu());
  const std::filesystem::path folder = root / "model";
  export_language(session, data, own, folder.string());
  const pretrained::Config config = pretrained::read_config(folder.string());
  EXPECT_EQ(config.end_tokens, (std::vector<int64_t>{0, 9}));
  EXPECT_EQ(config.first_token, std::optional<int64_t>(3));
  EXPECT_EQ(pretrained::read_config(folder / "config.json").end_tokens, (std::vector<int64_t>{0, 5, 7}));
  // Documents ended with token 0, so the model makes it, whatever ended a text before.
  const json generation = json::parse(get(folder / "generation_config.json"));
  EXPECT_EQ(generation, json::parse(R"({"eos_token_id": [0, 9], "bos_token_id": 0, "top_p": 0.9})"));
}

TEST(LanguageExport, DoesNotKeepTheEndTokensOfAnotherTokenizer) {
  const TemporaryFolder root;
  small_data(root);
  const std::string base = root / "base", own = root / "data";
  copy_tokenizer(own, base);
  put(root / "base/config.json", R"({"eos_token_id": [0, 5, 7]})");
  put(root / "base/tokenizer_config.json", R"({"eos_token": "a"})");
  keep_base_configs(base, own);
  EXPECT_FALSE(std::filesystem::exists(std::filesystem::path(root / "data") / kBaseFolder));
}

TEST(LanguageExport, ReplacesTheOldOneOnlyWhenItIsComplete) {
  const TemporaryFolder root;
  const LanguageData data = small_data(root);
  LanguageJob first(small_job(), Device::cpu());
  const std::string folder = root / "model", tokenizer = root / "data";
  export_language(first, data, tokenizer, folder);
  const std::string weights = get(folder + "/model.safetensors"), config = get(folder + "/config.json");
  LanguageSettings job = small_job();
  job.seed = 5;
  LanguageJob second(job, Device::cpu());
  for (int failing = 0;; ++failing) {
    int writes = 0;
    io::file_calls().pwrite = [&](int file, const void* from, size_t bytes, off_t offset) -> ssize_t {
      if (writes++ != failing) return ::pwrite(file, from, bytes, offset);
      errno = ENOSPC;
      return -1;
    };
    const std::string error = message_of([&] { export_language(second, data, tokenizer, folder); });
    io::file_calls() = io::FileCalls::system();
    if (error.empty()) break;
    EXPECT_EQ(get(folder + "/model.safetensors"), weights) << failing;
    EXPECT_EQ(get(folder + "/config.json"), config) << failing;
    for (const auto& entry : std::filesystem::directory_iterator(root.path()))
      EXPECT_FALSE(entry.path().filename().string().starts_with(".")) << entry.path();
  }
  EXPECT_NE(get(folder + "/model.safetensors"), weights);
}

TEST(LanguageJob, AnInterruptedEvaluationLeavesTheStateAsItWas) {
  const TemporaryFolder root;
  const LanguageData data = small_data(root);
  LanguageSettings job = small_job();
  job.ema = 0.5;
  LanguageJob session(job, Device::cpu());
  session.load(batch_of(data, {0, 1}));
  Tape tape;
  tape.backward(session.loss());
  session.optimizer().step();
  session.updated();
  const std::string path = root / "c";
  session.checkpoint(1).save(path);
  const std::string before = get(path);
  const std::vector<int64_t> tokens = read_tokens(data.train(), 0, 17);
  {
    const InterruptGuard guard;
    std::raise(SIGINT);
    EXPECT_THROW(loss_of(session, tokens), Interrupted);
    EXPECT_THROW(session.generate(std::span(tokens).first(8), {.most_tokens = 4}), Interrupted);
  }
  session.checkpoint(1).save(path);
  EXPECT_TRUE(get(path) == before);  // the weights, and not their averages
}

TEST(LanguageTraining, AStepOfSeveralMicroBatchesIsOneLargeStep) {
  const TemporaryFolder root;
  const LanguageData data = small_data(root);
  std::vector<std::vector<StepRecord>> curves;
  for (const int64_t accumulate : {1, 2}) {
    LanguageSettings job = small_job();
    job.accumulate = accumulate, job.batch = 4 / accumulate, job.steps = 6, job.lr = 1e-2;
    const RunFolder run = RunFolder::create(root.path(), "r");
    LanguageJob session(job, Device::cpu());
    report::Progress progress(report::Progress::Mode::quiet);
    session.set_data(data, {.sample_every = 3, .sample_tokens = 4}, held_out(data, 100), {});
    train(session, run, {.steps = 6, .log_every = 1, .sample_every = 3, .schedule = job.make_schedule()}, 0,
          progress);
    curves.push_back(run.metrics());
    const auto samples = run.samples();
    ASSERT_EQ(samples.size(), 2u);
    EXPECT_EQ(samples[0].step, 3);
    EXPECT_EQ(samples[1].step, 6);
  }
  ASSERT_EQ(curves[0].size(), 6u);
  for (size_t i = 0; i < 6; ++i)
    // f32: the same 64 losses near 5.5 in another order; what that changes in the weights grows over six
    // steps.
    EXPECT_NEAR(curves[0][i].values.at("loss"), curves[1][i].values.at("loss"), 1e-4) << i;
  EXPECT_NEAR(curves[0][5].values.at("eval_nll"), curves[1][5].values.at("eval_nll"), 1e-4);
  EXPECT_LT(curves[0][5].values.at("eval_nll"), curves[0][0].values.at("loss") - 0.1);
  EXPECT_DOUBLE_EQ(curves[0][5].values.at("eval_bits_per_byte"),
                   curves[0][5].values.at("eval_nll") * 100 /
                       double(target_text(data, held_out(data, 100)).size()) / std::log(2.0));
}

TEST(LanguageTraining, KeepsTheBestEvaluationAndEndsBehindIt) {
  const TemporaryFolder root;
  const LanguageData data = small_data(root);
  LanguageSettings job = small_job();
  job.steps = 400, job.lr = 0.05, job.schedule = "constant";
  const RunFolder run = RunFolder::create(root.path(), "r");
  LanguageJob session(job, Device::cpu());
  report::Progress progress(report::Progress::Mode::quiet);
  const LanguageWatch watch{.sample_tokens = 4, .patience = 3, .exported = "best"};
  const HeldOut text = held_out(data, 100);
  const TrainerOptions options{
      .steps = 400, .log_every = 100, .eval_every = 2, .keep = 1, .schedule = job.make_schedule()};
  session.set_data(data, watch, text, {});
  const TrainResult result = train(session, run, options, 0, progress);
  EXPECT_EQ(result.outcome, Outcome::finished);
  ASSERT_LT(result.step, 400) << "a rate that does not learn for long";
  const BestEvaluation best = best_evaluation(run);
  EXPECT_EQ(best.since, 3);
  EXPECT_EQ(best.step, result.step - 6);
  EXPECT_EQ(best.evaluations, result.step / 2);
  EXPECT_EQ(best_evaluation(run, best.step + 3).since, 1) << "evaluations after that step are left out";
  EXPECT_LT(best_evaluation(run, best.step - 1).step, best.step);
  EXPECT_GT(result.evaluation.at("eval_nll"), best.nll);
  EXPECT_EQ(run.samples().back().step, result.step) << "the end of the run, as the last step is";
  // Of the checkpoints the newest and the best are there, and the best one is the model of that evaluation.
  const io::CheckpointFolder folder(run.checkpoints().string());
  EXPECT_EQ(folder.steps(), (std::vector<int64_t>{result.step, best.step}));
  EXPECT_EQ(session.restore(folder.file_of(best.step)), best.step);
  std::vector<eval::PerplexityWindow> windows;
  for (const HeldOut::Stretch& stretch : text.stretches)
    for (const eval::PerplexityWindow& window : eval::sliding_windows(stretch.tokens, stretch.first, 17, 8))
      windows.push_back(window);
  EXPECT_EQ(session.measure(windows).nats, best.nll);
  // It does not begin again to wait for what does not come.
  session.restore(folder.file_of(result.step));
  const size_t records = run.metrics().size(), samples = run.samples().size();
  const TrainResult again = train(session, run, options, result.step, progress);
  EXPECT_EQ(again.outcome, Outcome::finished);
  EXPECT_EQ(again.step, result.step);
  EXPECT_EQ(again.evaluation, result.evaluation);
  EXPECT_EQ(run.metrics().size(), records);
  EXPECT_EQ(run.samples().size(), samples);
}

TEST(LanguageTraining, StepsFitTheirTime) {
  LanguageSettings job = small_job();
  const int64_t few = steps_within(job, Device::cpu(), 0.5), many = steps_within(job, Device::cpu(), 500);
  EXPECT_GE(few, 1);
  EXPECT_GT(many, 100);
}

TEST(LanguageTraining, WhatTheOptimizerDoesNowAndThenHasItsShareOfTheTime) {
  LanguageSettings job = small_job();
  EXPECT_TRUE(periods_of(job).empty());
  job.optimizer = "galore", job.galore_rank = 2;
  EXPECT_EQ(periods_of(job), std::vector{&TrainingSettings::galore_every});
  EXPECT_GE(steps_within(job, Device::cpu(), 0.5), 1);
  job.optimizer = "loro";
  EXPECT_EQ(periods_of(job), std::vector{&TrainingSettings::loro_every});
  job.loro_every = 0, job.refactor_every = 7;
  EXPECT_EQ(periods_of(job), std::vector{&TrainingSettings::refactor_every});
}

}  // namespace
}  // namespace tessera::train

#include "train/mlm_job.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "autograd/tape.h"
#include "datasets/shuffle.h"
#include "ops/generation/sample.h"
#include "plan/plan.h"
#include "pretrained/config.h"
#include "runtime/allocator.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"
#include "train/bert_model.h"
#include "train/evaluating.h"
#include "train/loader_share.h"
#include "train/random_purpose.h"

namespace tessera::train {

using nlohmann::json;

// ---- settings ----

SettingList MlmSettings::list() {
  SettingList list;
  list.group("Data");
  list.add_hidden("task", task);
  list.add_hidden("data", data);
  list.add_hidden("fingerprint", fingerprint);
  list.add_hidden("max_length", max_length).range(int64_t{3}, kLargest);  // [CLS], [SEP] and a token of text
  list.add_hidden("batch", batch).range(int64_t{1}, kLargest);
  list.add("mask", mask, "--task mlm: share of the tokens to mask and predict").range(0.0001, 0.9);
  list.group("Model");
  list.add_hidden("model", model);
  list.add_json("config", {.get = [this] { return json::parse(pretrained::config_text(bert)); },
                           .set =
                               [this](const json& stored) {
                                 const auto config = pretrained::parse_config("mlm job", stored.dump(), {});
                                 const auto* const found = std::get_if<models::BertConfig>(&config.model);
                                 check(found != nullptr, "mlm job: config is of a model of type ",
                                       config.type, "; expected bert or roberta");
                                 bert = *found;
                               }});
  factors.add_to(list);
  add_to(list);
  add_ranks(list).absent_means(1);
  add_data_order(list);
  return list;
}

void MlmSettings::validate() const {
  check(task == "mlm", "mlm: task is \"", task, "\"; expected mlm");
  bert.validate();
  check_values(MlmSettings(*this).list(), "mlm");
  check_training("mlm", bert.dtype);
  check(bert.head == models::BertHead::masked_lm, "mlm: the model has no masked language head");
  check(max_length <= bert.longest(), "mlm: --max-length is ", max_length, "; the model has positions for ",
        bert.longest());
  check_bert_forms(factors, bert, !model.empty());
  check_optimizer_form(optimizer, factors);
  check(warmup <= steps, "mlm: warmup is ", warmup, " of ", steps, " steps");
}

json to_json(const MlmSettings& settings) {
  return to_json(MlmSettings(settings).list(), Kept::job);
}

MlmSettings mlm_settings_from_json(const json& in) {
  return job_settings<MlmSettings>(in, "mlm job");
}

// ---- masking ----

namespace {

/// A number of [0, n) by multiplication: its bias is below n / 2^32.
int64_t below(uint32_t random, size_t n) {
  return int64_t(uint64_t(random) * uint64_t(n) >> 32);
}

}  // namespace

Masking::Masking(const io::Tokenizer& tokenizer, double share, int64_t order) : share_(share), order_(order) {
  const io::SpecialTokens& special = tokenizer.special();
  check(special.cls && special.sep && special.mask, "mlm: the tokenizer ", tokenizer.path(),
        " lacks one of [CLS], [SEP] and [MASK]; take one of a BERT or RoBERTa, or none: it is made of the "
        "text");
  cls_ = *special.cls, sep_ = *special.sep, mask_ = *special.mask;
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id)
    if (tokenizer.has(id) && !tokenizer.is_special(id)) ordinary_.push_back(id);
  check(!ordinary_.empty(), "mlm: the tokenizer ", tokenizer.path(), " has special tokens only");
}

int64_t Masking::chosen(int64_t length) const {
  return std::clamp<int64_t>(std::llround(share_ * double(length)), 1, length);
}

MaskedBatch Masking::batch(const std::vector<std::vector<int64_t>>& texts, uint64_t seed, uint64_t index,
                           uint64_t first) const {
  MaskedBatch batch;
  const uint64_t purpose = seed_for(RandomPurpose::masking, seed);
  for (uint64_t row = first; const std::vector<int64_t>& text : texts) {
    const int64_t count = chosen(int64_t(text.size())), begin = int64_t(batch.tokens.size()) + 1;
    batch.tokens.push_back(cls_);
    batch.tokens.insert(batch.tokens.end(), text.begin(), text.end());
    batch.tokens.push_back(sep_);
    batch.lengths.push_back(int64_t(text.size()) + 2);
    const datasets::Permutation order(int64_t(text.size()), purpose, index, row, order_);
    std::vector<int64_t> places;
    for (int64_t i = 0; i < count; ++i) places.push_back(order(i));
    std::ranges::sort(places);
    for (size_t i = 0; i < places.size(); ++i) {
      const int64_t place = begin + places[i];
      // The permutation's domain differs, so these are numbers of their own.
      const Uint4 random = philox(purpose, index, row << 32 | uint64_t(places[i]));
      batch.rows.push_back(place);
      batch.targets.push_back(batch.tokens[size_t(place)]);
      const int64_t tenth = below(random.word[0], 10);
      if (tenth < 8) batch.tokens[size_t(place)] = mask_;
      if (tenth == 8)
        batch.tokens[size_t(place)] = ordinary_[size_t(below(random.word[1], ordinary_.size()))];
    }
    ++row;
  }
  return batch;
}

models::BertBatch masked_bert_batch(const MaskedBatch& batch, const models::BertConfig& config, Device device,
                                    Tensor& targets) {
  const auto on_device = [&](const std::vector<int64_t>& values) {
    return Tensor::from(values, {int64_t(values.size())}, device);
  };
  std::vector<int64_t> positions;
  for (const int64_t length : batch.lengths)
    for (int64_t t = 0; t < length; ++t) positions.push_back(config.position_offset() + t);
  targets = on_device(batch.targets);
  return {.tokens = on_device(batch.tokens),
          .types = Tensor(),
          .sequences = {batch.lengths},
          .positions = on_device(positions),
          .masked = on_device(batch.rows)};
}

// ---- the job ----

namespace {

models::Bert make_mlm_model(const MlmSettings& settings, const Rng& rng, Device device,
                            const std::string& weights, bool restored) {
  const MemoryTag tag("parameters");
  models::Bert model = weights.empty() ? models::Bert(settings.bert, rng, device)
                                       : load_bert_as(settings.bert, weights, rng, device);
  if (settings.factors.factorizes())
    settings.factors.apply(pretrained::linear_modules(model), rng,
                           {.has_weights = !weights.empty(), .restored = restored});
  return model;
}

/// The texts of the validation part, as long as those to train on; of a shorter part one text.
std::vector<std::vector<int64_t>> held_out_texts(const LanguageData& data, int64_t length,
                                                 int64_t most_tokens) {
  std::vector<std::vector<int64_t>> texts;
  if (!data.validation()) return texts;
  const uint64_t tokens = std::min(data.validation()->tokens(), uint64_t(std::max(most_tokens, length)));
  for (uint64_t begin = 0; begin + uint64_t(length) <= tokens; begin += uint64_t(length))
    texts.push_back(read_tokens(*data.validation(), begin, begin + uint64_t(length)));
  if (texts.empty() && tokens > 0) texts.push_back(read_tokens(*data.validation(), 0, tokens));
  return texts;
}

/// What is held out is masked alike in every run, whatever its seed: scores of several are comparable.
constexpr uint64_t kEvaluationSeed = 0;

}  // namespace

MlmJob::MlmJob(const MlmSettings& settings, Device device, const LanguageData& data, int64_t eval_tokens,
               const std::string& weights, bool restored)
    : Job(device),
      settings_(settings),
      data_(data),
      rng_(seed_for(RandomPurpose::initialisation, settings.seed)),
      model_(make_mlm_model(settings, rng_, device, weights, restored)),
      optimizer_(settings.make_optimizer(nn::parameters(model_), settings.bert.dtype, 0.999, {},
                                         structure_of(pretrained::linear_modules(model_)))),
      masking_(data.tokenizer(), settings.mask, settings.data_order),
      loader_(loader_of({0, int(settings.accumulate)})),
      held_out_(held_out_texts(data, settings.text_length(), eval_tokens)) {
  use_for(RandomPurpose::dropout, settings.seed, rng_);
  nn::set_training(model_, true);
  keep("model", model_);
  train_with(optimizer_);
  draws_from("rng", rng_);
}

datasets::Loader<datasets::TokenWindows> MlmJob::loader_of(const dist::Share& share) const {
  const datasets::TokenWindows& train = data_.train();
  check(train.size() >= settings_.batch, "mlm: ", train.tokens(), " tokens are ", train.size(),
        " sequences of ", settings_.max_length, "; a batch takes ", settings_.batch,
        ": give a smaller --batch-size or --max-length, or more text");
  Rng order(seed_for(RandomPurpose::sequence_order, settings_.seed));
  return datasets::Loader<datasets::TokenWindows>(train, {.size = settings_.batch,
                                                          .shuffle = &order,
                                                          .drop_last = true,
                                                          .workers = 1,
                                                          .order = settings_.data_order,
                                                          .share = loader_share(share, settings_.accumulate),
                                                          .device = Device::cpu()});
}

void MlmJob::divide(const dist::Share& share) {
  loader_ = loader_of(share);
}

JobInfo MlmJob::info() const {
  const double tokens = double(settings_.texts_per_step() * settings_.max_length);
  return {.evaluates = !held_out_.empty(),
          .micro_batches = int(settings_.accumulate),
          .tokens_per_step = tokens,
          .flops_per_step = plan::step_flops(settings_.bert, tokens, double(settings_.max_length))};
}

void MlmJob::batch(uint64_t index) {
  datasets::LoaderState at = loader_.state();
  at.batch = index;
  loader_.set_state(at);
  const Tensor windows = loader_.next().inputs;
  const auto tokens = windows.to_vector<int64_t>();
  std::vector<std::vector<int64_t>> texts;
  for (int64_t row = 0; row < windows.size(0); ++row) {
    const auto begin = tokens.begin() + row * windows.size(1);
    texts.emplace_back(begin, begin + windows.size(1));
  }
  const MaskedBatch masked = masking_.batch(texts, settings_.seed, index);
  if (!batch_.tokens.defined()) {
    const MemoryTag tag("batch");
    batch_ = masked_bert_batch(masked, settings_.bert, device(), targets_);
    return;
  }
  // A captured step reads the same memory each time.
  const auto refill = [](const Tensor& to, const std::vector<int64_t>& values) {
    to.copy_from(Tensor::from(values, {int64_t(values.size())}));
  };
  refill(batch_.tokens, masked.tokens), refill(batch_.masked, masked.rows), refill(targets_, masked.targets);
}

Tensor MlmJob::loss() {
  const F32MathScope math(settings_.f32_math);
  return model_.loss(batch_, targets_);
}

Values MlmJob::evaluate() {
  const NoTape off;
  const F32MathScope math(settings_.f32_math);
  const Evaluating evaluating(model_);
  double nats = 0;
  int64_t right = 0, all = 0;
  for (size_t first = 0; first < held_out_.size(); first += size_t(settings_.batch)) {
    check_interrupt();
    const size_t end = std::min(held_out_.size(), first + size_t(settings_.batch));
    Tensor targets;
    // In runs of version 1 the masks depended on the size of the batches.
    const std::pair<size_t, size_t> address =
        settings_.data_order == 1 ? std::pair(first, size_t{0}) : std::pair(size_t{0}, first);
    const MaskedBatch masked =
        masking_.batch({held_out_.begin() + ptrdiff_t(first), held_out_.begin() + ptrdiff_t(end)},
                       kEvaluationSeed, address.first, address.second);
    const models::BertBatch batch = masked_bert_batch(masked, settings_.bert, device(), targets);
    const nn::AttentionPass pass = model_.begin(batch);
    Tensor x = model_.embed(batch);
    for (int64_t i = 0; i < settings_.bert.layers; ++i) x = model_.block(i, x, pass);
    const auto count = int64_t(masked.rows.size());
    nats += model_.finish(x, targets).item<double>() * double(count);
    const ops::Choices choices(count, 1, device());
    ops::sample(choices, model_.finish(x), {.temperature = 0});
    const auto chosen = choices.next.to_vector<int64_t>();
    for (int64_t i = 0; i < count; ++i) right += chosen[size_t(i)] == masked.targets[size_t(i)] ? 1 : 0;
    all += count;
  }
  return {{"eval_nll", nats / double(all)}, {"eval_accuracy", double(right) / double(all)}};
}

}  // namespace tessera::train

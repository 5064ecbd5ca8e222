#include "train/mlm_job.h"

#include <algorithm>

#include "autograd/tape.h"
#include "ops/generation/sample.h"
#include "plan/plan.h"
#include "pretrained/layers.h"
#include "runtime/allocator.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"
#include "train/bert_model.h"
#include "train/evaluating.h"
#include "train/held_out.h"
#include "train/random_purpose.h"
#include "train/training_loader.h"

namespace tessera::train {

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
  return training_loader(train, settings_, settings_.batch, RandomPurpose::sequence_order, share,
                         {.workers = 1, .device = Device::cpu()});
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

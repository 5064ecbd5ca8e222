#include "train/language_job.h"

#include <algorithm>

#include "autograd/gradient.h"
#include "autograd/tape.h"
#include "nn/hidden_l1.h"
#include "ops/bits/bits.h"
#include "ops/pointwise/pointwise.h"
#include "plan/plan.h"
#include "pretrained/language_model.h"
#include "runtime/allocator.h"
#include "runtime/error.h"
#include "train/random_purpose.h"
#include "train/training_loader.h"

namespace tessera::train {

namespace {

/// With initial weights.
models::LanguageModel initial_model(const LanguageSettings& settings, const Rng& rng, Device device) {
  if (const auto* config = std::get_if<models::GptConfig>(&settings.model))
    return models::Gpt(*config, rng, device);
  models::LlamaConfig config = std::get<models::LlamaConfig>(settings.model);
  config.embedding_dropout = config.residual_dropout = settings.dropout;
  return models::Llama(config, rng, device);
}

}  // namespace

models::LanguageModel LanguageJob::make(const LanguageSettings& settings, const Rng& rng, Device device,
                                        const std::string& weights, FactorStart start) {
  const MemoryTag tag("parameters");
  models::LanguageModel model =
      weights.empty() ? initial_model(settings, rng, device)
                      : pretrained::load_dense_language(weights, rng, device, {.dtype = settings.dtype()});
  start.has_weights = !weights.empty();
  if (settings.factors.factorizes()) settings.factors.apply(pretrained::linear_modules(model), rng, start);
  return model;
}

LanguageJob::LanguageJob(const LanguageSettings& settings, Device device, const std::string& weights,
                         FactorStart start)
    : Job(device),
      settings_(settings),
      rng_(seed_for(RandomPurpose::initialisation, settings.seed)),
      model_(make(settings, rng_, device, weights, std::move(start))),
      sparse24_rng_(seed_for(RandomPurpose::activation_choice, settings.seed)),
      // Rows of a table are seen seldom: decay would be most of what happens to them.
      optimizer_(
          settings.make_optimizer(nn::parameters(model_), settings.dtype(), settings.beta2,
                                  {{.contains = "token.weight", .weight_decay = 0.0, .optional = true},
                                   {.contains = "position.weight", .weight_decay = 0.0, .optional = true}},
                                  structure_of(pretrained::linear_modules(model_)))) {
  use_for(RandomPurpose::dropout, settings.seed, rng_);
  if (settings.ema > 0) ema_.emplace(optimizer_, optim::EmaOptions{.decay = settings.ema});
  if (settings.keep_zeros) find_zeros(!weights.empty());
  if (settings.sparse24.on())
    settings.sparse24.apply(model_, settings.sparsifies_networks(),
                            seed_for(RandomPurpose::activation_choice, settings.seed), sparse24_rng_);
  settings.weights24.apply(model_, sparse24_rng_);
  const MemoryTag tag("batch");
  inputs_ = Tensor::empty_packed({settings.batch, settings.length}, DType::i64, device);
  targets_ = Tensor::empty_packed({settings.batch, settings.length}, DType::i64, device);
  nn::set_training(model_, true);
  keep("model", model_);
  train_with(optimizer_);
  keep("ema", ema_), keep("loader", position_);
  if (settings.sparse24.on() || settings.weights24.draws()) keep("sparse24_rng", sparse24_rng_);
  draws_from("rng", rng_);
}

void LanguageJob::find_zeros(bool of_start) {
  const MemoryTag tag("masks");
  int64_t zeros = 0;
  nn::for_each<nn::Linear>(model_, [&](const std::string& name, nn::Linear& layer) {
    if (!name.starts_with("blocks.")) return;
    const Tensor bits = ops::pack_bits(layer.weight.detach());
    for (const int64_t ones : ops::count_bits(bits).to_vector<int64_t>()) zeros += layer.in - ones;
    sparse_.push_back({layer.weight, bits});
  });
  // A run that goes on gets the bits, as the weights, from its checkpoint.
  check(!of_start || zeros > 0, settings_.family(), ": keep_zeros: no weight of ", settings_.start,
        "'s blocks is 0; prune the model first (tessera prune)");
  // Elementwise rules leave a 0 with the gradient 0 as it is, and its master too.
  for (const Sparse& matrix : sparse_)
    on_grad(matrix.weight, [&matrix](const Tensor& gradient) {
      gradient.copy_from(
          ops::mul(gradient, ops::unpack_bits(matrix.bits, gradient.size(1), gradient.dtype())));
    });
  keep("zeros", sparse_);
}

JobInfo LanguageJob::info() const {
  const LanguageSettings& s = settings_;
  return {
      .evaluates = !windows_.empty(),
      .samples = data_ && watch_.sample_tokens > 0,
      // Lengths of documents differ from batch to batch; the host decides when soft_dynamic fits its scale.
      .fixed_shapes = !s.documents && s.sparse24.method != "soft_dynamic",
      .micro_batches = int(s.accumulate),
      .tokens_per_step = double(s.tokens_per_step()),
      .flops_per_step = plan::count_flops(s.model, s.batch * s.accumulate, s.length, s.forms()).step(),
      .penalties = s.penalties()};
}

// ---- batches ----

void LanguageJob::set_data(const LanguageData& data, const LanguageWatch& watch, HeldOut held_out,
                           const NgramBaseline& baseline) {
  const LanguageSettings& s = settings_;
  check(data.train().size() >= s.batch, "train: ", data.train().tokens(), " tokens are ", data.train().size(),
        " windows of ", s.length, "; a batch takes ", s.batch,
        ": give a smaller --batch-size or --length, or more text");
  data_ = &data, watch_ = watch, held_out_ = std::move(held_out), baseline_ = baseline;
  divide({0, int(s.accumulate)});
  position_ = loader_->state();
  // A window of the evaluation has as many places as a training sequence, and the last place's target.
  const int64_t stride = evaluation_stride(s, watch);
  windows_.clear();
  for (const HeldOut::Stretch& stretch : held_out_.stretches)
    std::ranges::copy(eval::sliding_windows(stretch.tokens, stretch.first, s.length + 1, stride),
                      std::back_inserter(windows_));
  tokens_per_byte_ =
      double(held_out_.targets) / double(std::max<size_t>(1, target_text(data, held_out_).size()));
  if (watch.sample_tokens > 0) prompt_ = sample_prompt(data, watch);
}

void LanguageJob::divide(const dist::Share& share) {
  if (!data_) return;  // batches come by load()
  loader_.emplace(training_loader(data_->train(), settings_, settings_.batch, RandomPurpose::sequence_order,
                                  share, {.workers = 1, .device = device()}));
}

void LanguageJob::advance(uint64_t index) {
  position_.batch = index;
}

void LanguageJob::batch(uint64_t index) {
  check(loader_.has_value(), settings_.family(), ": there is nothing to train on; call set_data()");
  position_.batch = index;
  set_sparsity(int64_t(index) / settings_.accumulate);
  loader_->set_state(position_);
  load(loader_->next());
  position_ = loader_->state();
}

/// What of the model is sparse in this step (from 0), by which masks.
void LanguageJob::set_sparsity(int64_t step) {
  const bool active = settings_.sparse24.active_at(step, settings_.steps);
  const bool refreshes = settings_.weights24.refreshes_at(step, settings_.sparse24.dense_first);
  if (settings_.sparse24.on()) Sparse24Settings::set_active(model_, active);
  nn::for_each_weights24(model_, [&](const std::string&, nn::Linear& layer) {
    nn::weights24_of(layer)->active = active;
    if (active && refreshes && refreshed_ != step) nn::refresh_weights24(layer);
  });
  if (active && refreshes) refreshed_ = step;
}

namespace {

nn::Sequences sequences_of(const datasets::TokenBatch& batch) {
  nn::Sequences sequences;
  const std::vector<int64_t> ends = batch.lengths.to_vector<int64_t>();
  for (size_t i = 1; i < ends.size(); ++i) sequences.lengths.push_back(ends[i] - ends[i - 1]);
  return sequences;
}

Tensor flat(const Tensor& tokens) {
  return tokens.reshape({tokens.count()});
}

}  // namespace

void LanguageJob::load(const datasets::TokenBatch& batch) {
  inputs_.copy_from(batch.inputs);
  targets_.copy_from(batch.targets);
  if (settings_.documents) sequences_ = sequences_of(batch);
}

// ---- a step ----

Tensor LanguageJob::loss() {
  const F32MathScope math(settings_.f32_math);
  std::optional<nn::HiddenL1> hidden;
  if (settings_.activation_l1 > 0) hidden.emplace();
  const Tensor loss =
      settings_.documents ? model_.loss(flat(inputs_), targets_, sequences_) : model_.loss(inputs_, targets_);
  l1_ = hidden && hidden->sum().defined() ? ops::scale(hidden->sum(), settings_.activation_l1) : Tensor();
  decay_ = settings_.weights24.decay > 0 ? decay_of_pruned() : Tensor();
  return loss;
}

/// Of the layers with 2:4 weights, while they are sparse.
Tensor LanguageJob::decay_of_pruned() const {
  Tensor sum;
  nn::for_each_weights24(model_, [&](const std::string&, const nn::Linear& layer) {
    const Tensor own = nn::masked_decay(layer);
    if (own.defined()) sum = sum.defined() ? ops::add(sum, own) : own;
  });
  return sum.defined() ? ops::scale(sum, settings_.weights24.decay) : sum;
}

std::vector<Tensor> LanguageJob::penalties() {
  std::vector<Tensor> all;
  if (settings_.activation_l1 > 0) all.push_back(std::exchange(l1_, {}));
  if (settings_.weights24.on() && settings_.weights24.decay > 0) all.push_back(std::exchange(decay_, {}));
  return all;
}

void LanguageJob::updated() {
  if (ema_) ema_->update();
}

Values LanguageJob::state_values() {
  double flips = 0, elements = 0;
  nn::for_each_weights24(model_, [&](const std::string&, nn::Linear& layer) {
    const nn::Weights24& form = *nn::weights24_of(layer);
    if (!form.active) return;
    flips += form.flips.item<double>(), elements += double(layer.weight.count());
  });
  return elements > 0 ? Values{{"flip_rate", flips / elements}} : Values();
}

std::map<std::string, Tensor> LanguageJob::weight_gradients() {
  batch(0);
  Tape tape({.loss_scale = optimizer_.loss_scale()});
  tape.backward(loss());
  std::map<std::string, Tensor> gradients;
  nn::for_each<nn::Linear>(model_, [&](const std::string& name, nn::Linear& layer) {
    if (layer.weight.defined()) gradients.emplace(name, grad(layer.weight));
  });
  return gradients;
}

}  // namespace tessera::train

#include "train/glue_job.h"

#include <algorithm>

#include "autograd/tape.h"
#include "eval/bert_batch.h"
#include "plan/plan.h"
#include "runtime/allocator.h"
#include "train/bert_model.h"
#include "train/evaluating.h"
#include "train/random_purpose.h"
#include "train/run_folder.h"
#include "train/training_loader.h"

namespace tessera::train {

namespace {

models::Bert make_model(const GlueSettings& settings, const Rng& rng, Device device, bool restored,
                        pretrained::LoadReport& report) {
  const MemoryTag tag("parameters");
  models::Bert model = settings.model.empty()
                           ? models::Bert(settings.bert, rng, device)
                           : load_bert_as(settings.bert, settings.model, rng, device, &report);
  if (settings.factors.factorizes())
    settings.factors.apply(pretrained::linear_modules(model), rng,
                           {.has_weights = !settings.model.empty(), .restored = restored});
  if (settings.trained != "all")
    nn::freeze(model, [biases = settings.trained == "biases"](const std::string& name) {
      return !name.starts_with("classifier.") && !(biases && name.ends_with(".bias"));
    });
  return model;
}

}  // namespace

GlueJob::GlueJob(const GlueSettings& settings, Device device, const GlueSet* set, bool restored)
    : Job(device),
      settings_(settings),
      rng_(seed_for(RandomPurpose::initialisation, settings.seed)),
      slice_rng_(seed_for(RandomPurpose::row_choice, settings.seed)),
      model_(make_model(settings, rng_, device, restored, loaded_)),
      optimizer_(settings.make_optimizer(nn::parameters(model_), settings.bert.dtype, 0.999, {},
                                         structure_of(pretrained::linear_modules(model_)))),
      set_(set) {
  use_for(RandomPurpose::dropout, settings.seed, rng_);
  nn::set_training(model_, true);
  if (settings.slice.slices()) sliced_ = settings.slice.apply(pretrained::linear_modules(model_), slice_rng_);
  if (set) divide({0, int(settings.accumulate)});
  keep("model", model_);
  train_with(optimizer_);
  draws_from("rng", rng_);
  if (settings.slice.slices()) draws_from("slice_rng", slice_rng_);
  if (settings.slice.is_auto()) {
    auto_rows_.emplace(model_, sliced_, settings.slice, slice_rng_);
    keep("row_shares", auto_rows_->shares);
    keep("row_factor", auto_rows_->factor);
  }
  if (settings.drop.drops()) start_drops();
}

void GlueJob::start_drops() {
  drops_.emplace(model_, settings_.max_length);
  drop_rates_ = Tensor::full({int64_t(drops_->size())}, settings_.drop.share, DType::f64, Device::cpu());
  if (settings_.drop.calibrates()) keep("drop_rates", drop_rates_);
}

bool GlueJob::begin(const RunFolder& run) {
  if (settings_.slice.probe_every > 0) probes_ = run.path() / "probes.jsonl";
  if (auto_rows_) row_log_ = run.path() / "rows.jsonl";
  return false;
}

// ---- data ----

datasets::Loader<datasets::GlueItems> GlueJob::loader_of(const dist::Share& share,
                                                         datasets::LoaderOptions how) const {
  how.device = device();
  return training_loader(set_->train, settings_, settings_.batch, RandomPurpose::text_order, share, how);
}

void GlueJob::divide(const dist::Share& share) {
  first_ = uint64_t(share.first);
  if (set_ == nullptr) return;  // batches come by load()
  loader_.emplace(loader_of(share, {.workers = device().is_cuda() ? 2 : 1}));
}

/// Whichever rank trains on it.
datasets::GlueBatch GlueJob::micro_batch(uint64_t index) const {
  auto all = loader_of({0, int(settings_.accumulate)}, {.workers = 1, .depth = 1});
  datasets::LoaderState at = all.state();
  at.batch = index;
  all.set_state(at);
  return all.next();
}

void GlueJob::batch(uint64_t index) {
  check(loader_.has_value(), "bert: there is nothing to train on; give the job a GlueSet");
  const uint64_t each = uint64_t(settings_.accumulate), step = index / each, micro = index % each;
  if (settings_.drop.calibrates() && int64_t(step) == settings_.steps / 10 && micro == first_)
    calibrate_drops(step);
  if (auto_rows_) {
    auto_rows_->apply();  // of the shares, which a checkpoint may have brought
    if (step % uint64_t(settings_.slice.estimate_every) == 0 && micro == first_) estimate_rows(step);
  }
  datasets::LoaderState at = loader_->state();
  at.batch = index;
  loader_->set_state(at);
  load(loader_->next());
  drop_step_ = step;
  if (!probes_.empty() && step % uint64_t(settings_.slice.probe_every) == 0 && micro == 0) probe(step);
}

Tensor GlueJob::loss() {
  const F32MathScope math(settings_.f32_math);
  if (drops_) {
    drops_->set_rates(drop_rates_.to_vector<double>());
    drops_->draw(settings_.drop.share, seed_for(RandomPurpose::branch_choice, settings_.seed), drop_step_++);
  }
  return model_.loss(batch_, targets_);
}

JobInfo GlueJob::info() const {
  const int micro_batches = int(settings_.accumulate);
  if (!set_) return {.fixed_shapes = !drops_, .micro_batches = micro_batches};
  const datasets::GlueItems& train = set_->train;
  const double length = double(train.tokens()) / double(train.size());
  const double tokens = length * double(settings_.texts_per_step());
  return {.evaluates = true,
          // Packed batches have a shape each, and each step drops other branches.
          .fixed_shapes = settings_.batches == "padded" && !drops_,
          .micro_batches = micro_batches,
          .tokens_per_step = tokens,
          .flops_per_step = plan::step_flops(settings_.bert, tokens, length)};
}

eval::GluePredictions GlueJob::predict(const datasets::GlueItems& items) {
  const F32MathScope math(settings_.f32_math);
  const Evaluating evaluating(model_);
  return eval::predict_glue(model_, items, settings_.batch, device());
}

Values GlueJob::evaluate() {
  const F32MathScope math(settings_.f32_math);
  const Evaluating evaluating(model_);
  return eval::evaluate_glue(model_, set_->task, set_->dev, settings_.batch, device());
}

void GlueJob::load(const datasets::GlueBatch& batch) {
  const bool padded = settings_.batches == "padded";
  const int64_t fixed_length = padded ? settings_.max_length : 0;
  if (!padded || !batch_.tokens.defined()) {
    batch_ = eval::bert_batch(batch, settings_.bert, fixed_length, device());
    targets_ = batch.labels.to(device());
    return;
  }
  // A captured step reads the same memory each time; the texts come by way of the host.
  eval::copy_batch(batch_, eval::bert_batch(batch, settings_.bert, fixed_length, Device::cpu()));
  targets_.copy_from(batch.labels);
}

}  // namespace tessera::train

#include "train/tnp_job.h"

#include <algorithm>
#include <bit>
#include <nlohmann/json.hpp>
#include <utility>

#include "plan/plan.h"
#include "runtime/allocator.h"
#include "runtime/interrupt.h"
#include "train/random_purpose.h"
#include "train/step.h"

namespace tessera::train {

using nlohmann::json;

namespace {

constexpr int64_t kWidest = 1 << 18;  // of the model's widths

}  // namespace

// ---- the settings ----

void TnpSettings::add_sizes(SettingList& list) {
  list.group("Data");
  list.add("context", context, "Context points per task").named("--m").range(int64_t{1}, kLargest);
  list.add("targets", targets, "Target points per task").named("--n").range(int64_t{1}, kLargest);
  list.add("batch", batch, "Tasks per micro-batch; a step has --accumulate micro-batches")
      .named("--batch-size")
      .range(int64_t{1}, kLargest);
  const auto size = [&](const char* key, int64_t& value, const char* help) -> Setting& {
    return list.add(std::string("model.") + key, value, help).range(int64_t{1}, kWidest);
  };
  size("features", model.features,
       "Features per input x; default: 10 for the prior linear, 1 for the Gaussian processes")
      .shown_as("");
  list.group("Model");
  size("d_model", model.d_model, "Hidden size");
  size("d_ff", model.d_ff, "Hidden size of the MLPs and heads");
  size("heads", model.heads, "Number of attention heads").named("--n-head");
  size("layers", model.layers, "Number of blocks");
  size("components", model.components, "Number of Gaussians in the mixture");
  size("embed_hidden", model.embed_hidden, "Hidden size of the embedder").named("--emb-hidden");
  list.add("model.pre_norm", model.pre_norm, "Pre-norm instead of post-norm");
  list.add("model.checkpoint_every", model.checkpoint_every,
           "Activation checkpointing: number of blocks per recomputed group; 0: off")
      .named("--checkpoint-interval")
      .range(int64_t{0}, int64_t{1} << 20);
  list.add_hidden("model.dtype", model.dtype);
}

SettingList TnpSettings::list() {
  SettingList list;
  add_sizes(list);
  list.group("Data");
  list.add("prior", prior, "Prior that tasks are drawn from")
      .one_of({"linear", "rbf", "matern52", "periodic"});
  list.add_hidden("task_stream", task_stream).absent_means(1);
  add_to(list);
  add_ranks(list).absent_means(1);  // newer than runs that can still be read
  return list;
}

plan::Memory TnpSettings::planned(Device device) const {
  return with_states(plan::count_memory(model, batch, context, targets, split), plan::hidden_matrices(model),
                     model.dtype, device);
}

void TnpSettings::validate() const {
  model.validate();
  check_values(TnpSettings(*this).list(), "tnp");
  check_training("tnp", model.dtype);
  check(optimizer != "loro",
        "tnp: the optimizer is loro, which updates weights made of two factors alone, and a TNP has none; "
        "give another --optimizer");
  check(prior == "linear" || model.features == 1, "tnp: the prior ", prior,
        " is one-dimensional; features is ", model.features, ", expected 1");
  check(task_stream >= 1 && task_stream <= datasets::kTaskStream, "tnp: \"task_stream\" is ", task_stream,
        "; this build knows 1 to ", datasets::kTaskStream);
  make_prior(*this);
}

void TnpSettings::check_split() const {
  for (const auto& [name, points] : {Size("context points (--m)", context), Size("targets (--n)", targets)})
    check(points >= split.ranks, "tnp: ", split.ranks, " ranks cannot share ", points, " ", name,
          "; expected at least one for each rank");
  check(split.by == nn::AttentionSplit::By::rows || model.heads % split.ranks == 0, "tnp: ", split.ranks,
        " ranks do not divide ", model.heads,
        " attention heads (--n-head), as --context-split heads needs; --context-split rows takes any number");
}

json to_json(const TnpSettings& settings) {
  return to_json(TnpSettings(settings).list(), Kept::job);
}

TnpSettings tnp_settings_from_json(const json& in) {
  return job_settings<TnpSettings>(in, "tnp job");
}

TnpSettings tnp_settings_of_run(const std::string& path, const json& run) {
  check(run.contains("job"), path, ": it has no \"job\"; not a run of `train tnp`");
  try {
    return tnp_settings_from_json(run["job"]);
  } catch (const Error& error) {
    fail_at(Site::here(), path, ": ", error.what());
  }
}

void check_task_stream(const TnpSettings& settings) {
  check(settings.task_stream == datasets::kTaskStream, "the run draws its tasks with version ",
        settings.task_stream, " of the priors, this build with version ", datasets::kTaskStream,
        ": it cannot continue with the same tasks. Finish it with the build that started it, or start a new "
        "run; `tessera eval tnp` and `tessera report` still read it");
}

int64_t default_features(const std::string& prior) {
  return prior == "linear" ? models::TnpConfig{}.features : 1;
}

namespace {

datasets::Prior prior_of(const TnpSettings& settings, int64_t batch, uint64_t seed, Device device) {
  return datasets::Prior({.kind = datasets::parse_prior(settings.prior),
                          .batch = batch,
                          .context = settings.context,
                          .targets = settings.targets,
                          .features = settings.model.features,
                          .seed = seed},
                         device);
}

}  // namespace

datasets::Prior make_prior(const TnpSettings& settings, Device device) {
  return prior_of(settings, settings.batch, settings.seed, device);
}

datasets::Prior fresh_tasks(const TnpSettings& settings, int64_t batch, Device device) {
  return prior_of(settings, batch, seed_for(RandomPurpose::evaluation, settings.seed), device);
}

// ---- the job ----

TnpJob::TnpJob(const TnpSettings& settings, Device device, int64_t eval_tasks)
    : Job(device),
      settings_(settings),
      rng_(seed_for(RandomPurpose::initialisation, settings.seed)),
      model_([&] {
        const MemoryTag tag("parameters");
        return models::Tnp(settings.model, rng_, device);
      }()),
      optimizer_(settings.make_optimizer(nn::parameters(model_), settings.model.dtype)),
      prior_(make_prior(settings, device)),
      eval_tasks_(eval_tasks) {
  use_for(RandomPurpose::dropout, settings.seed, rng_);
  const MemoryTag tag("batch");
  const auto input = [&](int64_t points, int64_t width) {
    return Tensor::empty_packed({settings.batch, points, width}, DType::f32, device);
  };
  batch_.xc = input(settings.context, settings.model.features);
  batch_.yc = input(settings.context, 1);
  batch_.xt = input(settings.targets, settings.model.features);
  batch_.yt = input(settings.targets, 1);
  own_ = batch_;
  keep("model", model_);
  train_with(optimizer_);
  draws_from("rng", rng_);
}

JobInfo TnpJob::info() const {
  const TnpSettings& s = settings_;
  const plan::Flops flops = plan::count_flops(s.model, s.batch, s.context, s.targets);
  return {.evaluates = true,
          .micro_batches = int(s.accumulate),
          .ranks_per_micro_batch = int(s.split.ranks),
          .tokens_per_step = double(s.accumulate * s.batch * (s.context + s.targets)),
          .flops_per_step = double(s.accumulate) * flops.step(s.model.checkpoint_every > 0)};
}

bool TnpJob::begin(const RunFolder&) {
  check_task_stream(settings_);
  return false;
}

Values TnpJob::evaluate() {
  const F32MathScope math(settings_.f32_math);
  const datasets::Prior fresh = fresh_tasks(settings_, std::min(eval_tasks_, settings_.batch), device());
  const eval::TnpEvaluation e = eval::evaluate_tnp(model_, fresh, eval_tasks_, group_ ? &*group_ : nullptr);
  return {{"eval_nll", e.nll},
          {"eval_optimal_nll", e.optimal_nll},
          {"eval_gap", e.gap},
          {"eval_gap_error", e.gap_error}};
}

void TnpJob::connect(const dist::World& world) {
  const int ranks = int(settings_.split.ranks);
  if (ranks == 1) return;
  const auto neighbours = [&](const comm::Communicator& all) {
    return all.split(all.rank() / ranks, all.rank());
  };
  const comm::Communicator host = neighbours(world.host()), data = neighbours(world.data(device()));
  group_.emplace(eval::TnpGroup{host, std::make_shared<models::TnpSplit>(
                                          data, settings_.split.by, settings_.context, settings_.targets)});
  own_ = models::part_of(batch_, group_->split);
}

namespace {

/// FNV-1a of the elements, for comparing.
std::string digest(const std::vector<Tensor>& tensors) {
  uint64_t hash = 0xcbf2'9ce4'8422'2325u;
  for (const Tensor& tensor : tensors)
    for (const float value : tensor.to_vector<float>())
      hash = (hash ^ std::bit_cast<uint32_t>(value)) * 0x100'0000'01b3u;
  return std::to_string(hash);
}

}  // namespace

void TnpJob::batch(uint64_t index) {
  draw(prior_, index);
  if (!group_ || std::exchange(compared_, true)) return;
  const std::vector<std::string> drawn = group_->host.gather_texts(digest(inputs()));
  for (size_t rank = 1; rank < drawn.size(); ++rank)
    check(drawn[rank] == drawn[0], "train tnp: ranks 0 and ", rank, " of the ", drawn.size(),
          " that share each task drew different tasks (batch ", index,
          "); they must have the same settings, build and kind of device");
}

void TnpJob::load(const datasets::RegressionBatch& batch) {
  batch_.xc.copy_from(batch.xc);
  batch_.yc.copy_from(batch.yc);
  batch_.xt.copy_from(batch.xt);
  batch_.yt.copy_from(batch.yt);
}

void TnpJob::draw(const datasets::Prior& prior, uint64_t index) {
  prior.draw(index, {batch_.xc, batch_.yc, batch_.xt, batch_.yt});
}

int64_t find_max_batch(const TnpSettings& settings, Device device, int64_t most) {
  const auto fits = [&](int64_t batch) {
    check_interrupt();
    TnpSettings trial = settings;
    trial.batch = batch;
    device.allocator().release_cached();
    try {
      TnpJob job(trial, device);
      for (const Tensor& input : job.inputs()) input.fill(0.5);
      Step step(job, {.graph = false, .global_order = settings.order == "global"});
      step(), step();
      device.synchronize();
      return true;
    } catch (const OutOfMemory&) {
      return false;
    }
  };
  check(fits(1), "find-max-batch: not even a batch of one task fits on ", device.name(),
        "; try --checkpoint-interval 1 or a smaller model");
  int64_t low = 1, high = 2;
  while (high <= most && fits(high)) low = high, high *= 2;
  high = std::min(high, most + 1);
  while (high - low > std::max<int64_t>(1, low / 32)) {  // within three percent
    const int64_t middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  device.allocator().release_cached();
  return low;
}

}  // namespace tessera::train

#include "train/tnp_job.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "autograd/tape.h"
#include "io/checkpoint.h"
#include "io/checkpoint_folder.h"
#include "runtime/allocator.h"
#include "runtime/interrupt.h"
#include "train/session.h"

namespace tessera::train {

using nlohmann::json;

namespace {

/// Evaluation draws its tasks under another key than training does: the two never meet.
constexpr int64_t kWidest = 1 << 18;  // of the model's widths
constexpr uint64_t kEvaluationSeed = 0xE7A1'5EED'0000'0001u;

}  // namespace

// ---- the job ----

void TnpJob::validate() const {
  model.validate();
  check(f32_math == F32Math::ieee || model.dtype == DType::f32, "tnp: f32_math is ", name_of(f32_math),
        ", but the model is ", model.dtype, "; only f32 has it");
  const std::pair<const char*, int64_t> sizes[] = {{"context (--m)", context},
                                                   {"targets (--n)", targets},
                                                   {"batch (--batch-size)", batch},
                                                   {"steps", steps}};
  for (const auto& [name, size] : sizes)
    check(size >= 1 && size <= kLargest, "tnp: ", name, " is ", size, "; it must be from 1 to ", kLargest);
  const std::pair<const char*, int64_t> widths[] = {{"features (--features)", model.features},
                                                    {"d_model (--d-model)", model.d_model},
                                                    {"d_ff (--d-ff)", model.d_ff},
                                                    {"layers (--layers)", model.layers},
                                                    {"components (--components)", model.components},
                                                    {"embed_hidden (--emb-hidden)", model.embed_hidden}};
  for (const auto& [name, size] : widths)
    check(size <= kWidest, "tnp: ", name, " is ", size, "; it must be at most ", kWidest);
  check(warmup >= 0, "tnp: warmup is ", warmup);
  check(lr > 0 && std::isfinite(lr), "tnp: lr is ", lr, "; it must be positive");
  check(weight_decay >= 0 && clip_norm >= 0, "tnp: weight_decay is ", weight_decay, " and clip_norm ",
        clip_norm, "; they must not be negative");
  check(prior == "linear" || model.features == 1, "tnp: the prior ", prior,
        " is one-dimensional; features is ", model.features, ", expected 1");
  make_schedule(*this);
  make_prior(*this);
}

json to_json(const TnpJob& job) {
  json out = job_to_json(job);
  if (job.task_stream != 1) out["task_stream"] = job.task_stream;
  return out;
}

TnpJob tnp_job_from_json(const json& in) {
  json settings = in;
  int64_t task_stream = 1;
  if (in.is_object() && in.contains("task_stream")) {
    const json& stored = in["task_stream"];
    check(is_setting_of<int64_t>(stored) && stored >= 1 && stored <= datasets::kTaskStream,
          "tnp job: \"task_stream\" is ", stored.dump(), "; this build knows 1 to ", datasets::kTaskStream);
    task_stream = stored.get<int64_t>();
    settings.erase("task_stream");
  }
  TnpJob job = job_from_json<TnpJob>(settings, "tnp job");
  job.task_stream = task_stream;
  return job;
}

void check_task_stream(const TnpJob& job) {
  check(job.task_stream == datasets::kTaskStream, "the run draws its tasks by version ", job.task_stream,
        " of the priors, this build by version ", datasets::kTaskStream,
        ": it cannot go on with the tasks that it would have met. Finish it with the build that began it, or "
        "start a new run; `tessera eval tnp` and `tessera report` take it as it is");
}

int64_t default_features(const std::string& prior) {
  return prior == "linear" ? models::TnpConfig{}.features : 1;
}

optim::Schedule make_schedule(const TnpJob& job) {
  return optim::Schedule({.kind = optim::parse_schedule(job.schedule.c_str()),
                          .lr = job.lr,
                          .steps = job.steps,
                          .warmup = std::min(job.warmup, job.steps / 2)});
}

datasets::Prior make_prior(const TnpJob& job, bool evaluation, Device device) {
  return datasets::Prior({.kind = datasets::parse_prior(job.prior),
                          .batch = job.batch,
                          .context = job.context,
                          .targets = job.targets,
                          .features = job.model.features,
                          .seed = evaluation ? job.seed ^ kEvaluationSeed : job.seed},
                         device);
}

// ---- the session ----

TnpSession::TnpSession(const TnpJob& job, Device device)
    : job_(job),
      device_(device),
      rng_(job.seed),
      model_([&] {
        const MemoryTag tag("parameters");
        return models::Tnp(job.model, rng_, device);
      }()),
      optimizer_([&] {
        const MemoryTag tag("optimizer");
        return optim::AdamW(nn::parameters(model_),
                            {.lr = job.lr,
                             .weight_decay = job.weight_decay,
                             .max_norm = job.clip_norm,
                             .loss_scale = optim::default_loss_scale(job.model.dtype)});
      }()) {
  const MemoryTag tag("batch");
  const auto input = [&](const Shape& shape) { return Tensor::empty_packed(shape, DType::f32, device); };
  batch_.xc = input({job.batch, job.context, job.model.features});
  batch_.yc = input({job.batch, job.context, 1});
  batch_.xt = input({job.batch, job.targets, job.model.features});
  batch_.yt = input({job.batch, job.targets, 1});
}

void TnpSession::load(const datasets::RegressionBatch& batch) {
  batch_.xc.copy_from(batch.xc);
  batch_.yc.copy_from(batch.yc);
  batch_.xt.copy_from(batch.xt);
  batch_.yt.copy_from(batch.yt);
}

void TnpSession::draw(const datasets::Prior& prior, uint64_t index) {
  prior.draw(index, {batch_.xc, batch_.yc, batch_.xt, batch_.yt});
}

io::Checkpoint TnpSession::checkpoint(int64_t step) const {
  return checkpoint_of_session(to_json(job_), step, io::named("model", model_),
                               io::named("optimizer", optimizer_), io::named("rng", rng_));
}

int64_t TnpSession::restore(const std::filesystem::path& file) {
  return restore_session(file, to_json(job_), io::named("model", model_), io::named("optimizer", optimizer_),
                         io::named("rng", rng_));
}

int64_t find_max_batch(const TnpJob& job, Device device, int64_t most) {
  const auto fits = [&](int64_t batch) {
    check_interrupt();
    TnpJob trial = job;
    trial.batch = batch;
    device.allocator().release_cached();
    try {
      TnpSession session(trial, device);
      for (const Tensor& input : session.inputs()) input.fill(0.5);
      for (int step = 0; step < 2; ++step) {
        Tape tape({.loss_scale = session.optimizer().loss_scale()});
        tape.backward(session.loss());
        session.optimizer().step();
        session.optimizer().zero_grad();
      }
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

// ---- training ----

TrainResult train_tnp(TnpSession& session, const RunFolder& run, const TrainerOptions& options,
                      int64_t first_step, int64_t eval_tasks, Progress& progress) {
  const TnpJob& job = session.job();
  check_task_stream(job);
  const datasets::Prior prior = make_prior(job, false, session.device());
  uint64_t index = uint64_t(first_step) * uint64_t(options.accumulate);
  io::CheckpointFolder folder(run.checkpoints().string(), options.keep);
  Task task;
  task.load = [&] { session.draw(prior, index++); };
  task.loss = [&] { return session.loss(); };
  task.evaluate = [&] {
    const TnpEvaluation e =
        evaluate_tnp(session.model(), job, session.device(), eval_tasks, std::min(eval_tasks, job.batch));
    return std::map<std::string, double>{{"eval_nll", e.nll},
                                         {"eval_optimal_nll", e.optimal_nll},
                                         {"eval_gap", e.gap},
                                         {"eval_gap_error", e.gap_error}};
  };
  task.save = [&](int64_t step) {
    const io::Checkpoint whole = session.checkpoint(step);
    folder.save(step, whole);
  };
  const models::TnpFlops flops = count_flops(job.model, job.batch, job.context, job.targets);
  task.tokens_per_step = double(job.batch * (job.context + job.targets));
  task.flops_per_step = flops.step(job.model.checkpoint_every > 0);
  return run_training(task, session.optimizer(), run, session.device(), options, first_step, progress);
}

}  // namespace tessera::train

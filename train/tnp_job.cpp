#include "train/tnp_job.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "plan/plan.h"
#include "runtime/allocator.h"
#include "runtime/error.h"
#include "train/random_purpose.h"

namespace tessera::train {

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

}  // namespace tessera::train

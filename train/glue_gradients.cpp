#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "autograd/tape.h"
#include "io/file.h"
#include "runtime/device.h"
#include "train/glue_job.h"
#include "train/gradient_probe.h"
#include "train/random_purpose.h"

/// Where a fine-tuning run looks at gradients besides training: comparisons with the dense gradient,
/// estimates of the rows of `--rows auto`, sensitivities of DropBP's branches.

namespace tessera::train {

using nlohmann::json;

/// Of the batch that is loaded.
void GlueJob::backward() {
  const F32MathScope math(settings_.f32_math);
  Tape tape({.loss_scale = optimizer_.loss_scale()});
  tape.backward(model_.loss(batch_, targets_));
}

namespace {

/// Random numbers of a comparison of gradients in `step`, which the training never draws: the same on all
/// ranks.
Rng::State apart(RandomPurpose purpose, uint64_t seed, uint64_t step) {
  return {seed_for(purpose, seed) ^ 1, (step + 1) << 32};
}

/// Appends the line of a step, in place of those of that step and later ones: a resumed run may meet a step
/// again.
void write_line(const std::filesystem::path& file, uint64_t step, json line) {
  line["step"] = step;
  std::string kept;
  if (std::filesystem::exists(file)) {
    std::istringstream lines(io::read_file(file.string(), int64_t{1} << 30));
    for (std::string old; std::getline(lines, old);)
      if (json::parse(old).value("step", uint64_t{0}) < step) kept += old + "\n";
  }
  io::write_file(file.string(), kept + line.dump() + "\n");
}

}  // namespace

/// With the dropout masks of the micro-batch that follows, rows of its own, and no branch dropped.
void GlueJob::probe(uint64_t step) {
  const Rng::State dropout = rng_.state(), rows = slice_rng_.state();
  slice_rng_.set_state(apart(RandomPurpose::row_choice, settings_.seed, step));
  const auto backward_again = [&] {
    rng_.set_state(dropout);
    backward();
  };
  if (drops_) drops_->set_dropped(std::vector(drops_->size(), false));
  const auto distances = probe_gradient(sliced_, optimizer_, SliceSettings::kProbeDraws, backward_again);
  rng_.set_state(dropout), slice_rng_.set_state(rows);
  json line{{"draws", SliceSettings::kProbeDraws}};
  for (const GradientDistance& each : distances)
    line["gradients"][each.name] = {
        {"cosine", each.cosine}, {"bias", each.bias}, {"variance", each.variance}};
  write_line(probes_, step, std::move(line));
}

/// On the first micro-batches of this step and the next ones, with dropout masks and rows of its own: each
/// rank finds the same shares. What accumulation divides both variances by does not change their ratio.
void GlueJob::estimate_rows(uint64_t step) {
  const Rng::State dropout = rng_.state(), rows = slice_rng_.state();
  Rng::State draws = apart(RandomPurpose::row_choice, settings_.seed, step);
  draws.seed ^= 2;  // not those of a probe
  slice_rng_.set_state(draws);
  Rng::State masks = dropout;
  const auto load_batch = [&](int i) {
    load(micro_batch(step * uint64_t(settings_.accumulate) + uint64_t(i)));
    masks = apart(RandomPurpose::dropout, settings_.seed, step);
    masks.seed ^= uint64_t(i) << 1;
    const int64_t all = batch_.tokens.count();
    const bool padded = settings_.batches == "padded";
    return AutoRows::BatchRows{
        .rows = all, .valid = padded ? batch_.cu_seqlens.to(DType::i64).to_vector<int64_t>().back() : all};
  };
  const auto backward_again = [&] {
    rng_.set_state(masks);
    backward();
  };
  Event begin(Device::cpu()), end(Device::cpu());
  device().synchronize();
  begin.record();
  const RowEstimate found =
      auto_rows_->estimate(optimizer_, {.load = load_batch, .backward = backward_again});
  device().synchronize();
  end.record();
  rng_.set_state(dropout), slice_rng_.set_state(rows);
  if (row_log_.empty() || first_ != 0) return;
  json line{{"batch_variance", found.batch_variance},
            {"added_variance", found.added_variance},
            {"held", found.held},
            {"passes", found.passes},
            {"seconds", end.milliseconds_since(begin) / 1e3},
            {"modelled_time", found.seconds_dense > 0 ? found.seconds_sliced / found.seconds_dense : 1}};
  const std::vector<double> shares = auto_rows_->shares.to_vector<double>();
  const std::vector<std::string> groups = auto_rows_->groups();
  for (size_t g = 0; g < groups.size(); ++g) line["shares"][groups[g]] = shares[g];
  write_line(row_log_, step, std::move(line));
}

/// On the first micro-batch of the step, with dropout masks and rows of its own: each rank finds the same
/// rates.
void GlueJob::calibrate_drops(uint64_t step) {
  load(micro_batch(step * uint64_t(settings_.accumulate)));
  const Rng::State dropout = rng_.state(), rows = slice_rng_.state();
  const auto backward_again = [&] {
    rng_.set_state(apart(RandomPurpose::dropout, settings_.seed, step));
    slice_rng_.set_state(apart(RandomPurpose::row_choice, settings_.seed, step));
    backward();
  };
  const std::vector<double> sensitivities = drop_sensitivities(*drops_, optimizer_, backward_again);
  rng_.set_state(dropout), slice_rng_.set_state(rows);
  std::vector<double> flops, rates;
  for (const nn::DropBP::Branch& branch : drops_->branches()) flops.push_back(branch.flops);
  for (const int tenths : nn::allocate_drop_rates(sensitivities, flops, settings_.drop.share))
    rates.push_back(tenths / 10.0);
  drop_rates_.copy_from(Tensor::from(rates, {int64_t(rates.size())}));
}

}  // namespace tessera::train

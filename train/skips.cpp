#include "train/skips.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace tessera::train {

void SkipWatch::Row::update(int64_t all_skipped, int64_t all_done, bool finite) {
  const int64_t newly = all_skipped - skipped, steps = all_done - done;
  skipped = all_skipped, done = all_done;
  // Among steps that were done the last one may be the only one in a row.
  row = finite ? 0 : steps > 0 ? std::min<int64_t>(1, newly) : row + newly;
}

SkipWatch::SkipWatch(const OptimizerRef& optimizer) : optimizer_(optimizer.counted()) {
  if (!optimizer_) return;
  all_ = {.skipped = optimizer_->skipped(), .done = optimizer_->steps()};
  minimum_ = {.skipped = optimizer_->skipped_at_minimum(), .done = all_.done};
  if (scales()) loss_scale_ = optimizer_->loss_scale().item();
  warned_ = minimum_.skipped > 0;
}

void SkipWatch::look(bool finite) {
  if (!optimizer_) return;
  const int64_t done = optimizer_->steps();
  all_.update(optimizer_->skipped(), done, finite);
  minimum_.update(optimizer_->skipped_at_minimum(), done, finite);
  if (scales()) loss_scale_ = optimizer_->loss_scale().item();
}

std::string SkipWatch::warning(int64_t step) {
  if (minimum_.skipped == 0 || std::exchange(warned_, true)) return {};
  return fmt::format(
      "tessera: warning: up to step {} a step was skipped at the smallest loss scale, {:g}: its gradients "
      "overflow f16 whatever the scale; bf16 has the range of f32\n",
      step, loss_scale_);
}

std::string SkipWatch::complaint(int64_t step, const std::string& saved) const {
  return fmt::format(
      "training: the gradient norm was not finite for {} steps up to step {}{}; the weights were left as "
      "they were. {}; try a lower learning rate, {}or {}",
      fatal_row(), step,
      scales() ? fmt::format(", although the loss scale has fallen to its minimum, {:g}", loss_scale_)
               : std::string(),
      saved, scales() ? "bf16 instead of f16, " : "", kFindOperator);
}

}  // namespace tessera::train

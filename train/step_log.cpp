#include "train/step_log.h"

#include <algorithm>

#include "eval/statistics.h"
#include "runtime/allocator.h"

namespace tessera::train {
namespace {

constexpr double kGib = double(1 << 30);

}  // namespace

StepLog::StepLog(Device device, const JobInfo& info, const TrainerOptions& options, const RunFolder& run,
                 report::Progress& progress)
    : info_(info),
      options_(options),
      device_(device),
      run_(run),
      progress_(progress),
      data_(device),
      writes_(!options.world || options.world->leads()) {
  if (writes_ && io::EventWriter::available()) events_.emplace(run.path().string());
}

void StepLog::restart() {
  start_ = Clock::now();
  steps_ = 0;
}

void StepLog::restart_after_save() {
  restart();
  data_.take();
}

StepRecord StepLog::record(int64_t step, double loss, double lr, double norm, const SkipWatch& skips,
                           double exposed_ms, bool steady) {
  const double elapsed = seconds_since(start_), per_step = elapsed / double(steps_);
  if (steady) step_seconds_.push_back(per_step);
  const AllocatorStats memory = device_.allocator().stats();
  StepRecord record{step,
                    {{"loss", loss},
                     {"ms_per_step", per_step * 1e3},
                     {"tokens_per_s", info_.tokens_per_step / per_step},
                     {"data_wait", data_.take() / std::max(elapsed, 1e-9)},
                     {"memory_gib", double(memory.allocated) / kGib},
                     {"peak_gib", double(memory.reserved_peak) / kGib}}};
  const bool shows_skips = skips.scales() || skips.skipped() > 0;
  if (lr >= 0) record.values["lr"] = lr;
  if (norm >= 0 || norm != norm) record.values["grad_norm"] = norm;
  if (shows_skips) record.values["skipped_steps"] = double(skips.skipped());
  if (exposed_ms >= 0) record.values["exposed_communication_ms"] = exposed_ms;
  if (skips.scales()) record.values["loss_scale"] = skips.loss_scale();
  const auto value = [&](const char* name) {
    const auto found = record.values.find(name);
    return found == record.values.end() ? -1.0 : found->second;
  };
  progress_.show({.step = step,
                  .steps = options_.steps,
                  .loss = loss,
                  .lr = lr,
                  .grad_norm = norm,
                  .loss_scale = value("loss_scale"),
                  .skipped = shows_skips ? skips.skipped() : -1,
                  .tokens_per_s = value("tokens_per_s"),
                  .ms_per_step = value("ms_per_step"),
                  .memory_gib = value("memory_gib"),
                  .peak_gib = value("peak_gib"),
                  .data_wait = value("data_wait"),
                  .exposed_ms = exposed_ms});
  return record;
}

void StepLog::write(const StepRecord& record) {
  if (!writes_) return;
  written_ == record.step ? run_.replace_last(record) : run_.append(record);
  written_ = record.step;
}

void StepLog::write_events(const StepRecord& record) {
  if (!events_) return;
  for (const auto& [name, value] : record.values) events_->scalar(name, record.step, value);
}

void StepLog::flush_events() {
  if (events_) events_->flush();
}

void StepLog::summarise(TrainResult& result, int64_t steps, double seconds) const {
  result.seconds = seconds;
  // A run of no more than those two steps is timed as a whole.
  result.ms_per_step = 1e3 * (step_seconds_.empty() ? seconds / double(std::max<int64_t>(1, steps))
                                                    : eval::median(step_seconds_));
  result.tokens_per_s = result.ms_per_step > 0 ? info_.tokens_per_step / result.ms_per_step * 1e3 : 0;
}

}  // namespace tessera::train

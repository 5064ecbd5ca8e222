#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <vector>

#include "io/events.h"
#include "train/data_wait.h"
#include "train/skips.h"
#include "train/trainer.h"

namespace tessera::train {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Measures steps and writes them down: the intervals between logged steps, the records of metrics.jsonl and
/// of TensorBoard, the progress line.
class StepLog {
 public:
  StepLog(Device device, const JobInfo& info, const TrainerOptions& options, const RunFolder& run,
          report::Progress& progress);

  /// load(), whose time counts as waiting for data.
  void load(const std::function<void()>& load) { data_.around(load); }
  /// A step was issued.
  void stepped() { steps_ += 1; }
  /// Begins the next interval now, after work that is not part of a step.
  void restart();
  /// The same after a save; also resets the time that was waited for data.
  void restart_after_save();

  /// The record of a step whose loss is known; shows it too. `exposed_ms`: Step::exposed_ms. `steady`: its
  /// interval tells the pace.
  StepRecord record(int64_t step, double loss, double lr, double norm, const SkipWatch& skips,
                    double exposed_ms, bool steady);
  /// To metrics.jsonl: a line, or in place of the one that this step has already.
  void write(const StepRecord& record);
  void write_events(const StepRecord& record);
  void flush_events();

  /// Sets the figures of the whole: `steps` of this process took `seconds`.
  void summarise(TrainResult& result, int64_t steps, double seconds) const;

 private:
  const JobInfo info_;
  const TrainerOptions& options_;
  const Device device_;
  const RunFolder& run_;
  report::Progress& progress_;
  DataWait<> data_;
  const bool writes_;  // of several ranks, rank 0
  Clock::time_point start_ = Clock::now();
  int64_t steps_ = 0;                 // since start_
  int64_t written_ = -1;              // the step of the last line
  std::vector<double> step_seconds_;  // of steady intervals
  std::optional<io::EventWriter> events_;
};

}  // namespace tessera::train

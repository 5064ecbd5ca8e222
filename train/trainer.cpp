#include "train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <vector>

#include "autograd/tape.h"
#include "io/events.h"
#include "ops/pointwise/pointwise.h"
#include "runtime/allocator.h"
#include "runtime/capture.h"
#include "train/data_wait.h"
#include "train/interrupt.h"

namespace tessera::train {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::nth_element(values.begin(), values.begin() + ptrdiff_t(values.size() / 2), values.end());
  return values[values.size() / 2];
}

/// What happened since the last logged step.
struct Interval {
  Clock::time_point start = Clock::now();
  int64_t steps = 0;
};

/// How many steps up to the last one logged had no finite gradient norm, as far as the optimizer's counts
/// tell.
class SkipRow {
 public:
  explicit SkipRow(const optim::Optimizer& optimizer)
      : skipped_(optimizer.skipped()), done_(optimizer.steps()) {}
  int64_t update(const optim::Optimizer& optimizer, bool finite) {
    const int64_t skipped = optimizer.skipped() - skipped_, done = optimizer.steps() - done_;
    skipped_ += skipped, done_ += done;
    // Among steps that were done the last one may be the only one in a row.
    row_ = finite ? 0 : done > 0 ? 1 : row_ + skipped;
    return row_;
  }

 private:
  int64_t skipped_, done_, row_ = 0;
};

}  // namespace

TrainResult run_training(const Task& task, optim::AdamW& optimizer, const RunFolder& run, Device device,
                         const TrainerOptions& options, int64_t first_step, Progress& progress) {
  const InterruptGuard interrupts;
  TrainResult result;
  result.step = first_step;
  const Tensor loss_value = Tensor::zeros({}, DType::f32, device);

  // With one micro-batch the whole step is one graph: forward, backward and update. With several, one graph
  // is a micro-batch and another the update. A graph either overwrites the gradients or adds to them, so all
  // micro-batches add (but for the very first, which finds nothing), and the update leaves zeros.
  const bool whole = options.accumulate == 1;
  const auto micro_step = [&] {
    const MemoryTag tag("activations");
    Tape tape({.check_finite = options.check_finite});
    const Tensor loss = task.loss();
    if (whole) {
      loss_value.copy_from(loss.detach());
      tape.backward(loss);
    } else {
      const Tensor share = ops::scale(loss, 1.0 / options.accumulate);
      loss_value.copy_from(ops::add(loss_value, share.detach().to(DType::f32)));
      tape.backward(share);
    }
  };
  const auto update = [&] {
    optimizer.step();
    if (task.updated) task.updated();
    if (whole) {
      optimizer.zero_grad();
    } else {
      optimizer.gradients().fill(0);
    }
  };
  Captured captured(device, [&] {
    micro_step();
    if (whole) update();
  });
  Captured captured_update(device, update);
  const bool graph = options.graph && !options.check_finite && device.is_cuda();
  const auto run_micro = [&] { graph ? captured() : (micro_step(), whole ? update() : void()); };

  Interval interval;
  DataWait data(device);
  std::vector<double> step_seconds;
  SkipRow skips(optimizer);
  std::optional<io::EventWriter> events;
  if (io::EventWriter::available()) events.emplace(run.path().string());
  double evaluation_seconds = 0;
  const Clock::time_point begun = Clock::now();
  optimizer.zero_grad();

  for (int64_t step = first_step; step < options.steps; ++step) {
    optimizer.set_lr(options.schedule.at(step));
    if (!whole) loss_value.fill(0);
    for (int micro = 0; micro < options.accumulate; ++micro) {
      data.around(task.load);
      run_micro();
    }
    if (!whole) graph ? captured_update() : update();
    interval.steps += 1;
    result.step = step + 1;

    bool last = step + 1 == options.steps;
    const int signal = InterruptGuard::signal_received();
    const bool stop = signal != 0 && !last;
    const bool evaluate =
        task.evaluate && (last || (options.eval_every > 0 && (step + 1) % options.eval_every == 0));
    const bool sample_due = options.sample_every > 0 && (step + 1) % options.sample_every == 0;
    Task::Verdict verdict;
    // What is kept does not depend on where a run was stopped and resumed; what is shown may.
    const bool log =
        step == 0 || last || evaluate || (task.sample && sample_due) || (step + 1) % options.log_every == 0;
    if (log || stop || step == first_step) {
      const double loss = loss_value.item<double>();  // waits for the device
      const double norm = optimizer.grad_norm();
      const double elapsed = seconds_since(interval.start);
      result.loss = loss;
      const int64_t skipped_in_a_row = skips.update(optimizer, std::isfinite(norm));
      const double per_step = elapsed / double(interval.steps);
      if (step > first_step + 1) step_seconds.push_back(per_step);  // the first is eager, the second captures
      const AllocatorStats memory = device.allocator().stats();
      StepRecord record{step + 1,
                        {{"loss", loss},
                         {"lr", options.schedule.at(step)},
                         {"grad_norm", norm},
                         {"ms_per_step", per_step * 1e3},
                         {"tokens_per_s", task.tokens_per_step / per_step},
                         {"data_wait", data.take() / std::max(elapsed, 1e-9)},
                         {"memory_gib", double(memory.allocated) / double(1 << 30)},
                         {"peak_gib", double(memory.reserved_peak) / double(1 << 30)}}};
      if (options.ceiling_tflops > 0)
        record.values["flop_share"] = task.flops_per_step / per_step / options.ceiling_tflops / 1e12;
      if (evaluate) {
        const Clock::time_point evaluation_start = Clock::now();
        const NoTape off;
        result.evaluation = task.evaluate();
        for (const auto& [name, value] : result.evaluation) record.values[name] = value;
        if (task.judge) verdict = task.judge(step + 1, result.evaluation);
        last |= verdict.stop;
        evaluation_seconds += seconds_since(evaluation_start);
      }
      if (!log && stop) record.values["interrupted"] = 1;
      if (log || stop) run.append(record);
      if (log && events)
        for (const auto& [name, value] : record.values) events->scalar(name, record.step, value);
      progress.show({.step = step + 1,
                     .steps = options.steps,
                     .loss = loss,
                     .lr = options.schedule.at(step),
                     .grad_norm = norm,
                     .tokens_per_s = record.values["tokens_per_s"],
                     .ms_per_step = per_step * 1e3,
                     .memory_gib = record.values["memory_gib"],
                     .peak_gib = record.values["peak_gib"],
                     .data_wait = record.values["data_wait"],
                     .flop_share = options.ceiling_tflops > 0 ? record.values["flop_share"] : -1});
      check(skipped_in_a_row < options.most_skips, "training: the gradient norm was not finite for ",
            skipped_in_a_row, " steps up to step ", step + 1,
            "; the weights were left as they were. The newest checkpoint is in ", run.checkpoints().string(),
            "; try a lower learning rate, or --check-finite to find the operator");
      // One bad batch at the end is skipped like any other; with a second sign it is the weights.
      const bool lost = skipped_in_a_row > 1 || std::ranges::any_of(result.evaluation, [](const auto& value) {
                          return !std::isfinite(value.second);
                        });
      check(!last || std::isfinite(loss) || !lost, "training: the loss of the last step (", step + 1,
            ") is not finite, the run has diverged; try a lower learning rate, or --check-finite to find the "
            "operator");
      if (task.sample && (last || sample_due)) {
        const Clock::time_point sample_start = Clock::now();
        const NoTape off;
        task.sample(step + 1);
        evaluation_seconds += seconds_since(sample_start);
      }
      interval = Interval{};
    }
    if (last || stop || verdict.save ||
        (options.checkpoint_every > 0 && (step + 1) % options.checkpoint_every == 0)) {
      device.synchronize();
      task.save(step + 1);
      if (events) events->flush();
      interval.start = Clock::now();
      interval.steps = 0;
      data.take();
    }
    if (last) break;
    if (stop) {
      result.outcome = Outcome::interrupted;
      result.signal = signal;
      break;
    }
  }
  if (first_step >= options.steps) {  // killed behind its last step: what was logged there stays
    const std::vector<StepRecord> records = run.metrics();
    if (!records.empty() && records.back().values.contains("loss"))
      result.loss = records.back().values.at("loss");
    const NoTape off;
    if (task.evaluate) result.evaluation = task.evaluate();
  }
  progress.finish();
  result.seconds = seconds_since(begun) - evaluation_seconds;
  // A run of no more than those two steps is timed as a whole.
  result.ms_per_step =
      1e3 * (step_seconds.empty() ? result.seconds / double(std::max<int64_t>(1, result.step - first_step))
                                  : median(step_seconds));
  result.tokens_per_s = result.ms_per_step > 0 ? task.tokens_per_step / result.ms_per_step * 1e3 : 0;
  return result;
}

}  // namespace tessera::train

#include "train/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "autograd/tape.h"
#include "io/events.h"
#include "ops/pointwise/pointwise.h"
#include "runtime/allocator.h"
#include "runtime/capture.h"
#include "runtime/interrupt.h"
#include "train/data_wait.h"

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

/// How many steps up to the last one logged were skipped in a row, as far as the optimizer's counts tell.
class SkipRow {
 public:
  /// The counts of skipped steps and of those that were done, as they are before the first step.
  SkipRow(int64_t skipped, int64_t done) : skipped_(skipped), done_(done) {}
  /// `finite`: the last step was done.
  int64_t update(int64_t all_skipped, int64_t all_done, bool finite) {
    const int64_t skipped = all_skipped - skipped_, done = all_done - done_;
    skipped_ += skipped, done_ += done;
    // Among steps that were done the last one may be the only one in a row.
    row_ = finite ? 0 : done > 0 ? std::min<int64_t>(1, skipped) : row_ + skipped;
    return row_;
  }

 private:
  int64_t skipped_, done_, row_ = 0;
};

/// Stands in the record of a step whose evaluation was not done when the run was stopped or killed.
constexpr const char* kUnevaluated = "unevaluated";

/// Does what a run that was stopped or killed had left of its step `step`: the evaluation and the sample. For
/// a run that is resumed behind its last step the evaluation is done again in any case: result has it.
/// Returns whether the run ends here.
bool catch_up(const Task& task, const RunFolder& run, const TrainerOptions& options, int64_t step,
              const std::function<void(int64_t)>& save, TrainResult& result) {
  const NoTape off;
  bool over = step >= options.steps;
  const std::vector<StepRecord> records = run.metrics();
  StepRecord record{step, {}};
  if (!records.empty() && records.back().step == step) record = records.back();
  if (const auto loss = record.values.find("loss"); loss != record.values.end()) result.loss = loss->second;
  const bool pending = record.values.erase(kUnevaluated) > 0;
  if (task.evaluate && (pending || over)) result.evaluation = task.evaluate();
  if (task.evaluate && pending) {
    for (const auto& [name, value] : result.evaluation) record.values[name] = value;
    run.replace_last(record);
    const Task::Verdict verdict = task.judge ? task.judge(step, result.evaluation) : Task::Verdict{};
    if (verdict.save) save(step);
    over |= verdict.stop;
  }
  const bool sample_due = options.sample_every > 0 && step % options.sample_every == 0;
  if (task.sample && (over || sample_due) &&
      std::ranges::none_of(run.samples(), [&](const Sample& sample) { return sample.step == step; }))
    task.sample(step);
  return over;
}

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
    Tape tape({.check_finite = options.check_finite, .loss_scale = optimizer.loss_scale()});
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
  const bool scaled = optimizer.loss_scale().defined();
  if (options.loss_scale) optimizer.set_loss_scale(*options.loss_scale);
  result.skipped = optimizer.skipped();
  if (scaled) result.loss_scale = optimizer.loss_scale().item();
  SkipRow skips(result.skipped, optimizer.steps());
  SkipRow skips_at_minimum(optimizer.skipped_at_minimum(), optimizer.steps());
  bool warned = optimizer.skipped_at_minimum() > 0;
  std::optional<io::EventWriter> events;
  if (io::EventWriter::available()) events.emplace(run.path().string());
  double evaluation_seconds = 0;
  const Clock::time_point begun = Clock::now();
  optimizer.zero_grad();
  const auto save = [&](int64_t step) {
    device.synchronize();
    task.save(step);
    if (events) events->flush();
  };

  bool over = first_step >= options.steps;
  if (first_step > 0) {
    try {
      over |= catch_up(task, run, options, first_step, save, result);
    } catch (const Interrupted& interrupted) {
      result.outcome = Outcome::interrupted;
      result.signal = interrupted.signal();
      over = true;
    }
    interval = Interval{};
  }
  for (int64_t step = first_step; !over && step < options.steps; ++step) {
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
    const bool save_due = options.checkpoint_every > 0 && (step + 1) % options.checkpoint_every == 0;
    const bool evaluate =
        task.evaluate && (last || (options.eval_every > 0 && (step + 1) % options.eval_every == 0));
    const bool sample_due = options.sample_every > 0 && (step + 1) % options.sample_every == 0;
    int signal = InterruptGuard::signal_received();
    // The last step ends the run anyway, unless its evaluation would keep whoever stops the run waiting.
    bool stop = signal != 0 && (!last || evaluate);
    bool saved = false;
    Task::Verdict verdict;
    // What is kept does not depend on where a run was stopped and resumed; what is shown may.
    const bool log =
        step == 0 || last || evaluate || (task.sample && sample_due) || (step + 1) % options.log_every == 0;
    if (log || stop || step == first_step) {
      const double loss = loss_value.item<double>();  // waits for the device
      const double norm = optimizer.grad_norm();
      const double elapsed = seconds_since(interval.start);
      result.loss = loss;
      const int64_t skipped = optimizer.skipped(), done = optimizer.steps(),
                    at_minimum = optimizer.skipped_at_minimum();
      const int64_t skipped_in_a_row = skips.update(skipped, done, std::isfinite(norm));
      const int64_t at_minimum_in_a_row = skips_at_minimum.update(at_minimum, done, std::isfinite(norm));
      result.skipped = skipped;
      if (scaled) result.loss_scale = optimizer.loss_scale().item();
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
      if (scaled || skipped > 0) record.values["skipped_steps"] = double(skipped);
      if (scaled) record.values["loss_scale"] = result.loss_scale;
      if (options.ceiling_tflops > 0)
        record.values["flop_share"] = task.flops_per_step / per_step / options.ceiling_tflops / 1e12;
      progress.show({.step = step + 1,
                     .steps = options.steps,
                     .loss = loss,
                     .lr = options.schedule.at(step),
                     .grad_norm = norm,
                     .loss_scale = scaled ? result.loss_scale : -1,
                     .skipped = scaled || skipped > 0 ? skipped : -1,
                     .tokens_per_s = record.values["tokens_per_s"],
                     .ms_per_step = per_step * 1e3,
                     .memory_gib = record.values["memory_gib"],
                     .peak_gib = record.values["peak_gib"],
                     .data_wait = record.values["data_wait"],
                     .flop_share = options.ceiling_tflops > 0 ? record.values["flop_share"] : -1});
      if (evaluate) record.values[kUnevaluated] = 1;  // until it is done
      if (!log && stop) record.values["interrupted"] = 1;
      bool written = false;
      const auto write = [&] {
        written ? run.replace_last(record) : run.append(record);
        written = true;
      };
      // A scale that falls is how training in f16 begins; at the smallest one nothing is left to try.
      const int64_t in_a_row = scaled ? at_minimum_in_a_row : skipped_in_a_row;
      if ((log || stop) && in_a_row >= options.most_skips) write();
      if (at_minimum > 0 && !std::exchange(warned, true)) {
        progress.finish();
        tell(fmt::format(
            "tessera: warning: up to step {} a step was skipped at the smallest loss scale, {:g}: its "
            "gradients overflow f16 whatever the scale; bf16 has the range of f32\n",
            step + 1, result.loss_scale));
      }
      check(in_a_row < options.most_skips, "training: the gradient norm was not finite for ", in_a_row,
            " steps up to step ", step + 1,
            scaled
                ? fmt::format(", although the loss scale has fallen to its minimum, {:g}", result.loss_scale)
                : std::string(),
            "; the weights were left as they were. The newest checkpoint is in ", run.checkpoints().string(),
            "; try a lower learning rate, ", scaled ? "bf16 instead of f16, " : "",
            "or --check-finite to find the operator");
      // An evaluation may take minutes: the state is saved before it, unless it shows that nothing is left to
      // save.
      if (evaluate && std::isfinite(loss) && (last || stop || save_due)) {
        write();
        save(step + 1);
        saved = true;
      }
      if (evaluate && !stop) {
        const Clock::time_point evaluation_start = Clock::now();
        const NoTape off;
        try {
          result.evaluation = task.evaluate();
          record.values.erase(kUnevaluated);
          for (const auto& [name, value] : result.evaluation) record.values[name] = value;
          if (task.judge) verdict = task.judge(step + 1, result.evaluation);
          last |= verdict.stop;
        } catch (const Interrupted& interrupted) {
          signal = interrupted.signal();
          stop = true;
        }
        evaluation_seconds += seconds_since(evaluation_start);
      }
      if ((log || stop) && !(written && record.values.contains(kUnevaluated))) write();
      if (log && events)
        for (const auto& [name, value] : record.values) events->scalar(name, record.step, value);
      // One bad batch at the end is skipped like any other; with a second sign it is the weights.
      const bool lost = skipped_in_a_row > 1 || std::ranges::any_of(result.evaluation, [](const auto& value) {
                          return !std::isfinite(value.second);
                        });
      check(!last || stop || std::isfinite(loss) || !lost, "training: the loss of the last step (", step + 1,
            ") is not finite, the run has diverged; try a lower learning rate, or --check-finite to find the "
            "operator");
      if (task.sample && !stop && (last || sample_due)) {
        const Clock::time_point sample_start = Clock::now();
        const NoTape off;
        try {
          task.sample(step + 1);
        } catch (const Interrupted& interrupted) {
          signal = interrupted.signal();
          stop = true;
        }
        evaluation_seconds += seconds_since(sample_start);
      }
      interval = Interval{};
    }
    if (verdict.save || (!saved && (last || stop || save_due))) {
      save(step + 1);
      interval = Interval{};
      data.take();
    }
    if (stop) {
      result.outcome = Outcome::interrupted;
      result.signal = signal;
    }
    if (last || stop) break;
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

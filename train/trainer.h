#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "optim/adamw.h"
#include "optim/schedule.h"
#include "train/progress.h"
#include "train/run_folder.h"

namespace tessera::train {

/// What is trained, as the trainer sees it.
struct Task {
  /// Brings the next batch into the tensors that `loss` reads, by work issued to the compute stream. Not
  /// captured: the addresses must stay the same.
  std::function<void()> load;
  /// The forward pass, recorded on the trainer's tape; the loss has one element.
  std::function<Tensor()> loss;
  /// After each step of the optimizer, captured with it. May be empty.
  std::function<void()> updated = {};
  /// Named values of the model as it stands ("eval_nll", ...); runs without a tape, and leaves the state as
  /// it was, also when it throws. The state is saved before the evaluation where both are due. May be empty.
  std::function<std::map<std::string, double>()> evaluate;
  /// What follows from the values of an evaluation after that step. May be empty: nothing.
  struct Verdict {
    bool save = false;  // the state, now
    bool stop = false;  // the run ends here, as at its last step
  };
  std::function<Verdict(int64_t step, const std::map<std::string, double>& values)> judge = {};
  /// Saves everything that continues the curve: model, optimizer, random state, step. Called again for a step
  /// that is saved already if judge() asks for it.
  std::function<void(int64_t step)> save;
  /// Shows what the model makes by itself (a text), after every `sample_every` steps and at the end; runs
  /// without a tape. May be empty.
  std::function<void(int64_t step)> sample = {};
  double tokens_per_step = 0;
  double flops_per_step = 0;
};

struct TrainerOptions {
  int64_t steps = 1000;
  int64_t log_every = 10;    // steps between lines of metrics.jsonl; the first and the last are always there
  int64_t eval_every = 0;    // 0: only at the end
  int64_t sample_every = 0;  // 0: only at the end
  int64_t checkpoint_every = 0;  // 0: only at the end
  int keep = 3;                  // checkpoints
  bool graph = true;          // capture the step on a GPU; with accumulate > 1 a micro-batch and the update
  bool check_finite = false;  // TapeOptions::check_finite; turns the graph off
  std::optional<optim::LossScale> loss_scale = {};  // instead of the optimizer's, which must scale then
  int accumulate = 1;  // micro-batches a step: load and loss run that often, their mean counts
  /// Steps in a row without a finite gradient norm before the run stops; with loss scaling only those count
  /// whose scale could not fall any further.
  int most_skips = 5;
  double ceiling_tflops = 0;  // denominator of the FLOP share; 0: not shown
  optim::Schedule schedule{{}};
};

enum class Outcome { finished, interrupted };

struct TrainResult {
  Outcome outcome = Outcome::finished;
  int signal = 0;                            // that interrupted it
  int64_t step = 0;                          // steps done
  double loss = 0;                           // the last one logged
  double seconds = 0;                        // in steps; evaluation and saving apart
  double tokens_per_s = 0, ms_per_step = 0;  // median of the logged intervals
  int64_t skipped = 0;                       // steps without a finite gradient norm, of the whole run
  double loss_scale = 0;                     // at the end; 0: none
  std::map<std::string, double> evaluation;  // the last one
};

/// Runs steps [first_step, options.steps): load, forward, backward, update; logs, saves, evaluates. SIGINT,
/// SIGTERM and a hangup (InterruptGuard) end it after the current step, with a checkpoint. An evaluation or
/// sample that throws Interrupted is given up, and recorded as missing; the run that is resumed there does it
/// first, so that the curve does not depend on the interruption. A gradient norm that is not finite leaves
/// the weights as they are and lowers the loss scale, if the optimizer has one; a logged step that ends at
/// least `most_skips` such steps in a row throws, and no checkpoint is written of that state.
TrainResult run_training(const Task& task, optim::AdamW& optimizer, const RunFolder& run, Device device,
                         const TrainerOptions& options, int64_t first_step, Progress& progress);

}  // namespace tessera::train

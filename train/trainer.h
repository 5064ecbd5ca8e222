#pragma once

#include <optional>

#include "dist/world.h"
#include "optim/schedule.h"
#include "report/progress.h"
#include "train/job.h"
#include "train/run_folder.h"
#include "train/setting.h"

namespace tessera::train {

/// Default of TrainerOptions::bucket_mb for these values of rank_exchange and zero: 0 on GPUs whose gradients
/// NCCL sums, because its kernels take SMs from those of the backward pass.
double usual_bucket_mb(Device device, const dist::World& world, std::string_view rank_exchange, int64_t zero);

struct TrainerOptions {
  int64_t steps = 1000;       // of the whole run
  int64_t log_every = 10;     // steps between lines of metrics.jsonl; the first and the last are always there
  int64_t eval_every = 0;     // 0: only at the end
  int64_t sample_every = 0;   // 0: only at the end
  int64_t save_every = 0;     // steps between checkpoints; 0: only at the end
  int64_t keep = 3;           // checkpoints
  bool graph = true;          // capture the step on a GPU (train/step.h)
  bool check_finite = false;  // TapeOptions::check_finite; turns the graph off
  /// The first loss scale, and the steps in a row without overflow after which it doubles, where the
  /// optimizer scales; 0: the optimizer's own.
  int64_t loss_scale = 0, loss_scale_interval = 0;
  /// Steps in a row without a finite gradient norm before the run stops; with loss scaling only those count
  /// whose scale could not fall any further.
  int64_t most_skips = 5;
  /// Sets the optimizer's learning rate before each step, which throws if it takes none (OptimizerRef);
  /// without a schedule it keeps its own.
  std::optional<optim::Schedule> schedule = {};

  /// Of several ranks: StepOptions::bucket_mb; below 0, for run_recipe alone: usual_bucket_mb().
  double bucket_mb = 32;
  std::string rank_exchange = "auto";  // of several ranks: name_of(StepOptions::exchange)
  /// Of several ranks: 1: each holds a part of the optimizer's states; 2: and of the gradients
  /// (optim::Sharding).
  int64_t zero = 0;

  /// The ranks that train together; null: this process alone. Rank 0 writes the run's folder, evaluations run
  /// on all ranks; a signal to one rank, or an interrupted evaluation, ends the run on all after the same
  /// step.
  const dist::World* world = nullptr;
  bool global_order = false;  // StepOptions::global_order

  /// Those that every run has a flag for.
  SettingList list();
  /// Throws, naming the option, if a number of steps or checkpoints is out of its range; train() calls it.
  void validate() const;
};

enum class Outcome { finished, interrupted };

/// Thrown by train() if the training has diverged: a loss or gradients that are not finite.
class Diverged : public Error {
 public:
  using Error::Error;
};

struct TrainResult {
  Outcome outcome = Outcome::finished;
  int signal = 0;                            // that interrupted it
  int64_t step = 0;                          // steps done
  double loss = 0;                           // the last one logged
  double seconds = 0;                        // in steps and saves; evaluations and samples apart
  double tokens_per_s = 0, ms_per_step = 0;  // median of the logged intervals
  int64_t skipped = 0;                       // steps without a finite gradient norm, of the whole run
  double loss_scale = 0;                     // at the end; 0: none
  Values evaluation;                         // the last one
};

/// Runs steps [first_step, options.steps) of the job: batch, forward, backward, update; logs, saves,
/// evaluates into the run's folder. SIGINT, SIGTERM and a hangup (InterruptGuard) end it after the current
/// step, with a checkpoint. An evaluation or sample that throws Interrupted is given up, and recorded as
/// missing; the run that is resumed there does it first, so that the curve does not depend on the
/// interruption. A gradient norm that is not finite leaves the weights as they are and lowers the loss scale,
/// if the optimizer has one; a logged step throws Diverged if at least `most_skips` such steps in a row have
/// ended at it, as far as logged steps tell. Before that it saves the weights, which are still those of the
/// last finite step. An optimizer that does not skip such steps (OptimizerRef::counted) ends the run at the
/// first logged loss that is not finite, without a checkpoint of that state.
///
/// Throws before the first step if a parameter of the optimizer is kept by no Job::keep(). Returns at once if
/// `first_step` has reached options.steps already.
TrainResult train(Job& job, const RunFolder& run, const TrainerOptions& options, int64_t first_step,
                  report::Progress& progress);

/// The same, from the newest checkpoint in the run's folder on; from the beginning if there is none. What was
/// logged after it goes. For your own programs, of which a later one may continue the run
/// (RunFolder::open): holds the folder's lock, and writes a run.json if there is none. `tessera train` does
/// this and more (train/run.h).
TrainResult train(Job& job, const RunFolder& run, const TrainerOptions& options, report::Progress& progress);

}  // namespace tessera::train

#pragma once

#include "train/trainer.h"

namespace tessera::train {

/// The actions that are due after a step, as determined by the options.
struct Due {
  bool last = false, log = false, evaluate = false, sample = false, save = false;
};

/// The actions due after step `done` (the first is 1). The files that are kept do not depend on where a run
/// was stopped and resumed; the printed output may.
inline Due due_after(int64_t done, const TrainerOptions& options, const JobInfo& info) {
  const auto every = [&](int64_t steps) { return steps > 0 && done % steps == 0; };
  Due due;
  due.last = done == options.steps;
  due.evaluate = info.evaluates && (due.last || every(options.eval_every));
  due.sample = info.samples && every(options.sample_every);
  due.save = every(options.save_every);
  due.log = done == 1 || due.last || due.evaluate || due.sample || every(options.log_every);
  return due;
}

}  // namespace tessera::train

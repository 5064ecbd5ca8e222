#pragma once

#include <cstdint>

#include "train/run_folder.h"
#include "train/training_settings.h"

namespace tessera::train {

/// The evaluation with the lowest eval_nll of a run, the first of several.
struct BestEvaluation {
  int64_t step = 0;  // 0: there was none
  double nll = 0;
  int64_t evaluations = 0, since = 0;  // all, and those after it
  /// The next one. A loss that is not finite is never the best.
  void add(int64_t at, double loss);
};
/// According to the curve up to the step `last`: a resumed run needs no other record.
BestEvaluation best_evaluation(const RunFolder& run, int64_t last = TrainingSettings::kLargest);

}  // namespace tessera::train

#include "train/best_evaluation.h"

#include <cmath>

namespace tessera::train {

void BestEvaluation::add(int64_t at, double loss) {
  evaluations += 1, since += 1;
  if (std::isfinite(loss) && (step == 0 || loss < nll)) step = at, nll = loss, since = 0;
}

BestEvaluation best_evaluation(const RunFolder& run, int64_t last) {
  BestEvaluation best;
  for (const StepRecord& record : run.metrics())
    if (const auto nll = record.values.find("eval_nll"); nll != record.values.end() && record.step <= last)
      best.add(record.step, nll->second);
  return best;
}

}  // namespace tessera::train

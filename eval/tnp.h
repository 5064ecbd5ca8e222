#pragma once

#include <cstdint>
#include <memory>

#include "comm/communicator.h"
#include "datasets/prior.h"
#include "models/tnp.h"

/// How a Transformer Neural Process compares to the best that any model could do on tasks of its prior.

namespace tessera::eval {

/// The ranks that compute each task together.
struct TnpGroup {
  comm::Communicator host;  // for values of the host
  std::shared_ptr<const models::TnpSplit> split;
};

struct TnpEvaluation {
  int64_t tasks = 0, points = 0;
  double nll = 0;                 // of the model, nats per point
  double optimal_nll = 0;         // of the exact posterior predictive
  double gap = 0, gap_error = 0;  // mean difference and its standard error over tasks
};
/// On the first `tasks` tasks of the prior, which is on the model's device. With `group` its ranks compute
/// each task together, and all of them get the same values; a signal to one of them interrupts all.
TnpEvaluation evaluate_tnp(const models::Tnp& model, const datasets::Prior& prior, int64_t tasks,
                           const TnpGroup* group = nullptr);

}  // namespace tessera::eval

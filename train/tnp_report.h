#pragma once

#include "train/tnp_job.h"
#include "train/trainer.h"

namespace tessera::train {

/// The page of a run: settings, loss curve, evaluation, and for one-dimensional priors the predictive density
/// of the mixture next to the exact posterior's.
void write_tnp_report(const RunFolder& run, TnpJob& job, const TrainResult& result);

}  // namespace tessera::train

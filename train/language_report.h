#pragma once

#include "train/language_job.h"
#include "train/trainer.h"

namespace tessera::train {

/// The page of a run: losses next to the baseline, samples, throughput, settings.
void write_language_report(const RunFolder& run, const LanguageJob& job, const TrainResult& result);

}  // namespace tessera::train

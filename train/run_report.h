#pragma once

#include <string>
#include <vector>

#include "train/report.h"
#include "train/run_folder.h"
#include "train/trainer.h"

/// What the pages of all runs share.

namespace tessera::train {

/// The curve of a value of metrics.jsonl.
Series series_of(const std::vector<StepRecord>& records, const char* value, const char* name,
                 bool dashed = false);
/// Folder, card, steps and speed in a sentence.
void add_outcome(Report& report, const RunFolder& run, Device device, const TrainResult& result);
/// Learning rate, gradient norm, throughput, and every setting of run.json.
void add_course(Report& report, const RunFolder& run, const std::vector<StepRecord>& records);

}  // namespace tessera::train

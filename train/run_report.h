#pragma once

#include <string>
#include <vector>

#include "report/page.h"
#include "train/run_folder.h"
#include "train/trainer.h"

/// The parts that the pages of all runs share.

namespace tessera::train {

/// The curve of a value of metrics.jsonl.
report::Series series_of(const std::vector<StepRecord>& records, const char* value, const char* name,
                         bool dashed = false);
/// Averages neighbouring points until some 200 are left, which then have no spread.
void thin(report::Series& series);
/// The training loss of a run, thinned.
report::Series loss_curve(const RunFolder& run, const std::string& name, int colour);
/// How many steps were skipped, and the loss scale at the end, in a sentence; "" if the run neither skipped
/// nor scaled.
std::string skipped_line(const std::vector<StepRecord>& records);
/// Folder, GPU, steps and speed in a sentence, and skipped_line().
void add_outcome(report::Page& page, const RunFolder& run, Device device, const TrainResult& result);
/// Learning rate, gradient norm, loss scale, throughput, and every setting of run.json.
void add_course(report::Page& page, const RunFolder& run, const std::vector<StepRecord>& records);

}  // namespace tessera::train

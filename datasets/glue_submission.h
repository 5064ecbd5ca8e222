#pragma once

#include <span>
#include <string>

#include "datasets/glue.h"

/// The files that the benchmark's server takes: predictions for the test part of a task.

namespace tessera::datasets {

/// "SST-2.tsv"; of MNLI "MNLI-m.tsv" for the part "test_matched" (and "test"), "MNLI-mm.tsv" for
/// "test_mismatched".
std::string glue_submission_name(GlueTask task, const std::string& part);

/// Two columns with a header, index and prediction, in the order of the test part: MNLI, QNLI and RTE want
/// the names of the classes, STS-B a score from 0 to 5 with three digits (others are moved to the nearer
/// end), the rest numbers of classes. Throws for a class that the task does not have and for a score that is
/// not finite.
std::string glue_submission(GlueTask task, std::span<const double> predictions);

}  // namespace tessera::datasets

#pragma once

#include <string>

#include "train/glue_start.h"

/// Which flags of BERT go together, for `train bert` and `plan bert`. These throw a UsageError that begins
/// with `command`.

namespace tessera::cli {

void check_fine_tuning(const std::string& command, const train::GlueStart& start, const train::Given& given);
void check_pretraining(const std::string& command, const train::GlueStart& start, const train::Given& given);

}  // namespace tessera::cli

#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "train/glue_job.h"

namespace tessera::train {

/// The files that write_submissions makes in `folder`.
std::vector<std::string> submission_files(const GlueSet& set, const std::filesystem::path& folder);
/// Writes the predictions for the test parts in the form that the benchmark's server takes, all of them or
/// none; returns the files.
std::vector<std::string> write_submissions(GlueJob& job, const GlueSet& set,
                                           const std::filesystem::path& folder);

}  // namespace tessera::train

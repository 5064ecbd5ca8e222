#pragma once

#include <string>

#include "study/folder.h"

namespace tessera::cli {

/// Reads the TOML file of a study (docs/studies.md). Every key of [flags], [[arm]] and [[task]] is a flag of
/// `tessera train <command>`, and the command line of every arm on every task is parsed as that command
/// would: throws UsageError, naming file, arm and flag, before anything runs.
study::Plan read_study(const std::string& path);

}  // namespace tessera::cli

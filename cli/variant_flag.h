#pragma once

#include <string>

#include "cli/commands.h"
#include "ops/op.h"
#include "ops/variant.h"

/// The flags --variant and --explain of the commands that run single operators.

namespace tessera::cli {

inline constexpr const char* kExplainHelp =
    "Print the kernels chosen on the GPU, their modelled times, and why others were not";

void add_variant(CLI::App& command, std::string& variant);
/// Throws UsageError unless `variant` is empty or one that the operator has on the device.
void check_variant(const ops::OpSpec& op, const std::string& variant, bool cpu);
/// A line for each choice, or one that says that there was none.
std::string choice_lines(const std::vector<std::string>& choices);

}  // namespace tessera::cli

#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "bench/record.h"
#include "cli/commands.h"

/// What the subcommands of `tessera bench` share.

namespace tessera::cli {

/// Prints the records as a table; appends them to the file, if one is named.
void publish(std::vector<bench::Record> records, const std::string& json);

void add_json(CLI::App& command, std::string& json);
void add_device(CLI::App& command, std::string& device);
void add_seconds(CLI::App& command, double& seconds);
/// "": the first GPU, else the CPU.
Device device_of(const std::string& name);

/// Of `bench step`.
void add_bench_step_bert(CLI::App& step, Action& action);
void add_bench_sweep(CLI::App& bench, Action& action);
void add_bench_optim(CLI::App& bench, Action& action);
void add_bench_copy(CLI::App& bench, Action& action);
void add_bench_compare(CLI::App& bench, Action& action);
void add_bench_decode(CLI::App& bench, Action& action);

}  // namespace tessera::cli

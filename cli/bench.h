#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "bench/record.h"
#include "cli/commands.h"
#include "dist/world.h"

/// What the subcommands of `tessera bench` share.

namespace tessera::cli {

/// Prints the records as a table; appends them to the file, if one is named.
void publish(std::vector<bench::Record> records, const std::string& json);

void add_json(CLI::App& command, std::string& json);
void add_seconds(CLI::App& command, double& seconds);
/// "": the first GPU, else the CPU.
Device device_of(const std::string& name);

/// --device and --json of a benchmark that has no other flags, and what it runs.
void add_bench_of_device(CLI::App& command, Action& action,
                         const std::function<std::vector<bench::Record>(Device)>& measure);

/// The flags that the subcommands of `bench step` share.
struct StepFlags {
  std::string graph = "on,off", precision, device, json;
  double seconds = 2;

  void add_to(CLI::App& command);
  /// Sets what the flags say and runs `measure`, which returns records.
  /// With `world` all its ranks measure, each on options.device, and rank 0 publishes.
  template <class Options, class Measure>
  int run(Options& options, Measure&& measure, const dist::World* world = nullptr) const {
    options.graph = parse_switches(graph, "--graph");
    if (!precision.empty()) options.precisions = parse_precisions(precision, "--precision");
    options.timer.seconds = seconds;
    if (!world) options.device = device_of(device);
    const bool leads = !world || world->leads();
    if (!json.empty() && leads) check_writable(json);
    std::vector<bench::Record> records = measure(options);
    if (leads) publish(std::move(records), json);
    return 0;
  }
};

/// Of `bench step`.
void add_bench_step_bert(CLI::App& step, Action& action);
void add_bench_sweep(CLI::App& bench, Action& action);
void add_bench_optim(CLI::App& bench, Action& action);
void add_bench_copy(CLI::App& bench, Action& action);
void add_bench_compare(CLI::App& bench, Action& action);
void add_bench_decode(CLI::App& bench, Action& action);
void add_bench_ffn(CLI::App& bench, Action& action);
void add_bench_layers(CLI::App& bench, Action& action);
void add_bench_collective(CLI::App& bench, Action& action);

}  // namespace tessera::cli

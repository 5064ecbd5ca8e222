#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "bench/record.h"
#include "cli/commands.h"
#include "cli/train_run.h"
#include "train/trainer.h"

/// What the subcommands of `tessera bench` share.

namespace tessera::cli {

/// A line on standard error that the next one replaces; nothing unless it is a terminal. "" removes it.
void show_status(const std::string& text);

/// Prints each record as a row of a table, and appends it to the file, if one is named, as soon as it is
/// measured; in between a status line says what is being measured. `expected`: see bench::RecordTable.
bench::Listener publisher(const std::string& json, const std::vector<bench::Record>& expected = {});

void add_json(CLI::App& command, std::string& json);
void add_seconds(CLI::App& command, double& seconds);
/// "": the first GPU, else the CPU.
Device device_of(const std::string& name);

/// Throws UsageError if the command line asks for CUDA graphs on a CPU.
void check_graph(const CLI::App& command, const std::vector<bool>& graph, Device device);

/// --device and --json of a benchmark that has no other flags, and what it runs.
void add_bench_of_device(CLI::App& command, Action& action,
                         const std::function<void(Device, const bench::Listener&)>& measure);

/// The flags that the subcommands of `bench step` share.
struct StepFlags {
  std::string graph = "on,off", precision, states = "f32", device, json;
  std::string exchange = "auto";
  double seconds = 2, bucket_mb = -1;
  int64_t zero = 0;
  const CLI::App* parsed = nullptr;

  void add_to(CLI::App& command);
  /// Sets what the flags say and runs `measure`, which returns records.
  template <class Options, class Measure>
  int run(Options& options, Measure&& measure) const {
    options.graph = parse_switches(graph, "--graph");
    if (!precision.empty()) options.precisions = parse_precisions(precision, "--precision");
    for (const Precision& one : options.precisions)
      if (states == "bf16" && one.dtype == DType::f16)
        throw UsageError(
            "--optimizer-states: it is bf16, which f16 weights cannot have; take f16 out of --precision");
    options.timer.seconds = seconds;
    if (!json.empty()) check_writable(json);
    const dist::World world = join_job(device);
    if (world.size() == 1 && (zero > 0 || bucket_mb >= 0 || exchange != "auto"))
      throw UsageError(
          "bench step: --zero, --bucket-mb and --rank-exchange are for several ranks; start them with "
          "tessera launch -n N -- bench step ..., or leave the flags out");
    world.told([&] {
      options.device = device_of(device, world.place());
      check_graph(*parsed, options.graph, options.device);
      options.ranks = {.world = &world,
                       .bucket_mb = bucket_mb < 0
                                        ? train::usual_bucket_mb(options.device, world, exchange, zero)
                                        : bucket_mb,
                       .exchange = dist::parse_exchange(exchange),
                       .zero = zero};
      if (world.leads()) options.listener = publisher(json);
      measure(options);
      if (world.size() > 1) world.host().barrier();
    });
    return 0;
  }
};

/// Adds `bench step bert`.
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

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <limits>

#include "bench/compare.h"
#include "bench/optim_bench.h"
#include "bench/sweep.h"
#include "cli/bench.h"
#include "runtime/error.h"

namespace tessera::cli {
namespace {

// ---- bench sweep ----

struct SweepArgs {
  std::vector<std::string> names;
  std::string dtype, mode = "fwd,bwd", device, json;
  int64_t count = 200;
  uint64_t seed = 1;
};

std::vector<const ops::OpSpec*> swept_ops(const std::vector<std::string>& names) {
  std::vector<const ops::OpSpec*> list;
  try {
    for (const std::string& name : names) {
      list.push_back(&ops::find_op(name));
      if (!list.back()->sweep) throw UsageError("bench sweep: " + name + " declares no random problems");
    }
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
  if (names.empty())
    for (const ops::OpSpec& op : ops::all_ops())
      if (op.sweep) list.push_back(&op);
  return list;
}

/// One line per operator: how many are right, and how near the worst came to its tolerance.
void print_summary(const ops::OpSpec& op, const std::vector<bench::Record>& records, double seconds) {
  int64_t wrong = 0, by_oracle = 0;
  double worst = 0, ms = 0;
  for (const bench::Record& r : records) {
    wrong += r.sweep.verdict != "ok";
    by_oracle += r.sweep.checked == "f64 oracle";
    worst = std::max(worst, r.sweep.worst);
    ms = std::max(ms, r.ms.p50);
  }
  fmt::print(
      "{:<16} {:>4} measurements, {:>4} by the f64 oracle, {} wrong, worst error {:.2f} of its tolerance, "
      "longest {:.3g} ms, {:.1f} s\n",
      op.name, records.size(), by_oracle, wrong, worst, ms, seconds);
}

int bench_sweep(const SweepArgs& args) {
  const auto list = swept_ops(args.names);
  bench::SweepOptions options;
  options.count = args.count;
  options.seed = args.seed;
  options.modes = split_list(args.mode, "--mode");
  for (const std::string& mode : options.modes)
    if (mode != "fwd" && mode != "bwd" && mode != "fwd+bwd")
      throw UsageError("--mode: \"" + mode + "\": expected fwd or bwd, or fwd+bwd for both in one");
  std::vector<Precision> precisions;
  if (!args.dtype.empty()) precisions = parse_precisions(args.dtype, "--dtype");
  options.device = device_of(args.device);
  if (!args.json.empty()) check_writable(args.json);
  std::string wrong;
  for (const ops::OpSpec* op : list) {
    for (const Precision precision : bench::precisions_of(*op, precisions, options.device)) {
      options.precision = precision;
      const auto begin = std::chrono::steady_clock::now();
      auto records = bench::sweep_op(*op, options, [&](int64_t done) {
        show_status(fmt::format("{} {}/{}", op->name, done, options.count));
      });
      show_status("");
      bench::stamp(records);
      if (!args.json.empty()) bench::append_records(args.json, records);
      print_summary(*op, records,
                    std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
      const std::string lines = bench::format_wrong(records);
      fmt::print("{}", lines);
      std::fflush(stdout);
      wrong += lines;
    }
  }
  return wrong.empty() ? 0 : 1;
}

// ---- bench optim ----

struct OptimArgs {
  std::string dtype = "f32", clip = "on,off", device, json;
  int64_t parameters = 0;
  double seconds = 0.5;
};

int bench_optim(const OptimArgs& args) {
  bench::OptimBenchOptions options;
  options.dtypes = parse_dtypes(args.dtype);
  options.clip = parse_switches(args.clip, "--clip");
  options.parameters = args.parameters;
  options.timer.seconds = args.seconds;
  options.device = device_of(args.device);
  if (!args.json.empty()) check_writable(args.json);
  options.listener = publisher(args.json);
  bench::bench_optim(options);
  return 0;
}

}  // namespace

void add_bench_sweep(CLI::App& bench, Action& action) {
  auto* command = bench.add_subcommand("sweep", "Check and time operators on random shapes");
  auto args = std::make_shared<SweepArgs>();
  command->add_option("OP", args->names, "Operators; default: all that declare random problems");
  command->add_option("--count", args->count, "Random problems per operator")
      ->check(kDecimal)
      ->check(CLI::Range(int64_t{1}, int64_t{100000}));
  command->add_option("--seed", args->seed, "Random seed of the problems")
      ->check(kDecimal)
      ->check(CLI::Range(int64_t{0}, std::numeric_limits<int64_t>::max()));
  command->add_option("--dtype", args->dtype, kOperatorPrecisionsHelp);
  command->add_option("--mode", args->mode, "Passes to time: fwd,bwd; fwd+bwd times both together");
  add_device(*command, args->device);
  add_json(*command, args->json);
  command->footer("Exit with status 1 if a result is wrong");
  command->callback([&action, args] { action = [args] { return bench_sweep(*args); }; });
}

void add_bench_optim(CLI::App& bench, Action& action) {
  auto* command = bench.add_subcommand("optim", "Time a step of AdamW");
  auto args = std::make_shared<OptimArgs>();
  command
      ->add_option("--parameters", args->parameters,
                   "Number of parameters, in matrices of 2048 x 2048; default: 130023424, on a CPU 16777216")
      ->check(kDecimal)
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 36))
      ->default_str("");
  command->add_option(
      "--dtype", args->dtype,
      "Dtypes of the parameters: f64 (CPU), f32,bf16,f16; 16-bit ones have f32 master weights");
  command->add_option("--clip", args->clip, "Clip the gradient norm: on,off");
  add_device(*command, args->device);
  add_seconds(*command, args->seconds);
  add_json(*command, args->json);
  command->callback([&action, args] { action = [args] { return bench_optim(*args); }; });
}

void add_bench_copy(CLI::App& bench, Action& action) {
  add_bench_of_device(*bench.add_subcommand("copy", "Measure the memory bandwidth of a large copy"), action,
                      [](Device device, const bench::Listener& to) { bench::bench_copy(device, to); });
}

}  // namespace tessera::cli

#include <fmt/format.h>

#include <optional>

#include "bench/collective_bench.h"
#include "cli/bench.h"
#include "cli/train_run.h"

namespace tessera::cli {
namespace {

struct CollectiveArgs {
  std::string names, dtype = "f32", graph = "on,off", device, json;
  int64_t least = 8, factor = 8;
  std::optional<int64_t> most;
  double seconds = 0.3;
};

int bench_collective(const CLI::App& command, const CollectiveArgs& args) {
  bench::CollectiveOptions options{.least = args.least,
                                   .most = args.most,
                                   .factor = args.factor,
                                   .graph = parse_switches(args.graph, "--graph"),
                                   .seconds = args.seconds};
  if (!args.names.empty()) options.names = split_list(args.names, "--call");
  const std::vector<DType> dtypes = parse_dtypes(args.dtype);
  if (dtypes.size() != 1) throw UsageError("--dtype: expected one");
  options.dtype = dtypes[0];
  if (args.most && args.least > *args.most)
    throw UsageError(fmt::format("--min {} is larger than --max {}", args.least, *args.most));
  if (!args.json.empty()) check_writable(args.json);
  const dist::World world = join_job(args.device);
  try {
    const Device device = device_of(args.device, world.place());
    check_graph(command, options.graph, device);
    std::vector<bench::Record> records = bench::bench_collectives(world, device, options);
    if (world.leads()) {
      bench::stamp(records);
      fmt::print("{}", bench::format_collectives(records));
      if (!args.json.empty()) bench::append_records(args.json, records);
    }
    world.host().barrier();
  } catch (const comm::RankFailure&) {
    throw;
  } catch (const std::exception& error) {
    world.fail(error.what());
    throw;
  }
  return 0;
}

}  // namespace

void add_bench_collective(CLI::App& bench, Action& action) {
  auto* command =
      bench.add_subcommand("collective", "Time the collectives between ranks: sizes, times, GB/s");
  auto args = std::make_shared<CollectiveArgs>();
  command->add_option(
      "--call", args->names,
      fmt::format("Collectives to time: {}; default: all", fmt::join(bench::collective_names(), ",")));
  constexpr int64_t kMost = int64_t{1} << 36;
  command->add_option("--min", args->least, "Smallest size in bytes")->check(whole(1, kMost));
  command->add_option("--max", args->most, "Largest size in bytes; default: 1 GiB on GPUs, 64 MiB on the CPU")
      ->check(whole(1, kMost));
  command->add_option("--factor", args->factor, "Factor from each size to the next")
      ->check(whole(2, 1 << 20));
  command->add_option("--dtype", args->dtype, "Dtype of the elements: f64, f32, bf16 or f16");
  command->add_option("--graph", args->graph, "Run the calls as a captured CUDA graph (GPU): on,off");
  add_device(*command, args->device);
  add_seconds(*command, args->seconds);
  add_json(*command, args->json);
  command->footer(
      "Sizes and bus GB/s as nccl-tests define them; the times are those of the slowest rank.\n"
      "Example: tessera launch -n 2 -- bench collective --call all_reduce --min 1024 --max 1073741824");
  command->callback(
      [&action, args, command] { action = [args, command] { return bench_collective(*command, *args); }; });
}

}  // namespace tessera::cli

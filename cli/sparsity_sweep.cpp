#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/sparsity.h"
#include "cli/split_flags.h"
#include "runtime/interrupt.h"
#include "sparsity/split.h"
#include "sparsity/split_pruning.h"

namespace tessera::cli {
namespace {

struct SplitSweepArgs {
  SplitFlags how;
  std::string out, config, totals = "0.1:0.8:0.05", weights = "0:0.6:0.1";
  std::string alone = "on";
};

int run_split_sweep(SplitSweepArgs args) {
  std::vector<double> totals, weights;
  try {
    totals = sparsity::parse_shares(args.totals, "--total");
    weights = sparsity::parse_shares(args.weights, "--weight-sparsity");
  } catch (const Error& error) {
    throw UsageError(error.message());
  }
  const InterruptGuard interrupts(
      "\ntessera: stopping; finished splits are kept, and the same command continues after them\n");
  const auto prepared = args.how.prepare("sweep");
  sparsity::SweepOptions& options = prepared->options;
  options.totals = totals, options.weights = weights;
  options.weights_alone = parse_switches(args.alone, "--weights-alone") == std::vector{true};
  const sparsity::SweepResult result = sparsity::sweep_splits(options, args.out);
  if (result.resumed > 0) fmt::print("{} splits were measured by an earlier call\n", result.resumed);
  fmt::print("{:>7} {:>8} {:>20} {:>8} {:>14} {:>11} {:>9} {:>13} {:>9}\n", "total", "weights", "pruning",
             "inputs", "format", "perplexity", "ratio", "ms per token", "ratio");
  fmt::print("{:>7} {:>8} {:>20} {:>8} {:>14} {:>11.4f} {:>9} {:>13.4f} {:>9}\n", "dense", "", "", "", "",
             result.dense_perplexity, "", result.dense.tpot_ms, "");
  for (const sparsity::SplitResult& one : sparsity::pareto_front(result.splits))
    fmt::print("{:>7.4g} {:>8.4g} {:>20} {:>8.4g} {:>14} {:>11.4f} {:>8.4f}x {:>13.4f} {:>8.3f}x\n",
               one.split.total, one.split.weights, sparsity::pruning_of(one.split, options.prune),
               one.split.activations, ops::name_of(one.split.format), one.perplexity(),
               one.perplexity() / result.dense_perplexity, one.tpot_ms, one.tpot_ms / result.dense.tpot_ms);
  fmt::print("the Pareto front of {} splits; all of them in {}: {}, {}, {}\n", result.splits.size(), args.out,
             sparsity::kSweepFile, sparsity::kSweepTable, sparsity::kSweepPage);
  return 0;
}

}  // namespace

void add_sparsity_sweep(CLI::App& group, Action& action) {
  CLI::App& command = *group.add_subcommand(
      "sweep", "Measure perplexity and time of splits of a total sparsity between weights and inputs");
  auto args = std::make_shared<SplitSweepArgs>();
  command.footer(
      "For each weight sparsity the model is pruned and calibrated once, with gate-aware pruning for each "
      "split of zeros\nand gates; the measured models are not kept. An interrupted sweep continues after its "
      "finished splits.\n\nExamples:\n  tessera sparsity sweep --model llama --text c4.txt --total "
      "0.1:0.8:0.05 --out runs/sweep\n  tessera sparsity sweep --model llama --text c4.txt --total 0.5 "
      "--method sparsegpt --gate-aware off,on --out runs/both");
  args->how.add_to(command);
  command.add_option("--out", args->out, "Directory for sparsity.sqlite, sweep.csv and sweep.html");
  command.add_option("--config", args->config, "TOML file of flags; the command line takes precedence");
  command.add_option("--total", args->totals, "Total sparsities: 0.1:0.8:0.05, or 0.3,0.5");
  command.add_option("--weight-sparsity,--dp-ratio", args->weights,
                     "Weight sparsities to try with each larger total; 0 is gates only");
  command.add_option("--weights-alone", args->alone, "Measure each total also without gates: on or off")
      ->check(CLI::IsMember({"on", "off"}));
  command.callback([&action, &command, args] {
    action = [&command, args] {
      apply_config(command, args->config);
      require_flags(command, {"--model", "--out"});
      return run_split_sweep(*args);
    };
  });
}

}  // namespace tessera::cli

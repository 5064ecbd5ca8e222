#include "sparsity/quality.h"

#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/sparsity.h"
#include "sparsity/patterns.h"

namespace tessera::cli {
namespace {

struct QualityArgs {
  std::vector<std::string> files;
  std::string out;
};

int run_quality(const QualityArgs& args) {
  const sparsity::Quality quality = sparsity::read_quality(args.files);
  sparsity::write_quality(quality, args.out);
  fmt::print("{}\nwritten to {}: {}, {}, {}\n", sparsity::quality_markdown(quality), args.out,
             sparsity::kPatternsFile, sparsity::kQualityPage, sparsity::kQualityTable);
  return 0;
}

}  // namespace

void add_sparsity_quality(CLI::App& group, Action& action) {
  CLI::App& command = *group.add_subcommand(
      "quality", "Compare the quality of pruned and gated models: means, and whether papers' claims hold");
  auto args = std::make_shared<QualityArgs>();
  command.add_option("files", args->files, "Files of results of tools/sparsity_study, one per trained model")
      ->required();
  command.add_option("--out", args->out, "Folder for sparsity.sqlite, quality.html and quality.md")
      ->required();
  command.footer(
      "With two models or more there are 95 % intervals over the models, of differences paired by model.\n\n"
      "Example: tessera sparsity quality seed-*/quality.json --out runs/quality");
  command.callback([&action, args] { action = [args] { return run_quality(*args); }; });
}

}  // namespace tessera::cli

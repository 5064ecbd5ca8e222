#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "cli/language_folder.h"
#include "cli/sparsity.h"
#include "io/file.h"
#include "io/utf8.h"
#include "runtime/interrupt.h"
#include "sparsity/mask_import.h"
#include "sparsity/prune_report.h"

namespace tessera::cli {
namespace {

struct ImportArgs {
  std::vector<std::string> inputs;
  std::string model, out;
  sparsity::ImportOptions options;
  bool json = false;
};

int run_import(const ImportArgs& args) {
  const InterruptGuard interrupts(kGivingUp);
  check_replaceable(args.out);
  check_not_input(args.out, args.inputs);
  check_not_input(args.out, {args.model});
  sparsity::Imported imported =
      sparsity::import_masks(args.inputs, language_folder(args.model), args.options);
  imported.masks.info.model = io::utf8_name(args.model);
  sparsity::save_masks(args.out, imported.masks);
  ignore_signals();
  sparsity::Pruned pruned{.matrices = {}, .masks = imported.masks};
  for (const auto& [name, mask] : imported.masks.layers)
    pruned.matrices.push_back(
        {.name = name, .rows = mask.rows(), .columns = mask.columns, .zeros = mask.count() - mask.ones()});
  const sparsity::MaskInfo& info = imported.masks.info;
  if (args.json) {
    nlohmann::ordered_json list = nlohmann::ordered_json::array();
    for (size_t i = 0; i < pruned.matrices.size(); ++i)
      list.push_back({{"name", pruned.matrices[i].name},
                      {"rows", pruned.matrices[i].rows},
                      {"columns", pruned.matrices[i].columns},
                      {"zeros", pruned.matrices[i].zeros},
                      {"sparsity", pruned.matrices[i].sparsity()},
                      {"from", imported.matrices[i].from},
                      {"pattern", imported.matrices[i].pattern},
                      {"asked", imported.matrices[i].sparsity}});
    const nlohmann::ordered_json report{
        {"out", args.out},       {"model", info.model},           {"fingerprint", info.fingerprint},
        {"method", info.method}, {"pattern", info.pattern},       {"asked", info.sparsity},
        {"seed", info.seed},     {"sparsity", pruned.sparsity()}, {"matrices", list}};
    fmt::print("{}\n", io::json_text(report, 2));
    return 0;
  }
  const auto shown = [](const std::string& text) { return text.empty() ? "not known" : io::utf8_text(text); };
  fmt::print("{}\n{:<12} {:.6f} of {} matrices\n", sparsity::sparsity_table(pruned.matrices), "sparsity",
             pruned.sparsity(), pruned.matrices.size());
  fmt::print("{:<12} {}, fingerprint {}\n", "model", io::utf8_text(info.model), info.fingerprint);
  fmt::print("{:<12} {}, pattern {}, asked {}, seed {}\n", "method", shown(info.method), shown(info.pattern),
             shown(info.sparsity), shown(info.seed));
  fmt::print("{:<12} {}\n", "written", args.out);
  return 0;
}

}  // namespace

void add_sparsity_import(CLI::App& group, Action& action) {
  auto* command = group.add_subcommand(
      "import", "Import masks of other programs, checked against their model, into one file");
  auto args = std::make_shared<ImportArgs>();
  command
      ->add_option("inputs", args->inputs,
                   "Files layer{N}-{component}-{i}-{j}-{sparsity}.pt or .npy, folders of them, pruned model "
                   "directories, files of masks")
      ->required();
  command
      ->add_option("--model", args->model,
                   "Hugging Face model directory, or run folder of a finished run: the dense model")
      ->required();
  command->add_option("--out", args->out, "File of masks to write (.safetensors)")->required();
  command->add_option("--method", args->options.method, "Name of the pruning method, recorded in the file");
  command->add_option("--seed", args->options.seed, "Random seed of the calibration, recorded in the file")
      ->check(kDecimal);
  command->add_flag("--partial", args->options.partial, "Accept masks for only some matrices of the model");
  command->add_flag("--json", args->json, "Print the result as JSON");
  command->footer(
      "i and j are the n and m of the n:m pattern, 0 and 0 if there is none; matrices are [outputs, "
      "inputs].\n\n"
      "Example:\n  tessera sparsity import data/wanda --model llama --partial --method wanda --out "
      "wanda.safetensors");
  command->callback([&action, args] { action = [args] { return run_import(*args); }; });
}

}  // namespace tessera::cli

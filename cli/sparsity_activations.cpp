#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/commands.h"
#include "cli/language_tokens.h"
#include "eval/activation_sparsity.h"
#include "eval/perplexity.h"
#include "io/file.h"
#include "io/utf8.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"

namespace tessera::cli {
namespace {

using nlohmann::json;

constexpr int64_t kLength = 256;

struct ActivationsArgs {
  std::vector<std::string> models, text;
  std::string dtype, device, out;
  std::optional<int64_t> length;
  int64_t windows = 8;
  double dense_share = 0.05;
};

struct Measured {
  std::string model;
  std::vector<std::string> names;
  std::map<std::string, eval::ActivationSparsity> networks;
};

Measured measure(const ActivationsArgs& args, const std::string& folder, Device device) {
  const pretrained::LoadedLanguageModel language = load_language(folder, device, args.dtype);
  const int64_t longest = language.model.longest(), length = args.length.value_or(std::min(kLength, longest));
  check(length <= longest, "sparsity activations: windows of ", length, " tokens; ", folder, " has ", longest,
        " ", limit_of(language.model), ": give a smaller --length");
  const LanguageTokens tokens = tokens_of_text(language, args.text, false);
  // One batch: a network is measured in its first call.
  const std::vector<eval::PerplexityWindow> windows = eval::perplexity_windows(
      tokens.ids, {.length = length, .batch = args.windows, .most_windows = args.windows});
  const eval::ActivationMeter meter(language.model, args.dense_share);
  eval::measure_perplexity(language.model, windows, device, args.windows);
  return Measured{folder, meter.names(), meter.networks()};
}

json json_of(const Measured& measured, double dense_share) {
  json list = json::array();
  for (const std::string& name : measured.names) {
    const eval::ActivationSparsity& one = measured.networks.at(name);
    list.push_back({{"network", name},
                    {"tokens", one.tokens},
                    {"zeros", one.zeros()},
                    {"column_counts", one.counts},
                    {"dropped_features", one.dropped_features},
                    {"dropped_both", one.dropped_both},
                    {"dropped_features_split", one.dropped_features_split},
                    {"dropped_both_split", one.dropped_both_split},
                    {"neighbours", one.neighbours}});
  }
  return {{"model", measured.model}, {"dense_share", dense_share}, {"networks", list}};
}

void print(const Measured& measured, double dense_share) {
  size_t width = 20;
  for (const std::string& name : measured.names) width = std::max(width, name.size());
  fmt::print("{}\n", io::utf8_text(measured.model));
  fmt::print("  {:<{}} {:>7}  {:>25}  {:>19}  {:>19} {:>10}\n", "", width, "", "zeros of columns",
             "dropped energy, all", fmt::format("{:.4g}% dense", 100 * dense_share), "");
  fmt::print("  {:<{}} {:>7}  {:>8} {:>7} {:>8}  {:>9} {:>9}  {:>9} {:>9} {:>10}\n", "network", width,
             "zeros", "densest", "median", "sparsest", "features", "+ tokens", "features", "+ tokens",
             "neighbours");
  for (const std::string& name : measured.names) {
    const eval::ActivationSparsity& one = measured.networks.at(name);
    fmt::print(
        "  {:<{}} {:>7.4f}  {:>8.4f} {:>7.4f} {:>8.4f}  {:>9.3e} {:>9.3e}  {:>9.3e} {:>9.3e} {:>10.3f}\n",
        name, width, one.zeros(), one.column_zeros(0), one.column_zeros(0.5), one.column_zeros(1),
        one.dropped_features, one.dropped_both, one.dropped_features_split, one.dropped_both_split,
        one.neighbours);
  }
}

int run_activations(const ActivationsArgs& args) {
  const InterruptGuard interrupts(kGivingUp);
  if (!args.out.empty()) check_replaceable(args.out);
  check_not_input(args.out, args.models);
  check_not_input(args.out, args.text);
  const Device device = args.device.empty() ? Device::best() : Device::parse(args.device);
  json all = json::array();
  for (const std::string& folder : args.models) {
    const Measured measured = measure(args, folder, device);
    check(!measured.names.empty(), "sparsity activations: ", folder, " has no feed-forward networks");
    print(measured, args.dense_share);
    all.push_back(json_of(measured, args.dense_share));
  }
  if (!args.out.empty()) io::write_file(args.out, io::json_text(all, 1) + "\n");
  return 0;
}

}  // namespace

void add_sparsity_activations(CLI::App& group, Action& action) {
  auto* command = group.add_subcommand(
      "activations",
      "Measure the sparsity of hidden activations per feed-forward network, and what 2:4 would drop");
  auto args = std::make_shared<ActivationsArgs>();
  command
      ->add_option("--model", args->models,
                   "Model directories or finished runs, such as checkpoints over time")
      ->required();
  command->add_option("--text", args->text, "Text files, joined by blank lines")->required();
  command
      ->add_option("--length", args->length,
                   "Window length in tokens; default: 256, or the model's maximum if that is less")
      ->check(whole(2, 1 << 24));
  command->add_option("--windows", args->windows, "Number of windows, all in one batch")
      ->check(whole(1, 1 << 16));
  command->add_option("--dense-share", args->dense_share, "Share of the columns to keep dense, densest first")
      ->check(between(0.0, 1.0));
  command->add_option("--dtype", args->dtype, "Dtype of the weights; default: the file's, on the CPU f32")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}));
  add_device(*command, args->device);
  command->add_option("--json", args->out,
                      "Write the figures, with the counts of every column, to this file");
  command->footer(
      "Example: tessera sparsity activations --model runs/a/model --text docs.txt --dense-share 0.05");
  command->callback([&action, args] { action = [args] { return run_activations(*args); }; });
}

}  // namespace tessera::cli

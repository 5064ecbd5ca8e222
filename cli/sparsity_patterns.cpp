#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/calibration_flags.h"
#include "cli/sparsity.h"
#include "io/file.h"
#include "io/utf8.h"
#include "pretrained/fingerprint.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"
#include "sparsity/patterns.h"

namespace tessera::cli {
namespace {

struct SelectionArgs {
  std::vector<std::string> only;
  std::string axis;

  void add_to(CLI::App& command) {
    command
        .add_option(
            "--only", only,
            "Use only matrices whose name contains this, such as layers.1. or down_proj; may be repeated")
        ->allow_extra_args(false);
    command
        .add_option("--axis", axis,
                    "Features: column or row; default: rows of a second FFN projection, else columns")
        ->check(CLI::IsMember({"column", "row"}));
  }
  void apply(sparsity::AnalyzeOptions& options) const {
    options.only = only;
    if (!axis.empty()) options.axis = axis == "row" ? sparsity::Axis::row : sparsity::Axis::column;
  }
};

struct AnalyzeArgs {
  std::vector<std::string> inputs;
  std::string out, config, k = "4,8,16";
  SelectionArgs selection;
  sparsity::AnalyzeOptions options;
  // Of input norms.
  std::string model, dtype, device;
  CalibrationFlags texts = {.validation = 0};
};

sparsity::DenseNorms dense_norms(AnalyzeArgs& args) {
  const Device device = args.device.empty() ? Device::best() : Device::parse(args.device);
  pretrained::LoadedLanguageModel language = load_language(args.model, device, args.dtype);
  CalibrationFlags& texts = args.texts;
  texts.choose_length("analyze", language);
  texts.samples.seed = args.options.patterns.seed;
  const sparsity::Samples samples =
      sparsity::choose_samples(texts.read("analyze", language).calibration, texts.samples);
  return {.fingerprint = pretrained::fingerprint_of(language.model),
          .from = fmt::format("of {}, {} samples of {} tokens, where an input has none",
                              io::utf8_name(args.model), samples.count(), samples.length),
          .norms = sparsity::dense_input_norms(language.model, samples)};
}

std::vector<int64_t> numbers_of(const std::string& text, const char* flag) {
  std::vector<int64_t> numbers;
  for (const std::string& part : split_list(text, flag)) {
    if (part.size() > 9 || part.find_first_not_of("0123456789") != std::string::npos)
      throw UsageError(fmt::format("{}: \"{}\": expected whole numbers, as 4,8,16", flag, part));
    numbers.push_back(std::stoll(part));
    if (std::ranges::count(numbers, numbers.back()) > 1)
      throw UsageError(fmt::format("{}: {} is given twice", flag, part));
  }
  return numbers;
}

int run_analyze(const CLI::App& command, AnalyzeArgs& args) {
  const InterruptGuard interrupts(kGivingUp);
  args.selection.apply(args.options);
  args.options.patterns.clusters = numbers_of(args.k, "--k");
  args.options.patterns.validate();
  if (args.model.empty() == args.texts.has_text())
    throw UsageError("--model, --text: input norms are measured with both, the dense model and a text");
  if (args.model.empty())
    refuse_given(command, {"--samples", "--length", "--data", "--any-bytes", "--dtype", "--device"},
                 "is for input norms, which need --model and --text; leave it out");
  else
    args.options.dense_norms = [&args] { return dense_norms(args); };
  sparsity::analyze(args.inputs, args.out, args.options,
                    [](const std::string& line) { fmt::print(stderr, "{}\n", io::utf8_text(line)); });
  fmt::print("{}\n", (std::filesystem::path(args.out) / sparsity::kPatternsFile).string());
  return 0;
}

struct CompareArgs {
  std::string a, b, json;
  SelectionArgs selection;
};

int run_compare(const CompareArgs& args) {
  const InterruptGuard interrupts(kGivingUp);
  if (!args.json.empty()) check_replaceable(args.json);
  check_not_input(args.json, {args.a, args.b});
  sparsity::AnalyzeOptions options;
  args.selection.apply(options);
  const auto all = sparsity::compare(args.a, args.b, options);
  fmt::print("{:<40} {:>7} {:>9} {:>9} {:>18} {:>18} {:>18}\n", "matrix", "per", "sparsity", "sparsity",
             "jaccard", "cosine", "hamming");
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  for (const sparsity::MatrixComparison& one : all) {
    const auto text = [](const sparsity::Summary& summary) {
      return fmt::format("{:.4f} +- {:.4f}", summary.mean, summary.sd);
    };
    fmt::print("{:<40} {:>7} {:>9.4f} {:>9.4f} {:>18} {:>18} {:>18}\n", io::utf8_text(one.matrix),
               sparsity::name_of(one.axis), one.sparsity_a, one.sparsity_b, text(one.jaccard),
               text(one.cosine), text(one.hamming));
    const auto object = [](const sparsity::Summary& summary) {
      return nlohmann::ordered_json{
          {"mean", summary.mean}, {"sd", summary.sd}, {"least", summary.least}, {"largest", summary.largest}};
    };
    json.push_back({{"matrix", one.matrix},
                    {"axis", sparsity::name_of(one.axis)},
                    {"sparsity", {one.sparsity_a, one.sparsity_b}},
                    {"jaccard", object(one.jaccard)},
                    {"cosine", object(one.cosine)},
                    {"hamming", object(one.hamming)}});
  }
  if (!args.json.empty()) io::write_file(args.json, io::json_text(json, 1) + "\n");
  return 0;
}

void add_analyze(CLI::App& group, Action& action) {
  auto* command =
      group.add_subcommand("analyze", "Measure the patterns of masks, each figure next to its chance level");
  auto args = std::make_shared<AnalyzeArgs>();
  sparsity::PatternOptions& options = args->options.patterns;
  command
      ->add_option("inputs", args->inputs,
                   "Pruned model directories, or files of masks (.safetensors, .pt, .npy)")
      ->required();
  command->add_option("--out", args->out, "Directory for sparsity.sqlite");
  command->add_option("--config", args->config, "TOML file of flags; the command line takes precedence");
  args->selection.add_to(*command);
  const auto number = [&](const char* flag, int64_t& value, const char* help) {
    command->add_option(flag, value, help)->check(whole(1, int64_t{1} << 31));
  };
  number("--pool", options.pool, "Features per matrix, sampled from all");
  number("--nearest", options.nearest, "Features to cluster: the nearest ones to a random one of the pool");
  command->add_option("--k", args->k, "Numbers of clusters");
  number("--starts", options.starts, "Restarts of k-means; the best result is kept");
  number("--executions", options.executions, "Runs of the clustering, each with its own reference and seed");
  number("--draws", options.draws, "Draws of each null model");
  number("--resamples", options.resamples, "Resamples of a bootstrap interval");
  number("--group", options.group, "Features per group, for nearest and exhaustive grouping");
  command->add_option("--perplexity", options.perplexity, "Perplexity of t-SNE")->check(between(1, 1000));
  command->add_option("--seed", options.seed, "Random seed")->check(kDecimal);
  command->add_option("--model", args->model,
                      "Dense model, to measure input norms for inputs that have none; needs --text");
  args->texts.add_samples_to(*command);
  command->add_option("--dtype", args->dtype, "Dtype of the weights; default: the file's, on the CPU f32")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}));
  add_device(*command, args->device);
  command->footer(
      "Examples:\n  tessera sparsity analyze runs/wanda runs/sparsegpt --out runs/patterns\n  tessera "
      "sparsity "
      "analyze masks.safetensors --model llama --text c4.txt --out runs/patterns");
  command->callback([&action, command, args] {
    action = [command, args] {
      apply_config(*command, args->config);
      require_flags(*command, {"--out"});
      return run_analyze(*command, *args);
    };
  });
}

void add_compare(CLI::App& group, Action& action) {
  auto* command = group.add_subcommand("compare", "Compare the masks of two pruned models, matrix by matrix");
  auto args = std::make_shared<CompareArgs>();
  command->add_option("a", args->a, "Pruned model directory or file of masks")->required();
  command->add_option("b", args->b, "The other")->required();
  args->selection.add_to(*command);
  command->add_option("--json", args->json, "Write the figures to this file");
  command->footer("Example: tessera sparsity compare runs/wanda runs/sparsegpt --only layers.1.");
  command->callback([&action, args] { action = [args] { return run_compare(*args); }; });
}

}  // namespace

void add_sparsity_patterns(CLI::App& group, Action& action) {
  add_analyze(group, action);
  add_compare(group, action);
}

}  // namespace tessera::cli

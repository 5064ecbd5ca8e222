#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "bench/default_sizes.h"
#include "bench/layers_bench.h"
#include "cli/bench.h"
#include "cli/language_folder.h"
#include "cli/setting_flags.h"
#include "io/file.h"
#include "report/progress.h"
#include "runtime/interrupt.h"

namespace tessera::cli {
namespace {

constexpr size_t kTop = 20;
constexpr const char* kSizes[] = {"--layers", "--d-model", "--n-head", "--d-ff", "--vocab-size", "--dropout"};

struct LayersArgs {
  explicit LayersArgs(models::BertFamily family) {
    models::BertConfig& model = options.model;
    model = bench::base_model(family);
  }
  bench::LayersBenchOptions options;
  PrecisionFlag precision;
  double dropout = 0.1;
  std::optional<int64_t> batch, max_length;
  std::string tasks, device, json, csv, trace;
};

void settle(LayersArgs& args, const train::Given& given) {
  bench::LayersBenchOptions& options = args.options;
  models::BertConfig& model = options.model;
  if (!options.folder.empty())
    for (const char* const size : kSizes)
      if (given.contains(size))
        throw UsageError(std::string("bench layers: a --model has its own sizes and dropout; leave ") + size +
                         " out");
  if (given.contains("--probe-gradient"))
    throw UsageError("--probe-gradient: a benchmark compares no gradients; `tessera train bert` does");
  options.max_length = args.max_length.value_or(options.max_length);
  model.hidden_dropout = model.attention_dropout = model.classifier_dropout = args.dropout;
  if (!args.tasks.empty()) options.tasks = split_list(args.tasks, "--task");
  try {
    options.slice.check_given(given);
    options.validate();
  } catch (const Error& error) {
    throw UsageError(std::string("bench layers: ") + error.what());
  }
  options.device = device_of(args.device);
  options.batch = args.batch.value_or(bench::default_layers_batch(options.device));
  options.precision = args.precision.on(options.device);
}

int run_layers(LayersArgs args, const train::Given& given) {
  settle(args, given);
  check_different({{"--csv", args.csv}, {"--trace", args.trace}, {"--json", args.json}});
  if (!args.json.empty()) check_writable(args.json);
  check_not_input(args.json, {args.options.folder, args.options.data});
  for (const std::string* const file : {&args.csv, &args.trace})
    if (!file->empty()) {
      check_replaceable(*file);
      check_not_input(*file, {args.options.folder, args.options.data});
    }
  if (!args.options.folder.empty()) args.options.folder = language_folder(args.options.folder);
  if (!args.max_length) {
    const int64_t usual = args.options.max_length;
    args.options.max_length = bench::default_max_length(args.options);
    if (args.options.max_length < usual)
      report::tell(fmt::format("tessera: {} tokens per text, the most that the model has positions for\n",
                               args.options.max_length));
  }
  const InterruptGuard interrupts(kGivingUp);
  const std::vector<bench::LayersComparison> all = bench::bench_layers(args.options);
  for (const bench::LayersComparison& one : all) fmt::print("{}", bench::layers_text(one, kTop));
  if (!args.csv.empty()) io::write_file(args.csv, report::csv_text(bench::layers_table(all)));
  if (!args.trace.empty()) io::write_file(args.trace, bench::layers_trace(all).dump(1) + "\n");
  if (!args.json.empty()) {
    std::vector<bench::Record> records = bench::layers_records(args.options, all);
    bench::stamp(records);
    bench::append_records(args.json, records);
  }
  return 0;
}

void add_sizes(CLI::App& command, LayersArgs& args) {
  models::BertConfig& model = args.options.model;
  const CLI::Validator size = whole(1, int64_t{1} << 18);
  command.add_option("--layers", model.layers, "Number of layers")->check(size);
  command.add_option("--d-model", model.d_model, "Hidden size")->check(size);
  command.add_option("--n-head", model.heads, "Number of attention heads")->check(size);
  command.add_option("--d-ff", model.d_ff, "Hidden size of the feed-forward layers")->check(size);
  command.add_option("--vocab-size", model.vocabulary, "Vocabulary size")->check(size);
  command.add_option("--dropout", args.dropout, "Dropout rate of all layers")
      ->check(kFinite)
      ->check(between(0.0, 0.9));
}

void add_model(CLI::App& layers, Action& action, models::BertFamily family) {
  const bool bert = family == models::BertFamily::bert;
  auto* command = layers.add_subcommand(
      bert ? "bert" : "roberta", bert ? "BERT-base with a classifier" : "RoBERTa-base with a classifier");
  auto args = std::make_shared<LayersArgs>(family);
  bench::LayersBenchOptions& options = args->options;
  const CLI::Validator size = whole(1, int64_t{1} << 20);
  command->add_option("--batch-size", args->batch, "Texts per batch; default: 16, on a CPU 2")->check(size);
  command
      ->add_option("--max-length", args->max_length,
                   "Tokens per text; longer texts of a task are truncated; default: 128, or the model's "
                   "maximum")
      ->check(size);
  command->add_option("--task", args->tasks, "GLUE tasks, separated by commas; default: a synthetic batch");
  command->add_option("--data", options.data,
                      "Directory with the task's files, or with one directory per task");
  command->add_option("--model", options.folder,
                      "Hugging Face model directory, or run folder of one seed; default: random weights");
  add_sizes(*command, *args);
  train::SettingList slice;
  options.slice.add_to(slice);
  add_flags(*command, slice);
  command->add_flag("--unfused", options.unfused,
                    "Run the layers of feed-forward networks one by one instead of as one fused operator");
  command
      ->add_option("--seed", options.seed,
                   "Random seed of the weights, the order of texts, dropout and the choice of rows")
      ->check(kDecimal);
  args->precision.add_to(*command);
  add_device(*command, args->device);
  add_seconds(*command, options.timer.seconds);
  command->add_option("--csv", args->csv, "Write the times per layer and kind of layer to this CSV file");
  command->add_option("--trace", args->trace,
                      "Write a pass of median duration to this file, as a Chrome trace (JSON)");
  add_json(*command, args->json);
  command->footer(std::string("Example: tessera bench layers ") + (bert ? "bert" : "roberta") +
                  " --slice importance --rows 10% --csv layers.csv --trace trace.json");
  command->callback([&action, args, command] {
    action = [args, command] { return run_layers(*args, given_flags(*command)); };
  });
}

}  // namespace

void add_bench_layers(CLI::App& bench, Action& action) {
  auto* command = bench.add_subcommand(
      "layers", "Time a training pass per layer and kind of layer, next to one with sliced layers");
  command->require_subcommand(1);
  add_model(*command, action, models::BertFamily::bert);
  add_model(*command, action, models::BertFamily::roberta);
}

}  // namespace tessera::cli

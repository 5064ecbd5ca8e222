#include <fmt/format.h>

#include <filesystem>
#include <optional>

#include "cli/sparsity.h"
#include "io/utf8.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"
#include "sparsity/gradient_tasks.h"

namespace tessera::cli {
namespace {

struct GradientsArgs {
  sparsity::GradientTasks what;
  std::string tasks, top = "20,50,10%", padding = "max", dtype = "f32", device, out;
  std::optional<int64_t> max_length;
  bool no_dropout = false;
};

void settle(GradientsArgs& args) {
  try {
    args.what.padding = sparsity::parse_padding(args.padding);
    for (const std::string& top : split_list(args.top, "--top"))
      args.what.options.top.push_back(sparsity::TopRows::parse(top));
    if (!args.tasks.empty()) args.what.tasks = split_list(args.tasks, "--task");
    args.what.dtype = parse_dtypes(args.dtype).at(0);
    args.what.dropout = !args.no_dropout;
    args.what.validate();
  } catch (const Error& error) {
    throw UsageError(std::string("sparsity ") + error.what());
  }
}

void print(const GradientsArgs& args, const sparsity::TaskGradients& task) {
  fmt::print("\n{}: {} batches, loss {:.4f}\n", task.name, task.batches, task.loss);
  size_t width = 10;
  for (const sparsity::ModuleGradient& module : task.modules) width = std::max(width, module.name.size());
  fmt::print("{:<{}} {:>8}  {:>17}  {:>17}  {}\n", "", width, "", "zero elements", "zero rows",
             "energy in the top");
  fmt::print("{:<{}} {:>8}  {:>8} {:>8}  {:>8} {:>8} ", "module", width, "rows", "all", "read", "all",
             "read");
  for (const sparsity::TopRows& top : args.what.options.top) fmt::print(" {:>8}", top.text());
  fmt::print("\n");
  for (const sparsity::ModuleGradient& module : task.modules) {
    fmt::print("{:<{}} ", module.name, width);
    if (module.read_rows.batches == 0) {
      fmt::print("{:>8}\n", "no gradient");
      continue;
    }
    fmt::print("{:>8.0f}  {:>8.5f} {:>8.5f}  {:>8.5f} {:>8.5f} ", module.read_rows.mean(),
               module.zero_elements.mean(), module.zero_elements_read.mean(), module.zero_rows.mean(),
               module.zero_rows_read.mean());
    for (const sparsity::OverBatches& energy : module.energy)
      fmt::print(" {:>8}", energy.batches > 0 ? fmt::format("{:.5f}", energy.mean()) : "-");
    fmt::print("\n");
  }
}

int run_gradients(GradientsArgs args) {
  settle(args);
  if (std::error_code error; !args.out.empty() && std::filesystem::exists(args.out, error) &&
                             !std::filesystem::is_directory(args.out, error))
    throw UsageError("sparsity gradients: --out " + args.out + " is a file; expected a folder, new or not");
  if (!args.out.empty()) check_folder_writable(args.out);
  const InterruptGuard interrupts(kGivingUp);
  args.what.max_length = args.max_length ? *args.max_length : sparsity::default_max_length(args.what.model);
  const Device device = args.device.empty() ? Device::best() : Device::parse(args.device);
  const auto all = sparsity::measure_gradients(
      args.what, device, [](const std::string& line) { fmt::print(stderr, "{}\n", io::utf8_text(line)); });
  for (const sparsity::TaskGradients& task : all) print(args, task);
  if (!args.out.empty()) fmt::print("\npage: {}\n", sparsity::write_gradients(args.what, all, args.out));
  return 0;
}

}  // namespace

void add_sparsity_gradients(CLI::App& group, Action& action) {
  auto* command = group.add_subcommand(
      "gradients",
      "Measure the sparsity of the gradients of BERT's linear layers, and how few rows hold their energy");
  auto args = std::make_shared<GradientsArgs>();
  sparsity::GradientTasks& what = args->what;
  command
      ->add_option("--model", what.model,
                   "Model directory of a BERT or RoBERTa, or one seed's run of `train bert`")
      ->required();
  command->add_option("--task", args->tasks, "GLUE tasks, separated by commas, such as sst2,rte");
  command->add_option("--data", what.data, "Directory with the task's files, or with one directory per task");
  command->add_option("--part", what.part, "Split of the tasks' files")
      ->check(CLI::IsMember({"train", "dev"}));
  command->add_option("--text", what.text,
                      "Text files for masked language modelling, measured after the tasks");
  add_any_bytes(*command, what.any_bytes);
  command->add_option("--mask", what.mask, "Share of the text's tokens to mask and predict")
      ->check(between(0.0001, 0.9));
  const auto number = [&](const char* flag, int64_t& value, const char* help, int64_t least) {
    command->add_option(flag, value, help)->check(whole(least, int64_t{1} << 24));
  };
  number("--batch-size", what.batch, "Texts per batch", 1);
  command
      ->add_option("--max-length", args->max_length,
                   "Maximum tokens per text; longer ones are truncated; default: 128, or the model's maximum")
      ->check(whole(1, int64_t{1} << 24));
  number("--batches", what.batches, "Maximum number of batches per task", 1);
  command->add_option(
      "--layers", what.layers,
      "Modules by their transformers names, separated by commas, * for any characters; or all");
  command
      ->add_option("--tolerance", what.options.tolerance, "Magnitude up to which an element counts as zero")
      ->check(kFinite);
  command->add_option("--top", args->top, "Numbers or shares of rows whose share of the energy is measured");
  command->add_option(
      "--padding", args->padding,
      "Padding of texts: to --max-length (max), to the longest of a batch (longest), or none");
  command->add_flag("--no-dropout", args->no_dropout, "Turn dropout off, whose masks are zeros in gradients");
  command
      ->add_option("--seed", what.seed,
                   "Random seed of the order of texts, dropout and a newly initialised head")
      ->check(kDecimal);
  command->add_option("--dtype", args->dtype, "Dtype of weights and gradients")
      ->check(CLI::IsMember({"f32", "bf16"}));
  add_device(*command, args->device);
  command->add_option("--out", args->out, "Directory for CSV, JSON and a page with heat maps");
  command->footer(
      "Example: tessera sparsity gradients --model bert-base-uncased --task sst2,rte --data GLUE --out "
      "runs/dy");
  command->callback([&action, args] { action = [args] { return run_gradients(*args); }; });
}

}  // namespace tessera::cli

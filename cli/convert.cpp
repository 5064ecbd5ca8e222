#include <fmt/format.h>

#include <filesystem>

#include "cli/commands.h"
#include "cli/language_folder.h"
#include "cli/setting_flags.h"
#include "cli/sparse_flags.h"
#include "runtime/interrupt.h"
#include "sparsity/chain.h"

namespace tessera::cli {
namespace {

struct ConvertArgs {
  std::string from, to, dtype, format, gates;
  int64_t shard_megabytes = 5000;
  std::vector<std::string> ignored;
};

/// Sizes per layer: of a large model the first and the last ones.
void print_layers(const pretrained::SparseConversion& done) {
  constexpr size_t kShown = 14;
  fmt::print("{:<44} {:>14} {:>8} {:>12} {:>12} {:>6}\n", "layer", "shape", "zeros", "bytes", "dense",
             "ratio");
  for (size_t i = 0; i < done.layers.size(); ++i) {
    if (i == kShown && done.layers.size() > 2 * kShown) {
      fmt::print("... {} more\n", done.layers.size() - 2 * kShown);
      i = done.layers.size() - kShown;
    }
    const auto& [layer, bytes, dense_bytes] = done.layers[i];
    const double all = double(layer.out) * double(layer.in);
    fmt::print("{:<44} {:>14} {:>7.1f}% {:>12} {:>12} {:>5.2f}x\n", layer.name,
               fmt::format("{} x {}", layer.out, layer.in),
               all > 0 ? 100 * (1 - double(layer.stored) / all) : 0.0, bytes, dense_bytes,
               bytes ? double(dense_bytes) / double(bytes) : 1.0);
  }
}

int compress(const ConvertArgs& args, std::optional<DType> dtype, const pretrained::ConfigOptions& config) {
  const auto done = sparsity::convert(args.from, args.to, ops::parse_sparse_format(args.format),
                                      {.dtype = dtype, .calibration = args.gates, .config = config});
  ignore_signals();
  print_layers(done);
  if (done.negative_zeros > 0) fmt::print("{} weights of -0 became 0\n", done.negative_zeros);
  fmt::print("{} layers as {} in {}: {:.1f} MB, {:.1f} MB dense ({:.2f}x); fingerprint {}\n",
             done.layers.size(), args.format, name_of(done.dtype), double(done.bytes) / 1e6,
             double(done.dense_bytes) / 1e6, done.bytes ? double(done.dense_bytes) / double(done.bytes) : 1.0,
             done.fingerprint);
  return 0;
}

int convert(ConvertArgs args, const train::Given& given) {
  const bool compresses = !args.format.empty() && args.format != "dense";
  pretrained::SaveOptions options{.shard_bytes = uint64_t(args.shard_megabytes) * 1'000'000};
  const InterruptGuard interrupts(kGivingUp);
  if (!args.dtype.empty()) options.dtype = parse_dtype(args.dtype);
  if (args.format == "dense" && options.dtype)
    throw UsageError("--format dense restores the weights bit for bit; leave out --dtype");
  if (!args.gates.empty() && !compresses)
    throw UsageError(fmt::format("--gates: only a compressed model takes gates; give --format {}",
                                 fmt::join(sparse_format_names(), ", ")));
  if (compresses && given.contains("--shard-mb"))
    throw UsageError("--shard-mb: a compressed model is one file, of any size; leave it out");
  namespace fs = std::filesystem;
  std::error_code ignored;
  if (!args.format.empty() && fs::is_regular_file(args.from, ignored))
    throw UsageError(
        "--format: " + args.from +
        " is a file; compressing and decompressing take a model directory, with its config.json");
  if (fs::is_regular_file(fs::path(args.from) / "run.json", ignored)) args.from = language_folder(args.from);
  const pretrained::ConfigOptions config{.ignored_fields = {args.ignored.begin(), args.ignored.end()}};
  if (compresses) return compress(args, options.dtype, config);
  const pretrained::Conversion done =
      args.format == "dense" ? pretrained::convert_dense(args.from, args.to, options.shard_bytes, config)
                             : pretrained::convert(args.from, args.to, options, config);
  ignore_signals();
  fmt::print("{} tensors, {:.1f} MB in {}\n", done.tensors, double(done.bytes) / 1e6, args.to);
  constexpr size_t kShown = 10;
  for (size_t i = 0; i < std::min(kShown, done.ignored.size()); ++i)
    fmt::print("left out: {}\n", io::shown(done.ignored[i]));
  if (done.ignored.size() > kShown) fmt::print("left out: {} more\n", done.ignored.size() - kShown);
  return 0;
}

}  // namespace

void add_convert(CLI::App& app, Action& action) {
  CLI::App& command = *app.add_subcommand(
      "convert", "Rewrite the weights of a model (.bin, .pt, safetensors) as safetensors");
  auto args = std::make_shared<ConvertArgs>();
  std::vector<std::string> formats = sparse_format_names();
  formats.emplace_back("dense");
  command.footer(
      "Pickled code in .bin and .pt files is never executed. With a config.json of gpt2, opt, llama, "
      "mistral, qwen2, qwen3,\nphi3, arcee, bert or roberta the names are checked and translated to those of "
      "transformers; the tokenizer's files\nare copied.");
  command
      .add_option("FROM", args->from,
                  "Hugging Face model directory, run folder of a finished run, or weights file")
      ->required();
  command.add_option("TO", args->to, "Directory to write; it must not contain weights yet")->required();
  command.add_option("--dtype", args->dtype, "Dtype of floating tensors; default: unchanged")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}));
  command
      .add_option("--format", args->format,
                  "Compressed format for the linear layers in the blocks of a pruned model; "
                  "dense-columns: for gates only; dense: decompress, bit for bit")
      ->check(CLI::IsMember(formats));
  command.add_option(
      "--gates", args->gates,
      "Calibration of FROM (tessera calibrate) to store with the model, for --activation-sparsity");
  command.add_option("--shard-mb", args->shard_megabytes, "Maximum file size in MB (1,000,000 bytes)")
      ->check(kDecimal)
      ->check(CLI::Range(int64_t{1}, int64_t{1'000'000}));
  command
      .add_option("--ignore-field", args->ignored,
                  "Unknown field of config.json to ignore and leave out; may be repeated")
      ->allow_extra_args(false);
  command.callback([&action, args, &command] {
    action = [args, &command] { return convert(*args, given_flags(command)); };
  });
}

}  // namespace tessera::cli

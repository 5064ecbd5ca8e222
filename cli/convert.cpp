#include <fmt/format.h>

#include "cli/commands.h"
#include "pretrained/load.h"
#include "runtime/interrupt.h"

namespace tessera::cli {
namespace {

struct ConvertArgs {
  std::string from, to, dtype;
  int64_t shard_megabytes = 5000;
  std::vector<std::string> ignored;
};

int convert(const ConvertArgs& args) {
  pretrained::SaveOptions options{.shard_bytes = uint64_t(args.shard_megabytes) * 1'000'000};
  const InterruptGuard interrupts(kGivingUp);
  if (!args.dtype.empty()) options.dtype = parse_dtype(args.dtype);
  const pretrained::Conversion done = pretrained::convert(
      args.from, args.to, options, {.ignored_fields = {args.ignored.begin(), args.ignored.end()}});
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
  command.footer(
      "Nothing in a .bin or .pt file is executed. With a config.json of gpt2, opt, llama, mistral, qwen2, "
      "qwen3,\nphi3, bert or roberta the names are checked and translated to those of transformers; the "
      "tokenizer's files are copied.");
  command.add_option("FROM", args->from, "Hugging Face model directory, or weights file")->required();
  command.add_option("TO", args->to, "Directory to write; it must not contain weights yet")->required();
  command.add_option("--dtype", args->dtype, "Dtype of floating tensors; default: unchanged")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}));
  command.add_option("--shard-mb", args->shard_megabytes, "Maximum file size in MB (1,000,000 bytes)")
      ->check(kDecimal)
      ->check(CLI::Range(int64_t{1}, int64_t{1'000'000}));
  command
      .add_option("--ignore-field", args->ignored,
                  "Unknown field of config.json to ignore and leave out; may be repeated")
      ->allow_extra_args(false);
  command.callback([&action, args] { action = [args] { return convert(*args); }; });
}

}  // namespace tessera::cli

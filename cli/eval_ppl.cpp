#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/eval.h"
#include "cli/griffin_flag.h"
#include "cli/language_tokens.h"
#include "cli/tensor_parallel_flags.h"
#include "cli/train_run.h"
#include "eval/perplexity.h"
#include "io/utf8.h"
#include "report/progress.h"
#include "runtime/f32_math.h"
#include "runtime/interrupt.h"
#include "sparsity/griffin.h"

namespace tessera::cli {
namespace {

struct PplArgs {
  std::string model, data, part = "validation", dtype, device;
  std::vector<std::string> text;
  std::optional<int64_t> length;
  eval::PerplexityOptions options;
  SparseFlags sparse;
  TensorParallelFlags parallel;
  std::optional<double> griffin;
  bool json = false, any_bytes = false;
};

/// The linear layers, with what their gates did on the first windows.
nlohmann::json sparse_layers(pretrained::LoadedLanguageModel& language,
                             const std::vector<eval::PerplexityWindow>& windows) {
  constexpr size_t kMost = 8;  // windows: the gates' inputs are counted on the host
  std::map<std::string, pretrained::GateCounts> counts;
  const bool has_gates = std::ranges::any_of(language.sparse, [](const pretrained::SparseModule& module) {
    return module.gate.kind != ops::Gate::Kind::none;
  });
  if (has_gates) {
    std::vector<std::vector<int64_t>> texts;
    for (size_t i = 0; i < std::min(kMost, windows.size()); ++i)
      texts.emplace_back(windows[i].tokens.begin(), windows[i].tokens.end());
    counts = pretrained::count_gates(language.model, texts);
  }
  return sparse_json(language.sparse, counts);
}

/// A measurement: of a part of the windows if it was interrupted.
struct MeasuredText {
  LanguageTokens tokens;
  std::vector<eval::PerplexityWindow> windows;
  eval::Perplexity result;
  double seconds = 0;

  bool is_whole() const { return result.windows == int64_t(windows.size()); }
  /// The whole text's tokens per byte: windows leave some tokens out, and it is not known which bytes those
  /// are.
  double bits_per_byte() const {
    return result.nats / std::log(2.0) * double(tokens.ids.size()) /
           double(std::max<uint64_t>(1, tokens.bytes));
  }
  double tokens_per_second(int64_t length) const {
    return double(result.windows * length) / std::max(seconds, 1e-9);
  }
};

nlohmann::json json_of(const PplArgs& args, pretrained::LoadedLanguageModel& language,
                       const MeasuredText& measured, Device device) {
  const eval::Perplexity& result = measured.result;
  return {{"sparse", sparse_layers(language, measured.windows)},
          {"model", language.folder},
          {"type", language.config.type},
          {"dtype", args.dtype == "tf32" ? args.dtype : name_of(language.model.dtype())},
          {"device", device.name()},
          {"text", args.text},
          {"data", args.data},
          {"protocol", args.options.stride ? "sliding" : "windows"},
          {"length", args.options.length},
          {"stride", args.options.stride},
          {"bytes", measured.tokens.bytes},
          {"tokens", measured.tokens.ids.size()},
          {"windows", result.windows},
          {"predicted", result.predicted},
          {"nats_per_token", result.nats},
          {"perplexity", result.perplexity()},
          {"bits_per_byte", measured.bits_per_byte()},
          {"complete", measured.is_whole()},
          {"seconds", measured.seconds},
          {"tokens_per_s", measured.tokens_per_second(args.options.length)}};
}

void print(const PplArgs& args, const MeasuredText& measured) {
  const eval::Perplexity& result = measured.result;
  fmt::print("{:<16} {}\n{:<16} {} in {} bytes\n", "protocol",
             args.options.stride ? fmt::format("sliding windows of {}, the last {} predicted",
                                               args.options.length, args.options.stride)
                                 : fmt::format("windows of {}, one after the other", args.options.length),
             "tokens", measured.tokens.ids.size(), measured.tokens.bytes);
  fmt::print("{:<16} {} in {} windows\n{:<16} {:.6f}\n{:<16} {:.4f}\n{:<16} {:.4f}\n{:<16} {:.0f}\n",
             "predicted", result.predicted, result.windows, "nats per token", result.nats, "perplexity",
             result.perplexity(), "bits per byte", measured.bits_per_byte(), "tokens/s",
             measured.tokens_per_second(args.options.length));
}

int measure_ppl(PplArgs& args, const dist::World& world, Device device) {
  const bool tf32 = args.dtype == "tf32";
  auto sparse = args.sparse.options(language_folder(args.model), 1);
  if (sparse && args.griffin)
    throw UsageError(
        "--griffin: only a dense model takes it; leave out gates, and give a model that is not compressed");
  if (sparse) sparse->whole_texts = true;
  if (world.size() > 1 && (sparse || args.griffin))
    throw UsageError(
        "--tensor-parallel: of a dense model; leave out compressed weights, gates and --griffin");
  pretrained::LoadedLanguageModel language = load_language(args.model, device, tf32 ? "f32" : args.dtype,
                                                           sparse, args.parallel.share(world, device));
  const F32MathScope math(tf32 ? F32Math::tf32 : F32Math::ieee);
  args.options.length = args.length.value_or(std::min(args.options.length, language.model.longest()));
  check(args.options.length <= language.model.longest(), "eval ppl: windows of ", args.options.length,
        " tokens; the model has ", language.model.longest(), " positions: give a smaller --length");
  check(args.options.stride < args.options.length, "eval ppl: --stride ", args.options.stride,
        " in windows of ", args.options.length, " tokens, as many as the model has positions; expected less");
  MeasuredText measured{.tokens = args.data.empty()
                                      ? tokens_of_text(language, args.text, args.any_bytes)
                                      : tokens_of_shards("eval ppl", language, args.data, args.part)};
  measured.windows = eval::perplexity_windows(measured.tokens.ids, args.options);
  const std::vector<eval::PerplexityWindow>& windows = measured.windows;

  const InterruptGuard guard;
  const bool shows = ::isatty(STDERR_FILENO) == 1 && world.leads();
  const auto agreed_signal = [&] {  // it may have come to one rank
    return int(world.host().largest(InterruptGuard::signal_received()));
  };
  const auto begin = std::chrono::steady_clock::now();
  const auto progress = [&](const eval::Perplexity& so_far) {
    if (shows)
      report::tell(fmt::format("\r{}/{} windows, perplexity {:.4f}", so_far.windows, windows.size(),
                               so_far.perplexity()));
    return agreed_signal() == 0;
  };
  const auto measure = [&](const auto& model) {
    return eval::measure_perplexity(model, windows, device, args.options.batch, progress);
  };
  measured.result =
      args.griffin ? measure(sparsity::GriffinTexts(language.model, *args.griffin)) : measure(language.model);
  measured.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (shows) report::tell("\r\x1b[K");
  if (measured.result.windows > 0) eval::check_finite("eval ppl", measured.result.nats);
  const int code = measured.is_whole() ? 0 : 128 + agreed_signal();
  if (!world.leads()) return code;
  if (args.json) {
    nlohmann::json report = json_of(args, language, measured, device);
    if (args.griffin) report["griffin"] = *args.griffin;
    if (world.size() > 1) report["ranks"] = world.size();
    fmt::print("{}\n", io::json_text(report, 2));
  } else {
    print(args, measured);
  }
  if (!measured.is_whole())
    report::tell(fmt::format("tessera: interrupted after {} of {} windows\n", measured.result.windows,
                             windows.size()));
  return code;
}

int eval_ppl(PplArgs args) {
  if (args.text.empty() == args.data.empty())
    throw UsageError("eval ppl: give the text: --text FILE..., or --data DIR with shards of tokens");
  if (args.length && args.options.stride >= *args.length)
    throw UsageError(fmt::format("--stride: {} in windows of {} tokens; expected less", args.options.stride,
                                 *args.length));
  const dist::World world = args.parallel.join("eval ppl", args.device);
  return world.told([&] { return measure_ppl(args, world, device_of(args.device, world.place())); });
}

}  // namespace

void add_eval_ppl(CLI::App& eval, Action& action) {
  auto* ppl = eval.add_subcommand("ppl", "Measure the perplexity of a language model on a text");
  auto args = std::make_shared<PplArgs>();
  ppl->add_option("--model", args->model, "Hugging Face model directory, or run folder of a finished run")
      ->required();
  auto* const text = ppl->add_option("--text", args->text, "Text files, joined by blank lines");
  add_any_bytes(*ppl, args->any_bytes)->needs(text);
  auto* const data =
      ppl->add_option("--data", args->data, "Directory of token shards, instead of --text")->excludes(text);
  ppl->add_option("--part", args->part, "Split of the shards to use")->needs(data);
  ppl->add_option("--length", args->length,
                  "Window length in tokens; default: 2048, or the model's maximum if that is less")
      ->check(kDecimal)
      ->check(CLI::Range(2, 1 << 24));
  ppl->add_option("--stride", args->options.stride,
                  "Tokens between the starts of windows; each predicts that many tokens, its last ones. 0: "
                  "disjoint windows")
      ->check(kDecimal)
      ->check(CLI::Range(0, 1 << 24));
  ppl->add_option("--batch-size", args->options.batch, "Windows per batch")
      ->check(kDecimal)
      ->check(CLI::Range(1, 1 << 16));
  ppl->add_option("--windows", args->options.most_windows, "Maximum number of windows; 0: all")
      ->check(kDecimal)
      ->check(CLI::Range(0, 1 << 30));
  ppl->add_option("--dtype", args->dtype,
                  "Dtype of the weights; default: the file's, on the CPU f32. tf32: f32 with GEMMs and "
                  "attention in TF32")
      ->check(CLI::IsMember({"f32", "tf32", "bf16", "f16"}));
  add_device(*ppl, args->device);
  args->sparse.add_to(*ppl);
  add_griffin(*ppl, args->griffin);
  args->parallel.add_to(*ppl);
  ppl->add_flag("--json", args->json, "Print the result as JSON");
  ppl->callback([&action, args] { action = [args] { return eval_ppl(*args); }; });
}

}  // namespace tessera::cli

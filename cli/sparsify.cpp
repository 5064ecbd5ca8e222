#include "sparsity/sparsify.h"

#include <fmt/format.h>

#include <charconv>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/sparse_flags.h"
#include "cli/split_flags.h"
#include "cli/train_run.h"
#include "io/utf8.h"
#include "report/progress.h"
#include "runtime/interrupt.h"
#include "sparsity/split.h"

namespace tessera::cli {
namespace {

using nlohmann::ordered_json;

struct SparsifyArgs {
  SplitFlags how;
  ShareFlag weights, activations;
  std::string out, config, format, most_perplexity, searched = "0.1:0.8:0.1";
  std::optional<double> total;
  bool json = false;
};

/// "1.02x" or "1.02"
double factor_of(const std::string& text) {
  std::string number = text;
  if (number.ends_with('x')) number.pop_back();
  double value = 0;
  const auto [end, code] = std::from_chars(number.data(), number.data() + number.size(), value);
  if (code != std::errc{} || end != number.data() + number.size() || !(value >= 1 && value < 1000))
    throw UsageError("--max-ppl: \"" + text + "\": expected a multiple of the dense perplexity, as 1.02x");
  return value;
}

/// Two of total, weights and activations say the third; one of the latter alone is the total.
void read_split(const SparsifyArgs& args, sparsity::SparsifyOptions& options) {
  options.weights = args.weights.get();
  const std::optional<double> activations = args.activations.get();
  options.total = args.total;
  if (!args.most_perplexity.empty()) options.most_perplexity = factor_of(args.most_perplexity);
  if (!args.format.empty()) options.format = ops::parse_sparse_format(args.format);
  if (activations) {
    if (options.most_perplexity)
      throw UsageError("--max-ppl searches the split; leave out --activation-sparsity");
    if (options.weights && options.total)
      throw UsageError(
          "--total, --weight-sparsity, --activation-sparsity: the third follows from the other two");
    // Without gates the total is that of the weights to the last bit, which the formulas only come near.
    if (options.total) {
      if (*activations > *options.total)
        throw UsageError("--activation-sparsity: more than the --total sparsity");
      options.weights = *activations == 0  ? *options.total
                        : *activations < 1 ? 1 - (1 - *options.total) / (1 - *activations)
                                           : 0;
    } else {
      options.weights = options.weights.value_or(0);
      options.total =
          *activations == 0 ? *options.weights : sparsity::total_sparsity(*options.weights, *activations);
    }
  }
  // Weights alone, without gates.
  if (!options.total && !options.most_perplexity && options.weights.value_or(0) > 0)
    options.total = options.weights;
  if (!options.total && !options.most_perplexity)
    throw UsageError("sparsify: give the sparsity: --total 0.5, or --max-ppl 1.02x, or both");
  if (options.total && !(*options.total > 0 && *options.total < 1))
    throw UsageError(fmt::format("--total: {}: expected more than 0 and less than 1", *options.total));
  if (options.total && options.weights && *options.weights > *options.total)
    throw UsageError(fmt::format("--total: {} is less than the --weight-sparsity {} alone", *options.total,
                                 *options.weights));
}

ordered_json json_of(const sparsity::SplitResult& one) {
  return {{"ttft_ms", one.ttft_ms},
          {"tpot_ms", one.tpot_ms},
          {"bytes", one.bytes},
          {"weight_sparsity", one.counted_weights},
          {"activation_sparsity", one.counted_activations}};
}

/// What it generated; a model may have more rows than the tokenizer has tokens.
std::string text_of(const sparsity::Sparsified& done, const io::Tokenizer& tokenizer) {
  std::vector<int32_t> ids;
  for (const int64_t token : done.text)
    if (tokenizer.has(int32_t(token))) ids.push_back(int32_t(token));
  return io::utf8_text(tokenizer.decode(ids));
}

ordered_json report_of(const sparsity::Sparsified& done, const std::string& out,
                       const io::Tokenizer& tokenizer) {
  ordered_json report{{"out", io::utf8_text(out)},
                      {"total", done.split.total},
                      {"weight_sparsity", done.split.weights},
                      {"pruning", done.pruning},
                      {"activation_sparsity", done.split.activations},
                      {"format", ops::name_of(done.split.format)},
                      {"allocation", done.greedy ? "greedy" : "uniform"},
                      {"fingerprint", done.conversion.fingerprint},
                      {"dense_perplexity", done.dense_perplexity},
                      {"perplexity", done.perplexity},
                      {"dense", json_of(done.dense)},
                      {"sparse", json_of(done.sparse)},
                      {"searched", done.searched.size()},
                      {"refused", done.refused}};
  report["text"] = text_of(done, tokenizer);
  report["layers"] = ordered_json::parse(sparse_json(done.layers, {}).dump());
  return report;
}

void print_result(const sparsity::Sparsified& done, const std::string& out, const io::Tokenizer& tokenizer) {
  const sparsity::Split& split = done.split;
  fmt::print("{:<20} {}\n{:<20} {}\n{:<20} {}, gates {}\n", "total sparsity",
             sparsity::split_text(split.weights, split.activations), "pruning", done.pruning, "format",
             ops::name_of(split.format),
             split.activations > 0 ? (done.greedy ? "greedy" : "uniform") : "none");
  fmt::print("{:<20} {:.4f} of the weights, {:.4f} of the inputs\n", "counted", done.sparse.counted_weights,
             done.sparse.counted_activations);
  if (!done.searched.empty())
    fmt::print("{:<20} {} splits, {} not confirmed on held-out text\n", "searched", done.searched.size(),
               done.refused);
  fmt::print("{:<20} {:>12} {:>12} {:>8}\n", "", "dense", "sparse", "ratio");
  const auto line = [](const char* name, double dense, double sparse) {
    fmt::print("{:<20} {:>12.4f} {:>12.4f} {:>7.3f}x\n", name, dense, sparse,
               dense > 0 ? sparse / dense : 0.0);
  };
  line("perplexity", done.dense_perplexity, done.perplexity);
  line("first token, ms", done.dense.ttft_ms, done.sparse.ttft_ms);
  line("per token, ms", done.dense.tpot_ms, done.sparse.tpot_ms);
  line("layers, MB", double(done.dense.bytes) / 1e6, double(done.sparse.bytes) / 1e6);
  fmt::print("{:<20} {}\n", "generates", text_of(done, tokenizer));
  fmt::print("written to {}; run it with\n  tessera generate --model {} --sparse required{} --prompt Once\n",
             out, quoted(out),
             split.activations > 0 ? fmt::format(" --activation-sparsity {:.4g}{}", split.activations,
                                                 done.greedy ? "" : " --allocation uniform")
                                   : "");
}

/// Flags of what the split does not have.
void check_effects(const CLI::App& command, const SparsifyArgs& args,
                   const sparsity::SparsifyOptions& options) {
  if (!options.most_perplexity || options.total)
    refuse_given(command, {"--search"}, "is for --max-ppl without --total; leave it out");
  if (args.how.gate_aware != "off") return;  // without zeros or without gates an error of its own
  if (options.weights && options.weights == options.total)
    refuse_given(command, GateFlags::kNames,
                 "is for gates, and without them all zeros are in the weights; leave it out");
  if (options.weights == 0.0)
    refuse_given(command, {"--method"},
                 "is for pruning, and with gates alone no weight is pruned; leave it out");
}

int sparsify(const CLI::App& command, SparsifyArgs args) {
  sparsity::SparsifyOptions options;
  read_split(args, options);
  check_effects(command, args, options);
  try {
    options.how.totals = sparsity::parse_shares(args.searched, "--search");
    if (options.most_perplexity) sparsity::splits_of(sparsity::searched_by(options));
  } catch (const Error& error) {
    throw UsageError(error.message());
  }
  check_folder_writable(args.out);
  const InterruptGuard interrupts(kGivingUp);
  const auto prepared = args.how.prepare("sparsify");
  const std::vector<double> totals = options.how.totals;
  options.how = prepared->options;
  options.how.totals = totals;
  if (!args.how.dtype.empty()) options.file_dtype = parse_dtype(args.how.dtype);
  const sparsity::Sparsified done = sparsity::sparsify(options, args.out);
  ignore_signals();
  if (args.json)
    fmt::print("{}\n", report_of(done, args.out, *prepared->tokenizer).dump(2));
  else
    print_result(done, args.out, *prepared->tokenizer);
  return 0;
}

}  // namespace

void add_sparsify(CLI::App& app, Action& action) {
  CLI::App& command = *app.add_subcommand(
      "sparsify", "Prune, calibrate and compress a language model in one step, and measure the result");
  auto args = std::make_shared<SparsifyArgs>();
  command.footer(
      "A share s1 of the weights is pruned, gates drop a share s2 of the inputs; the total is 1 - (1 - s1)(1 "
      "- s2).\nWithout --weight-sparsity the split is that of SPDP's operating points; --max-ppl searches "
      "the fastest one whose\nperplexity stays within a multiple of the dense model's, and confirms it on "
      "other text.\n\nExamples:\n  tessera sparsify --model llama --total 0.5 --text c4.txt --out sparse\n  "
      "tessera sparsify --model llama --max-ppl 1.02x --text c4.txt --out sparse\n  "
      "tessera sparsify --model llama --total 0.7 --method sparsegpt --gate-aware on --text c4.txt --out "
      "sparse");
  args->how.add_to(command);
  command.add_option("--out", args->out, "Directory to write; it must not contain weights yet");
  command.add_option("--config", args->config, "TOML file of flags; the command line takes precedence");
  command.add_option("--total", args->total, "Total sparsity")->check(kFinite)->check(between(0, 1));
  add_weight_sparsity(command, args->weights, "Share of the weights to prune");
  add_activation_sparsity(command, args->activations, "Share of the inputs that gates drop");
  command
      .add_option(
          "--format", args->format,
          "Compressed format; default: tiled-cbc, for gates only dense-columns, for weights only sell-delta4")
      ->check(CLI::IsMember(sparse_format_names()));
  command.add_option(
      "--max-ppl", args->most_perplexity,
      "Take the fastest split whose perplexity is at most this multiple of the dense one, such as 1.02x");
  command.add_option("--search", args->searched,
                     "Total sparsities to search without --total, such as 0.1:0.8:0.1");
  command.add_flag("--json", args->json, "Print the report as JSON");
  command.callback([&action, &command, args] {
    action = [&command, args] {
      apply_config(command, args->config);
      require_flags(command, {"--model", "--out"});
      return sparsify(command, *args);
    };
  });
}

}  // namespace tessera::cli

#include <fmt/format.h>

#include <chrono>
#include <nlohmann/json.hpp>

#include "cli/calibration_flags.h"
#include "cli/commands.h"
#include "cli/gate_flags.h"
#include "io/utf8.h"
#include "pretrained/fingerprint.h"
#include "report/progress.h"
#include "runtime/interrupt.h"
#include "sparsity/chain.h"
#include "sparsity/split.h"

namespace tessera::cli {

const std::vector<const char*> GateFlags::kNames{"--rule", "--scale", "--gate",           "--allocation",
                                                 "--step", "--most",  "--greedy-samples", "--gate-prefill"};

void GateFlags::add_to(CLI::App& command) {
  command_ = &command;
  command
      .add_option(
          "--rule", rule,
          "Threshold for a share s of the inputs: symmetric (the quantile 0.5 + s/2 of x, as in TEAL) or "
          "magnitude (the quantile s of |x|); default: symmetric, or magnitude with --scale column-norm")
      ->check(CLI::IsMember({"symmetric", "magnitude"}));
  command
      .add_option("--scale", scale,
                  "Score of input j: |x_j|, or |x_j| times the norm of column j of the weight (WINA)")
      ->check(CLI::IsMember({"one", "column-norm"}));
  command
      .add_option("--gate", gate,
                  "Inputs to keep: those above a threshold, or the k largest of each token (La RoSA)")
      ->check(CLI::IsMember({"threshold", "top-k"}));
  command
      .add_option("--allocation", allocation,
                  "Allocation of the sparsity to the projections of each block: uniform only, or greedy too")
      ->check(CLI::IsMember({"uniform", "greedy"}));
  command
      .add_option("--step", options.step, "greedy: sparsity that one step adds to a d_model x d_model matrix")
      ->check(kFinite);
  command.add_option("--most", options.most, "greedy: block sparsity at which to stop")->check(kFinite);
  command
      .add_option("--greedy-samples", options.greedy_samples,
                  "greedy: number of samples for measuring errors")
      ->check(whole(1, 1 << 20));
  command
      .add_option("--gate-prefill", options.prefill,
                  "Share of a text's tokens, counted from the end, that gates apply to")
      ->check(kFinite);
}

sparsity::GateOptions GateFlags::get() const {
  sparsity::GateOptions result = options;
  result.column_norms = scale == "column-norm";
  result.top_k = gate == "top-k";
  result.greedy = allocation == "greedy";
  if (!result.greedy)
    refuse_given(*command_, {"--step", "--most", "--greedy-samples"},
                 "is for --allocation greedy; leave it out");
  if (result.top_k && !rule.empty())
    throw UsageError("--rule is for thresholds, and --gate top-k has none; leave it out");
  const bool by_magnitude = rule.empty() && result.column_norms;
  try {
    result.rule = by_magnitude   ? sparsity::ThresholdRule::magnitude
                  : rule.empty() ? sparsity::ThresholdRule::symmetric
                                 : sparsity::parse_threshold_rule(rule);
    result.validate();
  } catch (const Error& error) {
    throw UsageError(error.message());
  }
  return result;
}

std::function<void(int64_t, int64_t)> block_progress(const char* what) {
  const auto begin = std::chrono::steady_clock::now();
  return [begin, what](int64_t block, int64_t blocks) {
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    report::tell(
        fmt::format("tessera: {} block {} of {}, {} left\n", what, block + 1, blocks,
                    report::format_duration(seconds / double(block + 1) * double(blocks - block - 1))));
  };
}

namespace {

using nlohmann::ordered_json;

struct CalibrateArgs {
  std::string model, out, config, device, dtype, activation = "0.5";
  CalibrationFlags texts;
  GateFlags gates;
  ShareFlag weights;
  std::optional<double> total;
  bool json = false;
};

/// A sparsity and what it does to the held-out text.
struct Measured {
  double sparsity = 0, uniform = 0, greedy = 0, counted = 0;
};

double measure(models::LanguageModel& model, const sparsity::Calibration& calibration,
               const std::string& folder, std::span<const eval::PerplexityWindow> windows, int64_t batch,
               double share, bool greedy, double* counted) {
  pretrained::SparseOptions options = sparsity::options_of(calibration, share, greedy);
  options.gates->fingerprint.clear();  // they are this model's, whose weights are in columns by now
  options.whole_texts = true;
  pretrained::make_sparse(model, options, folder);
  if (counted)
    *counted = sparsity::counted_sparsity(model, windows.subspan(0, std::min<size_t>(4, windows.size())));
  return eval::perplexity_of(model, windows, batch);
}

void print_thresholds(const sparsity::Calibration& calibration, double share, bool greedy) {
  const auto shares = calibration.shares_at(share, greedy);
  fmt::print("\n{:<44} {:>12} {:>8} {:>12}\n", "layer", "shape", "share",
             calibration.top_k ? "k" : "threshold");
  constexpr size_t kShown = 14;
  for (size_t i = 0; i < calibration.layers.size(); ++i) {
    if (i == kShown && calibration.layers.size() > 2 * kShown) {
      fmt::print("... {} more\n", calibration.layers.size() - 2 * kShown);
      i = calibration.layers.size() - kShown;
    }
    const sparsity::CalibratedLayer& layer = calibration.layers[i];
    const ops::Gate gate = calibration.gate(layer, shares.at(layer.name));
    fmt::print("{:<44} {:>12} {:>8.4f} {:>12.6g}\n", layer.name,
               fmt::format("{} x {}", layer.rows, layer.columns), shares.at(layer.name),
               calibration.top_k ? double(gate.keep) : gate.threshold);
  }
}

/// The activation sparsities to measure.
std::vector<double> shares_of(const CalibrateArgs& args) {
  try {
    if (!args.total) {
      check(!args.weights.get(),
            "--weight-sparsity says which share of a --total the gates have; give --total");
      return sparsity::parse_shares(args.activation, "--activation-sparsity");
    }
    const double weights = args.weights.get().value_or(0);
    const double share = sparsity::activations_for(*args.total, weights);
    report::tell(fmt::format("tessera: total sparsity {}\n", sparsity::split_text(weights, share)));
    return {share};
  } catch (const Error& error) {
    throw UsageError(error.message());
  }
}

ordered_json report_of(const sparsity::Calibration& calibration, const std::vector<Measured>& measured,
                       double dense) {
  ordered_json report{{"model", io::utf8_text(calibration.model)},
                      {"fingerprint", calibration.fingerprint},
                      {"layers", calibration.layers.size()},
                      {"samples", calibration.samples},
                      {"length", calibration.length}};
  if (dense > 0) report["dense_perplexity"] = dense;
  report["measured"] = ordered_json::array();
  for (const Measured& one : measured) {
    ordered_json row{{"activation_sparsity", one.sparsity},
                     {"counted_sparsity", one.counted},
                     {"uniform_perplexity", one.uniform}};
    if (one.greedy > 0) row["greedy_perplexity"] = one.greedy;
    report["measured"].push_back(std::move(row));
  }
  return report;
}

int calibrate(const CLI::App& command, CalibrateArgs args) {
  const sparsity::GateOptions gates = args.gates.get();
  const std::vector<double> shares = shares_of(args);
  if (args.texts.has_text() && !args.texts.has_evaluation()) {
    refuse_given(command, {"--eval-windows"}, kNoPerplexity);
    if (shares.size() > 1) throw UsageError(fmt::format("--activation-sparsity: a list {}", kNoPerplexity));
  }
  if (!args.texts.has_text())
    throw UsageError("calibrate: give the text: --text FILE..., or --data DIR with shards of tokens");
  const Device device = args.device.empty() ? Device::best() : Device::parse(args.device);
  check(!sparsity::is_calibration(args.out), "calibrate: ", args.out, " has a ", sparsity::kCalibrationFile,
        " already; name another folder");
  check_folder_writable(args.out);
  pretrained::LoadedLanguageModel language = load_language(args.model, device, args.dtype);
  check(!language.config.cola, "calibrate: the weights in ", language.folder,
        " are factors (cola); only inputs of dense weights, or of compressed ones, have gates");
  args.texts.choose_length("calibrate", language);
  const CalibrationFlags::Texts texts = args.texts.read("calibrate", language);
  const sparsity::Samples samples = sparsity::choose_samples(texts.calibration, args.texts.samples);
  std::vector<eval::PerplexityWindow> windows;
  if (args.texts.has_evaluation())
    windows = eval::perplexity_windows(texts.evaluation,
                                       {.length = samples.length, .most_windows = args.texts.eval_windows});
  const InterruptGuard interrupts(kGivingUp);
  const int64_t batch = args.gates.options.batch;
  double dense = 0;
  if (!windows.empty()) {
    dense = eval::perplexity_of(language.model, windows, batch);
    eval::check_finite("calibrate", dense);
  }
  sparsity::GateOptions options = gates;
  options.on_block = block_progress("calibrated");
  if (!pretrained::is_sparse_folder(language.folder))
    sparsity::check_pruned("calibrate", language.folder, pretrained::fingerprint_of(language.model));
  sparsity::Calibration calibration = sparsity::calibrate(language.model, samples, options);
  calibration.model = io::utf8_name(args.model);
  InterruptGuard::set_notice("\ntessera: stopping; the calibration is complete and stays\n");
  sparsity::save_calibration(calibration, args.out);
  std::vector<Measured> measured;
  try {
    for (const double share : windows.empty() ? std::vector<double>() : shares) {
      const auto measure_as = [&](bool greedy, double* counted) {
        return measure(language.model, calibration, language.folder, windows, batch, share, greedy, counted);
      };
      Measured& one = measured.emplace_back(Measured{.sparsity = share});
      one.uniform = measure_as(false, &one.counted);
      if (options.greedy && share <= options.most) one.greedy = measure_as(true, nullptr);
    }
  } catch (const Interrupted& interrupted) {
    report::tell(
        fmt::format("tessera: {}; the calibration in {} is complete, its perplexity was not measured\n",
                    interrupted.message(), args.out));
    return 128 + interrupted.signal();
  }
  ignore_signals();
  if (args.json) {
    fmt::print("{}\n", report_of(calibration, measured, dense).dump(2));
    return 0;
  }
  print_thresholds(calibration, shares.front(), options.greedy && shares.front() <= options.most);
  if (!windows.empty())
    fmt::print("\n{:<20} {:>10} {:>12} {:>12}\n{:<20} {:>10} {:>12.4f}\n", "activation sparsity", "counted",
               "uniform", "greedy", "dense", "", dense);
  for (const Measured& one : measured)
    fmt::print("{:<20.4f} {:>10.4f} {:>12.4f} {:>12}\n", one.sparsity, one.counted, one.uniform,
               one.greedy > 0 ? fmt::format("{:.4f}", one.greedy) : "-");
  if (!windows.empty())
    fmt::print("perplexity on {} windows of {} tokens, gates on the last {:g} of each\n", windows.size(),
               samples.length, options.prefill);
  fmt::print("written to {}: {}{}\n", args.out, sparsity::kCalibrationFile,
             options.greedy ? ", layer-<block>/results.csv" : "");
  return 0;
}

}  // namespace

void add_calibrate(CLI::App& app, Action& action) {
  CLI::App& command = *app.add_subcommand(
      "calibrate", "Calibrate gates: thresholds that drop a share of each linear layer's inputs");
  auto args = std::make_shared<CalibrateArgs>();
  command.footer(
      "Writes thresholds for every share of the inputs, and the fingerprint of the model.\n\nExample:\n  "
      "tessera calibrate --model pruned --text c4.txt --out gates --activation-sparsity 0.4\n  tessera "
      "generate --model pruned --gates gates --activation-sparsity 0.4 --prompt Once");
  command.add_option("MODEL,--model", args->model,
                     "Hugging Face model directory, or run folder of a finished run");
  command.add_option("--out", args->out, "Directory to write; it must not contain a calibration yet");
  command.add_option("--config", args->config, "TOML file of flags; the command line takes precedence");
  args->texts.samples.count = 10;
  args->texts.add_to(command);
  args->gates.add_to(command);
  auto* const activation =
      command.add_option("--activation-sparsity", args->activation,
                         "Activation sparsities to measure the perplexity at: 0.5, 0.3,0.5 or 0.1:0.8:0.1");
  command
      .add_option("--total", args->total,
                  "Total sparsity 1 - (1 - s1)(1 - s2), with s1 from --weight-sparsity; instead of "
                  "--activation-sparsity")
      ->check(kFinite)
      ->check(between(0, 1))
      ->excludes(activation);
  add_weight_sparsity(command, args->weights,
                      "--total: share of the model's weights that pruning set to zero; default: 0");
  command
      .add_option("--batch-size", args->gates.options.batch,
                  "Samples per batch through a block, and windows of the perplexity per batch")
      ->check(whole(1, 1 << 20));
  command.add_option("--dtype", args->dtype, "Dtype of the weights; default: the file's, on the CPU f32")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}));
  add_device(command, args->device);
  command.add_flag("--json", args->json, "Print the measurements as JSON");
  command.callback([&action, &command, args] {
    action = [&command, args] {
      apply_config(command, args->config);
      require_flags(command, {"--model", "--out"});
      return calibrate(command, *args);
    };
  });
}

}  // namespace tessera::cli

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/calibration_flags.h"
#include "cli/commands.h"
#include "cli/sparse_flags.h"
#include "eval/perplexity.h"
#include "io/file.h"
#include "io/utf8.h"
#include "report/progress.h"
#include "runtime/interrupt.h"
#include "sparsity/allocation_file.h"
#include "sparsity/chain.h"
#include "sparsity/input_norms.h"
#include "sparsity/prune_report.h"
#include "sparsity/prune_run.h"
#include "train/run_folder.h"

namespace tessera::cli {
namespace {

using nlohmann::ordered_json;
using sparsity::PruneOptions;

struct PruneArgs {
  std::string model, out, config, device, dtype;
  CalibrationFlags texts;
  std::string method = "wanda", update, pattern = "unstructured", within, allocation = "uniform", layers;
  std::optional<double> sparsity;
  std::string gates, gate_allocation;
  ShareFlag activation;
  PruneOptions options;
  bool json = false, plan_only = false;
};

/// The gates that the model will run under.
void read_gates(PruneArgs& args) {
  const std::optional<double> share = args.activation.get();
  if (args.gates.empty()) {
    if (share || !args.gate_allocation.empty())
      throw UsageError(
          "--activation-sparsity, --gate-allocation: these describe the gates that the model will run under; "
          "name their calibration with --gates");
    return;
  }
  if (!sparsity::is_calibration(args.gates)) {
    if (share || !args.gate_allocation.empty())
      throw UsageError("--activation-sparsity, --gate-allocation: these need a calibration, and " +
                       io::shown(args.gates) + " is not one; make one with tessera calibrate");
    args.options.gates = {.gates = pretrained::read_gates(args.gates), .prefill = 1};
    return;
  }
  if (!share)
    throw UsageError("--gates: " + io::shown(args.gates) +
                     " is a calibration; say which --activation-sparsity");
  const sparsity::Calibration calibration = sparsity::read_calibration(args.gates);
  const bool greedy =
      args.gate_allocation.empty() ? !calibration.greedy.empty() : args.gate_allocation == "greedy";
  args.options.gates = sparsity::prune_gates_of(calibration, *share, greedy);
}

/// Turns the flags that are texts into options; what they say wrong is a mistake of the command line.
void read_options(PruneArgs& args) {
  PruneOptions& options = args.options;
  try {
    options.score = sparsity::parse_score(args.method);
    const bool by_hessian = options.score == sparsity::Score::sparsegpt;
    options.update = sparsity::parse_update(!args.update.empty() ? args.update : by_hessian ? "obs" : "none");
    options.pattern = sparsity::parse_pattern(args.pattern);
    const sparsity::Pattern& pattern = options.pattern;
    options.sparsity =
        args.sparsity.value_or(pattern.structured() ? double(pattern.zeros) / double(pattern.group) : 0.5);
    if (!args.within.empty())
      options.within = args.within == "row" ? ops::KeepWithin::row : ops::KeepWithin::matrix;
    if (args.allocation == "owl" || args.allocation == "uniform")
      options.allocation = sparsity::parse_allocation(args.allocation);
    else
      options.assigned = sparsity::read_allocation(args.allocation);
    if (!args.layers.empty()) {
      const size_t colon = args.layers.find(':');
      const std::string first = args.layers.substr(0, colon),
                        last = colon == std::string::npos ? "" : args.layers.substr(colon + 1);
      std::string number = first, end = last;
      check(colon != std::string::npos && kDecimal(number).empty() && kDecimal(end).empty(), "--layers: '",
            args.layers, "'; expected FIRST:END as in 0:8");
      options.first_block = std::stoll(first), options.last_block = std::stoll(last);
    }
    options.validate();
  } catch (const Error& error) {
    throw UsageError(error.message());
  }
}

/// What a flag of another score, update or allocation says, or of texts that are not there, would have no
/// effect.
void check_effects(const CLI::App& command, const PruneOptions& options, const CalibrationFlags& texts) {
  const auto only = [&](const std::vector<const char*>& flags, bool has_effect, const char* of) {
    if (!has_effect) refuse_given(command, flags, fmt::format("is for {}; leave it out", of));
  };
  const bool by_hessian = options.score == sparsity::Score::sparsegpt,
             obs = options.update == sparsity::Update::obs, admm = options.update == sparsity::Update::admm;
  only({"--owl-outlier", "--owl-range"}, options.allocation == sparsity::Allocation::owl, "--allocation owl");
  only({"--ria-power"}, options.score == sparsity::Score::ria, "--method ria");
  only({"--block-size"}, by_hessian || obs, "--method sparsegpt and --update obs");
  only({"--damping"}, by_hessian || obs || admm, "--method sparsegpt and --update obs or admm");
  only({"--iterations", "--rho"}, admm, "--update admm");
  only({"--true-sequential"}, options.needs_samples(), "methods and updates that read samples");
  if (options.needs_samples() && !texts.has_text()) return;  // an error of its own
  only({"--samples", "--seed", "--validation"}, texts.has_text(),
       "--text and --data, of which none is given");
  only({"--any-bytes"}, !texts.text.empty() || !texts.eval_text.empty(),
       "--text and --eval-text, of which none is given");
  only({"--length", "--batch-size"}, texts.has_text() || texts.has_evaluation(),
       "--text, --data and --eval-text, of which none is given");
  if (!texts.has_evaluation()) refuse_given(command, {"--eval-windows"}, kNoPerplexity);
}

std::string describe_method(const PruneOptions& options) {
  std::string text = options.method() + ", ";
  if (options.pattern.structured())
    return text + fmt::format("{} of each {} weights of a row dropped", options.pattern.zeros,
                              options.pattern.group);
  const bool by_blocks = options.score == sparsity::Score::sparsegpt;
  const char* const where = options.keep_within() == ops::KeepWithin::row ? "each row"
                            : by_blocks                                   ? "each block of columns"
                                                                          : "each matrix";
  return text + fmt::format("{:g} of the weights of {} dropped", options.sparsity, where);
}

/// Says how each block went, and counts them in `finished`, which must outlive it.
std::function<void(int64_t, const std::vector<sparsity::PrunedMatrix>&)> block_teller(int64_t blocks,
                                                                                      int64_t& finished) {
  return [blocks, &finished](int64_t block, const std::vector<sparsity::PrunedMatrix>& matrices) {
    ++finished;
    const sparsity::Pruned whole{.matrices = matrices, .masks = {}};
    report::tell(fmt::format("block {} of {}: sparsity {:.4f}\n", block + 1, blocks, whole.sparsity()));
    for (const sparsity::PrunedMatrix& matrix : matrices)
      if (matrix.raised > 0)
        report::tell(fmt::format("  {}: damping raised to {:g}: X^T X was not positive definite\n",
                                 matrix.name, matrix.damping));
  };
}

/// What a pruning works on. `windows` refer to `texts`: not to be copied.
struct Work {
  pretrained::LoadedLanguageModel language;
  DType saved;  // dtype of the files
  CalibrationFlags::Texts texts = {};
  sparsity::Samples samples = {};
  std::vector<eval::PerplexityWindow> windows = {};
};

std::unique_ptr<Work> prepare(PruneArgs& args) {
  if (args.options.needs_samples() && !args.texts.has_text())
    throw UsageError(fmt::format(
        "prune: {} is calibrated with text: give --text FILE..., or --data DIR with shards of tokens",
        args.options.method()));
  const Device device = args.device.empty() ? Device::best() : Device::parse(args.device);
  std::error_code ignored;
  if (!args.plan_only) {
    if (std::filesystem::is_directory(args.out, ignored)) io::check_no_weights(args.out);
    check_folder_writable(args.out);
  }
  pretrained::LoadedLanguageModel language = load_language(args.model, device, args.dtype);
  check(!language.config.cola, "prune: the weights in ", language.folder,
        " are factors (cola); only dense weights are pruned");
  const DType saved = args.dtype.empty() ? language.stored : language.model.dtype();
  if (saved != language.model.dtype()) args.options.dtype = saved;
  args.texts.choose_length("prune", language);
  auto work = std::unique_ptr<Work>(new Work{.language = std::move(language), .saved = saved});
  work->texts = args.texts.read("prune", work->language);
  if (args.options.needs_samples())
    work->samples = sparsity::choose_samples(work->texts.calibration, args.texts.samples);
  if (args.texts.has_evaluation())
    work->windows = eval::perplexity_windows(
        work->texts.evaluation,
        {.length = args.texts.samples.length, .most_windows = args.texts.eval_windows});
  return work;
}

std::string plan_text(const PruneArgs& args, Work& work) {
  models::LanguageModel& model = work.language.model;
  const sparsity::Samples& samples = work.samples;
  const sparsity::PrunePlan plan = sparsity::plan_pruning(model, samples, args.options);
  constexpr double kGib = 1 << 30;
  std::string text =
      fmt::format("{:<12} {} of {}, {} on {}\n", "model", work.language.config.type, work.language.folder,
                  tessera::name_of(model.dtype()), model.device().name());
  text += fmt::format("{:<12} {} matrices, {} weights: {}\n", "prune", plan.matrices,
                      report::format_count(double(plan.weights)), describe_method(args.options));
  if (samples.count() > 0)
    text += fmt::format("{:<12} {} samples of {} tokens, seed {}\n", "calibration", samples.count(),
                        samples.length, samples.seed);
  text += fmt::format("{:<12} {:.2f} GiB: model {:.2f}, samples {:.2f}, statistics {:.2f}, work {:.2f}\n",
                      "memory", plan.bytes() / kGib, plan.model_bytes / kGib, plan.sample_bytes / kGib,
                      plan.statistics_bytes / kGib, plan.transient_bytes / kGib);
  if (plan.seconds > 0)
    text += fmt::format("{:<12} about {} and {:.3g} FLOPs, extrapolated from the first block\n", "time",
                        report::format_duration(plan.seconds), plan.flops);
  return text;
}

void print_result(const PruneArgs& args, const sparsity::Pruned& pruned, const ordered_json& report) {
  if (pruned.resumed > 0)
    fmt::print("{:<12} {} blocks were pruned by an earlier call\n", "resumed", pruned.resumed);
  fmt::print("\n{}\n{:<12} {:.6f}", sparsity::sparsity_table(pruned.matrices), "sparsity", pruned.sparsity());
  if (int64_t(pruned.matrices.size()) < pruned.block_matrices)
    fmt::print(" of {} of the {} matrices; {:.6f} of all of them", pruned.matrices.size(),
               pruned.block_matrices, pruned.block_sparsity);
  fmt::print("\n");
  if (const auto found = report.find("perplexity"); found != report.end())
    fmt::print("{:<12} {:.4f} before, {:.4f} after, on {} windows of {} tokens\n", "perplexity",
               found->at("before").get<double>(), found->at("after").get<double>(),
               found->at("windows").get<int64_t>(), found->at("length").get<int64_t>());
  if (args.options.gates) {
    double gates = 0, corrected = 0, error = 0;
    for (const sparsity::PrunedMatrix& matrix : pruned.matrices)
      gates += *matrix.gate_error, corrected += *matrix.corrected_error, error += *matrix.error;
    const double count = double(pruned.matrices.size());
    if (const auto found = report.find("perplexity"); found != report.end())
      fmt::print("{:<12} {:.4f} before, {:.4f} after\n", "under gates",
                 found->at("gated_before").get<double>(), found->at("gated_after").get<double>());
    fmt::print("{:<12} {:.4g} by the gates, {:.4g} corrected, {:.4g} pruned (of the outputs' energy, mean)\n",
               "error", gates / count, corrected / count, error / count);
  }
  const bool norms = std::filesystem::exists(std::filesystem::path(args.out) / sparsity::kInputNormsFile);
  fmt::print("{:<12} {} ({}, {}{})\n", "written", args.out, sparsity::kMasksFile, sparsity::kReportFile,
             norms ? fmt::format(", {}", sparsity::kInputNormsFile) : "");
}

/// Each row or matrix drops its share of weights rounded down, which may be none of them.
void tell_unpruned(const sparsity::Pruned& pruned) {
  const auto asked = [](const sparsity::PrunedMatrix& matrix) { return matrix.asked > 0; };
  if (pruned.sparsity() == 0 && std::ranges::any_of(pruned.matrices, asked))
    report::tell(
        "tessera: no weight was dropped: the sparsity is less than one weight of each row or matrix whose "
        "lowest scores are dropped; give a larger --sparsity, or --within matrix\n");
}

/// Finished blocks stay after an error too, which is said.
sparsity::PruneRunResult run_and_tell(const PruneArgs& args, Work& work) {
  int64_t finished = 0;
  sparsity::PruneRun run{.model = args.model,
                         .out = args.out,
                         .options = args.options,
                         .dtype = work.saved,
                         .windows = work.windows};
  run.options.on_block = block_teller(models::LanguageRef(work.language.model).blocks(), finished);
  try {
    return sparsity::run_pruning(work.language, work.samples, std::move(run));
  } catch (const Interrupted&) {
    throw;
  } catch (const Error&) {
    if (finished > 0)
      report::tell(fmt::format(
          "tessera: {} finished {} kept in {}: the same command continues after {}; remove the folder to "
          "start over, or to give other options\n",
          finished, finished == 1 ? "block is" : "blocks are", io::shown(sparsity::partial_folder(args.out)),
          finished == 1 ? "it" : "them"));
    throw;
  }
}

int prune(const CLI::App& command, PruneArgs args) {
  read_gates(args);
  read_options(args);
  check_effects(command, args.options, args.texts);
  const std::unique_ptr<Work> work = prepare(args);
  const InterruptGuard interrupts("\ntessera: stopping; finished blocks are kept\n");
  const std::string plan = plan_text(args, *work);
  if (args.json)
    report::tell(plan);
  else
    fmt::print("{}", plan);
  std::fflush(stdout);
  if (args.plan_only) return 0;

  const auto begin = std::chrono::steady_clock::now();
  auto [pruned, report] = run_and_tell(args, *work);
  ignore_signals();
  tell_unpruned(pruned);
  if (!args.json) {
    print_result(args, pruned, report);
    return 0;
  }
  report["out"] = args.out;
  report["resumed_blocks"] = pruned.resumed;
  report["seconds"] = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  fmt::print("{}\n", io::json_text(report, 2));
  return 0;
}

void add_choice_flags(CLI::App& command, PruneArgs& args) {
  PruneOptions& options = args.options;
  command.add_option("--only", options.only,
                     "Prune only these modules: \"k_proj\", \"model.layers.*.mlp.*\"");
  command.add_option("--except", options.except, "Do not prune these modules");
  command.add_option("--layers", args.layers, "Prune only blocks FIRST:END, END not included; default: all");
  command.add_flag("--invert", options.invert,
                   "Invert the selection: prune the modules that --only, --except and --layers leave out");
}

void add_gate_flags(CLI::App& command, PruneArgs& args) {
  command.add_option("--gates", args.gates,
                     "Gate-aware pruning: the remaining weights compensate for the inputs that these gates "
                     "drop; calibration of the dense model (tessera calibrate), or file of gates");
  add_activation_sparsity(command, args.activation, "Share of the inputs that these gates drop");
  command
      .add_option(
          "--gate-allocation", args.gate_allocation,
          "Allocation of calibrated gates: the same share everywhere, or greedy; default: as calibrated")
      ->check(CLI::IsMember({"uniform", "greedy"}));
}

void add_method_flags(CLI::App& command, PruneArgs& args) {
  PruneOptions& options = args.options;
  command
      .add_option("--method", args.method, "Pruning score; the weights with the lowest scores are dropped")
      ->check(CLI::IsMember({"magnitude", "wanda", "ria", "sparsegpt"}));
  command
      .add_option("--update", args.update,
                  "Update of the remaining weights; default: obs for sparsegpt, else none")
      ->check(CLI::IsMember({"none", "obs", "admm"}));
  command.add_option("--sparsity", args.sparsity,
                     "Share of the weights to drop; default: 0.5, or n/m of the pattern");
  command.add_option("--pattern", args.pattern,
                     "unstructured, or n:m (n zeros in each m consecutive inputs), such as 2:4");
  command
      .add_option(
          "--within", args.within,
          "Group whose lowest scores are dropped: row or matrix; default: matrix for magnitude and sparsegpt")
      ->check(CLI::IsMember({"row", "matrix"}));
  command.add_option("--allocation", args.allocation,
                     "Sparsity per module: uniform, owl, or a JSON file such as {\"mlp.down_proj\": 0.6}");
  command
      .add_option("--owl-outlier", options.owl_outlier,
                  "owl: multiple of the mean score above which a score is an outlier")
      ->check(kFinite);
  command
      .add_option("--owl-range", options.owl_range,
                  "owl: lambda, half the difference of the blocks' largest and least sparsity")
      ->check(kFinite);
  command.add_option("--ria-power", options.ria_power, "ria: power of the input norm")->check(kFinite);
  command.add_flag("--variant", options.variant,
                   "wanda: drop the weights that hold the lowest share of each row's sum of scores");
  command
      .add_option("--damping", options.damping,
                  "Damping of the Hessian's diagonal as a share of its mean; raised if necessary")
      ->check(kFinite);
  command
      .add_option(
          "--block-size", options.block_size,
          "obs, sparsegpt: number of columns whose masks are chosen together; obs: at most 256 on a GPU")
      ->check(whole(1, 1 << 20));
  command
      .add_option("--bits", options.bits,
                  "obs: round the remaining weights to this many bits, per row; 0: off")
      ->check(whole(0, 8));
  command.add_flag("--true-sequential", options.sequential,
                   "Calibrate each layer on the pruned earlier layers of its block");
  command.add_option("--iterations", options.iterations, "admm: number of iterations")
      ->check(whole(1, 100000));
  command.add_option("--rho", options.rho, "admm: penalty")->check(kFinite);
}

}  // namespace

void add_prune(CLI::App& app, Action& action) {
  CLI::App& command =
      *app.add_subcommand("prune", "Prune a language model: magnitude, Wanda, RIA or SparseGPT");
  auto args = std::make_shared<PruneArgs>();
  command.footer(
      "Prints a plan, prunes block by block and writes a Hugging Face model directory with "
      "masks.safetensors,\n"
      "pruning.json and, with samples, input_norms.safetensors in it. An interrupted call continues after "
      "its finished blocks.\n\nExample:\n  "
      "tessera prune --model llama --text c4.txt --eval-text wikitext.txt --method wanda --pattern 2:4 --out "
      "pruned\n  tessera prune --model llama --text c4.txt --method sparsegpt --gates g "
      "--activation-sparsity 0.4 --out p2");
  command.add_option("--model", args->model, "Hugging Face model directory, or run folder of a finished run");
  command.add_option("--out", args->out, "Directory to write; it must not contain weights yet");
  command.add_option("--config", args->config, "TOML file of flags; the command line takes precedence");
  add_method_flags(command, *args);
  add_choice_flags(command, *args);
  add_gate_flags(command, *args);
  args->texts.add_to(command);
  command.add_option("--batch-size", args->options.batch, "Samples per batch through a block")
      ->check(whole(1, 1 << 20));
  command
      .add_option("--dtype", args->dtype,
                  "Dtype of the weights; default: the file's, on the CPU f32 until they are saved")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}));
  add_device(command, args->device);
  command.add_flag("--plan", args->plan_only, "Print the plan and stop");
  command.add_flag("--json", args->json, "Print the report as JSON at the end");
  command.callback([&action, &command, args] {
    action = [&command, args] {
      apply_config(command, args->config);
      require_flags(command, {"--model", "--out"});
      try {
        return prune(command, *args);
      } catch (const Interrupted& interrupted) {  // not in vain, as main() would say
        report::tell(fmt::format("tessera: {}; the same command continues after the finished blocks\n",
                                 interrupted.message()));
        return 128 + interrupted.signal();
      }
    };
  });
}

}  // namespace tessera::cli

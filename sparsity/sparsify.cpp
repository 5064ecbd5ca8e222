#include "sparsity/sparsify.h"

#include <algorithm>

#include "eval/perplexity.h"
#include "io/file.h"
#include "io/weights.h"
#include "models/generate.h"
#include "runtime/interrupt.h"
#include "sparsity/chain.h"
#include "sparsity/dense_model_internal.h"
#include "sparsity/prune.h"
#include "sparsity/split.h"
#include "sparsity/split_pruning.h"

namespace tessera::sparsity {
namespace {

ops::SparseFormat usual_format(const Split& split) {
  return split.weights == 0       ? ops::SparseFormat::dense_columns
         : split.activations == 0 ? ops::SparseFormat::sell_delta4
                                  : ops::SparseFormat::tiled_cbc;
}

void check_format(const Split& split) {
  check(split.activations == 0 || !ops::reads_all_inputs(split.format),
        "sparsify: ", ops::name_of(split.format),
        " reads all inputs, so gates save nothing there; take tiled-cbc, or a weight ",
        "sparsity that is the total one");
}

void check_no_result(const std::string& folder) {
  io::check_no_weights(folder);
  check(!pretrained::is_sparse_folder(folder) && !is_calibration(folder), "sparsify: ", folder,
        " has weights or a calibration already; name another folder");
}

class Sparsifier {
 public:
  Sparsifier(const SparsifyOptions& options, std::string out)
      : options_(options), how_(options.how), out_(std::move(out)) {}

  Sparsified run() {
    result_ = {};
    std::span<const int64_t> held_out = how_.evaluation;
    std::vector<SplitResult> candidates;
    if (options_.most_perplexity) {
      const size_t half = how_.evaluation.size() / 2;
      candidates = search(how_.evaluation.first(half));
      held_out = how_.evaluation.subspan(half);
    } else {
      candidates.push_back({.split = given_split(), .greedy_perplexity = {}});
    }
    windows_ = eval::perplexity_windows(
        held_out, {.length = how_.window, .stride = how_.stride, .most_windows = how_.most_windows});
    check(how_.prompt >= 1 && how_.prompt <= int64_t(held_out.size()), "sparsify: a prompt of ", how_.prompt,
          " tokens; the text has ", held_out.size());
    prompt_ = held_out.first(size_t(how_.prompt));
    samples_ = choose_samples(how_.calibration, how_.samples);
    measure_dense();
    for (const SplitResult& candidate : candidates) {
      io::AtomicFolder files(out_, io::AtomicFolder::Existing::merge, check_no_result);
      build(candidate, files.path());
      if (!options_.most_perplexity || keeps_bound(result_.perplexity)) {
        files.publish();
        return std::move(result_);
      }
      ++result_.refused;
      how_tell("not confirmed on held-out text: perplexity " + std::to_string(result_.perplexity));
    }
    fail_at(Site::here(), "sparsify: no split keeps the perplexity within ", *options_.most_perplexity,
            " times that of the dense model (", result_.dense_perplexity, "; ", candidates.size(), " of ",
            result_.searched.size(),
            " did on the text of the search, none on the held-out one); raise --max-ppl, or lower --total");
  }

 private:
  DType file_dtype() const {
    return options_.file_dtype ? *options_.file_dtype : pretrained::stored_dtype(how_.model);
  }
  void how_tell(const std::string& line) const {
    if (how_.tell) how_.tell(line);
  }
  bool keeps_bound(double perplexity) const {
    return perplexity <= *options_.most_perplexity * result_.dense_perplexity;
  }

  Split given_split() const {
    check(options_.total.has_value(),
          "sparsify: there is neither a total sparsity nor a bound of the perplexity");
    Split split{.total = *options_.total,
                .weights = options_.weights.value_or(usual_weights(*options_.total))};
    split.activations = split.weights == split.total ? 0 : activations_for(split.total, split.weights);
    split.format = options_.format.value_or(usual_format(split));
    check_format(split);
    check(how_.gate_aware.size() == 1, "sparsify: ", how_.gate_aware.size(),
          " kinds of pruning (--gate-aware), expected one: only a search (--max-ppl) measures both");
    split.gate_aware = how_.gate_aware.front();
    check(!split.gate_aware || (split.weights > 0 && split.activations > 0),
          "sparsify: gate-aware pruning drops weights for a model whose gates drop inputs, and the split is ",
          split_text(split.weights, split.activations),
          "; give a weight sparsity above 0 and below the total one, or leave gate-aware pruning out");
    return split;
  }

  /// Splits within the bound, the fastest first.
  std::vector<SplitResult> search(std::span<const int64_t> text) {
    SweepOptions sweep = searched_by(options_);
    sweep.evaluation = text;
    const SweepResult found = sweep_splits(sweep, "");
    result_.searched = found.splits;
    std::vector<SplitResult> within;
    for (const SplitResult& one : found.splits)
      if (one.perplexity() <= *options_.most_perplexity * found.dense_perplexity) within.push_back(one);
    std::ranges::stable_sort(within, {}, &SplitResult::tpot_ms);
    check(!within.empty(), "sparsify: no split keeps the perplexity within ", *options_.most_perplexity,
          " times that of the dense model, ", found.dense_perplexity, "; raise --max-ppl, or lower --total");
    return within;
  }

  double perplexity(const models::LanguageModel& model) const { return eval::perplexity_of(model, windows_); }

  void measure_dense() {
    models::LanguageModel model = load_dense(how_);
    result_.dense_perplexity = perplexity(model);
    eval::check_finite("sparsify", result_.dense_perplexity);
    take(result_.dense, time_generation(model, prompt_, how_.timing));
    result_.dense.bytes = bytes_of_layers(model).bytes;
  }

  /// Prune (gate-aware: after a calibration of the dense model), calibrate and convert to `folder`; then what
  /// came out is loaded again and measured.
  void build(const SplitResult& candidate, const std::string& folder) {
    const Split& split = candidate.split;
    result_.split = split, result_.pruning = pruning_of(split, how_.prune);
    // Never published: gone at the end, whatever that is; what a killed call left, the next one removes.
    const io::AtomicFolder intermediate(io::with_suffix(out_, ".intermediate"),
                                        io::AtomicFolder::Existing::replace);
    const std::string pruned = intermediate.path() + "/pruned", gates = intermediate.path() + "/gates";
    {
      models::LanguageModel model = load_dense(how_);
      if (split.gate_aware && !dense_calibration_) {
        how_tell("calibrate: the dense model, for the gates that it is pruned for");
        dense_calibration_ = calibrate(model, samples_, how_.gates);
      }
      if (split.weights > 0) {
        how_tell("prune: " + std::to_string(split.weights) + " of the weights, " + result_.pruning);
        prune(model, samples_, prune_options_of(split, how_, dense_calibration_));
      }
      pretrained::save(model, pruned, {.companions = how_.model});
      result_.greedy = false;
      if (split.activations > 0) {
        how_tell("calibrate: " + std::to_string(split.activations) + " of the inputs");
        const Calibration calibration = calibrate(model, samples_, how_.gates);
        save_calibration(calibration, gates);
        result_.greedy =
            options_.most_perplexity ? candidate.is_greedy() : allocates_greedily(split, how_.gates);
      }
    }
    how_tell(std::string("convert: ") + name_of(split.format));
    result_.conversion = convert(pruned, folder, split.format,
                                 {.dtype = file_dtype(), .calibration = split.activations > 0 ? gates : ""});
    measure(folder);
  }

  void measure(const std::string& folder) {
    const Split& split = result_.split;
    Rng rng(0);
    LoadOptions load_options{.greedy = result_.greedy, .dtype = how_.dtype};
    if (split.activations > 0) load_options.activation_sparsity = split.activations;
    load_options.sparse.whole_texts = true;
    const pretrained::LoadedLanguageModel loaded = load(folder, rng, how_.device, load_options);
    result_.perplexity = perplexity(loaded.model);
    load_options.sparse.whole_texts = false;
    pretrained::LoadedLanguageModel steps = load(folder, rng, how_.device, load_options);
    models::LanguageModel& stepping = steps.model;
    result_.layers = steps.sparse;
    take(result_.sparse, time_generation(stepping, prompt_, how_.timing));
    const LayerBytes bytes = bytes_of_layers(stepping);
    result_.sparse.bytes = bytes.bytes, result_.sparse.counted_weights = bytes.weight_sparsity;
    if (split.activations > 0)
      result_.sparse.counted_activations = counted_sparsity(
          stepping,
          std::span<const eval::PerplexityWindow>(windows_).first(std::min<size_t>(4, windows_.size())));
    result_.prompt.assign(prompt_.begin(), prompt_.end());
    const int64_t room = stepping.longest() - int64_t(prompt_.size());
    result_.text = models::generate(
        stepping, prompt_,
        {.most_tokens = std::min(options_.sample_tokens, room), .sampling = {.temperature = 0}});
  }

  const SparsifyOptions& options_;
  const SweepOptions& how_;
  std::string out_;
  Sparsified result_;
  std::optional<Calibration> dense_calibration_;  // for gate-aware pruning, the same for all candidates
  Samples samples_;
  std::vector<eval::PerplexityWindow> windows_;
  std::span<const int64_t> prompt_;
};

}  // namespace

double usual_weights(double total) {
  // Total sparsities 0.10, 0.15, ..., 0.80.
  constexpr double kFirst = 0.10, kStep = 0.05;
  constexpr double kWeights[] = {.05, .05, .05, .05, .05, .1, .1, .15, .2, .25, .25, .3, .35, .4, .45};
  constexpr size_t kLast = std::size(kWeights) - 1;
  if (total < kFirst) return total * kWeights[0] / kFirst;
  const double at = (total - kFirst) / kStep;
  if (at >= double(kLast)) return total * kWeights[kLast] / (kFirst + kStep * double(kLast));
  const size_t below = size_t(at);
  return kWeights[below] + (kWeights[below + 1] - kWeights[below]) * (at - double(below));
}

SweepOptions searched_by(const SparsifyOptions& options) {
  SweepOptions sweep = options.how;
  sweep.what = "sparsify";
  sweep.format = options.format;
  if (options.total) sweep.totals = {*options.total};
  if (options.weights)
    sweep.weights = {*options.weights}, sweep.weights_alone = options.weights == options.total;
  return sweep;
}

Sparsified sparsify(const SparsifyOptions& options, const std::string& out) {
  const SweepOptions& how = options.how;
  how.gates.validate();
  check_gate_aware("sparsify", how);
  check(!options.most_perplexity || *options.most_perplexity >= 1, "sparsify: a perplexity of ",
        options.most_perplexity.value_or(1), " times that of the dense model; expected 1 or more");
  check(!pretrained::is_sparse_folder(how.model), "sparsify: the model of ", how.model,
        " is compressed already; name the dense one");
  check_no_result(out);
  return Sparsifier(options, out).run();
}

}  // namespace tessera::sparsity

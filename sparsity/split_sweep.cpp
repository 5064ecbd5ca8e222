#include "sparsity/split_sweep.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "eval/perplexity.h"
#include "eval/statistics.h"
#include "io/file.h"
#include "pretrained/fingerprint.h"
#include "sparsity/chain.h"
#include "sparsity/dense_model_internal.h"
#include "sparsity/prune.h"
#include "sparsity/split.h"
#include "sparsity/split_pruning.h"
#include "sparsity/sweep_store.h"
#include "train/run_folder.h"

namespace tessera::sparsity {
namespace {

namespace fs = std::filesystem;

double percentile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[std::min(values.size() - 1, size_t(share * double(values.size())))];
}

/// Splits of one weight sparsity share a pruned model, but for gate-aware ones: their gates, and so their
/// weights, differ with the total.
class Sweeper {
 public:
  Sweeper(const SweepOptions& options, const std::string& folder)
      : options_(options), folder_(folder), splits_(splits_of(options)) {}

  SweepResult run() {
    prepare();
    std::optional<train::FolderLock> lock;
    if (!folder_.empty()) io::make_folder(folder_), lock.emplace(folder_);
    SweepResult result;
    {
      models::LanguageModel model = load_dense(options_);
      store_.emplace(folder_, options_, pretrained::fingerprint_of(model), model.dtype());
      if (!store_->find_dense(result)) measure_dense(model, result);
    }
    for (size_t begin = 0; begin < splits_.size();) {
      size_t end = begin;
      while (end < splits_.size() && share_a_model(splits_[begin], splits_[end])) ++end;
      measure_group(std::span(splits_).subspan(begin, end - begin), result);
      begin = end;
    }
    write_files();
    return result;
  }

 private:
  static bool share_a_model(const Split& a, const Split& b) {
    return a.weights == b.weights && a.gate_aware == b.gate_aware && (!a.gate_aware || a.total == b.total);
  }
  void prepare() {
    samples_ = choose_samples(options_.calibration, options_.samples);
    windows_ = eval::perplexity_windows(
        options_.evaluation,
        {.length = options_.window, .stride = options_.stride, .most_windows = options_.most_windows});
    check(options_.prompt >= 1 && options_.prompt <= int64_t(options_.evaluation.size()), options_.what,
          ": a prompt of ", options_.prompt, " tokens; the text has ", options_.evaluation.size());
    prompt_ = options_.evaluation.subspan(0, size_t(options_.prompt));
  }
  void tell(const std::string& line) const {
    if (options_.tell) options_.tell(line);
  }
  double perplexity(const models::LanguageModel& model) const { return eval::perplexity_of(model, windows_); }

  void measure_dense(models::LanguageModel& model, SweepResult& result) {
    result.dense_perplexity = perplexity(model);
    eval::check_finite(options_.what, result.dense_perplexity);
    take(result.dense, time_generation(model, prompt_, options_.timing));
    result.dense.uniform_perplexity = result.dense_perplexity;
    result.dense.bytes = bytes_of_layers(model).bytes;
    store_->keep_dense(result);
    tell(fmt::format("dense: perplexity {:.4f}, {:.3f} ms per token, {:.1f} MB", result.dense_perplexity,
                     result.dense.tpot_ms, double(result.dense.bytes) / 1e6));
  }

  void measure_group(std::span<const Split> splits, SweepResult& result) {
    const size_t first = result.splits.size();
    bool is_done = true;
    for (const Split& split : splits) {
      const std::optional<SplitResult> found = store_->find(split);
      is_done = is_done && found;
      result.splits.push_back(found.value_or(SplitResult{.split = split, .greedy_perplexity = {}}));
      result.resumed += found.has_value();
    }
    if (is_done) return;
    models::LanguageModel model = load_dense(options_);
    const Split& shared = splits.front();
    const bool gated = std::ranges::any_of(splits, [](const Split& split) { return split.activations > 0; });
    if (gated && (shared.gate_aware || shared.weights == 0) && !dense_calibration_)
      dense_calibration_ = calibrate(model, samples_, options_.gates);
    if (shared.weights > 0) prune(model, samples_, prune_options_of(shared, options_, dense_calibration_));
    std::optional<Calibration> calibration;
    if (gated) {
      calibration =
          shared.weights > 0 ? calibrate(model, samples_, options_.gates) : dense_calibration_.value();
      store_->keep_calibration(*calibration, shared);
    }
    for (size_t i = 0; i < splits.size(); ++i)
      if (!store_->find(splits[i])) measure_split(model, calibration, result.splits[first + i]);
  }

  void measure_split(models::LanguageModel& model, const std::optional<Calibration>& calibration,
                     SplitResult& result) {
    const Split& split = result.split;
    compress_layers(model, split.format);
    const bool gated = split.activations > 0;
    const bool greedy = allocates_greedily(split, options_.gates);
    if (gated) {
      store_->keep(*calibration, split, false);
      if (greedy) store_->keep(*calibration, split, true);
    }
    const auto set = [&](bool by_greedy, bool whole_texts) {
      pretrained::SparseOptions sparse;
      if (gated) {
        sparse = options_of(*calibration, split.activations, by_greedy);
        sparse.gates->fingerprint.clear();  // they are this model's, whose weights are compressed by now
      }
      sparse.whole_texts = whole_texts;
      pretrained::make_sparse(model, sparse);
    };
    set(false, true);
    result.uniform_perplexity = perplexity(model);
    if (greedy) {
      set(true, true);
      result.greedy_perplexity = perplexity(model);
    }
    // What is timed and counted is the better one.
    set(result.is_greedy(), false);
    if (gated)
      result.counted_activations = counted_sparsity(
          model,
          std::span<const eval::PerplexityWindow>(windows_).first(std::min<size_t>(4, windows_.size())));
    const LayerBytes bytes = bytes_of_layers(model);
    result.bytes = bytes.bytes, result.counted_weights = bytes.weight_sparsity;
    const DecodeTimes times = time_generation(model, prompt_, options_.timing);
    take(result, times);
    // No more than were generated: the model may have no room for them.
    const int64_t layer_steps = std::min<int64_t>(4, options_.timing.new_tokens - 1);
    store_->keep(result, times, time_layers(model, prompt_, layer_steps));
    tell(fmt::format(
        "{:.4g}: {:.4g} of the weights ({}), {:.4g} of the inputs, {}: perplexity {:.4f}{}, {:.3f} ms per "
        "token, {:.1f} MB",
        split.total, split.weights, pruning_of(split, options_.prune), split.activations,
        name_of(split.format), result.uniform_perplexity,
        result.greedy_perplexity ? fmt::format(", greedy {:.4f}", *result.greedy_perplexity) : "",
        result.tpot_ms, double(result.bytes) / 1e6));
  }

  void write_files() {
    if (folder_.empty()) return;
    report::Table rows = store_->database().run(
        "SELECT total AS s, weights AS s1, round(activations, 9) AS s2, format, uniform_ppl AS "
        "Uniform_PPL, greedy_ppl AS Greedy_PPL, ttft_ms, ttft_p90, tpot_ms, tpot_p90, bytes, counted_total, "
        "counted_weights, "
        "counted_activations, pruning FROM splits ORDER BY total, weights, format, pruning");
    io::write_file((fs::path(folder_) / kSweepTable).string(), report::csv_text(rows));
    io::write_file((fs::path(folder_) / kSweepPage).string(), sweep_page(store_->database()));
  }

  const SweepOptions& options_;
  std::string folder_;
  std::vector<Split> splits_;
  std::optional<SweepStore> store_;
  std::optional<Calibration> dense_calibration_;  // made once it is needed
  Samples samples_;
  std::vector<eval::PerplexityWindow> windows_;
  std::span<const int64_t> prompt_;
};

}  // namespace

models::LanguageModel load_dense(const SweepOptions& options) {
  Rng rng(0);
  return pretrained::load_dense_language(options.model, rng, options.device, {.dtype = options.dtype});
}

void take(SplitResult& result, const DecodeTimes& times) {
  result.ttft_ms = eval::median(times.ttft_ms), result.tpot_ms = eval::median(times.tpot_ms);
  result.ttft_p90 = percentile(times.ttft_ms, 0.9), result.tpot_p90 = percentile(times.tpot_ms, 0.9);
}

std::vector<Split> splits_of(const SweepOptions& options) {
  std::vector<Split> splits;
  for (const double total : options.totals)
    check(total > 0 && total < 1, options.what, ": a total sparsity of ", total,
          "; expected more than 0 and less than 1");
  for (const double weights : options.weights)
    check(weights >= 0 && weights < 1, options.what, ": a weight sparsity of ", weights,
          "; expected 0 or more and less than 1");
  for (const double total : options.totals) {
    for (const double weights : options.weights) {
      if (weights >= total) continue;
      const double activations = activations_for(total, weights);
      if (weights == 0)
        splits.push_back({total, weights, activations, ops::SparseFormat::dense_columns});
      else
        for (const bool gate_aware : options.gate_aware)
          splits.push_back({total, weights, activations, ops::SparseFormat::tiled_cbc, gate_aware});
    }
    if (!options.weights_alone) continue;
    splits.push_back({total, total, 0, ops::SparseFormat::sell_delta4});
    splits.push_back({total, total, 0, ops::SparseFormat::tca_bme});
    splits.push_back({total, total, 0, ops::SparseFormat::tiled_cbc});
  }
  if (options.format && !splits.empty()) {
    std::erase_if(splits, [&](const Split& split) { return split.format != *options.format; });
    check(!splits.empty(), options.what, ": no split is in ", name_of(*options.format),
          ": gates alone are in dense-columns, zeros and gates in tiled-cbc, zeros alone in sell-delta4, "
          "tca-bme and tiled-cbc");
  }
  check(!splits.empty(), options.what,
        ": no weight sparsity is below a total one; nothing is to be measured");
  check(std::ranges::find(options.gate_aware, true) == options.gate_aware.end() ||
            std::ranges::any_of(splits, &Split::gate_aware),
        options.what,
        ": gate-aware pruning is asked for, and no split has both zeros and gates; give weight sparsities "
        "above 0 and below a total one");
  const auto order = [](const Split& split) {
    return std::tuple(split.weights, split.gate_aware, split.total, int(split.format));
  };
  std::ranges::stable_sort(splits, {}, order);
  const auto repeated = std::ranges::unique(splits, {}, order);
  splits.erase(repeated.begin(), repeated.end());
  return splits;
}

SweepResult sweep_splits(const SweepOptions& options, const std::string& folder) {
  options.gates.validate();
  check_gate_aware(options.what, options);
  check(!pretrained::is_sparse_folder(options.model), options.what, ": the model of ", options.model,
        " is compressed already; name the dense one");
  return Sweeper(options, folder).run();
}

std::vector<SplitResult> pareto_front(std::vector<SplitResult> splits) {
  std::erase_if(splits, [](const SplitResult& one) { return !std::isfinite(one.perplexity()); });
  std::ranges::stable_sort(splits, {},
                           [](const SplitResult& one) { return std::pair(one.tpot_ms, one.perplexity()); });
  std::vector<SplitResult> front;
  for (const SplitResult& one : splits)
    if (front.empty() || one.perplexity() < front.back().perplexity()) front.push_back(one);
  return front;
}

}  // namespace tessera::sparsity

#include "sparsity/split_sweep.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "eval/perplexity.h"
#include "eval/statistics.h"
#include "io/checksum.h"
#include "io/file.h"
#include "pretrained/fingerprint.h"
#include "runtime/interrupt.h"

#include "sparsity/chain.h"
#include "sparsity/dense_model_internal.h"
#include "sparsity/prune.h"
#include "sparsity/split.h"
#include "sparsity/split_pruning.h"
#include "train/run_folder.h"

namespace tessera::sparsity {
namespace {

namespace fs = std::filesystem;
using report::TableCell;

constexpr const char* kSweepTables[] = {
    "CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT)",
    "CREATE TABLE dense (perplexity REAL, ttft_ms REAL, ttft_p90 REAL, tpot_ms REAL, tpot_p90 REAL, bytes "
    "INTEGER)",
    "CREATE TABLE splits (total REAL, weights REAL, activations REAL, format TEXT, uniform_ppl REAL, "
    "greedy_ppl "
    "REAL, ttft_ms REAL, ttft_p90 REAL, tpot_ms REAL, tpot_p90 REAL, bytes INTEGER, counted_total REAL, "
    "counted_weights REAL, counted_activations REAL, pruning TEXT, PRIMARY KEY (total, weights, format, "
    "pruning))",
    "CREATE TABLE repeats (total REAL, weights REAL, format TEXT, repeat INTEGER, ttft_ms REAL, tpot_ms "
    "REAL, pruning TEXT)",
    "CREATE TABLE histograms (input TEXT, bar INTEGER, x REAL, share REAL)",
    "CREATE TABLE thresholds (total REAL, weights REAL, allocation TEXT, layer TEXT, share REAL, threshold "
    "REAL, "
    "top_k INTEGER, pruning TEXT)",
    // total: of a gate-aware split, whose calibration is its own; else nothing, as all totals share one.
    "CREATE TABLE greedy (weights REAL, block INTEGER, sparsity REAL, error REAL, baseline REAL, layer TEXT, "
    "share REAL, pruning TEXT, total REAL)",
    "CREATE TABLE layer_times (total REAL, weights REAL, format TEXT, layer TEXT, ms REAL, pruning TEXT)",
};

double percentile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[std::min(values.size() - 1, size_t(share * double(values.size())))];
}

/// What decides the results, one setting per row; `dtype` is that of the loaded model.
std::vector<std::vector<TableCell>> settings_of(const SweepOptions& options, const std::string& fingerprint,
                                                DType dtype) {
  io::Xxh3 calibration, evaluation;
  calibration.add(options.calibration.data(), options.calibration.size_bytes());
  evaluation.add(options.evaluation.data(), options.evaluation.size_bytes());
  const auto number = [](auto value) { return fmt::format("{}", value); };
  PruneOptions prune = options.prune;
  prune.sparsity = 0.5;
  std::vector<std::vector<TableCell>> rows;
  for (const auto& [name, value] : std::initializer_list<std::pair<const char*, std::string>>{
           {"fingerprint", fingerprint},
           {"device", options.device.name()},
           {"dtype", tessera::name_of(dtype)},
           {"prune", to_json(prune).dump()},
           {"samples", number(options.samples.count)},
           {"sample_length", number(options.samples.length)},
           {"seed", number(options.samples.seed)},
           {"calibration_text", calibration.digits()},
           {"evaluation_text", evaluation.digits()},
           {"window", number(options.window)},
           {"stride", number(options.stride)},
           {"windows", number(options.most_windows)},
           {"rule", name_of(options.gates.rule)},
           {"scale", options.gates.column_norms ? "column-norm" : "one"},
           {"gate", options.gates.top_k ? "top-k" : "threshold"},
           {"greedy", options.gates.greedy ? number(options.gates.step) : "none"},
           {"greedy_most", number(options.gates.most)},
           {"greedy_samples", number(options.gates.greedy_samples)},
           {"prefill", number(options.gates.prefill)},
           {"prompt", number(options.prompt)},
           {"new_tokens", number(options.timing.new_tokens)},
           {"repeats", number(options.timing.repeats)},
           {"warmups", number(options.timing.warmups)}})
    rows.push_back({std::string(name), value});
  return rows;
}

/// The database of a sweep: in a folder, or, without one, in memory.
class Store {
 public:
  /// `prune`: how the weights are pruned, whatever the split.
  Store(const std::string& folder, const std::vector<std::vector<TableCell>>& settings,
        const PruneOptions& prune)
      : database_(open(folder, settings)), prune_(prune) {
    check_sweep_tables(database_);
    const report::Table before = database_.run("SELECT name, value FROM settings ORDER BY rowid");
    for (size_t i = 0; i < settings.size(); ++i)
      check(i < before.rows.size() && before.rows[i] == settings[i], "sweep: ", folder,
            " holds a sweep with other settings (", std::get<std::string>(settings[i][0]),
            "); remove it to start over, or name another folder");
  }
  report::Database& database() { return database_; }

  std::optional<SplitResult> find(const Split& split) {
    const report::Table rows = database_.run(
        "SELECT activations, uniform_ppl, greedy_ppl, ttft_ms, ttft_p90, tpot_ms, tpot_p90, bytes, "
        "counted_weights, counted_activations FROM splits WHERE total = ?1 AND weights = ?2 AND format = ?3 "
        "AND pruning = ?4",
        {split.total, split.weights, std::string(name_of(split.format)), pruning_of(split, prune_)});
    if (rows.rows.empty()) return {};
    const auto& row = rows.rows[0];
    const auto number = [&](size_t i) { return std::get<double>(row[i]); };
    SplitResult found{.split = split, .uniform_perplexity = kept_perplexity(row[1]), .greedy_perplexity = {}};
    if (std::holds_alternative<double>(row[2])) found.greedy_perplexity = number(2);
    found.ttft_ms = number(3), found.ttft_p90 = number(4), found.tpot_ms = number(5),
    found.tpot_p90 = number(6);
    found.bytes = uint64_t(std::get<int64_t>(row[7]));
    found.counted_weights = number(8), found.counted_activations = number(9);
    return found;
  }
  void keep(const SplitResult& r, const DecodeTimes& times,
            const std::vector<std::pair<std::string, double>>& layers) {
    const std::string format = name_of(r.split.format), pruning = pruning_of(r.split, prune_);
    database_.run("BEGIN");
    database_.run(
        "INSERT INTO splits VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15)",
        {r.split.total, r.split.weights, r.split.activations, format, r.uniform_perplexity,
         report::cell_of(r.greedy_perplexity), r.ttft_ms, r.ttft_p90, r.tpot_ms, r.tpot_p90, int64_t(r.bytes),
         total_sparsity(r.counted_weights, r.counted_activations), r.counted_weights, r.counted_activations,
         pruning});
    std::vector<std::vector<TableCell>> repeats, ms;
    for (size_t i = 0; i < times.ttft_ms.size(); ++i)
      repeats.push_back(
          {r.split.total, r.split.weights, format, int64_t(i), times.ttft_ms[i], times.tpot_ms[i], pruning});
    for (const auto& [layer, time] : layers)
      ms.push_back({r.split.total, r.split.weights, format, layer, time, pruning});
    database_.insert("INSERT INTO repeats VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)", repeats);
    database_.insert("INSERT INTO layer_times VALUES (?1, ?2, ?3, ?4, ?5, ?6)", ms);
    database_.run("COMMIT");
  }
  /// The dense model as an earlier call measured it: ratios of all splits are to one measurement.
  bool find_dense(SweepResult& result) {
    const report::Table rows =
        database_.run("SELECT perplexity, ttft_ms, ttft_p90, tpot_ms, tpot_p90, bytes FROM dense");
    if (rows.rows.empty()) return false;
    const auto& row = rows.rows[0];
    const auto number = [&](size_t i) { return std::get<double>(row[i]); };
    SplitResult& d = result.dense;
    result.dense_perplexity = d.uniform_perplexity = number(0);
    d.ttft_ms = number(1), d.ttft_p90 = number(2), d.tpot_ms = number(3), d.tpot_p90 = number(4);
    d.bytes = uint64_t(std::get<int64_t>(row[5]));
    return true;
  }
  void keep_dense(const SweepResult& result) {
    const SplitResult& d = result.dense;
    database_.run("INSERT INTO dense VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
                  {result.dense_perplexity, d.ttft_ms, d.ttft_p90, d.tpot_ms, d.tpot_p90, int64_t(d.bytes)});
  }
  /// Distributions and greedy steps of the calibration of a split, or, unless it is gate-aware, of all splits
  /// with its weights; of the first one the histograms.
  void keep_calibration(const Calibration& calibration, const Split& split) {
    const std::string pruning = pruning_of(split, prune_);
    TableCell total;
    if (split.gate_aware) total = split.total;
    std::vector<std::vector<TableCell>> bars, steps;
    for (const InputBars& input : calibration.inputs)
      for (size_t i = 0; i < input.shares.size(); ++i)
        bars.push_back({input.name, int64_t(i),
                        input.limit * (2 * (double(i) + 0.5) / double(input.shares.size()) - 1),
                        input.shares[i]});
    for (size_t block = 0; block < calibration.greedy.size(); ++block)
      for (const GreedyBlock::Step& step : calibration.greedy[block].steps)
        for (size_t i = 0; i < step.shares.size(); ++i)
          steps.push_back({split.weights, int64_t(block), step.sparsity, step.error, step.baseline,
                           calibration.greedy[block].layers[i], step.shares[i], pruning, total});
    database_.run("BEGIN");
    if (database_.run("SELECT 1 FROM histograms LIMIT 1").rows.empty())
      database_.insert("INSERT INTO histograms VALUES (?1, ?2, ?3, ?4)", bars);
    database_.run("DELETE FROM greedy WHERE weights = ?1 AND pruning = ?2 AND total IS ?3",
                  {split.weights, pruning, total});
    database_.insert("INSERT INTO greedy VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)", steps);
    database_.run("COMMIT");
  }
  void keep(const Calibration& calibration, const Split& split, bool greedy) {
    const auto shares = calibration.shares_at(split.activations, greedy);
    const std::string allocation = greedy ? "greedy" : "uniform", pruning = pruning_of(split, prune_);
    std::vector<std::vector<TableCell>> rows;
    for (const CalibratedLayer& layer : calibration.layers) {
      const ops::Gate gate = calibration.gate(layer, shares.at(layer.name));
      rows.push_back({split.total, split.weights, allocation, layer.name, shares.at(layer.name),
                      calibration.top_k ? TableCell() : TableCell(gate.threshold),
                      calibration.top_k ? TableCell(gate.keep) : TableCell(), pruning});
    }
    database_.run("BEGIN");
    database_.run(
        "DELETE FROM thresholds WHERE total = ?1 AND weights = ?2 AND allocation = ?3 AND pruning = ?4",
        {split.total, split.weights, allocation, pruning});
    database_.insert("INSERT INTO thresholds VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)", rows);
    database_.run("COMMIT");
  }

 private:
  static report::Database open(const std::string& folder,
                               const std::vector<std::vector<TableCell>>& settings) {
    if (folder.empty()) return begun(settings);
    const fs::path path = fs::path(folder) / kSweepFile;
    std::error_code ignored;
    if (fs::exists(path, ignored)) {
      check(is_sweep(path), "sweep: ", path.string(), " is not ", kSweepWhat, "; name another folder");
      return report::Database::open(path, "sweep");
    }
    // Under another name until its settings are there: a killed program leaves none without them, or with
    // some of them.
    io::write_file(path.string(), begun(settings).bytes());
    return report::Database::open(path, "sweep");
  }
  static report::Database begun(const std::vector<std::vector<TableCell>>& settings) {
    report::Database database = report::Database::in_memory();
    database.run("PRAGMA application_id = " + std::to_string(kSweepId));
    for (const char* const table : kSweepTables) database.run(table);
    database.insert("INSERT INTO settings VALUES (?1, ?2)", settings);
    return database;
  }
  report::Database database_;
  PruneOptions prune_;
};

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
      store_.emplace(folder_, settings_of(options_, pretrained::fingerprint_of(model), model.dtype()),
                     options_.prune);
      if (!store_->find_dense(result)) measure_dense(model, result);
    }
    for (size_t begin = 0; begin < splits_.size();) {
      size_t end = begin;
      while (end < splits_.size() && share_a_model(splits_[begin], splits_[end])) ++end;
      measure_group(std::span(splits_).subspan(begin, end - begin), result);
      begin = end;
    }
    write_files(result);
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

  void write_files(const SweepResult&) {
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
  std::optional<Store> store_;
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

double kept_perplexity(const TableCell& cell) {
  return std::holds_alternative<double>(cell) ? std::get<double>(cell)
                                              : std::numeric_limits<double>::infinity();
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

bool is_sweep(const fs::path& database) {
  return report::application_id_of(database) == kSweepId;
}

void check_sweep_tables(report::Database& database) {
  check(
      !database.run("SELECT 1 FROM pragma_table_info('splits') WHERE name = 'pruning'").rows.empty(),
      "sweep: ", kSweepFile,
      " is of an earlier version, which did not note how the weights were pruned; measure again into another "
      "folder");
}

}  // namespace tessera::sparsity

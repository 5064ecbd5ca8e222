#include "sparsity/sweep_store.h"

#include <fmt/format.h>

#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "io/checksum.h"
#include "io/file.h"
#include "sparsity/split.h"
#include "sparsity/split_pruning.h"

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

report::Database begun(const std::vector<std::vector<TableCell>>& settings) {
  report::Database database = report::Database::in_memory();
  database.run("PRAGMA application_id = " + std::to_string(kSweepId));
  for (const char* const table : kSweepTables) database.run(table);
  database.insert("INSERT INTO settings VALUES (?1, ?2)", settings);
  return database;
}

report::Database open(const std::string& folder, const std::vector<std::vector<TableCell>>& settings) {
  if (folder.empty()) return begun(settings);
  const fs::path path = fs::path(folder) / kSweepFile;
  std::error_code ignored;
  if (fs::exists(path, ignored)) {
    check(report::application_id_of(path) == kSweepId, "sweep: ", path.string(), " is not ", kSweepWhat,
          "; name another folder");
    return report::Database::open(path, "sweep");
  }
  // Under another name until its settings are there: a killed program leaves none without them, or with
  // some of them.
  io::write_file(path.string(), begun(settings).bytes());
  return report::Database::open(path, "sweep");
}

}  // namespace

SweepStore::SweepStore(const std::string& folder, const SweepOptions& options, const std::string& fingerprint,
                       DType dtype)
    : SweepStore(folder, settings_of(options, fingerprint, dtype), options.prune) {}

SweepStore::SweepStore(const std::string& folder, const Rows& settings, const PruneOptions& prune)
    : database_(open(folder, settings)), prune_(prune) {
  check_sweep_tables(database_);
  const report::Table before = database_.run("SELECT name, value FROM settings ORDER BY rowid");
  for (size_t i = 0; i < settings.size(); ++i)
    check(i < before.rows.size() && before.rows[i] == settings[i], "sweep: ", folder,
          " holds a sweep with other settings (", std::get<std::string>(settings[i][0]),
          "); remove it to start over, or name another folder");
}

std::optional<SplitResult> SweepStore::find(const Split& split) {
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

void SweepStore::keep(const SplitResult& r, const DecodeTimes& times,
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

bool SweepStore::find_dense(SweepResult& result) {
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

void SweepStore::keep_dense(const SweepResult& result) {
  const SplitResult& d = result.dense;
  database_.run("INSERT INTO dense VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
                {result.dense_perplexity, d.ttft_ms, d.ttft_p90, d.tpot_ms, d.tpot_p90, int64_t(d.bytes)});
}

void SweepStore::keep_calibration(const Calibration& calibration, const Split& split) {
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

void SweepStore::keep(const Calibration& calibration, const Split& split, bool greedy) {
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

void check_sweep_tables(report::Database& database) {
  check(
      !database.run("SELECT 1 FROM pragma_table_info('splits') WHERE name = 'pruning'").rows.empty(),
      "sweep: ", kSweepFile,
      " is of an earlier version, which did not note how the weights were pruned; measure again into another "
      "folder");
}

double kept_perplexity(const TableCell& cell) {
  return std::holds_alternative<double>(cell) ? std::get<double>(cell)
                                              : std::numeric_limits<double>::infinity();
}

}  // namespace tessera::sparsity

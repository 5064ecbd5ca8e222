#include <fmt/format.h>

#include <cmath>
#include <map>
#include <set>

#include "report/page.h"
#include "sparsity/split_pruning.h"
#include "sparsity/split_sweep_internal.h"
#include "sparsity/sweep_store.h"

namespace tessera::sparsity {
namespace {

using report::number_in;
using report::Series;
using report::TableCell;
using report::text_in;

std::string shown(const TableCell& cell) {
  if (const auto* value = std::get_if<double>(&cell)) return fmt::format("{:.5g}", *value);
  if (const auto* integer = std::get_if<int64_t>(&cell)) return std::to_string(*integer);
  return text_in(cell);
}

std::string line_name(const Split& split) {
  if (split.weights == 0) return "gates alone";
  if (split.weights == split.total) return std::string("weights alone, ") + name_of(split.format);
  return fmt::format("{:g} of the weights{}, then gates", split.weights,
                     split.gate_aware ? ", gate-aware" : "");
}

void add_table(report::Page& page, const report::Table& table) {
  std::vector<std::vector<std::string>> rows;
  for (const auto& row : table.rows) {
    std::vector<std::string>& cells = rows.emplace_back();
    for (const TableCell& cell : row) cells.push_back(shown(cell));
  }
  page.table(table.columns, rows);
}

/// The lines, and the dense model's value as a dashed one.
void add_lines(report::Page& page, const std::vector<SplitResult>& splits, const char* title,
               const char* label, double dense, const std::function<double(const SplitResult&)>& value) {
  double first = 1, last = 0;
  for (const SplitResult& one : splits)
    first = std::min(first, one.split.total), last = std::max(last, one.split.total);
  std::vector<Series> all = lines_of(splits, value);
  all.push_back({.name = "dense", .points = {{first, dense}, {last, dense}}, .dashed = true});
  page.chart(title, "total sparsity", label, all);
}

void add_front(report::Page& page, const std::vector<SplitResult>& splits) {
  const std::vector<SplitResult> front = pareto_front(splits);
  Series all{.name = "all splits", .points = {}}, best{.name = "Pareto front", .points = {}};
  std::vector<std::vector<std::string>> rows;
  for (const SplitResult& one : splits) all.points.emplace_back(one.tpot_ms, one.perplexity());
  std::sort(all.points.begin(), all.points.end());
  for (const SplitResult& one : front) {
    best.points.emplace_back(one.tpot_ms, one.perplexity());
    rows.push_back({fmt::format("{:g}", one.split.total), fmt::format("{:g}", one.split.weights),
                    one.split.gate_aware ? "yes" : "no", fmt::format("{:.4g}", one.split.activations),
                    name_of(one.split.format), one.is_greedy() ? "greedy" : "uniform",
                    fmt::format("{:.4f}", one.perplexity()), fmt::format("{:.4f}", one.tpot_ms),
                    fmt::format("{:.2f}", double(one.bytes) / 1e6)});
  }
  page.heading("Pareto front");
  page.paragraph("Splits that no other beats in both perplexity and time per token.");
  page.chart("Perplexity over time per token", "ms per token", "perplexity", {all, best});
  page.table({"total", "weights", "gate-aware", "inputs", "format", "allocation", "perplexity",
              "ms per token", "MB"},
             rows);
}

/// The first, the middle and the last of some names: a page with all of a large model would not open.
std::vector<std::string> some_of(const std::vector<std::string>& names, size_t per_block) {
  const size_t blocks = names.size() / std::max<size_t>(1, per_block);
  if (blocks <= 3) return names;
  std::vector<std::string> some;
  for (const size_t block : {size_t{0}, blocks / 2, blocks - 1})
    for (size_t i = 0; i < per_block; ++i) some.push_back(names[block * per_block + i]);
  return some;
}

void add_histograms(report::Page& page, report::Database& database) {
  const report::Table inputs =
      database.run("SELECT input FROM histograms GROUP BY input ORDER BY min(rowid)");
  std::map<std::string, int64_t> blocks;
  std::vector<std::string> names;
  for (const auto& row : inputs.rows) {
    names.push_back(text_in(row[0]));
    const std::string rest = names.back().substr(names.back().find('.') + 1);
    ++blocks[rest.substr(0, rest.find('.'))];
  }
  if (names.empty()) return;
  page.heading("Distributions of inputs, and thresholds");
  page.paragraph(
      "Inputs of linear layers on the calibration text, up to the 99 % quantile of their magnitudes; what "
      "lies "
      "outside is in the outermost bars. Of a large model the first, the middle and the last block.");
  for (const std::string& name : some_of(names, size_t(blocks.begin()->second))) {
    Series line{.name = name, .points = {}};
    for (const auto& row :
         database.run("SELECT x, share FROM histograms WHERE input = ?1 ORDER BY bar", {name}).rows)
      line.points.emplace_back(number_in(row[0]), number_in(row[1]));
    page.chart(name, "input", "share", {line});
  }
  add_table(page,
            database.run(
                "SELECT total, weights, pruning, allocation, layer, share, threshold, top_k FROM "
                "thresholds WHERE total = (SELECT total FROM thresholds ORDER BY abs(total - 0.5) LIMIT 1) "
                "AND weights = (SELECT min(weights) FROM thresholds) ORDER BY allocation, pruning, rowid "
                "LIMIT 100"));
}

void add_greedy(report::Page& page, report::Database& database) {
  const report::Table all = database.run(
      "SELECT block, layer, sparsity, share FROM greedy WHERE (weights, pruning, ifnull(total, 0)) = "
      "(SELECT weights, pruning, ifnull(total, 0) FROM greedy ORDER BY weights, total LIMIT 1) ORDER BY "
      "rowid");
  if (all.rows.empty()) return;
  page.heading("Greedy allocation");
  page.paragraph(
      "Share of the inputs that each projection leaves out, over the share of the block's weights.");
  const int64_t last = int64_t(number_in(all.rows.back()[0]));
  for (const int64_t block : std::set<int64_t>{0, last / 2, last}) {
    std::vector<Series> lines;
    std::map<std::string, size_t> places;
    for (const auto& row : all.rows) {
      if (int64_t(number_in(row[0])) != block) continue;
      const auto [found, is_new] = places.try_emplace(text_in(row[1]), lines.size());
      if (is_new) lines.push_back({.name = text_in(row[1]), .points = {}});
      lines[found->second].points.emplace_back(number_in(row[2]), number_in(row[3]));
    }
    page.chart(fmt::format("Block {}", block), "sparsity of the block", "share of the inputs", lines);
  }
}

void add_layer_times(report::Page& page, report::Database& database) {
  const report::Table rows = database.run(
      "SELECT layer, ms FROM layer_times WHERE (total, weights, format, pruning) = (SELECT total, weights, "
      "format, pruning FROM splits ORDER BY abs(total - 0.5), tpot_ms LIMIT 1) ORDER BY rowid");
  if (rows.rows.empty()) return;
  const report::Table which = database.run(
      "SELECT total, weights, format, pruning FROM splits ORDER BY abs(total - 0.5), "
      "tpot_ms LIMIT 1");
  page.heading("Time per layer");
  page.paragraph(fmt::format(
      "A step of generation at a total sparsity of {}, {} of the weights ({}), {}: milliseconds from the end "
      "of the layer before, the device synchronised at each, so that the sum exceeds the time of a step.",
      shown(which.rows[0][0]), shown(which.rows[0][1]), shown(which.rows[0][3]), shown(which.rows[0][2])));
  std::vector<std::string> labels;
  std::vector<double> ms;
  constexpr size_t kMost = 64;
  for (size_t i = 0; i < std::min(kMost, rows.rows.size()); ++i)
    labels.push_back(text_in(rows.rows[i][0])), ms.push_back(number_in(rows.rows[i][1]));
  page.bars("Milliseconds per linear layer", "ms", labels, {{"ms", ms}});
}

}  // namespace

std::vector<SplitResult> splits_in(report::Database& database) {
  const report::Table rows = database.run(
      "SELECT total, weights, activations, format, uniform_ppl, greedy_ppl, tpot_ms, bytes, pruning FROM "
      "splits ORDER BY weights, pruning, total, format");
  std::vector<SplitResult> splits;
  for (const auto& row : rows.rows) {
    SplitResult one{.split = {number_in(row[0]), number_in(row[1]), number_in(row[2]),
                              ops::parse_sparse_format(text_in(row[3])), is_gate_aware(text_in(row[8]))},
                    .uniform_perplexity = kept_perplexity(row[4]),
                    .greedy_perplexity = {}};
    if (std::isfinite(number_in(row[5]))) one.greedy_perplexity = number_in(row[5]);
    one.tpot_ms = number_in(row[6]), one.bytes = uint64_t(number_in(row[7]));
    splits.push_back(one);
  }
  return splits;
}

std::vector<Series> lines_of(const std::vector<SplitResult>& splits,
                             const std::function<double(const SplitResult&)>& value) {
  std::map<std::string, Series> lines;
  for (const SplitResult& one : splits) {
    const std::string name = line_name(one.split);
    lines[name].name = name;
    lines[name].points.emplace_back(one.split.total, value(one));
  }
  std::vector<Series> all;
  for (auto& [name, line] : lines) {
    std::sort(line.points.begin(), line.points.end());
    all.push_back(std::move(line));
  }
  return all;
}

std::string sweep_page(report::Database& database) {
  check_sweep_tables(database);
  report::Page page("Splits of a total sparsity");
  const std::vector<SplitResult> splits = splits_in(database);
  const report::Table dense = database.run("SELECT perplexity, tpot_ms, bytes FROM dense");
  const bool has_dense = !dense.rows.empty();
  const auto of_dense = [&](size_t i) { return has_dense ? number_in(dense.rows[0][i]) : 0; };
  page.paragraph(
      "A share s1 of the weights is pruned, gates leave out a share s2 of the inputs, and the total is 1 - "
      "(1 - "
      "s1)(1 - s2). Perplexity and times are of the same model.");
  if (splits.empty()) {
    page.paragraph("No split has been measured yet.");
    return page.html();
  }
  add_lines(page, splits, "Perplexity", "perplexity", of_dense(0),
            [](const SplitResult& one) { return one.perplexity(); });
  add_lines(page, splits, "Time per token", "ms", of_dense(1),
            [](const SplitResult& one) { return one.tpot_ms; });
  add_lines(page, splits, "Bytes of the linear layers", "MB", of_dense(2) / 1e6,
            [](const SplitResult& one) { return double(one.bytes) / 1e6; });
  add_front(page, splits);
  page.heading("All splits");
  add_table(
      page,
      database.run("SELECT total, weights, pruning, activations, format, uniform_ppl, greedy_ppl, ttft_ms, "
                   "tpot_ms, tpot_p90, bytes, counted_weights, counted_activations FROM splits ORDER BY "
                   "total, weights, format, pruning"));
  add_greedy(page, database);
  add_histograms(page, database);
  add_layer_times(page, database);
  page.heading("Settings");
  add_table(page, database.run("SELECT name, value FROM settings ORDER BY rowid"));
  return page.html();
}

}  // namespace tessera::sparsity

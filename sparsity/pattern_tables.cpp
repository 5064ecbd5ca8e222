#include "sparsity/pattern_tables.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <set>

#include "report/database.h"

namespace tessera::sparsity {
namespace {

using report::TableCell;

constexpr const char* kTables[] = {
    "CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT)",
    "CREATE TABLE matrices (id INTEGER PRIMARY KEY, input TEXT, method TEXT, pattern TEXT, asked TEXT, "
    "matrix TEXT, "
    "layer INTEGER, projection TEXT, rows INTEGER, columns INTEGER, axis TEXT, features INTEGER, length "
    "INTEGER, "
    "sparsity REAL, zero_features INTEGER, one_features INTEGER, duplicate_features INTEGER, unique_features "
    "INTEGER, "
    "pool INTEGER, has_values INTEGER, input_norm_pearson REAL, input_norm_spearman REAL)",
    "CREATE TABLE features (matrix_id INTEGER, feature INTEGER, kept INTEGER, density REAL, norm REAL, "
    "nearest INTEGER, nearest_distance INTEGER, gradient_rank INTEGER, cluster_masks INTEGER, cluster_values "
    "INTEGER, "
    "tsne_x REAL, tsne_y REAL, PRIMARY KEY (matrix_id, feature))",
    "CREATE TABLE nearest_neighbor_metrics (matrix_id INTEGER, feature INTEGER, rank INTEGER, neighbor "
    "INTEGER, "
    "distance INTEGER)",
    "CREATE TABLE distances (matrix_id INTEGER, distance INTEGER, pairs INTEGER)",
    "CREATE TABLE clusters (matrix_id INTEGER, source TEXT, k INTEGER, execution INTEGER, sizes TEXT, "
    "singletons INTEGER, ratio_pairs REAL, ratio_pairs_without_singletons REAL, within_pairs REAL, "
    "between_pairs REAL, "
    "ratio_means REAL, ratio_means_without_singletons REAL, within_means REAL, between_means REAL, inertia "
    "REAL, "
    "balance REAL, coherence REAL, chance_ratio_pairs REAL, chance_singletons INTEGER, "
    "chance_ratio_pairs_without_singletons REAL)",
    "CREATE TABLE cluster_labels (matrix_id INTEGER, source TEXT, k INTEGER, gradient_rank INTEGER, cluster "
    "INTEGER)",
    "CREATE TABLE statistics (matrix_id INTEGER, statistic TEXT, value REAL, PRIMARY KEY (matrix_id, "
    "statistic))",
    "CREATE TABLE pairs (id INTEGER PRIMARY KEY, a_id INTEGER, b_id INTEGER, matrix TEXT, metric TEXT, mean "
    "REAL, "
    "sd REAL, least REAL, largest REAL, low REAL, high REAL, features INTEGER)",
    "CREATE TABLE pair_quantiles (pair_id INTEGER, share REAL, value REAL)",
    "CREATE TABLE nulls (subject TEXT, subject_id INTEGER, statistic TEXT, model TEXT, observed REAL, draws "
    "INTEGER, "
    "mean REAL, sd REAL, low REAL, high REAL, effect REAL, p REAL, p_corrected REAL, within_chance INTEGER)",
    "CREATE TABLE bytes (matrix_id INTEGER, format TEXT, bytes INTEGER, of_dense REAL, bound REAL)",
    "CREATE TABLE skipped_blocks (matrix_id INTEGER, feature_order TEXT, group_size INTEGER, share REAL, "
    "bound REAL)",
    "CREATE TABLE perplexity (input TEXT, text TEXT, value REAL)",
    "CREATE TABLE input_norms (matrix_id INTEGER, column_index INTEGER, norm REAL, kept INTEGER, density "
    "REAL, "
    "PRIMARY KEY (matrix_id, column_index)) WITHOUT ROWID",
    "CREATE TABLE maps (matrix_id INTEGER PRIMARY KEY, height INTEGER, width INTEGER, density BLOB)",
    "CREATE TABLE bits (matrix_id INTEGER PRIMARY KEY, features INTEGER, length INTEGER, words_per_feature "
    "INTEGER, "
    "bits TEXT)",
    "CREATE VIEW cluster_stability AS SELECT matrix_id, source, k, count(*) AS executions, avg(ratio_pairs) "
    "AS "
    "mean_ratio_pairs, CASE WHEN avg(ratio_pairs) > 0 THEN 100.0 * sqrt(max(0.0, (sum(ratio_pairs * "
    "ratio_pairs) - "
    "count(ratio_pairs) * avg(ratio_pairs) * avg(ratio_pairs)) / max(1, count(ratio_pairs) - 1))) / "
    "avg(ratio_pairs) "
    "END AS coefficient_of_variation, avg(singletons) AS mean_singletons, avg(chance_ratio_pairs) AS "
    "mean_chance_ratio_pairs, avg(ratio_pairs_without_singletons) AS mean_ratio_pairs_without_singletons "
    "FROM clusters "
    "GROUP BY matrix_id, source, k",
};

std::string sql_text(const std::string& text) {
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? std::string("''") : std::string(1, c);
  return quoted + "'";
}

/// The parts that are not empty, joined by _; in small letters, since SQLite does not tell them from large
/// ones.
std::string view_name(std::initializer_list<std::string> parts) {
  std::string name;
  for (const std::string& part : parts)
    if (!part.empty()) name += (name.empty() ? "" : "_") + part;
  for (char& c : name) c = std::isalnum(uint8_t(c)) ? char(std::tolower(uint8_t(c))) : '_';
  return name;
}

/// A view per input and projection.
struct View {
  std::string input, projection;
  /// As the original's tables, wanda_0_5_down_proj; with the pattern; with the input's name, too.
  std::array<std::string, 3> names;
};

std::vector<View> views_of(const PatternTables::Rows& matrices) {
  std::vector<View> views;
  std::set<std::pair<std::string, std::string>> seen;
  for (const auto& row : matrices) {
    const auto text = [&](size_t column) { return std::get<std::string>(row[column]); };
    const std::string input = text(1), pattern = text(3), sparsity = text(4), projection = text(7);
    const std::string method = text(2).empty() ? input : text(2);
    if (!seen.insert({input, projection}).second) continue;
    views.push_back(
        {input,
         projection,
         {view_name({method, sparsity, projection}), view_name({method, sparsity, pattern, projection}),
          view_name({method, sparsity, pattern, input, projection})}});
  }
  return views;
}

/// Each view gets the shortest of its names that no other view could have.
void add_views(report::Database& database, const PatternTables::Rows& matrices) {
  const std::vector<View> views = views_of(matrices);
  std::set<std::string> taken;
  for (const View& view : views) {
    std::string name;
    for (size_t i = 0; i < view.names.size() && name.empty(); ++i) {
      const auto has_it = [&](const View& other) { return other.names[i] == view.names[i]; };
      if (std::ranges::count_if(views, has_it) == 1 && !taken.contains(view.names[i])) name = view.names[i];
    }
    for (int64_t number = 1; name.empty(); ++number) {  // "a-b" and "a_b"
      const std::string numbered = view.names.back() + "_" + std::to_string(number);
      if (!taken.contains(numbered)) name = numbered;
    }
    taken.insert(name);
    database.run(
        "CREATE VIEW \"" + name +
        "\" AS SELECT m.matrix, m.layer, f.* FROM features f JOIN matrices m ON m.id = f.matrix_id WHERE "
        "m.input = " +
        sql_text(view.input) + " AND m.projection = " + sql_text(view.projection));
  }
}

}  // namespace

TableCell finite_cell(double value) {
  return std::isfinite(value) ? TableCell(value) : TableCell();
}

std::string sizes_text(const std::vector<int64_t>& sizes) {
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : ",") + std::to_string(size);
  return text;
}

std::string database_bytes(const PatternTables& tables, const AnalyzeOptions& options) {
  report::Database database = report::Database::in_memory();
  database.run("PRAGMA application_id = " + std::to_string(kPatternsId));
  database.run("PRAGMA user_version = " + std::to_string(kPatternsVersion));
  database.run("BEGIN");
  for (const char* const table : kTables) database.run(table);
  const PatternOptions& p = options.patterns;
  PatternTables::Rows settings;
  for (const auto& [name, value] : {std::pair<const char*, int64_t>{"pool", p.pool},
                                    {"nearest", p.nearest},
                                    {"starts", p.starts},
                                    {"executions", p.executions},
                                    {"draws", p.draws},
                                    {"resamples", p.resamples},
                                    {"group", p.group},
                                    {"seed", int64_t(p.seed)}})
    settings.push_back({std::string(name), std::to_string(value)});
  settings.push_back({std::string("k"), sizes_text(p.clusters)});
  settings.push_back({std::string("perplexity"), fmt::format("{}", p.perplexity)});
  if (!tables.norms_from.empty()) settings.push_back({std::string("input_norms"), tables.norms_from});
  const auto fill = [&](const char* table, const PatternTables::Rows& rows) {
    if (rows.empty()) return;
    std::string places;
    for (size_t i = 1; i <= rows[0].size(); ++i) places += (i > 1 ? ", ?" : "?") + std::to_string(i);
    database.insert(fmt::format("INSERT INTO {} VALUES ({})", table, places), rows);
  };
  fill("settings", settings), fill("matrices", tables.matrices), fill("features", tables.features);
  fill("nearest_neighbor_metrics", tables.neighbours), fill("distances", tables.distances);
  fill("clusters", tables.clusters), fill("cluster_labels", tables.labels);
  fill("statistics", tables.statistics), fill("pairs", tables.pairs);
  fill("pair_quantiles", tables.quantiles), fill("nulls", tables.nulls),
      fill("perplexity", tables.perplexity);
  fill("maps", tables.maps), fill("bits", tables.bits);
  fill("bytes", tables.bytes), fill("skipped_blocks", tables.skipped);
  fill("input_norms", tables.input_norms);
  add_views(database, tables.matrices);
  database.run("COMMIT");
  return database.bytes();
}

}  // namespace tessera::sparsity

#include "sparsity/pattern_report.h"

#include <fmt/format.h>

#include <cmath>
#include <map>
#include <tuple>

#include "sparsity/features.h"
#include "sparsity/pattern_page.h"
#include "sparsity/pattern_tables.h"

namespace tessera::sparsity {
namespace {

using report::integer_in;
using report::number_in;
using report::Table;
using report::TableCell;
using report::text_in;

/// Values over the executions of each matrix: means and standard deviations, averaged over the matrices.
class OverExecutions {
 public:
  void add(int64_t matrix, double value) {
    if (std::isfinite(value)) values_[matrix].push_back(value);
  }
  double mean() const {
    return over_matrices(1, [](const Summary& one) { return one.mean; });
  }
  double sd() const {
    return over_matrices(2, [](const Summary& one) { return one.sd; });
  }
  double coefficient_of_variation() const {
    return over_matrices(2, [](const Summary& one) { return one.mean > 0 ? 100 * one.sd / one.mean : NAN; });
  }

 private:
  template <class Figure>
  double over_matrices(size_t least_executions, Figure&& figure) const {
    std::vector<double> figures;
    for (const auto& [matrix, values] : values_) {
      const double one = values.size() < least_executions ? NAN : figure(summarise(values));
      if (std::isfinite(one)) figures.push_back(one);
    }
    return figures.empty() ? NAN : summarise(figures).mean;
  }
  std::map<int64_t, std::vector<double>> values_;
};

/// Cluster figures of the multi-execution analysis: Euclidean distances to and between means of clusters.
ReportSection cluster_section(report::Database& database) {
  constexpr size_t kFigures = 5;  // within, between, separation_ratio, inertia, cluster_balance
  struct Group {
    int64_t executions = 0;
    std::map<int64_t, std::pair<double, double>> range;  // by matrix
    OverExecutions figures[kFigures];
  };
  const Table rows = database.run(
      "SELECT m.input, m.projection, c.source, c.k, m.id, c.within_means, c.between_means, c.ratio_means, "
      "c.inertia, c.balance, c.execution, low.value * m.length, high.value * m.length FROM clusters c JOIN "
      "matrices m ON m.id = c.matrix_id LEFT JOIN statistics low ON low.matrix_id = m.id AND low.statistic = "
      "'hamming_min' LEFT JOIN statistics high ON high.matrix_id = m.id AND high.statistic = 'hamming_max' "
      "ORDER BY m.id, c.execution");
  std::map<std::tuple<std::string, std::string, std::string, int64_t>, Group> groups;
  for (const auto& row : rows.rows) {
    Group& group = groups[{text_in(row[0]), text_in(row[1]), text_in(row[2]), integer_in(row[3])}];
    const int64_t matrix = integer_in(row[4]);
    for (size_t i = 0; i < kFigures; ++i) group.figures[i].add(matrix, number_in(row[5 + i]));
    group.executions = std::max(group.executions, integer_in(row[10]) + 1);
    group.range[matrix] = {number_in(row[11]), number_in(row[12])};
  }
  ReportSection section{
      .title = "Clusters over executions",
      .text =
          "Means over the matrices of a projection of the means and standard deviations over executions. "
          "Distances are Euclidean, of features to the mean of their cluster and between means; hamming "
          "counts positions over all pairs of the pool. Stable: a coefficient of variation of the ratio "
          "below 30 %; moderate: below 50 %.",
      .table = {.name = "clusters",
                .columns = {"input",
                            "projection",
                            "source",
                            "k",
                            "matrices",
                            "executions",
                            "hamming_min",
                            "hamming_max",
                            "hamming_range",
                            "within",
                            "within_sd",
                            "between",
                            "between_sd",
                            "separation_ratio",
                            "separation_ratio_sd",
                            "coefficient_of_variation",
                            "stability",
                            "inertia",
                            "inertia_sd",
                            "cluster_balance",
                            "cluster_balance_sd"},
                .rows = {}}};
  for (const auto& [key, group] : groups) {
    double low = INFINITY, high = -INFINITY;
    for (const auto& [matrix, range] : group.range)
      low = std::min(low, range.first), high = std::max(high, range.second);
    const double variation = group.figures[2].coefficient_of_variation();
    std::vector<TableCell> row{std::get<0>(key),
                               std::get<1>(key),
                               std::get<2>(key),
                               std::get<3>(key),
                               int64_t(group.range.size()),
                               group.executions,
                               finite_cell(std::round(low)),
                               finite_cell(std::round(high)),
                               finite_cell(std::round(high) - std::round(low))};
    for (size_t i = 0; i < kFigures; ++i) {
      row.push_back(finite_cell(group.figures[i].mean()));
      row.push_back(finite_cell(group.figures[i].sd()));
      if (i == 2) row.insert(row.end(), {finite_cell(variation), std::string(stability_of(variation))});
    }
    section.table.rows.push_back(std::move(row));
  }
  return section;
}

struct SectionQuery {
  const char *name, *title, *text, *sql;
};
constexpr SectionQuery kSectionQueries[] = {
    {"singletons", "Ratios and singletons",
     "Between / within of Hamming distances over pairs, a cluster of one feature counting 0 within. Next to "
     "it: clusters of one feature, the ratio without them, and the same of independent masks of equal "
     "density. A ratio that independent masks have as well, or that is gone without singletons, is no "
     "structure.",
     "SELECT m.input, m.projection, c.source, c.k, count(*) AS clusterings, avg(c.ratio_pairs) AS ratio, "
     "max(c.ratio_pairs) AS largest, avg(c.chance_ratio_pairs) AS chance_ratio, max(c.chance_ratio_pairs) AS "
     "chance_largest, avg(c.singletons) AS singletons, avg(c.chance_singletons) AS chance_singletons, "
     "avg(c.ratio_pairs_without_singletons) AS without_singletons, "
     "avg(c.chance_ratio_pairs_without_singletons) AS chance_without_singletons FROM clusters c JOIN "
     "matrices "
     "m ON m.id = c.matrix_id GROUP BY m.input, m.projection, c.source, c.k ORDER BY m.input, m.projection, "
     "c.source, c.k"},
    {"coherence", "Coherence, and what densities explain",
     "Share of the positions where all features of a group are pruned, means over the matrices of a "
     "projection. explained: of what exceeds independent masks, the share that masks with the same densities "
     "of rows and columns have, too.",
     "SELECT *, CASE WHEN observed > independent THEN (sums_kept - independent) / (observed - independent) "
     "END AS explained FROM (SELECT m.input, m.projection, n.statistic, count(DISTINCT m.id) AS matrices, "
     "avg(n.observed) AS observed, avg(CASE n.model WHEN 'independent' THEN n.mean END) AS independent, "
     "avg(CASE n.model WHEN 'rows_shuffled' THEN n.mean END) AS rows_shuffled, avg(CASE n.model WHEN "
     "'sums_kept' THEN n.mean END) AS sums_kept FROM nulls n JOIN matrices m ON n.subject = 'matrix' AND "
     "m.id "
     "= n.subject_id WHERE n.statistic IN ('nearest_coherence', 'exhaustive_coherence') OR n.statistic LIKE "
     "'coherence' || (SELECT value FROM settings WHERE name = 'group') || '\\_%' ESCAPE '\\' GROUP BY "
     "m.input, m.projection, n.statistic) ORDER BY input, projection, statistic"},
    {"pairs", "Masks compared",
     "Per feature, means over the matrices of a projection; chance: the second mask independent of the "
     "first, "
     "with its density. beyond_sums_kept: matrices where masks with the densities of its rows and columns do "
     "not explain the figure (corrected p of at most 0.05).",
     "SELECT a.input AS a, b.input AS b, a.projection, p.metric, count(DISTINCT p.id) AS matrices, "
     "avg(p.mean) AS mean, avg(p.sd) AS sd, avg(CASE n.model WHEN 'independent' THEN n.mean END) AS chance, "
     "sum(n.model = 'sums_kept' AND n.within_chance = 0) AS beyond_sums_kept FROM pairs p JOIN matrices a ON "
     "a.id = p.a_id JOIN matrices b ON b.id = p.b_id LEFT JOIN nulls n ON n.subject = 'pair' AND "
     "n.subject_id "
     "= p.id GROUP BY a.input, b.input, a.projection, p.metric ORDER BY a.input, b.input, a.projection, "
     "p.metric"},
    {"chance", "Figures beyond chance",
     "Number of matrices per input whose figure is beyond chance (p corrected over matrices, at most 0.05) "
     "under each null model: equal density (independent), also of each feature (rows_shuffled), also of each "
     "position (sums_kept).",
     "SELECT m.input, n.statistic, count(DISTINCT m.id) AS matrices, sum(n.model = 'independent' AND "
     "n.within_chance = 0) AS beyond_independent, sum(n.model = 'rows_shuffled' AND n.within_chance = 0) AS "
     "beyond_rows_shuffled, sum(n.model = 'sums_kept' AND n.within_chance = 0) AS beyond_sums_kept FROM "
     "nulls "
     "n JOIN matrices m ON n.subject = 'matrix' AND m.id = n.subject_id GROUP BY m.input, n.statistic ORDER "
     "BY "
     "m.input, n.statistic"},
    {"perplexity", "Perplexity", "As tessera prune noted it.",
     "SELECT input, text, value FROM perplexity ORDER BY input, text"},
};

}  // namespace

const char* stability_of(double coefficient_of_variation) {
  constexpr double kStable = 30, kModerate = 50;  // the original's generate_comparative_report
  if (std::isnan(coefficient_of_variation)) return "";
  return coefficient_of_variation < kStable     ? "stable"
         : coefficient_of_variation < kModerate ? "moderate"
                                                : "unstable";
}

std::vector<ReportSection> report_sections(report::Database& database) {
  check_version(database);
  std::vector<ReportSection> sections{cluster_section(database)};
  for (const SectionQuery& query : kSectionQueries) {
    ReportSection section{.title = query.title, .text = query.text, .table = database.run(query.sql)};
    section.table.name = query.name;
    sections.push_back(std::move(section));
  }
  std::erase_if(sections, [](const ReportSection& section) { return section.table.rows.empty(); });
  return sections;
}

std::string markdown_of(const std::vector<ReportSection>& sections) {
  std::string text = "# Sparsity patterns\n";
  for (const ReportSection& section : sections) {
    Table table = section.table;
    for (auto& row : table.rows)
      for (TableCell& cell : row)
        if (const auto* value = std::get_if<double>(&cell)) cell = fmt::format("{:.4g}", *value);
    text += fmt::format("\n## {}\n\n{}\n\n{}", section.title, section.text, report::to_markdown(table));
  }
  return text;
}

}  // namespace tessera::sparsity

#include "sparsity/pattern_page.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "io/utf8.h"
#include "runtime/error.h"
#include "sparsity/pattern_page_script.h"
#include "sparsity/patterns.h"

namespace tessera::sparsity {
namespace {

using nlohmann::ordered_json;

constexpr size_t kMostData = 7 << 20;  // bytes of JSON: the page stays below 8 MB

/// A figure's data. `heavy`: a table with many rows per matrix, of which a large analysis shows the first
/// matrices only ({} is the last of them).
struct Figure {
  const char* name;
  const char* sql;
  bool heavy;
};
constexpr Figure kFigures[] = {
    {"settings", "SELECT * FROM settings", false},
    {"matrices", "SELECT * FROM matrices ORDER BY id", false},
    {"perplexity", "SELECT * FROM perplexity", false},
    {"bytes", "SELECT * FROM bytes", false},
    {"skipped", "SELECT * FROM skipped_blocks", false},
    {"statistics", "SELECT * FROM statistics", false},
    {"nulls",
     "SELECT subject, subject_id, statistic, model, observed, mean, sd, low, high, effect, p, p_corrected, "
     "within_chance FROM nulls",
     false},
    {"pairs", "SELECT * FROM pairs", false},
    {"pair_quantiles", "SELECT * FROM pair_quantiles", false},
    {"stability", "SELECT * FROM cluster_stability", false},
    {"clusters",
     "SELECT matrix_id, source, k, execution, sizes, singletons, ratio_pairs, "
     "ratio_pairs_without_singletons, "
     "ratio_means, coherence, chance_ratio_pairs, chance_singletons FROM clusters",
     false},
    {"features", "SELECT * FROM features WHERE matrix_id <= {}", true},
    {"labels",
     "SELECT * FROM cluster_labels WHERE matrix_id <= {} ORDER BY matrix_id, source, k, gradient_rank", true},
    {"distances", "SELECT * FROM distances WHERE matrix_id <= {}", true},
    {"input_norms",
     "SELECT n.* FROM input_norms n JOIN matrices m ON m.id = n.matrix_id WHERE n.matrix_id <= {} AND "
     "n.column_index % ((m.columns + 511) / 512) = 0",
     true},
    {"maps", "SELECT * FROM maps WHERE matrix_id <= {}", true},
    {"bits", "SELECT * FROM bits WHERE matrix_id <= {}", true},
};

ordered_json json_of(const report::TableCell& value) {
  if (const auto* integer = std::get_if<int64_t>(&value)) return *integer;
  if (const auto* number = std::get_if<double>(&value)) return *number;
  if (const auto* text = std::get_if<std::string>(&value)) return io::utf8_text(*text);
  return nullptr;
}

std::string data_up_to(report::Database& database, int64_t last) {
  ordered_json data = ordered_json::object(), sql = ordered_json::object();
  for (const Figure& figure : kFigures) {
    const std::string query = figure.heavy ? fmt::format(fmt::runtime(figure.sql), last) : figure.sql;
    const report::Table rows = database.run(query);
    ordered_json table{{"columns", rows.columns}, {"rows", ordered_json::array()}};
    for (const auto& row : rows.rows) {
      ordered_json values = ordered_json::array();
      for (const report::TableCell& value : row) values.push_back(json_of(value));
      table["rows"].push_back(std::move(values));
    }
    data[figure.name] = std::move(table);
    sql[figure.name] = query;
  }
  data["sql"] = std::move(sql);
  data["last_matrix"] = last;
  std::string text;
  for (const char c : data.dump()) text += c == '<' ? std::string("\\u003c") : std::string(1, c);
  return text;
}

}  // namespace

void check_version(report::Database& database) {
  const auto version = std::get<int64_t>(database.run("PRAGMA user_version").rows.at(0).at(0));
  check(version == kPatternsVersion, "sparsity.sqlite: its tables are of version ", version, "; expected ",
        kPatternsVersion, "; run tessera sparsity analyze again");
}

std::string page_data(report::Database& database) {
  check_version(database);
  const report::Table count = database.run("SELECT count(*) FROM matrices");
  int64_t last = std::get<int64_t>(count.rows[0][0]);
  std::string data = data_up_to(database, last);
  while (data.size() > kMostData && last > 1) {
    last = std::max<int64_t>(1, int64_t(double(last) * 0.9 * double(kMostData) / double(data.size())));
    data = data_up_to(database, last);
  }
  return data;
}

std::string page_of(report::Database& database) {
  std::string page = kPageHead;
  page += "<script type=\"application/json\" id=\"data\">" + page_data(database) + "</script>\n<script>";
  page += kPageScript;
  page += "</script>\n</body></html>\n";
  return page;
}

}  // namespace tessera::sparsity

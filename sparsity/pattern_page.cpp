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

/// A figure's data. Of a large analysis the page has some tables of the first matrices only ({} is the last
/// of them): `figures` have some rows per matrix, `heavy` ones many.
struct Figure {
  const char* name;
  const char* sql;
  enum class Rows : uint8_t { all, figures, heavy } rows;
};
using enum Figure::Rows;
constexpr Figure kFigures[] = {
    {"settings", "SELECT * FROM settings", all},
    {"matrices", "SELECT * FROM matrices ORDER BY id", all},
    {"perplexity", "SELECT * FROM perplexity", all},
    {"bytes", "SELECT * FROM bytes WHERE matrix_id <= {}", figures},
    {"skipped", "SELECT * FROM skipped_blocks WHERE matrix_id <= {}", figures},
    {"statistics", "SELECT * FROM statistics WHERE matrix_id <= {}", figures},
    {"nulls",
     "SELECT subject, subject_id, statistic, model, observed, mean, sd, low, high, effect, p, p_corrected, "
     "within_chance FROM nulls WHERE CASE subject WHEN 'pair' THEN (SELECT max(a_id, b_id) FROM pairs WHERE "
     "id = subject_id) ELSE subject_id END <= {}",
     figures},
    {"pairs", "SELECT * FROM pairs WHERE max(a_id, b_id) <= {}", figures},
    {"pair_quantiles",
     "SELECT * FROM pair_quantiles WHERE (SELECT max(a_id, b_id) FROM pairs WHERE id = pair_id) <= {}",
     figures},
    {"stability", "SELECT * FROM cluster_stability WHERE matrix_id <= {}", figures},
    {"clusters",
     "SELECT matrix_id, source, k, execution, sizes, singletons, ratio_pairs, "
     "ratio_pairs_without_singletons, "
     "ratio_means, coherence, chance_ratio_pairs, chance_singletons FROM clusters WHERE matrix_id <= {}",
     figures},
    {"features", "SELECT * FROM features WHERE matrix_id <= {}", heavy},
    {"labels",
     "SELECT * FROM cluster_labels WHERE matrix_id <= {} ORDER BY matrix_id, source, k, gradient_rank",
     heavy},
    {"distances", "SELECT * FROM distances WHERE matrix_id <= {}", heavy},
    {"input_norms",
     "SELECT n.* FROM input_norms n JOIN matrices m ON m.id = n.matrix_id WHERE n.matrix_id <= {} AND "
     "n.column_index % ((m.columns + 511) / 512) = 0",
     heavy},
    {"maps", "SELECT * FROM maps WHERE matrix_id <= {}", heavy},
    {"bits", "SELECT * FROM bits WHERE matrix_id <= {}", heavy},
};

ordered_json json_of(const report::TableCell& value) {
  if (const auto* integer = std::get_if<int64_t>(&value)) return *integer;
  if (const auto* number = std::get_if<double>(&value)) return *number;
  if (const auto* text = std::get_if<std::string>(&value)) return io::utf8_text(*text);
  return nullptr;
}

/// The last matrices whose `figures` and `heavy` tables are in the page.
struct Last {
  int64_t figures, heavy;
};

std::string data_up_to(report::Database& database, const Last& last) {
  ordered_json data = ordered_json::object(), sql = ordered_json::object();
  for (const Figure& figure : kFigures) {
    const std::string query =
        figure.rows == all
            ? figure.sql
            : fmt::format(fmt::runtime(figure.sql), figure.rows == heavy ? last.heavy : last.figures);
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
  data["last_figures"] = last.figures, data["last_heavy"] = last.heavy;
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
  const auto all_matrices = std::get<int64_t>(count.rows[0][0]);
  Last last{all_matrices, 0};
  std::string data;
  // Lowers `bound` until the data have at most so many bytes.
  const auto fill = [&](int64_t& bound, size_t most) {
    while ((data = data_up_to(database, last)).size() > most && bound > 1)
      bound = std::max<int64_t>(1, int64_t(double(bound) * 0.9 * double(most) / double(data.size())));
  };
  fill(last.figures, kMostData / 2);
  last.heavy = last.figures;
  fill(last.heavy, kMostData);
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

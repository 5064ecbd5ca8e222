#include "sparsity/sweep_pictures.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "report/chart.h"
#include "runtime/error.h"
#include "sparsity/split_sweep_internal.h"
#include "sparsity/sweep_store.h"

namespace tessera::sparsity {
namespace {

using report::Chart;
using report::Colour;
using report::Image;
using report::Range;
using report::Series;
using Points = std::vector<std::pair<double, double>>;

struct Dense {
  double perplexity = NAN, tpot_ms = NAN, bytes = NAN;
};
Dense dense_of(report::Database& database) {
  const report::Table rows = database.run("SELECT perplexity, tpot_ms, bytes FROM dense");
  if (rows.rows.empty()) return {};
  const auto& row = rows.rows[0];
  return {report::number_in(row[0]), report::number_in(row[1]), report::number_in(row[2])};
}

/// "wanda".
std::string method_of(report::Database& database) {
  const report::Table rows = database.run("SELECT value FROM settings WHERE name = 'prune'");
  if (rows.rows.empty()) return "pruned";
  const auto options = nlohmann::json::parse(report::text_in(rows.rows[0][0]), nullptr, false);
  return options.is_object() ? options.value("score", "pruned") : "pruned";
}

/// Lines with a point at each split, and the dense model's value across.
Image line_chart(const report::ChartText& text, std::vector<Series> lines, double dense) {
  std::vector<double> xs, ys{dense};
  for (const Series& line : lines)
    for (const auto& [x, y] : line.points) xs.push_back(x), ys.push_back(y);
  const Range x = report::range_of(xs);
  lines.push_back({.name = "dense", .points = {{x.low, dense}, {x.high, dense}}});
  std::vector<std::pair<std::string, Colour>> legend;
  for (size_t i = 0; i < lines.size(); ++i)
    legend.emplace_back(lines[i].name, i + 1 < lines.size() ? report::palette(i) : report::kSoft);
  Chart chart({.text = text, .x = x, .y = report::range_of(ys), .legend = legend});
  for (size_t i = 0; i < lines.size(); ++i) {
    chart.line(lines[i].points, legend[i].second);
    if (i + 1 == lines.size()) continue;
    for (const auto& [at, value] : lines[i].points) chart.point(at, value, legend[i].second);
  }
  return chart.image();
}

/// One above the other.
Image stacked(const Image& top, const Image& bottom) {
  Image both(std::max(top.width, bottom.width), top.height + bottom.height);
  int row = 0;
  for (const Image* const image : {&top, &bottom})
    for (int y = 0; y < image->height; ++y, ++row)
      std::copy_n(image->rgb.begin() + ptrdiff_t(y) * image->width * 3, image->width * 3,
                  both.rgb.begin() + ptrdiff_t(row) * both.width * 3);
  return both;
}

Image front_chart(const std::vector<SplitResult>& splits, const Dense& dense) {
  std::vector<double> xs{dense.tpot_ms}, ys{dense.perplexity};
  for (const SplitResult& one : splits) xs.push_back(one.tpot_ms), ys.push_back(one.perplexity());
  Chart chart({.text = {"perplexity over time per token", "ms per token", "perplexity"},
               .x = report::range_of(xs),
               .y = report::range_of(ys),
               .legend = {{"all splits", report::palette(0)},
                          {"Pareto front", report::palette(1)},
                          {"dense", report::kSoft}}});
  Points front;
  for (const SplitResult& one : pareto_front(splits)) front.emplace_back(one.tpot_ms, one.perplexity());
  chart.line(front, report::palette(1));
  for (const SplitResult& one : splits) chart.point(one.tpot_ms, one.perplexity(), report::palette(0));
  chart.point(dense.tpot_ms, dense.perplexity, report::kSoft);
  return chart.image();
}

}  // namespace

void export_sweep_pictures(report::Database& database, const std::string& folder, PictureFormat format,
                           const std::function<void(const std::string&)>& tell) {
  check_sweep_tables(database);
  const std::vector<SplitResult> splits = splits_in(database);
  check(!splits.empty(), "export: no split of this sweep has been measured yet; run tessera sparsity sweep");
  const Dense dense = dense_of(database);
  const std::string method = method_of(database);
  PictureFolder files(folder, format, tell);
  const auto perplexity = lines_of(splits, [](const SplitResult& one) { return one.perplexity(); });
  const Image quality = line_chart({"perplexity", "total sparsity", ""}, perplexity, dense.perplexity);
  const Image time =
      line_chart({"ms per token", "total sparsity", ""},
                 lines_of(splits, [](const SplitResult& one) { return one.tpot_ms; }), dense.tpot_ms);
  files.write("combined_ppl_plot", quality);
  files.write("tpot_ppl_vs_sparsity", stacked(time, quality));
  files.write("tpot_vs_ppl", front_chart(splits, dense));
  files.write("bytes_vs_sparsity",
              line_chart({"MB of the linear layers", "total sparsity", ""},
                         lines_of(splits, [](const SplitResult& one) { return double(one.bytes) / 1e6; }),
                         dense.bytes / 1e6));
  // Of each total: over the share of the weights. A share has a point per format with weights alone.
  std::map<double, std::map<std::string, Points>> totals;
  for (const SplitResult& one : splits)
    totals[one.split.total][one.split.gate_aware ? "gate-aware " + method : method].emplace_back(
        one.split.weights, one.uniform_perplexity);
  for (auto& [total, by_method] : totals)
    for (auto& [name, points] : by_method) {
      std::ranges::sort(points);
      std::string file = "uniform_ppl_plot_" + name;
      std::ranges::replace(file, ' ', '-');
      files.write(fmt::format("{}_{:g}", file, total),
                  line_chart({fmt::format("perplexity at a total sparsity of {:g}", total),
                              "share of the weights that are pruned", ""},
                             {{.name = name, .points = points}}, dense.perplexity));
    }
  files.publish();
}

}  // namespace tessera::sparsity

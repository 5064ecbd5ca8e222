#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <sstream>

#include "report/category_chart.h"
#include "sparsity/pattern_pictures_internal.h"

/// Pictures of a whole analysis: ratios, cluster sizes, distances, pairs of inputs, heat maps.

namespace tessera::sparsity::pictures {
namespace {

using report::Bars;
using report::Chart;
using report::Colour;
using report::Range;

size_t index_in(std::vector<std::string>& names, const std::string& name) {
  const auto found = std::ranges::find(names, name);
  if (found != names.end()) return size_t(found - names.begin());
  names.push_back(name);
  return names.size() - 1;
}

class AnalysisPictures {
 public:
  AnalysisPictures(report::Database& database, const std::vector<PictureMatrix>& matrices, const Write& write)
      : database_(database), matrices_(matrices), write_(write) {
    for (const PictureMatrix& matrix : matrices_) {
      by_id_[matrix.id] = &matrix;
      index_in(inputs_, matrix.input), index_in(labels_, matrix.label);
    }
  }

  /// Clusters of values, as the original's, where all matrices have values; the largest k.
  void clusters() {
    const report::Table rows = database_.run(
        "SELECT matrix_id, source, k, avg(ratio_pairs), avg(chance_ratio_pairs), avg(within_pairs), "
        "avg(between_pairs) FROM clusters GROUP BY matrix_id, source, k ORDER BY matrix_id, source, k");
    std::map<std::pair<std::string, int64_t>, std::vector<const std::vector<report::TableCell>*>> found;
    for (const auto& row : rows.rows)
      if (by_id_.contains(integer_in(row[0]))) found[{text_in(row[1]), integer_in(row[2])}].push_back(&row);
    std::string source = "masks";
    int64_t k = 0;
    for (const auto& [key, of_key] : found)
      if (key.first == "values" && of_key.size() == matrices_.size()) source = "values";
    for (const auto& [key, of_key] : found)
      if (key.first == source) k = std::max(k, key.second);
    if (k == 0) return;
    const std::string what = fmt::format("k = {}, clusters of {}, mean of executions", k, source);
    Bars ratios{{"separation ratio, " + what, "", "between / within"}, labels_, inputs_, {}};
    report::Cells cells;
    std::vector<double> all;
    for (const auto* row : found[{source, k}]) {
      const PictureMatrix& matrix = *by_id_.at(integer_in((*row)[0]));
      const double ratio = number_in((*row)[3]);
      ratios.bars[place_of_bar(matrix)] = {.value = ratio, .chance = number_in((*row)[4])};
      cells[place_in_heat_map(matrix)] = ratio;
      all.insert(all.end(), {number_in((*row)[5]), number_in((*row)[6])});
    }
    write_("separation_ratios", report::bar_chart(ratios, "chance: independent masks"));
    write_("separation_ratios_heatmap",
           report::heat_chart({"separation ratio, " + what, "", ""}, heat_rows_, heat_columns_, cells));

    const Range range = report::range_of(all, true);
    Chart chart({.text = {"Hamming distances, " + what, "within clusters", "between clusters"},
                 .x = range,
                 .y = range,
                 .legend = input_legend(),
                 .width = 480,
                 .height = 480});
    chart.line(std::vector<std::pair<double, double>>{{range.low, range.low}, {range.high, range.high}},
               report::kBand);
    for (const auto* row : found[{source, k}]) {
      const PictureMatrix& matrix = *by_id_.at(integer_in((*row)[0]));
      chart.point(number_in((*row)[5]), number_in((*row)[6]),
                  report::palette(index_in(inputs_, matrix.input)));
    }
    write_("within_vs_between", chart.image());
    cluster_sizes(source);
  }

  void distances() {
    const report::Table rows =
        database_.run("SELECT matrix_id, distance, pairs FROM distances ORDER BY matrix_id, distance");
    std::map<size_t, std::vector<std::pair<double, double>>> pairs;  // by input
    std::vector<double> all;
    double step = 0;
    for (const auto& row : rows.rows) {
      const auto found = by_id_.find(integer_in(row[0]));
      if (found == by_id_.end()) continue;
      const double length = double(found->second->length);
      step = std::max(step, 1 / length);
      all.push_back(number_in(row[1]) / length);
      pairs[index_in(inputs_, found->second->input)].emplace_back(all.back(), number_in(row[2]));
    }
    if (all.empty()) return;
    const auto [low, high] = std::ranges::minmax(all);
    std::map<size_t, std::vector<std::pair<double, double>>> shares, below;
    std::vector<double> heights;
    for (const auto& [input, of_input] : pairs) {
      const DistanceHistogram histogram = distance_histogram(of_input, {low, high}, step);
      double sum = 0;
      below[input].emplace_back(histogram.low, 0);
      for (size_t bin = 0; bin < histogram.shares.size(); ++bin) {
        const double begin = histogram.low + histogram.width * double(bin), share = histogram.shares[bin];
        shares[input].insert(shares[input].end(), {{begin, share}, {begin + histogram.width, share}});
        below[input].emplace_back(begin + histogram.width, sum += share);
        heights.push_back(share);
      }
    }
    const Range x{shares.begin()->second.front().first, shares.begin()->second.back().first};
    const std::string title = "distances of all pairs of the pools", label = "Hamming distance / length";
    lines("hamming_distance_distributions", {title, label, "share of pairs"}, x,
          report::range_of(heights, true), shares);
    lines("hamming_cdf", {title, label, "share of pairs up to it"}, x, {0, 1}, below);
  }

  /// Masks of two inputs: the distributions of their metrics over features, a line per matrix, and the means.
  void pairs() {
    const report::Table rows = database_.run(
        "SELECT p.id, p.a_id, p.b_id, p.metric, p.mean, p.low, p.high, n.mean FROM pairs p LEFT JOIN nulls n "
        "ON "
        "n.subject = 'pair' AND n.subject_id = p.id AND n.model = 'sums_kept' ORDER BY p.id");
    std::map<int64_t, std::vector<std::pair<double, double>>> quantiles;
    for (const auto& row :
         database_.run("SELECT pair_id, value, share FROM pair_quantiles ORDER BY pair_id, share").rows)
      quantiles[integer_in(row[0])].emplace_back(number_in(row[1]), number_in(row[2]));
    struct Two {
      Bars means;
      std::vector<std::pair<int64_t, size_t>> lines;  // (pair, metric)
    };
    std::map<std::pair<std::string, std::string>, Two> found;
    for (const auto& row : rows.rows) {
      const auto a = by_id_.find(integer_in(row[1])), b = by_id_.find(integer_in(row[2]));
      if (a == by_id_.end() || b == by_id_.end()) continue;
      Two& two = found[{a->second->file_input, b->second->file_input}];
      two.means.text = {a->second->input + " and " + b->second->input + ": metrics of features", "", "mean"};
      const size_t metric = index_in(two.means.groups, text_in(row[3]));
      const size_t category = index_in(two.means.categories, a->second->label);
      two.means.bars[{category, metric}] = {number_in(row[4]), number_in(row[7]), number_in(row[5]),
                                            number_in(row[6])};
      two.lines.emplace_back(integer_in(row[0]), metric);
    }
    for (const auto& [inputs, two] : found) {
      const std::string name = "metrics_bw_" + inputs.first + "_and_" + inputs.second;
      std::vector<double> values;
      for (const auto& [pair, metric] : two.lines)
        for (const auto& [value, share] : quantiles[pair]) values.push_back(value);
      report::ChartOptions options{
          .text = {two.means.text.title, "metric; a line per matrix", "share of features up to it"},
          .x = report::range_of(values),
          .y = {0, 1}};
      for (size_t metric = 0; metric < two.means.groups.size(); ++metric)
        options.legend.emplace_back(two.means.groups[metric], report::palette(metric));
      Chart chart(options);
      for (const auto& [pair, metric] : two.lines) chart.line(quantiles[pair], report::palette(metric));
      write_(name, chart.image());
      write_(name + "_means", report::bar_chart(two.means, "chance: both sums kept"));
    }
  }

  void heat_maps() {
    const report::Table rows =
        database_.run("SELECT matrix_id, statistic, value FROM statistics ORDER BY matrix_id, statistic");
    std::map<std::string, report::Cells> found;
    for (const auto& row : rows.rows)
      if (const auto matrix = by_id_.find(integer_in(row[0])); matrix != by_id_.end())
        found[text_in(row[1])].emplace(place_in_heat_map(*matrix->second), number_in(row[2]));
    for (const auto& [statistic, cells] : found)
      write_("heatmap_" + statistic,
             report::heat_chart({statistic, "", ""}, heat_rows_, heat_columns_, cells));
  }

  /// Of the first matrix whose bits are known, the first 64 features and 128 positions in each input.
  void sample() {
    constexpr int64_t kFeatures = 64, kPositions = 128;
    std::vector<report::Image> panels;
    std::string label;
    for (const PictureMatrix& matrix : matrices_) {
      if (!label.empty() && matrix.label != label) continue;
      const std::optional<MatrixBits> bits = bits_of(database_, matrix.id);
      if (!bits) continue;
      label = matrix.label;
      std::vector<int64_t> ranks = bits->by_index();
      ranks.resize(std::min(ranks.size(), size_t(kFeatures)));
      panels.push_back(spy_image(
          *bits, {.text = {report::shortened(matrix.input, 24) + " " + label, "position", "features"},
                  .ranks = ranks,
                  .positions = std::min(bits->length, kPositions),
                  .colours = {},
                  .legend = {}}));
    }
    if (panels.empty()) return;
    int width = 0, height = 0;
    for (const report::Image& panel : panels) width = std::max(width, panel.width), height += panel.height;
    report::Image image(width, height);
    int top = 0;
    for (const report::Image& panel : panels) {
      for (int y = 0; y < panel.height; ++y)
        std::copy_n(&panel.rgb[size_t(y) * size_t(panel.width) * 3], size_t(panel.width) * 3,
                    &image.rgb[size_t(top + y) * size_t(width) * 3]);
      top += panel.height;
    }
    write_("sparsity_patterns_sample", image);
  }

 private:
  /// Execution 0, the largest cluster first; the mean over the matrices of an input.
  void cluster_sizes(const std::string& source) {
    const report::Table rows = database_.run(
        "SELECT matrix_id, k, sizes FROM clusters WHERE execution = 0 AND source = ?1 ORDER BY matrix_id, k",
        {source});
    std::map<int64_t, std::map<size_t, std::vector<std::vector<double>>>> found;  // by k and input
    for (const auto& row : rows.rows) {
      const auto matrix = by_id_.find(integer_in(row[0]));
      if (matrix == by_id_.end()) continue;
      std::vector<double> sizes;
      std::istringstream text(text_in(row[2]));
      for (std::string size; std::getline(text, size, ',');) sizes.push_back(std::atof(size.c_str()));
      std::ranges::sort(sizes, std::greater());
      found[integer_in(row[1])][index_in(inputs_, matrix->second->input)].push_back(sizes);
    }
    for (const auto& [k, of_k] : found) {
      Bars bars{{fmt::format("cluster sizes, k = {}, clusters of {}, mean of matrices", k, source),
                 "clusters, the largest first", "features"},
                {},
                inputs_,
                {}};
      for (int64_t place = 1; place <= k; ++place) bars.categories.push_back(std::to_string(place));
      for (const auto& [input, of_input] : of_k)
        for (size_t place = 0; place < size_t(k); ++place) {
          double sum = 0;
          for (const auto& sizes : of_input) sum += place < sizes.size() ? sizes[place] : 0;
          bars.bars[{place, input}].value = sum / double(of_input.size());
        }
      write_(fmt::format("cluster_sizes_k{}", k), report::bar_chart(bars, ""));
    }
  }

  void lines(const char* name, const report::ChartText& text, Range x, Range y,
             const std::map<size_t, std::vector<std::pair<double, double>>>& of_inputs) {
    Chart chart({.text = text, .x = x, .y = y, .legend = input_legend()});
    for (const auto& [input, points] : of_inputs) chart.line(points, report::palette(input));
    write_(name, chart.image());
  }

  std::vector<std::pair<std::string, Colour>> input_legend() const {
    std::vector<std::pair<std::string, Colour>> legend;
    for (size_t input = 0; input < inputs_.size(); ++input)
      legend.emplace_back(inputs_[input], report::palette(input));
    return legend;
  }
  std::pair<size_t, size_t> place_of_bar(const PictureMatrix& matrix) {
    return {index_in(labels_, matrix.label), index_in(inputs_, matrix.input)};
  }
  /// A row per projection and input, a column per layer.
  std::pair<size_t, size_t> place_in_heat_map(const PictureMatrix& matrix) {
    return {index_in(heat_rows_, matrix.projection + " " + matrix.input),
            index_in(heat_columns_, matrix.layer < 0 ? "-" : fmt::format("layer {}", matrix.layer))};
  }

  report::Database& database_;
  const std::vector<PictureMatrix>& matrices_;
  const Write& write_;
  std::map<int64_t, const PictureMatrix*> by_id_;
  std::vector<std::string> inputs_, labels_, heat_rows_, heat_columns_;
};

}  // namespace

void draw_analysis(report::Database& database, const std::vector<PictureMatrix>& matrices,
                   const Write& write) {
  AnalysisPictures pictures(database, matrices, write);
  pictures.clusters();
  pictures.distances();
  pictures.pairs();
  pictures.heat_maps();
  pictures.sample();
}

}  // namespace tessera::sparsity::pictures

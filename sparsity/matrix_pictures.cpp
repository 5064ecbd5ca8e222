#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <map>
#include <numeric>
#include <tuple>

#include "runtime/error.h"
#include "runtime/integers.h"
#include "sparsity/pattern_pictures_internal.h"

/// Pictures of one matrix: density map, spy plots, t-SNE, distances, input norms.

namespace tessera::sparsity::pictures {

using report::Chart;
using report::Colour;
using report::Range;

namespace {

constexpr Colour kKeptColour{22, 66, 91};
constexpr int64_t kMostBins = 60;

/// A number of hexadecimal digits, as patterns.cpp writes them.
uint32_t hexadecimal(const std::string& text, size_t at, size_t digits) {
  check(at + digits <= text.size(),
        "sparsity.sqlite: a table of bits ends early; it is damaged: run tessera ", "sparsity analyze again");
  uint32_t value = 0;
  for (const char c : text.substr(at, digits))
    value = value << 4 | uint32_t(c <= '9' ? c - '0' : c - 'a' + 10);
  return value;
}

}  // namespace

int64_t MatrixBits::distance(int64_t a, int64_t b) const {
  int64_t sum = 0;
  for (int64_t w = 0; w < words; ++w)
    sum += std::popcount(bits[size_t(a * words + w)] ^ bits[size_t(b * words + w)]);
  return sum;
}

std::vector<int64_t> MatrixBits::by_index() const {
  std::vector<int64_t> ranks(ids.size());
  std::iota(ranks.begin(), ranks.end(), int64_t{0});
  std::ranges::sort(ranks, {}, [&](int64_t rank) { return ids[size_t(rank)]; });
  return ranks;
}

std::optional<MatrixBits> bits_of(report::Database& database, int64_t matrix_id) {
  const report::Table found = database.run(
      "SELECT features, length, words_per_feature, bits FROM bits WHERE matrix_id = ?1", {matrix_id});
  if (found.rows.empty()) return {};
  const auto& row = found.rows[0];
  MatrixBits bits{.features = integer_in(row[0]), .length = integer_in(row[1]), .words = integer_in(row[2])};
  const std::string text = text_in(row[3]);
  check(bits.features >= 1 && bits.length >= 1 && bits.words >= ceil_div(bits.length, 32),
        "sparsity.sqlite: bits of ", bits.features, " features of ", bits.length, " positions in ",
        bits.words, " words; it is damaged: run tessera sparsity analyze again");
  for (int64_t i = 0; i < bits.features * bits.words; ++i)
    bits.bits.push_back(hexadecimal(text, size_t(8 * i), 8));
  const report::Table ids = database.run(
      "SELECT feature FROM features WHERE matrix_id = ?1 AND gradient_rank IS NOT NULL ORDER BY "
      "gradient_rank",
      {matrix_id});
  for (const auto& id : ids.rows) bits.ids.push_back(integer_in(id[0]));
  check(int64_t(bits.ids.size()) == bits.features, "sparsity.sqlite: bits of ", bits.features,
        " features, but ", bits.ids.size(), " are in table features; it is damaged: run tessera sparsity ",
        "analyze again");
  return bits;
}

report::Image spy_image(const MatrixBits& bits, const Spy& spy) {
  const int64_t features = int64_t(spy.ranks.size());
  const int64_t across = std::clamp<int64_t>(1024 / spy.positions, 1, 8);
  const int64_t down = std::clamp<int64_t>(512 / features, 2, 8);
  Chart chart({.text = spy.text,
               .x = {0, double(spy.positions)},
               .y = {double(features), 0},  // from the top
               .legend = spy.legend,
               .width = int(across * spy.positions),
               .height = int(down * features)});
  for (int64_t line = 0; line < features; ++line) {
    const int64_t rank = spy.ranks[size_t(line)];
    const Colour colour = spy.colours.empty() ? kKeptColour : spy.colours[size_t(rank)];
    for (int64_t p = 0; p < spy.positions; ++p)
      if (bits.at(rank, p))
        report::fill(chart.image(), chart.left() + int(p * across), chart.top() + int(line * down),
                     int(across), int(down), colour);
  }
  return std::move(chart.image());
}

DistanceHistogram distance_histogram(const std::vector<std::pair<double, double>>& pairs, Range range,
                                     double step) {
  const int64_t steps = std::llround((range.high - range.low) / step) + 1;
  const int64_t per_bin = ceil_div(steps, kMostBins), bins = ceil_div(steps, per_bin);
  DistanceHistogram histogram{.low = range.low - step / 2,
                              .width = double(per_bin) * step,
                              .shares = std::vector<double>(size_t(bins))};
  double all = 0;
  for (const auto& [distance, count] : pairs) {
    const auto bin = int64_t((distance - histogram.low) / histogram.width);
    histogram.shares[size_t(std::clamp<int64_t>(bin, 0, bins - 1))] += count;
    all += count;
  }
  for (double& share : histogram.shares) share /= all;
  return histogram;
}

namespace {

class MatrixPictures {
 public:
  MatrixPictures(report::Database& database, const PictureMatrix& matrix, const Write& write)
      : database_(database), matrix_(matrix), write_(write) {}

  void density() const {
    const report::Table found =
        database_.run("SELECT height, width, density FROM maps WHERE matrix_id = ?1", {matrix_.id});
    if (found.rows.empty()) return;
    const int64_t height = integer_in(found.rows[0][0]), width = integer_in(found.rows[0][1]);
    const std::string text = text_in(found.rows[0][2]);
    check(height >= 1 && width >= 1, "sparsity.sqlite: a density map of ", height, " x ", width,
          "; it is damaged: run tessera sparsity analyze again");
    std::vector<double> kept;
    for (int64_t i = 0; i < height * width; ++i) kept.push_back(hexadecimal(text, size_t(2 * i), 2) / 255.0);
    const Range range = report::range_of(kept);
    const int64_t cell = std::max<int64_t>(6, 384 / std::max(height, width));
    Chart chart({.text = {title("kept shares"), "inputs", "outputs"},
                 .x = {0, double(matrix_.columns)},
                 .y = {double(matrix_.rows), 0},
                 .legend = report::heat_legend(range),
                 .width = int(cell * width),
                 .height = int(cell * height)});
    for (int64_t r = 0; r < height; ++r)
      for (int64_t c = 0; c < width; ++c)
        report::fill(chart.image(), chart.left() + int(c * cell), chart.top() + int(r * cell), int(cell),
                     int(cell),
                     report::heat((kept[size_t(r * width + c)] - range.low) / (range.high - range.low)));
    write("density", chart.image());
  }

  void spies(const MatrixBits& bits, const std::optional<int64_t>& feature) const {
    const std::vector<std::pair<std::string, Colour>> kept{{"kept", kKeptColour}};
    Spy spy{.text = {title("bits of the clustered features"), "position", "features by index"},
            .ranks = bits.by_index(),
            .positions = bits.length,
            .colours = {},
            .legend = kept};
    write("spy", spy_image(bits, spy));
    const auto chosen = feature ? std::ranges::find(bits.ids, *feature) : bits.ids.begin();
    const int64_t reference = chosen - bits.ids.begin();
    std::ranges::sort(spy.ranks, {}, [&](int64_t rank) {
      return std::tuple(bits.distance(reference, rank), rank != reference, rank);
    });
    spy.text = {title(fmt::format("Hamming distance to feature {}, {} to {} of {} positions",
                                  bits.ids[size_t(reference)],
                                  spy.ranks.size() > 1 ? bits.distance(reference, spy.ranks[1]) : 0,
                                  bits.distance(reference, spy.ranks.back()), bits.length)),
                "position", "nearest at the top"};
    write("hamming_gradient_spy", spy_image(bits, spy));
    for (const auto& [key, clusters] : labels()) {
      const auto& [source, k] = key;
      if (int64_t(clusters.size()) != bits.features) continue;
      spy.legend.clear(), spy.colours.clear();
      for (const int64_t cluster : clusters) spy.colours.push_back(report::palette(size_t(cluster)));
      for (int64_t cluster = 0; cluster < k; ++cluster)
        spy.legend.emplace_back(fmt::format("cluster {}: {}", cluster, std::ranges::count(clusters, cluster)),
                                report::palette(size_t(cluster)));
      std::ranges::sort(spy.ranks, {}, [&](int64_t rank) { return std::pair(clusters[size_t(rank)], rank); });
      spy.text = {title(fmt::format("sorted by {} clusters of {}", k, source)), "position",
                  "features by cluster"};
      write(fmt::format("k{}_spy{}", k, source == "masks" ? "" : "_" + source), spy_image(bits, spy));
    }
  }

  void tsne() const {
    const report::Table found = database_.run(
        "SELECT tsne_x, tsne_y, cluster_masks FROM features WHERE matrix_id = ?1 AND tsne_x IS NOT NULL "
        "ORDER BY "
        "gradient_rank",
        {matrix_.id});
    if (found.rows.empty()) return;
    std::vector<double> xs, ys;
    std::map<int64_t, int64_t> sizes;
    for (const auto& row : found.rows) {
      xs.push_back(number_in(row[0])), ys.push_back(number_in(row[1]));
      if (const auto* cluster = std::get_if<int64_t>(&row[2])) ++sizes[*cluster];
    }
    report::ChartOptions options{.text = {title("t-SNE of Hamming distances"), "t-SNE 1", "t-SNE 2"},
                                 .x = padded(xs),
                                 .y = padded(ys)};
    for (const auto& [cluster, size] : sizes)
      options.legend.emplace_back(fmt::format("cluster {}: {}", cluster, size),
                                  report::palette(size_t(cluster)));
    Chart chart(options);
    for (const auto& row : found.rows) {
      const auto* const cluster = std::get_if<int64_t>(&row[2]);
      chart.point(number_in(row[0]), number_in(row[1]), report::palette(cluster ? size_t(*cluster) : 0));
    }
    write("tsne", chart.image());
  }

  void distances() const {
    const report::Table found = database_.run(
        "SELECT distance, pairs FROM distances WHERE matrix_id = ?1 ORDER BY distance", {matrix_.id});
    if (found.rows.empty()) return;
    const double step = 1 / double(matrix_.length);
    std::vector<std::pair<double, double>> pairs;
    for (const auto& row : found.rows) pairs.emplace_back(number_in(row[0]) * step, number_in(row[1]));
    const DistanceHistogram histogram =
        distance_histogram(pairs, {pairs.front().first, pairs.back().first}, step);
    const Range x{histogram.low, histogram.low + histogram.width * double(histogram.shares.size())};
    const char* const label = "Hamming distance / length";
    Chart bars({.text = {title("distances of all pairs of the pool"), label, "share of pairs"},
                .x = x,
                .y = report::range_of(histogram.shares, true)});
    for (size_t bin = 0; bin < histogram.shares.size(); ++bin)
      bars.bar(histogram.low + histogram.width * double(bin),
               histogram.low + histogram.width * double(bin + 1), histogram.shares[bin], kKeptColour);
    write("hamming_dist", bars.image());
    Chart below({.text = {title("distances of all pairs of the pool"), label, "share of pairs up to it"},
                 .x = x,
                 .y = {0, 1}});
    double all = 0, sum = 0;
    for (const auto& [distance, count] : pairs) all += count;
    std::vector<std::pair<double, double>> points{{x.low, 0}};
    for (const auto& [distance, count] : pairs) points.emplace_back(distance, (sum += count) / all);
    below.line(points, report::palette(0));
    write("hamming_cdf", below.image());
  }

  void input_norms() const {
    const report::Table found = database_.run(
        "SELECT norm, density FROM input_norms WHERE matrix_id = ?1 ORDER BY column_index", {matrix_.id});
    if (found.rows.empty()) return;
    std::vector<double> norms, densities;
    for (const auto& row : found.rows)
      if (number_in(row[0]) > 0)  // inputs that are always 0 have no logarithm
        norms.push_back(std::log10(number_in(row[0]))), densities.push_back(number_in(row[1]));
    Chart chart(
        {.text = {title(fmt::format("Pearson {}, Spearman {}", report::number_text(matrix_.pearson, 3),
                                    report::number_text(matrix_.spearman, 3))),
                  "log10 of the norm of the input", "kept share of the column"},
         .x = padded(norms),
         .y = padded(densities)});
    for (size_t i = 0; i < norms.size(); ++i) chart.point(norms[i], densities[i], report::palette(0));
    write("input_norms", chart.image());
  }

 private:
  std::string title(const std::string& what) const {
    return report::shortened(matrix_.input, 24) + " " + report::shortened(matrix_.label, 36) + ": " + what;
  }
  void write(const std::string& what, const report::Image& image) const {
    write_(matrix_.stem + "-" + what, image);
  }
  /// So that points do not touch the axes.
  static Range padded(const std::vector<double>& values) {
    const Range range = report::range_of(values);
    const double room = (range.high - range.low) / 20;
    return {range.low - room, range.high + room};
  }
  /// Cluster of each feature, by (what they are of, k).
  std::map<std::pair<std::string, int64_t>, std::vector<int64_t>> labels() const {
    const report::Table found = database_.run(
        "SELECT source, k, cluster FROM cluster_labels WHERE matrix_id = ?1 ORDER BY source, k, "
        "gradient_rank",
        {matrix_.id});
    std::map<std::pair<std::string, int64_t>, std::vector<int64_t>> clusters;
    for (const auto& row : found.rows)
      clusters[{text_in(row[0]), integer_in(row[1])}].push_back(integer_in(row[2]));
    return clusters;
  }

  report::Database& database_;
  const PictureMatrix& matrix_;
  const Write& write_;
};

}  // namespace

void draw_matrix(report::Database& database, const PictureMatrix& matrix, const PictureOptions& options,
                 const Write& write, const Tell& tell) {
  const MatrixPictures pictures(database, matrix, write);
  pictures.density();
  if (const std::optional<MatrixBits> bits = bits_of(database, matrix.id)) {
    check(!options.feature || std::ranges::count(bits->ids, *options.feature) > 0, "export: --feature ",
          options.feature.value_or(0), " is not among the ", bits->features, " clustered features of '",
          matrix.name, "' in ", matrix.input, ", such as ", bits->ids.front(),
          "; table features has those with a gradient_rank; choose matrices with --only");
    pictures.spies(*bits, options.feature);
  } else {
    check(!options.feature, "export: --feature ", options.feature.value_or(0), ": the bits of '", matrix.name,
          "' in ", matrix.input, " are not in sparsity.sqlite; analyze fewer matrices with --only");
    tell(
        fmt::format("{}: {}: no spy plots: its bits are not in sparsity.sqlite; analyze fewer matrices with "
                    "--only",
                    matrix.input, matrix.name));
  }
  pictures.tsne();
  pictures.distances();
  pictures.input_norms();
}

}  // namespace tessera::sparsity::pictures

#include "sparsity/pattern_rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "eval/statistics.h"
#include "io/file.h"
#include "ops/bits/bits.h"
#include "runtime/interrupt.h"
#include "sparsity/pattern_bytes.h"

namespace tessera::sparsity {
namespace {

using report::TableCell;

constexpr int64_t kMapSide = 64, kNeighbours = 8, kMostBitsText = 24 << 20;

/// "model.layers.3.self_attn.k_proj": layer 3, projection "k_proj".
struct Place {
  int64_t layer = -1;
  std::string projection;
};
Place place_of(const std::string& name) {
  Place place;
  size_t begin = 0;
  while (begin <= name.size()) {
    const size_t end = std::min(name.find('.', begin), name.size());
    const std::string part = name.substr(begin, end - begin);
    const bool digits =
        !part.empty() && part.size() < 10 && part.find_first_not_of("0123456789") == std::string::npos;
    if (digits && place.layer < 0) place.layer = std::stoll(part);
    if (!digits) place.projection = part;
    begin = end + 1;
  }
  return place;
}

uint64_t hash_of(const std::string& text) {
  uint64_t hash = 0xCBF29CE484222325u;  // FNV-1a
  for (const char c : text) hash = (hash ^ uint8_t(c)) * 0x100000001B3u;
  return hash & 0xFFFF'FFFF'FFFFu;
}

/// Feature-major values of chosen features: [chosen, length] in f64.
Tensor values_of(const Tensor& weight, Axis axis, std::span<const int64_t> chosen) {
  if (!weight.defined()) return {};
  const Tensor features = axis == Axis::row ? weight : weight.transpose(0, 1);
  const Tensor values = Tensor::empty({int64_t(chosen.size()), features.size(1)}, DType::f64, Device::cpu());
  for (size_t i = 0; i < chosen.size(); ++i)
    values.select(0, int64_t(i)).copy_from(features.select(0, chosen[i]));
  return values;
}

void add_levels(PatternTables& tables, const char* subject, int64_t id, const Figures& figures,
                const std::vector<std::vector<ChanceLevel>>& levels) {
  for (size_t f = 0; f < figures.size(); ++f)
    for (size_t m = 0; m < levels[f].size(); ++m) {
      const ChanceLevel& level = levels[f][m];
      tables.nulls.push_back({std::string(subject), id, figures[f].first,
                              std::string(name_of(kNullModels[m])), finite_cell(figures[f].second),
                              level.draws, finite_cell(level.mean), finite_cell(level.sd),
                              finite_cell(level.low), finite_cell(level.high), finite_cell(level.effect),
                              finite_cell(level.p), TableCell(), TableCell()});
    }
}

/// All executions next to the same clustering of independent masks of the same density.
void add_executions(PatternTables& tables, const PatternPool& pool, const std::vector<Execution>& executions,
                    const PatternOptions& options) {
  std::map<int64_t, std::vector<Execution>> chance;  // by execution
  for (const Execution& execution : executions) {
    if (!chance.contains(execution.number)) {
      const Features drawn =
          draw_null(pool.features, NullModel::independent, options.seed + 1, uint64_t(execution.number));
      chance[execution.number] =
          cluster(drawn, overlaps_of(drawn), move_values(pool.values, drawn), options, execution.number);
    }
    const auto& drawn = chance[execution.number];
    const auto same = std::find_if(drawn.begin(), drawn.end(), [&](const Execution& other) {
      return other.source == execution.source && other.k == execution.k;
    });
    if (execution.number == 0)
      for (size_t rank = 0; rank < execution.clusters.labels.size(); ++rank)
        tables.labels.push_back({pool.id, std::string(name_of(execution.source)), execution.k, int64_t(rank),
                                 int64_t{execution.clusters.labels[rank]}});
    const Separation& s = execution.separation;
    tables.clusters.push_back({pool.id,
                               std::string(name_of(execution.source)),
                               execution.k,
                               execution.number,
                               sizes_text(s.sizes),
                               s.singletons,
                               finite_cell(s.ratio_pairs),
                               finite_cell(s.ratio_pairs_without_singletons),
                               finite_cell(s.within_pairs),
                               finite_cell(s.between_pairs),
                               finite_cell(s.ratio_means),
                               finite_cell(s.ratio_means_without_singletons),
                               finite_cell(s.within_means),
                               finite_cell(s.between_means),
                               execution.clusters.inertia,
                               s.balance,
                               finite_cell(execution.coherence),
                               finite_cell(same->separation.ratio_pairs),
                               same->separation.singletons,
                               finite_cell(same->separation.ratio_pairs_without_singletons)});
  }
}

void add_features(PatternTables& tables, const PatternPool& pool, const std::vector<Execution>& executions,
                  const PatternOptions& options) {
  const int64_t n = pool.features.count(), neighbours = std::min(kNeighbours, n - 1);
  const auto* const both = pool.overlaps.data<int32_t>();
  const std::vector<int64_t> members = clustered_features(both, n, options, 0);
  const auto count = int64_t(members.size());
  std::vector<int64_t> rank(size_t(n), -1);
  for (int64_t i = 0; i < count; ++i) rank[size_t(members[size_t(i)])] = i;
  Tsne map;
  if (count >= 4) {
    std::vector<double> squared;
    for (const int64_t i : members)
      for (const int64_t j : members) squared.push_back(double(hamming_from(both, n, i, j)));
    map = tsne(squared, count, {.perplexity = options.perplexity, .seed = options.seed});
  }
  const int64_t shown = options.clusters[options.clusters.size() / 2];
  const auto label = [&](ClusterSource source, int64_t at) -> TableCell {
    for (const Execution& execution : executions)
      if (execution.number == 0 && execution.k == shown && execution.source == source)
        return int64_t{execution.clusters.labels[size_t(at)]};
    return {};
  };
  const ops::NearestRows found = ops::nearest_bits(pool.features.bits, pool.features.bits, neighbours + 1);
  for (int64_t i = 0; i < n; ++i) {
    TableCell nearest, nearest_distance, norm, gradient_rank, of_masks, of_values, x, y;
    int64_t place = 0;
    for (int64_t entry = 0; entry <= neighbours && place < neighbours; ++entry) {
      const int64_t other = found.indices.data<int32_t>()[i * (neighbours + 1) + entry];
      if (other == i) continue;
      const int64_t distance = found.distances.data<int32_t>()[i * (neighbours + 1) + entry];
      if (place++ == 0) nearest = pool.chosen[size_t(other)], nearest_distance = distance;
      tables.neighbours.push_back(
          {pool.id, pool.chosen[size_t(i)], place, pool.chosen[size_t(other)], distance});
    }
    if (pool.values.defined()) {
      double squares = 0;
      for (int64_t j = 0; j < pool.values.size(1); ++j) {
        const double value = pool.values.data<double>()[i * pool.values.row_stride() + j];
        squares += value * value;
      }
      norm = std::sqrt(squares);
    }
    if (rank[size_t(i)] >= 0) {
      const int64_t at = rank[size_t(i)];
      gradient_rank = at, of_masks = label(ClusterSource::masks, at),
      of_values = label(ClusterSource::values, at);
      if (!map.x.empty()) x = finite_cell(map.x[size_t(at)]), y = finite_cell(map.y[size_t(at)]);
    }
    const int64_t kept = both[i * n + i];
    tables.features.push_back({pool.id, pool.chosen[size_t(i)], kept,
                               double(kept) / double(pool.features.length), norm, nearest, nearest_distance,
                               gradient_rank, of_masks, of_values, x, y});
  }
}

/// Kept shares of 64 x 64 parts of the matrix, in 255ths, and the bits of the clustered features.
void add_pictures(PatternTables& tables, const PatternPool& pool, const Mask& mask,
                  const PatternOptions& options) {
  const int64_t height = std::min(kMapSide, mask.rows()), width = std::min(kMapSide, mask.columns);
  std::vector<int64_t> kept(size_t(height * width)), all(size_t(height * width));
  const auto* const words = mask.words.data<int32_t>();
  for (int64_t r = 0; r < mask.rows(); ++r)
    for (int64_t c = 0; c < mask.columns; ++c) {
      const auto at = size_t(r * height / mask.rows() * width + c * width / mask.columns);
      kept[at] += uint32_t(words[r * mask.words.row_stride() + c / 32]) >> c % 32 & 1;
      ++all[at];
    }
  std::string density;
  for (size_t i = 0; i < kept.size(); ++i)
    density += fmt::format("{:02x}", int(std::lround(255.0 * double(kept[i]) / double(all[i]))));
  tables.maps.push_back({pool.id, height, width, density});

  const Features shown = pool.features.select(
      clustered_features(pool.overlaps.data<int32_t>(), pool.features.count(), options, 0));
  std::string text;
  for (int64_t i = 0; i < shown.count(); ++i)
    for (int64_t w = 0; w < shown.bits.size(1); ++w)
      text += fmt::format("{:08x}", uint32_t(shown.bits.data<int32_t>()[i * shown.bits.row_stride() + w]));
  if (tables.bits_text + text.size() > kMostBitsText) return;  // the rest of a large model has maps alone
  tables.bits_text += text.size();
  tables.bits.push_back({pool.id, shown.count(), shown.length, shown.bits.size(1), text});
}

/// The norm of each column's input next to the share of the column's weights that is kept, and their
/// correlations' chance levels.
void add_input_norms(PatternTables& tables, int64_t id, const Features& features, Axis axis,
                     const std::vector<double>& norms, const Figures& figures,
                     const PatternOptions& options) {
  const std::vector<int64_t> kept = column_counts(features, axis);
  const double rows = double(axis == Axis::row ? features.count() : features.length);
  for (size_t j = 0; j < kept.size(); ++j)
    tables.input_norms.push_back({id, int64_t(j), norms[j], kept[j], double(kept[j]) / rows});
  for (const auto& [statistic, value] : figures)
    tables.statistics.push_back({id, statistic, finite_cell(value)});
  add_levels(tables, "matrix", id, figures, norm_chance_levels(norms, features, axis, figures, options));
}

}  // namespace

PatternPool analyze_matrix(PatternTables& tables, const PatternSource& source, int64_t id,
                           const std::string& name, const Mask& mask, const AnalyzeOptions& options) {
  const PatternOptions& patterns = options.patterns;
  const Axis axis = options.axis_for(name);
  const Features all = features_of(mask, axis);
  check(all.count() >= 2 && all.length >= 1, "sparsity: '", io::shown(name), "' is ", mask.rows(), " x ",
        mask.columns, "; expected two features or more");
  Draws draws(patterns.seed, DrawFor::pool, hash_of(name));
  PatternPool pool;
  pool.id = id, pool.matrix = name;
  pool.chosen = draws.choose(all.count(), std::min(all.count(), patterns.pool));
  std::sort(pool.chosen.begin(), pool.chosen.end());
  pool.features = all.select(pool.chosen);
  pool.overlaps = overlaps_of(pool.features);
  pool.values = values_of(source.weight(name), axis, pool.chosen);

  const Place place = place_of(name);
  const Census census = census_of(all);
  const MaskInfo& info = source.masks().info;
  const std::vector<double> norms = source.input_norms(name);
  const Figures with_norms = norms.empty() ? Figures() : norm_figures(norms, all, axis);
  const auto correlation = [&](size_t figure) {
    return with_norms.empty() ? TableCell() : finite_cell(with_norms[figure].second);
  };
  tables.matrices.push_back({id,
                             source.name(),
                             info.method,
                             info.pattern,
                             info.sparsity,
                             name,
                             place.layer,
                             place.projection,
                             mask.rows(),
                             mask.columns,
                             std::string(name_of(axis)),
                             all.count(),
                             all.length,
                             mask.sparsity(),
                             census.zero,
                             census.one,
                             census.duplicate,
                             census.unique,
                             pool.features.count(),
                             int64_t{pool.values.defined()},
                             correlation(0),
                             correlation(1)});

  std::vector<Execution> executions;
  for (int64_t execution = 0; execution < patterns.executions; ++execution) {
    check_interrupt();
    for (Execution& done : cluster(pool.features, pool.overlaps, pool.values, patterns, execution))
      executions.push_back(std::move(done));
  }
  const Figures figures = figures_of(pool.features, pool.overlaps, executions, patterns);
  for (const auto& [statistic, value] : figures)
    tables.statistics.push_back({id, statistic, finite_cell(value)});
  add_levels(tables, "matrix", id, figures, chance_levels(pool.features, pool.values, figures, patterns));
  if (!norms.empty()) add_input_norms(tables, id, all, axis, norms, with_norms, patterns);
  add_executions(tables, pool, executions, patterns);
  add_features(tables, pool, executions, patterns);
  add_pictures(tables, pool, mask, patterns);
  for (const FormatBytes& one : format_bytes(mask))
    tables.bytes.push_back({id, one.format, one.bytes, one.of_dense, finite_cell(one.bound)});
  for (const SkippedBlocks& one : skipped_blocks(pool.features, pool.overlaps, patterns.group))
    tables.skipped.push_back({id, one.order, one.group, one.share, finite_cell(one.bound)});
  const Tensor histogram = ops::hamming_histogram(pool.features.bits);
  for (int64_t distance = 0; distance < histogram.count(); ++distance)
    if (const int64_t pairs = histogram.data<int64_t>()[distance]; pairs > 0)
      tables.distances.push_back({id, distance, pairs});
  return pool;
}

void add_pair(PatternTables& tables, const PatternPool& a, const PatternPool& b,
              const PatternOptions& options) {
  const PairMetrics metrics = compare_features(a.features, b.features);
  std::vector<std::pair<std::string, std::vector<double>>> all{
      {"jaccard", metrics.jaccard}, {"cosine", metrics.cosine}, {"hamming", metrics.hamming}};
  if (a.values.defined() && b.values.defined())
    all.emplace_back("value_cosine", value_cosine(a.values, b.values));
  Figures figures;
  const auto first = int64_t(tables.pairs.size());
  for (auto& [metric, values] : all) {
    const auto id = int64_t(tables.pairs.size()) + 1;
    const Summary summary = summarise(values);
    const Interval interval =
        bootstrap_mean(values, options.resamples, Draws(options.seed, DrawFor::bootstrap, uint64_t(id)));
    tables.pairs.push_back({id, a.id, b.id, a.matrix, metric, finite_cell(summary.mean),
                            finite_cell(summary.sd), finite_cell(summary.least), finite_cell(summary.largest),
                            finite_cell(interval.low), finite_cell(interval.high), int64_t(values.size())});
    std::sort(values.begin(), values.end());
    for (int share = 0; share <= 20; ++share)
      tables.quantiles.push_back({id, share / 20.0, finite_cell(quantile(values, share / 20.0))});
    figures.emplace_back(metric, summary.mean);
  }
  const auto levels = pair_chance_levels(a.features, b.features, a.values, b.values, figures, options);
  for (size_t f = 0; f < figures.size(); ++f)
    add_levels(tables, "pair", first + int64_t(f) + 1, {figures[f]}, {levels[f]});
}

void correct_levels(PatternTables::Rows& nulls) {
  std::map<std::tuple<std::string, std::string, std::string>, std::vector<size_t>> families;
  for (size_t i = 0; i < nulls.size(); ++i)
    families[{std::get<std::string>(nulls[i][0]), std::get<std::string>(nulls[i][2]),
              std::get<std::string>(nulls[i][3])}]
        .push_back(i);
  for (const auto& [family, members] : families) {
    std::vector<double> p;
    for (const size_t i : members) {
      const auto* const value = std::get_if<double>(&nulls[i][11]);
      p.push_back(value ? *value : std::numeric_limits<double>::quiet_NaN());
    }
    const std::vector<double> better = eval::holm(p);
    for (size_t n = 0; n < members.size(); ++n) {
      nulls[members[n]][12] = finite_cell(better[n]);
      if (std::isfinite(better[n])) nulls[members[n]][13] = int64_t{better[n] > eval::kLevel};
    }
  }
}

}  // namespace tessera::sparsity

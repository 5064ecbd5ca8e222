#include "sparsity/patterns.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <set>

#include "eval/statistics.h"
#include "io/file.h"
#include "io/safetensors.h"
#include "ops/bits/bits.h"
#include "report/database.h"
#include "runtime/interrupt.h"
#include "sparsity/pattern_bytes.h"
#include "sparsity/pattern_source.h"
#include "sparsity/pattern_tables.h"

namespace tessera::sparsity {
namespace {

namespace fs = std::filesystem;
using Value = report::TableCell;
using Table = std::vector<std::vector<Value>>;

constexpr int64_t kMapSide = 64, kNeighbours = 8, kMostBitsText = 24 << 20;
constexpr double kLevel = 0.05;  // of a corrected p-value

Value number(double value) {
  return std::isfinite(value) ? Value(value) : Value();
}

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

bool is_wanted(const std::string& name, const AnalyzeOptions& options) {
  return options.only.empty() ||
         std::any_of(options.only.begin(), options.only.end(),
                     [&](const std::string& part) { return name.find(part) != std::string::npos; });
}

Axis axis_for(const std::string& name, const AnalyzeOptions& options) {
  return options.axis ? *options.axis : axis_of(name);
}

/// Those that options.only names: what inputs must have in common.
Masks wanted_of(const Masks& masks, const AnalyzeOptions& options) {
  Masks wanted{.info = masks.info, .layers = {}};
  for (const auto& layer : masks.layers)
    if (is_wanted(layer.first, options)) wanted.layers.push_back(layer);
  return wanted;
}

/// The matrices of all inputs, checked to be of one model.
std::vector<PatternSource> open_inputs(const std::vector<std::string>& inputs,
                                       const AnalyzeOptions& options) {
  check(!inputs.empty(), "sparsity: no input; expected pruned model directories or files of masks");
  std::vector<PatternSource> sources;
  for (const std::string& input : inputs) {
    check_interrupt();
    check(std::count(inputs.begin(), inputs.end(), input) == 1, "sparsity: '", io::shown(input),
          "' is given twice; expected different inputs");
    sources.emplace_back(input);
    check_same_model(wanted_of(sources.front().masks(), options), wanted_of(sources.back().masks(), options));
  }
  std::map<std::string, int64_t> named;
  for (const PatternSource& source : sources) ++named[source.name()];
  for (PatternSource& source : sources)
    if (named[source.name()] > 1) source.use_whole_path();
  const auto& layers = sources.front().masks().layers;
  check(std::any_of(layers.begin(), layers.end(),
                    [&](const auto& layer) { return is_wanted(layer.first, options); }),
        "sparsity: --only leaves none of the ", layers.size(), " matrices; the first is '",
        layers.front().first, "'");
  return sources;
}

/// For the inputs without norms of their own. What they are of.
std::string add_dense_norms(std::vector<PatternSource>& sources, const DenseNorms& dense) {
  for (PatternSource& source : sources) {
    const std::string& fingerprint = source.masks().info.fingerprint;
    check(fingerprint.empty() || fingerprint == dense.fingerprint, "sparsity: the masks of ",
          io::shown(source.name()), " are of the model with the fingerprint ", io::shown(fingerprint),
          ", not ", dense.fingerprint, "; give --model the dense model that was pruned");
    if (!source.has_input_norms()) source.take_input_norms(dense.norms);
  }
  return dense.from;
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

/// The pool of one matrix in one input.
struct Pool {
  int64_t id = 0;
  std::string matrix;
  std::vector<int64_t> chosen;
  Features features;
  Tensor values, overlaps;
};

/// All tables, filled matrix by matrix.
struct Tables {
  Table matrices, features, neighbours, distances, clusters, labels, statistics, pairs, quantiles, nulls,
      perplexity, maps, bits, bytes, skipped, input_norms;
  size_t bits_text = 0;
  std::string norms_from;  // "": of no dense model
};

void add_levels(Tables& tables, const char* subject, int64_t id, const Figures& figures,
                const std::vector<std::vector<ChanceLevel>>& levels) {
  for (size_t f = 0; f < figures.size(); ++f)
    for (size_t m = 0; m < levels[f].size(); ++m) {
      const ChanceLevel& level = levels[f][m];
      tables.nulls.push_back({std::string(subject), id, figures[f].first,
                              std::string(name_of(kNullModels[m])), number(figures[f].second), level.draws,
                              number(level.mean), number(level.sd), number(level.low), number(level.high),
                              number(level.effect), number(level.p), Value(), Value()});
    }
}

/// Corrects p-values over all subjects with one statistic and null model.
void correct_levels(Table& nulls) {
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
      nulls[members[n]][12] = number(better[n]);
      if (std::isfinite(better[n])) nulls[members[n]][13] = int64_t{better[n] > kLevel};
    }
  }
}

std::string sizes_text(const std::vector<int64_t>& sizes) {
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : ",") + std::to_string(size);
  return text;
}

/// All executions next to the same clustering of independent masks of the same density.
void add_executions(Tables& tables, const Pool& pool, const std::vector<Execution>& executions,
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
                               number(s.ratio_pairs),
                               number(s.ratio_pairs_without_singletons),
                               number(s.within_pairs),
                               number(s.between_pairs),
                               number(s.ratio_means),
                               number(s.ratio_means_without_singletons),
                               number(s.within_means),
                               number(s.between_means),
                               execution.clusters.inertia,
                               s.balance,
                               number(execution.coherence),
                               number(same->separation.ratio_pairs),
                               same->separation.singletons,
                               number(same->separation.ratio_pairs_without_singletons)});
  }
}

void add_features(Tables& tables, const Pool& pool, const std::vector<Execution>& executions,
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
  const auto label = [&](ClusterSource source, int64_t at) -> Value {
    for (const Execution& execution : executions)
      if (execution.number == 0 && execution.k == shown && execution.source == source)
        return int64_t{execution.clusters.labels[size_t(at)]};
    return {};
  };
  const ops::NearestRows found = ops::nearest_bits(pool.features.bits, pool.features.bits, neighbours + 1);
  for (int64_t i = 0; i < n; ++i) {
    Value nearest, nearest_distance, norm, gradient_rank, of_masks, of_values, x, y;
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
      if (!map.x.empty()) x = number(map.x[size_t(at)]), y = number(map.y[size_t(at)]);
    }
    const int64_t kept = both[i * n + i];
    tables.features.push_back({pool.id, pool.chosen[size_t(i)], kept,
                               double(kept) / double(pool.features.length), norm, nearest, nearest_distance,
                               gradient_rank, of_masks, of_values, x, y});
  }
}

/// Kept shares of 64 x 64 parts of the matrix, in 255ths, and the bits of the clustered features.
void add_pictures(Tables& tables, const Pool& pool, const Mask& mask, const PatternOptions& options) {
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
void add_input_norms(Tables& tables, int64_t id, const Features& features, Axis axis,
                     const std::vector<double>& norms, const Figures& figures,
                     const PatternOptions& options) {
  const std::vector<int64_t> kept = column_counts(features, axis);
  const double rows = double(axis == Axis::row ? features.count() : features.length);
  for (size_t j = 0; j < kept.size(); ++j)
    tables.input_norms.push_back({id, int64_t(j), norms[j], kept[j], double(kept[j]) / rows});
  for (const auto& [statistic, value] : figures) tables.statistics.push_back({id, statistic, number(value)});
  add_levels(tables, "matrix", id, figures, norm_chance_levels(norms, features, axis, figures, options));
}

Pool analyze_matrix(Tables& tables, const PatternSource& source, int64_t id, const std::string& name,
                    const Mask& mask, const AnalyzeOptions& options) {
  const PatternOptions& patterns = options.patterns;
  const Axis axis = axis_for(name, options);
  const Features all = features_of(mask, axis);
  check(all.count() >= 2 && all.length >= 1, "sparsity: '", io::shown(name), "' is ", mask.rows(), " x ",
        mask.columns, "; expected two features or more");
  Draws draws(patterns.seed, DrawFor::pool, hash_of(name));
  Pool pool;
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
    return with_norms.empty() ? Value() : number(with_norms[figure].second);
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
  for (const auto& [statistic, value] : figures) tables.statistics.push_back({id, statistic, number(value)});
  add_levels(tables, "matrix", id, figures, chance_levels(pool.features, pool.values, figures, patterns));
  if (!norms.empty()) add_input_norms(tables, id, all, axis, norms, with_norms, patterns);
  add_executions(tables, pool, executions, patterns);
  add_features(tables, pool, executions, patterns);
  add_pictures(tables, pool, mask, patterns);
  for (const FormatBytes& one : format_bytes(mask))
    tables.bytes.push_back({id, one.format, one.bytes, one.of_dense, number(one.bound)});
  for (const SkippedBlocks& one : skipped_blocks(pool.features, pool.overlaps, patterns.group))
    tables.skipped.push_back({id, one.order, one.group, one.share, number(one.bound)});
  const Tensor histogram = ops::hamming_histogram(pool.features.bits);
  for (int64_t distance = 0; distance < histogram.count(); ++distance)
    if (const int64_t pairs = histogram.data<int64_t>()[distance]; pairs > 0)
      tables.distances.push_back({id, distance, pairs});
  return pool;
}

void add_pair(Tables& tables, const Pool& a, const Pool& b, const PatternOptions& options) {
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
    tables.pairs.push_back({id, a.id, b.id, a.matrix, metric, number(summary.mean), number(summary.sd),
                            number(summary.least), number(summary.largest), number(interval.low),
                            number(interval.high), int64_t(values.size())});
    std::sort(values.begin(), values.end());
    for (int share = 0; share <= 20; ++share)
      tables.quantiles.push_back({id, share / 20.0, number(quantile(values, share / 20.0))});
    figures.emplace_back(metric, summary.mean);
  }
  const auto levels = pair_chance_levels(a.features, b.features, a.values, b.values, figures, options);
  for (size_t f = 0; f < figures.size(); ++f)
    add_levels(tables, "pair", first + int64_t(f) + 1, {figures[f]}, {levels[f]});
}

/// "; no 64, 128 clusters of 32 features": numbers that cluster() leaves out; "" if there are none.
std::string skipped_text(const Pool& pool, const PatternOptions& options) {
  const int64_t count = std::min(pool.features.count(), options.nearest);
  std::vector<int64_t> skipped;
  for (const int64_t k : options.clusters)
    if (k > count) skipped.push_back(k);
  return skipped.empty() ? "" : fmt::format("; no {} clusters of {} features", sizes_text(skipped), count);
}

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

std::vector<View> views_of(const Table& matrices) {
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
void add_views(report::Database& database, const Table& matrices) {
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

std::string database_bytes(const Tables& tables, const AnalyzeOptions& options) {
  report::Database database = report::Database::in_memory();
  database.run("PRAGMA application_id = " + std::to_string(kPatternsId));
  database.run("PRAGMA user_version = " + std::to_string(kPatternsVersion));
  database.run("BEGIN");
  for (const char* const table : kTables) database.run(table);
  const PatternOptions& p = options.patterns;
  Table settings;
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
  const auto fill = [&](const char* table, const Table& rows) {
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

}  // namespace

void analyze(const std::vector<std::string>& inputs, const std::string& folder, const AnalyzeOptions& options,
             const std::function<void(const std::string&)>& tell) {
  options.patterns.validate();
  const fs::path database = fs::path(folder) / kPatternsFile;
  std::error_code ignored;
  check(!fs::exists(database, ignored) || report::application_id_of(database) == kPatternsId,
        "analyze: ", database.string(), " is not ", kPatternsWhat, "; name another folder");
  std::vector<PatternSource> sources = open_inputs(inputs, options);
  io::AtomicFolder files(folder, io::AtomicFolder::Existing::merge);
  Tables tables;
  if (options.dense_norms) tables.norms_from = add_dense_norms(sources, options.dense_norms());
  for (const PatternSource& source : sources)
    if (!source.has_input_norms())
      tell(
          fmt::format("{}: no {}, so nothing is said of input norms; tessera prune writes it if its method "
                      "reads samples, and analyze --model DENSE --text FILE measures them",
                      source.name(), kInputNormsFile));
  int64_t id = 0;
  for (const auto& [name, mask] : sources.front().masks().layers) {
    if (!is_wanted(name, options)) continue;
    std::vector<Pool> pools;
    for (const PatternSource& source : sources) {
      check_interrupt();
      pools.push_back(analyze_matrix(tables, source, ++id, name, source.masks().at(name), options));
      tell(fmt::format("{}: {}: sparsity {:.4f}{}", source.name(), name, source.masks().at(name).sparsity(),
                       skipped_text(pools.back(), options.patterns)));
    }
    for (size_t a = 0; a < pools.size(); ++a)
      for (size_t b = a + 1; b < pools.size(); ++b) add_pair(tables, pools[a], pools[b], options.patterns);
  }
  for (const PatternSource& source : sources)
    for (const auto& [text, value] : source.perplexities())
      tables.perplexity.push_back({source.name(), text, number(value)});
  correct_levels(tables.nulls);
  io::write_file((fs::path(files.path()) / kPatternsFile).string(), database_bytes(tables, options));
  files.publish();
}

std::vector<MatrixComparison> compare(const std::string& a, const std::string& b,
                                      const AnalyzeOptions& options) {
  const std::vector<PatternSource> sources = open_inputs({a, b}, options);
  std::vector<MatrixComparison> all;
  for (const auto& [name, mask] : sources[0].masks().layers) {
    if (!is_wanted(name, options)) continue;
    check_interrupt();
    const Axis axis = axis_for(name, options);
    const Mask& other = sources[1].masks().at(name);
    const PairMetrics metrics = compare_features(features_of(mask, axis), features_of(other, axis));
    all.push_back({name, axis, mask.sparsity(), other.sparsity(), summarise(metrics.jaccard),
                   summarise(metrics.cosine), summarise(metrics.hamming)});
  }
  return all;
}

}  // namespace tessera::sparsity

#include "sparsity/pattern_statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/interrupt.h"
#include "runtime/parallel.h"

namespace tessera::sparsity {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// Products and overlaps of some of the features.
template <class T>
std::vector<T> chosen_gemms(const T* all, int64_t n, std::span<const int64_t> chosen) {
  std::vector<T> products;
  products.reserve(chosen.size() * chosen.size());
  for (const int64_t i : chosen)
    for (const int64_t j : chosen) products.push_back(all[i * n + j]);
  return products;
}

double mean_of(const std::vector<double>& values) {
  return values.empty() ? kNan : summarise(values).mean;
}

void add_pair_distances(Figures& figures, const Features& pool, const Tensor& overlaps) {
  const int64_t n = pool.count();
  const auto* const both = overlaps.data<int32_t>();
  std::vector<double> hamming, jaccard, cosine;
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = i + 1; j < n; ++j) {
      const double shared = both[i * n + j], a = both[i * n + i], b = both[j * n + j],
                   either = a + b - shared;
      hamming.push_back((either - shared) / double(pool.length));
      jaccard.push_back(either == 0 ? 1 : shared / either);
      cosine.push_back(a == 0 || b == 0 ? double(a == b) : shared / std::sqrt(a * b));
    }
  const Summary distances = summarise(hamming);
  const double none = hamming.empty() ? kNan : 0;
  figures.emplace_back("hamming_mean", none + distances.mean);
  figures.emplace_back("hamming_sd", none + distances.sd);
  figures.emplace_back("hamming_min", none + distances.least);
  figures.emplace_back("hamming_max", none + distances.largest);
  figures.emplace_back("jaccard_mean", mean_of(jaccard));
  figures.emplace_back("cosine_mean", mean_of(cosine));
}

/// Each feature with its nearest ones: the mean distance, and the share of positions where all are pruned.
void add_nearest(Figures& figures, const Features& pool, const Tensor& overlaps, int64_t group) {
  const int64_t n = pool.count();
  const auto* const both = overlaps.data<int32_t>();
  std::vector<double> distances, coherences;
  for (int64_t i = 0; i < n && group <= n; ++i) {
    std::vector<std::pair<int64_t, int64_t>> others;
    for (int64_t j = 0; j < n; ++j)
      if (j != i) others.emplace_back(hamming_from(both, n, i, j), j);
    std::partial_sort(others.begin(), others.begin() + (group - 1), others.end());
    std::vector<int64_t> members{i};
    double sum = 0;
    for (int64_t rank = 0; rank + 1 < group; ++rank) {
      sum += double(others[size_t(rank)].first);
      members.push_back(others[size_t(rank)].second);
    }
    if (group > 1) distances.push_back(sum / double(group - 1) / double(pool.length));
    coherences.push_back(coherence_of(pool, members, group).front());
  }
  figures.emplace_back("nearest_distance", mean_of(distances));
  figures.emplace_back("nearest_coherence", mean_of(coherences));
  figures.emplace_back("exhaustive_coherence",
                       mean_of(coherence_of(pool, exhaustive_order(both, n, group), group)));
}

void add_clusters(Figures& figures, const Features& pool, const Execution& execution,
                  const std::vector<int64_t>& members, int64_t group) {
  const std::string suffix = "_k" + std::to_string(execution.k) + "_" + name_of(execution.source);
  const Separation& separation = execution.separation;
  const auto add = [&](const char* name, double value) { figures.emplace_back(name + suffix, value); };
  add("ratio_pairs", separation.ratio_pairs);
  add("ratio_pairs_without_singletons", separation.ratio_pairs_without_singletons);
  add("ratio_means", separation.ratio_means);
  add("ratio_means_without_singletons", separation.ratio_means_without_singletons);
  add("singletons", double(separation.singletons));
  add("balance", separation.balance);
  add("inertia", execution.clusters.inertia);
  const Features clustered = pool.select(members);
  const std::vector<int64_t> order = order_by_label(execution.clusters.labels);
  for (int64_t size = 2; size <= 16; ++size)
    if (size == group || execution.k == 8)
      add(("coherence" + std::to_string(size)).c_str(), mean_of(coherence_of(clustered, order, size)));
}

}  // namespace

void PatternOptions::validate() const {
  const auto positive = [](int64_t value, int64_t least, const char* flag) {
    check(value >= least, "sparsity: ", flag, " is ", value, "; expected ", least, " or more");
  };
  positive(pool, 2, "--pool"), positive(nearest, 2, "--nearest"), positive(starts, 1, "--starts");
  positive(executions, 1, "--executions"), positive(draws, 1, "--draws"),
      positive(resamples, 1, "--resamples");
  positive(group, 2, "--group");
  check(!clusters.empty(), "sparsity: --k is empty; expected numbers of clusters, as 4,8,16");
  for (const int64_t k : clusters) positive(k, 1, "--k");
  check(perplexity >= 1, "sparsity: --perplexity is ", perplexity, "; expected 1 or more");
}

const char* name_of(ClusterSource source) {
  return source == ClusterSource::masks ? "masks" : "values";
}

std::vector<int64_t> clustered_features(const int32_t* overlaps, int64_t n, const PatternOptions& options,
                                        int64_t number) {
  Draws draws(options.seed, DrawFor::reference, uint64_t(number));
  std::vector<int64_t> order = nearest_order(overlaps, n, draws.below(n));
  order.resize(size_t(std::min(n, options.nearest)));
  return order;
}

std::vector<Execution> cluster(const Features& pool, const Tensor& overlaps, const Tensor& values,
                               const PatternOptions& options, int64_t number) {
  const auto* const both = overlaps.data<int32_t>();
  const int64_t n = pool.count();
  const std::vector<int64_t> members = clustered_features(both, n, options, number);
  const auto count = int64_t(members.size());
  const std::vector<int32_t> products = chosen_gemms(both, n, members);
  std::vector<double> value_products;
  if (values.defined()) {
    const Tensor wide = values.to(DType::f64).with_rows();
    const Tensor chosen = Tensor::empty({count, values.size(1)}, DType::f64, Device::cpu());
    for (int64_t i = 0; i < count; ++i) chosen.select(0, i).copy_from(wide.select(0, members[size_t(i)]));
    value_products = inner_products(chosen);
  }
  std::vector<Execution> executions;
  for (const int64_t k : options.clusters)
    for (const ClusterSource source : {ClusterSource::masks, ClusterSource::values}) {
      if (k > count || (source == ClusterSource::values && !values.defined())) continue;
      const KMeansOptions k_means_options{
          .k = k, .starts = options.starts, .seed = options.seed + uint64_t(number) * 1'000'003};
      Execution execution;
      execution.source = source, execution.k = k, execution.number = number;
      execution.clusters = source == ClusterSource::masks
                               ? k_means(InnerProducts<int32_t>{products, count}, k_means_options)
                               : k_means(InnerProducts<double>{value_products, count}, k_means_options);
      execution.separation =
          separation_of({products, count}, execution.clusters.labels, k,
                        Draws(options.seed, DrawFor::cross_pairs, uint64_t(number) * 64 + uint64_t(k)));
      execution.coherence = mean_of(
          coherence_of(pool.select(members), order_by_label(execution.clusters.labels), options.group));
      executions.push_back(std::move(execution));
    }
  return executions;
}

Figures figures_of(const Features& pool, const Tensor& overlaps, const std::vector<Execution>& executions,
                   const PatternOptions& options) {
  Figures figures;
  add_pair_distances(figures, pool, overlaps);
  const Census census = census_of(pool);
  figures.emplace_back("zero_features", double(census.zero));
  figures.emplace_back("one_features", double(census.one));
  figures.emplace_back("duplicate_features", double(census.duplicate));
  figures.emplace_back("unique_features", double(census.unique));
  std::vector<double> at_positions, of_features;
  for (const int64_t count : position_counts(pool))
    at_positions.push_back(double(count) / double(pool.count()));
  for (int64_t i = 0; i < pool.count(); ++i)
    of_features.push_back(double(overlaps.data<int32_t>()[i * pool.count() + i]) / double(pool.length));
  figures.emplace_back("feature_density_sd", summarise(of_features).sd);
  figures.emplace_back("position_density_sd", summarise(at_positions).sd);
  add_nearest(figures, pool, overlaps, options.group);
  const std::vector<int64_t> members = clustered_features(overlaps.data<int32_t>(), pool.count(), options, 0);
  for (const Execution& execution : executions)
    if (execution.number == 0) add_clusters(figures, pool, execution, members, options.group);
  return figures;
}

Figures figures_of(const Features& pool, const Tensor& values, const PatternOptions& options) {
  const Tensor overlaps = overlaps_of(pool);
  return figures_of(pool, overlaps, cluster(pool, overlaps, values, options, 0), options);
}

Tensor move_values(const Tensor& values, const Features& mask) {
  if (!values.defined()) return {};
  const Tensor from = values.to(DType::f64).with_rows();
  const Tensor moved = Tensor::zeros({mask.count(), mask.length}, DType::f64, Device::cpu());
  std::vector<double> kept;
  for (int64_t i = 0; i < mask.count(); ++i) {
    kept.clear();
    const double* const row = from.data<double>() + i * from.row_stride();
    for (int64_t j = 0; j < mask.length; ++j)
      if (row[j] != 0) kept.push_back(row[j]);
    if (kept.empty()) continue;
    const auto* const bits = mask.bits.data<int32_t>() + i * mask.bits.row_stride();
    size_t next = 0;
    for (int64_t j = 0; j < mask.length; ++j)
      if (uint32_t(bits[j / 32]) >> j % 32 & 1)
        moved.data<double>()[i * moved.row_stride() + j] = kept[next++ % kept.size()];
  }
  return moved;
}

std::vector<std::vector<ChanceLevel>> levels_of(const Figures& observed, int64_t draws,
                                                std::span<const NullModel> models, const DrawFigures& draw) {
  std::vector<std::vector<ChanceLevel>> levels(observed.size());
  for (const NullModel model : models) {
    check_interrupt();
    std::vector<Figures> drawn(static_cast<size_t>(draws));
    parallel_for(draws, 1, [&](int64_t begin, int64_t end) {
      for (int64_t number = begin; number < end; ++number)
        drawn[size_t(number)] = draw(uint64_t(number), model);
    });
    for (size_t f = 0; f < observed.size(); ++f) {
      std::vector<double> values;
      for (const Figures& figures : drawn) values.push_back(figures[f].second);
      levels[f].push_back(chance_level(observed[f].second, std::move(values)));
    }
  }
  return levels;
}

std::vector<std::vector<ChanceLevel>> chance_levels(const Features& pool, const Tensor& values,
                                                    const Figures& observed, const PatternOptions& options) {
  return levels_of(observed, options.draws, kNullModels, [&](uint64_t number, NullModel model) {
    const Features drawn = draw_null(pool, model, options.seed, number);
    return figures_of(drawn, move_values(values, drawn), options);
  });
}

Figures pair_figures(const Features& a, const Features& b, const Tensor& values_a, const Tensor& values_b) {
  const PairMetrics metrics = compare_features(a, b);
  Figures figures{{"jaccard", mean_of(metrics.jaccard)},
                  {"cosine", mean_of(metrics.cosine)},
                  {"hamming", mean_of(metrics.hamming)}};
  if (values_a.defined() && values_b.defined())
    figures.emplace_back("value_cosine", mean_of(value_cosine(values_a, values_b)));
  return figures;
}

std::vector<std::vector<ChanceLevel>> pair_chance_levels(const Features& a, const Features& b,
                                                         const Tensor& values_a, const Tensor& values_b,
                                                         const Figures& observed,
                                                         const PatternOptions& options) {
  return levels_of(observed, options.draws, kNullModels, [&](uint64_t number, NullModel model) {
    const Features drawn = draw_null(b, model, options.seed, number);
    return pair_figures(a, drawn, values_a, values_a.defined() ? move_values(values_b, drawn) : Tensor());
  });
}

}  // namespace tessera::sparsity

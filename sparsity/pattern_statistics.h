#pragma once

#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "sparsity/clusters.h"
#include "sparsity/features.h"
#include "sparsity/nulls.h"

/// The figures of one mask's pattern: computed the same way of an observed mask and of the draws that give
/// their chance level.

namespace tessera::sparsity {

struct PatternOptions {
  int64_t pool = 512;                          // features that are looked at, drawn from all
  int64_t nearest = 128;                       // of them, those nearest to a random reference are clustered
  std::vector<int64_t> clusters = {4, 8, 16};  // k of k-means
  int64_t starts = 10;                         // of k-means
  int64_t executions = 10;                     // of the clustering, each with its own reference and seed
  int64_t draws = 200;                         // of each null model
  int64_t resamples = 1000;                    // of a bootstrap
  int64_t group = 8;                           // features of a group, for nearest and exhaustive grouping
  double perplexity = 30;                      // of t-SNE
  uint64_t seed = 42;

  /// Throws, naming the flag, for what cannot be.
  void validate() const;
};

/// A figure by its name, such as "ratio_pairs_k8_masks".
using Figures = std::vector<std::pair<std::string, double>>;

/// What k-means is fitted on: distances between clusters are measured on masks either way.
enum class ClusterSource : uint8_t { masks, values };
const char* name_of(ClusterSource source);

/// One execution of the clustering.
struct Execution {
  ClusterSource source = ClusterSource::masks;
  int64_t k = 0, number = 0;
  Clusters clusters;
  Separation separation;
  double coherence = 0;  // groups of options.group, features sorted by cluster
};

/// The nearest features to the reference of execution `number`, the reference first.
std::vector<int64_t> clustered_features(const int32_t* overlaps, int64_t n, const PatternOptions& options,
                                        int64_t number);
/// Clusters features of the pool, by masks and, if `values` [pool, length] is defined, by values; a k that
/// exceeds the features is left out.
std::vector<Execution> cluster(const Features& pool, const Tensor& overlaps, const Tensor& values,
                               const PatternOptions& options, int64_t number);

/// All figures of a pool. `executions`: those of execution 0.
Figures figures_of(const Features& pool, const Tensor& overlaps, const std::vector<Execution>& executions,
                   const PatternOptions& options);
/// The same from the beginning, for draws.
Figures figures_of(const Features& pool, const Tensor& values, const PatternOptions& options);

/// Values of features [n, length] in which each feature's values that are not zero stand, in their order
/// (from the first again if they do not suffice), where `mask` keeps a position.
Tensor move_values(const Tensor& values, const Features& mask);

/// The figures of draw `number` under a null model.
using DrawFigures = std::function<Figures(uint64_t number, NullModel model)>;
/// Chance levels of figures by `draws` draws under each of the models: [figure][model]. `draw` is called from
/// several threads.
std::vector<std::vector<ChanceLevel>> levels_of(const Figures& observed, int64_t draws,
                                                std::span<const NullModel> models, const DrawFigures& draw);

/// Each figure's chance levels under the three null models: [figure][model].
std::vector<std::vector<ChanceLevel>> chance_levels(const Features& pool, const Tensor& values,
                                                    const Figures& observed, const PatternOptions& options);

// ---- two masks of one matrix ----

/// Means over features of two pools: jaccard, cosine, hamming, and value_cosine if both have values.
Figures pair_figures(const Features& a, const Features& b, const Tensor& values_a, const Tensor& values_b);
/// Chance levels of those: b is drawn, a stays.
std::vector<std::vector<ChanceLevel>> pair_chance_levels(const Features& a, const Features& b,
                                                         const Tensor& values_a, const Tensor& values_b,
                                                         const Figures& observed,
                                                         const PatternOptions& options);

}  // namespace tessera::sparsity

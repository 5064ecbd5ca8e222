#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sparsity/draws.h"
#include "tensor/tensor.h"

/// k-means and t-SNE of features, from their inner products alone: |x - c|^2 of a point and of the mean c of
/// some points is x.x - 2 mean(x.y) + mean(y.z). So an iteration does not depend on the length of a feature,
/// the points may be masks (products are counts of common bits, exact) or values, and moving a point to
/// another cluster costs one row of the products.

namespace tessera::sparsity {

/// Inner products of n points, [n, n]; T is int32_t (masks) or double (values).
template <class T>
struct InnerProducts {
  std::span<const T> values;
  int64_t n = 0;
  const T* row(int64_t i) const { return values.data() + i * n; }
};
/// x x^T of [n, d] in f64.
std::vector<double> inner_products(const Tensor& x);

struct KMeansOptions {
  int64_t k = 8;
  int64_t starts = 10;       // the best of so many
  int64_t iterations = 300;  // at most, of each start
  uint64_t seed = 42;
};
struct Clusters {
  std::vector<int32_t> labels;  // 0 ... k - 1
  double inertia = 0;           // sum of squared distances of points to the means of their clusters
  int64_t iterations = 0;       // of the start that was kept
};
/// k-means++ (Arthur, Vassilvitskii, SODA 2007) with the best of 2 + ln k candidates for each centre, then
/// Lloyd's iterations until no label changes. Ties go to the lowest cluster, and the first of equal inertias
/// is kept. A cluster that loses all its points gets the point that is farthest from the mean of its own.
/// Throws unless 1 <= k <= n and starts >= 1.
template <class T>
Clusters k_means(const InnerProducts<T>& points, const KMeansOptions& options);
/// From given points as centres.
template <class T>
Clusters k_means_from(const InnerProducts<T>& points, std::span<const int64_t> centres, int64_t iterations);

/// How far clusters lie apart, in the two ways that are in use. A ratio of 0 / 0 or x / 0 is NaN.
struct Separation {
  // Hamming distances: within, the mean over clusters of the mean pairwise distance, a singleton counting 0;
  // between, the mean over pairs of clusters of the mean of at most 50 sampled distances.
  double within_pairs = 0, between_pairs = 0, ratio_pairs = 0;
  double ratio_pairs_without_singletons = 0;  // the same over clusters of two points or more
  // Euclidean distances: within, of points to the mean of their cluster; between, of means.
  double within_means = 0, between_means = 0, ratio_means = 0;
  double ratio_means_without_singletons = 0;
  int64_t singletons = 0;
  double balance = 0;  // points of the smallest cluster / of the largest
  std::vector<int64_t> sizes;
};
/// Of masks with these overlaps, [n, n], and any labels of theirs.
Separation separation_of(const InnerProducts<int32_t>& overlaps, std::span<const int32_t> labels, int64_t k,
                         Draws draws);

/// Indices sorted by label, then index.
std::vector<int64_t> order_by_label(std::span<const int32_t> labels);

struct TsneOptions {
  double perplexity = 30;  // at most (n - 1) / 3 is used
  int64_t iterations = 2000;
  int64_t starts = 8;  // maps differ by their local minimum: the best is kept
  uint64_t seed = 42;
};
struct Tsne {
  std::vector<double> x, y;
  double divergence = 0;  // Kullback-Leibler, of the map
};
/// Exact t-SNE (van der Maaten, Hinton, JMLR 9, 2008) from squared distances [n, n], with early exaggeration
/// 12 for a quarter of the iterations. The first start begins with the first two principal coordinates, the
/// others at random.
Tsne tsne(std::span<const double> squared_distances, int64_t n, const TsneOptions& options);

}  // namespace tessera::sparsity

#include "sparsity/clusters.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "ops/gemm/inner_products.h"
#include "runtime/error.h"
#include "runtime/parallel.h"

namespace tessera::sparsity {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

template <class T>
struct SumOf;
template <>
struct SumOf<int32_t> {
  using Type = int64_t;
};
template <>
struct SumOf<double> {
  using Type = double;
};

/// Labels, and for each cluster the sums of inner products that distances are made of.
template <class T>
class Lloyd {
 public:
  using Sum = typename SumOf<T>::Type;

  Lloyd(const InnerProducts<T>& points, std::span<const int64_t> centres)
      : points_(points),
        k_(int64_t(centres.size())),
        labels_(size_t(points.n)),
        best_(size_t(points.n)),
        sums_(size_t(points.n * k_)),
        sizes_(size_t(k_)) {
    for (int64_t c = 0; c < k_; ++c) {
      const T* const row = points.row(centres[size_t(c)]);
      std::copy(row, row + points.n, sum(c));
      nearest(c, double(row[centres[size_t(c)]]), 1);
    }
    std::fill(sums_.begin(), sums_.end(), Sum{});
    labels_ = next_;
    for (int64_t i = 0; i < points.n; ++i) add(labels_[size_t(i)], i, Sum{1});
    refill();
  }

  /// One iteration; whether a label changed.
  bool step() {
    for (int64_t c = 0; c < k_; ++c) nearest(c, of_mean(c), double(sizes_[size_t(c)]));
    bool changed = false;
    for (int64_t i = 0; i < points_.n; ++i) changed = move(i, next_[size_t(i)]) || changed;
    return refill() || changed;
  }

  double inertia() const {
    double sum_of_squares = 0;
    for (int64_t i = 0; i < points_.n; ++i) sum_of_squares += double(points_.row(i)[i]);
    for (int64_t c = 0; c < k_; ++c)
      if (sizes_[size_t(c)] > 0) sum_of_squares -= double(total(c)) / double(sizes_[size_t(c)]);
    return std::max(sum_of_squares, 0.0);
  }
  const std::vector<int32_t>& labels() const { return labels_; }

 private:
  Sum* sum(int64_t c) { return sums_.data() + c * points_.n; }
  const Sum* sum(int64_t c) const { return sums_.data() + c * points_.n; }
  /// Sum of the inner products of all pairs of a cluster's points.
  Sum total(int64_t c) const {
    Sum all{};
    for (int64_t i = 0; i < points_.n; ++i)
      if (labels_[size_t(i)] == c) all += sum(c)[i];
    return all;
  }
  double of_mean(int64_t c) const {
    const double size = double(sizes_[size_t(c)]);
    return double(total(c)) / (size * size);
  }
  /// Looks at cluster c as the nearest of each point; x.x is left out.
  void nearest(int64_t c, double square, double size) {
    if (c == 0) next_.assign(size_t(points_.n), 0);
    const Sum* const of_cluster = sum(c);
    const double scale = -2 / size;
    for (int64_t i = 0; i < points_.n; ++i) {
      const double distance = square + scale * double(of_cluster[i]);
      if (c > 0 && !(distance < best_[size_t(i)])) continue;
      best_[size_t(i)] = distance;
      next_[size_t(i)] = int32_t(c);
    }
  }
  void add(int64_t c, int64_t i, Sum sign) {
    const T* const row = points_.row(i);
    Sum* const to = sum(c);
    for (int64_t j = 0; j < points_.n; ++j) to[j] += sign * Sum(row[j]);
    sizes_[size_t(c)] += int64_t(sign);
  }
  bool move(int64_t i, int32_t c) {
    if (labels_[size_t(i)] == c) return false;
    add(labels_[size_t(i)], i, Sum(-1));
    labels_[size_t(i)] = c;
    add(c, i, Sum{1});
    return true;
  }
  /// Gives each empty cluster the point that is farthest from its own mean.
  bool refill() {
    bool filled = false;
    for (int64_t c = 0; c < k_; ++c) {
      if (sizes_[size_t(c)] > 0) continue;
      std::vector<double> means(size_t(k_), 0.0);
      for (int64_t other = 0; other < k_; ++other)
        if (sizes_[size_t(other)] > 0) means[size_t(other)] = of_mean(other);
      int64_t farthest = -1;
      double most = -1;
      for (int64_t i = 0; i < points_.n; ++i) {
        const auto own = size_t(labels_[size_t(i)]);
        if (sizes_[own] < 2) continue;
        const double distance =
            double(points_.row(i)[i]) + means[own] - 2 * double(sum(int64_t(own))[i]) / double(sizes_[own]);
        if (distance > most) most = distance, farthest = i;
      }
      if (farthest < 0 || most <= 0) return filled;  // fewer distinct points than clusters
      filled = move(farthest, int32_t(c)) || filled;
    }
    return filled;
  }

  const InnerProducts<T>& points_;
  int64_t k_;
  std::vector<int32_t> labels_, next_;
  std::vector<double> best_;
  std::vector<Sum> sums_;  // [k, n]: of each point with the cluster's points
  std::vector<int64_t> sizes_;
};

/// Squared distance of points i and j.
template <class T>
double squared(const InnerProducts<T>& points, int64_t i, int64_t j) {
  return double(points.row(i)[i]) + double(points.row(j)[j]) - 2 * double(points.row(i)[j]);
}

template <class T>
std::vector<int64_t> draw_centres(const InnerProducts<T>& points, int64_t k, Draws& draws) {
  const int64_t n = points.n, trials = 2 + int64_t(std::log(double(k)));
  std::vector<int64_t> centres{draws.below(n)};
  std::vector<double> closest(static_cast<size_t>(n)), tried(static_cast<size_t>(n)),
      best(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) closest[size_t(i)] = std::max(0.0, squared(points, i, centres[0]));
  while (int64_t(centres.size()) < k) {
    const double all = std::accumulate(closest.begin(), closest.end(), 0.0);
    int64_t chosen = -1;
    double least = std::numeric_limits<double>::infinity();
    for (int64_t trial = 0; trial < trials; ++trial) {
      double rest = draws.uniform() * all;
      int64_t candidate = 0;
      for (; candidate + 1 < n && (rest -= closest[size_t(candidate)]) >= 0; ++candidate) {
      }
      double potential = 0;
      for (int64_t i = 0; i < n; ++i)
        potential += tried[size_t(i)] =
            std::min(closest[size_t(i)], std::max(0.0, squared(points, i, candidate)));
      if (potential < least) least = potential, chosen = candidate, best = tried;
    }
    centres.push_back(chosen);
    closest = best;
  }
  return centres;
}

/// The mean of what is added, NaN of nothing.
class Mean {
 public:
  void add(double value) { sum_ += value, ++count_; }
  double value() const { return count_ == 0 ? kNan : sum_ / double(count_); }

 private:
  double sum_ = 0;
  int64_t count_ = 0;
};

double ratio(double between, double within) {
  return within > 0 ? between / within : kNan;
}

}  // namespace

std::vector<double> inner_products(const Tensor& x) {
  const Tensor products = Tensor::zeros({x.size(0), x.size(0)}, DType::f64, Device::cpu());
  ops::add_gram(products, x.to(DType::f64).transpose(0, 1).clone());
  return products.to_vector<double>();
}

template <class T>
Clusters k_means_from(const InnerProducts<T>& points, std::span<const int64_t> centres, int64_t iterations) {
  check(!centres.empty() && int64_t(centres.size()) <= points.n, "k-means: k = ", centres.size(), " of ",
        points.n, " points; expected 1 to ", points.n);
  Lloyd<T> lloyd(points, centres);
  int64_t done = 0;
  while (done < iterations && lloyd.step()) ++done;
  return {lloyd.labels(), lloyd.inertia(), done};
}

template <class T>
Clusters k_means(const InnerProducts<T>& points, const KMeansOptions& options) {
  check(1 <= options.k && options.k <= points.n, "k-means: k = ", options.k, " of ", points.n,
        " points; expected 1 to ", points.n);
  check(options.starts >= 1, "k-means: ", options.starts, " starts; expected 1 or more");
  std::vector<Clusters> runs(static_cast<size_t>(options.starts));
  parallel_for(options.starts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t start = begin; start < end; ++start) {
      Draws draws(options.seed, DrawFor::clusters, uint64_t(start));
      runs[size_t(start)] = k_means_from(points, draw_centres(points, options.k, draws), options.iterations);
    }
  });
  return *std::min_element(runs.begin(), runs.end(),
                           [](const Clusters& a, const Clusters& b) { return a.inertia < b.inertia; });
}

template Clusters k_means(const InnerProducts<int32_t>&, const KMeansOptions&);
template Clusters k_means(const InnerProducts<double>&, const KMeansOptions&);
template Clusters k_means_from(const InnerProducts<int32_t>&, std::span<const int64_t>, int64_t);
template Clusters k_means_from(const InnerProducts<double>&, std::span<const int64_t>, int64_t);

Separation separation_of(const InnerProducts<int32_t>& overlaps, std::span<const int32_t> labels, int64_t k,
                         Draws draws) {
  constexpr int64_t kMostSampled = 50;
  std::vector<std::vector<int64_t>> members(static_cast<size_t>(k));
  for (size_t i = 0; i < labels.size(); ++i) members[size_t(labels[i])].push_back(int64_t(i));
  std::erase_if(members, [](const auto& cluster) { return cluster.empty(); });
  const auto count = int64_t(members.size());
  // Sums of the overlaps of the points of two clusters.
  std::vector<double> sums(static_cast<size_t>(count * count));
  for (int64_t a = 0; a < count; ++a)
    for (int64_t b = 0; b < count; ++b)
      for (const int64_t i : members[size_t(a)])
        for (const int64_t j : members[size_t(b)]) sums[size_t(a * count + b)] += overlaps.row(i)[j];
  const auto mean_product = [&](int64_t a, int64_t b) {
    return sums[size_t(a * count + b)] /
           (double(members[size_t(a)].size()) * double(members[size_t(b)].size()));
  };
  Separation found;
  Mean within_pairs, within_pairs_larger, within_means, within_means_larger;
  for (int64_t a = 0; a < count; ++a) {
    const auto& cluster = members[size_t(a)];
    const bool single = cluster.size() == 1;
    found.sizes.push_back(int64_t(cluster.size()));
    found.singletons += single;
    Mean pairs;
    for (size_t p = 0; p < cluster.size(); ++p)
      for (size_t q = 0; q < p; ++q) pairs.add(squared(overlaps, cluster[p], cluster[q]));
    within_pairs.add(single ? 0 : pairs.value());
    if (!single) within_pairs_larger.add(pairs.value());
    for (const int64_t i : cluster) {
      double product = 0;
      for (const int64_t j : cluster) product += overlaps.row(i)[j];
      const double distance = std::sqrt(std::max(
          0.0, double(overlaps.row(i)[i]) - 2 * product / double(cluster.size()) + mean_product(a, a)));
      within_means.add(distance);
      if (!single) within_means_larger.add(distance);
    }
  }
  Mean between_pairs, between_pairs_larger, between_means, between_means_larger;
  for (int64_t a = 0; a < count; ++a)
    for (int64_t b = a + 1; b < count; ++b) {
      const auto &p = members[size_t(a)], &q = members[size_t(b)];
      const bool larger = p.size() > 1 && q.size() > 1;
      Mean cross;
      if (int64_t(p.size() * q.size()) <= kMostSampled) {
        for (const int64_t i : p)
          for (const int64_t j : q) cross.add(squared(overlaps, i, j));
      } else {
        for (int64_t sample = 0; sample < kMostSampled; ++sample) {
          const int64_t i = p[size_t(draws.below(int64_t(p.size())))];
          cross.add(squared(overlaps, i, q[size_t(draws.below(int64_t(q.size())))]));
        }
      }
      between_pairs.add(cross.value());
      const double distance =
          std::sqrt(std::max(0.0, mean_product(a, a) + mean_product(b, b) - 2 * mean_product(a, b)));
      between_means.add(distance);
      if (larger) between_pairs_larger.add(cross.value()), between_means_larger.add(distance);
    }
  found.within_pairs = within_pairs.value(), found.between_pairs = between_pairs.value();
  found.ratio_pairs = ratio(found.between_pairs, found.within_pairs);
  found.ratio_pairs_without_singletons = ratio(between_pairs_larger.value(), within_pairs_larger.value());
  found.within_means = within_means.value(), found.between_means = between_means.value();
  found.ratio_means = ratio(found.between_means, found.within_means);
  found.ratio_means_without_singletons = ratio(between_means_larger.value(), within_means_larger.value());
  std::sort(found.sizes.rbegin(), found.sizes.rend());
  found.balance = double(found.sizes.back()) / double(found.sizes.front());
  return found;
}

std::vector<int64_t> order_by_label(std::span<const int32_t> labels) {
  std::vector<int64_t> order(labels.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t i, int64_t j) { return labels[size_t(i)] < labels[size_t(j)]; });
  return order;
}

}  // namespace tessera::sparsity

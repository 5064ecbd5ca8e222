#include "sparsity/features.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <string_view>

#include "ops/bits/bits.h"

namespace tessera::sparsity {
namespace {

const uint32_t* row_of(const Features& features, int64_t index) {
  return static_cast<const uint32_t*>(features.bits.raw()) + index * features.bits.row_stride();
}

double cosine_from(double both, double a, double b) {
  if (a == 0 || b == 0) return a == b ? 1 : 0;
  return both / std::sqrt(a * b);
}

}  // namespace

const char* name_of(Axis axis) {
  return axis == Axis::column ? "column" : "row";
}

Axis axis_of(const std::string& module) {
  for (const std::string_view end : {"down_proj", "fc2", "mlp.c_proj", "mlp.w2"})
    if (module.ends_with(end)) return Axis::row;
  return Axis::column;
}

double Features::density() const {
  const Tensor counts = ops::count_bits(bits);
  const auto* const ones = counts.data<int32_t>();
  const int64_t sum = std::accumulate(ones, ones + count(), int64_t{0});
  return count() * length == 0 ? 0 : double(sum) / double(count() * length);
}

Features Features::select(std::span<const int64_t> indices) const {
  const Features chosen{Tensor::empty({int64_t(indices.size()), bits.size(1)}, DType::i32, Device::cpu()),
                        length};
  auto* const to = chosen.bits.data<int32_t>();
  for (size_t i = 0; i < indices.size(); ++i)
    std::memcpy(to + int64_t(i) * chosen.bits.row_stride(), row_of(*this, indices[i]),
                size_t(bits.size(1)) * 4);
  return chosen;
}

Features features_of(const Mask& mask, Axis axis) {
  if (axis == Axis::row) return {mask.words, mask.columns};
  return {ops::transpose_bits(mask.words, mask.columns), mask.rows()};
}

Summary summarise(std::span<const double> values) {
  if (values.empty()) return {};
  Summary summary;
  summary.mean = std::accumulate(values.begin(), values.end(), 0.0) / double(values.size());
  double squares = 0;
  for (const double value : values) squares += (value - summary.mean) * (value - summary.mean);
  summary.sd = values.size() < 2 ? 0 : std::sqrt(squares / double(values.size() - 1));
  const auto [least, largest] = std::minmax_element(values.begin(), values.end());
  summary.least = *least, summary.largest = *largest;
  return summary;
}

PairMetrics compare_features(const Features& a, const Features& b) {
  check(a.count() == b.count() && a.length == b.length, "compare: masks of ", a.count(), " features of ",
        a.length, " and ", b.count(), " of ", b.length, " positions; expected two masks of one matrix");
  PairMetrics metrics;
  for (int64_t i = 0; i < a.count(); ++i) {
    const uint32_t *x = row_of(a, i), *y = row_of(b, i);
    int64_t both = 0, of_a = 0, of_b = 0;
    for (int64_t w = 0; w < a.bits.size(1); ++w) {
      both += std::popcount(x[w] & y[w]);
      of_a += std::popcount(x[w]), of_b += std::popcount(y[w]);
    }
    const int64_t either = of_a + of_b - both;
    metrics.jaccard.push_back(either == 0 ? 1 : double(both) / double(either));
    metrics.cosine.push_back(cosine_from(double(both), double(of_a), double(of_b)));
    metrics.hamming.push_back(double(either - both) / double(a.length));
  }
  return metrics;
}

std::vector<double> value_cosine(const Tensor& a, const Tensor& b) {
  check(a.rank() == 2 && a.shape() == b.shape(), "value_cosine: a is ", describe(a), ", b is ", describe(b),
        "; expected two matrices of one shape");
  const Tensor x = a.to(DType::f64).with_rows(), y = b.to(DType::f64).with_rows();
  std::vector<double> cosines;
  for (int64_t i = 0; i < x.size(0); ++i) {
    const double *p = x.data<double>() + i * x.row_stride(), *q = y.data<double>() + i * y.row_stride();
    double both = 0, of_a = 0, of_b = 0;
    for (int64_t j = 0; j < x.size(1); ++j) both += p[j] * q[j], of_a += p[j] * p[j], of_b += q[j] * q[j];
    cosines.push_back(cosine_from(both, of_a, of_b));
  }
  return cosines;
}

Census census_of(const Features& features) {
  Census census;
  std::map<std::string_view, int64_t> seen;
  for (int64_t i = 0; i < features.count(); ++i) {
    const uint32_t* const row = row_of(features, i);
    int64_t ones = 0;
    for (int64_t w = 0; w < features.bits.size(1); ++w) ones += std::popcount(row[w]);
    census.zero += ones == 0, census.one += ones == features.length;
    census.duplicate += seen[{reinterpret_cast<const char*>(row), size_t(features.bits.size(1)) * 4}]++ > 0;
  }
  for (const auto& [row, times] : seen) census.unique += times == 1;
  return census;
}

std::vector<int64_t> position_counts(const Features& features) {
  const Tensor counts = ops::count_bits(ops::transpose_bits(features.bits, features.length));
  const auto* const from = counts.data<int32_t>();
  return {from, from + counts.count()};
}

Tensor overlaps_of(const Features& features) {
  return ops::bit_pairs(features.bits, features.bits).packed();
}

std::vector<double> coherence_of(const Features& features, std::span<const int64_t> order, int64_t group) {
  std::vector<double> shares;
  const int64_t words = features.bits.size(1);
  for (size_t first = 0; first + size_t(group) <= order.size(); first += size_t(group)) {
    int64_t kept = 0;
    for (int64_t w = 0; w < words; ++w) {
      uint32_t any = 0;
      for (int64_t i = 0; i < group; ++i) any |= row_of(features, order[first + size_t(i)])[w];
      kept += std::popcount(any);
    }
    shares.push_back(1 - double(kept) / double(features.length));
  }
  return shares;
}

std::vector<int64_t> nearest_order(const int32_t* overlaps, int64_t n, int64_t reference) {
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) {
    const int64_t a = hamming_from(overlaps, n, reference, i), b = hamming_from(overlaps, n, reference, j);
    return a != b ? a < b : i == reference && j != reference;
  });
  return order;
}

std::vector<int64_t> exhaustive_order(const int32_t* overlaps, int64_t n, int64_t group) {
  std::vector<int64_t> order;
  std::vector<bool> used(static_cast<size_t>(n));
  std::vector<std::pair<int64_t, int64_t>> rest;  // distance, index
  for (int64_t first = 0; first < n; ++first) {
    if (used[size_t(first)]) continue;
    used[size_t(first)] = true;
    order.push_back(first);
    rest.clear();
    for (int64_t j = first + 1; j < n; ++j)
      if (!used[size_t(j)]) rest.emplace_back(hamming_from(overlaps, n, first, j), j);
    const auto count = std::min(rest.size(), size_t(group - 1));
    std::partial_sort(rest.begin(), rest.begin() + std::ptrdiff_t(count), rest.end());
    for (size_t i = 0; i < count; ++i) {
      used[size_t(rest[i].second)] = true;
      order.push_back(rest[i].second);
    }
  }
  return order;
}

}  // namespace tessera::sparsity

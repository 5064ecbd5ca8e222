#include "sparsity/histogram.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "ops/gemm/gemm.h"
#include "runtime/parallel.h"

namespace tessera::sparsity {
namespace {

constexpr int kMantissaBits = 12, kDropped = 23 - kMantissaBits, kLowest = -32, kHighest = 32;
constexpr int64_t kBins = (int64_t{kHighest - kLowest} << kMantissaBits) + 2;
constexpr uint32_t kFirst = uint32_t(127 + kLowest) << kMantissaBits;

/// 0: below 2^-32; kBins - 1: 2^32 and more.
int64_t bin_of(uint32_t magnitude_bits) {
  const uint32_t key = magnitude_bits >> kDropped;
  return key < kFirst ? 0 : std::min<int64_t>(int64_t(key - kFirst) + 1, kBins - 1);
}
double lower_edge(int64_t bin) {
  return bin == 0 ? 0.0 : double(std::bit_cast<float>((uint32_t(bin - 1) + kFirst) << kDropped));
}
double upper_edge(int64_t bin) {
  return bin + 1 < kBins ? lower_edge(bin + 1) : 2 * lower_edge(bin);
}
/// The same, where the last bin ends at the largest number.
double end_of(int64_t bin, double largest) {
  return bin + 1 < kBins ? upper_edge(bin) : largest;
}
double middle(int64_t bin) {
  return (lower_edge(bin) + upper_edge(bin)) / 2;
}

/// What a thread counts of its rows.
struct Counts {
  std::vector<int64_t> negative, positive;
  int64_t not_finite = 0;
  uint32_t largest = 0;

  Counts() : negative(size_t(kBins), 0), positive(size_t(kBins), 0) {}
  void add(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7FFFFFFFu;
    if (magnitude >= 0x7F800000u) {
      ++not_finite;
      return;
    }
    largest = std::max(largest, magnitude);
    ++(bits >> 31 ? negative : positive)[size_t(bin_of(magnitude))];
  }
};

}  // namespace

Histogram::Histogram() : negative_(size_t(kBins), 0), positive_(size_t(kBins), 0) {}

void Histogram::add(const Tensor& x, const Tensor& scales) {
  check(x.defined() && x.rank() >= 1 && is_floating(x.dtype()), "histogram: expected numbers [..., in]");
  const Tensor rows = ops::flatten_leading(x.detach().to(Device::cpu()), 1);
  const int64_t width = rows.size(1);
  check(!scales.defined() || (scales.dtype() == DType::f32 && scales.count() == width),
        "histogram: ", scales.defined() ? scales.count() : 0, " scales for ", width, " inputs");
  bins_.clear(), magnitude_bins_.clear();
  // A table for each of a few parts: sums of whole numbers do not depend on how the rows are divided.
  const int64_t parts = std::clamp<int64_t>(rows.count() >> 16, 1, cpu_threads());
  std::vector<Counts> counts(static_cast<size_t>(parts));
  const float* const scale = scales.defined() ? scales.data<float>() : nullptr;
  dispatch_floating(rows.dtype(), "histogram", [&]<class T>() {
    parallel_for(parts, 1, [&](int64_t first, int64_t last) {
      for (int64_t part = first; part < last; ++part)
        for (int64_t r = rows.size(0) * part / parts; r < rows.size(0) * (part + 1) / parts; ++r) {
          const T* const row = rows.data<T>() + r * rows.layout().stride(0);
          for (int64_t j = 0; j < width; ++j) {
            const float value = float(row[j * rows.layout().stride(1)]);
            counts[size_t(part)].add(scale ? value * scale[j] : value);
          }
        }
    });
  });
  for (const Counts& part : counts) {
    for (size_t bin = 0; bin < size_t(kBins); ++bin)
      negative_[bin] += part.negative[bin], positive_[bin] += part.positive[bin];
    not_finite_ += part.not_finite;
    largest_ = std::max(largest_, double(std::bit_cast<float>(part.largest)));
    count_ -= part.not_finite;
  }
  count_ += rows.count();
}

const std::vector<Histogram::Bin>& Histogram::magnitude_bins() const {
  if (!magnitude_bins_.empty()) return magnitude_bins_;
  for (int64_t bin = 0; bin < kBins; ++bin)
    if (const int64_t count = negative_[size_t(bin)] + positive_[size_t(bin)])
      magnitude_bins_.push_back({lower_edge(bin), end_of(bin, largest_), count});
  return magnitude_bins_;
}

const std::vector<Histogram::Bin>& Histogram::bins() const {
  if (!bins_.empty()) return bins_;
  for (int64_t bin = kBins - 1; bin >= 0; --bin)
    if (const int64_t count = negative_[size_t(bin)])
      bins_.push_back({-end_of(bin, largest_), -lower_edge(bin), count});
  for (int64_t bin = 0; bin < kBins; ++bin)
    if (const int64_t count = positive_[size_t(bin)])
      bins_.push_back({lower_edge(bin), end_of(bin, largest_), count});
  return bins_;
}

double Histogram::quantile_in(const std::vector<Bin>& bins, double share) const {
  const double wanted = std::clamp(share, 0.0, 1.0) * double(count_);
  double before = 0;
  for (const Bin& bin : bins) {
    if (before + double(bin.count) >= wanted)
      return std::clamp(bin.lower + (bin.upper - bin.lower) * (wanted - before) / double(bin.count),
                        -largest_, largest_);
    before += double(bin.count);
  }
  return bins.empty() ? 0 : std::clamp(bins.back().upper, -largest_, largest_);
}

double Histogram::magnitude_quantile(double share) const {
  return quantile_in(magnitude_bins(), share);
}

double Histogram::quantile(double share) const {
  return quantile_in(bins(), share);
}

std::vector<double> Histogram::bars(int64_t bars, double limit) const {
  std::vector<double> shares(size_t(bars), 0);
  if (count_ == 0 || limit <= 0) return shares;
  const auto put = [&](double value, int64_t count) {
    const double at = (value + limit) / (2 * limit) * double(bars);
    shares[size_t(std::clamp<int64_t>(int64_t(std::floor(at)), 0, bars - 1))] +=
        double(count) / double(count_);
  };
  for (int64_t bin = 0; bin < kBins; ++bin) {
    if (negative_[size_t(bin)]) put(-middle(bin), negative_[size_t(bin)]);
    if (positive_[size_t(bin)]) put(middle(bin), positive_[size_t(bin)]);
  }
  return shares;
}

}  // namespace tessera::sparsity

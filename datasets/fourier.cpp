#include "datasets/fourier.h"

#include <cmath>
#include <numbers>

namespace tessera::datasets {
namespace {

constexpr double kImage = 8.7;  // exp(-x^2 / 2) < 2^-54: there is one copy on each side
constexpr double kTail = 8.3;   // erfc(x / sqrt(2)) < 2^-53

void check_harmonics(const PriorOptions& options, double harmonics) {
  check(harmonics <= double(kMostHarmonics), "prior ", name_of(options.kind), ": lengthscale ",
        options.lengthscale, " needs ", harmonics, " harmonics of its Fourier series, more than ",
        kMostHarmonics, "; choose a longer one");
}

FourierSeries rbf_series(const PriorOptions& options, double span) {
  const double l = options.lengthscale, pi = std::numbers::pi;
  const double period = span + kImage * l;
  const double harmonics = std::ceil(kTail * period / (2 * pi * l));
  check_harmonics(options, harmonics);
  FourierSeries series{.frequency = 1 / period, .amplitude = {}};
  for (int64_t k = 0; k <= int64_t(harmonics); ++k) {
    const double omega = 2 * pi * double(k) / period;
    const double coefficient =
        (k == 0 ? 1 : 2) * l * std::sqrt(2 * pi) / period * std::exp(-0.5 * omega * omega * l * l);
    series.amplitude.push_back(options.scale * std::sqrt(coefficient));
  }
  return series;
}

FourierSeries periodic_series(const PriorOptions& options) {
  const double z = 1 / (options.lengthscale * options.lengthscale), root = 1 / options.lengthscale;
  // I_k(z) e^-z falls like exp(-k^2 / 2z) for k < z, and like (z / 2)^k / k! above.
  check_harmonics(options, std::ceil(kTail * root));
  const auto start = int64_t(std::ceil(9 * root)) + 60;
  std::vector<double> ratio(size_t(start + 2), 0.0);  // I_k / I_(k-1), from the backward recurrence
  for (int64_t k = start; k >= 1; --k) ratio[size_t(k)] = 1 / (2 * double(k) / z + ratio[size_t(k + 1)]);
  std::vector<double> coefficient{1};  // relative to I_0
  double product = 1, sum = 0;
  for (int64_t k = 1; k <= start; ++k) coefficient.push_back(2 * (product *= ratio[size_t(k)]));
  for (size_t k = coefficient.size(); k-- > 0;) sum += coefficient[k];  // e^z / I_0; smallest first
  double left = 0;
  while (coefficient.size() > 1 && left + coefficient.back() < 0x1p-53 * sum)
    left += coefficient.back(), coefficient.pop_back();
  FourierSeries series{.frequency = 1 / options.period, .amplitude = {}};
  for (const double value : coefficient) series.amplitude.push_back(options.scale * std::sqrt(value / sum));
  return series;
}

}  // namespace

FourierSeries fourier_series(const PriorOptions& options, double span) {
  switch (options.kind) {
    case PriorKind::rbf:
      return rbf_series(options, span);
    case PriorKind::periodic:
      return periodic_series(options);
    default:
      fail_at(Site::here(), "prior ", name_of(options.kind), ": it has no Fourier series that ends");
  }
}

}  // namespace tessera::datasets

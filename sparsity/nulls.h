#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sparsity/draws.h"
#include "sparsity/features.h"

/// Chance levels: what a figure is for masks without the structure in question, drawn many times.

namespace tessera::sparsity {

/// What a drawn mask keeps of the observed one.
///   independent    the density: every position of every feature is kept with that probability
///   rows_shuffled  how many positions each feature keeps; which ones is random
///   sums_kept      that, and how many features are kept at each position: 5 trades per feature from the
///                  observed mask (Strona et al., "A fast and unbiased procedure to randomize ecological
///                  binary matrices", Nature Communications 5, 2014)
enum class NullModel : uint8_t { independent, rows_shuffled, sums_kept };
inline constexpr NullModel kNullModels[] = {NullModel::independent, NullModel::rows_shuffled,
                                            NullModel::sums_kept};
const char* name_of(NullModel model);

/// Draw `number` of a mask like the observed one. A function of its arguments alone.
Features draw_null(const Features& observed, NullModel model, uint64_t seed, uint64_t number);

/// An observed figure next to its draws.
struct ChanceLevel {
  int64_t draws = 0;         // that gave a number
  double mean = 0, sd = 0;   // of the draws
  double low = 0, high = 0;  // their quantiles 2.5 % and 97.5 %
  double effect = 0;         // (observed - mean) / sd; NaN if sd is 0 and the two differ, else 0
  double p = 1;              // two-sided: (1 + draws at least as far from the mean) / (1 + draws)
};
/// Draws that are NaN are left out; all NaN if none is left or the observed one is NaN.
ChanceLevel chance_level(double observed, std::vector<double> draws);

struct Interval {
  double low = 0, high = 0;
};
/// Percentile bootstrap, 95 %, of the mean of the values.
Interval bootstrap_mean(std::span<const double> values, int64_t resamples, Draws draws);
/// The value below which the share q of the sorted values lies, linearly between neighbours.
double quantile(std::span<const double> sorted, double q);

}  // namespace tessera::sparsity

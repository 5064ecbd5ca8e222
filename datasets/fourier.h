#pragma once

#include <cstdint>
#include <vector>

#include "datasets/prior.h"

namespace tessera::datasets {

/// A stationary kernel as a sum of cosines:
///
///   k(r) = sum_(k=0)^K amplitude[k]^2 cos(2 pi k frequency r)
///
/// so that f(x) = amplitude[0] w_0 + sum_k amplitude[k] (w_k cos(2 pi k frequency x) + v_k sin(...)) with
/// standard normal weights is a draw of the process, and the process a linear model of 2 K + 1 features.
struct FourierSeries {
  double frequency = 0;
  std::vector<double> amplitude;  // K + 1
  int64_t harmonics() const { return int64_t(amplitude.size()) - 1; }
  int64_t functions() const { return 2 * harmonics() + 1; }
};

/// The series of a prior's kernel for |r| <= span, within 5e-16 s^2 at the default lengthscale; with more
/// harmonics the rounding of the cosines' arguments shows: 6e-15 s^2 at a lengthscale of 0.01.
///
///   rbf       the kernel repeated with a period of span + 8.7 l, so that the nearest copy is below
///             2^-53 s^2; its coefficients are the Gaussian spectral density at multiples of the frequency
///             (Poisson's summation formula).
///   periodic  amplitude[k]^2 = s^2 e^-z I_k(z), z = 1 / l^2, twice that for k > 0 (the generating
///             function of the modified Bessel functions), exact for all r; I_k by Miller's backward
///             recurrence.
///
/// Both end where all that is left out is below 2^-53 s^2: 47 functions for the default rbf, 45 for the
/// default periodic prior. Throws for other priors, and for a lengthscale that needs more than
/// kMostHarmonics.
FourierSeries fourier_series(const PriorOptions& options, double span);

inline constexpr int64_t kMostHarmonics = 2048;

/// Inputs of the Gaussian processes lie in [-2, 2).
inline constexpr double kInputSpan = 4;

}  // namespace tessera::datasets

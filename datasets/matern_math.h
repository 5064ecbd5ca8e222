#pragma once

#include <cmath>

#include "runtime/config.h"

/// The Gaussian process with the Matern kernel of smoothness 5/2 as a stochastic differential equation, exact
/// at any spacing (Hartikainen, Sarkka: "Kalman filtering and smoothing solutions to temporal Gaussian
/// process regression models", MLSP 2010). In units of time 1 / lambda, lambda = sqrt(5) / l, and of s, the
/// state z = (f, f', f'') follows dz = F z dt + e_3 dw with characteristic polynomial (d/dt + 1)^3:
///
///   F = [0 1 0; 0 0 1; -1 -3 -3],    diffusion 16 / 3
///   z(t + tau) = A z(t) + e,    A = exp(F tau) = e^-tau (I + tau G + tau^2 / 2 G^2),  G = F + I, G^3 = 0
///   e ~ N(0, Q),                Q = 16 / 3 integral_0^tau v v^T du,
///                               v(u) = e^-u (u^2/2, u - u^2/2, 1 - 2u + u^2/2)
///
/// Q comes from the integrals of u^k e^-2u, k = 0 ... 4, each computed without cancellation: formed as P - A
/// P A^T it would lose all digits of entries like tau^5 / 20 where points are close.

namespace tessera::datasets {

/// The time before the first point: A is exactly 0 and Q the stationary covariance.
inline constexpr double kMaternForever = 1e4;

/// A(tau) for repeated use.
struct MaternDecay {
  double tau, decay;
  TESSERA_HD explicit MaternDecay(double tau) : tau(tau), decay(exp(-tau)) {}
  /// z = A z, in place.
  TESSERA_HD void apply(double* z) const {
    const double half = 0.5 * tau * tau * (z[0] + 2 * z[1] + z[2]);  // G^2 = (1, -1, 1)^T (1, 2, 1)
    const double a = z[0] + tau * (z[0] + z[1]) + half, b = z[1] + tau * (z[1] + z[2]) - half,
                 c = z[2] - tau * (z[0] + 3 * z[1] + 2 * z[2]) + half;
    z[0] = decay * a, z[1] = decay * b, z[2] = decay * c;
  }
  /// z = A^T z, in place.
  TESSERA_HD void apply_transposed(double* z) const {
    const double half = 0.5 * tau * tau * (z[0] - z[1] + z[2]);
    const double a = z[0] + tau * (z[0] - z[2]) + half, b = z[1] + tau * (z[0] + z[1] - 3 * z[2]) + 2 * half,
                 c = z[2] + tau * (z[1] - 2 * z[2]) + half;
    z[0] = decay * a, z[1] = decay * b, z[2] = decay * c;
  }
};

/// A symmetric 3 x 3 matrix.
struct Matern3 {
  double q00, q01, q02, q11, q12, q22;
};

/// Q(tau); the stationary covariance for kMaternForever.
TESSERA_HD Matern3 matern_noise(double tau) {
  const double z = 2 * tau, e = exp(-z);
  const double t2 = tau * tau, t3 = t2 * tau, t4 = t2 * t2;
  double i0, i1, i2, i3, i4;  // integrals of u^k e^-2u over [0, tau]
  if (tau > 2.5) {  // upwards, i_k = (k i_(k-1) - tau^k e) / 2: the differences are of 2 and more eighths
    i0 = 0.5 * (1 - e);
    i1 = 0.5 * (i0 - tau * e);
    i2 = 0.5 * (2 * i1 - t2 * e);
    i3 = 0.5 * (3 * i2 - t3 * e);
    i4 = 0.5 * (4 * i3 - t4 * e);
  } else {  // i_4 by its series of positive terms, then downwards, which adds positive numbers
    double term = 0.2, sum = 0.2;
    for (int k = 6; term > 1e-17 * sum; ++k) sum += term *= z / k;
    i4 = t4 * tau * e * sum;
    i3 = (2 * i4 + t4 * e) / 4;
    i2 = (2 * i3 + t3 * e) / 3;
    i1 = (2 * i2 + t2 * e) / 2;
    i0 = 2 * i1 + tau * e;
  }
  constexpr double q = 16.0 / 3;
  return {q * i4 / 4,
          q * (i3 / 2 - i4 / 4),
          q * (i2 / 2 - i3 + i4 / 4),
          q * (i2 - i3 + i4 / 4),
          q * (i1 - 2.5 * i2 + 1.5 * i3 - i4 / 4),
          q * (i0 - 4 * i1 + 5 * i2 - 2 * i3 + i4 / 4)};
}

/// e = L n with Q(tau) = L L^T, for standard normal n. Cholesky does not see the scales of rows, and with
/// them divided out Q is well conditioned for every tau. Where entries underflow, e is 0.
TESSERA_HD void matern_increment(double tau, const double* n, double* e) {
  const Matern3 q = matern_noise(tau);
  const double l00 = sqrt(q.q00);
  const double l10 = l00 > 0 ? q.q01 / l00 : 0, l20 = l00 > 0 ? q.q02 / l00 : 0;
  const double l11 = sqrt(fmax(q.q11 - l10 * l10, 0.0));
  const double l21 = l11 > 0 ? (q.q12 - l20 * l10) / l11 : 0;
  const double l22 = sqrt(fmax(q.q22 - l20 * l20 - l21 * l21, 0.0));
  e[0] = l00 * n[0];
  e[1] = l10 * n[0] + l11 * n[1];
  e[2] = l20 * n[0] + l21 * n[1] + l22 * n[2];
}

}  // namespace tessera::datasets

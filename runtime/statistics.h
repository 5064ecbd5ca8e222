#pragma once

#include <span>

namespace tessera {

/// Pearson's correlation of two lists; NaN with fewer than two values, and if one of the lists is constant or
/// has a NaN. Throws unless both are of one length.
double pearson(std::span<const double> x, std::span<const double> y);
/// That of their ranks (Spearman); equal values share the mean of theirs.
double spearman(std::span<const double> x, std::span<const double> y);

}  // namespace tessera

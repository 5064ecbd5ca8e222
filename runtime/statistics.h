#pragma once

#include <span>
#include <vector>

namespace tessera {

/// The middle of the values, of an even number of them the mean of both middles; 0 if there are none.
double median(std::vector<double> values);
/// Pearson's correlation of two lists; NaN with fewer than two values, and if one of the lists is constant or
/// has a NaN. Throws unless both are of one length.
double pearson(std::span<const double> x, std::span<const double> y);
/// That of their ranks (Spearman); equal values share the mean of theirs.
double spearman(std::span<const double> x, std::span<const double> y);

}  // namespace tessera

#pragma once

#include <string>
#include <vector>

#include "bench/record.h"

namespace tessera::bench {

/// A pair of measurements of the same work: operator, shape, attributes, dtype, mode, kind of device.
struct Comparison {
  Record a, b;       // b: the fastest of B's implementations of that work
  double ratio = 0;  // b.ms.p50 / a.ms.p50: above 1, A is faster
};
/// Every work of A beside B's fastest for it; works of A without a peer are left out, and counted. Only
/// those implementations of B count in whose names the regular expression `peer` is found. What threw in a
/// sweep has no times and is left out, too.
std::vector<Comparison> compare(const std::vector<Record>& a, const std::vector<Record>& b,
                                int* without_peer = nullptr, const std::string& peer = {});

/// Share of the copy bandwidth measured in the run of the record (0: not known), and of the card's peak in
/// the record's dtype (0: the card is not in the list).
double copy_share(const Record& record);
double peak_share(const Record& record);

/// "39" of 0.39; "-" of what is not known.
std::string percent(double share);
/// "tessera", or "tessera row wgmma" where a row was forced.
std::string implementation(const Record& record);

/// A line each; the problems of sweeps only in a summary of each operator and mode, with the worst of them.
std::string format_comparison(const std::vector<Comparison>& comparisons);

/// A shape of a sweep is slow if the best peer is faster by more than this factor.
inline constexpr double kSlow = 1.3;
std::string format_sweep(const std::vector<Comparison>& comparisons, size_t worst = 10);

/// The problems of a sweep whose results are wrong, a line each; "" if there is none.
std::string format_wrong(const std::vector<Record>& records);

}  // namespace tessera::bench

#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bench/record.h"

namespace tessera::bench {

/// Measurements of the same work: operator, shape, attributes, dtype, mode, kind of device.
struct Comparison {
  Record a;
  std::optional<Record> b;     // the fastest of B's implementations in the campaign of `a`
  std::optional<Record> ever;  // the fastest of all records of B
  double ratio = 0;            // b.ms.p50 / a.ms.p50: above 1, A is faster; 0: no b
  double ratio_ever = 0;       // the same of `ever`
  std::string missing;         // why there is no b, although the campaign has times of B
};

struct CompareOptions {
  std::string peer = {};  // only implementations of B in whose names this regular expression is found
  bool any_gpu = false;   // also records of B of another GPU model than A's
};
/// Records that were left out of a comparison.
struct LeftOut {
  int without_peer = 0;  // records of A
  int other_gpu = 0;     // records of B
  int other_device = 0;  // of those without a peer: records of a CPU where B's are of a GPU, or reverse
};

/// Every work of A next to B's fastest for it; works of A that B does not have are left out. If B says that a
/// required implementation is missing and has no time of it, the comparison has the reason and no peer: its
/// other implementations would be weaker ones. If its only times are of other campaigns, there is `ever` but
/// no `b`. What threw in a sweep has no times and is left out, too.
std::vector<Comparison> compare(const std::vector<Record>& a, const std::vector<Record>& b,
                                const CompareOptions& options = {}, LeftOut* left_out = nullptr);

/// Where the sides say that they do the work differently: "weights: bf16, f32 masters / bf16 without
/// masters";
/// "" if they do not.
std::string differences(const Record& a, const Record& b);

/// Share of the copy bandwidth measured in the run of the record (0: not known), and of the GPU's peak in
/// the record's dtype (0: the GPU is not in the list).
double copy_share(const Record& record);
double peak_share(const Record& record);

/// "39" of 0.39; "-" of what is not known.
std::string percent(double share);
/// "tessera", or "tessera variant wgmma" where a variant was forced.
std::string implementation(const Record& record);

/// A heading and a row for each comparison, without those of sweeps: the columns of the terminal and the
/// page.
std::vector<std::vector<std::string>> comparison_rows(const std::vector<Comparison>& comparisons);
/// The same as text; the problems of sweeps only in a summary of each operator and mode, with the worst of
/// them.
std::string format_comparison(const std::vector<Comparison>& comparisons);

/// A shape of a sweep is slow if the best peer is faster by more than this factor.
inline constexpr double kSlow = 1.3;
std::string format_sweep(const std::vector<Comparison>& comparisons, size_t worst = 10);

/// The problems of a sweep whose results are wrong, a line each; "" if there is none.
std::string format_wrong(const std::vector<Record>& records);

}  // namespace tessera::bench

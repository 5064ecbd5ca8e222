#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/integers.h"

namespace tessera::comm {

/// How the rows (dimension 0) of a tensor are split over the ranks of a group. The tensor is a sequence of
/// segments, each split as evenly as possible: of a segment's n rows, rank r of p holds rows floor(n r /
/// p) to floor(n (r + 1) / p) - 1. A rank's part of the tensor is its shares of all segments,
/// concatenated.
class RowSplit {
 public:
  /// Throws for fewer than one rank, and for a segment of fewer rows than ranks.
  RowSplit(int ranks, std::vector<int64_t> segments);

  int ranks() const { return ranks_; }
  size_t segments() const { return segments_.size(); }
  int64_t total() const { return total_; }
  /// Rows of a rank's part.
  int64_t count(int rank) const;
  /// Rows of the largest share of a segment.
  int64_t largest(size_t segment) const { return ceil_div(segments_[segment], ranks_); }
  /// Range of rows of the whole tensor: rank `rank`'s share of segment `segment`.
  struct Range {
    int64_t begin, end;
    int64_t count() const { return end - begin; }
  };
  Range in_whole(size_t segment, int rank) const;
  /// The same rows within the rank's part.
  Range in_part(size_t segment, int rank) const;

 private:
  int ranks_;
  std::vector<int64_t> segments_;
  int64_t total_ = 0;
};

}  // namespace tessera::comm

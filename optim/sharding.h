#pragma once

#include <cstdint>
#include <vector>

#include "optim/packing.h"

/// How an optimizer's states are spread over ranks (Rajbhandari et al., "ZeRO: Memory optimizations toward
/// training trillion parameter models", arXiv:1910.02054, section 5.1): every rank holds the moments and the
/// masters of a part of each bucket, updates these, and gets the other weights from the other ranks (stage
/// 1); of gradients, too, it may hold its parts alone (stage 2, optim/gradient_ring.h).

namespace tessera::optim {

/// Elements of Optimizer::gradients() that travel together, those of whole parameters.
struct Bucket {
  int64_t begin = 0, end = 0;
  std::vector<size_t> parameters;  // their indices
  std::vector<int64_t> ends;       // by rank: where its part of the bucket ends; empty if nothing is spread
};
/// In the order in which they travel: from the end of the arena to its beginning, as backward passes fill it.
/// Each has at least `bucket_mb` MiB but for the last; a pure function of the parameters, so that all ranks
/// have the same.
std::vector<Bucket> buckets_of(const Packing& packing, double bucket_mb);

/// The part of this rank. It must be the same bucket_mb and number of parts on all ranks.
struct Sharding {
  int part = 0, parts = 1;  // one part: everything is whole
  double bucket_mb = 32;
  bool gradients = false;  // stage 2: Optimizer::gradients() is this rank's parts of the buckets
};
/// Where the parts of each bucket end: equally large ones, but for the ends of norm blocks. Throws if a
/// weight does not lie in one piece.
void cut_buckets(std::vector<Bucket>& buckets, const Packing& packing, int parts);

/// Elements of the arena of gradients whose states this rank holds, in the order of the arena.
struct Piece {
  PackedRange range;
  int64_t at = 0;      // where they begin in this rank's arenas of states
  int64_t own_at = 0;  // and in one of its parts of all buckets, whatever the range
  int64_t master_at = 0, first_master = 0,
          masters =
              0;  // the masters of the range: where in this rank's arena, in the whole one, and how many
};
/// Those of a part of the buckets within `range`.
std::vector<Piece> pieces_of(const std::vector<Bucket>& buckets, const Packing& packing, int part,
                             const PackedRange& range);

/// A stretch of one weight's memory, its pads with it, and the rank that updates it.
struct Stretch {
  Tensor weight;      // [elements]
  int64_t first = 0;  // of the arena of gradients
  size_t parameter = 0;
  int owner = 0;
};
std::vector<Stretch> stretches_of(const std::vector<Bucket>& buckets, const Packing& packing);

}  // namespace tessera::optim

#pragma once

#include <cstdint>
#include <vector>

#include "optim/packing.h"

/// Sharding of an optimizer's states over ranks (Rajbhandari et al., "ZeRO: Memory optimizations toward
/// training trillion parameter models", arXiv:1910.02054, section 5.1): every rank holds the moments and
/// masters of its part of each bucket, updates these weights, and receives the others (stage 1); it may also
/// hold only its parts of the gradients (stage 2, optim/gradient_ring.h).

namespace tessera::optim {

/// Consecutive elements of Optimizer::gradients() that are reduced at once: those of whole parameters.
struct Bucket {
  int64_t begin = 0, end = 0;
  std::vector<size_t> parameters;  // their indices
  std::vector<int64_t> ends;       // by rank: where its part of the bucket ends; empty if nothing is spread
};
/// The buckets in the order in which they are sent: from the end of the arena to its beginning, as backward
/// fills it. Each has at least `bucket_mb` MiB, except the last. A function of the parameters only, so that
/// all ranks have the same buckets.
std::vector<Bucket> buckets_of(const Packing& packing, double bucket_mb);

/// The shard of this rank. bucket_mb and the number of parts must be the same on all ranks.
struct Sharding {
  int part = 0, parts = 1;  // one part: not sharded
  double bucket_mb = 32;
  bool gradients = false;  // stage 2: Optimizer::gradients() is this rank's parts of the buckets
};
/// Sets Bucket::ends: equal parts, up to the granularity of norm blocks. Throws if a weight is not contiguous
/// in memory.
void cut_buckets(std::vector<Bucket>& buckets, const Packing& packing, int parts);

/// A range of the gradient arena whose states this rank holds. Pieces are in the order of the arena.
struct StateShard {
  PackedRange range;
  int64_t at = 0;      // offset in this rank's arenas of states
  int64_t own_at = 0;  // offset in its part of all buckets together
  int64_t master_at = 0, first_master = 0,
          masters =
              0;  // the masters of the range: where in this rank's arena, in the whole one, and how many
};
/// Those of a part of the buckets within `range`.
std::vector<StateShard> state_shards_of(const std::vector<Bucket>& buckets, const Packing& packing, int part,
                                        const PackedRange& range);

/// A contiguous part of one weight's memory, padding included, and the rank that updates it.
struct WeightShard {
  Tensor weight;      // [elements]
  int64_t first = 0;  // of the arena of gradients
  size_t parameter = 0;
  int owner = 0;
};
std::vector<WeightShard> weight_shards_of(const std::vector<Bucket>& buckets, const Packing& packing);

}  // namespace tessera::optim

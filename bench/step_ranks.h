#pragma once

#include <functional>

#include "bench/record.h"
#include "dist/data_parallel.h"
#include "optim/sharding.h"

namespace tessera::bench {

/// The ranks that make a step together; each has one micro-batch of it, or a share of one.
struct StepRanks {
  const dist::World* world = nullptr;  // null, or of one rank: this process alone
  double bucket_mb = 0;                // train::StepOptions::bucket_mb
  dist::Exchange exchange = dist::Exchange::automatic;
  int64_t zero = 0;  // stage: what is spread (optim::Sharding)
  int each = 1;      // consecutive ranks that share a micro-batch; divides the ranks

  bool several() const { return world && world->size() > 1; }
  int size() const { return several() ? world->size() : 1; }
  optim::Sharding sharding() const;
  /// "zero 1, buckets of 32 MiB, peer"; "" for one rank.
  std::string description(dist::Exchange exchange) const;
};

/// Times a step that all ranks make at once, equally often; on each its own. Sets Record::ms and
/// RankTimes::slowest to those of the rank whose median is the largest. All ranks call it.
void time_on_ranks(const dist::World& world, Device device, const std::function<void()>& step,
                   const TimerOptions& timer, Record& record);

}  // namespace tessera::bench

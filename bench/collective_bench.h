#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bench/record.h"
#include "dist/world.h"

namespace tessera::bench {

struct CollectiveOptions {
  std::vector<std::string> names = {};  // of collective_names(); empty: all
  int64_t least = 8;                    // bytes of the smallest size; each is `factor` times the one before
  std::optional<int64_t> most = {};     // bytes of the largest; by default 1 GiB on a GPU, 64 MiB on the CPU
  int64_t factor = 8;
  DType dtype = DType::f32;
  std::vector<bool> graph = {true, false};  // on a GPU; on the CPU calls are always eager
  double seconds = 0.3;                     // for each case; at least three calls
};

/// "all_reduce", "reduce_scatter", ...
std::vector<std::string> collective_names();

/// Times calls of the communicator, back to back, between all ranks of `world`, which all call it; each time
/// is that of the slowest rank. Sizes and GB/s are those of nccl-tests: for all_gather and reduce_scatter the
/// size is that of the data of all ranks together. `bytes` of a record are those that the bus carries, so its
/// GB/s are bus bandwidth, which can be compared between numbers of ranks. A record's shape has "bytes" and
/// "ranks", its mode is "eager" or "graph". Throws before anything is measured if a name is unknown.
std::vector<Record> bench_collectives(const dist::World& world, Device device,
                                      const CollectiveOptions& options);

/// A line for each: size, time, algorithm and bus GB/s.
std::string format_collectives(const std::vector<Record>& records);

}  // namespace tessera::bench

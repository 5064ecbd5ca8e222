#pragma once

#include <algorithm>
#include <cstdint>

#include "runtime/integers.h"
#include "runtime/override.h"

/// Parallel loops of the CPU kernels, on a pool of threads that the process shares. Results never depend on
/// the number of threads: a loop is cut into blocks that follow from its size alone, and each block is one
/// call.

namespace tessera {

/// Number of threads that CPU kernels use, at least 1. The first call determines it: TESSERA_THREADS if that
/// is set, else the first number of OMP_NUM_THREADS, else the cores that this process may use (affinity mask
/// and CPU quota of its control groups). Throws if a variable is set to something else than a number from 1
/// to kMostThreads.
int cpu_threads();
/// Sets it for loops that start from now on; more threads than cores are allowed. No result changes. Throws
/// unless 1 <= threads <= kMostThreads.
void set_cpu_threads(int threads);
inline constexpr int kMostThreads = 4096;

/// For the lifetime of the scope, loops of this thread run on this thread only: for threads that already run
/// in parallel.
class OneThread {
 public:
  static bool active() { return active_; }

 private:
  static inline constinit thread_local bool active_ = false;
  Override<bool> scope_{active_, true};
};

namespace parallel {

/// More blocks than this are not needed to balance threads; each costs about 50 ns.
inline constexpr int64_t kMostBlocks = 1024;

/// Indices per block of a loop over `count`: at least `grain`.
constexpr int64_t block_size(int64_t count, int64_t grain) {
  return std::max(grain, ceil_div(count, kMostBlocks));
}

/// Calls call(body, block) for each block in [0, blocks), 2 <= blocks <= kMostBlocks.
void run_blocks(int blocks, void (*call)(const void* body, int block), const void* body);

}  // namespace parallel

/// Calls body(begin, end) for the blocks of [0, count): `grain` indices each (more if there would be over
/// kMostBlocks), the last one shorter. The blocks do not depend on the number of threads, so neither does
/// the computation of each block; their order is undefined. A grain should be 5 to 20 us of work, so that
/// there are enough blocks to share (docs/cpu.md). Waiting threads sleep after a few microseconds, and blocks
/// are claimed one at a time, so that a thread without a core delays the others by no more than the block
/// that it holds.
///
/// Loops inside a body run in place. If bodies throw, blocks not yet begun are skipped and one of the
/// exceptions is rethrown. Loops may be started from any number of threads at once.
template <class Body>
void parallel_for(int64_t count, int64_t grain, Body&& body) {
  if (count <= 0) return;
  const int64_t size = parallel::block_size(count, grain), blocks = ceil_div(count, size);
  if (blocks == 1) {
    body(int64_t{0}, count);
    return;
  }
  const auto block = [&](int index) {
    const int64_t begin = index * size;
    body(begin, std::min(count, begin + size));
  };
  parallel::run_blocks(
      int(blocks),
      [](const void* context, int index) { (*static_cast<const decltype(block)*>(context))(index); }, &block);
}

}  // namespace tessera

#pragma once

#include <algorithm>
#include <cstdint>

namespace tessera {

/// Threads that CPU kernels use (OpenMP's count for this process).
int cpu_threads();

/// Calls `body(begin, end)` over pieces of [0, count) on the CPU's threads. The partition depends only on
/// `count`, `grain` and the number of threads; the pieces are disjoint, so what writes only its own piece is
/// deterministic. Runs in place if there is at most one grain of work.
template <class Body>
void parallel_for(int64_t count, int64_t grain, Body&& body) {
  const int64_t pieces = std::min<int64_t>(cpu_threads(), grain > 0 ? (count + grain - 1) / grain : count);
  if (pieces <= 1) {
    if (count > 0) body(int64_t{0}, count);
    return;
  }
#pragma omp parallel for schedule(static) num_threads(int(pieces))
  for (int64_t piece = 0; piece < pieces; ++piece) body(count * piece / pieces, count * (piece + 1) / pieces);
}

}  // namespace tessera

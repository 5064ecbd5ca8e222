#pragma once

#include <algorithm>

#include "ops/reduce/reduce_plan.h"
#include "runtime/integers.h"
#include "runtime/parallel.h"

namespace tessera::ops {

/// Neighbouring outputs of a plan that the CPU walks side by side, so that their sums stay in the first
/// cache: where the first of them lies in x and y, and from one to the next.
struct PlanTile {
  static constexpr int64_t kMost = 128;
  int64_t x = 0, y = 0, width = 1, column_x = 0, column_y = 0;
};

/// Calls `run(tile)` for all outputs, on the CPU's threads. `by_rows`: a tile has one output, since what is
/// reduced is innermost in memory.
template <class Run>
void for_each_tile(const ReducePlan& plan, bool by_rows, Run&& run) {
  constexpr int64_t kGrain = 16384;  // elements below which a thread is not worth waking
  const int last = plan.kept_rank - 1;
  const int64_t columns = by_rows ? 1 : plan.kept_sizes[last], tiles = ceil_div(columns, PlanTile::kMost);
  const int64_t work = plan.length * std::min(columns, PlanTile::kMost);
  parallel_for(plan.outputs / columns * tiles, std::max<int64_t>(1, kGrain / work),
               [&](int64_t begin, int64_t end) {
                 for (int64_t unit = begin; unit < end; ++unit) {
                   const int64_t first = unit % tiles * PlanTile::kMost;
                   PlanTile tile{.width = std::min(PlanTile::kMost, columns - first),
                                 .column_x = by_rows ? 0 : plan.kept_x[last],
                                 .column_y = by_rows ? 0 : plan.kept_y[last]};
                   plan.offsets(unit / tiles * columns + first, tile.x, tile.y);
                   run(tile);
                 }
               });
}

}  // namespace tessera::ops

#pragma once

#include "comm/threads.h"
#include "dist/world.h"

namespace tessera::train {

/// Calls train_rank(world, rank) on each of the ranks, which are threads; one rank is this thread, without a
/// world.
template <class F>
void on_ranks(int ranks, F&& train_rank) {
  if (ranks == 1) return train_rank(nullptr, 0);
  comm::run_threads(ranks, [&](comm::Communicator& c) {
    const dist::World world(c, c);
    train_rank(&world, c.rank());
  });
}

}  // namespace tessera::train

#pragma once

#include "datasets/loader.h"
#include "dist/data_parallel.h"

namespace tessera::train {

/// The batches of a loader that are a rank's, in steps of `micro_batches`.
inline datasets::LoaderShare loader_share(const dist::Share& share, int64_t micro_batches) {
  if (share.stride > 1) return {.period = uint64_t(share.stride), .first = uint64_t(share.first), .count = 1};
  return {.period = uint64_t(micro_batches), .first = uint64_t(share.first), .count = uint64_t(share.count)};
}

}  // namespace tessera::train

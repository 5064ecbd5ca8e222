#pragma once

#include "datasets/loader.h"
#include "dist/data_parallel.h"
#include "train/random_purpose.h"
#include "train/training_settings.h"

namespace tessera::train {

/// The batches of a loader that are a rank's, in steps of `micro_batches`.
inline datasets::LoaderShare loader_share(const dist::Share& share, int64_t micro_batches) {
  if (share.stride > 1) return {.period = uint64_t(share.stride), .first = uint64_t(share.first), .count = 1};
  return {.period = uint64_t(micro_batches), .first = uint64_t(share.first), .count = uint64_t(share.count)};
}

/// The micro-batches of `source` that a rank trains on, `batch` items each, in the order that the run's seed
/// gives for that purpose. `how`: workers, depth and device.
template <class Source>
datasets::Loader<Source> training_loader(const Source& source, const TrainingSettings& settings,
                                         int64_t batch, RandomPurpose purpose, const dist::Share& share,
                                         datasets::LoaderOptions how) {
  Rng order(seed_for(purpose, settings.seed));
  how.size = batch, how.shuffle = &order, how.drop_last = true;
  how.order = settings.data_order, how.share = loader_share(share, settings.accumulate);
  return datasets::Loader<Source>(source, how);
}

}  // namespace tessera::train

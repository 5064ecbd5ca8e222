#pragma once

#include "datasets/tokens.h"

namespace tessera::train {

/// A batch of two texts of 8 tokens below 50, which the number decides.
inline datasets::TokenBatch batch_number(int64_t number) {
  std::vector<int64_t> inputs, targets;
  for (int64_t i = 0; i < 16; ++i)
    inputs.push_back((i * number + 3) % 50), targets.push_back((i * i + number) % 50);
  datasets::TokenBatch batch;
  batch.inputs = Tensor::from(inputs, {2, 8}), batch.targets = Tensor::from(targets, {2, 8});
  return batch;
}

}  // namespace tessera::train

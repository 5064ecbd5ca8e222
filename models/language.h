#pragma once

#include <limits>

#include "tensor/tensor.h"

/// What the transformers of models/ have in common.

namespace tessera::models {

/// Whether a model initialises its weights as its paper does, or starts with zeros because weights from a
/// file follow.
enum class Start : uint8_t { drawn, blank };

inline constexpr int64_t kEndless = std::numeric_limits<int32_t>::max();  // a length that no text reaches

/// The residual stream between two blocks: `sum` is its value, `branch` (undefined before the first) the
/// value that the last branch adds to it. The next norm adds them in its own pass (ops::add_layernorm).
struct Residual {
  Tensor sum, branch;
};

}  // namespace tessera::models

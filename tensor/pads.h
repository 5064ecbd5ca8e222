#pragma once

#include <cstdint>

#include "tensor/tensor.h"

namespace tessera {

/// Whether x's rows end where rows of its storage end, and have pads of their own after them up to
/// `columns`, which any kernel may overwrite (Storage::pitch_bytes).
bool owns_pads(const Tensor& x, int64_t columns);

}  // namespace tessera

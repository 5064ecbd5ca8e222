#pragma once

#include <cstdint>

#include "tensor/tensor.h"

namespace tessera {

/// Whether x's rows end where rows of its storage end and have padding of their own after them, up to
/// `columns`, which code that writes x may overwrite (Storage::pitch_bytes).
bool owns_row_padding(const Tensor& x, int64_t columns);

/// x, which the calling operator has allocated and never hands out (it may save it for its backward pass):
/// GEMMs that read it may overwrite its padding with zeros, which spares them a copy.
Tensor as_scratch(Tensor x);
/// owns_row_padding, of such a tensor.
bool owns_scratch_padding(const Tensor& x, int64_t columns);

}  // namespace tessera

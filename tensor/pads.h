#pragma once

#include <cstdint>

#include "tensor/tensor.h"

namespace tessera {

/// Whether x's rows end where rows of its storage end, followed by row padding up to `columns` elements,
/// which code that writes x may overwrite (Storage::pitch_bytes).
bool owns_row_padding(const Tensor& x, int64_t columns);

/// Marks x as scratch: the calling operator has allocated it and never returns it (but may save it for
/// backward). GEMMs that read it may overwrite its row padding with zeros, which saves them a copy.
Tensor as_scratch(Tensor x);
/// The same as owns_row_padding, for a tensor marked by as_scratch.
bool owns_scratch_padding(const Tensor& x, int64_t columns);

}  // namespace tessera

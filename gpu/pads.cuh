#pragma once

#include "tensor/tensor.h"

namespace tessera::gpu {

/// Whether the pads behind y's rows of `width` elements, up to `pitch`, are nobody's and may be written: its
/// rows end where those of its storage do.
inline bool owns_pads(const Tensor& y, int64_t width, int64_t pitch) {
  const int64_t size = int64_t(size_of(y.dtype()));
  const Storage& storage = *y.storage();
  return storage.pitch_bytes == pitch * size &&
         (y.layout().offset * size) % storage.pitch_bytes + width * size == storage.row_bytes;
}

}  // namespace tessera::gpu

#include "tensor/pads.h"

namespace tessera {

bool owns_row_padding(const Tensor& x, int64_t columns) {
  const int64_t size = int64_t(size_of(x.dtype())), pitch = x.storage()->pitch_bytes;
  if (pitch == 0) return false;
  const int64_t first = x.layout().offset * size % pitch;
  if (first + x.size(-1) * size != x.storage()->row_bytes || first + columns * size > pitch) return false;
  if (x.size(-1) > 1 && x.layout().stride(-1) != 1) return false;
  for (int dim = 0; dim + 1 < x.rank(); ++dim)
    if (x.size(dim) > 1 && x.layout().stride(dim) * size % pitch != 0) return false;
  return true;
}

Tensor as_scratch(Tensor x) {
  x.storage()->is_scratch = true;
  return x;
}

bool owns_scratch_padding(const Tensor& x, int64_t columns) {
  return x.storage()->is_scratch && owns_row_padding(x, columns);
}

}  // namespace tessera

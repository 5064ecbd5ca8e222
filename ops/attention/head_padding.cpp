#include "ops/attention/head_padding.h"

#include "runtime/integers.h"

namespace tessera::ops {

int64_t padded_head_dim(int64_t head_dim, Device device) {
  constexpr int64_t kPack = 8;
  return device.is_cpu() ? head_dim : round_up(head_dim, kPack);
}

void copy_padded(const Tensor& to, const Tensor& from) {
  const int64_t head_dim = from.size(-1), padded = to.size(-1);
  to.slice(-1, 0, head_dim).copy_from(from.detach());
  if (padded > head_dim) to.slice(-1, head_dim, padded).fill(0);
}

}  // namespace tessera::ops

#include "tensor/equal.h"

#include <cstring>

namespace tessera {

bool equal_bits(const Tensor& a, const Tensor& b) {
  if (a.dtype() != b.dtype() || a.shape() != b.shape()) return false;
  const Tensor left = a.detach().to(Device::cpu()).packed(), right = b.detach().to(Device::cpu()).packed();
  return left.bytes() == 0 || std::memcmp(left.raw(), right.raw(), left.bytes()) == 0;
}

}  // namespace tessera

#include "tensor/finite.h"

#include <cmath>

namespace tessera {

NonFinite find_nonfinite(const Tensor& tensor) {
  NonFinite found;
  if (!is_floating(tensor.dtype())) return found;
  const std::vector<double> values = tensor.to_vector<double>();
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::isfinite(values[i])) continue;
    (std::isnan(values[i]) ? found.nan : found.inf) += 1;
    if (found.first < 0) found.first = int64_t(i);
  }
  return found;
}

}  // namespace tessera

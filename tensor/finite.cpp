#include "tensor/finite.h"

#include <algorithm>
#include <cmath>

namespace tessera {
namespace {

constexpr int64_t kPiece = 1 << 20;  // elements that are on the host at once: 8 MiB in f64

/// Looks at the elements of x, of which the first has that row-major index in the whole tensor.
void look(const Tensor& x, int64_t first, NonFinite& found) {
  if (x.count() > kPiece) {
    const int64_t each = x.count() / x.size(0), rows = std::max<int64_t>(1, kPiece / each);
    for (int64_t row = 0; row < x.size(0); row += rows)
      look(each > kPiece ? x.select(0, row) : x.slice(0, row, std::min(row + rows, x.size(0))),
           first + row * each, found);
    return;
  }
  const std::vector<double> values = x.to_vector<double>();
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::isfinite(values[i])) continue;
    (std::isnan(values[i]) ? found.nan : found.inf) += 1;
    if (found.first < 0) found.first = first + int64_t(i);
  }
}

}  // namespace

NonFinite find_nonfinite(const Tensor& tensor) {
  NonFinite found;
  if (is_floating(tensor.dtype())) look(tensor.detach(), 0, found);
  return found;
}

}  // namespace tessera

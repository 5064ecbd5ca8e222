#pragma once

#include <ostream>
#include <string>

#include "tensor/tensor.h"

namespace tessera {

struct PrintOptions {
  int precision = 4;         // digits after the point
  int edge_items = 3;        // elements shown at each end of a shortened dimension
  int64_t threshold = 1000;  // tensors with more elements are shortened
  bool scientific = false;   // true: always; else only where a shown element would lose its digits
};

/// The elements as nested brackets, then "f32[2, 3] on cpu"; with exponents if one that is not zero has no
/// digit within the precision, or is 1e8 or more. Waits for the device; of a large tensor only
/// the shown elements are copied.
std::string to_string(const Tensor& tensor, const PrintOptions& options = {});
std::ostream& operator<<(std::ostream& out, const Tensor& tensor);

}  // namespace tessera

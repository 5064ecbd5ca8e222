#include "tensor/print.h"

#include <cstdio>

namespace tessera {
namespace {

std::string format_element(const Tensor& element, const PrintOptions& options) {
  if (!is_floating(element.dtype())) return std::to_string(element.item<int64_t>());
  char text[64];
  std::snprintf(text, sizeof text, options.scientific ? "%.*e" : "%.*f", options.precision,
                element.item<double>());
  return text;
}

void print(std::string& out, const Tensor& tensor, const PrintOptions& options, bool shorten, int indent) {
  if (tensor.rank() == 0) {
    out += format_element(tensor, options);
    return;
  }
  const int64_t size = tensor.size(0);
  const bool cut = shorten && size > 2 * options.edge_items;
  out += '[';
  for (int64_t i = 0; i < size; ++i) {
    if (i > 0) out += tensor.rank() == 1 ? ", " : ",\n" + std::string(size_t(indent) + 1, ' ');
    if (cut && i == options.edge_items) {
      out += "...";
      i = size - options.edge_items - 1;
      continue;
    }
    print(out, tensor.select(0, i), options, shorten, indent + 1);
  }
  out += ']';
}

}  // namespace

std::string to_string(const Tensor& tensor, const PrintOptions& options) {
  MessageStream kind;
  kind << describe(tensor);
  if (!tensor.defined()) return kind.str();
  const bool shorten = tensor.count() > options.threshold;
  // Of a large tensor only the shown elements are copied from a GPU, one by one; a small one as a whole.
  const Tensor shown = shorten ? tensor.detach() : tensor.detach().to(Device::cpu());
  std::string out;
  print(out, shown, options, shorten, 0);
  return out + " " + kind.str();
}

std::ostream& operator<<(std::ostream& out, const Tensor& tensor) {
  return out << to_string(tensor);
}

}  // namespace tessera

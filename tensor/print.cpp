#include "tensor/print.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "runtime/text.h"

namespace tessera {
namespace {

std::string format_element(double element, const PrintOptions& options) {
  return decimals(element, std::min(options.precision, 64),
                  options.scientific ? std::chars_format::scientific : std::chars_format::fixed);
}

/// Writes brackets and what element(x) gives for each shown element.
template <class Element>
void print(std::string& out, const Tensor& tensor, const PrintOptions& options, bool shorten, int indent,
           const Element& element) {
  if (tensor.rank() == 0) {
    out += element(tensor);
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
    print(out, tensor.select(0, i), options, shorten, indent + 1, element);
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
  if (!is_floating(tensor.dtype())) {
    print(out, shown, options, shorten, 0, [](const Tensor& x) { return std::to_string(x.item<int64_t>()); });
    return out + " " + kind.str();
  }
  std::vector<double> values;
  print(out, shown, options, shorten, 0, [&](const Tensor& x) {
    values.push_back(x.item<double>());
    return std::string();
  });
  PrintOptions how = options;
  const double least = std::pow(10.0, -options.precision);
  how.scientific |= std::ranges::any_of(values, [&](double x) {
    return std::isfinite(x) && x != 0 && (std::fabs(x) < least || std::fabs(x) >= 1e8);
  });
  out.clear();
  auto next = values.begin();
  print(out, shown, how, shorten, 0, [&](const Tensor&) { return format_element(*next++, how); });
  return out + " " + kind.str();
}

std::ostream& operator<<(std::ostream& out, const Tensor& tensor) {
  return out << to_string(tensor);
}

}  // namespace tessera

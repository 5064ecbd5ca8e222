#pragma once

#include "nn/module.h"

namespace tessera::nn {

/// One layer of a model: a struct that holds tensors itself or tells its FLOPs.
struct SummaryRow {
  std::string name, kind;
  std::vector<Shape> shapes;  // of its own tensors
  int64_t parameters = 0;     // elements of this layer's own tensors that require a gradient
  double flops = 0;           // of one forward pass; a multiply-add is two
  double bytes = 0;           // of its own tensors, without pitch
};

struct Summary {
  std::vector<SummaryRow> rows;  // in the order of fields()
  SummaryRow total;
  int64_t tokens = 0;
  /// An aligned text table, one line per layer.
  std::string text() const;
};

namespace detail {

/// The row of the innermost struct that contains the tensor `name`.
SummaryRow& owner(std::vector<SummaryRow>& rows, const std::string& name);
void add_tensor(SummaryRow& row, const Tensor& tensor);
Summary finish(std::vector<SummaryRow> rows, int64_t tokens);

}  // namespace detail

/// The model's layers, with the work of `tokens` rows through each of them (a model that sends fewer rows
/// through some layer knows better). Tied tensors count where they appear first.
template <class Model>
Summary summary(const Model& model, int64_t tokens = 1) {
  std::vector<SummaryRow> rows;
  std::set<const GradState*> known;
  for_each_node(model, [&](const std::string& name, auto& node) {
    using Node = std::remove_cvref_t<decltype(node)>;
    if constexpr (std::is_same_v<Node, Tensor>) {
      if (node.defined() && (!requires_grad(node) || known.insert(node.grad_state().get()).second))
        detail::add_tensor(detail::owner(rows, name), node);
    } else if constexpr (HasFields<Node>) {
      SummaryRow row{.name = name};
      if constexpr (requires { node.kKind; }) row.kind = node.kKind;
      if constexpr (requires { node.flops(tokens); }) row.flops = node.flops(tokens);
      rows.push_back(std::move(row));
    }
  });
  return detail::finish(std::move(rows), tokens);
}

}  // namespace tessera::nn

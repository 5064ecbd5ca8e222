#pragma once

#include <string>
#include <variant>
#include <vector>

#include "nn/module.h"
#include "ops/linear/slice.h"
#include "ops/mlp/mlp_sparse24.h"
#include "ops/sparse_linear/sparse_linear.h"

namespace tessera::nn {

/// The plain GEMM: y = x weight^T + bias.
struct Dense {
  static constexpr const char* kKind = "dense";
  void fields(auto&&) {}
  bool operator==(const Dense&) const = default;
};

/// y = factor (x weight^T) + bias, with the factor applied to x. It computes what no other path of a layer
/// does, so a path that ignored a layer's form would give another result: tests set it on every layer.
struct Scaled {
  static constexpr const char* kKind = "scaled";
  void fields(auto&& visit) { visit("factor", factor); }
  bool operator==(const Scaled&) const = default;

  double factor = 1;
};

/// The plain GEMM, whose backward pass multiplies some of the rows only. `rng` must outlive the layer. Layers
/// that have one operator for two (Mlp) choose their rows together while both carry the same slice.
/// GroupedLinear has no sliced backward pass and throws.
using Slice = ops::Slice;

/// y = gate(x) W^T + bias with W compressed (ops::sparse_linear): the layer has no dense weight, and throws
/// while a tape is recording. Of a Linear alone; GroupedLinear throws.
struct Compressed {
  static constexpr const char* kKind = "compressed";
  void fields(auto&& visit) { visit("parts", parts); }
  bool operator==(const Compressed&) const = default;

  std::vector<ops::SparsePart> parts;  // the rows of W, from the top
};

/// Training with 2:4 sparse hidden activations (ops::mlp_sparse24): the form of both layers of an Mlp without
/// a gate, which nn::set_sparse24 (nn/sparse24.h) gives them. It holds while a tape records the network;
/// else, and where a layer is observed or called by itself, they are dense. GroupedLinear throws.
struct Sparse24 {
  static constexpr const char* kKind = "sparse24";
  void fields(auto&& visit) {
    visit("how", how), visit("counts", counts), visit("step", dynamic.step), visit("scale", dynamic.scale);
    visit("fitted", how.scale);
  }
  /// Of what a captured graph depends on.
  bool operator==(const Sparse24& other) const {
    return how == other.how && active == other.active && order == other.order && seed == other.seed;
  }

  ops::MlpSparse24 how;        // its generator must outlive the layer
  bool active = true;          // false: every GEMM is dense for now, and columns are still counted
  std::string order = "none";  // of tokens, for ops::token_order24, or "none"
  uint64_t seed = 0;           // of that order
  // Of the first layer's form alone.
  Tensor counts;                        // i32 [hidden]: of the last recorded call
  mutable ops::DynamicScale24 dynamic;  // of soft_dynamic
  mutable Tensor tokens;                // the order of as many tokens as the last call had
};

/// How a linear layer computes its GEMM: the field `form` of Linear and GroupedLinear, Dense unless it is
/// set. It is part of the layer's state (its numbers and tensors are saved as "<layer>.form.<field>").
///
/// The set is closed. Every linear layer computes every form, or throws; a layer that covers several GEMMs
/// with one operator (Mlp, GroupedMlp, LmHead) does so only while all of them are dense (Mlp: or carry the
/// same slice, or sparse24), and otherwise calls its linear layers one after the other; what cannot do that
/// (DecoderLayers) says which layer prevents it. A captured step whose layers have other forms than when it
/// was captured is captured again.
using Form = std::variant<Dense, Scaled, Slice, Compressed, Sparse24>;

inline bool is_dense(const Form& form) {
  return std::holds_alternative<Dense>(form);
}
/// "dense", "scaled", "slice", "compressed", "sparse24"
const char* name_of(const Form& form);

/// Called by what computes a layer in its form: a graph that is being captured is replayed only while the
/// form is the same.
void note_form(const Form& form);

/// Linear, GroupedLinear: a layer with one weight, whose GEMM has a form.
template <class Layer>
concept LinearLayer = requires(std::remove_cvref_t<Layer>& layer) {
  { layer.form } -> std::same_as<Form&>;
};

/// Calls `f(const std::string& name, auto& layer)` for every linear layer of the model, of any type.
template <class Model, class F>
void for_each_linear(Model& model, F&& f, std::string prefix = "") {
  for_each_node(
      model,
      [&](const std::string& name, auto& node) {
        if constexpr (LinearLayer<decltype(node)>) f(name, node);
      },
      std::move(prefix));
}

}  // namespace tessera::nn

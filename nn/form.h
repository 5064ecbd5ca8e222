#pragma once

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "nn/module.h"
#include "ops/activation/activation.h"
#include "ops/linear/sliced_backward.h"
#include "ops/linear/sparse_low_rank.h"
#include "ops/mlp/mlp_sparse24.h"
#include "ops/sparse_linear/sparse_linear.h"

namespace tessera::nn {

/// The plain GEMM: y = x weight^T + bias.
struct Dense {
  static constexpr const char* kKind = "dense";
  void fields(auto&&) {}
  bool operator==(const Dense&) const = default;
};

/// y = factor (x weight^T) + bias, with the factor applied to x. For tests: set on every layer, it shows
/// whether a path of a layer ignores the layer's form, since the result would be wrong.
struct Scaled {
  static constexpr const char* kKind = "scaled";
  void fields(auto&& visit) { visit("factor", factor); }
  bool operator==(const Scaled&) const = default;

  double factor = 1;
};

/// The plain GEMM, whose backward pass multiplies some of the rows only. Layers that have one
/// operator for two (Mlp) choose their rows together while both carry the same slice.
/// GroupedLinear has no sliced backward pass and throws.
using SlicedBackward = ops::SlicedBackward;

/// y = gate(x) W^T + bias with W compressed (ops::sparse_linear): the layer has no dense weight, and throws
/// while a tape is recording. Of a Linear alone; GroupedLinear throws.
struct Compressed {
  static constexpr const char* kKind = "compressed";
  void fields(auto&& visit) { visit("parts", parts), visit("prefill", prefill); }
  bool operator==(const Compressed&) const = default;

  std::vector<ops::SparsePart> parts;  // the rows of W, from the top
  /// In prefill, the share of each text's tokens, the last ones, that gates apply to; decode steps are
  /// always gated. TEAL (arXiv:2408.14690) gates the second half: the first tokens of a text suffer
  /// most.
  double prefill = 1;
};

/// Training with 2:4 sparse hidden activations (ops::mlp_sparse24): the form of both layers of an Mlp without
/// a gate, which nn::set_sparse24 (nn/sparse24.h) gives them. It holds while a tape records the network;
/// else, and where a layer is observed or called by itself, they are dense. GroupedLinear throws. Layers made
/// of factors keep their form and carry this one in it: LowRank, Cola.
struct Sparse24 {
  static constexpr const char* kKind = "sparse24";
  void fields(auto&& visit) {
    visit("how", how), visit("counts", counts), visit("step", dynamic.step), visit("scale", dynamic.scale);
    visit("fitted", how.scale);
  }
  /// Compares the fields that a captured graph depends on.
  bool operator==(const Sparse24& other) const {
    return how == other.how && active == other.active && order == other.order && seed == other.seed;
  }

  ops::MlpSparse24 how = {};
  bool active = true;          // false: every GEMM is dense for now, and columns are still counted
  std::string order = "none";  // of tokens, for ops::token_order24, or "none"
  uint64_t seed = 0;           // of that order
  // Of the first layer's form alone.
  Tensor counts = {};  // i32 [hidden]: of the last recorded call; zeros if no GEMM is split
  mutable ops::DynamicScale24 dynamic = {};  // of soft_dynamic
  mutable Tensor tokens = {};                // the order of as many tokens as the last call had
};

/// Training with 2:4 weights (Hu et al., arXiv:2404.01847; ops::weight24_linear): what is multiplied is the
/// weight under a transposable mask, in forward and for the input's gradient; the gradient of the weight is
/// straight through, so that pruned elements train, of all of dy, or of two of every four tokens of it, drawn
/// by `mvue`. nn/weights24.h makes and refreshes the mask. GroupedLinear throws.
struct Weights24 {
  static constexpr const char* kKind = "weights24";
  void fields(auto&& visit) { visit("mask", mask), visit("flips", flips), visit("active", active); }
  bool operator==(const Weights24& other) const;  // of the fields that a captured graph depends on

  Tensor mask;         // i32 [out, ceil(in / 32)], as of ops::transposable24
  Tensor flips;        // i32 [1]: elements whose mask changed when it was last made
  bool active = true;  // false: dense for now
  std::optional<Rng> mvue = {};
};

/// The factors that the forms below have in place of a dense weight (nn/low_rank.h makes them). The parts of
/// a fused weight, such as q, k and v, have their own factors. Layers in groups have none of these forms and
/// throw.
struct Factors {
  Tensor a;                   // [parts * rank, in], those of the parts one below the other
  Tensor b;                   // [out, rank]
  std::vector<int64_t> rows;  // of each part; part of the architecture, not of the state
  void fields(auto&& visit) { visit("a", a), visit("b", b); }
  bool operator==(const Factors& other) const;  // whether they are the same tensors
  int64_t rank() const { return b.size(1); }
};

/// y = x (b a)^T + bias, part by part, as two GEMMs: the hidden rows x a^T are all that is saved in addition.
struct LowRank {
  static constexpr const char* kKind = "low_rank";
  void fields(auto&& visit) { factors.fields(visit), visit("sparse24", sparse24); }
  bool operator==(const LowRank&) const = default;

  Factors factors;
  /// One, of the network's hidden activations, in the first layer of an Mlp whose two layers are low_rank;
  /// else none.
  std::vector<Sparse24> sparse24 = {};
};

/// y = activation(x a^T) b^T + bias, part by part (CoLA: Liu et al., arXiv:2502.10940). No dense weight
/// computes it.
struct Cola {
  static constexpr const char* kKind = "cola";
  void fields(auto&& visit) { factors.fields(visit), visit("sparse24", sparse24); }
  bool operator==(const Cola&) const = default;

  Factors factors;
  ops::Activation activation = ops::Activation::silu;
  /// Of the activations between the factors of each part, which then is an ops::mlp_sparse24 while a tape
  /// records; or none.
  std::vector<Sparse24> sparse24 = {};
};

/// y = x (scale b a + S)^T + bias with S sparse on a fixed support (SLTrain: ops::sparse_low_rank_linear).
struct SparsePlusLowRank {
  static constexpr const char* kKind = "sltrain";
  void fields(auto&& visit) { factors.fields(visit), visit("values", values), visit("support", support); }
  bool operator==(const SparsePlusLowRank& other) const;
  ops::SparseLowRank weight() const { return {factors.a, factors.b, values, support, factors.rows, scale}; }

  Factors factors;
  Tensor values, support;  // of ops::SparseLowRank
  double scale = 1;        // of the architecture
};

/// y = gamma x (b a)^T + (1 - gamma) x[columns] c^T + bias, part by part (LOST: Li et al., arXiv:2508.02668).
struct ColumnsPlusLowRank {
  static constexpr const char* kKind = "lost";
  void fields(auto&& visit) { factors.fields(visit), visit("c", c), visit("columns", columns); }
  bool operator==(const ColumnsPlusLowRank& other) const;

  Factors factors;
  Tensor c;            // [out, n]: those columns of the weight
  Tensor columns;      // i32 [parts * n]: which inputs, ascending in each part
  double gamma = 0.5;  // of the architecture
};

/// How a linear layer computes its GEMM: the field `form` of Linear and GroupedLinear, Dense unless it is
/// set. It is part of the layer's state (its numbers and tensors are saved as "<layer>.form.<field>").
///
/// The set is closed. Every linear layer computes every form, or throws; a layer that covers several GEMMs
/// with one operator (Mlp, GroupedMlp, LmHead) does so only while all of them are dense (Mlp: or carry the
/// same slice, or sparse24, by itself or in low_rank), and otherwise calls its linear layers one after the
/// other; what cannot do that (DecoderLayers) says which layer prevents it. A captured step whose layers have
/// other forms than when it was captured is captured again.
using Form = std::variant<Dense, Scaled, SlicedBackward, Compressed, Sparse24, Weights24, LowRank, Cola,
                          SparsePlusLowRank, ColumnsPlusLowRank>;

inline bool is_dense(const Form& form) {
  return std::holds_alternative<Dense>(form);
}
/// "dense", "scaled", "slice", "compressed", "sparse24", "weights24", "low_rank", "cola", "sltrain", "lost"
const char* name_of(const Form& form);
/// Multiply-adds per token of a layer in -> out in that form.
double multiply_adds(const Form& form, int64_t in, int64_t out);

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

#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "nn/observe.h"
#include "nn/sparse24.h"

/// How sparse the hidden activations of feed-forward networks are, and what 2:4 sparsity costs them.

namespace tessera::eval {

/// Sparsity of activations a [tokens, columns], computed by definition on the host: the reference for the
/// kernels.
struct ActivationSparsity {
  int64_t tokens = 0;
  std::vector<int64_t> counts;  // per column, of elements that are not zero
  /// Share of the energy, the sum of squares, that is dropped if two of every four neighbouring features of a
  /// token are kept (method naive), and if of those two of every four tokens of a feature are kept. With the
  /// densest columns set apart these lose nothing and stay out of their groups, as in split GEMMs.
  double dropped_features = 0, dropped_both = 0;
  double dropped_features_split = 0, dropped_both_split = 0;
  /// Correlation of whether neighbouring tokens activate a feature: 0 if they do so independently, given how
  /// often it is active; 1 if always together.
  double neighbours = 0;

  double zeros() const;                 // share of the elements
  double column_zeros(double q) const;  // quantile of the columns' shares of zeros: 0 the densest
};
/// The share `dense_share` of the columns with the largest counts are the densest. a: floating, on any
/// device.
ActivationSparsity activation_sparsity(const Tensor& a, double dense_share);

/// The smallest number of columns that a split GEMM must keep dense so that at most `dropped` of the energy
/// is dropped along features and tokens; columns are taken from the densest on. At most all of them.
int64_t dense_columns_for(const Tensor& a, double dropped);

/// While it lives, measures the input of the second layer of each feed-forward network of `model`, in its
/// first call: by the names of the networks ("blocks.3.mlp"); and of cola layers with the squared ReLU the
/// activations between the factors, which it computes: by the names of the layers, and the numbers of their
/// parts where there are several ("blocks.3.attention.qkv.0"). Layers are observed, so networks run layer by
/// layer, dense.
class ActivationMeter {
 public:
  /// `sparse_alone`: of these only what has 2:4 activations in training (nn::Sparse24).
  template <class Model>
  ActivationMeter(const Model& model, double dense_share, bool sparse_alone = false)
      : dense_share_(dense_share),
        observe_(model, {.forward = [this](const nn::LinearCall& call) { see(call); }}) {
    nn::for_each<nn::Mlp>(model, [&](const std::string& name, const nn::Mlp& mlp) {
      if (sparse_alone && !nn::sparse24_of(mlp)) left_out_.insert(name);
    });
    nn::for_each<nn::Linear>(model, [&](const std::string& name, const nn::Linear& layer) {
      const auto* const cola = std::get_if<nn::Cola>(&layer.form);
      if (cola && cola->activation == ops::Activation::relu_squared &&
          (!sparse_alone || !cola->sparse24.empty()))
        cola_.emplace(name, cola);
    });
  }

  const std::map<std::string, ActivationSparsity>& networks() const { return networks_; }
  /// By the length of the names, of equal ones in their order: those of one kind by the index of their
  /// blocks.
  std::vector<std::string> names() const;

 private:
  void see(const nn::LinearCall& call);
  void measure(const std::string& name, const Tensor& activations);
  double dense_share_;
  std::set<std::string> left_out_;               // networks
  std::map<std::string, const nn::Cola*> cola_;  // by the names of the layers
  std::map<std::string, ActivationSparsity> networks_;
  nn::Observe observe_;
};

}  // namespace tessera::eval

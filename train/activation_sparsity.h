#pragma once

#include <map>
#include <string>
#include <vector>

#include "nn/observe.h"

/// How sparse the hidden activations of feed-forward networks are, and what 2:4 sparsity costs them.

namespace tessera::train {

/// Of activations a [tokens, columns], by their definition, on the host: the yardstick of the kernels.
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
/// Of the columns `dense_share` by their own counts are the densest. a: floating, on any device.
ActivationSparsity activation_sparsity(const Tensor& a, double dense_share);

/// The smallest number of columns that a split GEMM must keep dense so that at most `dropped` of the energy
/// is dropped along features and tokens; columns are taken from the densest on. At most all of them.
int64_t dense_columns_for(const Tensor& a, double dropped);

/// While it lives, measures the input of the second layer of each feed-forward network of `model`, in its
/// first call: by the names of the networks ("blocks.3.mlp"). Layers are observed, so networks run layer by
/// layer, dense.
class ActivationMeter {
 public:
  template <class Model>
  ActivationMeter(const Model& model, double dense_share)
      : dense_share_(dense_share),
        observe_(model, {.forward = [this](const nn::LinearCall& call) { see(call); }}) {}

  const std::map<std::string, ActivationSparsity>& networks() const { return networks_; }
  /// By the index of their blocks, where their names have one, else in the order of the names.
  std::vector<std::string> names() const;

 private:
  void see(const nn::LinearCall& call);
  double dense_share_;
  std::map<std::string, ActivationSparsity> networks_;
  nn::Observe observe_;
};

}  // namespace tessera::train

#pragma once

#include <span>
#include <vector>

#include "nn/mlp.h"

/// 2:4 sparse activations of feed-forward networks (nn::Sparse24).

namespace tessera::nn {

/// Gives both layers the form, with zeros as counts: the first call of a split GEMM takes the first columns
/// as the densest. For method soft_threshold without a scale, one is fitted to the second layer's weight.
/// Throws if the network is gated, its activation is not that of the form, or the settings do not go
/// together.
void set_sparse24(Mlp& mlp, Sparse24 form);

/// The form of a network that has it, or null. Throws if one of its layers alone has it, or if it is gated.
const Sparse24* sparse24_of(const Mlp& mlp);
Sparse24* sparse24_of(Mlp& mlp);

/// The settings of ops::mlp_sparse24 for x: those of the form's schedule now, and its state.
ops::MlpSparse24 call_of(const Sparse24& form, const Tensor& x);
/// The same for a dense network: every GEMM is dense, and nothing is dropped.
ops::MlpSparse24 dense_call(ops::Activation activation);

}  // namespace tessera::nn

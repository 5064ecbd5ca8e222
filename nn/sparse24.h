#pragma once

#include <span>

#include "nn/mlp.h"

/// 2:4 sparse activations of feed-forward networks, and between the factors of linear layers (nn::Sparse24).

namespace tessera::nn {

/// Gives both layers the form, with zeros as counts: the first call of a split GEMM takes the first columns
/// as the densest. For method soft_threshold without a scale, one is fitted to the second layer's weight.
/// Throws if the network is gated, its activation is not that of the form, or the settings do not go
/// together.
///
/// Two low_rank layers of one part stay so, and the network is
///   y = S(f(x a1^T b1^T + up_bias)) a2^T b2^T + down_bias + residual
/// with the factors (b1, a1) of up and (b2, a2) of down: ops::mlp_sparse24 with b1 and a2 as weights, between
/// two ops::linear, which are dense.
void set_sparse24(Mlp& mlp, Sparse24 form);
/// The same for the activations between the factors of a Cola layer, y = S(f(x a^T)) b^T + bias: each part
/// gets the form, with counts and a scale of its own. Throws if the layer has another form.
void set_sparse24(Linear& layer, const Sparse24& form);

/// The form of a network that has it, or null. Throws if one of its layers alone has it, or if it is gated.
const Sparse24* sparse24_of(const Mlp& mlp);
Sparse24* sparse24_of(Mlp& mlp);
/// Those of the parts of a Cola layer; empty if it has none.
std::span<const Sparse24> sparse24_of(const Linear& layer);
std::span<Sparse24> sparse24_of(Linear& layer);

/// The settings of ops::mlp_sparse24 for x: those of the form's schedule now, and its state.
ops::MlpSparse24 call_of(const Sparse24& form, const Tensor& x);
/// A recorded call of that operator, which moves the form's state on. A recomputation takes the state of the
/// first run and leaves the form's alone (autograd/checkpoint.h). With `l1` the result has it.
ops::MlpSparse24Result run_sparse24(const Sparse24& form, bool l1, const Tensor& x, const Tensor& up,
                                    const Tensor& down, const Tensor& up_bias = {},
                                    const Tensor& down_bias = {}, const Tensor& residual = {});
/// The same for a dense network: every GEMM is dense, and nothing is dropped.
ops::MlpSparse24 dense_call(ops::Activation activation);

}  // namespace tessera::nn

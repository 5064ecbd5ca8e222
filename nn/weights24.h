#pragma once

#include <string>

#include "nn/linear.h"

/// 2:4 weights of linear layers while they train (nn::Weights24; docs/sparse_training.md).

namespace tessera::nn {

/// Gives the layer the form, with the mask of its weight as it is. With `mvue` the gradient of the weight is
/// of two of every four tokens, drawn from that generator, whose state is the caller's to save. Throws unless
/// the layer is dense and has a weight of its own.
void set_weights24(Linear& layer, const std::optional<Rng>& mvue = {});

/// The form of a layer that has it, or null.
Weights24* weights24_of(Linear& layer);
const Weights24* weights24_of(const Linear& layer);

/// Makes the mask of the weight as it is now, and counts the elements that were kept and are pruned, or the
/// other way round (Weights24::flips). Only for a layer that has the form. The new mask lies where the old
/// one did, so that a captured step follows.
void refresh_weights24(Linear& layer);

/// Calls f(name, layer) for every linear layer of the model that has the form.
template <class Model, class F>
void for_each_weights24(Model& model, F&& f) {
  for_each<Linear>(model, [&](const std::string& name, auto& layer) {
    if (weights24_of(layer)) f(name, layer);
  });
}

/// ops::masked_decay24 of the layer: f32 (f64 for f64), recorded. Undefined unless it has the form and is
/// active.
Tensor masked_decay(const Linear& layer);

/// The weight as the layer multiplies it: its own, or, while it has the form and is active, a copy with zeros
/// where the mask prunes.
Tensor masked_weight(const Linear& layer);

}  // namespace tessera::nn

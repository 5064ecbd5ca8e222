#pragma once

#include "nn/module.h"
#include "runtime/rng.h"

namespace tessera::nn {

/// While training, sets each element to 0 with probability p and divides the others by 1 - p; else the input
/// itself.
struct Dropout {
  static constexpr const char* kKind = "Dropout";

  /// Draws from `rng`, whose source it shares. Throws unless 0 <= p < 1.
  Dropout(double p, const Rng& rng);
  Tensor operator()(const Tensor& x, Site site = Site::here()) const;
  /// Whether dropout is active: training, and p > 0.
  bool drops() const { return training && p > 0; }
  void fields(auto&&) {}
  LayerName layer_name;  // for messages

  double p;
  Rng rng;
  bool training = true;
};

/// Switches every Dropout of the model on (training) or off (evaluation).
template <class Model>
void set_training(Model& model, bool training) {
  for_each<Dropout>(model, [&](const std::string&, Dropout& layer) { layer.training = training; });
}

}  // namespace tessera::nn

#pragma once

#include "tensor/tensor.h"

namespace tessera::ops {

/// Element-by-element nonlinearities. x and y are floating, of any shape and layout.
///   relu          max(x, 0)                      derivative 0 at 0
///   relu_squared  max(x, 0)^2                    So et al., "Primer", arXiv:2109.08668
///   silu          x / (1 + exp(-x))              Elfwing, Uchibe, Doya, arXiv:1702.03118
///   gelu          x Phi(x), by erf               Hendrycks, Gimpel, arXiv:1606.08415
///   gelu_tanh     the tanh approximation of it   ibid., section 2
/// Rounding: computed in f32 (f64 for f64) and rounded once. Backward keeps x: dx = dy f'(x).
enum class Activation : uint8_t { none, relu, relu_squared, silu, gelu, gelu_tanh };

/// Throws for an unsupported dtype. `none` returns x itself.
Tensor activation(const Tensor& x, Activation kind, Site site = Site::here());

inline Tensor relu(const Tensor& x, Site site = Site::here()) {
  return activation(x, Activation::relu, site);
}
inline Tensor relu_squared(const Tensor& x, Site site = Site::here()) {
  return activation(x, Activation::relu_squared, site);
}
inline Tensor silu(const Tensor& x, Site site = Site::here()) {
  return activation(x, Activation::silu, site);
}
inline Tensor gelu(const Tensor& x, Site site = Site::here()) {
  return activation(x, Activation::gelu, site);
}
inline Tensor gelu_tanh(const Tensor& x, Site site = Site::here()) {
  return activation(x, Activation::gelu_tanh, site);
}

const char* name_of(Activation kind);                // "silu"
Activation parse_activation(std::string_view name);  // throws, naming the nearest

}  // namespace tessera::ops

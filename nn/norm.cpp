#include "nn/norm.h"

namespace tessera::nn {
namespace {

Tensor new_vector(int64_t width, double value, DType dtype, Device device) {
  Tensor vector = Tensor::full({width}, value, dtype, device);
  make_parameter(vector);
  return vector;
}

ops::ResidualDropout operator_dropout(const Dropout* dropout) {
  return dropout && dropout->drops() ? ops::ResidualDropout{dropout->p, dropout->rng}
                                     : ops::ResidualDropout{};
}

}  // namespace

LayerNorm::LayerNorm(int64_t width, Device device, LayerNormOptions options) : eps(options.eps) {
  if (options.weight) weight = new_vector(width, 1, options.dtype, device);
  if (options.bias) bias = new_vector(width, 0, options.dtype, device);
}

Tensor LayerNorm::operator()(const Tensor& x, Site site) const {
  const LayerCall call(*this, site);
  return ops::layernorm(x, weight, bias, eps);
}

ops::AddNorm LayerNorm::add(const Tensor& x, const Tensor& residual, const Dropout* dropout,
                            Site site) const {
  const LayerCall call(*this, site);
  return ops::add_layernorm(x, residual, weight, bias, eps, operator_dropout(dropout));
}

RmsNorm::RmsNorm(int64_t width, Device device, RmsNormOptions options) : eps(options.eps) {
  if (options.weight) weight = new_vector(width, 1, options.dtype, device);
}

Tensor RmsNorm::operator()(const Tensor& x, Site site) const {
  const LayerCall call(*this, site);
  return ops::rmsnorm(x, weight, eps);
}

ops::AddNorm RmsNorm::add(const Tensor& x, const Tensor& residual, const Dropout* dropout, Site site) const {
  const LayerCall call(*this, site);
  return ops::add_rmsnorm(x, residual, weight, eps, operator_dropout(dropout));
}

}  // namespace tessera::nn

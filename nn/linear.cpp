#include "nn/linear.h"

#include <cmath>

#include "ops/grouped_linear/grouped_linear.h"
#include "ops/linear/linear.h"
#include "ops/mlp/mlp.h"

namespace tessera::nn {
namespace {

/// A parameter of `shape`, filled by the initialiser.
Tensor new_weight(const Shape& shape, Rng& rng, Device device, DType dtype, Init choice) {
  check(is_floating(dtype), "nn: parameters cannot be ", dtype, "; expected a floating dtype");
  Tensor weight = Tensor::empty(shape, dtype, device);
  init::apply(choice, weight, rng);
  make_parameter(weight);
  return weight;
}

Tensor new_bias(const Shape& shape, int64_t in, Rng& rng, Device device, DType dtype, Init choice) {
  Tensor bias = Tensor::empty(shape, dtype, device);
  const double bound = choice == Init::fan_in && in > 0 ? 1 / std::sqrt(double(in)) : 0;
  if (bound > 0)
    init::uniform(bias, rng, -bound, bound);
  else
    init::zeros(bias);
  make_parameter(bias);
  return bias;
}

}  // namespace

Linear::Linear(int64_t in, int64_t out, Rng& rng, Device device, LinearOptions options)
    : weight(new_weight({out, in}, rng, device, options.dtype, options.init)) {
  if (options.bias) bias = new_bias({out}, in, rng, device, options.dtype, options.init);
}

Tensor Linear::operator()(const Tensor& x, const Tensor& residual) const {
  return ops::linear(x, weight, bias, residual);
}

GroupedLinear::GroupedLinear(int64_t groups, int64_t in, int64_t out, Rng& rng, Device device,
                             GroupedLinearOptions options)
    : weight(new_weight({groups, out, in}, rng, device, options.dtype, options.init)),
      shared(options.shared) {
  if (options.bias) bias = new_bias({groups, out}, in, rng, device, options.dtype, options.init);
}

Tensor GroupedLinear::operator()(const Tensor& x) const {
  return ops::grouped_linear(x, weight, bias, shared);
}

Mlp::Mlp(int64_t in, int64_t hidden, Rng& rng, Device device, MlpOptions options)
    : up(in, hidden, rng, device, {options.bias, options.dtype, options.init}),
      down(hidden, options.out ? options.out : in, rng, device, {options.bias, options.dtype, options.init}),
      activation(options.activation) {}

Tensor Mlp::operator()(const Tensor& x, const Tensor& residual) const {
  return ops::mlp(x, up.weight, down.weight, activation, up.bias, down.bias, residual);
}

}  // namespace tessera::nn

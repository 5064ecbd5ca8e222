#include "nn/linear.h"

#include <cmath>

#include "nn/compressed_internal.h"
#include "nn/low_rank_internal.h"
#include "nn/observe.h"
#include "nn/slice_scope.h"
#include "ops/grouped_linear/grouped_linear.h"
#include "ops/linear/linear.h"
#include "ops/pointwise/pointwise.h"
#include "ops/sparse24/weight24.h"

namespace tessera::nn {
namespace {

/// A parameter of `shape`, filled by the initialiser.
Tensor new_weight(const Shape& shape, const Rng& rng, Device device, DType dtype, Init choice) {
  check(is_floating(dtype), "nn: parameters cannot be ", dtype, "; expected a floating dtype");
  Tensor weight = Tensor::empty(shape, dtype, device);
  init::apply(choice, weight, rng);
  make_parameter(weight);
  return weight;
}

Tensor new_bias(const Shape& shape, int64_t in, const Rng& rng, Device device, DType dtype, Init choice) {
  Tensor bias = Tensor::empty(shape, dtype, device);
  const double bound = choice == Init::fan_in && in > 0 ? 1 / std::sqrt(double(in)) : 0;
  if (bound > 0)
    init::uniform(bias, rng, -bound, bound);
  else
    init::zeros(bias);
  make_parameter(bias);
  return bias;
}

/// The GEMM of a linear layer in each form: one overload per form.
Tensor multiply(const Dense&, const Tensor& x, const Tensor& weight, const Tensor& bias,
                const Tensor& residual) {
  return ops::linear(x, weight, bias, residual);
}
Tensor multiply(const Scaled& scaled, const Tensor& x, const Tensor& weight, const Tensor& bias,
                const Tensor& residual) {
  return ops::linear(ops::scale(x, scaled.factor), weight, bias, residual);
}
Tensor multiply(const SlicedBackward& slice, const Tensor& x, const Tensor& weight, const Tensor& bias,
                const Tensor& residual) {
  return ops::linear(x, weight, bias, residual, SliceScope::completed(slice));
}

/// Gates zero the inputs of some rows, and then all rows are multiplied together: two GEMMs would read the
/// weights twice.
Tensor multiply_gated_rows(const Compressed& compressed, const Tensor& x, const Tensor& bias,
                           const Tensor& residual) {
  int64_t first = 0, out = 0;
  for (const ops::SparsePart& part : compressed.parts) out += part.weight.out;
  const Tensor y = Tensor::empty(x.shape().with(-1, out), x.dtype(), x.device());
  for (const ops::SparsePart& part : compressed.parts) {
    const int64_t end = first + part.weight.out;
    const auto columns = [&](const Tensor& all) {
      return all.defined() ? all.detach().slice(-1, first, end) : all;
    };
    const Tensor inputs = gated_inputs(x, part.gate, compressed.prefill);
    y.slice(-1, first, end)
        .copy_from(ops::sparse_linear(inputs, part.weight, {}, columns(bias), columns(residual)));
    first = end;
  }
  return y;
}

Tensor multiply(const Compressed& compressed, const Tensor& x, const Tensor& weight, const Tensor& bias,
                const Tensor& residual) {
  check(!weight.defined(), "linear: the layer is compressed, but it is called with a dense weight ",
        weight.shape(), "; a layer that is tied to another's weight stays dense");
  if (spares_rows(compressed, x)) return multiply_gated_rows(compressed, x, bias, residual);
  return ops::sparse_linear(x, compressed.parts, bias, residual);
}

/// A layer by itself has no hidden activations.
Tensor multiply(const Sparse24&, const Tensor& x, const Tensor& weight, const Tensor& bias,
                const Tensor& residual) {
  return ops::linear(x, weight, bias, residual);
}

Tensor multiply(const Weights24& form, const Tensor& x, const Tensor& weight, const Tensor& bias,
                const Tensor& residual) {
  return form.active ? ops::weight24_linear(x, weight, form.mask, bias, residual, form.mvue)
                     : ops::linear(x, weight, bias, residual);
}

template <class Factored>
requires requires(const Factored& form) {
  form.factors;
}
Tensor multiply(const Factored& form, const Tensor& x, const Tensor& weight, const Tensor& bias,
                const Tensor& residual) {
  check(!weight.defined(), "linear: the layer is made of factors (", Factored::kKind,
        "), but it is called with a dense weight ", weight.shape(),
        "; a layer that is tied to another's weight stays dense");
  return multiply_factors(form, x, bias, residual);
}

Tensor multiply_groups(const Dense&, const Tensor& x, const Tensor& weight, const Tensor& bias, bool shared) {
  return ops::grouped_linear(x, weight, bias, shared);
}
Tensor multiply_groups(const Scaled& scaled, const Tensor& x, const Tensor& weight, const Tensor& bias,
                       bool shared) {
  return ops::grouped_linear(ops::scale(x, scaled.factor), weight, bias, shared);
}
Tensor multiply_groups(const SlicedBackward& slice, const Tensor&, const Tensor&, const Tensor&, bool) {
  fail_at(Site::here(),
          "nn: a grouped linear layer has no sliced backward pass (its slice: ", to_string(slice),
          "); set its form to Dense");
}

Tensor multiply_groups(const Compressed&, const Tensor&, const Tensor&, const Tensor&, bool) {
  fail_at(Site::here(), "linear: layers in groups have no compressed form; leave this one dense");
}
Tensor multiply_groups(const Sparse24&, const Tensor&, const Tensor&, const Tensor&, bool) {
  fail_at(Site::here(), "linear: layers in groups have no sparse24 form; leave this one dense");
}

Tensor multiply_groups(const Weights24&, const Tensor&, const Tensor&, const Tensor&, bool) {
  fail_at(Site::here(), "linear: layers in groups have no weights24 form; leave this one dense");
}

template <class Factored>
requires requires(const Factored& form) {
  form.factors;
}
Tensor multiply_groups(const Factored&, const Tensor&, const Tensor&, const Tensor&, bool) {
  fail_at(Site::here(), "linear: layers in groups have no form \"", Factored::kKind,
          "\"; leave this one dense");
}

}  // namespace

Linear::Linear(int64_t in, int64_t out, const Rng& rng, Device device, LinearOptions options)
    : in(in), out(out) {
  if (!options.tied) weight = new_weight({out, in}, rng, device, options.dtype, options.init);
  if (options.bias) bias = new_bias({out}, in, rng, device, options.dtype, options.init);
}

Tensor Linear::operator()(const Tensor& x, const Tensor& residual, Site site) const {
  const LayerCall call(*this, site);
  return with(weight, x, residual);
}

Tensor Linear::with(const Tensor& used, const Tensor& x, const Tensor& residual, Site site) const {
  const LayerCall call(*this, site);
  note_form(form);
  return Observe::report(
      this, x, std::visit([&](const auto& one) { return multiply(one, x, used, bias, residual); }, form));
}

GroupedLinear::GroupedLinear(int64_t groups, int64_t in, int64_t out, const Rng& rng, Device device,
                             GroupedLinearOptions options)
    : weight(new_weight({groups, out, in}, rng, device, options.dtype, options.init)),
      shared(options.shared) {
  if (options.bias) bias = new_bias({groups, out}, in, rng, device, options.dtype, options.init);
}

Tensor GroupedLinear::operator()(const Tensor& x, Site site) const {
  const LayerCall call(*this, site);
  note_form(form);
  return Observe::report(
      this, x,
      std::visit([&](const auto& one) { return multiply_groups(one, x, weight, bias, shared); }, form));
}

}  // namespace tessera::nn

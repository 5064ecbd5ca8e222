#include "ops/verify.h"

#include <cmath>

#include "autograd/tape.h"
#include "runtime/philox.h"

namespace tessera::ops {
namespace {

Tensor output_gradient(const Tensor& output, uint64_t number, uint64_t seed) {
  std::vector<double> values(size_t(output.count()));
  for (size_t i = 0; i < values.size(); ++i) {
    const Uint4 random = philox(seed, 1000 + number, i);
    values[i] = double(uniform_half_open(random.word[0])) * 2 - 1;
  }
  return Tensor::from(values, output.shape()).to(output.dtype());
}

}  // namespace

Results run_with_gradients(const OpSpec& op, std::vector<Tensor> inputs, const Attrs& attrs,
                           const std::vector<Tensor>& grads) {
  Results results;
  bool any = false;
  for (size_t i = 0; i < inputs.size(); ++i)
    if (inputs[i].defined() && op.inputs[i].has_gradient()) require_grad(inputs[i]), any = true;
  if (!any || grads.empty()) {
    results.outputs = op.run(inputs, attrs);
    check_outputs(op, inputs, results.outputs);
    return results;
  }
  Tape tape;
  results.outputs = op.run(inputs, attrs);
  check_outputs(op, inputs, results.outputs);
  std::vector<Tensor> on_tape, used;
  for (size_t n = 0; n < results.outputs.size(); ++n) {
    if (!op.outputs[n].differentiable || !requires_grad(results.outputs[n])) continue;
    on_tape.push_back(results.outputs[n]);
    used.push_back(grads[n]);
  }
  if (!on_tape.empty()) tape.backward(on_tape, used);
  for (const Tensor& input : inputs)
    results.gradients.push_back(requires_grad(input) ? grad(input) : Tensor());
  for (Tensor& output : results.outputs) output = output.detach();
  return results;
}

std::vector<Tensor> make_gradients(const OpSpec& op, const std::vector<Tensor>& outputs, Device device,
                                   uint64_t seed) {
  std::vector<Tensor> grads(outputs.size());
  for (size_t n = 0; n < outputs.size(); ++n)
    if (op.outputs[n].differentiable) grads[n] = output_gradient(outputs[n], n, seed).to(device);
  return grads;
}

std::vector<Tensor> oracle_gradients(const OpSpec& op, const std::vector<Tensor>& gradients) {
  std::vector<Tensor> wide = gradients;
  for (size_t n = 0; n < wide.size(); ++n)
    if (wide[n].defined() && op.outputs[n].dtypes.size() != 1) wide[n] = wide[n].to(DType::f64);
  return wide;
}

Errors compare(const Tensor& y, const Tensor& reference) {
  Errors errors;
  const auto got = y.to_vector<double>(), want = reference.to_vector<double>();
  for (size_t i = 0; i < want.size(); ++i) {
    errors.reference = std::max(errors.reference, std::isfinite(want[i]) ? std::abs(want[i]) : 0.0);
    const bool same = got[i] == want[i] || (std::isnan(got[i]) && std::isnan(want[i]));
    const double error = same ? 0 : std::abs(got[i] - want[i]);
    if (!(error <= errors.largest))
      errors.largest = std::isnan(error) ? INFINITY : error, errors.at = int64_t(i);
  }
  return errors;
}

Precision precision_of(const OpSpec& op, const Tensor& y, F32Math math) {
  return {y.dtype(), y.dtype() == DType::f32 && op.honours_f32_math ? math : F32Math::ieee};
}

double tolerance(const OpSpec& op, Precision precision, double baseline_error, double largest_reference) {
  check(
      std::isfinite(baseline_error), op.name, ": the baseline differs from the reference by ", baseline_error,
      "; expected a finite error (it has a NaN or an infinity where the reference has none, or the reverse)");
  if (!is_floating(precision.dtype)) return 0;
  const double factor = precision == DType::f32 ? op.tolerance_factor_f32 : op.tolerance_factor;
  return factor * baseline_error + 2 * epsilon(precision) * largest_reference;
}

double cpu_tolerance(const OpSpec& op, Precision precision, double largest_reference) {
  if (!is_floating(precision.dtype)) return 0;
  const double sums = 64 * epsilon(precision == DType::f64 ? DType::f64 : DType::f32);
  const double ulp = 2 + (size_of(precision.dtype) < 4 ? op.cpu_extra_ulp : 0);
  return (sums + ulp * epsilon(precision)) * std::max(largest_reference, 1e-30);
}

}  // namespace tessera::ops

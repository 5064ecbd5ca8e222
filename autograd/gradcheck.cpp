#include "autograd/gradcheck.h"

#include <algorithm>
#include <cmath>

#include "autograd/gradient_internal.h"
#include "runtime/philox.h"

namespace tessera {
namespace {

/// v[i] in (0.5, 1.5) with a random sign: no direction is nearly missed.
double projection(uint64_t seed, uint64_t output, int64_t index) {
  const Uint4 random = philox(seed, output, uint64_t(index));
  const double magnitude = 0.5 + double(uniform_half_open(random.word[0]));
  return random.word[1] & 1u ? magnitude : -magnitude;
}

double project(const GradcheckFunction& f, const std::vector<Tensor>& inputs, uint64_t seed) {
  const NoTape off;
  const std::vector<Tensor> outputs = f(inputs);
  double sum = 0;
  for (size_t n = 0; n < outputs.size(); ++n) {
    if (!is_floating(outputs[n].dtype())) continue;
    const std::vector<double> values = outputs[n].detach().to_vector<double>();
    for (size_t i = 0; i < values.size(); ++i) sum += projection(seed, n, int64_t(i)) * values[i];
  }
  return sum;
}

}  // namespace

GradcheckResult gradcheck(const GradcheckFunction& f, const std::vector<Tensor>& inputs,
                          const std::vector<bool>& differentiable, const GradcheckOptions& options) {
  check(differentiable.empty() || differentiable.size() == inputs.size(), "gradcheck: differentiable has ",
        differentiable.size(), " entries for ", inputs.size(), " inputs; expected one each, or none");
  std::vector<Tensor> leaves;
  std::vector<bool> wanted;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool floating = inputs[i].defined() && inputs[i].dtype() == DType::f64;
    wanted.push_back(floating && (differentiable.empty() || differentiable[i]));
    leaves.push_back(inputs[i].detach());
    if (wanted[i]) {
      check(!inputs[i].layout().is_expanded(), "gradcheck: input ", i,
            " has overlapping elements (stride 0)");
      require_grad(leaves[i]);
    }
  }
  check(std::ranges::find(wanted, true) != wanted.end(), "gradcheck: no input is f64",
        differentiable.empty() ? "" : " and differentiable", "; only such inputs are perturbed");
  {
    std::vector<std::pair<Tensor, Tensor>> kept;  // parameters, and their gradients
    for (const Tensor& leaf : gradients::leaves_used([&] { f(leaves); })) {
      const auto is_same = [&](const Tensor& own) { return own.grad_state() == leaf.grad_state(); };
      if (std::ranges::none_of(leaves, is_same))
        kept.emplace_back(leaf, grad(leaf).defined() ? grad(leaf).clone() : Tensor());
    }
    Tape tape;
    const std::vector<Tensor> outputs = f(leaves);
    std::vector<Tensor> results, grads;
    for (size_t n = 0; n < outputs.size(); ++n) {
      if (!requires_grad(outputs[n])) continue;
      std::vector<double> v(size_t(outputs[n].count()));
      for (size_t i = 0; i < v.size(); ++i) v[i] = projection(options.seed, n, int64_t(i));
      results.push_back(outputs[n]);
      grads.push_back(Tensor::from(v, outputs[n].shape()).to(outputs[n].dtype()));
    }
    check(!results.empty(), "gradcheck: no output is on the tape");
    tape.backward(results, grads);
    for (const auto& [leaf, before] : kept) {
      if (before.defined())
        grad(leaf).copy_from(before);
      else
        zero_grad(leaf);
    }
  }

  GradcheckResult result;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!wanted[i]) continue;
    const Tensor d_input = grad(leaves[i]);
    const std::vector<double> analytic =
        d_input.defined() ? d_input.to_vector<double>() : std::vector<double>(size_t(inputs[i].count()), 0.0);
    // Perturb through a private copy of the same layout: the caller's tensor stays as it is.
    auto storage =
        std::make_shared<Storage>(Device::cpu(), Device::cpu().allocator(), inputs[i].storage()->bytes);
    Tensor moved = Tensor::view_of(storage, inputs[i].layout(), DType::f64);
    moved.copy_from(inputs[i].detach());
    std::vector<Tensor> arguments;
    for (const Tensor& input : inputs) arguments.push_back(input.detach());
    arguments[i] = moved;
    for (int64_t index = 0; index < inputs[i].count(); ++index) {
      int64_t rest = index, offset = 0;
      for (int dim = moved.rank() - 1; dim >= 0; --dim) {
        offset += rest % moved.size(dim) * moved.layout().stride(dim);
        rest /= moved.size(dim);
      }
      double& x = moved.data<double>()[offset];
      const double centre = x, h = options.step * std::max(1.0, std::abs(centre));
      const auto at = [&](double steps) {
        x = centre + steps * h;
        return project(f, arguments, options.seed);
      };
      const double numeric = (at(-2) - 8 * at(-1) + 8 * at(1) - at(2)) / (12 * h);
      x = centre;
      const double error = std::abs(analytic[size_t(index)] - numeric);
      const double ratio = error / (options.atol + options.rtol * std::abs(numeric));
      if (!(ratio <= result.worst)) {  // NaN counts as worst
        result.worst = ratio;
        MessageStream text;
        text.precision(12);
        text << "input " << i << " element " << index << " of " << describe(inputs[i]) << ": analytic "
             << analytic[size_t(index)] << ", numeric " << numeric << ", error " << error;
        result.message = text.str();
      }
    }
  }
  result.ok = result.worst <= 1;
  return result;
}

}  // namespace tessera

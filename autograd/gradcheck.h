#pragma once

#include <functional>
#include <string>
#include <vector>

#include "autograd/tape.h"

namespace tessera {

struct GradcheckOptions {
  double atol = 1e-8, rtol = 1e-6;  // |analytic - numeric| <= atol + rtol * |numeric|
  double step = 1e-3;               // h = step * max(1, |x|)
  uint64_t seed = 1;                // of the projection
};

struct GradcheckResult {
  bool ok = true;
  std::string message;  // the worst element: input, index, both values
  double worst = 0;     // largest |analytic - numeric| / (atol + rtol * |numeric|)
};

using GradcheckFunction = std::function<std::vector<Tensor>(const std::vector<Tensor>& inputs)>;

/// Compares the gradients that the tape computes for L = sum over outputs of <v, f(inputs)>, with v a fixed
/// random tensor, to central differences with the 4-point stencil (f(-2h) - 8 f(-h) + 8 f(h) - f(2h)) / 12h,
/// whose error is O(h^4). Inputs that are f64 and named in `differentiable` (all f64 ones if empty) are
/// perturbed element by element through their own layout, so strided views work. An input whose elements
/// overlap in memory (stride 0) is refused. Parameters that f uses keep the gradients that they had. Throws
/// if no input is perturbed, or `differentiable` has neither none nor one entry per input.
GradcheckResult gradcheck(const GradcheckFunction& f, const std::vector<Tensor>& inputs,
                          const std::vector<bool>& differentiable = {}, const GradcheckOptions& options = {});

}  // namespace tessera

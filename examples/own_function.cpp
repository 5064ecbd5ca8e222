#include <cstdio>

#include "tessera.h"

using namespace tessera;

/// Gradients without a model: the tape differentiates what ran, gradcheck compares that with central
/// differences, and checkpoint recomputes instead of keeping.
Tensor energy(const Tensor& x) {  // sum of silu(x_i)^2 + log(1 + x_i^2)
  const Tensor silu = ops::silu(x);
  return ops::sum(silu * silu + ops::log(1 + x * x));
}

int main() {
  Tensor x = Tensor::from(std::vector<double>{-2, -0.5, 0.1, 3}, {4});
  const GradcheckResult result = gradcheck([](const auto& in) { return std::vector{energy(in[0])}; }, {x});

  require_grad(x);
  {
    Tape tape;
    tape.backward(energy(x));
  }
  const std::vector<double> kept = grad(x).to_vector<double>();
  zero_grad(x);
  {
    Tape tape;
    tape.backward(checkpoint([](const Tensor& in) { return energy(in); }, x));
  }
  const bool same = grad(x).to_vector<double>() == kept;
  for (const double value : kept) std::printf("%g ", value);
  std::printf("\ngradcheck: %.2f of the tolerance; recomputed: %s\n", result.worst,
              same ? "the same bits" : "differs");
  return result.ok && same ? 0 : 1;
}

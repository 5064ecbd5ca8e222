#include <cstdio>

#include "tessera.h"

using namespace tessera;

/// An operator of your own: a function that computes from tensors off the tape and records how its gradients
/// are computed. gradcheck compares these with central differences, and checkpoint recomputes instead of
/// keeping.

/// y = x exp(-s x^2), with s of one element.
Tensor bump(const Tensor& x, const Tensor& s, Site site = Site::here()) {
  const CallScope call(site);  // errors name the caller's line
  check(s.count() == 1, "bump: s is ", describe(s), "; expected one element");
  // Off the tape: what is computed here is not recorded step by step.
  const Tensor xs = x.detach(), square = xs * xs;
  const Tensor bell = ops::exp(-(square * s.detach()));
  Tensor y = xs * bell;
  if (Tape* const tape = Tape::recording(x, s)) {  // there is a tape, and x or s needs a gradient
    // Saved notices if the tensor is overwritten before it is used. No one else has `bell`.
    tape->record("bump", {&x, &s}, {&y}, [x = Saved(x), s = Saved(s), bell](Backward& b) {
      const Tensor square = x.get() * x.get();
      const Tensor slope = b.grad() * bell;  // dy exp(-s x^2)
      if (b.needs(0)) {                      // dx = dy (1 - 2 s x^2) exp(-s x^2)
        const Tensor bend = slope * (2 * square * s.get());
        b.give(0, slope - bend);  // new memory; accumulate() only reads its tensor
      }
      if (b.needs(1)) {  // ds = -sum of dy x^3 exp(-s x^2)
        const Tensor sum = ops::sum(slope * square * x.get());
        b.give(1, -ops::reshape(sum, s.get().shape()));
      }
    });
  }
  return y;
}

Tensor energy(const Tensor& x, const Tensor& s) {  // a function of recorded operators needs none of this
  const Tensor y = bump(x, s);
  return ops::sum(y * ops::silu(x));
}

int main() {
  Tensor x = Tensor::from(std::vector<double>{-2, -0.5, 0.1, 3}, {4});
  Tensor s = Tensor::full({1}, 0.3, DType::f64, Device::cpu());
  const GradcheckResult result =
      gradcheck([](const auto& in) { return std::vector{bump(in[0], in[1])}; }, {x, s});
  if (!result.ok) std::printf("%s\n", result.message.c_str());

  require_grad(x), require_grad(s);
  {
    Tape tape;
    tape.backward(energy(x, s));
  }
  const std::vector<double> kept = grad(x).to_vector<double>();
  zero_grad(x), zero_grad(s);
  {
    Tape tape;
    tape.backward(checkpoint([&](const Tensor& in) { return energy(in, s); }, x));
  }
  const bool same = grad(x).to_vector<double>() == kept;
  for (const double value : kept) std::printf("%g ", value);
  std::printf("\ngradcheck: %.2f of the tolerance; recomputed: %s\n", result.worst,
              same ? "the same bits" : "differs");
  return result.ok && same ? 0 : 1;
}

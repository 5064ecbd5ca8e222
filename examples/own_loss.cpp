#include <cstdio>

#include "tessera.h"

using namespace tessera;

/// The quantile ("pinball") loss: an error counts tau times where the prediction is too low, 1 - tau times
/// where it is too high. The least mean of it is at the tau-quantile of the target (Koenker, Bassett,
/// "Regression Quantiles", Econometrica 1978).
Tensor quantile_loss(const Tensor& prediction, const Tensor& target, double tau) {
  const Tensor error = target - prediction;
  return ops::mean(ops::maximum(tau * error, (tau - 1) * error));
}

/// Learns the 10 % and the 90 % quantile of y = 2 x + (1 + x) u, where u is uniform in [0, 1]: both are
/// lines.
int main() {
  const Device device = Device::best();
  Rng rng(42);
  nn::Linear model(1, 2, rng, device);  // a column per quantile
  optim::AdamW optimizer(nn::parameters(model), {.lr = 1e-2});
  const Tensor x = Tensor::empty({4096, 1}, DType::f32, device), u = Tensor::empty_like(x);

  double below[2] = {};
  for (int step = 1; step <= 1000; ++step) {
    ops::fill_uniform(x, 0, 1, rng), ops::fill_uniform(u, 0, 1, rng);
    const Tensor y = 2 * x + (1 + x) * u;
    Tape tape;
    const Tensor quantiles = model(x);
    const Tensor low = ops::slice(quantiles, 1, 0, 1), high = ops::slice(quantiles, 1, 1, 2);
    tape.backward(quantile_loss(low, y, 0.1) + quantile_loss(high, y, 0.9));
    optimizer.step();
    optimizer.zero_grad();
    if (step % 200 != 0) continue;
    const Tensor is_below = ops::cast(ops::less(y, quantiles), DType::f32);  // broadcast over both columns
    const std::vector<double> share = ops::mean(is_below, 0).to_vector<double>();
    below[0] = share[0], below[1] = share[1];
    std::printf("step %d: %.1f %% and %.1f %% of the targets are below\n", step, 100 * below[0],
                100 * below[1]);
  }
  const bool learned = below[0] > 0.07 && below[0] < 0.13 && below[1] > 0.87 && below[1] < 0.93;
  return learned ? 0 : 1;
}

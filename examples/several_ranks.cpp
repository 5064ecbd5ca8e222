#include <cstdio>

#include "tessera.h"

using namespace tessera;

/// Learns y = exp(-3 |x|^2) as regression.cpp does, each rank on points of its own. Alone, or
///   tessera launch -n 2 -- ./several_ranks
int main() {
  const dist::World world = dist::World::join();
  const Device device = world.device();
  Rng weights(42), points(uint64_t(43 + world.rank()));
  nn::Sequential model{nn::Linear(2, 64, weights, device), nn::Gelu{}, nn::Linear(64, 1, weights, device)};
  optim::AdamW optimizer(nn::parameters(model), {.lr = 2e-2, .weight_decay = 0.01});
  const dist::DataParallel reduce(optimizer, world);  // steps are those of all ranks together
  const Tensor x = Tensor::empty({256, 2}, DType::f32, device);

  double error = 1;
  for (int step = 1; step <= 1000; ++step) {
    ops::fill_uniform(x, -1, 1, points);
    const Tensor y = ops::exp(-3 * ops::sum(x * x, 1, true));
    Tape tape;
    const Tensor loss = ops::mse_loss(model(x), y);
    tape.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    error = loss.item();
    if (step % 200 == 0 && world.leads())
      std::printf("step %d on %d ranks: mean squared error %.6f\n", step, world.size(), error);
  }
  return error < 2e-3 ? 0 : 1;
}

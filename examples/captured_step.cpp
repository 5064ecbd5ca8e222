#include <cstdio>

#include "tessera.h"

using namespace tessera;

/// The body of a training loop, captured into a CUDA graph: one launch a step, the same words. The batch, the
/// learning rate and the random streams live on the device, so replays see them change. On the CPU every call
/// runs the body.
int main() {
  const Device device = Device::best();
  Rng rng(7);
  nn::Mlp model(8, 32, rng, device, {.out = 1});
  optim::AdamW optimizer(nn::parameters(model), {.lr = 1e-2});
  const Tensor x = Tensor::empty({64, 8}, DType::f32, device), loss = Tensor::zeros({}, DType::f32, device);

  Captured step(device, [&] {
    fill_normal(x, 0, 1, rng);  // fresh numbers in every replay
    const Tensor y = ops::sum(x, 1, true);
    Tape tape;
    const Tensor difference = ops::sub(model(x), y);
    const Tensor squares = ops::mean(ops::mul(difference, difference));
    tape.backward(squares);
    optimizer.step();
    optimizer.zero_grad();
    loss.copy_from(squares.detach());
  });
  const int steps = 400;
  for (int i = 1; i <= steps; ++i) {
    optimizer.set_lr(1e-2 * (1 - double(i) / (steps + 1)));
    step();
  }
  std::printf("%s: mean squared error %.5f after %d steps\n", step.is_graph() ? "graph" : "eager",
              loss.item(), steps);
  return loss.item() < 0.1 ? 0 : 1;  // the variance of y is 8
}

#include <cstdio>

#include "tessera.h"

using namespace tessera;

/// Trains a feed-forward network whose hidden activations are 2:4 sparse: after 20 dense steps two of every
/// four features are kept, but for the densest 10 % of the columns, and two of every four tokens in the
/// gradients of weights. On a GPU of compute capability 9.0 in bf16 those GEMMs run on sparse tensor cores.
int main() {
  Rng rng(1);
  nn::Mlp mlp(32, 128, rng, Device::best(), {.activation = ops::Activation::relu_squared, .bias = false});
  nn::set_sparse24(mlp, {.how = {.dense_share = 0.1}, .order = "stride"});
  optim::AdamW optimizer(nn::parameters(mlp), {.lr = 1e-2});
  const Tensor x = Tensor::empty({256, 32}, DType::f32, Device::best());
  double first = 0, loss = 0;
  for (int step = 0; step < 400; ++step) {
    nn::sparse24_of(mlp)->active = step >= 20;  // the schedule
    ops::fill_uniform(x, -1, 1, rng);
    Tape tape;
    const Tensor mean = ops::mse_loss(mlp(x), x * x);
    tape.backward(mean);
    optimizer.step();
    optimizer.zero_grad();
    loss = mean.item();
    if (step == 0) first = loss;
  }
  std::printf("mean squared error %.4f at first, %.4f after 400 steps\n", first, loss);
  return loss < first / 4 ? 0 : 1;
}

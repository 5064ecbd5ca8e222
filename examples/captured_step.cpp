#include <cstdio>

#include "tessera.h"

using namespace tessera;

/// Two training loops on CUDA graphs. What changes from call to call lives on the device (the batch, the
/// learning rate, the random streams), so that replays see it; gradients follow the replays as well. On the
/// CPU every call runs the body.

struct Problem {
  explicit Problem(Device device)
      : model(8, 32, rng, device, {.out = 1}), x(Tensor::empty({64, 8}, DType::f32, device)) {}

  /// Draws a batch and returns the model's mean squared error on it.
  Tensor loss() {
    ops::fill_normal(x, 0, 1, rng);  // fresh numbers in every replay
    return ops::mse_loss(model(x), ops::sum(x, 1, true));
  }

  Rng rng{7};
  nn::Mlp model;
  Tensor x;
};

constexpr int kSteps = 400;
constexpr double kRate = 1e-2;

double rate_at(int step) {
  return kRate * (1 - double(step) / (kSteps + 1));
}

/// The whole step is one graph: one launch per step.
double whole_step(Device device) {
  Problem problem(device);
  optim::AdamW optimizer(nn::parameters(problem.model), {.lr = kRate});
  Tensor loss;
  Captured step(device, [&] {
    Tape tape;
    loss = problem.loss();
    tape.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
  });
  for (int i = 1; i <= kSteps; ++i) {
    optimizer.set_lr(rate_at(i));
    step();
  }
  return loss.item();
}

/// The graph is a micro-batch, forward and backward; its replays add up until zero_grad().
double accumulated(Device device, int micro_batches) {
  Problem problem(device);
  optim::AdamW optimizer(nn::parameters(problem.model), {.lr = kRate});
  Tensor loss;
  Captured micro_step(device, [&] {
    Tape tape;
    loss = problem.loss();
    tape.backward(loss / micro_batches);
  });
  for (int i = 1; i <= kSteps; ++i) {
    for (int micro = 0; micro < micro_batches; ++micro) micro_step();
    optimizer.set_lr(rate_at(i));
    optimizer.step();
    optimizer.zero_grad();
  }
  return loss.item();
}

int main() {
  const Device device = Device::best();
  const double whole = whole_step(device), several = accumulated(device, 2);
  std::printf("mean squared error after %d steps: %.5f; with two micro-batches per step: %.5f\n", kSteps,
              whole, several);
  return whole < 0.1 && several < 0.1 ? 0 : 1;  // the variance of the sum of x is 8
}

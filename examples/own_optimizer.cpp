/// An optimizer of one's own: a rule for matrices that is not elementwise, next to AdamW for everything else,
/// under the library's masters, clipping, loss scale, groups and checkpoints.

#include <cstdio>

#include "tessera.h"

using namespace tessera;

/// Steps of a fixed length per parameter: the average gradient divided by its norm (You et al.,
/// arXiv:1708.03888, without the factor of the weight's norm). A matrix is seen as a whole, which no
/// elementwise formula does.
class NormalizedMomentum : public optim::Rule {
 public:
  const char* name() const override { return "normalized"; }
  void begin() override {
    average_ = arena("average");  // a state: checkpoints have it
    gradient_ = scratch_arena();  // clipped, and without the loss scale
    direction_ = scratch_arena();
  }
  void step() override {
    take_gradients(gradient_);
    commit(average_, 0.9 * average_ + 0.1 * gradient_);
    for (size_t i = 0; i < parameters().size(); ++i) {
      const Tensor average = view(average_, i).clone(), square = average * average;
      const Tensor norm = ops::sqrt(ops::sum(square.packed().reshape({square.count()}), 0, true));
      view(direction_, i).copy_from(average / (norm + tiny_));
    }
    descend(direction_);  // weight -= lr (direction + weight_decay weight); not in a skipped step
  }

 private:
  Tensor average_, gradient_, direction_, tiny_ = Tensor::full({1}, 1e-12, DType::f32, Device::best());
};

/// Learns y = exp(-3 |x|^2) on the square [-1, 1]^2.
int main() {
  const Device device = Device::best();
  Rng rng(42);
  nn::Sequential model{nn::Linear(2, 64, rng, device), nn::Gelu{}, nn::Linear(64, 1, rng, device)};
  // Matrices by the rule above, biases by AdamW with a learning rate of a tenth.
  optim::Optimizer optimizer("mine", nn::parameters(model), {.lr = 0.1, .max_grad_norm = 1},
                             {{.rule = std::make_shared<NormalizedMomentum>(), .takes = optim::decays},
                              {.rule = optim::adamw_rule(), .lr_scale = 0.1}});
  const optim::Schedule schedule({.kind = optim::ScheduleKind::linear, .lr = 0.1, .steps = 1000});
  const Tensor x = Tensor::empty({256, 2}, DType::f32, device);

  double error = 1;
  for (int step = 0; step < 1000; ++step) {
    ops::fill_uniform(x, -1, 1, rng);
    const Tensor y = ops::exp(-3 * ops::sum(x * x, 1, true));
    Tape tape;
    const Tensor loss = ops::mse_loss(model(x), y);
    tape.backward(loss);
    optimizer.set_lr(schedule.at(step));
    optimizer.step();
    optimizer.zero_grad();
    error = loss.item();
  }
  std::printf("mean squared error after 1000 steps: %.6f\n", error);
  return error < 5e-3 ? 0 : 1;  // the mean of y alone would be wrong by 0.07
}

/// A model of one's own under the trainer: metrics.jsonl, checkpoints, Ctrl-C, and resuming to the same bits.
/// It takes a batch and a loss; the optimizer may be any type with step() and zero_grad().

#include <cstdio>
#include <filesystem>

#include "tessera.h"
#include "train/trainer.h"

using namespace tessera;

/// An optimizer of one's own: momentum (Polyak, 1964).
struct Momentum {
  explicit Momentum(std::vector<nn::NamedParameter> all, double lr) : parameters(std::move(all)), lr(lr) {
    for (const auto& [name, tensor] : parameters)
      averages.push_back(Tensor::zeros(tensor.shape(), tensor.dtype(), tensor.device()));
  }
  void step() {
    for (size_t i = 0; i < parameters.size(); ++i) {
      const Tensor weight = parameters[i].tensor.detach();
      averages[i].copy_from(0.9 * averages[i] + grad(parameters[i].tensor));
      weight.copy_from(weight - lr * averages[i]);
    }
  }
  void zero_grad() {
    for (const auto& parameter : parameters) tessera::zero_grad(parameter.tensor);
  }
  void set_lr(double rate) { lr = rate; }                     // for a schedule; may be left out
  void fields(auto&& visit) { visit("averages", averages); }  // what checkpoints keep; may be left out

  std::vector<nn::NamedParameter> parameters;
  double lr;
  std::vector<Tensor> averages;
};

/// Learns y = exp(-3 |x|^2) on the square [-1, 1]^2, with any optimizer.
template <class Optimizer>
class Fit : public train::Job {
 public:
  explicit Fit(auto&& make_optimizer)
      : Job(Device::best()),
        model_{nn::Linear(2, 64, rng_, device()), nn::Gelu{}, nn::Linear(64, 1, rng_, device())},
        optimizer_(make_optimizer(nn::parameters(model_))),
        x_(Tensor::empty({256, 2}, DType::f32, device())) {
    keep("model", model_);
    train_with(optimizer_);
  }
  train::JobInfo info() const override { return {.evaluates = true, .tokens_per_step = 256}; }
  void batch(uint64_t index) override {  // the same index, the same batch: a resumed run meets its data
    Rng rng(index);
    ops::fill_uniform(x_, -1, 1, rng);
  }
  Tensor loss() override {
    const Tensor y = ops::exp(-3 * ops::sum(x_ * x_, 1, true));
    return ops::mse_loss(model_(x_), y);
  }
  train::Values evaluate() override {
    batch(~uint64_t{0});  // one that training never meets
    return {{"eval_error", loss().item()}};
  }

 private:
  Rng rng_{42};
  nn::Sequential<nn::Linear, nn::Gelu, nn::Linear> model_;
  Optimizer optimizer_;
  Tensor x_;
};

/// Trains in the folder, up to so many steps in all; a second call goes on where the first one ended.
template <class Optimizer>
double run(const train::RunFolder& folder, int64_t steps, auto&& make_optimizer) {
  Fit<Optimizer> fit(make_optimizer);
  report::Progress progress(report::Progress::Mode::quiet);
  const optim::Schedule cosine({.lr = 2e-2, .steps = 1000, .warmup = 20});
  // An optimizer that keeps its rate on the host cannot be captured.
  const bool graph = std::is_base_of_v<optim::Optimizer, Optimizer>;
  return train::train(fit, folder, {.steps = steps, .save_every = 200, .graph = graph, .schedule = cosine},
                      progress)
      .evaluation.at("eval_error");
}

int main() {
  const auto root = std::filesystem::temp_directory_path() / "tessera-own-training";
  std::filesystem::remove_all(root);
  const auto adamw = [](auto parameters) { return optim::AdamW(std::move(parameters)); };
  const auto momentum = [](auto parameters) { return Momentum(std::move(parameters), 2e-2); };
  const auto a = train::RunFolder::create(root, "adamw"), m = train::RunFolder::create(root, "momentum");
  const double of_adamw = run<optim::AdamW>(a, 1000, adamw);
  run<Momentum>(m, 400, momentum);
  // Stopped there, and resumed from its newest checkpoint, as in another process.
  const double of_momentum = run<Momentum>(train::RunFolder::open(m.path()), 1000, momentum);
  std::printf("mean squared error after 1000 steps: AdamW %.6f, momentum of our own %.6f\n", of_adamw,
              of_momentum);
  std::filesystem::remove_all(root);
  return of_adamw < 5e-3 && of_momentum < 3e-2 ? 0 : 1;  // the mean of y alone would be wrong by 0.07
}

/// A model whose layers a text names: nn::AnyLayer holds each of them. Names of parameters, saving, loading
/// and copying are as for a model that spells its layers out. And a check that the optimizer has all of them.

#include <cstdio>
#include <sstream>

#include "tessera.h"

using namespace tessera;

/// "2 32 gelu 32 tanh 1": numbers are the widths between which linear layers lie.
struct Net {
  std::vector<nn::AnyLayer> layers;
  Net(const std::string& config, const Rng& rng) {
    std::istringstream words(config);
    std::string word;
    int64_t width = 0;
    while (words >> word) {
      if (word == "gelu") {
        layers.push_back(nn::Gelu{});
      } else if (word == "tanh") {
        layers.push_back(nn::Tanh{});
      } else if (word == "norm") {
        layers.push_back(nn::LayerNorm(width));
      } else {
        const int64_t next = std::stoll(word);
        if (width > 0) layers.push_back(nn::Linear(width, next, rng));
        width = next;
      }
    }
  }
  Tensor operator()(Tensor x) const {
    for (const nn::AnyLayer& layer : layers) x = layer(x);
    return x;
  }
  void fields(auto&& visit) { visit("layers", layers); }
};

int main() {
  Rng rng(3);
  const std::string config = "2 32 gelu 32 norm tanh 1";
  Net model(config, rng), same(config, rng);
  std::printf("%s\n", nn::summary(model).text().c_str());

  optim::AdamW optimizer(nn::parameters(model), {.lr = 1e-2});
  const Tensor x = Tensor::empty({256, 2});
  double first = 0, last = 0;
  for (int step = 0; step < 200; ++step) {
    ops::fill_uniform(x, -1, 1, rng);
    Tape tape;
    const Tensor loss = ops::mse_loss(model(x), ops::sum(ops::sin(3 * x), 1, true));
    if (step == 0) optim::check_covers(tape, {&optimizer});  // nothing is used that fields() forgot
    tape.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    last = loss.item();
    if (step == 0) first = last;
  }
  std::printf("mean squared error %.4f, then %.4f\n", first, last);

  io::save("chosen_layers.safetensors", model);
  io::load("chosen_layers.safetensors", same);
  const bool equal = model(x).to_vector<float>() == same(x).to_vector<float>();
  const bool named = nn::parameters(model).back().name == "layers.5.bias";
  return last < 0.1 * first && equal && named ? 0 : 1;
}

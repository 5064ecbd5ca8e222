#include <cstdio>
#include <vector>

#include "tessera.h"

using namespace tessera;

/// A layer of one's own is a struct that lists its parts once; counting, summing up, saving and loading
/// follow from that.

struct Residual {
  nn::LayerNorm norm;
  nn::Mlp mlp;
  Tensor operator()(const Tensor& x) const { return ops::add(x, mlp(norm(x))); }
  void fields(auto&& visit) { visit("norm", norm), visit("mlp", mlp); }
};

struct Model {
  nn::Linear in, out;
  std::vector<Residual> blocks;
  Model(int64_t width, int depth, const Rng& rng) : in(3, width, rng), out(width, 1, rng) {
    for (int i = 0; i < depth; ++i) blocks.push_back({nn::LayerNorm(width), nn::Mlp(width, 4 * width, rng)});
  }
  Tensor operator()(Tensor x) const {
    x = in(x);
    for (const Residual& block : blocks) x = block(x);
    return out(x);
  }
  void fields(auto&& visit) { visit("in", in), visit("blocks", blocks), visit("out", out); }
};

int main() {
  Rng rng(1);
  Model model(16, 2, rng), same(16, 2, rng);
  std::printf("%s\n", nn::summary(model, 5).text().c_str());
  for (const auto& [name, tensor] : nn::parameters(model)) std::printf("%s\n", name.c_str());

  const Tensor x = Tensor::empty({5, 3}, DType::f32, Device::cpu());
  ops::fill_normal(x, 0, 1, rng);
  io::save("own_layer.safetensors", model);
  io::load("own_layer.safetensors", same);
  return model(x).to_vector<float>() == same(x).to_vector<float>() ? 0 : 1;
}

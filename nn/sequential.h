#pragma once

#include <tuple>
#include <utility>

#include "nn/module.h"

namespace tessera::nn {

/// Layers one after the other: `Sequential model{Linear(784, 512, rng), Gelu{}, Linear(512, 10, rng)}`. As a
/// member it is a `Sequential<Linear, Gelu, Linear>`. Its parts are named "0", "1", ...
template <class... Layers>
struct Sequential {
  explicit Sequential(Layers... layers) : layers(std::move(layers)...) {}

  Tensor operator()(const Tensor& x, Site site = Site::here()) const {
    const LayerCall call(*this, site);
    return [&]<size_t... K>(std::index_sequence<K...>) {
      Tensor y = x;
      ((y = run<K>(y)), ...);
      return y;
    }
    (std::index_sequence_for<Layers...>{});
  }
  void fields(auto&& visit) {
    [&]<size_t... K>(std::index_sequence<K...>) {
      (visit(std::to_string(K), std::get<K>(layers)), ...);
    }
    (std::index_sequence_for<Layers...>{});
  }
  LayerName layer_name;  // for messages

  std::tuple<Layers...> layers;

 private:
  template <size_t K>
  Tensor run(const Tensor& x) const {
    return std::get<K>(layers)(x);
  }
};

}  // namespace tessera::nn

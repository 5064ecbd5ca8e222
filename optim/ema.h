#pragma once

#include <memory>

#include "nn/module.h"

namespace tessera::optim {

struct EmaOptions {
  double decay = 0.999;
  bool warmup = true;  // the n-th update uses min(decay, (1 + n) / (10 + n)), so that early weights fade
};

/// An exponential moving average of weights: average = decay average + (1 - decay) weight after each update,
/// in f32 (f64 for f64 weights); it starts as the weights. One launch an update, which may be captured.
/// (Polyak, Juditsky, SIAM J. Control Optim. 30, 1992, for why averaged weights are better.)
class Ema {
 public:
  Ema(std::vector<nn::NamedParameter> parameters, const EmaOptions& options = {});
  Ema(Ema&&) noexcept;
  ~Ema();
  /// After each step of the optimizer.
  void update();
  /// Puts the averages into the weights, keeping these for restore(). Throws if that is so already.
  void apply();
  /// Puts the weights back, bit for bit.
  void restore();
  /// The average of the i-th parameter.
  const Tensor& average(size_t parameter) const;

  void fields(auto&& visit) {
    visit("counts", counts_);
    for (Average& part : averages_) visit(part.name, part.tensor);
  }

 private:
  struct Average {
    std::string name;
    Tensor tensor;  // a part of the arena
  };
  struct Buffers;
  std::unique_ptr<Buffers> buffers_;
  Tensor counts_;  // i64 [kCountSlots], on the device
  std::vector<Average> averages_;
  std::vector<Tensor> kept_;  // the weights while the averages are in their place
  EmaOptions options_;
};

}  // namespace tessera::optim

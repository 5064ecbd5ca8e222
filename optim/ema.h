#pragma once

#include <memory>

#include "optim/optimizer.h"

namespace tessera::optim {

struct EmaOptions {
  double decay = 0.999;
  bool warmup = true;  // the n-th update uses min(decay, (1 + n) / (10 + n)), so that early weights fade
};

/// An exponential moving average of weights: average = decay average + (1 - decay) weight after each update,
/// in f32 (f64 for f64 weights); it starts as the weights. Of a bf16 or f16 parameter the weight is the
/// optimizer's f32 master, not the rounded parameter. One launch per update, which may be captured.
/// (Polyak, Juditsky, SIAM J. Control Optim. 30, 1992, for why averaged weights are better.)
class Ema {
 public:
  /// Of all parameters of `optimizer`. Throws if it has masters and these are sharded
  /// (OptimizerOptions::sharding). Averages are whole on each rank in any case.
  explicit Ema(const Optimizer& optimizer, const EmaOptions& options = {});
  Ema(Ema&&) noexcept;
  /// Averages that are in the weights' place stay there.
  ~Ema();
  /// After each step of the optimizer.
  void update();
  /// Puts the averages, rounded to their dtype, into the parameters, keeping these for restore(), until which
  /// step() of the optimizer throws: restore() would undo it. The masters stay as they are. Throws if that is
  /// so already.
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
  /// Tells the optimizer, whose steps are refused while averages are in the weights' place.
  void count_applied(int by) const;
  std::unique_ptr<Buffers> buffers_;
  Tensor counts_;  // i64 [kCountSlots], on the device
  std::vector<Average> averages_;
  std::vector<Tensor> kept_;  // the weights while the averages are in their place
  EmaOptions options_;
};

}  // namespace tessera::optim

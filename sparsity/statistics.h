#pragma once

#include "tensor/tensor.h"

namespace tessera::sparsity {

/// Statistics that pruning needs of the inputs x [tokens, in] of one linear layer. Sums are f64 on the CPU
/// and f32 on a GPU. Adding the same inputs in the same order gives the same bits, on any number of threads.
class InputStatistics {
 public:
  enum class Sums : uint8_t {
    squares,  // of each input alone: what norms need
    products  // X^T X: what a Hessian needs
  };
  explicit InputStatistics(Sums sums) : sums_(sums) {}

  /// x [..., in], floating.
  void add(const Tensor& x);

  int64_t tokens() const { return tokens_; }
  /// Sum of squares of each input: [in], f64 on the CPU, f32 on a GPU. Undefined before the first add().
  const Tensor& squares() const { return squares_; }
  /// X^T X [in, in], of the same dtype; throws if it was not asked for.
  const Tensor& products() const;
  /// Inputs whose sum of squares is 0.
  int64_t dead() const;
  /// Throws, naming `layer`, unless all sums are finite.
  void check_finite(const std::string& layer) const;

 private:
  Sums sums_;
  int64_t tokens_ = 0;
  Tensor squares_, products_;
};

}  // namespace tessera::sparsity

#pragma once

#include <functional>
#include <string>
#include <vector>

#include "optim/optimizer.h"
#include "pretrained/layers.h"

namespace tessera::train {

/// How far a sliced gradient g' of a batch is from the dense one g, over some draws of the rows.
struct GradientDistance {
  std::string name;     // of a parameter: "blocks.3.mlp.up.weight"; "all": of all together
  double cosine = 0;    // of the first draw and g; 0 where one of them is 0
  double bias = 0;      // |mean of the draws - g| / |g|; of an unbiased one near sqrt(variance / draws)
  double variance = 0;  // mean of |g' - mean|^2 over the draws (divided by draws - 1), over |g|^2
};

/// The layers dense while it lives; then each in its own form again.
class DenseScope {
 public:
  explicit DenseScope(std::vector<pretrained::LayerParts> layers);
  ~DenseScope();
  DenseScope(const DenseScope&) = delete;

 private:
  std::vector<pretrained::LayerParts> layers_;
  std::vector<nn::Form> forms_;
};

/// Copies of the gradients of the optimizer's parameters in f32, in their order, zeros where none arrives:
/// those of `backward`, which runs a forward and a backward pass. The gradients themselves are forgotten.
std::vector<Tensor> copy_gradients(const optim::Optimizer& optimizer, const std::function<void()>& backward);
/// |a - b|^2 of all elements together.
double squared_distance(const std::vector<Tensor>& a, const std::vector<Tensor>& b);

/// Compares the gradients of the sliced layers' weights, and of all parameters together, with those of the
/// dense backward pass. `backward` runs a forward and a backward pass of one batch, each time with the same
/// dropout masks and new rows. `layers`: those that are sliced; they keep their forms. Gradients are
/// forgotten. Memory: two more copies of all gradients. Throws unless draws >= 1.
std::vector<GradientDistance> probe_gradient(const std::vector<pretrained::LayerParts>& layers,
                                             const optim::Optimizer& optimizer, int draws,
                                             const std::function<void()>& backward);

}  // namespace tessera::train

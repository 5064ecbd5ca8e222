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

/// Compares the gradients of the sliced layers' weights, and of all parameters together, with those of the
/// dense backward pass. `backward` runs a forward and a backward pass of one batch, each time with the same
/// dropout masks and new rows. The layers have the form `sliced` before and after; gradients are forgotten.
/// Memory: two more copies of all gradients. Throws unless draws >= 1.
std::vector<GradientDistance> probe_gradient(const pretrained::LinearModules& modules,
                                             const std::string& layers, const nn::Slice& sliced,
                                             const optim::Optimizer& optimizer, int draws,
                                             const std::function<void()>& backward);

}  // namespace tessera::train

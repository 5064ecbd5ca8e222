#pragma once

#include <string>

#include "sparsity/prune_options.h"
#include "sparsity/statistics.h"

/// Updates of the weights that stay, by the Hessian of the layer's squared error, X^T X.

namespace tessera::sparsity {

/// U with (X^T X + damping)^-1 = U^T U.
struct HessianFactor {
  Tensor u;            // f32 [in, in]
  Tensor wide;         // the same in the dtype of X^T X
  double damping = 0;  // as a share of the diagonal's mean, that was enough
  int64_t raised = 0;  // times that it was multiplied by 10 for that
};

/// Inputs that are always 0 get a 1 on the diagonal (the mean is taken with it), as SparseGPT does; then the
/// damping is raised until X^T X is positive definite. Throws, naming `layer`, if it is not even with the
/// diagonal's mean added to it. `samples` scales X^T X to the mean over samples.
HessianFactor factor_hessian(const InputStatistics& inputs, int64_t samples, double damping,
                             const std::string& layer);

/// The weight f32 [rows, in] with zeros for the inputs that are always 0, as SparseGPT begins: its score
/// drops these first, so that they leave the share to the weights that do something.
Tensor without_dead_inputs(const Tensor& weight, const InputStatistics& inputs);

/// SparseGPT's sweep over blocks of columns of a matrix f32 [rows, in]: masks are chosen block by block by
/// its own score unless `keep` u8 [rows, in] is given. Returns the pruned matrix.
Tensor update_obs(const Tensor& weight, const Tensor& keep, const Tensor& u, double sparsity,
                  const PruneOptions& options);

/// The mask keep u8 [rows, in] by SparseGPT's score, block by block, without updating the weights.
Tensor keep_by_hessian(const Tensor& weight, const Tensor& u, double sparsity, const PruneOptions& options);

/// The weights kept that minimise the squared error of the layer's outputs, by options.iterations steps of
/// ADMM.
Tensor update_admm(const Tensor& weight, const Tensor& keep, const InputStatistics& inputs,
                   const PruneOptions& options, const std::string& layer);

/// ||(W - V) X||^2 / ||W X||^2 over the samples; 0 if W X is 0.
double relative_output_error(const Tensor& weight, const Tensor& pruned, const InputStatistics& inputs);

/// Keeps elements of x where keep is 1; others become +0.
Tensor keep_elements(const Tensor& x, const Tensor& keep);

}  // namespace tessera::sparsity

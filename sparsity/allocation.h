#pragma once

#include "sparsity/calibration.h"
#include "sparsity/targets.h"
#include "sparsity/walk.h"

namespace tessera::sparsity {

/// The share of Wanda's scores of some matrices together that are larger than `factor` times their mean.
double outlier_share(const std::vector<Tensor>& scores, double factor);

/// The sparsity of each block by the outliers of its scores: its share of kept weights is 1 - sparsity + s -
/// mean(s), where s is the outlier share, shifted and scaled to [0, 2 range] over the blocks (Yin et al.,
/// arXiv:2310.05175, as its authors' program computes it): all within 2 range of each other, and in
/// [sparsity - range, sparsity + range], as the paper says, only if the mean share is halfway between the
/// least and the largest. If the shares are equal, so are the sparsities. Throws unless all sparsities are in
/// [0, 1).
std::vector<double> owl_sparsities(const std::vector<double>& outliers, double sparsity, double range);

/// Sets the sparsity of all targets but those assigned by name, from scores of the dense model.
void allocate_owl(models::LanguageRef model, const Samples& samples, const PruneOptions& options,
                  std::vector<Target>& targets);

}  // namespace tessera::sparsity

#pragma once

#include "sparsity/prune_options.h"
#include "sparsity/statistics.h"

namespace tessera::sparsity {

/// |x|
Tensor magnitude(const Tensor& x);

/// L2 norms of the inputs over the tokens of a sample, squares averaged over `samples`: f32 [in].
Tensor input_norms(const InputStatistics& inputs, int64_t samples);

/// The scores magnitude, wanda and ria of a matrix f32 [rows, in]: f32 [rows, in]. `inputs` is not read for
/// magnitude. A row or column of zeros has the scores 0.
Tensor score_matrix(const Tensor& weight, const InputStatistics* inputs, int64_t samples,
                    const PruneOptions& options);

/// keep u8 [rows, in] for a share of the matrix, or in the options' pattern. `matrix`: its name, for errors.
Tensor keep_by_score(const Tensor& scores, double sparsity, const PruneOptions& options,
                     const std::string& matrix);

/// Wanda's variant: in each row the weights are dropped whose scores, from the lowest on, add up to at most
/// alpha times the row's sum; alpha by bisection from 0.4 within [0, 0.8], until the matrix's sparsity is
/// within 0.001 of the asked one, or as near as it comes. Where all scores are 0, no alpha tells weights
/// apart, and each row drops the asked share, as without the variant. Computed on the host. Throws, naming
/// the matrix, if the sparsity is off by more than 0.01.
Tensor keep_by_row_sums(const Tensor& scores, double sparsity, const std::string& matrix);

}  // namespace tessera::sparsity

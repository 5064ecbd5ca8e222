#pragma once

#include "ops/grouped_mlp/grouped_mlp.h"
#include "ops/variant.h"

namespace tessera::ops {

/// What variant "wgmma" needs and these operands, x as rows [rows, D], do not have; empty if it takes them.
std::string grouped_mlp_wgmma_needs(const Tensor& x, const Tensor& up, const Tensor& down, const Gpu& gpu);
/// Names of the variants.
std::vector<std::string> grouped_mlp_variants();
/// "wgmma" or "separate": several GEMMs and an activation.
std::string_view grouped_mlp_variant(const Tensor& x, const Tensor& up, const Tensor& down, const Gpu& gpu);

/// The kernels count rows, and units of work (tiles of rows x groups x splits), in 32 bits: more rows take
/// several launches. Rows of one launch for K groups, a multiple of every tile's rows; at most 2^30.
int64_t grouped_mlp_launch_rows(int64_t groups);
/// Groups that a launch takes.
inline constexpr int64_t kMostMlpGroups = int64_t{1} << 20;

/// y [rows, K, E] of x [rows, D]. `launch_rows`: rows of one launch, a multiple of 128.
void grouped_mlp_forward_cuda(const Tensor& y, const Tensor& x, const Tensor& up, const Tensor& down,
                              Activation kind, int64_t launch_rows);

/// dh [rows, K, row_pitch(F)], zeros after the F columns of the gradient, and the partial sums ddown
/// [splits, K, E, F] in f32, packed; dy [rows, K, E].
void grouped_mlp_hidden_gradient_cuda(const Tensor& dh, const Tensor& ddown_parts, const Tensor& dy,
                                      const Tensor& x, const Tensor& up, const Tensor& down, Activation kind,
                                      int64_t launch_rows);
/// How many partial sums that takes, over all launches.
int64_t grouped_mlp_gradient_splits(const Tensor& x, const Tensor& up, int64_t launch_rows);

}  // namespace tessera::ops

#pragma once

#include "ops/grouped_mlp/grouped_mlp.h"

namespace tessera::ops {

/// Rows of the kernel choice.
enum class GroupedMlpRow : uint8_t { separate = 0, wgmma = 1 };

/// What row "wgmma" needs and these operands, x as rows [rows, D], do not have; empty if it takes them.
std::string grouped_mlp_wgmma_needs(const Tensor& x, const Tensor& up, const Tensor& down);

/// y [rows, K, E] of x [rows, D].
void grouped_mlp_forward_cuda(const Tensor& y, const Tensor& x, const Tensor& up, const Tensor& down,
                              Activation kind);

/// dh [rows, K, row_pitch(F)], zeros behind the F columns of the gradient, and the partial sums ddown
/// [splits, K, E, F] in f32, packed; dy [rows, K, E].
void grouped_mlp_hidden_gradient_cuda(const Tensor& dh, const Tensor& ddown_parts, const Tensor& dy,
                                      const Tensor& x, const Tensor& up, const Tensor& down, Activation kind);
/// How many partial sums that takes.
int grouped_mlp_gradient_splits(const Tensor& x, const Tensor& up);

}  // namespace tessera::ops

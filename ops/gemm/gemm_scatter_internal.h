#pragma once

#include <cstdint>

#include "ops/gemm/gemm_sm90_plan.h"

/// Variant "wgmma scatter": a GEMM whose rows are some of the rows of a larger d, and zeros in the others, in
/// one launch: dx of a sliced backward pass. 2 m n k FLOPs, and all of d written: with m a tenth of d's rows
/// the zeros take as long as the GEMM, one bound by memory, the other by the tensor cores. So the warps of
/// fitted tiles that issue no loads write them at the same time (gemm_sm90_fitted.cuh, kScatter).

namespace tessera::ops {

/// Where the rows of a GEMM go.
struct GemmScatter {
  const int32_t* indices = nullptr;  // m of them, ascending, those past the last row of d at the end; null:
                                     // the first m rows
  int64_t rows = 0;                  // of d
};

/// Columns of a tile at most: wider ones leave no warp idle.
inline constexpr int kMostScatteredColumns = 128;
/// What the variant needs and a GEMM lacks, or an empty string. `gemm` describes its m rows; gemm.d is the
/// whole matrix.
std::string gemm_scatter_lacks(const Gemm& gemm, const Gpu& gpu);
/// The tile and its modelled time, zeros included. Only if it lacks nothing.
GemmChoice choose_scatter(const Gemm& gemm, const GemmScatter& scatter, const Gpu& gpu);
/// d[indices[i]] = alpha (a b)[i] and 0 in all other rows; with beta they are added to, and the others stay.
/// An index outside d is skipped. T: bf16 or f16, the dtype of a and b.
template <class T>
void gemm_scatter_sm90(const Gemm& gemm, const GemmScatter& scatter, const GemmChoice& choice, Device device);
/// With the choice.
void gemm_scatter(const Gemm& gemm, const GemmScatter& scatter, Device device);

}  // namespace tessera::ops

#pragma once

/// Under which names the tables of GEMMs, and of operators that are made of them, allow a variant.

namespace tessera::ops {

/// "wgmma scatter" is the variant of dx in sliced backward passes (gemm_scatter_internal.h); all other GEMMs
/// of an operator for which it is forced run on "wgmma". Both end with null.
inline constexpr const char* kWgmmaVariants[] = {"wgmma", "wgmma scatter", nullptr};
/// Those of kGemmVariants, and "wgmma scatter".
inline constexpr const char* kForcedVariants[] = {"cublas", "cublas padded", "wgmma",
                                                  "narrow", "wgmma scatter", nullptr};

}  // namespace tessera::ops

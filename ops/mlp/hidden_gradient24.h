#pragma once

#include "ops/activation/activation.h"
#include "ops/sparse24/sparse24.h"

namespace tessera::ops {

/// What the GEMMs of a 2:4 feed-forward network's backward pass multiply, next to S(a) along features.
struct HiddenGradient24 {
  Sparse24 dh;             // along features, for dx = dh up; shares the metadata of S(a)
  Sparse24 act_by_tokens;  // S(a) along tokens, for ddown = dy^T S(a)
  Sparse24 dh_by_tokens;   // for dup = dh^T x; shares the metadata of act_by_tokens
};

/// From da [T, F], the gradient of a = f(h), and `kept` = S(a) along features, whose values are those of a
/// (methods naive and fast):
///   dh            da f'(S(a)) at the places that S keeps
///   act_by_tokens S(a) with the two largest of every four tokens of a feature (naive)
///   dh_by_tokens  da f'(S(a)) at the places of act_by_tokens; f' is 0 where S(a) is 0, so nothing that S
///                 dropped comes back
/// f is relu or relu_squared, whose slope follows from a (2 sqrt(a)). Each product is rounded once to da's
/// dtype, which is that of `kept`; a slope of 0 times an infinite or NaN da is NaN, as of the dense network.
/// da: any layout. No gradient flows through it. Throws where sizes, dtypes or devices disagree.
///
/// Variants on a GPU, to the same bits but for those of NaNs:
///   fused     bf16 and f16: one pass, 6.25 bytes per element: da and S(a) are read, everything else written
///   separate  every dtype: decompress24, compress24, and per direction compress24_like and the slopes
HiddenGradient24 hidden_gradient24(const Tensor& da, const Sparse24& kept, Activation kind,
                                   Site site = Site::here());

}  // namespace tessera::ops

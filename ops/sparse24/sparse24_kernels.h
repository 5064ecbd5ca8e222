#pragma once

#include "ops/sparse24/sparse24.h"
#include "ops/variant.h"

namespace tessera::ops {

/// One pass over x [tokens, features]. Either result may be undefined, not both. With `pattern` the elements
/// of x at its places go to the result of its direction, and only the values are written.
struct Compress24Call {
  Tensor x;
  Sparse24 by_features, by_tokens;
  Selection24 selection;
  const Sparse24* pattern = nullptr;
};
void compress24_cpu(const Compress24Call& call);
void compress24_cuda(const Compress24Call& call);         // variant "general"
void compress24_packed_cuda(const Compress24Call& call);  // variant "packed"
/// The variants of compress24, compress24_both and compress24_like, each forced by its own name.
std::vector<std::string> compress24_variants();
std::string describe_problem(const Compress24Call& call);

/// y [tokens, features], written: the elements of `x`, or those of `from` (of y's shape, dtype and device) at
/// its places; zeros elsewhere.
void decompress24_cpu(const Tensor& y, const Sparse24& x, const Tensor& from);
void decompress24_cuda(const Tensor& y, const Sparse24& x, const Tensor& from);
/// `from` at the places of `x`, zeros elsewhere: a tensor of its own.
Tensor masked24(const Tensor& from, const Sparse24& x);

/// scale[0] = sum x s / sum s^2 over `samples` of `units` (tokens, or groups of four of them): number i *
/// units / samples for i < samples.
struct SoftScaleCall {
  Tensor scale, x;
  Along24 along;
  int64_t units, samples;
  bool clamped;
};
void soft_scale_cpu(const SoftScaleCall& call);
void soft_scale_cuda(const SoftScaleCall& call);

/// A GEMM that was checked: nothing of it is empty but the sum, perhaps.
struct Multiply24Call {
  Tensor d;
  Sparse24 a;
  Tensor b;
  Multiply24Options options;
};
std::vector<std::string> multiply24_variants();

}  // namespace tessera::ops

#pragma once

#include <string>
#include <vector>

#include "ops/mlp/hidden_gradient24.h"
#include "ops/variant.h"

namespace tessera::ops {

struct HiddenGradient24Call {
  Tensor da;
  Sparse24 kept;
  Activation kind;
};
/// Variant "fused": writes all values, and the metadata along tokens. Not of nothing.
void hidden_gradient24_cuda(const HiddenGradient24& to, const HiddenGradient24Call& call);
std::string describe_problem(const HiddenGradient24Call& call);
std::vector<std::string> hidden_gradient24_variants();

}  // namespace tessera::ops

#pragma once

#include "ops/rope/rope.h"

/// One rotation, forward or (with `inverse`) by the opposite angles, which is backward.

namespace tessera::ops {

struct RopeProblem {
  Tensor y, x;       // [B, T, H, D], heads of adjacent elements
  Tensor table;      // [P, R], rows
  Tensor positions;  // packed [T] or [B, T], or undefined
  int64_t offset;    // without positions
  bool inverse;
};

void rope_cpu(const RopeProblem& problem);
void rope_cuda(const RopeProblem& problem);

}  // namespace tessera::ops

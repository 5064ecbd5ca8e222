#pragma once

#include "ops/obs_columns/obs_columns.h"

namespace tessera::ops {

/// One block; all tensors packed. `result.weight` holds the weights and gets the results.
void obs_columns_cpu(const ObsBlock& result, const Tensor& factor, const ObsColumns& how);
void obs_columns_cuda(const ObsBlock& result, const Tensor& factor, const ObsColumns& how);

inline constexpr int64_t kMostObsColumns = 256;  // on a GPU: 8 per lane; 16 spill registers

}  // namespace tessera::ops

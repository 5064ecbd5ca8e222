#pragma once

#include "ops/obs_columns/obs_columns.h"

namespace tessera::ops {

/// One block; all tensors packed. `result.weight` holds the weights and gets the results.
void obs_columns_cpu(const ObsBlock& result, const Tensor& factor, const ObsColumns& how);
void obs_columns_cuda(const ObsBlock& result, const Tensor& factor, const ObsColumns& how);

inline constexpr int64_t kMostObsColumns = 512;  // on a GPU: 16 per lane; 32 would spill registers

}  // namespace tessera::ops

#pragma once

#include "ops/obs_columns/obs_columns.h"
#include "runtime/config.h"

namespace tessera::ops {

/// (w / u)^2, by which groups drop the smallest; a NaN counts as infinity, so that the order is total.
template <class T>
TESSERA_HD T column_score(T w, T u) {
  const T ratio = w / u, square = ratio * ratio;
  return square == square ? square : T(__builtin_huge_val());
}

/// w on a row's grid, from `step`, its rounded level. A NaN stays.
template <class T>
TESSERA_HD T on_grid(T step, T scale, T zero, T highest) {
  return scale * ((step < 0 ? T(0) : highest < step ? highest : step) - zero);
}

/// One block; all tensors packed. `result.weight` holds the weights and gets the results.
void obs_columns_cpu(const ObsBlock& result, const Tensor& factor, const ObsColumns& how);
void obs_columns_cuda(const ObsBlock& result, const Tensor& factor, const ObsColumns& how);

}  // namespace tessera::ops

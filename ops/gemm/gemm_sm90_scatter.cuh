#pragma once

#include "ops/gemm/gemm_scatter_internal.h"
#include "ops/gemm/gemm_sm90_fitted_launch.cuh"

/// The instances of gemm_sm90_fitted.cuh whose rows are scattered, for one dtype: a file of its own for each.

namespace tessera::ops {

template <class T>
void gemm_scatter_sm90(const Gemm& g, const GemmScatter& scatter, const GemmChoice& choice, Device device) {
  check(has_fitted_tile(choice, g.k) && choice.columns <= kMostScatteredColumns, "gemm: no fitted tile of ",
        choice.rows, " x ", choice.columns, " in clusters of ", choice.cluster, " scatters its rows");
  if (choice.columns == 64)
    launch_fitted<T, gpu::TileOrder::mn_major, 64, true>(g, choice, device, scatter);
  else
    launch_fitted<T, gpu::TileOrder::mn_major, 128, true>(g, choice, device, scatter);
}

}  // namespace tessera::ops

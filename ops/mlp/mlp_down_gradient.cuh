#pragma once

#include "ops/mlp/mlp_sm90.cuh"

namespace tessera::ops {

template <class T>
void fused_down_gradient_cuda(const Tensor& dh, const Tensor& a, const Tensor& dy, const Tensor& down,
                              const Tensor& h, Activation kind) {
  dispatch_activation(kind, [&]<Activation kKind>() {
    if constexpr (kKind != Activation::none) {
      if (a.defined())
        run_hidden<T, gpu::TileOrder::mn_major>(dh, a, h, dy, down, Slope<T, kKind, true>{});
      else
        run_hidden<T, gpu::TileOrder::mn_major>(dh, {}, h, dy, down, Slope<T, kKind, false>{});
    }
  });
}

}  // namespace tessera::ops

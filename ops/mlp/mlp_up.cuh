#pragma once

#include "ops/mlp/mlp_sm90.cuh"

namespace tessera::ops {

template <class T>
void fused_up_cuda(const Tensor& a, const Tensor& h, const Tensor& x, const Tensor& up, const Tensor& bias,
                   Activation kind) {
  GemmBias<T> biases;
  Tensor dense = bias.detach();
  if (bias.defined()) {
    if (bias.layout().stride(0) != 1) dense = bias.clone();
    biases = {dense.data<T>(), 0, int(up.size(0))};
  }
  dispatch_activation(kind, [&]<Activation kKind>() {
    if constexpr (kKind != Activation::none) {
      if (h.defined())
        run_hidden<T, gpu::TileOrder::k_major>(a, h, {}, x, up, Activate<T, kKind, true>{biases});
      else
        run_hidden<T, gpu::TileOrder::k_major>(a, {}, {}, x, up, Activate<T, kKind, false>{biases});
    }
  });
}

}  // namespace tessera::ops

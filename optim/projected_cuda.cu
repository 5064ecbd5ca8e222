#include <algorithm>

#include "gpu/dependent_launch.cuh"
#include "optim/projected_kernels.h"

/// Bound by memory: projected_adam reads 12 bytes per element and writes 12; descend reads 8 (a master and
/// the direction) and writes 6 with a 16-bit weight.

namespace tessera::optim {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 4096;

unsigned blocks_for(int64_t count) {
  return unsigned(std::clamp<int64_t>((count + kThreads - 1) / kThreads, 1, kMostBlocks));
}

__global__ void __launch_bounds__(kThreads)
    projected_adam_kernel(float* low, float* m, float* v, int64_t count, const double* status,
                          ProjectedAdam adam) {
  gpu::wait_and_launch_dependents();
  if (status[kApply] == 0) return;
  const float clip = float(status[kClip]), bias1 = float(status[kBias1 + 2 * adam.rule]),
              bias2 = float(status[kBias2 + 2 * adam.rule]), beta1 = float(adam.beta1),
              beta2 = float(adam.beta2), rest1 = float(1 - adam.beta1), rest2 = float(1 - adam.beta2),
              eps = float(adam.eps);
  for (int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kThreads) {
    const float g = clip * low[i];
    const float first = m[i] = beta1 * m[i] + rest1 * g;
    const float second = v[i] = beta2 * v[i] + rest2 * g * g;
    low[i] = first / bias1 / (sqrtf(second) / bias2 + eps);
  }
}

template <class W>
__global__ void __launch_bounds__(kThreads)
    descend_kernel(W* weight, int64_t weight_stride, float* master, int64_t master_stride,
                   const float* direction, int64_t direction_stride, int64_t rows, int64_t columns,
                   const double* status, Descent descent) {
  gpu::wait_and_launch_dependents();
  if (status[kApply] == 0) return;
  const float rate = float(status[kRate] * descent.lr_scale), decay = float(descent.weight_decay);
  const int64_t count = rows * columns;
  for (int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kThreads) {
    const int64_t row = i / columns, column = i - row * columns;
    W& to = weight[row * weight_stride + column];
    float* const exact = master ? master + row * master_stride + column : nullptr;
    float w = exact ? *exact : float(to);
    w -= rate * (direction[row * direction_stride + column] + decay * w);
    if (exact) *exact = w;
    to = W(w);
  }
}

}  // namespace

void projected_adam_cuda(const Tensor& low, const Tensor& m, const Tensor& v, const double* status,
                         const ProjectedAdam& adam) {
  gpu::launch_dependent(low.device(), {dim3(blocks_for(low.count())), dim3(kThreads)}, projected_adam_kernel,
                        low.data<float>(), m.data<float>(), v.data<float>(), low.count(), status, adam);
}

void descend_cuda(const Tensor& weight, const Tensor& master, const Tensor& direction, const double* status,
                  const Descent& descent) {
  const bool has_master = master.raw() != weight.raw();
  dispatch_floating_cuda(weight.dtype(), "galore", [&]<class W>() {
    gpu::launch_dependent(weight.device(), {dim3(blocks_for(weight.count())), dim3(kThreads)},
                          descend_kernel<W>, static_cast<W*>(weight.raw()), weight.row_stride(),
                          has_master ? master.data<float>() : static_cast<float*>(nullptr),
                          master.row_stride(), static_cast<const float*>(direction.data<float>()),
                          direction.row_stride(), weight.size(0), weight.size(1), status, descent);
  });
}

}  // namespace tessera::optim

#pragma once

#include "optim/rules.h"
#include "tensor/tensor.h"

/// The kernels of GaLore other than GEMMs. They do nothing where status[kApply] is 0.

namespace tessera::optim {

struct ProjectedAdam {
  double beta1, beta2, eps;
  int rule;  // whose bias corrections in the status
};

/// Adam in the projected space. low: gradients before, directions after; m, v: moments; packed, of one size,
/// f32 (f64):
///   g = clip low;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;  low = m / bias1 / (sqrt(v)
///   / bias2 + eps)
void projected_adam_cpu(const Tensor& low, const Tensor& m, const Tensor& v, const double* status,
                        const ProjectedAdam& adam);
void projected_adam_cuda(const Tensor& low, const Tensor& m, const Tensor& v, const double* status,
                         const ProjectedAdam& adam);

/// weight -= lr lr_scale (direction + weight_decay weight) of one matrix: through `master`, if it is another
/// tensor than the weight. direction and master f32 (f64), dense rows.
struct Descent {
  double lr_scale, weight_decay;
};
void descend_cpu(const Tensor& weight, const Tensor& master, const Tensor& direction, const double* status,
                 const Descent& descent);
void descend_cuda(const Tensor& weight, const Tensor& master, const Tensor& direction, const double* status,
                  const Descent& descent);

}  // namespace tessera::optim

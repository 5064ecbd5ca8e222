#include <cmath>

#include "optim/projected_kernels.h"
#include "runtime/parallel.h"

namespace tessera::optim {
namespace {

constexpr int64_t kGrain = 1 << 14;

template <class C>
void update_moments(const Tensor& low, const Tensor& m, const Tensor& v, const double* status,
                    const ProjectedAdam& adam) {
  const C clip = C(status[kClip]), bias1 = C(status[kBias1 + 2 * adam.rule]),
          bias2 = C(status[kBias2 + 2 * adam.rule]), beta1 = C(adam.beta1), beta2 = C(adam.beta2),
          rest1 = C(1 - adam.beta1), rest2 = C(1 - adam.beta2), eps = C(adam.eps);
  C* const values = low.data<C>();
  C* const first = m.data<C>();
  C* const second = v.data<C>();
  parallel_for(low.count(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const C g = clip * values[i];
      first[i] = beta1 * first[i] + rest1 * g;
      second[i] = beta2 * second[i] + rest2 * g * g;
      values[i] = first[i] / bias1 / (std::sqrt(second[i]) / bias2 + eps);
    }
  });
}

}  // namespace

void projected_adam_cpu(const Tensor& low, const Tensor& m, const Tensor& v, const double* status,
                        const ProjectedAdam& adam) {
  if (status[kApply] == 0) return;
  low.dtype() == DType::f64 ? update_moments<double>(low, m, v, status, adam)
                            : update_moments<float>(low, m, v, status, adam);
}

void descend_cpu(const Tensor& weight, const Tensor& master, const Tensor& direction, const double* status,
                 const Descent& descent) {
  if (status[kApply] == 0) return;
  const int64_t columns = weight.size(1);
  dispatch_floating(weight.dtype(), "galore", [&]<class W>() {
    using C = Compute<W>;
    const C rate = C(status[kRate] * descent.lr_scale), decay = C(descent.weight_decay);
    const bool has_master = master.raw() != weight.raw();
    parallel_for(weight.size(0), std::max<int64_t>(1, kGrain / std::max<int64_t>(1, columns)),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t row = begin; row < end; ++row) {
                     W* const to = weight.data<W>() + row * weight.row_stride();
                     C* const exact = has_master ? master.data<C>() + row * master.row_stride() : nullptr;
                     const C* const d = direction.data<C>() + row * direction.row_stride();
                     for (int64_t k = 0; k < columns; ++k) {
                       C w = exact ? exact[k] : C(to[k]);
                       w -= rate * (d[k] + decay * w);
                       if (exact) exact[k] = w;
                       to[k] = W(w);
                     }
                   }
                 });
  });
}

}  // namespace tessera::optim

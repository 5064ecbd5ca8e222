#include "ops/inverse_factor/inverse_factor.h"

#include "ops/inverse_factor/inverse_factor_kernels.h"
#include "runtime/call_site.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {

std::optional<Tensor> inverse_factor(const Tensor& a, const Tensor& shift, Site site) {
  const CallScope call(site);
  check(a.defined() && shift.defined(), "inverse_factor: a or shift is undefined");
  const Device device = a.device();
  check(a.rank() == 2 && a.size(0) == a.size(1), "inverse_factor: a is ", describe(a),
        "; expected a square matrix");
  check(a.dtype() == DType::f32 || (a.dtype() == DType::f64 && device.is_cpu()), "inverse_factor: a is ",
        describe(a), "; expected f32, or f64 on the CPU");
  check(shift.rank() == 1 && shift.size(0) == a.size(0) && shift.dtype() == a.dtype() &&
            shift.device() == device,
        "inverse_factor: shift is ", describe(shift), "; expected ", a.dtype(), " [", a.size(0), "] on ",
        device.name());
  const Tensor u = Tensor::empty_packed(a.shape(), a.dtype(), device);
  if (a.size(0) == 0) return u;
  bool found = false;
  if (device.is_cpu()) {
    found = inverse_factor_cpu(u, a.detach().packed(), shift.detach().packed());
  } else if constexpr (kCuda) {
    found = inverse_factor_cuda(u, a.detach().packed(), shift.detach().packed());
  }
  return found ? std::optional(u) : std::nullopt;
}

}  // namespace tessera::ops

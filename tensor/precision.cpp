#include "tensor/precision.h"

#include "tensor/elementwise.h"

namespace tessera {

const char* name_of(Precision precision) {
  return precision.math == F32Math::tf32 ? "tf32" : name_of(precision.dtype);
}

Precision parse_precision(std::string_view name) {
  if (name == "tf32") return {DType::f32, F32Math::tf32};
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16})
    if (name == name_of(dtype)) return dtype;
  fail_at(Site::here(), "precision \"", name, "\": expected f64, f32, tf32, bf16 or f16");
}

double epsilon(Precision precision) {
  return precision.math == F32Math::tf32 ? 0x1p-10 : epsilon(precision.dtype);
}

Precision default_precision(Device device) {
  return device.is_cuda() && device.info().major >= 8 ? DType::bf16 : DType::f32;
}

Tensor rounded_to_tf32(const Tensor& x) {
  check(x.defined() && x.dtype() == DType::f32 && x.device().is_cpu(), "rounded_to_tf32: ", describe(x),
        "; expected f32 on the CPU");
  const Tensor rounded = x.detach().clone();
  float* const data = rounded.data<float>();
  for_each_run(make_loop(rounded.shape(), rounded), [&](const auto& offsets, const auto& strides, int64_t n) {
    float* const run = data + offsets[0];
    for (int64_t i = 0; i < n; ++i) run[i * strides[0]] = round_to_tf32(run[i * strides[0]]);
  });
  return rounded;
}

}  // namespace tessera

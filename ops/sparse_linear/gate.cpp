#include "ops/sparse_linear/gate.h"

#include <algorithm>
#include <cmath>

#include "ops/gemm/gemm.h"
#include "ops/sparse_linear/gate_math.h"
#include "ops/sparse_linear/sparse_linear_kernels.h"
#include "ops/sparse_linear/sparse_weight.h"
#include "runtime/call_site.h"
#include "runtime/has_cuda.h"
#include "runtime/parallel.h"

namespace tessera::ops {

bool Gate::operator==(const Gate& other) const {
  const bool same_scales = scales.defined() == other.scales.defined() &&
                           (!scales.defined() || (scales.shares_storage(other.scales) &&
                                                  scales.layout().offset == other.scales.layout().offset));
  return kind == other.kind && threshold == other.threshold && keep == other.keep && same_scales;
}

void Gate::validate(const std::string& name, int64_t in) const {
  if (kind == Kind::threshold)
    check(threshold >= 0 && std::isfinite(threshold), name, ": the gate's threshold is ", threshold,
          "; expected a finite number of 0 or more");
  if (kind == Kind::top_k)
    check(keep >= 0 && keep <= in, name, ": the gate keeps ", keep, " inputs of ", in, "; expected 0 to ",
          in);
  if (!scales.defined()) return;
  check(scales.dtype() == DType::f32 && scales.rank() == 1 && scales.count() == in &&
            scales.layout().is_packed(),
        name, ": the gate's scales are ", describe(scales), "; expected f32[", in, "], packed");
}

namespace {

/// Of an operator that applies the gate by itself.
void check_gate(const char* op, const Tensor& x, const Gate& gate) {
  check(x.size(-1) <= kMostSparseSize, op, ": x is ", describe(x), "; expected at most ", kMostSparseSize,
        " inputs");
  gate.validate(op, x.size(-1));
  check(!gate.scales.defined() || gate.scales.device() == x.device(), op, ": the gate's scales are ",
        describe(gate.scales), ", and x is ", describe(x), "; both must be on one device");
}

template <class T>
std::vector<int32_t> inputs_of_row(const T* x, int64_t stride, int64_t in, const Gate& gate) {
  std::vector<int32_t> inputs;
  const float* const scales = gate.scales.defined() ? gate.scales.data<float>() : nullptr;
  const auto value = [&](int64_t j) { return gate_value(float(x[j * stride]), scales ? scales[j] : 1.0f); };
  if (gate.kind != Gate::Kind::top_k) {
    const float threshold = float(gate.threshold);
    for (int64_t j = 0; j < in; ++j)
      if (gate.kind == Gate::Kind::none || passes(value(j), threshold)) inputs.push_back(int32_t(j));
    return inputs;
  }
  std::vector<uint32_t> ranks(size_t(in), 0);
  for (int64_t j = 0; j < in; ++j) {
    ranks[size_t(j)] = gate_rank(value(j));
    inputs.push_back(int32_t(j));
  }
  const auto before = [&](int32_t a, int32_t b) {
    return ranks[size_t(a)] != ranks[size_t(b)] ? ranks[size_t(a)] > ranks[size_t(b)] : a < b;
  };
  std::nth_element(inputs.begin(), inputs.begin() + gate.keep, inputs.end(), before);
  inputs.resize(size_t(gate.keep));
  std::sort(inputs.begin(), inputs.end());
  return inputs;
}

}  // namespace

std::vector<std::vector<int32_t>> counting_inputs(const Tensor& x, const Gate& gate) {
  check(x.rank() == 2 && x.device().is_cpu(), "counting_inputs: x is ", describe(x),
        "; expected a matrix on the CPU");
  check_gate("counting_inputs", x, gate);
  std::vector<std::vector<int32_t>> inputs(size_t(x.size(0)));
  dispatch_floating(x.dtype(), "counting_inputs", [&]<class T>() {
    parallel_for(x.size(0), 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t)
        inputs[size_t(t)] =
            inputs_of_row(x.data<T>() + t * x.layout().stride(0), x.layout().stride(1), x.size(1), gate);
    });
  });
  return inputs;
}

Tensor apply_gate(const Tensor& x, const Gate& gate, Site site) {
  const CallScope call(site);
  check(x.rank() >= 1, "apply_gate: x is a scalar; expected [..., in]");
  check_gate("apply_gate", x, gate);
  const Tensor y = Tensor::empty(x.shape(), x.dtype(), x.device()), rows = flatten_leading(x.detach(), 1);
  const Tensor to = flatten_leading(y, 1);
  if (x.device().is_cpu()) {
    to.fill(0);
    const auto inputs = counting_inputs(rows, gate);
    dispatch_floating(x.dtype(), "apply_gate", [&]<class T>() {
      for (int64_t t = 0; t < rows.size(0); ++t) {
        const T* const from = rows.data<T>() + t * rows.layout().stride(0);
        T* const row = to.data<T>() + t * to.layout().stride(0);
        const int64_t stride = rows.layout().stride(1);
        for (const int32_t j : inputs[size_t(t)]) row[j] = from[j * stride];
      }
    });
  } else if constexpr (kCuda) {
    apply_gate_cuda(to, rows, gate);
  }
  return y;
}

}  // namespace tessera::ops

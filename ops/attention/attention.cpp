#include "ops/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/attention/attention_kernels.h"

namespace tessera::ops {
namespace {

/// Uninitialised, of x's shape and dtype, the first three dimensions in the order in which x has them in
/// memory. The two innermost ones form one row, so that heads merge into rows whatever D is.
Tensor empty_in_order_of(const Tensor& x) {
  int order[3] = {0, 1, 2};
  std::stable_sort(order, order + 3,
                   [&](int a, int b) { return x.layout().stride(a) > x.layout().stride(b); });
  const int64_t dim = x.size(3);
  const Tensor rows =
      Tensor::empty({x.size(order[0]), x.size(order[1]), x.size(order[2]) * dim}, x.dtype(), x.device());
  Layout layout = rows.layout();
  layout.shape = x.shape();
  layout.strides[size_t(order[0])] = rows.layout().stride(0);
  layout.strides[size_t(order[1])] = rows.layout().stride(1);
  layout.strides[size_t(order[2])] = dim;
  layout.strides[3] = 1;
  return Tensor::view_of(rows.storage(), layout, x.dtype());
}

/// Whether the kernels can read x in place: heads adjacent, on CUDA in 16-byte words, on the CPU as matrices
/// that BLAS takes.
bool readable(const Tensor& x) {
  const Layout& layout = x.layout();
  if (x.count() == 0) return true;
  if (x.size(3) > 1 && layout.stride(3) != 1) return false;
  if (x.device().is_cpu())
    return layout.stride(1) >= x.size(3) && layout.stride(1) <= std::numeric_limits<int32_t>::max();
  const int64_t pack = 16 / int64_t(size_of(x.dtype()));
  for (int dim = 0; dim < 3; ++dim)
    if (x.size(dim) > 1 && layout.stride(dim) % pack != 0) return false;
  return reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0;
}

Tensor as_heads(const Tensor& x) {
  if (readable(x)) return x.detach();
  const Tensor copy = empty_in_order_of(x);
  copy.copy_from(x.detach());
  return copy;
}

void check_operands(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options) {
  check(q.defined() && k.defined() && v.defined(), "attention: q, k or v is undefined");
  check(q.rank() == 4 && k.rank() == 4 && v.rank() == 4, "attention: q is ", describe(q), ", k ", describe(k),
        ", v ", describe(v), "; expected [B, Lq, H, D], [B, Lk, H, D] and [B, Lk, H, D]");
  check(k.shape() == v.shape(), "attention: k is ", describe(k), " but v is ", describe(v),
        "; expected one shape [B, Lk, H, D]");
  check(q.size(0) == k.size(0) && q.size(2) == k.size(2) && q.size(3) == k.size(3), "attention: q is ",
        describe(q), " but k and v are ", describe(k),
        "; B, H and D must agree (only the lengths may differ)");
  check(q.dtype() == k.dtype() && q.dtype() == v.dtype(), "attention: q is ", q.dtype(), ", k ", k.dtype(),
        ", v ", v.dtype(), "; expected one dtype (see cast)");
  check(q.device() == k.device() && q.device() == v.device(), "attention: q is on ", q.device().name(),
        ", k on ", k.device().name(), ", v on ", v.device().name(), "; expected one device");
  check(std::isfinite(options.scale) && options.scale >= 0, "attention: scale is ", options.scale,
        "; expected a positive number, or 0 for 1 / sqrt(D)");
  const int64_t dim = q.size(3);
  const DType dtype = q.dtype();
  if (q.device().is_cpu()) {
    check(dtype == DType::f64 || dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16,
          "attention: dtype ", dtype, " is not supported on device cpu; expected f64, f32, bf16 or f16");
    check(dim >= 1 && dim <= 256, "attention: head size ", dim,
          " is not supported on device cpu; expected 1 ... 256");
  } else {
    check(dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16, "attention: dtype ", dtype,
          " is not supported on device ", q.device().name(), "; expected f32, bf16 or f16",
          dtype == DType::f64 ? " (f64 runs on the CPU, as the oracle)" : "");
    check(dim >= 8 && dim <= 128 && dim % 8 == 0, "attention: head size ", dim,
          " is not supported on device ", q.device().name(),
          "; expected 8 ... 128 in multiples of 8 (pad the heads with zeros)");
    const int64_t longest = std::numeric_limits<int32_t>::max() / 2;
    check(q.size(1) <= longest && k.size(1) <= longest, "attention: lengths ", q.size(1), " and ", k.size(1),
          " are not supported on device ", q.device().name(), "; expected at most ", longest);
  }
}

}  // namespace

AttentionResult attention_with_lse(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const AttentionOptions& given, Site site) {
  check_operands(q, k, v, given);
  AttentionOptions options = given;
  if (options.scale == 0) options.scale = 1 / std::sqrt(double(q.size(3)));
  const DType statistics = q.dtype() == DType::f64 ? DType::f64 : DType::f32;
  const Tensor q_rows = as_heads(q), k_rows = as_heads(k), v_rows = as_heads(v);
  AttentionResult result{empty_in_order_of(q),
                         Tensor::empty({q.size(0), q.size(2), q.size(1)}, statistics, q.device())};
  Tensor& o = result.o;
  if (q.device().is_cpu()) {
    attention_forward_cpu(o, result.lse, q_rows, k_rows, v_rows, options);
  } else if constexpr (kCuda) {
    attention_forward_cuda(o, result.lse, q_rows, k_rows, v_rows, options);
  }
  if (Tape* tape = Tape::recording(q, k, v)) {
    tape->record(
        "attention", site, {&q, &k, &v}, {&o},
        [q = Saved(q_rows), k = Saved(k_rows), v = Saved(v_rows), o = Saved(o), lse = Saved(result.lse),
         options](Backward& b) {
          const Tensor dout = as_heads(b.grad());
          const bool keys_wanted = b.needs(1) || b.needs(2);
          const Tensor dq = b.needs(0) ? empty_in_order_of(q.get()) : Tensor();
          const Tensor dk = keys_wanted ? empty_in_order_of(k.get()) : Tensor();
          const Tensor dv = keys_wanted ? empty_in_order_of(v.get()) : Tensor();
          if (dout.device().is_cpu()) {
            attention_backward_cpu(dq, dk, dv, dout, q.get(), k.get(), v.get(), o.get(), lse.get(), options);
          } else if constexpr (kCuda) {
            attention_backward_cuda(dq, dk, dv, dout, q.get(), k.get(), v.get(), o.get(), lse.get(), options);
          }
          if (b.needs(0)) b.accumulate(0, dq);
          if (b.needs(1)) b.accumulate(1, dk);
          if (b.needs(2)) b.accumulate(2, dv);
        });
  }
  return result;
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options,
                 Site site) {
  return attention_with_lse(q, k, v, options, site).o;
}

}  // namespace tessera::ops

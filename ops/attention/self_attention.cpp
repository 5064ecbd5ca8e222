#include "ops/attention/self_attention.h"

#include <cmath>

#include "ops/attention/attention_kernels.h"
#include "ops/op.h"

namespace tessera::ops {
namespace {

struct Parts {
  Tensor q, k, v;
};
Parts parts_of(const Tensor& qkv) {
  const int64_t heads = qkv.size(2) / 3;
  return {qkv.slice(2, 0, heads), qkv.slice(2, heads, 2 * heads), qkv.slice(2, 2 * heads, 3 * heads)};
}

/// Uninitialised [B, L, heads, D] whose last two dimensions are one row: it starts on a boundary whatever D
/// is.
Tensor empty_rows(const Tensor& like) {
  const int64_t heads = like.size(2), dim = like.size(3);
  const Tensor rows = Tensor::empty({like.size(0), like.size(1), heads * dim}, like.dtype(), like.device());
  return rows.reshape(like.shape());
}

/// x itself if its heads lie as one row each, else a copy in which they do.
Tensor as_rows(const Tensor& x) {
  const Layout& layout = x.layout();
  const int64_t pack = 16 / int64_t(size_of(x.dtype()));
  bool fits = layout.stride(3) == 1 && layout.stride(2) == x.size(3) && layout.stride(1) % pack == 0 &&
              layout.stride(0) % pack == 0 && layout.stride(1) >= x.size(2) * x.size(3) &&
              reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0;
  if (fits) return x.detach();
  const Tensor copy = empty_rows(x);
  copy.copy_from(x.detach());
  return copy;
}

}  // namespace

Tensor self_attention(const Tensor& qkv, const AttentionOptions& given, Site site) {
  check(qkv.defined() && qkv.rank() == 4 && qkv.size(2) % 3 == 0, "self_attention: qkv is ",
        qkv.defined() ? qkv.shape() : Shape{}, "; expected [B, L, 3 H, D]");
  AttentionOptions options = given;
  if (options.scale == 0) options.scale = 1 / std::sqrt(double(qkv.size(3)));
  const Tensor rows = as_rows(qkv);
  AttentionResult result;
  {
    const NoTape no_tape;
    const auto [q, k, v] = parts_of(rows);
    result = attention_with_lse(q, k, v, options, site);
  }
  Tensor o = result.o;
  if (Tape* tape = Tape::recording(qkv))
    tape->record("self_attention", site, {&qkv}, {&o},
                 [qkv = Saved(rows), o = Saved(o), lse = Saved(result.lse), options](Backward& b) {
                   const auto [q, k, v] = parts_of(qkv.get());
                   const Tensor dout = as_rows(b.take_grad()), dqkv = empty_rows(qkv.get());
                   const auto [dq, dk, dv] = parts_of(dqkv);
                   if (dout.device().is_cpu()) {
                     attention_backward_cpu(dq, dk, dv, dout, q, k, v, o.get(), lse.get(), options);
                   } else if constexpr (kCuda) {
                     attention_backward_cuda(dq, dk, dv, dout, q, k, v, o.get(), lse.get(), options);
                   }
                   b.accumulate(0, dqkv);
                 });
  return o;
}

std::vector<OpSpec> self_attention_specs() {
  OpSpec spec;
  spec.name = "self_attention";
  spec.summary = "attention of the query, key and value heads that lie behind one another in qkv";
  spec.inputs = {{"qkv", "[B, L, 3 H, D]"}};
  spec.attrs = {{"causal", false, "query i sees the keys up to i"}};
  spec.outputs = {{"o", "[B, L, H, D]"}};
  spec.tolerance_factor_f32 = 3;
  spec.tolerance_reason =
      "as attention: exponentials of 2 ulp, probabilities rebuilt from the rounded log-sum-exp";
  spec.run = [](const std::vector<Tensor>& in, const Attrs& attrs) {
    return std::vector{self_attention(in[0], {.causal = attrs.flag("causal")})};
  };
  spec.problem = [](const Dims& d, const Attrs& attrs) {
    const int64_t batch = d.at("B"), length = d.at("L"), heads = d.at("H"), dim = d.at("D");
    const double n = double(batch) * double(length) * double(heads) * double(dim),
                 pairs = n * double(length) * (attrs.flag("causal") ? 0.5 : 1.0);
    return Problem{.inputs = {{.shape = {batch, length, 3 * heads, dim}}},
                   .forward_flops = 4 * pairs,
                   .backward_flops = 10 * pairs,
                   .forward_elements = 4 * n,
                   .backward_elements = 8 * n};
  };
  const auto dims = [](int64_t batch, int64_t length, int64_t heads, int64_t dim) {
    return Dims{{"B", batch}, {"L", length}, {"H", heads}, {"D", dim}};
  };
  const Attrs causal{{"causal", true}};
  spec.cases = {{.dims = dims(2, 5, 2, 8)},
                {.dims = dims(2, 5, 2, 8), .attrs = causal},
                {.dims = dims(1, 1, 3, 16), .attrs = causal},
                {.dims = dims(2, 0, 1, 8)},
                {.dims = dims(2, 4, 3, 8), .attrs = causal, .placement = Placement::strided},
                {.dims = dims(1, 4, 2, 8), .placement = Placement::transposed},
                {.dims = dims(2, 130, 3, 64), .attrs = causal, .gradcheck = false},
                {.dims = dims(1, 129, 2, 128), .gradcheck = false}};
  spec.benches = {{.dims = dims(64, 1024, 12, 64), .attrs = causal}};
  return {std::move(spec)};
}

}  // namespace tessera::ops

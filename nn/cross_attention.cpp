#include "nn/cross_attention.h"

#include "ops/attention/attention.h"
#include "ops/shape/shape.h"

namespace tessera::nn {

CrossAttention::CrossAttention(int64_t d, const CrossAttentionOptions& options, Rng& rng, Device device)
    : q(d, d, rng, device, {.bias = options.bias, .dtype = options.dtype}),
      kv(d, 2 * d, rng, device, {.bias = options.bias, .dtype = options.dtype}),
      out(d, d, rng, device, {.bias = options.bias, .dtype = options.dtype}),
      heads(options.heads) {
  check(heads >= 1 && d % heads == 0, "cross attention: d ", d, " is not a multiple of the number of heads ",
        heads);
}

Tensor CrossAttention::operator()(const Tensor& queries, const Tensor& memory, const Tensor& residual,
                                  Site site) const {
  const LayerCall call(*this, site);
  const int64_t d = queries.size(-1);
  // [T, B, d] rows seen as [B, T, H, D]: views, no copies; attention keeps this memory order in what it
  // returns.
  const auto by_head = [&](const Tensor& rows) {
    return ops::transpose(
        ops::reshape(rows, {rows.size(0), rows.size(1), rows.size(2) / (d / heads), d / heads}), 0, 1);
  };
  const std::vector<Tensor> known = ops::split(by_head(kv(memory)), 2, {heads, heads});
  const Tensor mixed = ops::attention(by_head(q(queries)), known[0], known[1]);
  return out(ops::reshape(ops::transpose(mixed, 0, 1), queries.shape()), residual);
}

}  // namespace tessera::nn

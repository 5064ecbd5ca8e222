#include "nn/cross_attention.h"

#include "comm/recorded.h"
#include "ops/attention/attention.h"
#include "ops/shape/shape.h"
#include "runtime/text.h"

namespace tessera::nn {

CrossAttention::CrossAttention(int64_t d, const Rng& rng, Device device, CrossAttentionOptions options)
    : q(d, d, rng, device, {.bias = options.bias, .dtype = options.dtype, .init = options.init}),
      kv(d, 2 * d, rng, device, {.bias = options.bias, .dtype = options.dtype, .init = options.init}),
      out(d, d, rng, device, {.bias = options.bias, .dtype = options.dtype, .init = options.init}),
      heads(options.heads) {
  check(heads >= 1 && d % heads == 0, "cross attention: d ", d, " is not a multiple of the number of heads ",
        heads);
}

const char* name_of(AttentionSplit::By by) {
  return by == AttentionSplit::By::rows ? "rows" : "heads";
}

AttentionSplit::By parse_attention_split(std::string_view name) {
  return parse_name<AttentionSplit::By>("cross attention: there is no split", {"rows", "heads"}, name);
}

std::vector<Tensor> CrossAttention::attended(const Tensor& queries, const Tensor& memory,
                                             const AttentionSplit* split) const {
  const int64_t d = queries.size(-1);
  // [T, B, d] rows seen as [B, T, H, D]: views, no copies; attention keeps this memory order in what it
  // returns.
  const auto by_head = [&](const Tensor& rows) {
    return ops::transpose(
        ops::reshape(rows, {rows.size(0), rows.size(1), rows.size(2) / (d / heads), d / heads}), 0, 1);
  };
  Tensor projected = kv(memory);
  if (split && split->by == AttentionSplit::By::rows)
    projected = comm::gather_rows(split->group, projected, split->memory);
  const std::vector<Tensor> known = ops::split(by_head(projected), 2, {heads, heads});
  const Tensor asking = by_head(q(queries));
  if (!split || split->by == AttentionSplit::By::rows) return {asking, known[0], known[1]};
  std::vector<Tensor> all = comm::rows_to_heads(
      split->group,
      {ops::transpose(asking, 0, 1), ops::transpose(known[0], 0, 1), ops::transpose(known[1], 0, 1)},
      {split->queries, split->memory, split->memory});
  for (Tensor& one : all) one = ops::transpose(one, 0, 1);
  return all;
}

Tensor CrossAttention::operator()(const Tensor& queries, const Tensor& memory, const Tensor& residual,
                                  const AttentionSplit* split, Site site) const {
  const LayerCall call(*this, site);
  const std::vector<Tensor> read = attended(queries, memory, split);
  Tensor mixed = ops::transpose(ops::attention(read[0], read[1], read[2]), 0, 1);
  if (split && split->by == AttentionSplit::By::heads)
    mixed = comm::heads_to_rows(split->group, mixed, split->queries);
  return out(ops::reshape(mixed, queries.shape()), residual);
}

}  // namespace tessera::nn

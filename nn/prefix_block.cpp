#include "nn/prefix_block.h"

#include "ops/pointwise/pointwise.h"
#include "ops/shape/shape.h"

namespace tessera::nn {

namespace {

/// An MLP of 0 features adds nothing, without a word.
int64_t checked_hidden(int64_t hidden, int64_t d) {
  check(hidden >= 1, "prefix block: hidden is ", hidden,
        "; expected the number of features of the MLP, 1 or more (often 4 d = ", 4 * d, ")");
  return hidden;
}

}  // namespace

PrefixBlock::PrefixBlock(int64_t d, int64_t hidden, const Rng& rng, Device device, PrefixBlockOptions options)
    : attention(d, rng, device, {.heads = options.heads, .bias = options.bias, .dtype = options.dtype}),
      mlp(d, checked_hidden(hidden, d), rng, device,
          {.activation = options.activation, .bias = options.bias, .dtype = options.dtype}),
      norm1(d, device, {.bias = options.bias, .dtype = options.dtype}),
      norm2(d, device, {.bias = options.bias, .dtype = options.dtype}),
      pre_norm(options.pre_norm) {}

Tensor PrefixBlock::operator()(const Tensor& x, int64_t context, bool suffix_only,
                               const AttentionSplit* split, Site site) const {
  const LayerCall call(*this, site);
  // The rows that go on, and those that they attend to.
  const auto cut = [&](const Tensor& rows) {
    if (!suffix_only) return std::vector{rows, ops::slice(rows, 0, 0, context)};
    std::vector<Tensor> parts = ops::split(rows, 0, {context, rows.size(0) - context});
    std::swap(parts[0], parts[1]);
    return parts;
  };
  if (pre_norm) {
    const std::vector<Tensor> seen = cut(norm1(x));
    const Tensor rows = suffix_only ? ops::slice(x, 0, context, x.size(0)) : x;
    const auto [middle, normed] = norm2.add(rows, attention(seen[0], seen[1], {}, split));
    return ops::add(middle, mlp(normed));
  }
  const std::vector<Tensor> seen = cut(x);
  const Tensor middle = norm1(attention(seen[0], seen[1], seen[0], split));
  return norm2(mlp(middle, middle));
}

}  // namespace tessera::nn

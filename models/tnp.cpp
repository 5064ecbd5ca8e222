#include "models/tnp.h"

#include <cmath>

#include "autograd/checkpoint.h"
#include "ops/attention/attention.h"
#include "ops/gmm_nll/gmm_nll.h"
#include "ops/grouped_mlp/grouped_mlp.h"
#include "ops/mlp/mlp.h"
#include "ops/pointwise/pointwise.h"
#include "ops/shape/shape.h"

namespace tessera::models {

void TnpConfig::validate() const {
  const std::pair<const char*, int64_t> sizes[] = {{"features", features},
                                                   {"d_model", d_model},
                                                   {"d_ff", d_ff},
                                                   {"heads", heads},
                                                   {"layers", layers},
                                                   {"components", components},
                                                   {"embed_hidden", embed_hidden}};
  for (const auto& [name, size] : sizes)
    check(size >= 1, "tnp: ", name, " is ", size, "; it must be at least 1");
  check(d_model % heads == 0, "tnp: d_model ", d_model, " is not a multiple of the number of heads ", heads);
  check(checkpoint_every >= 0, "tnp: checkpoint_every is ", checkpoint_every);
}

// ---- attention and block ----

TnpAttention::TnpAttention(const TnpConfig& config, Rng& rng, Device device)
    : q(config.d_model, config.d_model, rng, device, {.bias = false, .dtype = config.dtype}),
      kv(config.d_model, 2 * config.d_model, rng, device, {.bias = false, .dtype = config.dtype}),
      out(config.d_model, config.d_model, rng, device, {.bias = false, .dtype = config.dtype}),
      heads(config.heads) {}

Tensor TnpAttention::operator()(const Tensor& queries, const Tensor& memory, const Tensor& residual) const {
  const ModuleScope scope("attention");
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

TnpBlock::TnpBlock(const TnpConfig& config, Rng& rng, Device device)
    : attention(config, rng, device),
      mlp(config.d_model, config.d_ff, rng, device,
          {.activation = ops::Activation::silu, .bias = false, .dtype = config.dtype}),
      norm1(config.d_model, device, {.bias = false, .dtype = config.dtype}),
      norm2(config.d_model, device, {.bias = false, .dtype = config.dtype}),
      pre_norm(config.pre_norm) {}

Tensor TnpBlock::operator()(const Tensor& x, int64_t context, bool last) const {
  // The rows that go on, and those that they attend to.
  const auto cut = [&](const Tensor& rows) {
    if (!last) return std::vector{rows, ops::slice(rows, 0, 0, context)};
    std::vector<Tensor> parts = ops::split(rows, 0, {context, rows.size(0) - context});
    std::swap(parts[0], parts[1]);
    return parts;
  };
  if (pre_norm) {
    const std::vector<Tensor> seen = cut(norm1(x));
    const Tensor rows = last ? ops::slice(x, 0, context, x.size(0)) : x;
    const auto [middle, normed] = norm2.add(rows, attention(seen[0], seen[1]));
    return ops::add(middle, mlp(normed));
  }
  const std::vector<Tensor> seen = cut(x);
  const Tensor middle = norm1(attention(seen[0], seen[1], seen[0]));
  return norm2(mlp(middle, middle));
}

// ---- the model ----

namespace {

nn::LinearOptions plain(const TnpConfig& config) {
  return {.bias = false, .dtype = config.dtype};
}

const TnpConfig& validated(const TnpConfig& config) {
  config.validate();
  return config;
}

}  // namespace

Tnp::Tnp(const TnpConfig& given, Rng& rng, Device device)
    : config(validated(given)),
      embed_in(config.features + 1, config.embed_hidden, rng, device, plain(config)),
      embed_out(config.embed_hidden, config.d_model, rng, device, plain(config)),
      head_in(config.components, config.d_model, config.d_ff, rng, device,
              {.bias = false, .dtype = config.dtype}),
      head_out(config.components, config.d_ff, 3, rng, device,
               {.shared = false, .bias = false, .dtype = config.dtype}) {
  for (int64_t i = 0; i < config.layers; ++i) blocks.emplace_back(config, rng, device);
  if (config.pre_norm)
    norm.emplace(config.d_model, device, nn::LayerNormOptions{.bias = false, .dtype = config.dtype});
}

namespace {

void check_batch(const TnpConfig& config, const Tensor& xc, const Tensor& yc, const Tensor& xt) {
  check(xc.rank() == 3 && xt.rank() == 3 && xc.size(2) == config.features && xt.size(2) == config.features,
        "tnp: xc is ", describe(xc), " and xt ", describe(xt), "; expected [B, M, ", config.features,
        "] and [B, N, ", config.features, "]");
  check(xc.size(0) == xt.size(0), "tnp: ", xc.size(0), " tasks of context, ", xt.size(0), " of targets");
  check(xc.size(1) >= 1, "tnp: an empty context; at least one point is needed to attend to");
  check(yc.shape() == Shape({xc.size(0), xc.size(1), 1}), "tnp: yc is ", describe(yc),
        "; expected [B, M, 1] with xc ", xc.shape());
}

/// [L, B, F + 1]: context (x, y), then target (x, 0).
Tensor make_tokens(const TnpConfig& config, const Tensor& xc, const Tensor& yc, const Tensor& xt) {
  const int64_t context = xc.size(1), targets = xt.size(1), features = config.features;
  const Tensor tokens =
      Tensor::empty({context + targets, xc.size(0), features + 1}, config.dtype, xc.device());
  const Tensor head = tokens.slice(0, 0, context), tail = tokens.slice(0, context, context + targets);
  head.slice(2, 0, features).copy_from(xc.transpose(0, 1));
  head.slice(2, features, features + 1).copy_from(yc.transpose(0, 1));
  tail.slice(2, 0, features).copy_from(xt.transpose(0, 1));
  tail.slice(2, features, features + 1).fill(0);
  return tokens;
}

}  // namespace

Tensor Tnp::forward(const Tensor& xc, const Tensor& yc, const Tensor& xt) const {
  check_batch(config, xc, yc, xt);
  const int64_t context = xc.size(1);
  Tensor x;
  {
    const ModuleScope scope("embed");
    x = ops::mlp(make_tokens(config, xc, yc, xt), embed_in.weight, embed_out.weight, ops::Activation::silu);
  }
  const int64_t group = config.checkpoint_every;
  for (size_t first = 0; first < blocks.size();) {
    const size_t last = group > 0 ? std::min(blocks.size(), first + size_t(group)) : first + 1;
    const auto run = [this, first, last, context](const Tensor& input) {
      Tensor y = input;
      for (size_t i = first; i < last; ++i) {
        const ModuleScope scope("blocks", int64_t(i));
        y = blocks[i](y, context, i + 1 == blocks.size());
      }
      return y;
    };
    x = group > 0 ? checkpoint(run, x) : run(x);
    first = last;
  }
  const ModuleScope scope("head");
  if (norm) x = (*norm)(x);
  return ops::grouped_mlp(x, head_in.weight, head_out.weight, ops::Activation::silu);
}

namespace {

/// Likelihoods [N, B] of the targets, which stay in f32 next to a mixture in 16 bits.
Tensor target_losses(const Tensor& mixture, const TnpBatch& batch, ops::Reduction reduction) {
  const Tensor y = batch.yt.transpose(0, 1).select(2, 0);
  return ops::gmm_nll(mixture, y.to(mixture.dtype() == DType::f64 ? DType::f64 : DType::f32), reduction);
}

}  // namespace

Tensor Tnp::loss(const TnpBatch& batch) const {
  return target_losses(forward(batch.xc, batch.yc, batch.xt), batch, ops::Reduction::mean);
}

Tensor Tnp::point_losses(const TnpBatch& batch) const {
  const Tensor losses = target_losses(forward(batch.xc, batch.yc, batch.xt), batch, ops::Reduction::none);
  return losses.detach().transpose(0, 1);
}

}  // namespace tessera::models

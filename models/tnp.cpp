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

// ---- counting ----

TnpFlops count_flops(const TnpConfig& c, int64_t batch, int64_t context, int64_t targets) {
  const double tokens = double(batch) * double(context + targets), memory = double(batch) * double(context);
  const double d = double(c.d_model), f = double(c.d_ff), layers = double(c.layers);
  const double rows = layers * tokens - memory;  // of all blocks: the last makes those of the targets alone
  TnpFlops flops;
  flops.products = 2 * tokens * double(c.embed_hidden) * (double(c.features + 1) + d) +
                   2 * rows * d * (2 * d + 2 * f) + layers * 2 * memory * d * 2 * d;
  flops.attention = rows * 4 * double(context) * d;
  flops.heads = 2 * double(batch) * double(targets) * double(c.components) * f * (d + 3);
  return flops;
}

double TnpFlops::step(bool checkpointed) const {
  return 3 * (products + heads) + 3.5 * attention + (checkpointed ? products + attention : 0);
}

int64_t count_parameters(const TnpConfig& c) {
  const int64_t block = 4 * c.d_model * c.d_model + 2 * c.d_model * c.d_ff + 2 * c.d_model;
  return (c.features + 1) * c.embed_hidden + c.embed_hidden * c.d_model + c.layers * block +
         (c.pre_norm ? c.d_model : 0) + c.components * c.d_ff * (c.d_model + 3);
}

TnpMemory plan_memory(const TnpConfig& c, int64_t batch, int64_t context, int64_t targets) {
  const double size = double(size_of(c.dtype)), parameters = double(count_parameters(c));
  const double tokens = double(batch) * double(context + targets), memory = double(batch) * double(context);
  const double points = double(batch) * double(targets);
  const double d = double(row_pitch(c.d_model, c.dtype)), f = double(row_pitch(c.d_ff, c.dtype));
  TnpMemory plan;
  plan.parameters = parameters * size;
  plan.gradients = parameters * (c.dtype == DType::f64 ? 8 : 4);
  plan.optimizer = 2 * plan.gradients + (size_of(c.dtype) == 2 ? 4 * parameters : 0);
  // One block: q, the attention's result, two sums and two norms (the last is the next block's input), the
  // hidden rows before and after their activation; keys and values; log-sum-exp,
  // mean and reciprocal deviation of two norms.
  const auto block_of = [&](double rows) {
    return (6 * rows * d + 2 * rows * f + 2 * memory * d) * size + 4 * rows * double(c.heads + 4);
  };
  const double block = block_of(tokens);
  const double mixture = points * double(c.components) * 3 * size;
  const double heads = 2 * mixture + (c.pre_norm ? points * d * size : 0);
  const double embed =
      tokens *
      (double(row_pitch(c.features + 1, c.dtype)) + 2 * double(row_pitch(c.embed_hidden, c.dtype)) + d) *
      size;
  // Largest temporaries: the heads make the gradient of their hidden rows again; backward of an MLP holds the
  // gradients of its hidden rows, of its result and of its input; attention's the gradients of its result and
  // its operands, and the sums of dq in f32.
  const double hidden_at_once =
      size == 2 ? 1 : 2;  // outside 16 bits the heads are products one after the other
  const double in_heads = hidden_at_once * points * double(c.components) * f * size + points * d * size;
  const double in_mlp = (f + 2 * d) * tokens * size;
  const double in_attention = (4 * tokens * d + 2 * memory * d) * size + tokens * d * 4;
  if (c.checkpoint_every > 0) {
    // The largest is the last group but one (in the last block the context is left out), when its own result
    // and what the last group began with are gone. Attention's backward comes after its MLP's rows are.
    const double groups = std::ceil(double(c.layers) / double(c.checkpoint_every)), row = tokens * d * size;
    const double hidden = 2 * tokens * f * size;
    plan.saved = groups * row + embed + heads;
    plan.transient = std::max(in_heads, double(c.checkpoint_every) * block - (groups > 1 ? 2 : 1) * row +
                                            std::max(in_mlp, in_attention - hidden));
  } else {
    plan.saved = double(c.layers - 1) * block + block_of(points) + embed + heads;
    plan.transient = std::max({in_heads, in_mlp, in_attention});
  }
  return plan;
}

}  // namespace tessera::models

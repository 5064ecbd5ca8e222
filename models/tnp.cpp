#include "models/tnp.h"

#include <algorithm>

#include "autograd/checkpoint.h"
#include "ops/gmm_nll/gmm_nll.h"
#include "ops/pointwise/pointwise.h"

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

// ---- tasks on several ranks ----

TnpSplit::TnpSplit(comm::Communicator group, nn::AttentionSplit::By by, int64_t context, int64_t points)
    : tokens{group, by, comm::RowSplit(group.size(), {context, points}),
             comm::RowSplit(group.size(), {context})},
      targets{group, by, comm::RowSplit(group.size(), {points}), comm::RowSplit(group.size(), {context})} {}

TnpBatch part_of(const TnpBatch& whole, std::shared_ptr<const TnpSplit> split) {
  const int rank = split->rank();
  const comm::RowSplit::Range context = split->tokens.memory.in_whole(0, rank),
                              targets = split->targets.queries.in_whole(0, rank);
  return {whole.xc.slice(1, context.begin, context.end), whole.yc.slice(1, context.begin, context.end),
          whole.xt.slice(1, targets.begin, targets.end), whole.yt.slice(1, targets.begin, targets.end),
          std::move(split)};
}

// ---- the model ----

namespace {

const TnpConfig& validated(const TnpConfig& config) {
  config.validate();
  return config;
}

}  // namespace

Tnp::Tnp(const TnpConfig& given, const Rng& rng, Device device)
    : config(validated(given)),
      embedder(
          config.features + 1, config.embed_hidden, rng, device,
          {.activation = ops::Activation::silu, .out = config.d_model, .bias = false, .dtype = config.dtype}),
      mixture(config.components, config.d_model, config.d_ff, 3, rng, device,
              {.activation = ops::Activation::silu, .bias = false, .dtype = config.dtype}) {
  const nn::PrefixBlockOptions options{.heads = config.heads,
                                       .activation = ops::Activation::silu,
                                       .pre_norm = config.pre_norm,
                                       .bias = false,
                                       .dtype = config.dtype};
  for (int64_t i = 0; i < config.layers; ++i)
    blocks.emplace_back(config.d_model, config.d_ff, rng, device, options);
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

/// Likelihoods of the targets yt [B, N, 1], which stay in f32 next to a mixture in 16 bits: [N, B], or their
/// mean.
Tensor target_losses(const Tensor& mixture, const Tensor& yt, ops::Reduction reduction) {
  const Tensor y = yt.transpose(0, 1).select(2, 0);
  return ops::gmm_nll(mixture, y.to(mixture.dtype() == DType::f64 ? DType::f64 : DType::f32), reduction);
}

}  // namespace

Tensor Tnp::embed(const Tensor& xc, const Tensor& yc, const Tensor& xt, Site site) const {
  const nn::LayerCall call(*this, site);
  check_batch(config, xc, yc, xt);
  return embedder(make_tokens(config, xc, yc, xt));
}

Tensor Tnp::block(int64_t i, const Tensor& x, int64_t context, const TnpSplit* split, Site site) const {
  const nn::LayerCall call(*this, site);
  const bool last = i + 1 == config.layers;
  return blocks[size_t(i)](x, context, last, split ? last ? &split->targets : &split->tokens : nullptr);
}

Tensor Tnp::finish(const Tensor& x, Site site) const {
  const nn::LayerCall call(*this, site);
  return mixture(norm ? (*norm)(x) : x);
}

Tensor Tnp::finish(const Tensor& x, const Tensor& yt, Site site) const {
  const nn::LayerCall call(*this, site);
  return target_losses(finish(x), yt, ops::Reduction::mean);
}

Tensor Tnp::hidden(const TnpBatch& batch) const {
  Tensor x = embed(batch.xc, batch.yc, batch.xt);
  const int64_t context = batch.xc.size(1), group = config.checkpoint_every;
  for (int64_t first = 0; first < config.layers;) {
    const int64_t last = group > 0 ? std::min(config.layers, first + group) : first + 1;
    const auto run = [this, first, last, context, split = batch.split](const Tensor& input) {
      Tensor y = input;
      for (int64_t i = first; i < last; ++i) y = block(i, y, context, split.get());
      return y;
    };
    x = group > 0 ? checkpoint(run, x) : run(x);
    first = last;
  }
  return x;
}

Tensor Tnp::operator()(const Tensor& xc, const Tensor& yc, const Tensor& xt, Site site) const {
  const nn::LayerCall call(*this, site);
  return finish(hidden({xc, yc, xt, {}}));
}

Tensor Tnp::loss(const TnpBatch& batch, Site site) const {
  const nn::LayerCall call(*this, site);
  const Tensor mean = finish(hidden(batch), batch.yt);
  if (!batch.split) return mean;
  return ops::scale(mean, double(batch.split->own_targets()) / double(batch.split->all_targets()));
}

Tensor Tnp::point_losses(const TnpBatch& batch, Site site) const {
  const nn::LayerCall call(*this, site);
  const Tensor mixed = finish(hidden(batch));
  return target_losses(mixed, batch.yt, ops::Reduction::none).detach().transpose(0, 1);
}

}  // namespace tessera::models

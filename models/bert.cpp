#include "models/bert.h"

#include "models/language_internal.h"
#include "nn/slice_scope.h"
#include "ops/cross_entropy/cross_entropy.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "ops/shape/shape.h"

namespace tessera::models {

using namespace language_internal;

void BertConfig::validate() const {
  check_sizes("bert", {{"vocabulary", vocabulary},
                       {"positions", positions},
                       {"types", types},
                       {"d_model", d_model},
                       {"d_ff", d_ff},
                       {"heads", heads},
                       {"layers", layers},
                       {"labels", labels}});
  check(d_model % heads == 0, "bert: d_model ", d_model, " is not a multiple of the number of heads ", heads);
  check(pad_token >= 0 && longest() >= 1, "bert: ", positions,
        " positions leave none for tokens: ", position_offset(), " come before the first");
}

BertBatch BertBatch::from_padded(const Tensor& tokens, const Tensor& types,
                                 const std::vector<int64_t>& lengths) {
  check(tokens.defined() && tokens.rank() == 2, "bert: tokens is ",
        tokens.defined() ? describe(tokens) : describe(Tensor::zeros({0}, DType::i64, Device::cpu())),
        "; expected [B, T]");
  check(!types.defined() || types.shape() == tokens.shape(), "bert: types has another shape than tokens ",
        tokens.shape());
  check(int64_t(lengths.size()) == tokens.size(0), "bert: ", lengths.size(), " lengths for ", tokens.size(0),
        " sequences");
  const auto keep = [&](const Tensor& rows) {
    const auto values = rows.to(DType::i64).to_vector<int64_t>();
    std::vector<int64_t> kept;
    for (size_t b = 0; b < lengths.size(); ++b) {
      check(lengths[b] >= 1 && lengths[b] <= rows.size(1), "bert: sequence ", b, " has ", lengths[b],
            " tokens of ", rows.size(1));
      const auto begin = values.begin() + int64_t(b) * rows.size(1);
      kept.insert(kept.end(), begin, begin + lengths[b]);
    }
    return Tensor::from(kept, {int64_t(kept.size())}, rows.device());
  };
  return {keep(tokens), types.defined() ? keep(types) : Tensor(), {lengths}};
}

namespace {

const BertConfig& validated(const BertConfig& config) {
  config.validate();
  return config;
}

nn::LayerNormOptions norm_options(const BertConfig& config) {
  return {.eps = config.eps, .dtype = config.dtype};
}

nn::LinearOptions blank(const BertConfig& config) {
  return {.dtype = config.dtype, .init = nn::Init::zeros};
}

nn::EmbeddingOptions blank_table(const BertConfig& config) {
  return {.deviation = 0, .dtype = config.dtype};
}

}  // namespace

BertBlock::BertBlock(const BertConfig& config, const Rng& rng, Device device)
    : attention(config.d_model, rng, device,
                {.heads = config.heads,
                 .dropout = config.attention_dropout,
                 .dtype = config.dtype,
                 .init = nn::Init::zeros}),
      norm1(config.d_model, device, norm_options(config)),
      mlp(config.d_model, config.d_ff, rng, device,
          {.activation = config.activation, .dtype = config.dtype, .init = nn::Init::zeros}),
      norm2(config.d_model, device, norm_options(config)),
      dropout(config.hidden_dropout, rng) {}

Tensor BertBlock::operator()(const Tensor& x, const nn::AttentionPass& pass, int64_t layer, Site site) const {
  const nn::LayerCall call(*this, site);
  // x's rows are gathered after the attention: backward then scatters them first, and the attention's
  // GEMM adds to that in its epilogue.
  const Tensor branch = attention(x, pass, layer),
               middle = norm1.add(pass.wanted(x, layer), branch, &dropout).y;
  const nn::SliceScope rows(pass.narrows(layer) ? nullptr : &pass);
  return norm2.add(middle, mlp(middle), &dropout).y;
}

BertClassifier::BertClassifier(const BertConfig& config, const Rng& rng, Device device)
    : dense(config.d_model, config.d_model, rng, device, blank(config)),
      out(config.d_model, config.outputs(), rng, device, blank(config)),
      dropout(config.classifier_dropout, rng),
      drops_input(config.family == BertFamily::roberta) {}

Tensor BertClassifier::operator()(const Tensor& first, Site site) const {
  const nn::LayerCall call(*this, site);
  return out(dropout(ops::tanh(dense(drops_input ? dropout(first) : first))));
}

BertLanguageHead::BertLanguageHead(const BertConfig& config, const Rng& rng, Device device)
    : dense(config.d_model, config.d_model, rng, device, blank(config)),
      norm(config.d_model, device, norm_options(config)),
      decoder(config.d_model, config.vocabulary, rng, device,
              {.tied = true, .bias = true, .dtype = config.dtype, .init = nn::Init::zeros}),
      activation(config.activation) {}

Tensor BertLanguageHead::operator()(const Tensor& x, const nn::Embedding& token, Site site) const {
  const nn::LayerCall call(*this, site);
  return decoder(norm(ops::activation(dense(x), activation)), token);
}

Tensor BertLanguageHead::loss(const Tensor& x, const Tensor& targets, const nn::Embedding& token,
                              Site site) const {
  const nn::LayerCall call(*this, site);
  return decoder.loss(norm(ops::activation(dense(x), activation)), targets, token);
}

Bert::Bert(const BertConfig& given, const Rng& rng, Device device, Start start)
    : config(validated(given)),
      token(config.vocabulary, config.d_model, rng, device, blank_table(config)),
      position(config.positions, config.d_model, rng, device, blank_table(config)),
      type(config.types, config.d_model, rng, device, blank_table(config)),
      norm(config.d_model, device, norm_options(config)),
      dropout(config.hidden_dropout, rng) {
  for (int64_t i = 0; i < config.layers; ++i) blocks.emplace_back(config, rng, device);
  if (config.head == BertHead::classify || config.head == BertHead::regress)
    classifier.emplace(config, rng, device);
  if (config.head == BertHead::masked_lm) language.emplace(config, rng, device);
  if (start == Start::blank) return;
  // Without values beyond two deviations, as the paper's code draws them.
  const auto draw_weight = [&](const Tensor& weight) {
    nn::init::truncated_normal(weight, rng, 0, config.init_deviation);
  };
  for (const nn::Embedding* table : {&token, &position, &type}) draw_weight(table->weight);
  for (const BertBlock& block : blocks)
    for (const nn::Linear* linear :
         {&block.attention.qkv, &block.attention.out, &block.mlp.up, &block.mlp.down})
      draw_weight(linear->weight);
  if (classifier) draw_weight(classifier->dense.weight), draw_weight(classifier->out.weight);
  if (language) draw_weight(language->dense.weight);
}

nn::AttentionPass Bert::begin(const BertBatch& batch, bool first_alone) const {
  if (!batch.cu_seqlens.defined()) check_packed("bert", batch.tokens, batch.sequences, config.longest());
  check(!batch.cu_seqlens.defined() || (batch.positions.defined() && batch.first_rows.defined()),
        "bert: lengths that are on the device need positions and first rows there too");
  check(!batch.types.defined() || batch.types.shape() == batch.tokens.shape(),
        "bert: types has another shape than tokens ", batch.tokens.shape());
  nn::AttentionPass pass{.sequences = batch.sequences, .cu_seqlens = batch.cu_seqlens};
  if (first_alone)
    pass.rows =
        batch.first_rows.defined() ? batch.first_rows : batch.sequences.first_rows(batch.tokens.device());
  pass.rows_from = config.layers - 1;
  return pass;
}

nn::AttentionPass Bert::begin(const BertBatch& batch) const {
  nn::AttentionPass pass = begin(batch, classifier.has_value());
  if (language && batch.masked.defined()) pass.rows = batch.masked;
  return pass;
}

Tensor Bert::embed(const BertBatch& batch, Site site) const {
  const nn::LayerCall call(*this, site);
  const Tensor kinds =
      batch.types.defined() ? type(batch.types) : ops::slice(type.weight, 0, 0, 1);  // a row for all
  const Tensor places = batch.positions.defined()
                            ? batch.positions
                            : batch.sequences.positions(config.position_offset(), batch.tokens.device());
  return dropout(norm.add(ops::add(token(batch.tokens), kinds), position(places)).y);
}

Tensor Bert::block(int64_t i, const Tensor& x, const nn::AttentionPass& pass, Site site) const {
  const nn::LayerCall call(*this, site);
  return blocks[size_t(i)](x, pass, i);
}

Tensor Bert::finish(const Tensor& x, Site site) const {
  const nn::LayerCall call(*this, site);
  return classifier ? (*classifier)(x) : language ? (*language)(x, token) : x;
}

Tensor Bert::finish(const Tensor& x, const Tensor& targets, Site site) const {
  const nn::LayerCall call(*this, site);
  check(config.head != BertHead::none, "bert: a model without a head has no loss");
  check(targets.defined() && targets.count() == x.size(0), "bert: targets is ",
        targets.defined() ? targets.count() : 0, " numbers for ", x.size(0), " rows");
  const Tensor flat = targets.packed().reshape({targets.count()});
  if (language) return language->loss(x, flat, token);
  const Tensor y = finish(x);
  if (config.head != BertHead::regress) return ops::cross_entropy(y, flat);
  const Tensor error = ops::sub(ops::reshape(y, {y.size(0)}), flat.to(y.dtype()));
  return ops::mean(ops::mul(error, error));
}

Tensor Bert::through_blocks(const BertBatch& batch, const nn::AttentionPass& pass) const {
  Tensor x = embed(batch);
  for (int64_t i = 0; i < config.layers; ++i) x = block(i, x, pass);
  return x;
}

Tensor Bert::encode(const BertBatch& batch, Site site) const {
  const nn::LayerCall call(*this, site);
  return through_blocks(batch, begin(batch, false));
}

Tensor Bert::encode_first(const BertBatch& batch, Site site) const {
  const nn::LayerCall call(*this, site);
  return through_blocks(batch, begin(batch, true));
}

Tensor Bert::operator()(const BertBatch& batch, Site site) const {
  const nn::LayerCall call(*this, site);
  const nn::AttentionPass pass = begin(batch);
  const nn::SliceScope rows(classifier ? nullptr : &pass);
  return finish(through_blocks(batch, pass));
}

Tensor Bert::loss(const BertBatch& batch, const Tensor& targets, Site site) const {
  const nn::LayerCall call(*this, site);
  check(config.head != BertHead::none, "bert: a model without a head has no loss");
  const nn::AttentionPass pass = begin(batch);
  const nn::SliceScope rows(classifier ? nullptr : &pass);
  return finish(through_blocks(batch, pass), targets);
}

}  // namespace tessera::models

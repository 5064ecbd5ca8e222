#include <algorithm>
#include <cmath>
#include <numeric>

#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "plan/sizes_internal.h"
#include "runtime/integers.h"

namespace tessera::plan {
namespace {

Sizes sizes_of(const models::GptConfig& c) {
  const int64_t d = c.d_model;
  return {.vocabulary = c.vocabulary,
          .d = d,
          .layers = c.layers,
          .q = d,
          .kv = d,
          .head_dim = d / c.heads,
          .ff = c.d_ff,
          .up = c.d_ff,
          .biases = 3 * d + d + c.d_ff + d,
          .norms = 4 * d,
          .tables = (c.vocabulary + c.positions + c.position_offset()) * d,
          .rest = 2 * d + (c.tied ? 0 : c.vocabulary * d),
          .gated = false,
          .rope = false,
          .dtype = c.dtype,
          .fused = c.family == models::GptFamily::gpt2};
}

Sizes sizes_of(const models::LlamaConfig& c) {
  const int64_t d = c.d_model, q = c.heads * c.effective_head_dim(), kv = c.kv_heads * c.effective_head_dim();
  const int64_t up = c.gated ? 2 * c.d_ff : c.d_ff;
  return {.vocabulary = c.vocabulary,
          .d = d,
          .layers = c.layers,
          .q = q,
          .kv = kv,
          .head_dim = c.effective_head_dim(),
          .ff = c.d_ff,
          .up = up,
          .biases = (c.qkv_bias() ? q + 2 * kv : 0) + (c.attention_bias ? d : 0) + (c.mlp_bias ? up + d : 0),
          .norms = 2 * d + (c.qk_norm() ? 2 * c.effective_head_dim() : 0),
          .tables = c.vocabulary * d,
          .rest = d + (c.tied ? 0 : c.vocabulary * d),
          .gated = c.gated,
          .rope = true,
          .dtype = c.dtype,
          .fused = c.family == models::LlamaFamily::phi3};
}

Sizes sizes_of(const LanguageConfig& config) {
  return std::visit([](const auto& c) { return sizes_of(c); }, config);
}

/// Bytes of the weight that sltrain makes for one GEMM.
double made_weight(const Sizes& s, const Forms& forms) {
  const auto of = [&](const nn::FactorOptions& form, double elements) {
    return form.kind == nn::FactorKind::sltrain ? elements * double(size_of(s.dtype)) : 0;
  };
  return std::max(of(forms.attention, double(s.q + 2 * s.kv) * double(s.d)),
                  of(forms.mlp, double(s.up) * double(s.d)));
}

/// Bytes per token that backward holds of the widest hidden activations between factors that are 2:4.
double between_factors(const Forms& forms) {
  double most = 0;
  for (const nn::FactorOptions& form : {forms.attention, forms.mlp})
    if (forms.between && form.kind == nn::FactorKind::cola)
      most = std::max(most, double(form.rank) * forms.between->transient);
  return most;
}

/// Bytes of the masks of 2:4 weights, a bit per element in whole words of a row, in all blocks; and the most
/// that a GEMM makes of one: it unpacked and masked, and compressed, or by mvue the gradient of the layer's
/// result, compressed.
struct Masks24 {
  double masks = 0, transient = 0;
};
Masks24 masks24(const Sizes& s, const Forms& forms, double tokens) {
  Masks24 all;
  const double element = double(size_of(s.dtype));
  const auto add = [&](int64_t rows, int64_t in) {
    all.masks += 4 * double(s.layers) * double(rows) * double(ceil_div(in, 32));
    all.transient = std::max(all.transient, double(rows) * double(in) * (2.5 * element + 1.0 / 8));
    if (forms.mvue24)
      all.transient = std::max(all.transient, tokens * double(rows) * (element / 2 + 1.0 / 8));
  };
  if (forms.attention24) add(s.q + 2 * s.kv, s.d), add(s.d, s.q);
  if (forms.mlp24) add(s.up, s.d), add(s.d, s.ff);
  return all;
}

}  // namespace

nn::FactorCounts matrices(const Sizes& s, const Forms& forms) {
  nn::FactorCounts all;
  const auto add = [&](const nn::FactorOptions& form, int64_t rows, int64_t in, int64_t count = 1) {
    const nn::FactorCounts one = nn::count_factors(form, rows, in);
    all.parameters += double(count) * one.parameters;
    all.multiply_adds += double(count) * one.multiply_adds;
    all.saved += double(count) * (forms.between && form.kind == nn::FactorKind::cola
                                      ? double(form.rank) * forms.between->saved / double(size_of(s.dtype))
                                      : one.saved);
  };
  if (s.fused)
    add(forms.attention, s.q + 2 * s.kv, s.d);
  else
    add(forms.attention, s.q, s.d), add(forms.attention, s.kv, s.d, 2);
  add(forms.attention, s.d, s.q);
  if (s.gated && !s.fused)
    add(forms.mlp, s.ff, s.d, 2);
  else
    add(forms.mlp, s.up, s.d);
  add(forms.mlp, s.d, s.ff);
  return all;
}

int64_t count_parameters(const Sizes& s, const Forms& forms) {
  return s.tables + s.rest + s.layers * (int64_t(matrices(s, forms).parameters) + s.biases + s.norms);
}

int64_t count_parameters(const LanguageConfig& config, const Forms& forms) {
  return count_parameters(sizes_of(config), forms);
}

Flops count_flops(const LanguageConfig& config, int64_t batch, int64_t length, const Forms& forms) {
  const Sizes s = sizes_of(config);
  const double tokens = double(batch) * double(length);
  return {.gemms = 2 * tokens * double(s.layers) * matrices(s, forms).multiply_adds,
          .attention = 2 * tokens * double(length) * double(s.q) * double(s.layers),
          .heads = 2 * tokens * double(s.vocabulary) * double(s.d)};
}

Memory count_memory(const LanguageConfig& config, int64_t batch, int64_t length, const Forms& forms) {
  const Sizes s = sizes_of(config);
  const double tokens = double(batch) * double(length), element = double(size_of(s.dtype));
  const double parameters = double(count_parameters(config, forms)), d = double(s.d),
               qkv = double(s.q + 2 * s.kv);
  // Elements per token that a block keeps: input and output of either norm, the fused projection, queries and
  // keys after RoPE, what attention returns, the hidden rows before and after the activation.
  const double rotated = s.rope ? double(s.q + s.kv) : 0,
               hidden = forms.hidden ? double(s.ff) * forms.hidden->saved / element : double(s.up + s.ff);
  // On a GPU a head_dim that is not a multiple of 8 is padded: attention keeps copies of q, k, v and o
  // instead.
  const int64_t whole = round_up(s.head_dim, 8);
  const double padded = whole == s.head_dim ? 0 : 2 * double(s.q + s.kv) * double(whole) / double(s.head_dim);
  const double block =
      4 * d + (padded > 0 ? padded : qkv + rotated) + double(s.q) + hidden + matrices(s, forms).saved;
  // The LM head computes its gradients in forward, a chunk of logits at a time: in f32; for bf16 as
  // exponentials next to sums in f32 (variant "wgmma"), for f16 in f32 and rounded.
  const double rows = std::min(tokens, double(ops::linear_cross_entropy_chunk(
                                           s.vocabulary, s.dtype == DType::bf16 ? s.dtype : DType::f32)));
  const double chunk = s.dtype == DType::bf16 ? rows * (double(s.vocabulary) * 2 + d * 6)
                                              : rows * double(s.vocabulary) * (element == 2 ? 6 : 4);
  const double head = tokens * d * element + double(s.vocabulary) * d * 4 + chunk;
  // Backward of an MLP holds the gradients of its hidden rows, of its result and of its input; attention's
  // the gradients of its result and its operands, and the sums of dq in f32.
  const double in_hidden = forms.hidden ? double(s.ff) * forms.hidden->transient / element
                                        : double(s.up) + double(s.gated ? s.ff : 0);
  const double in_mlp = (in_hidden + 2 * d) * tokens * element;
  const double in_attention = (2 * d + 2 * qkv + padded) * tokens * element + tokens * double(s.q) * 4;
  const Masks24 sparse = masks24(s, forms, tokens);
  return {.parameters = parameters * element + sparse.masks,
          .gradients = parameters * 4,
          .optimizer = parameters * (size_of(s.dtype) == 2 ? 12 : 8),
          .saved = tokens * (double(s.layers) * block + 2 * d) * element,
          .transient = std::max({head, in_mlp, in_attention}) + made_weight(s, forms) + sparse.transient +
                       tokens * between_factors(forms)};
}

std::vector<HiddenMatrix> hidden_matrices(const LanguageConfig& config, const Forms& forms) {
  return hidden_matrices(sizes_of(config), forms);
}

std::vector<HiddenMatrix> hidden_matrices(const Sizes& s, const Forms& forms) {
  std::vector<HiddenMatrix> list;
  const auto take = [&](const std::vector<int64_t>& rows, int64_t columns) {
    if (std::accumulate(rows.begin(), rows.end(), int64_t{0}) >= 2 && columns >= 2)
      list.push_back({.rows = rows, .columns = columns, .count = s.layers});
  };
  const auto add = [&](const nn::FactorOptions& form, const std::vector<int64_t>& rows, int64_t in) {
    if (form.kind == nn::FactorKind::dense) return take(rows, in);
    take(std::vector<int64_t>(rows.size(), form.rank), in);
    take(rows, form.rank);
    if (form.kind != nn::FactorKind::lost) return;
    const double factors = double(form.rank) * double(rows[0] + in);
    take(rows, std::llround((nn::count_factors(form, rows[0], in).parameters - factors) / double(rows[0])));
  };
  add(forms.attention, s.fused ? std::vector<int64_t>{s.q + 2 * s.kv} : std::vector<int64_t>{s.q, s.kv, s.kv},
      s.d);
  add(forms.attention, {s.d}, s.q);
  add(forms.mlp, s.gated && !s.fused ? std::vector<int64_t>{s.ff, s.ff} : std::vector<int64_t>{s.up}, s.d);
  add(forms.mlp, {s.d}, s.ff);
  return list;
}

ArenaSizes arena_sizes(const LanguageConfig& config, const Forms& forms) {
  const Sizes s = sizes_of(config);
  ArenaSizes sizes = arena_sizes(s, forms);
  sizes.tied = std::visit([](const auto& c) { return c.tied; }, config);
  if (!sizes.tied) sizes.elements.push_back(double(s.vocabulary) * double(s.d));
  return sizes;
}

ArenaSizes arena_sizes(const Sizes& s, const Forms& forms) {
  const double d = double(s.d);
  ArenaSizes sizes;
  sizes.elements.push_back(double(s.tables));
  for (int64_t i = 0; i < s.layers; ++i) {
    if (!forms.are_dense()) {
      sizes.elements.push_back(matrices(s, forms).parameters);
      continue;
    }
    for (const double matrix :
         {double(s.q + 2 * s.kv) * d, d * double(s.q), double(s.up) * d, d * double(s.ff)})
      sizes.elements.push_back(matrix);
  }
  return sizes;
}

Generation prefill(const LanguageConfig& config, double weight_bytes, int64_t batch, int64_t prompt) {
  const Sizes s = sizes_of(config);
  const double p = double(prompt), gemms = 2 * weight_bytes / double(size_of(s.dtype)) * p * double(batch);
  return {.flops = gemms + 2 * p * p * double(s.q) * double(s.layers) * double(batch), .bytes = weight_bytes};
}

Generation decode(const LanguageConfig& config, double weight_bytes, int64_t batch, double cached) {
  const Sizes s = sizes_of(config);
  const double element = double(size_of(s.dtype)), layers = double(s.layers), texts = double(batch);
  return {.flops = (2 * weight_bytes / element + 4 * cached * double(s.q) * layers) * texts,
          .bytes = weight_bytes + 2 * cached * double(s.kv) * layers * element * texts};
}

}  // namespace tessera::plan

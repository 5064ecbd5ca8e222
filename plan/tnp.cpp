#include "plan/plan.h"

#include <algorithm>
#include <cmath>

#include "models/tnp.h"
#include "runtime/integers.h"

namespace tessera::plan {
namespace {

using By = nn::AttentionSplit::By;

int64_t largest_share(int64_t points, const models::TaskSplit& split) {
  return ceil_div(points, split.ranks);
}

}  // namespace

Flops count_flops(const models::TnpConfig& c, int64_t batch, int64_t context, int64_t targets) {
  const double tokens = double(batch) * double(context + targets), memory = double(batch) * double(context);
  const double d = double(c.d_model), f = double(c.d_ff), layers = double(c.layers);
  const double rows = layers * tokens - memory;  // of all blocks: the last makes those of the targets alone
  Flops flops;
  flops.gemms = 2 * tokens * double(c.embed_hidden) * (double(c.features + 1) + d) +
                2 * rows * d * (2 * d + 2 * f) + layers * 2 * memory * d * 2 * d;
  flops.attention = rows * 4 * double(context) * d;
  flops.heads = 2 * double(batch) * double(targets) * double(c.components) * f * (d + 3);
  return flops;
}

int64_t count_parameters(const models::TnpConfig& c) {
  const int64_t block = 4 * c.d_model * c.d_model + 2 * c.d_model * c.d_ff + 2 * c.d_model;
  return (c.features + 1) * c.embed_hidden + c.embed_hidden * c.d_model + c.layers * block +
         (c.pre_norm ? c.d_model : 0) + c.components * c.d_ff * (c.d_model + 3);
}

std::vector<HiddenMatrix> hidden_matrices(const models::TnpConfig& c) {
  const int64_t d = c.d_model, f = c.d_ff;
  return {{.rows = {d}, .columns = d, .count = 2 * c.layers},
          {.rows = {2 * d}, .columns = d, .count = c.layers},
          {.rows = {f}, .columns = d, .count = c.layers},
          {.rows = {d}, .columns = f, .count = c.layers}};
}

Memory count_memory(const models::TnpConfig& c, int64_t batch, int64_t context, int64_t targets,
                    const models::TaskSplit& split) {
  const double size = double(size_of(c.dtype)), parameters = double(count_parameters(c));
  // Of this rank: rows of its share, and of the keys and values that it holds while a block runs.
  const double ranks = double(split.ranks);
  const bool by_heads = split.ranks > 1 && split.by == By::heads;
  const double points = double(batch) * double(largest_share(targets, split)),
               own_memory = double(batch) * double(largest_share(context, split)),
               tokens = own_memory + points;
  const double memory = double(batch) * double(context) / (by_heads ? ranks : 1);
  const double d = double(row_pitch(c.d_model, c.dtype)), f = double(row_pitch(c.d_ff, c.dtype));
  Memory plan;
  plan.parameters = parameters * size;
  plan.gradients = parameters * (c.dtype == DType::f64 ? 8 : 4);
  plan.optimizer = 2 * plan.gradients + (size_of(c.dtype) == 2 ? 4 * parameters : 0);
  // One block: q, the attention's result, two sums and two norms (the last is the next block's input), the
  // hidden rows before and after their activation; keys and values; log-sum-exp,
  // mean and reciprocal deviation of two norms. By heads the attention's result is kept twice: all rows of
  // some heads for its backward pass, some rows of all heads for that of the projection after it.
  const double rows_of_width = by_heads ? 7 : 6;
  const auto block_of = [&](double rows) {
    return (rows_of_width * rows * d + 2 * rows * f + 2 * memory * d) * size + 4 * rows * double(c.heads + 4);
  };
  const double block = block_of(tokens);
  const double mixture = points * double(c.components) * 3 * size;
  const double heads = 2 * mixture + (c.pre_norm ? points * d * size : 0);
  const double embed =
      tokens *
      (double(row_pitch(c.features + 1, c.dtype)) + 2 * double(row_pitch(c.embed_hidden, c.dtype)) + d) *
      size;
  // Largest temporaries: the heads recompute the gradient of their hidden rows; backward of an MLP holds the
  // gradients of its hidden rows, of its result and of its input; attention's the gradients of its result and
  // its operands, and the sums of dq in f32. Where the ranks divide rows, the gradients of all keys and
  // values meet those that the others send; where they divide heads, messages hold queries, keys and values
  // twice.
  const double hidden_at_once =
      size == 2 ? 1 : 2;  // outside 16 bits the heads are GEMMs, one after the other
  const double in_heads = hidden_at_once * points * double(c.components) * f * size + points * d * size;
  const double in_mlp = (f + 2 * d) * tokens * size;
  const double messages =
      split.ranks == 1 ? 0 : (by_heads ? 2 * (tokens + 2 * own_memory) : 2 * memory) * d * size;
  const double in_attention = std::max((4 * tokens * d + 2 * memory * d) * size + tokens * d * 4,
                                       (2 * tokens * d + 2 * memory * d) * size + messages);
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

double count_attention_bytes(const models::TnpConfig& c, int64_t batch, int64_t context, int64_t targets,
                             const models::TaskSplit& split) {
  const double own_context = double(batch) * double(largest_share(context, split)),
               own_targets = double(batch) * double(largest_share(targets, split));
  const double row = double(c.d_model) * double(size_of(c.dtype)), ranks = double(split.ranks);
  const double layers = double(c.layers), passes = c.checkpoint_every > 0 ? 2 : 1;  // forward
  if (split.by == By::rows)  // keys and values to all others; their gradients to the rank whose they are
    return layers * 2 * row *
           (passes * (ranks - 1) * own_context + double(batch) * double(context) - own_context);
  // To each other rank its share of the heads: queries and results, and keys and values of the context. The
  // last block's queries are the targets.
  const double asked = layers * (own_context + own_targets) - own_context;
  return (passes + 1) * (ranks - 1) / ranks * row * (2 * asked + 2 * layers * own_context);
}

}  // namespace tessera::plan

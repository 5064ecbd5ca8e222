#pragma once

#include "models/llama.h"

/// Layers with compressed weights, for tests.

namespace tessera::models {

/// The rows of its weight in parts, from the top.
inline void compress(nn::Linear& layer, const std::vector<int64_t>& rows, ops::SparseFormat format) {
  nn::Compressed form;
  int64_t first = 0;
  for (const int64_t count : rows) {
    form.parts.push_back({ops::compress(layer.weight.detach().slice(0, first, first + count), format), {}});
    first += count;
  }
  layer.weight = {};
  layer.form = std::move(form);
}

/// Every dense layer of the blocks: q, k and v, and gate and up, as parts.
inline void compress_blocks(Llama& model, ops::SparseFormat format) {
  for (LlamaBlock& block : model.blocks) {
    const int64_t queries = block.attention.out.in, keys = (block.attention.qkv.out - queries) / 2,
                  hidden = block.mlp.down.in;
    const auto once = [&](nn::Linear& layer, const std::vector<int64_t>& rows) {
      if (nn::is_dense(layer.form)) compress(layer, rows, format);
    };
    once(block.attention.qkv, {queries, keys, keys});
    once(block.attention.out, {block.attention.out.out});
    once(block.mlp.up, {hidden, hidden});
    once(block.mlp.down, {block.mlp.down.out});
  }
}

}  // namespace tessera::models

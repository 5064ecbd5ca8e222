#include "nn/decoder_layers.h"

#include "nn/observe.h"

namespace tessera::nn {
namespace {

/// What keeps ops::decoder_layers from computing this block, or an empty string.
std::string block_lacks(const DecoderBlock& block, const std::string& path) {
  std::string lacks;
  for_each_linear(
      block,
      [&](const std::string& name, const auto& layer) {
        note_form(layer.form);
        if (!lacks.empty()) return;
        if (!is_dense(layer.form))
          lacks = name + " is " + name_of(layer.form);
        else if (Observe::sees(&layer))
          lacks = name + " is observed";
        else if (layer.bias.defined())
          lacks = name + " has a bias";
      },
      path);
  if (!lacks.empty()) return lacks;
  if (block.attention.q_norm) return path + ".attention normalises queries and keys";
  if (!block.mlp.gated || block.mlp.activation != ops::Activation::silu) return path + ".mlp is not SwiGLU";
  if (block.dropout.drops()) return path + ".dropout is active";
  return "";
}

}  // namespace

DecoderLayers::DecoderLayers(std::span<const DecoderBlock> blocks, const KvCache& cache,
                             const std::string& path)
    : lengths_(cache.lengths()) {
  if (cache.batch() != 1)
    lacks_ = "the cache holds several texts";
  else if (!cache.rope_table.defined())
    lacks_ = "the angles of positions change with the length";
  for (size_t i = 0; i < blocks.size() && lacks_.empty(); ++i)
    lacks_ = block_lacks(blocks[i], path + "." + std::to_string(i));
  if (!lacks_.empty()) return;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const DecoderBlock& block = blocks[i];
    eps_ = block.norm1.eps;
    layers_.push_back({.norm1 = block.norm1.weight,
                       .qkv = block.attention.qkv.weight,
                       .out = block.attention.out.weight,
                       .norm2 = block.norm2.weight,
                       .up = block.mlp.up.weight,
                       .down = block.mlp.down.weight,
                       .keys = cache.keys(int64_t(i)),
                       .values = cache.values(int64_t(i))});
  }
  if (const std::string needs = ops::persistent_lacks(layers_, cache.rope_table); !needs.empty())
    lacks_ = "the kernel needs " + needs;
}

Tensor DecoderLayers::operator()(const Tensor& x, const Tensor& table) const {
  check(lacks_.empty(), "decoder_layers: cannot run these blocks as one kernel: ", lacks_,
        "; run the blocks one after the other");
  return ops::decoder_layers(x, layers_, table, lengths_, eps_);
}

}  // namespace tessera::nn

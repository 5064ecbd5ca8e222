#include "nn/decoder_layers.h"

#include "nn/observe.h"

namespace tessera::nn {
namespace {

/// The rows of a compressed layer's weight.
std::vector<ops::SparseWeight> parts_of(const Compressed& form) {
  std::vector<ops::SparseWeight> parts;
  for (const ops::SparsePart& part : form.parts) parts.push_back(part.weight);
  return parts;
}

/// A layer's weight as the operator takes it, whose form block_lacks() has seen.
template <class Weight>
Weight weight_of(const Linear& layer) {
  if constexpr (std::is_same_v<Weight, Tensor>)
    return layer.weight;
  else
    return parts_of(std::get<Compressed>(layer.form));
}

template <class Weight>
std::vector<ops::DecoderLayerOf<Weight>> layers_of(std::span<const DecoderBlock> blocks,
                                                   const KvCache& cache) {
  std::vector<ops::DecoderLayerOf<Weight>> layers;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const DecoderBlock& block = blocks[i];
    layers.push_back({.norm1 = block.norm1.weight,
                      .qkv = weight_of<Weight>(block.attention.qkv),
                      .qkv_bias = block.attention.qkv.bias,
                      .q_norm = block.attention.q_norm ? block.attention.q_norm->weight : Tensor(),
                      .k_norm = block.attention.k_norm ? block.attention.k_norm->weight : Tensor(),
                      .out = weight_of<Weight>(block.attention.out),
                      .norm2 = block.norm2.weight,
                      .up = weight_of<Weight>(block.mlp.up),
                      .down = weight_of<Weight>(block.mlp.down),
                      .keys = cache.keys(int64_t(i)),
                      .values = cache.values(int64_t(i))});
  }
  return layers;
}

/// What keeps ops::decoder_layers from computing this block, or an empty string. `compressed`: whether the
/// first layer of all is.
std::string block_lacks(const DecoderBlock& block, const std::string& path, bool compressed) {
  std::string lacks;
  const auto form_lacks = [&](const Form& form) -> std::string {
    const Compressed* const sparse = std::get_if<Compressed>(&form);
    if (!sparse) return compressed || !is_dense(form) ? name_of(form) : "";
    if (!compressed) return "compressed";
    for (const ops::SparsePart& part : sparse->parts)
      if (part.gate.kind != ops::Gate::Kind::none) return "gated";
    return "";
  };
  for_each_linear(
      block,
      [&](const std::string& name, const auto& layer) {
        note_form(layer.form);
        if (!lacks.empty()) return;
        if (const std::string form = form_lacks(layer.form); !form.empty())
          lacks = name + " is " + form;
        else if (Observe::sees(&layer))
          lacks = name + " is observed";
        else if (layer.bias.defined() && static_cast<const void*>(&layer) != &block.attention.qkv)
          lacks = name + " has a bias";
      },
      path);
  if (!lacks.empty()) return lacks;
  for (const std::optional<RmsNorm>* const norm : {&block.attention.q_norm, &block.attention.k_norm})
    if (*norm && (*norm)->eps != block.norm1.eps) return path + ".attention has norms with another eps";
  if (!block.mlp.gated || block.mlp.activation != ops::Activation::silu) return path + ".mlp is not SwiGLU";
  if (compressed && std::get<Compressed>(block.mlp.up.form).parts.size() != 2)
    return path + ".mlp.up is not compressed as gate and up";
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
  const bool compressed = !blocks.empty() && std::holds_alternative<Compressed>(blocks[0].attention.qkv.form);
  for (size_t i = 0; i < blocks.size() && lacks_.empty(); ++i)
    lacks_ = block_lacks(blocks[i], path + "." + std::to_string(i), compressed);
  if (!lacks_.empty()) return;
  eps_ = blocks.back().norm1.eps;
  if (compressed)
    layers_ = layers_of<std::vector<ops::SparseWeight>>(blocks, cache);
  else
    layers_ = layers_of<Tensor>(blocks, cache);
  std::visit(
      [&](const auto& layers) {
        const std::string needs = ops::persistent_lacks(std::span(layers), cache.rope_table);
        if (!needs.empty()) lacks_ = "the kernel needs " + needs;
      },
      layers_);
}

Tensor DecoderLayers::operator()(const Tensor& x, const Tensor& table) const {
  check(lacks_.empty(), "decoder_layers: cannot run these blocks as one kernel: ", lacks_,
        "; run the blocks one after the other");
  return std::visit(
      [&](const auto& layers) { return ops::decoder_layers(x, std::span(layers), table, lengths_, eps_); },
      layers_);
}

}  // namespace tessera::nn

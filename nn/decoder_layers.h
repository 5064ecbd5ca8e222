#pragma once

#include <span>
#include <string>
#include <variant>
#include <vector>

#include "nn/attention.h"
#include "nn/mlp.h"
#include "nn/norm.h"
#include "ops/decoder_layers/decoder_layers.h"

namespace tessera::nn {

/// The layers of one LLaMA block.
struct DecoderBlock {
  const RmsNorm& norm1;
  const SelfAttention& attention;
  const RmsNorm& norm2;
  const Mlp& mlp;
  const Dropout& dropout;  // of both residual branches

  void fields(auto&& visit) {
    visit("norm1", norm1), visit("attention", attention), visit("norm2", norm2), visit("mlp", mlp);
  }
};

/// A step of generation of one text through all blocks as one kernel (ops::decoder_layers, whose persistent
/// variant reads the weights of the blocks themselves). It computes biases of q, k and v alone, and linear
/// layers only while they are not observed and all of them dense, or all compressed without gates.
class DecoderLayers {
 public:
  /// Refers to the blocks' tensors and to the cache. `path` is where the blocks are in the model: "blocks".
  DecoderLayers(std::span<const DecoderBlock> blocks, const KvCache& cache, const std::string& path);
  /// Why these blocks cannot run so over this cache, naming the layer that prevents it: "blocks.3.mlp.up is
  /// scaled"; empty if they can.
  const std::string& lacks() const { return lacks_; }
  /// x [1, d], `table` as in ops::decoder_layers -> [1, d]; writes keys and values into the cache. Throws,
  /// with what lacks() says, if it cannot.
  Tensor operator()(const Tensor& x, const Tensor& table) const;

 private:
  std::variant<std::vector<ops::DecoderLayer>, std::vector<ops::SparseDecoderLayer>> layers_;
  std::string lacks_;
  Tensor lengths_;
  double eps_ = 0;
};

}  // namespace tessera::nn

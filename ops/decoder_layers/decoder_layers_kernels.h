#pragma once

#include <span>
#include <string>
#include <vector>

#include "ops/decoder_layers/decoder_layers.h"

namespace tessera::ops::decoder {

/// Limits of the persistent kernel: they size its shared memory, its registers and its parameters.
inline constexpr int64_t kMaxDenseLayers = 256, kMaxSellLayers = 108;
inline constexpr int64_t kMaxModelWidth = 8192;  // d: a block keeps the residual stream in registers
inline constexpr int64_t kMaxWidth = 32768;      // of the input of any GEMM: it lies in shared memory

inline constexpr int64_t kSharedBytes = 227 * 1024;  // shared memory of a block, sm_90

template <class Layer>
struct Problem {
  Tensor y, x;  // [1, d]
  std::span<const Layer> layers;
  Tensor table;    // [P, R], rows
  Tensor lengths;  // [1]
  double eps;
};

/// Names of the variants: "persistent" and "composed".
std::vector<std::string> variants();
/// Variant "persistent". Only if persistent_lacks() is empty.
void decoder_layers_cuda(const Problem<DecoderLayer>& problem);
void decoder_layers_cuda(const Problem<SparseDecoderLayer>& problem);

}  // namespace tessera::ops::decoder

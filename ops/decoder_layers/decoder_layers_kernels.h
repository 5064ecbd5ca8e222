#pragma once

#include <span>
#include <string>
#include <vector>

#include "ops/decoder_layers/decoder_layers.h"

namespace tessera::ops::decoder {

/// Limits of the persistent kernel: they size its shared memory, its registers and its parameters.
inline constexpr int64_t kMaxLayers = 256;
inline constexpr int64_t kMaxModelWidth = 8192;  // d: a block keeps the residual stream in registers
inline constexpr int64_t kMaxWidth = 16384;      // of the input of any GEMM: it lies in shared memory

struct Problem {
  Tensor y, x;  // [1, d]
  std::span<const DecoderLayer> layers;
  Tensor table;    // [P, R], rows
  Tensor lengths;  // [1]
  double eps;
};

/// Names of the variants: "persistent" and "composed".
std::vector<std::string> variants();
/// Variant "persistent". Only if persistent_lacks() is empty.
void decoder_layers_cuda(const Problem& problem);

}  // namespace tessera::ops::decoder

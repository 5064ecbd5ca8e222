#pragma once

#include <cstdint>

#include "ops/decoder_layers/decoder_layers.h"

/// How the persistent kernel for sell_delta4 weights (decoder_sell.cuh) shares out its work. Host code alone.

namespace tessera::ops::decoder {

// What the plan takes the kernel to need, which asserts it (decoder_layers_sell_sm90.cu).
inline constexpr int kSellWarps = 8;                       // of a block
inline constexpr int64_t kSellAttentionBytes = 20 * 1024;  // of shared memory, in place of the input vector
inline constexpr int64_t kSellOtherBytes = 1280;           // of shared memory: barriers, angles

inline constexpr int kSellMatrices = 7;       // q, k, v; out; gate, up; down
inline constexpr int kGemvs = 4;              // qkv, out, gate and up, down
inline constexpr int kSellStageBytes = 7808;  // 12 chunks of 640 bytes and a note, in steps of 128
inline constexpr int kLeastSellStages = 2;    // of a warp's ring

/// The work of one GEMV: slices of 32 rows, those of one matrix after those of the other. A block has a range
/// of them, of equal length up to one.
struct SellGemv {
  int parts = 1, width = 8;  // of the columns, and columns of a part
  int slices = 0;
  int first = 0;  // the block that has the first slices: in each GEMV others have one more
};

struct SellDecoderPlan {
  SellGemv gemv[kGemvs];
  int first_slice[kSellMatrices] = {};      // in its GEMV; past the last one of a matrix that is not there
  int first_row[kSellMatrices] = {};        // likewise, of the outputs
  int stages = 0;                           // of a warp's ring
  int64_t vector_bytes = 0, sum_bytes = 0;  // of shared memory
};

/// The plan for layers such as `layer` on a GPU with `blocks` SMs. Its stages are below kLeastSellStages
/// where shared memory does not suffice.
SellDecoderPlan plan_sell_decoder(const SparseDecoderLayer& layer, int blocks);

}  // namespace tessera::ops::decoder

#pragma once

#include "ops/decode_attention/decode_attention.h"
#include "ops/indices.h"
#include "ops/variant.h"

/// Checked problems. `lengths` is packed, and `more` is added to each: cases of the declaration give the
/// tokens before the new ones.
///
/// On CUDA attention with few queries is the same work (attention_forward.cu): without `lengths` all rows of
/// `keys` are there, of which each of the n queries sees all, or with `causal` the last sees all; and there
/// may be an `lse`.

namespace tessera::ops {

struct DecodeProblem {
  Tensor o, q;          // [B, n, H, D], heads of adjacent elements
  Tensor keys, values;  // [B, capacity, Hk, D], likewise; on the CPU heads may be longer
  Tensor lengths;       // [B]
  int64_t more = 0;
  double scale = 1;
  bool causal = true;
  Tensor lse = {};  // [B, H, n], f32, rows; or undefined
};

struct AppendProblem {
  Tensor cache;    // [B, capacity, Hk, D]
  Tensor x;        // [B, n, Hk, D]
  Tensor lengths;  // [B]
  int64_t more = 0;
};

struct RopeToCache {
  Tensor q;             // [B, n, H, D]
  Tensor qkv;           // [B, n, H + 2 Hk, D], heads of adjacent elements
  Tensor table;         // [P, R], rows
  Tensor lengths;       // [B]
  Tensor keys, values;  // [B, capacity, Hk, D], heads of adjacent elements
  int64_t more = 0;
};

/// The operators (decode_attention.h, rope_to_cache.h), for cases that give `past`, the tokens of each
/// sequence before the `more` new ones.
Tensor decode_attention_past(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& past,
                             int64_t more, const DecodeAttentionOptions& options);
void append_past(Tensor& cache, const Tensor& x, const Tensor& past, int64_t more);
Tensor rope_to_cache_past(const Tensor& qkv, const Tensor& table, const Tensor& past, int64_t more,
                          Tensor& keys, Tensor& values);

void decode_attention_cpu(const DecodeProblem& problem);
void append_to_cache_cpu(const AppendProblem& problem);

/// The variants: see docs/ops/decode_attention.md. "mma": bf16 and f16, heads of up to kMmaDim elements.
inline constexpr int64_t kMmaDim = 128;
void decode_attention_fma_cuda(const DecodeProblem& problem);
void decode_attention_mma_cuda(const DecodeProblem& problem);
std::vector<std::string> decode_attention_variants();
/// What is chosen for q [B, n, H, D] whose heads are padded to `dim` elements.
std::string_view decode_attention_variant(const Tensor& q, int64_t dim, const Gpu& gpu);
void append_to_cache_cuda(const AppendProblem& problem);
void rope_to_cache_cuda(const RopeToCache& problem);

namespace decode {

template <class T>
struct Args;  // decode_attention_device.cuh

/// The second kernel: adds the pieces that the first left; nothing if there is one piece.
template <class T>
void join(Device device, const Args<T>& args);
template <class T>
void run_mma(const DecodeProblem& problem);

}  // namespace decode
}  // namespace tessera::ops

#pragma once

#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/variant.h"

namespace tessera::ops {

/// The arguments as matrices, off the tape: x [N, d], weight [V, d], bias [V] or undefined, targets [N],
/// packed.
struct Head {
  Head(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& targets,
       const LinearCrossEntropyOptions& options);
  int64_t tokens() const { return x.size(0); }
  int64_t classes() const { return weight.size(0); }
  /// Tokens of a chunk whose logits have this dtype.
  int64_t chunk(DType dtype) const {
    return options.chunk ? options.chunk : linear_cross_entropy_chunk(classes(), dtype);
  }

  Tensor x, weight, bias, targets;
  LinearCrossEntropyOptions options;
};
std::string describe_problem(const Head& head);

/// "wgmma" and "composed"; what is chosen.
std::vector<std::string> linear_cross_entropy_variants();
std::string_view linear_cross_entropy_variant(const Head& head, const Gpu& gpu);

/// *count = the number of packed targets that are not `ignored`; on the CPU throws if one of those is outside
/// [0, classes). count is of rank 0, in sum_dtype.
void count_targets_cpu(const Tensor& count, const Tensor& targets, int64_t classes, int64_t ignored);
void count_targets_cuda(const Tensor& count, const Tensor& targets, int64_t ignored);

/// *loss = the sum of the packed losses, added in double in a fixed order, divided by *count if that is
/// defined.
void sum_losses_cpu(const Tensor& loss, const Tensor& losses, const Tensor& count);
void sum_losses_cuda(const Tensor& loss, const Tensor& losses, const Tensor& count);

/// The variant "wgmma" (linear_cross_entropy_sm90.cu), on a chunk of tokens x [n, d]: first target_logits,
/// then exponential_product, then finish_exponentials, then the GEMMs that the caller wants. All
/// bf16 tensors have rows on 16-byte boundaries.
struct ExponentialChunk {
  Tensor x;
  Tensor exponentials;  // bf16 [n, V]; undefined if only losses are wanted, as are the next two
  Tensor scaled;        // bf16 [n, d]; undefined if dweight is not wanted
  Tensor scales;        // f32 [n]
  Tensor bases;         // f32 [n]
  Tensor own;           // i32 [n]
  Tensor partials;      // i64 [n, tiles of V], packed: two floats each
};
/// targets: of all tokens, of which the chunk begins with number `first`.
void target_logits_cuda(const ExponentialChunk& chunk, const Tensor& weight, const Tensor& targets,
                        int64_t first, int64_t ignored);
void exponential_product_cuda(const ExponentialChunk& chunk, const Tensor& weight);
/// dloss of rank 0 or [n], count of rank 0 or undefined.
void finish_exponentials_cuda(const ExponentialChunk& chunk, const Tensor& losses, int64_t classes,
                              const Tensor& dloss, const Tensor& count);
/// dweight (f32, rows on 16-byte boundaries) += exponentials^T scaled.
void add_weight_gradient_cuda(const Tensor& dweight, const ExponentialChunk& chunk);
/// dx (bf16) = scales * sums (f32), a number per row.
void scale_rows_cuda(const Tensor& dx, const Tensor& sums, const Tensor& scales);
/// Classes of a tile, a row of partials having one entry for each.
inline constexpr int kExponentialColumns = 192;

}  // namespace tessera::ops

#pragma once

#include "ops/embedding/embedding.h"
#include "ops/variant.h"

namespace tessera::ops {

/// All but indices, which is packed, have rows; dtable is [V, C] in sum_dtype, on CUDA also in dy's dtype
/// (sums in f32, rounded once), and is written throughout, or added to if `adds`.
/// `part`: the table's rows are some of a larger one's, and indices of the others give zeros.
struct EmbeddingPart {
  int64_t first = 0, rows = 0;  // of the larger table
};
void embedding_forward_cpu(const Tensor& y, const Tensor& table, const Tensor& indices, EmbeddingPart part);
void embedding_forward_cuda(const Tensor& y, const Tensor& table, const Tensor& indices, EmbeddingPart part);
void embedding_backward_cpu(const Tensor& dtable, const Tensor& dy, const Tensor& indices, bool adds);
void embedding_backward_cuda(const Tensor& dtable, const Tensor& dy, const Tensor& indices, bool adds);

/// How the gradient of a table is summed on a GPU: by one kernel, or by kernels after the indices are sorted,
/// with a counting sort or a radix sort.
enum class EmbeddingWay : uint8_t { one_launch, count, sort };
inline constexpr int kEmbeddingFew = 256;       // indices that every block sorts
inline constexpr int kEmbeddingCounted = 8192;  // indices that are counted
/// Their names.
std::vector<std::string> embedding_variants();
EmbeddingWay embedding_way(int64_t count, int64_t rows, const Gpu& gpu);

}  // namespace tessera::ops

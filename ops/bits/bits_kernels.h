#pragma once

#include <string>
#include <vector>

#include "ops/bits/bits.h"
#include "ops/variant.h"

namespace tessera::ops {

/// A comparison of all pairs, its operands checked: rows of words, the rows of `out` with any pitch.
struct BitPairs {
  Tensor a, b;        // i32 [M, W], [N, W]
  Tensor of_a, of_b;  // i32 [M], [N]: bits per row; undefined for the overlap
  Tensor out;         // [M, N]
  BitMeasure measure = BitMeasure::overlap;
  bool mirrored = false;  // b is a: the upper triangle is computed, both are written
};

/// What the choice of a kernel looks at.
struct BitPairsProblem {
  int64_t m = 0, n = 0, words = 0;
  bool mirrored = false;
  bool aligned = true;  // rows of both start on 16-byte boundaries, as TMA needs
};
std::string describe_problem(const BitPairsProblem& problem);
std::vector<std::string> bit_pairs_variants();
/// The variant that runs it on a GPU: an index into bit_pairs_variants().
size_t bit_pairs_choice(const BitPairsProblem& problem, const Gpu& gpu);

// The same contracts as in bits.h, results allocated. Operands have rows.
void pack_bits_cpu(const Tensor& bits, const Tensor& x);
void pack_bits_cuda(const Tensor& bits, const Tensor& x);
void unpack_bits_cpu(const Tensor& y, const Tensor& bits);
void unpack_bits_cuda(const Tensor& y, const Tensor& bits);
void transpose_bits_cpu(const Tensor& out, const Tensor& bits);
void transpose_bits_cuda(const Tensor& out, const Tensor& bits);
void count_bits_cpu(const Tensor& counts, const Tensor& bits);
void count_bits_cuda(const Tensor& counts, const Tensor& bits);
/// Adds the differences to `sum`.
void count_differences_cpu(const Tensor& sum, const Tensor& a, const Tensor& b);
void count_differences_cuda(const Tensor& sum, const Tensor& a, const Tensor& b);
void bit_pairs_cpu(const BitPairs& call);
void bit_pairs_popc(const BitPairs& call);   // CUDA
void bit_pairs_wgmma(const BitPairs& call);  // CUDA, sm_90
void nearest_bits_cpu(const NearestRows& out, const Tensor& queries, const Tensor& bits);
/// From the distances of some queries to all rows, i32 [m, N], to rows `first` ... of the result.
void nearest_of_distances_cuda(const NearestRows& out, const Tensor& distances, int64_t first);
void hamming_histogram_cpu(const Tensor& histogram, const Tensor& bits);
/// Adds the pairs i < j, i = first + row of `distances` [m, N].
void add_to_histogram_cuda(const Tensor& histogram, const Tensor& distances, int64_t first);

}  // namespace tessera::ops

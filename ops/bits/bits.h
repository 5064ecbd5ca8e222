#pragma once

#include "runtime/integers.h"
#include "tensor/tensor.h"

/// Masks as packed bits, and the similarity of their rows. A mask of R rows and C columns is i32 [R, ceil(C /
/// 32)]: bit j of word w of a row is column 32 w + j; bits past the last column must be zero. Operators on
/// packed masks do not know C, so such bits would be counted.
///
/// Every result but the Jaccard similarity is an integer, and that one is a single division of two: the CPU
/// and every GPU give the same bits. No gradient flows through any of them.

namespace tessera::ops {

/// Words per row of a mask: ceil(columns / 32).
constexpr int64_t bit_words(int64_t columns) {
  return ceil_div(columns, 32);
}

/// Where x is not zero: x floating [R, C] -> i32 [R, ceil(C / 32)]. -0 is zero, NaN is not.
Tensor pack_bits(const Tensor& x, Site site = Site::here());
/// 1 where the bit is set and 0 elsewhere: bits i32 [R, W] -> [R, columns] in a floating dtype. Throws unless
/// W = ceil(columns / 32).
Tensor unpack_bits(const Tensor& bits, int64_t columns, DType dtype = DType::f32, Site site = Site::here());
/// The mask whose rows are the columns: bits i32 [R, W] -> i32 [columns, ceil(R / 32)]. Throws unless W =
/// ceil(columns / 32).
Tensor transpose_bits(const Tensor& bits, int64_t columns, Site site = Site::here());
/// Set bits per row: i32 [R, W] -> i32 [R].
Tensor count_bits(const Tensor& bits, Site site = Site::here());
/// Bits in which two masks differ, of all rows together: i32 [R, W] and i32 [R, W] -> i64 [1].
Tensor count_differences(const Tensor& a, const Tensor& b, Site site = Site::here());

/// What two rows of bits are compared by.
///   overlap  |a and b|                       i32
///   hamming  |a xor b| = |a| + |b| - 2 |a and b|  i32
///   jaccard  |a and b| / |a or b|, 1 if both are empty  f32
enum class BitMeasure : uint8_t { overlap, hamming, jaccard };

/// All pairs of a row of a and a row of b: i32 [M, W] and i32 [N, W] -> [M, N]. If b is a itself (the same
/// memory and layout), half of the pairs is computed and written twice.
Tensor bit_pairs(const Tensor& a, const Tensor& b, BitMeasure measure = BitMeasure::overlap,
                 Site site = Site::here());

/// Rows of another mask next to each row, the nearest first; of equal distances the lowest index first.
struct NearestRows {
  Tensor indices;    // i32 [M, k]
  Tensor distances;  // i32 [M, k], Hamming
};
/// The k rows of `bits` [N, W] that are nearest to each row of `queries` [M, W] by Hamming distance, a query
/// that is a row of `bits` included. The M x N distances are not stored: scratch memory is at most 64 MiB or
/// a row of N. Throws unless 1 <= k <= N.
NearestRows nearest_bits(const Tensor& queries, const Tensor& bits, int64_t k, Site site = Site::here());

/// How often each Hamming distance occurs among the pairs i < j of rows: i32 [R, W] -> i64 [32 W + 1], where
/// entry d is the number of pairs at distance d. The distances are not stored.
Tensor hamming_histogram(const Tensor& bits, Site site = Site::here());

}  // namespace tessera::ops

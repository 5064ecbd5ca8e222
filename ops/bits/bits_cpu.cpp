#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "ops/bits/bits_kernels.h"
#include "ops/bits/bits_math.h"
#include "runtime/integers.h"
#include "runtime/parallel.h"

/// Pairs of rows are compared in tiles of kTile x kTile rows, kChunk words of 64 bits at a time: both
/// operands of a tile stay in the first-level cache (32 KiB together). A step ANDs a row with four others and
/// counts the bits of 32 bytes at once with AVX2 (0.21 ns per 64 bits on one core of an EPYC; the instruction
/// popcnt took 0.36), else with std::popcount. The counts of a tile are used at once, so that distances that
/// are only looked at are never stored. All sums are of integers: no result depends on who adds first.

namespace tessera::ops {
namespace {

constexpr int64_t kTile = 32, kChunk = 64, kVector = 4;
static_assert(kTile % 4 == 0 && kChunk % kVector == 0);

/// The rows as words of 64 bits, whole vectors and tiles of them; zero past the edges.
class WideRows {
 public:
  explicit WideRows(const Tensor& bits)
      : rows_(bits.size(0)),
        words_(ceil_div(bits.size(1), 2 * kVector) * kVector),
        data_(size_t(round_up(rows_, kTile) * words_)) {
    const auto* const from = bits.data<int32_t>();
    const int64_t stride = bits.row_stride(), bytes = bits.size(1) * 4;
    parallel_for(rows_, std::max<int64_t>(1, 16384 / std::max<int64_t>(words_, 1)),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t row = begin; row < end; ++row)
                     std::memcpy(data_.data() + row * words_, from + row * stride, size_t(bytes));
                 });
  }
  int64_t rows() const { return rows_; }
  int64_t words() const { return words_; }
  int64_t tiles() const { return ceil_div(rows_, kTile); }
  const uint64_t* row(int64_t index) const { return data_.data() + index * words_; }

 private:
  int64_t rows_, words_;
  std::vector<uint64_t> data_;
};

struct Tile {
  uint32_t both[kTile][kTile];
};

#ifdef __AVX2__

/// Set bits of each byte, by a table of the 16 values of half a byte (Mula, Kurz, Lemire, "Faster population
/// counts using AVX2 instructions", The Computer Journal 61, 2018, section 2).
inline __m256i bits_of_bytes(__m256i bytes) {
  const __m256i table = _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4, 0, 1, 1, 2, 1, 2, 2,
                                         3, 1, 2, 2, 3, 2, 3, 3, 4);
  const __m256i low = _mm256_set1_epi8(15);
  return _mm256_add_epi8(_mm256_shuffle_epi8(table, _mm256_and_si256(bytes, low)),
                         _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low)));
}
inline uint32_t sum_of_bytes(__m256i bytes) {
  const __m256i quads = _mm256_sad_epu8(bytes, _mm256_setzero_si256());
  const __m128i pairs = _mm_add_epi64(_mm256_castsi256_si128(quads), _mm256_extracti128_si256(quads, 1));
  return uint32_t(_mm_cvtsi128_si64(pairs) + _mm_extract_epi64(pairs, 1));
}
static_assert(kChunk / kVector * 8 <= 255, "a byte holds the counts of a chunk");

/// Adds the common bits of a row and four rows in `words` words, a multiple of kVector.
inline void add_overlaps(uint32_t* both, const uint64_t* a, const uint64_t* b, int64_t stride,
                         int64_t words) {
  __m256i sums[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(),
                     _mm256_setzero_si256()};
  const auto load = [](const uint64_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  };
  for (int64_t w = 0; w < words; w += kVector) {
    const __m256i of_a = load(a + w);
    for (int64_t n = 0; n < 4; ++n)
      sums[n] = _mm256_add_epi8(sums[n], bits_of_bytes(_mm256_and_si256(of_a, load(b + n * stride + w))));
  }
  for (int64_t n = 0; n < 4; ++n) both[n] += sum_of_bytes(sums[n]);
}

#else

inline void add_overlaps(uint32_t* both, const uint64_t* a, const uint64_t* b, int64_t stride,
                         int64_t words) {
  uint64_t sums[4] = {};
  for (int64_t w = 0; w < words; ++w)
    for (int64_t n = 0; n < 4; ++n) sums[n] += uint64_t(std::popcount(a[w] & b[n * stride + w]));
  for (int64_t n = 0; n < 4; ++n) both[n] += uint32_t(sums[n]);
}

#endif

void compare_tile(Tile& tile, const WideRows& a, int64_t row, const WideRows& b, int64_t column) {
  std::memset(&tile, 0, sizeof tile);
  for (int64_t first = 0; first < a.words(); first += kChunk) {
    const int64_t words = std::min(kChunk, a.words() - first);
    for (int64_t i = 0; i < kTile; ++i)
      for (int64_t j = 0; j < kTile; j += 4)
        add_overlaps(&tile.both[i][j], a.row(row + i) + first, b.row(column + j) + first, a.words(), words);
  }
}

/// Rows of tiles that one block of a parallel loop takes: some 20 us of work.
int64_t tile_rows_of_block(int64_t tiles, int64_t words) {
  return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, tiles * kTile * words));
}

uint32_t bits_of_row(const WideRows& rows, int64_t index) {
  uint64_t sum = 0;
  for (int64_t w = 0; w < rows.words(); ++w) sum += uint64_t(std::popcount(rows.row(index)[w]));
  return uint32_t(sum);
}
std::vector<uint32_t> bits_of_rows(const WideRows& rows) {
  std::vector<uint32_t> counts(size_t(rows.tiles() * kTile));
  for (int64_t row = 0; row < rows.rows(); ++row) counts[size_t(row)] = bits_of_row(rows, row);
  return counts;
}

}  // namespace

void pack_bits_cpu(const Tensor& bits, const Tensor& x) {
  const int64_t rows = x.size(0), columns = x.size(1), words = bits.size(1);
  const int64_t down = x.layout().stride(0), along = x.layout().stride(1);
  auto* const out = bits.data<int32_t>();
  dispatch_floating(x.dtype(), "pack_bits", [&]<class T>() {
    const T* const from = x.data<T>();
    parallel_for(rows, std::max<int64_t>(1, 8192 / columns), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        for (int64_t w = 0; w < words; ++w) {
          uint32_t word = 0;
          const int64_t count = std::min<int64_t>(32, columns - 32 * w);
          for (int64_t j = 0; j < count; ++j)
            word |= uint32_t(Compute<T>(from[row * down + (32 * w + j) * along]) != Compute<T>(0)) << j;
          out[row * bits.row_stride() + w] = std::bit_cast<int32_t>(word);
        }
    });
  });
}

void unpack_bits_cpu(const Tensor& y, const Tensor& bits) {
  const int64_t columns = y.size(1);
  const auto* const from = bits.data<int32_t>();
  dispatch_floating(y.dtype(), "unpack_bits", [&]<class T>() {
    T* const to = y.data<T>();
    parallel_for(y.size(0), std::max<int64_t>(1, 8192 / columns), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        for (int64_t column = 0; column < columns; ++column) {
          const uint32_t word = uint32_t(from[row * bits.row_stride() + column / 32]);
          to[row * y.row_stride() + column] = T(Compute<T>(word >> column % 32 & 1));
        }
    });
  });
}

void transpose_bits_cpu(const Tensor& out, const Tensor& bits) {
  const auto* const from = bits.data<int32_t>();
  auto* const to = out.data<int32_t>();
  const int64_t rows = bits.size(0), from_stride = bits.row_stride(), to_stride = out.row_stride();
  parallel_for(bits.size(1), std::max<int64_t>(1, 2048 / rows), [&](int64_t begin, int64_t end) {
    for (int64_t w = begin; w < end; ++w)
      for (int64_t group = 0; group < out.size(1); ++group) {
        uint32_t columns[32] = {};
        for (int64_t j = 0; j < std::min<int64_t>(32, rows - 32 * group); ++j) {
          const uint32_t word = uint32_t(from[(32 * group + j) * from_stride + w]);
          for (int64_t column = 0; column < 32; ++column) columns[column] |= (word >> column & 1) << j;
        }
        for (int64_t column = 32 * w; column < std::min<int64_t>(32 * w + 32, out.size(0)); ++column)
          to[column * to_stride + group] = std::bit_cast<int32_t>(columns[column % 32]);
      }
  });
}

void count_bits_cpu(const Tensor& counts, const Tensor& bits) {
  const auto* const from = bits.data<int32_t>();
  auto* const to = counts.data<int32_t>();
  parallel_for(bits.size(0), std::max<int64_t>(1, 8192 / bits.size(1)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      int sum = 0;
      for (int64_t w = 0; w < bits.size(1); ++w)
        sum += std::popcount(uint32_t(from[row * bits.row_stride() + w]));
      to[row] = sum;
    }
  });
}

void count_differences_cpu(const Tensor& sum, const Tensor& a, const Tensor& b) {
  const auto *const from_a = a.data<int32_t>(), *const from_b = b.data<int32_t>();
  std::mutex adding;
  parallel_for(a.size(0), std::max<int64_t>(1, 8192 / a.size(1)), [&](int64_t begin, int64_t end) {
    int64_t differ = 0;
    for (int64_t row = begin; row < end; ++row)
      for (int64_t w = 0; w < a.size(1); ++w)
        differ +=
            std::popcount(uint32_t(from_a[row * a.row_stride() + w] ^ from_b[row * b.row_stride() + w]));
    const std::scoped_lock lock(adding);
    *sum.data<int64_t>() += differ;
  });
}

void bit_pairs_cpu(const BitPairs& call) {
  const WideRows a(call.a);
  const std::unique_ptr<const WideRows> other = call.mirrored ? nullptr : std::make_unique<WideRows>(call.b);
  const WideRows& b = other ? *other : a;
  const bool counted = call.measure != BitMeasure::overlap;
  const std::vector<uint32_t> of_a = counted ? bits_of_rows(a) : std::vector<uint32_t>(),
                              of_b = counted ? bits_of_rows(b) : std::vector<uint32_t>();
  auto* const out = static_cast<uint32_t*>(call.out.raw());
  const int64_t stride = call.out.row_stride();
  parallel_for(a.tiles(), tile_rows_of_block(b.tiles(), a.words()), [&](int64_t begin, int64_t end) {
    Tile tile;
    for (int64_t m = begin * kTile; m < end * kTile; m += kTile)
      for (int64_t n = call.mirrored ? m : 0; n < b.rows(); n += kTile) {
        compare_tile(tile, a, m, b, n);
        const int64_t rows = std::min(kTile, a.rows() - m), columns = std::min(kTile, b.rows() - n);
        for (int64_t i = 0; i < rows; ++i)
          for (int64_t j = 0; j < columns; ++j) {
            if (counted)
              tile.both[i][j] =
                  pair_value(call.measure, of_a[size_t(m + i)], of_b[size_t(n + j)], tile.both[i][j]);
            out[(m + i) * stride + n + j] = tile.both[i][j];
          }
        if (!call.mirrored || m == n) continue;
        for (int64_t j = 0; j < columns; ++j)
          for (int64_t i = 0; i < rows; ++i) out[(n + j) * stride + m + i] = tile.both[i][j];
      }
  });
}

void nearest_bits_cpu(const NearestRows& out, const Tensor& queries, const Tensor& bits) {
  const WideRows a(queries), b(bits);
  const std::vector<uint32_t> of_a = bits_of_rows(a), of_b = bits_of_rows(b);
  const auto k = size_t(out.indices.size(1));
  auto* const indices = out.indices.data<int32_t>();
  auto* const distances = out.distances.data<int32_t>();
  parallel_for(a.tiles(), 1, [&](int64_t begin, int64_t end) {
    Tile tile;
    for (int64_t m = begin * kTile; m < end * kTile; m += kTile) {
      const int64_t rows = std::min(kTile, a.rows() - m);
      std::vector<uint64_t> nearest[kTile];  // heaps of up to k, the farthest first
      for (int64_t n = 0; n < b.rows(); n += kTile) {
        compare_tile(tile, a, m, b, n);
        for (int64_t i = 0; i < rows; ++i)
          for (int64_t j = 0; j < std::min(kTile, b.rows() - n); ++j) {
            const uint64_t key = nearness(
                pair_value(BitMeasure::hamming, of_a[size_t(m + i)], of_b[size_t(n + j)], tile.both[i][j]),
                uint32_t(n + j));
            std::vector<uint64_t>& heap = nearest[i];
            if (heap.size() == k) {
              if (key >= heap.front()) continue;
              std::pop_heap(heap.begin(), heap.end());
              heap.back() = key;
            } else {
              heap.push_back(key);
            }
            std::push_heap(heap.begin(), heap.end());
          }
      }
      for (int64_t i = 0; i < rows; ++i) {
        std::sort_heap(nearest[i].begin(), nearest[i].end());
        for (size_t n = 0; n < k; ++n) {
          indices[size_t(m + i) * k + n] = int32_t(uint32_t(nearest[i][n]));
          distances[size_t(m + i) * k + n] = int32_t(nearest[i][n] >> 32);
        }
      }
    }
  });
}

void hamming_histogram_cpu(const Tensor& histogram, const Tensor& bits) {
  const WideRows rows(bits);
  const std::vector<uint32_t> counts = bits_of_rows(rows);
  auto* const out = histogram.data<int64_t>();
  std::mutex adding;
  parallel_for(rows.tiles(), tile_rows_of_block(rows.tiles(), rows.words()), [&](int64_t begin, int64_t end) {
    Tile tile;
    std::vector<int64_t> found(size_t(histogram.count()));
    for (int64_t m = begin * kTile; m < end * kTile; m += kTile)
      for (int64_t n = m; n < rows.rows(); n += kTile) {
        compare_tile(tile, rows, m, rows, n);
        for (int64_t i = 0; i < std::min(kTile, rows.rows() - m); ++i)
          for (int64_t j = m == n ? i + 1 : 0; j < std::min(kTile, rows.rows() - n); ++j)
            ++found[pair_value(BitMeasure::hamming, counts[size_t(m + i)], counts[size_t(n + j)],
                               tile.both[i][j])];
      }
    const std::scoped_lock lock(adding);
    for (size_t d = 0; d < found.size(); ++d) out[d] += found[d];
  });
}

}  // namespace tessera::ops

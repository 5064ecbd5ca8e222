#include "ops/bits/bits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/bits/bits_kernels.h"
#include "ops/variant.h"
#include "runtime/parallel.h"
#include "runtime/rng.h"
#include "tests/errors.h"
#include "tests/ops/guarded.h"

namespace tessera::ops {
namespace {

using Words = std::vector<int32_t>;
using Numbers = std::vector<int64_t>;

/// Rows of random words, of which every eighth row repeats the row before.
Tensor random_bits(int64_t rows, int64_t words, uint64_t seed) {
  Words values(size_t(rows * words));
  for (size_t i = 0; i < values.size(); ++i) {
    const bool repeats = int64_t(i) / words % 8 == 7;
    values[i] = repeats ? values[i - size_t(words)] : int32_t(philox(seed, 0, i).word[0]);
  }
  return Tensor::from(values, {rows, words});
}

/// Common bits of row i of a and row j of b, bit by bit.
int64_t common(const Tensor& a, int64_t i, const Tensor& b, int64_t j) {
  const Words x = a.to_vector<int32_t>(), y = b.to_vector<int32_t>();
  const auto words = size_t(a.size(1));
  int64_t sum = 0;
  for (size_t w = 0; w < words; ++w)
    for (int bit = 0; bit < 32; ++bit)
      sum +=
          (uint32_t(x[size_t(i) * words + w]) >> bit & 1) & (uint32_t(y[size_t(j) * words + w]) >> bit & 1);
  return sum;
}
int64_t distance(const Tensor& a, int64_t i, const Tensor& b, int64_t j) {
  return common(a, i, a, i) + common(b, j, b, j) - 2 * common(a, i, b, j);
}

class Threads {
 public:
  explicit Threads(int count) : before_(cpu_threads()) { set_cpu_threads(count); }
  ~Threads() { set_cpu_threads(before_); }

 private:
  int before_;
};

// ---- packing ----

TEST(Bits, BitJOfWordWIsColumn32WPlusJ) {
  for (const int64_t columns : {1, 31, 32, 33, 64, 70}) {
    std::vector<float> values(size_t(2 * columns));
    values[0] = 2;                              // row 0, column 0
    values[size_t(2 * columns - 1)] = -1e-40f;  // row 1, last column: subnormal
    const Tensor bits = pack_bits(Tensor::from(values, {2, columns}));
    ASSERT_EQ(bits.shape(), (Shape{2, bit_words(columns)}));
    Words expected(size_t(2 * bit_words(columns)));
    expected[0] |= 1;
    expected.back() |= int32_t(1u << (columns - 1) % 32);
    EXPECT_EQ(bits.to_vector<int32_t>(), expected) << columns;
  }
}

TEST(Bits, NegativeZeroIsZeroAndNanIsNot) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = INFINITY;
  const Tensor x = Tensor::from(std::vector<float>{0, -0.0f, nan, -nan, inf, -inf, 1e-7f, -1e-7f}, {1, 8});
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16})
    EXPECT_EQ(pack_bits(x.to(dtype)).item<int32_t>(), 0b11111100) << dtype;
}

TEST(Bits, PackingRoundsTripsAndTransposes) {
  const int64_t rows = 45, columns = 77;
  std::vector<float> values;
  for (int64_t i = 0; i < rows * columns; ++i) values.push_back(float(philox(3, 0, uint64_t(i)).word[0] & 1));
  const Tensor x = Tensor::from(values, {rows, columns}), bits = pack_bits(x);
  EXPECT_EQ(unpack_bits(bits, columns).to_vector<float>(), values);
  const Tensor across = transpose_bits(bits, columns);
  EXPECT_EQ(across.to_vector<int32_t>(), pack_bits(x.transpose(0, 1)).to_vector<int32_t>());
  EXPECT_EQ(transpose_bits(across, rows).to_vector<int32_t>(), bits.to_vector<int32_t>());
}

// ---- pairs ----

TEST(Bits, AllPairsAgreeWithCountingBitByBit) {
  const Tensor a = random_bits(37, 5, 1), b = random_bits(50, 5, 2);
  for (const bool itself : {false, true}) {
    const Tensor& other = itself ? a : b;
    const auto both = bit_pairs(a, other).to_vector<int32_t>();
    const auto hamming = bit_pairs(a, other, BitMeasure::hamming).to_vector<int32_t>();
    const auto jaccard = bit_pairs(a, other, BitMeasure::jaccard).to_vector<float>();
    for (int64_t i = 0; i < a.size(0); ++i)
      for (int64_t j = 0; j < other.size(0); ++j) {
        const auto at = size_t(i * other.size(0) + j);
        const int64_t shared = common(a, i, other, j), apart = distance(a, i, other, j);
        ASSERT_EQ(both[at], shared) << i << " " << j;
        ASSERT_EQ(hamming[at], apart) << i << " " << j;
        ASSERT_EQ(jaccard[at], float(shared) / float(shared + apart)) << i << " " << j;
      }
  }
}

TEST(Bits, EmptyRowsAreEqual) {
  const Tensor bits = Tensor::from(Words{0, 0, 0, 0, 5, 0}, {3, 2});
  EXPECT_EQ(bit_pairs(bits, bits, BitMeasure::jaccard).to_vector<float>(),
            (std::vector<float>{1, 1, 0, 1, 1, 0, 0, 0, 1}));
  EXPECT_EQ(bit_pairs(bits, bits, BitMeasure::hamming).to_vector<int32_t>(),
            (Words{0, 0, 2, 0, 0, 2, 2, 2, 0}));
}

TEST(Bits, RowsLongerThanABlockOfTheCacheAreAddedUp) {
  const Tensor bits = random_bits(34, 300, 5);
  const auto both = bit_pairs(bits, bits).to_vector<int32_t>();
  EXPECT_EQ(both[33], common(bits, 0, bits, 33));
  EXPECT_EQ(both[34 * 33], common(bits, 0, bits, 33));
  EXPECT_EQ(both[34 * 7 + 6], both[34 * 6 + 6]);  // row 7 repeats row 6
}

TEST(Bits, TwoPartsOfOneMaskAreNotTheSameRows) {
  const Tensor bits = random_bits(12, 4, 13), first = bits.slice(0, 0, 6), second = bits.slice(0, 6, 12);
  const auto both = bit_pairs(first, second).to_vector<int32_t>();
  for (int64_t i = 0; i < 6; ++i)
    for (int64_t j = 0; j < 6; ++j) EXPECT_EQ(both[size_t(6 * i + j)], common(first, i, second, j));
}

TEST(Bits, NearestRowsAreSortedByDistanceThenIndex) {
  const Tensor queries = random_bits(40, 3, 7), bits = random_bits(90, 3, 8);
  for (const int64_t k : {1, 5, 90}) {
    const NearestRows found = nearest_bits(queries, bits, k);
    const auto indices = found.indices.to_vector<int32_t>(), distances = found.distances.to_vector<int32_t>();
    for (int64_t i = 0; i < 40; ++i) {
      std::vector<std::pair<int64_t, int64_t>> all;
      for (int64_t j = 0; j < 90; ++j) all.emplace_back(distance(queries, i, bits, j), j);
      std::sort(all.begin(), all.end());
      for (int64_t n = 0; n < k; ++n) {
        ASSERT_EQ(distances[size_t(i * k + n)], all[size_t(n)].first) << i << " " << n;
        ASSERT_EQ(indices[size_t(i * k + n)], all[size_t(n)].second) << i << " " << n;
      }
    }
  }
}

TEST(Bits, TheHistogramCountsEachPairOnce) {
  const Tensor bits = random_bits(70, 2, 9);
  Numbers expected(65);
  for (int64_t i = 0; i < 70; ++i)
    for (int64_t j = i + 1; j < 70; ++j) ++expected[size_t(distance(bits, i, bits, j))];
  EXPECT_EQ(hamming_histogram(bits).to_vector<int64_t>(), expected);
}

TEST(Bits, DifferencesAreTheHammingDistancesOfTheSameRows) {
  const Tensor a = random_bits(12, 40, 12), b = random_bits(12, 40, 13);
  int64_t sum = 0;
  for (int64_t i = 0; i < 12; ++i) sum += distance(a, i, b, i);
  EXPECT_EQ(count_differences(a, b).to_vector<int64_t>(), Numbers{sum});
  EXPECT_EQ(count_differences(a, a).to_vector<int64_t>(), Numbers{0});
  EXPECT_EQ(count_differences(a.slice(0, 3, 3), b.slice(0, 3, 3)).to_vector<int64_t>(), Numbers{0});
}

TEST(Bits, ResultsDoNotDependOnTheNumberOfThreads) {
  const Tensor bits = random_bits(200, 9, 11);
  const auto run = [&](int threads) {
    const Threads scope(threads);
    const NearestRows found = nearest_bits(bits, bits, 6);
    return std::tuple{bit_pairs(bits, bits, BitMeasure::jaccard).to_vector<float>(),
                      found.indices.to_vector<int32_t>(), hamming_histogram(bits).to_vector<int64_t>()};
  };
  EXPECT_EQ(run(1), run(3));
}

// ---- errors ----

TEST(Bits, ErrorsSayWhatToDo) {
  const Tensor bits = random_bits(4, 3, 1), floats = Tensor::zeros({4, 3}, DType::f32, Device::cpu());
  expect_error([&] { pack_bits(Tensor()); }, {"pack_bits: x is undefined"});
  expect_error([&] { pack_bits(bits); }, {"x is i32[4, 3]", "expected f64, f32, bf16 or f16 of rank 2"});
  expect_error([&] { pack_bits(Tensor::zeros({3}, DType::f32, Device::cpu())); }, {"of rank 2"});
  expect_error([&] { count_bits(floats); }, {"bits is f32[4, 3]", "ops::pack_bits makes them"});
  expect_error([&] { unpack_bits(bits, 97); }, {"for 97 columns", "expected 4 words per row"});
  expect_error([&] { unpack_bits(bits, -1); }, {"unpack_bits: columns is -1; expected 0 or more"});
  expect_error([&] { unpack_bits(bits, 96, DType::i32); }, {"dtype i32"});
  expect_error([&] { transpose_bits(bits, 64); }, {"for 64 columns", "expected 2 words per row"});
  expect_error([&] { bit_pairs(bits, random_bits(4, 2, 1)); }, {"as many words per row"});
  expect_error([&] { count_differences(bits, random_bits(4, 2, 1)); }, {"as many words per row"});
  expect_error([&] { count_differences(bits, random_bits(5, 3, 1)); }, {"b is i32[5, 3]", "as many rows"});
  expect_error([&] { nearest_bits(bits, bits, 0); }, {"k = 0 of 4 rows", "1 to 4"});
  expect_error([&] { nearest_bits(bits, bits, 5); }, {"k = 5 of 4 rows"});
  expect_error([&] { nearest_bits(bits, random_bits(0, 3, 1), 1); },
               {"nearest_bits: bits is i32[0, 3]", "expected at least one row"});
  expect_parts(report_of([&] { count_bits(floats); }), {"; called at ", __FILE__});
}

// ---- the choice of a kernel ----

TEST(Bits, TheChoicePrefersWgmmaWhereItCanRun) {
  const DeviceInfo hopper{.name = "NVIDIA H200", .major = 9}, ampere{.name = "NVIDIA A100", .major = 8};
  const Gpu h200(hopper, 132), a100(ampere, 108);
  const BitPairsProblem large{.m = 11008, .n = 11008, .words = 128, .mirrored = true};
  const auto variants = bit_pairs_variants();
  EXPECT_EQ(variants[bit_pairs_choice(large, h200)], "wgmma");
  EXPECT_EQ(variants[bit_pairs_choice(large, a100)], "popc");
  BitPairsProblem crooked = large;
  crooked.aligned = false;
  EXPECT_EQ(variants[bit_pairs_choice(crooked, h200)], "popc");
  const ForceVariant scope("bit_pairs", "wgmma");
  expect_error([&] { bit_pairs_choice(crooked, h200); }, {"variant wgmma needs rows that start on 16-byte"});
}

TEST(Bits, TheEstimatesAreOfWholeTilesOnTheSmsThatHaveOne) {
  const DeviceInfo hopper{.name = "NVIDIA H200", .major = 9};
  const Gpu h200(hopper, 132);
  const auto chosen = [&](const BitPairsProblem& problem) {
    return bit_pairs_variants()[bit_pairs_choice(problem, h200)];
  };
  EXPECT_EQ(chosen({.m = 1, .n = 1'000'000, .words = 128}), "wgmma");  // 63 of popc's 64 rows are padding
  EXPECT_EQ(chosen({.m = 1, .n = 1, .words = 1 << 22}), "wgmma");      // one block of popc
  EXPECT_EQ(chosen({.m = 64, .n = 64, .words = 3}), "popc");           // TMA takes rows of 16 bytes
}

// ---- on a GPU ----

class BitsCuda : public GuardedCuda<0> {};

TEST_F(BitsCuda, EqualsTheCpu) {
  for (const auto& [m, words] : {std::pair<int64_t, int64_t>{700, 128}, {1000, 344}, {257, 5}}) {
    const Tensor a = random_bits(m, words, 3), b = random_bits(m + 100, words, 4);
    const Tensor a_there = a.to(gpu()), b_there = b.to(gpu());
    for (const BitMeasure measure : {BitMeasure::overlap, BitMeasure::hamming})
      for (const std::string& variant : bit_pairs_variants()) {
        if (variant == "wgmma" && gpu().info().major != 9) continue;
        const ForceVariant scope("bit_pairs", variant);
        EXPECT_EQ(bit_pairs(a_there, b_there, measure).to_vector<int32_t>(),
                  bit_pairs(a, b, measure).to_vector<int32_t>());
        EXPECT_EQ(bit_pairs(a_there, a_there, measure).to_vector<int32_t>(),
                  bit_pairs(a, a, measure).to_vector<int32_t>());
      }
    const NearestRows here = nearest_bits(a, b, 9), there = nearest_bits(a_there, b_there, 9);
    EXPECT_EQ(there.indices.to_vector<int32_t>(), here.indices.to_vector<int32_t>());
    EXPECT_EQ(there.distances.to_vector<int32_t>(), here.distances.to_vector<int32_t>());
    EXPECT_EQ(hamming_histogram(a_there).to_vector<int64_t>(), hamming_histogram(a).to_vector<int64_t>());
  }
}

TEST_F(BitsCuda, PopcTakesMoreTilesOfRowsThanAGridHasBlocksAlongY) {
  const Tensor a = random_bits(64 * 65535 + 1, 1, 5), b = random_bits(1, 1, 6);
  const ForceVariant scope("bit_pairs", "popc");
  EXPECT_EQ(bit_pairs(a.to(gpu()), b.to(gpu())).to_vector<int32_t>(), bit_pairs(a, b).to_vector<int32_t>());
}

}  // namespace
}  // namespace tessera::ops

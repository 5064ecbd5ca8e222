#include "ops/sparse24/packed24_math.h"

#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <vector>

#include "ops/linear/activation_of_result.h"
#include "ops/mlp/hidden_gradient24.h"
#include "ops/random/random.h"
#include "ops/sparse24/sparse24.h"
#include "ops/sparse24/sparse24_math.h"
#include "runtime/philox.h"

/// What the packed kernels compute, lane by lane: the functions of packed24_math.h between emulated shuffles
/// and ldmatrix, compared with the scalar selection and with the layout.

namespace tessera::ops {
namespace {

using namespace sparse24;

bf16 element(uint32_t bits) {
  bf16 x;
  x.bits = uint16_t(bits);
  return x;
}
uint32_t word(bf16 low, bf16 high) {
  return uint32_t(low.bits) | uint32_t(high.bits) << 16;
}

/// Magnitudes that tie often and the extremes: zeros, subnormals, infinity, NaN; both signs.
constexpr uint16_t kMagnitudes[] = {0, 1, 0x3F80, 0x3F81, 0x7F80, 0x7FFF};

void expect_like_scalar(const bf16 (&low)[4], const bf16 (&high)[4]) {
  const TwoGroups groups = TwoGroups::of(word(low[0], low[1]), word(low[2], low[3]), word(high[0], high[1]),
                                         word(high[2], high[3]));
  const TwoChoices choices = choose_largest(groups);
  const TwoPairs pairs = choices.of(groups);
  const Positions of_low = two_largest(low), of_high = two_largest(high);
  ASSERT_EQ(choices.nibbles(), of_low.nibble() | of_high.nibble() << 16);
  ASSERT_EQ(pairs.low, word(low[of_low.first], low[of_low.second]));
  ASSERT_EQ(pairs.high, word(high[of_high.first], high[of_high.second]));
}

TEST(Sparse24Packed, TwoGroupsChooseAsEachAlone) {
  constexpr int kCount = 2 * int(std::size(kMagnitudes));
  const auto group = [](int code, bf16(&x)[4]) {
    for (bf16& one : x) {
      one = element(kMagnitudes[size_t(code % kCount / 2)] | uint32_t(code % 2) << 15);
      code /= kCount;
    }
  };
  const int all = kCount * kCount * kCount * kCount;
  for (int code = 0; code < all; ++code) {
    bf16 low[4], high[4];
    group(code, low);
    group(int(int64_t(code) * 7919 % all), high);  // another group in the other half each time
    ASSERT_NO_FATAL_FAILURE(expect_like_scalar(low, high)) << code;
  }
  for (uint64_t i = 0; i < 20000; ++i) {
    const Uint4 words = philox(3, 0, i);
    bf16 low[4], high[4];
    for (int e = 0; e < 4; ++e) low[e] = element(words.word[e]), high[e] = element(words.word[e] >> 16);
    ASSERT_NO_FATAL_FAILURE(expect_like_scalar(low, high)) << i;
  }
}

TEST(Sparse24Packed, PairsAreGatheredAndScatteredByTheirPositions) {
  const std::array<bf16, 4> x = {element(0x1122), element(0x3344), element(0x5566), element(0x7788)};
  const std::array<bf16, 4> rest = {element(0x0A0B), element(0x0C0D), element(0x0E0F), element(0x1A1B)};
  for (int first = 0; first < 3; ++first)
    for (int second = first + 1; second < 4; ++second) {
      // Bits above the nibble belong to other groups.
      const uint32_t nibble = Positions{first, second}.nibble() | 0xABCD70u;
      const uint32_t pair = gather_pair(word(x[0], x[1]), word(x[2], x[3]), nibble);
      EXPECT_EQ(pair, word(x[size_t(first)], x[size_t(second)]));
      const GroupWords made = scatter_pair(pair, nibble, {word(rest[0], rest[1]), word(rest[2], rest[3])});
      std::array<bf16, 4> expected = rest;
      expected[size_t(first)] = x[size_t(first)], expected[size_t(second)] = x[size_t(second)];
      EXPECT_EQ(made.x01, word(expected[0], expected[1]));
      EXPECT_EQ(made.x23, word(expected[2], expected[3]));
    }
}

/// shfl.xor of a quad's words.
std::array<uint32_t, 4> exchanged(const std::array<uint32_t, 4>& words, int distance) {
  std::array<uint32_t, 4> received;
  for (int c = 0; c < 4; ++c) received[size_t(c)] = words[size_t(c ^ distance)];
  return received;
}
std::array<uint32_t, 4> transposed_words(std::array<uint32_t, 4> words) {
  for (int exchange = 0; exchange < 2; ++exchange) {
    const auto received = exchanged(words, 1 << exchange);
    for (int c = 0; c < 4; ++c)
      words[size_t(c)] = exchanged_nibbles(words[size_t(c)], received[size_t(c)], c, exchange);
  }
  return words;
}

TEST(Sparse24Packed, TwoExchangesTransposeTheNibblesOfAQuad) {
  const std::array<uint32_t, 4> words = {0x89AB0123u, 0xCDEF4567u, 0x7654FEDCu, 0x3210BA98u};
  const std::array<uint32_t, 4> result = transposed_words(words);
  for (int lane = 0; lane < 4; ++lane)
    for (int half = 0; half < 2; ++half)
      for (int i = 0; i < 4; ++i)
        EXPECT_EQ(result[size_t(lane)] >> (16 * half + 4 * i) & 0xF,
                  words[size_t(i)] >> (16 * half + 4 * lane) & 0xF);
  EXPECT_EQ(transposed_words(result), words);
}

/// A matrix [64, 64] of 16-bit elements and its tile as compress24 makes it.
struct Tile {
  Tensor x;
  std::vector<uint16_t> values;
  std::vector<int32_t> metadata;
  explicit Tile(Along24 along) : x(Tensor::empty_packed({64, 64}, DType::bf16, Device::cpu())) {
    Rng rng(11);
    fill_normal(x, 0, 1, rng);
    const Sparse24 made = compress24(x, along);
    const bf16* const from = made.values.data<bf16>();
    for (int64_t i = 0; i < kTileValues; ++i) values.push_back(from[i].bits);
    metadata = made.metadata.to_vector<int32_t>();
  }
  bf16 at(int row, int column) const { return x.data<bf16>()[row * x.layout().stride(0) + column]; }
};

/// What a warpgroup has selected: per thread 16 bytes of values per step, and its word of metadata.
struct Stored {
  std::vector<uint32_t> values = std::vector<uint32_t>(2 * 128 * 4);
  std::vector<int32_t> metadata = std::vector<int32_t>(128);

  void expect(const Tile& tile) const {
    for (size_t i = 0; i < values.size(); ++i)
      ASSERT_EQ(values[i], uint32_t(tile.values[2 * i]) | uint32_t(tile.values[2 * i + 1]) << 16) << i;
    ASSERT_EQ(metadata, tile.metadata);
  }
};

/// The tokens of a tile as compress24_packed.cu reads them: ldmatrix.x4.trans of rows that tokens_row()
/// names.
TEST(Sparse24Packed, TransposedMatricesHoldFourTokensPerLane) {
  const Tile tile(Along24::tokens);
  Stored stored;
  for (int warp = 0; warp < 4; ++warp) {
    std::array<uint32_t, 32> nibbles{};
    for (int number = 0; number < 4; ++number)  // 2 step + half
      for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, c = lane % 4;
        // Register i is elements 2c and 2c + 1 of column g of matrix i, whose row r is what lane 8 i + r
        // names.
        uint32_t words[4];
        for (int i = 0; i < 4; ++i) {
          bf16 two[2];
          for (int which = 0; which < 2; ++which) {
            const int namer = 8 * i + 2 * c + which;
            two[which] = tile.at(tokens_row(namer, number), 16 * warp + tokens_column(namer) + g);
          }
          words[i] = word(two[0], two[1]);
        }
        const TwoGroups groups = TwoGroups::of(words[0], words[1], words[2], words[3]);
        const TwoChoices choices = choose_largest(groups);
        const TwoPairs pairs = choices.of(groups);
        const int thread = warp * 32 + lane;
        const size_t at = size_t((number / 2 * 128 + thread) * 4 + number % 2 * 2);
        stored.values[at] = pairs.low, stored.values[at + 1] = pairs.high;
        nibbles[size_t(lane)] |= choices.nibbles() << 4 * number;
      }
    for (int quad = 0; quad < 8; ++quad) {
      std::array<uint32_t, 4> own;
      std::copy_n(nibbles.begin() + quad * 4, 4, own.begin());
      const auto words = transposed_words(own);
      for (int c = 0; c < 4; ++c)
        stored.metadata[size_t(warp * 32 + quad * 4 + c)] = int32_t(words[size_t(c)]);
    }
  }
  stored.expect(tile);
}

/// The sums of a warpgroup's 64 x 64 tile, from the order of wgmma's accumulators to fragments.
TEST(Sparse24Packed, AccumulatorsBecomeFragmentsByExchangesInTheQuad) {
  const Tile tile(Along24::features);
  Stored stored;
  for (int warp = 0; warp < 4; ++warp)
    for (int g = 0; g < 8; ++g) {
      std::array<uint32_t, 4> nibbles{};
      for (int number = 0; number < 4; ++number) {
        // pairs[down][block][c]: what lane c holds of row g + 8 down.
        std::array<uint32_t, 4> pairs[2][2];
        for (int down = 0; down < 2; ++down)
          for (int block = 0; block < 2; ++block)
            for (int c = 0; c < 4; ++c) {
              const int row = 16 * warp + g + 8 * down, column = (2 * number + block) * 8 + 2 * c;
              pairs[down][block][size_t(c)] = word(tile.at(row, column), tile.at(row, column + 1));
            }
        GroupWords groups[2][4];
        for (int down = 0; down < 2; ++down) {
          std::array<uint32_t, 4> sent;
          for (int c = 0; c < 4; ++c)
            sent[size_t(c)] = sent_pair(pairs[down][0][size_t(c)], pairs[down][1][size_t(c)], c);
          const auto received = exchanged(sent, 1);
          for (int c = 0; c < 4; ++c)
            groups[down][c] =
                group_of_pairs(pairs[down][0][size_t(c)], pairs[down][1][size_t(c)], received[size_t(c)], c);
        }
        std::array<TwoPairs, 4> chosen;
        for (int c = 0; c < 4; ++c) {
          const TwoGroups two =
              TwoGroups::of(groups[0][c].x01, groups[0][c].x23, groups[1][c].x01, groups[1][c].x23);
          const TwoChoices choices = choose_largest(two);
          chosen[size_t(c)] = choices.of(two);
          nibbles[size_t(c)] |= choices.nibbles() << 4 * number;
        }
        for (int c = 0; c < 4; ++c) {
          const TwoPairs& from = chosen[size_t(group_of_lane(c))];
          const size_t at = size_t((number / 2 * 128 + warp * 32 + g * 4 + c) * 4 + number % 2 * 2);
          stored.values[at] = from.low, stored.values[at + 1] = from.high;
        }
      }
      std::array<uint32_t, 4> own;
      for (int c = 0; c < 4; ++c) own[size_t(c)] = nibbles[size_t(group_of_lane(c))];
      const auto words = transposed_words(own);
      for (int c = 0; c < 4; ++c) stored.metadata[size_t(warp * 32 + g * 4 + c)] = int32_t(words[size_t(c)]);
    }
  stored.expect(tile);
}

/// The kernel of hidden_gradient24 thread by thread: fragments of S(a) to a tile, da in the other tile
/// replaced by dh, and both read back along tokens.
TEST(Sparse24Packed, OnePassMakesTheGradientsOfBothDirections) {
  const Tensor a = Tensor::empty_packed({64, 64}, DType::bf16, Device::cpu()), da = Tensor::empty_like(a);
  Rng rng(23);
  fill_normal(a, -0.5, 1, rng);
  fill_normal(da, 0, 1, rng);
  bf16* const of_a = a.data<bf16>();
  const auto of_da = [&](int row, int column) -> bf16& {
    return da.data<bf16>()[row * da.layout().stride(0) + column];
  };
  for (int64_t i = 0; i < 64 * 64; ++i)
    if (float(of_a[i]) <= 0) of_a[i] = bf16(0.0f);
  of_da(3, 5) = bf16(std::numeric_limits<float>::infinity());
  const Sparse24 kept = compress24(a, Along24::features);
  const HiddenGradient24 expected = hidden_gradient24(da, kept, Activation::relu_squared);

  const auto value = [](uint32_t pair, int i) { return float(element(pair >> 16 * i)); };
  const auto scaled = [&](uint32_t pair, uint32_t acts, bool by_zero) {
    bf16 made[2];
    for (int i = 0; i < 2; ++i)
      made[i] =
          bf16(value(pair, i) * (by_zero ? 0.0f : slope_of_result<Activation::relu_squared>(value(acts, i))));
    return word(made[0], made[1]);
  };
  uint16_t gradient[64][64], act[64][64];
  for (int row = 0; row < 64; ++row)
    for (int column = 0; column < 64; ++column) gradient[row][column] = of_da(row, column).bits;
  const auto read = [](const uint16_t(&tile)[64][64], int row, int group) {
    const uint16_t* const x = tile[row] + group * 4;
    return GroupWords{uint32_t(x[0]) | uint32_t(x[1]) << 16, uint32_t(x[2]) | uint32_t(x[3]) << 16};
  };
  const auto write = [](uint16_t(&tile)[64][64], int row, int group, const GroupWords& words) {
    uint16_t* const x = tile[row] + group * 4;
    x[0] = uint16_t(words.x01), x[1] = uint16_t(words.x01 >> 16);
    x[2] = uint16_t(words.x23), x[3] = uint16_t(words.x23 >> 16);
  };
  const auto pair_at = [](const Tensor& values, size_t index) {
    const bf16* const x = values.data<bf16>() + 2 * index;
    return word(x[0], x[1]);
  };

  // Along features.
  const auto metadata = kept.metadata.to_vector<int32_t>();
  for (int quad = 0; quad < 32; ++quad) {
    std::array<uint32_t, 4> words;
    for (int c = 0; c < 4; ++c) words[size_t(c)] = uint32_t(metadata[size_t(quad * 4 + c)]);
    const auto nibbles = transposed_words(words);
    for (int c = 0; c < 4; ++c)
      for (int number = 0; number < 4; ++number)
        for (int down = 0; down < 2; ++down) {
          const int thread = quad * 4 + c, row = thread / 32 * 16 + thread % 32 / 4 + down * 8,
                    group = number * 4 + c;
          const uint32_t at = nibbles[size_t(c)] >> (4 * number + 16 * down);
          const size_t index = size_t((number / 2 * 128 + thread) * 4 + number % 2 * 2 + down);
          const uint32_t acts = pair_at(kept.values, index);
          const GroupWords da_words = read(gradient, row, group);
          const uint32_t dh = scaled(gather_pair(da_words.x01, da_words.x23, at), acts, false);
          EXPECT_EQ(dh, pair_at(expected.dh.values, index));
          write(act, row, group, scatter_pair(acts, at, {0, 0}));
          write(gradient, row, group,
                scatter_pair(dh, at, {scaled(da_words.x01, 0, true), scaled(da_words.x23, 0, true)}));
        }
  }
  // Along tokens.
  const auto columns_of = [](const uint16_t(&tile)[64][64], int warp, int lane, int number) {
    uint32_t words[4];
    for (int i = 0; i < 4; ++i) {
      uint32_t made = 0;
      for (int which = 0; which < 2; ++which) {
        const int namer = 8 * i + 2 * (lane % 4) + which;
        made |= uint32_t(tile[tokens_row(namer, number)][16 * warp + tokens_column(namer) + lane / 4])
                << 16 * which;
      }
      words[i] = made;
    }
    return TwoGroups::of(words[0], words[1], words[2], words[3]);
  };
  for (int thread = 0; thread < 128; ++thread)
    for (int number = 0; number < 4; ++number) {
      const int warp = thread / 32, lane = thread % 32;
      const TwoGroups groups = columns_of(act, warp, lane, number);
      const TwoChoices choices = choose_largest(groups);
      const TwoPairs acts = choices.of(groups), grads = choices.of(columns_of(gradient, warp, lane, number));
      const size_t index = size_t((number / 2 * 128 + thread) * 4 + number % 2 * 2);
      EXPECT_EQ(acts.low, pair_at(expected.act_by_tokens.values, index));
      EXPECT_EQ(acts.high, pair_at(expected.act_by_tokens.values, index + 1));
      EXPECT_EQ(grads.low, pair_at(expected.dh_by_tokens.values, index));
      EXPECT_EQ(grads.high, pair_at(expected.dh_by_tokens.values, index + 1));
    }
}

}  // namespace
}  // namespace tessera::ops

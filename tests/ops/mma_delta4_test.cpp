#include <gtest/gtest.h>

#include "ops/random/random.h"
#include "ops/sparse_linear/sparse_weight.h"
#include "tests/errors.h"

// Format mma_delta4: the layout of its streams, how long they are, what validate() refuses.

namespace tessera::ops {
namespace {

using namespace mma_delta4;

/// 1, with that share of zeros.
Tensor ones(const Shape& shape, double zeros, uint64_t seed) {
  Rng rng(seed);
  const Tensor draws = Tensor::empty_packed(shape, DType::f32, Device::cpu());
  fill_uniform(draws, 0, 1, rng);
  for (int64_t i = 0; i < draws.count(); ++i)
    draws.data<float>()[i] = draws.data<float>()[i] < float(zeros) ? 0.0f : 1.0f;
  return draws.to(DType::f16);
}

TEST(MmaDelta4, CutsColumnsIntoPartsOfNearlyAsManyTiles) {
  EXPECT_EQ(parts_of(1), 1);
  EXPECT_EQ(parts_of(512), 1);
  EXPECT_EQ(parts_of(513), 2);
  EXPECT_EQ(first_tile(513, 1), 16);
  EXPECT_EQ(parts_of(4096), 8);
  EXPECT_EQ(parts_of(11008), 22);
  for (const int64_t in : {1, 16, 513, 4100, 11008, 14336}) {
    EXPECT_EQ(first_tile(in, 0), 0);
    EXPECT_EQ(first_tile(in, parts_of(in)), tiles_of(in));
    for (int64_t part = 0; part < parts_of(in); ++part) {
      const int64_t tiles = first_tile(in, part + 1) - first_tile(in, part);
      EXPECT_GE(tiles, tiles_of(in) / parts_of(in));
      EXPECT_LE(tiles, kMostTiles);
    }
  }
}

TEST(MmaDelta4, LaysStreamsOutByTheLanesOfFragments) {
  // 3 tiles: stream 0 has columns 0 to 23, 8 of each tile, and stream 1 columns 24 to 47.
  const Tensor matrix = Tensor::zeros({20, 40}, DType::f32, Device::cpu());
  const auto put = [&](int64_t r, int64_t c, double value) { matrix.at({r, c}).fill(value); };
  for (int64_t c = 0; c < 24; ++c) put(7, c, 1 + double(c));  // longest in stream 0: with an empty partner
  put(9, 38, 100);                                            // tile 1 of stream 1, lane 3 of its row
  const SparseWeight weight = compress(matrix, SparseFormat::mma_delta4);
  EXPECT_EQ(weight.stored, 25);
  EXPECT_EQ(weight.groups(), 1);
  const auto* const places = reinterpret_cast<const uint8_t*>(weight.info.data<int32_t>());
  EXPECT_EQ(places[7], 0) << "the most chunks come first";
  const std::vector<int32_t> offsets = weight.offsets.to_vector<int32_t>();
  ASSERT_EQ(offsets.size(), 33u);
  // Stream 0 of strip 0 has rows 7's 6 entries per lane; row 9 is in a strip with one chunk in stream 1.
  EXPECT_EQ(offsets[1], 1);
  const int64_t place = places[9], strip = place / kStripRows, row = place % kStripRows;
  const int32_t chunk = offsets[size_t(strip * kStreams + 1)];
  EXPECT_EQ(offsets[size_t(strip * kStreams + 2)], chunk + 1);
  EXPECT_EQ(offsets[32], 2);
  const std::vector<float> values = weight.values.to_vector<float>();
  const std::vector<int32_t> gaps = weight.gaps.to_vector<int32_t>();
  ASSERT_EQ(values.size(), 2u * 256);
  ASSERT_EQ(gaps.size(), 2u * 32);
  // Lane t of row 7: columns 2t, 2t + 1 of each tile at positions 4i, 4i + 1; two zeros fill the chunk up.
  for (size_t t = 0; t < 4; ++t) {
    const float first = 1 + 2 * float(t);
    EXPECT_EQ((std::vector<float>(values.begin() + long(t) * 8, values.begin() + long(t) * 8 + 8)),
              (std::vector<float>{first, first + 1, 0, 0, first + 8, first + 9, first + 16, first + 17}));
    EXPECT_EQ(uint32_t(gaps[t]), 0x02000000u) << "positions 0, 1, 2, 3, 4, 5, then 8, 9";
  }
  // Row 9: column 38 is 14 of stream 1: tile 1, columns 2t and 2t + 1 of lane 3, position 4 or 6.
  const size_t lane = size_t(row % 8 * 4 + 3);
  const size_t position = row < 8 ? 4 : 6;
  EXPECT_EQ(values[size_t(chunk) * 256 + lane * 8 + position], 100);
  EXPECT_EQ(gaps[size_t(chunk) * 32 + lane], 0) << "zeros before and after it fill the chunk up";
}

TEST(MmaDelta4, PairsRowsSuchThatStreamsAreShort) {
  const Tensor matrix = ones({512, 4096}, 0.5, 1);
  const SparseWeight weight = compress(matrix, SparseFormat::mma_delta4);
  const double entries = double(weight.values.count()), stored = double(weight.stored);
  EXPECT_LT(entries / stored, 1.12);
  // Half of the rows full, the others empty: a full row and an empty one share a lane.
  const Tensor halves = ones({256, 512}, 0, 1);
  for (int64_t r = 0; r < 256; r += 2) halves.slice(0, r, r + 1).fill(0);
  const SparseWeight even = compress(halves, SparseFormat::mma_delta4);
  EXPECT_EQ(even.values.count(), even.stored);
}

TEST(MmaDelta4, RefusesStreamsThatDoNotFitTogether) {
  const Tensor matrix = ones({260, 600}, 0.5, 7);
  const auto broken = [&](const char* says, auto&& change) {
    SparseWeight weight = compress(matrix, SparseFormat::mma_delta4);
    EXPECT_NO_THROW(validate(weight, "layer"));
    change(weight);
    const std::string said = message_of([&] { validate(weight, "layer"); });
    EXPECT_NE(said.find(says), std::string::npos) << said;
  };
  broken("first stream start", [](SparseWeight& w) { w.offsets.data<int32_t>()[0] = 1; });
  broken("offsets descend", [](SparseWeight& w) { w.offsets.data<int32_t>()[3] = -1; });
  broken("has two rows of group 0 in place",
         [](SparseWeight& w) { w.info.data<int32_t>()[0] = w.info.data<int32_t>()[1]; });
  broken("at position", [](SparseWeight& w) { w.gaps.data<int32_t>()[0] = -1; });
  broken("outside the matrix [259, 600]", [](SparseWeight& w) { w.out = 259; });
  broken("outside the matrix [260, 593]", [](SparseWeight& w) { w.in = 593; });  // 600 has 38 tiles, too
  broken("'values' is", [](SparseWeight& w) { w.values = w.values.slice(0, 0, 256); });
  broken("'gaps' is missing", [](SparseWeight& w) { w.gaps = Tensor(); });
  broken("'offsets' is", [](SparseWeight& w) { w.in = 10000; });
  broken("'info' is", [](SparseWeight& w) { w.info = w.info.to(DType::i64); });
  broken("stored elements", [](SparseWeight& w) { w.stored -= 1; });
  broken("stored elements", [](SparseWeight& w) { w.most = 64; });
}

}  // namespace
}  // namespace tessera::ops

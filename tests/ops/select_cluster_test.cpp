#include "ops/select/select_cluster_math.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/random/random.h"
#include "ops/select/select.h"

/// Variant "cluster" of selections in plain loops: the same functions in the same order as
/// select_cluster.cuh, next to the definition of select_cpu.cpp. On a GPU the cases of select compare the
/// kernel.

namespace tessera::ops {
namespace {

constexpr uint64_t kClusterSeed = 5;  // of the first stream of Rng(kClusterSeed)

struct Entries {
  std::vector<int32_t> indices;
  std::vector<float> scales;
};

/// The bins of one block.
struct Bins {
  std::vector<uint32_t> counts = std::vector<uint32_t>(kDigits, 0), low = counts, high = counts;
};

/// The kernel, block by block: `rows` of the norms may be chosen.
class Cluster {
 public:
  Cluster(SelectMode mode, const std::vector<float>& norms, uint32_t rows, uint32_t k)
      : mode_(mode), rows_(rows), k_(k), chunks_(int64_t(norms.size())) {
    uint32_t largest = 0;
    for (uint32_t i = 0; i < rows; ++i) largest = std::max(largest, norm_exponent(norms[i]));
    const RandomKeys keys{kClusterSeed, 0};
    for (uint32_t i = 0; i < rows; ++i)
      values_.push_back(mode == SelectMode::random ? keys.of_four(i / 4).word[i % 4]
                        : weighted()               ? norm_weight(norms[i], largest)
                                                   : norm_rank(norms[i]));
  }

  Entries run() const {
    const Cut cut = cut_of_search(weighted(), search(), k_, rows_, kClusterSeed, 0);
    const float certain = mode_ == SelectMode::random && k_ > 0 ? random_scale(rows_, k_) : 1.0f;
    Entries entries;
    entries.indices.resize(k_, -1), entries.scales.resize(k_, -1);
    RowTerm base;  // of the blocks before
    for (int block = 0; block < chunks_.blocks; ++block) {
      RowTerm at = base;
      for (uint32_t i = begin(block); i < begin(block + 1); ++i) {
        const RowTerm term = cut.term(values_[i]);
        const uint32_t drawn = cut.points_before(at.drawable), entry = at.chosen + drawn;
        at.chosen += term.chosen, at.drawable += term.drawable;
        if (!(term.chosen || cut.points_before(at.drawable) > drawn) || entry >= cut.limit) continue;
        EXPECT_EQ(entries.indices[entry], -1) << "written twice";
        entries.indices[entry] = int32_t(i);
        entries.scales[entry] = cut.weighted && !term.chosen ? cut.drawn_scale(term.drawable) : certain;
      }
      base = at;
    }
    return entries;
  }

 private:
  bool weighted() const { return mode_ == SelectMode::importance; }
  uint32_t begin(int block) const { return std::min(uint32_t(block) * chunks_.rows, rows_); }

  RadixSearch search() const {
    RadixSearch search{};
    for (int pass = 0; pass < kDigitPasses; ++pass) {
      std::vector<Bins> bins;
      for (int block = 0; block < chunks_.blocks; ++block) bins.push_back(count(block, pass, search.bar));
      std::vector<RowTerm> terms(kDigits);
      uint64_t sum = 0;
      for (int digit = 0; digit < kDigits; ++digit)
        for (const Bins& some : bins) {
          const uint64_t own = joined_sum(some.low[size_t(digit)], some.high[size_t(digit)]);
          terms[size_t(digit)].chosen += some.counts[size_t(digit)];
          terms[size_t(digit)].drawable += own, sum += own;
        }
      const RadixSearch from = search;
      int taken = 0;
      RowTerm higher{from.above, 0};
      for (int digit = kDigits - 1; digit >= 0; --digit) {
        const RowTerm& own = terms[size_t(digit)];
        taken += take_digit(search, from, weighted(), k_, digit_shift(pass), uint32_t(digit), kDigits - 1,
                            higher, own, sum);
        higher.chosen += own.chosen, higher.drawable += own.drawable;
      }
      EXPECT_EQ(taken, 1) << "pass " << pass;
    }
    return search;
  }

  Bins count(int block, int pass, uint32_t bar) const {
    Bins bins;
    for (uint32_t i = begin(block); i < begin(block + 1); ++i) {
      const uint32_t value = values_[i];
      if ((value & digits_known(pass)) != bar || (weighted() && value == 0)) continue;
      const size_t digit = value >> digit_shift(pass) & (kDigits - 1);
      ++bins.counts[digit];
      if (!weighted() || value == kCertain) continue;
      bins.low[digit] += value & 0xFFFF, bins.high[digit] += value >> 16;
    }
    return bins;
  }

  SelectMode mode_;
  uint32_t rows_, k_;
  ClusterChunks chunks_;
  std::vector<uint32_t> values_;
};

Entries selected_by_definition(SelectMode mode, const std::vector<float>& values, int32_t rows, int64_t k) {
  const Tensor norms = Tensor::from(values, {int64_t(values.size())});
  const SelectionCounts counts{.rows = Tensor::from(std::vector<int32_t>{rows}, {1})};
  Rng rng(kClusterSeed);
  const Selection chosen = mode == SelectMode::top_norm ? Selection::top_norm(norms, k, counts)
                           : mode == SelectMode::random
                               ? Selection::random(norms.count(), k, rng, Device::cpu(), counts)
                               : Selection::importance(norms, k, rng, counts);
  return {chosen.indices.to_vector<int32_t>(), chosen.scales.to_vector<float>()};
}

/// Norms of several kinds: log-normal of that width in powers of e, with every 97th one special.
std::vector<float> drawn_norms(int64_t rows, double width, bool special) {
  Rng rng(uint64_t(rows) + 1);
  const Tensor x = Tensor::empty({rows}, DType::f32, Device::cpu());
  fill_normal(x, 0, width, rng);
  std::vector<float> norms = x.to_vector<float>();
  for (float& norm : norms) norm = std::exp(norm);
  constexpr float kSpecial[] = {0, INFINITY, std::numeric_limits<float>::quiet_NaN(), -1, 1e-45f, 2};
  if (special)
    for (size_t i = 0; i < norms.size(); i += 97) norms[i] = kSpecial[i / 97 % std::size(kSpecial)];
  return norms;
}

TEST(SelectCluster, ChoosesTheRowsOfTheDefinition) {
  for (const SelectMode mode : {SelectMode::top_norm, SelectMode::random, SelectMode::importance})
    for (const int64_t rows : {0, 1, 5, 260, 4097, 16385, 40961})
      for (const double width : {0.0, 0.5, 9.0})  // all alike; some octaves; most far below the largest
        for (const bool special : {false, true}) {
          const std::vector<float> norms = drawn_norms(rows, width, special);
          for (const int64_t valid : {rows, rows * 2 / 3})
            for (const int64_t k : {int64_t{0}, valid / 10, valid}) {
              SCOPED_TRACE(testing::Message() << name_of(mode) << " " << k << " of " << valid << " of "
                                              << rows << ", width " << width << ", special " << special);
              const Entries ours = Cluster(mode, norms, uint32_t(valid), uint32_t(k)).run(),
                            want = selected_by_definition(mode, norms, int32_t(valid), k);
              ASSERT_EQ(ours.indices, want.indices);
              ASSERT_EQ(ours.scales, want.scales);
            }
        }
}

TEST(SelectCluster, BlocksCoverAllRowsInGroupsOfFour) {
  for (const int64_t rows : {0, 1, 4, 4095, 4096, 4097, 8192, 8193, 16384, 16385, 36096, 131071, 131072}) {
    const ClusterChunks chunks(rows);
    EXPECT_TRUE(chunks.blocks == 1 || chunks.blocks == 2 || chunks.blocks == 4 || chunks.blocks == 8) << rows;
    EXPECT_EQ(chunks.rows % 4, 0u) << rows;
    EXPECT_GE(int64_t(chunks.rows) * chunks.blocks, rows);
    EXPECT_LT(int64_t(chunks.rows) * chunks.blocks, rows + chunks.blocks * 4) << rows;
    EXPECT_LE(chunks.rows, 65536u) << "sums of 16 bits";
    EXPECT_LE(chunks.rows * sizeof(uint32_t), 64u * 1024) << "shared memory";
  }
}

TEST(SelectCluster, SumsInHalvesAreExactForTheLargestBlock) {
  // 16,384 times the largest weight below kCertain.
  const uint32_t value = kCertain - 1;
  uint32_t low = 0, high = 0;
  for (int64_t i = 0; i < ClusterChunks::kMostRows / 8; ++i) low += value & 0xFFFF, high += value >> 16;
  EXPECT_EQ(joined_sum(low, high), uint64_t(ClusterChunks::kMostRows / 8) * value);
}

}  // namespace
}  // namespace tessera::ops

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "autograd/tape.h"
#include "ops/random/random.h"
#include "ops/sparse_linear/joint_plan.h"
#include "ops/sparse_linear/sparse_linear.h"
#include "ops/sparse_linear/sparse_linear_kernels.h"
#include "ops/swiglu/swiglu.h"
#include "tests/errors.h"
#include "tests/tensors.h"

// Several compressed weights in one launch: how it is cut into blocks, when weights may be read ahead, and
// SwiGLU of two.

namespace tessera::ops {
namespace {

using namespace sparse;

constexpr int kSms = 132;

int64_t tiles_of(std::initializer_list<int64_t> rows) {
  int64_t tiles = 0;
  for (const int64_t out : rows) tiles += (out + sparse::kTileRows - 1) / sparse::kTileRows;
  return tiles;
}

struct ExpectedBlocks {
  const char* what;
  int64_t tiles, in;
  bool swiglu;
  int sell_blocks, sell_steps, column_blocks, column_steps;
};

TEST(SparseLinearPlan, IsOneWaveAtTheShapesOfLlama) {
  // A token of Llama-2-7B and of Llama-3-8B: blocks per cluster, and parts (sell) or inputs (columns) of a
  // group.
  const ExpectedBlocks all[] = {
      {"7B q, k, v", tiles_of({4096, 4096, 4096}), 4096, false, 8, 1, 4, 512},
      {"o", tiles_of({4096}), 4096, false, 8, 1, 8, 256},
      {"7B gate, up", tiles_of({11008}), 4096, true, 4, 2, 4, 1024},
      {"7B down", tiles_of({4096}), 11008, false, 8, 1, 8, 704},
      {"8B q, k, v", tiles_of({4096, 1024, 1024}), 4096, false, 8, 1, 8, 256},
      {"8B gate, up", tiles_of({14336}), 4096, true, 4, 2, 4, 1024},
      {"8B down", tiles_of({4096}), 14336, false, 8, 2, 8, 896},
      {"one k of 8B", tiles_of({1024}), 4096, false, 8, 1, 8, 256},
      {"more than 29 clusters of 8", 36, 4096, false, 8, 1, 4, 512},
  };
  for (const ExpectedBlocks& one : all) {
    const JointPlan sell = plan_sell(one.tiles, one.in, 1, one.swiglu, kSms),
                    columns = plan_columns(one.tiles, one.in, 1, one.swiglu, kSms);
    EXPECT_STREQ(sell.lacks, "") << one.what;
    EXPECT_STREQ(columns.lacks, "") << one.what;
    EXPECT_EQ(sell.waves(), 1) << one.what;
    EXPECT_EQ(columns.waves(), 1) << one.what;
    EXPECT_EQ(sell.blocks, one.sell_blocks) << one.what;
    EXPECT_EQ(sell.steps, one.sell_steps) << one.what;
    EXPECT_EQ(columns.blocks, one.column_blocks) << one.what;
    EXPECT_EQ(columns.steps, one.column_steps) << one.what;
  }
  // 56 clusters of 8 blocks, 3 per SM, were a second wave where 45 fitted.
  EXPECT_LT(clusters_that_fit(kSms, 3, 8), 56);
}

TEST(SparseLinearPlan, SaysItsWaveAndItsBytesOnTheWay) {
  const JointPlan plan = plan_sell(43, 4096, 1, true, kSms);
  EXPECT_EQ(
      describe(plan, kSellShapes[plan.shape], kSms),
      "43 tiles of 256 outputs of gate and up, 172 blocks of 512 threads in clusters of 4, one wave (59 "
      "clusters fit), 52 KB per SM on the way");
  const JointPlan many = plan_sell(1000, 4096, 1, false, kSms);
  EXPECT_EQ(many.blocks, 1);
  EXPECT_NE(describe(many, kSellShapes[many.shape], kSms).find("2 waves (528 clusters fit)"),
            std::string::npos)
      << describe(many, kSellShapes[many.shape], kSms);
}

TEST(SparseLinearPlan, GivesEveryPartAndInputToOneGroup) {
  // As the kernels number them: block `rank` of a cluster, group g of it.
  for (const bool swiglu : {false, true})
    for (const int64_t tokens : {1, 2, 3, 5, 8})
      for (const int64_t tiles : {1, 16, 24, 43, 48, 86, 200, 700})
        for (const int64_t in : {1, 31, 255, 256, 700, 4096, 5000, 11008, 14336, 28672}) {
          const auto covers = [&](const JointPlan& plan, const JointShape& shape, int64_t units) {
            std::vector<int> times(size_t(units), 0);
            const int sharing = swiglu ? 1 : shape.groups;
            for (int64_t rank = 0; rank < plan.blocks; ++rank)
              for (int64_t g = 0; g < sharing; ++g)
                for (int64_t u = (rank * sharing + g) * plan.steps;
                     u < std::min(units, (rank * sharing + g + 1) * plan.steps); ++u)
                  ++times[size_t(u)];
            for (const int count : times) ASSERT_EQ(count, 1) << tiles << " tiles, " << in << " inputs";
            EXPECT_GE(shape.tokens, tokens);
            EXPECT_EQ(shape.swiglu, swiglu);
          };
          const JointPlan sell = plan_sell(tiles, in, tokens, swiglu, kSms);
          if (!*sell.lacks) covers(sell, kSellShapes[sell.shape], sell_delta4::parts_of(in));
          const JointPlan columns = plan_columns(tiles, in, tokens, swiglu, kSms);
          if (swiglu && tokens > 4) continue;
          ASSERT_STREQ(columns.lacks, "");
          covers(columns, kColumnShapes[columns.shape], in);
        }
}

TEST(SparseLinearPlan, RefusesWhatDoesNotFitIntoABlock) {
  EXPECT_STREQ(plan_sell(16, 4096, 9, false, kSms).lacks, "at most 8 tokens");
  EXPECT_STREQ(plan_columns(16, 4096, 9, false, kSms).lacks, "at most 8 tokens");
  EXPECT_STREQ(plan_columns(16, 4096, 5, true, kSms).lacks, "at most 4 tokens");
  EXPECT_NE(std::string(plan_sell(16, 200'000, 8, false, kSms).lacks).find("shared memory"),
            std::string::npos);
  EXPECT_NE(std::string(plan_sell(1000, 60'000, 1, false, kSms).lacks).find("parts of the inputs"),
            std::string::npos);
}

TEST(SparseLinearPlan, AsksAheadForNoMoreThanAThirdOfTheL2) {
  for (const int64_t tiles : {1, 16, 43, 500})
    for (const int64_t in : {512, 4096, 14336}) {
      const JointPlan sell = plan_sell(tiles, in, 1, false, kSms),
                      columns = plan_columns(tiles, in, 1, false, kSms);
      EXPECT_LE(tiles * sell_delta4::parts_of(in) * 8 * sell.early * 640, kEarlyBytes);
      EXPECT_LE(tiles * columns.blocks * kColumnShapes[columns.shape].groups * columns.early * 512,
                kEarlyBytes);
    }
  // 4096 x 4096 at 50 % zeros has some 33 chunks per warp and part: most of them.
  EXPECT_EQ(plan_sell(16, 4096, 1, false, kSms).early, 25);
}

TEST(SparseLinearPlan, IsMadeForTheLaunchThatRuns) {
  // Cut into clusters, the inputs fit into shared memory; 120 tiles leave no room for clusters, 150 would be
  // planned with another shape.
  const DeviceInfo info{.name = "NVIDIA H200", .major = 9, .multiprocessors = kSms};
  const Gpu h200(info, kSms);
  SparsePart part{.weight = {.format = SparseFormat::sell_delta4, .out = 7680, .in = 28672}};
  part.weight.values = Tensor::zeros({1}, DType::bf16, Device::cpu());
  SparsePart empty = part;
  empty.weight.out = 0;
  const std::vector<SparsePart> parts{part, part, empty, part, part, part, empty};
  const std::span<const SparsePart> all = parts, first = parts_of_launch(all);
  ASSERT_EQ(first.size(), 5u);
  const std::span<const SparsePart> second = parts_of_launch(all.subspan(first.size()));
  ASSERT_EQ(second.size(), 2u);
  for (const std::span<const SparsePart> launch : {first, second})
    for (const int64_t tokens : {3, 4}) {
      const int64_t tiles = launch.size() == 5 ? 120 : 30;
      const bool fits = !*plan_sell(tiles, 28672, tokens, false, kSms).lacks;
      EXPECT_EQ(fits, tiles == 30);
      EXPECT_EQ(sparse_linear_variant(launch, tokens, h200), fits ? "sell_joint" : "sell_wgmma");
    }
}

// ---- tensor cores ----

TEST(SparseLinearPlan, GivesTensorCoresOneBlockPerMultiprocessor) {
  struct Expected {
    const char* what;
    int64_t windows, in, tokens;
    int of_tokens, token_tiles, parts, passes, columns, apart, blocks, splits;
  };
  for (const Expected& e : {Expected{"7B q, k, v", 48, 4096, 32, 32, 1, 8, 1, 512, 64, kSms, 3},
                            {"7B o", 16, 4096, 8, 8, 1, 8, 1, 512, 64, kSms, 8},
                            {"7B gate, up", 86, 4096, 9, 16, 1, 8, 1, 512, 64, kSms, 2},
                            {"7B down", 16, 11008, 33, 64, 1, 8, 3, 464, 64, kSms, 8},
                            {"one window, few inputs", 1, 100, 2, 8, 1, 1, 1, 104, 16, 2, 1},
                            {"two tiles of tokens", 400, 700, 100, 64, 2, 4, 1, 176, 32, 66, 2}}) {
    const SellWgmmaPlan plan = plan_sell_wgmma(e.windows, e.in, e.tokens, kSms);
    EXPECT_STREQ(plan.lacks, "") << e.what;
    EXPECT_EQ(plan.tokens, e.of_tokens) << e.what;
    EXPECT_EQ(plan.token_tiles, e.token_tiles) << e.what;
    EXPECT_EQ(plan.parts, e.parts) << e.what;
    EXPECT_EQ(plan.passes, e.passes) << e.what;
    EXPECT_EQ(plan.columns, e.columns) << e.what;
    EXPECT_EQ(plan.apart, e.apart) << e.what;
    EXPECT_EQ(plan.blocks, e.blocks) << e.what;
    EXPECT_EQ(plan.splits, e.splits) << e.what;
  }
  EXPECT_STREQ(plan_sell_wgmma(1, 4096, 129, kSms).lacks, "at most 128 tokens");
  EXPECT_STREQ(plan_sell_wgmma(1, 0, 1, kSms).lacks, "inputs");
  EXPECT_STREQ(plan_sell_wgmma(20'000, 4096, 100, kSms).lacks, "at most 2^28 sums");
  EXPECT_STREQ(plan_sell_wgmma(1, 30'000'000, 1, kSms).lacks, "");
  for (const auto& [in, tokens] : {std::pair<int64_t, int64_t>{31'000'000, 1}, {16'000'000, 65}})
    EXPECT_STREQ(plan_sell_wgmma(1, in, tokens, kSms).lacks, "at most 65,535 blocks that arrange the inputs")
        << in;
  EXPECT_EQ(
      describe(plan_sell_wgmma(86, 4096, 100, kSms)),
      "86 windows of 256 outputs in 8 parts, 2 x 64 tokens, 66 blocks each, 20 to 21 units of 128 rows");
}

TEST(SparseLinearPlan, GivesEveryUnitToOneBlockAndRowsToNoMoreThanItSays) {
  for (const int64_t windows : {1, 2, 16, 43, 48, 86, 125, 1000})
    for (const int64_t in : {1, 300, 4096, 11008, 28672})
      for (const int64_t tokens : {1, 64, 65, 128})
        for (const int multiprocessors : {1, 7, 78, kSms}) {
          const SellWgmmaPlan plan = plan_sell_wgmma(windows, in, tokens, multiprocessors);
          ASSERT_STREQ(plan.lacks, "");
          EXPECT_GE(plan.columns * plan.passes, sell_delta4::width_of(in));
          EXPECT_GE(plan.apart * 8, plan.columns);
          ASSERT_EQ(plan.first_unit(0), 0);
          ASSERT_EQ(plan.first_unit(plan.blocks), plan.units());
          for (int block = 0; block < plan.blocks; ++block) {
            ASSERT_LT(plan.first_unit(block), plan.first_unit(block + 1));
            ASSERT_EQ(plan.block_of(plan.first_unit(block)), block);
            ASSERT_EQ(plan.block_of(plan.first_unit(block + 1) - 1), block);
          }
          for (int tile = 0; tile < plan.units() / plan.parts; ++tile)
            ASSERT_LE(plan.splits_of(tile), plan.splits) << windows << " windows, " << in << " inputs";
        }
}

TEST(SparseLinearPlan, GivesStripsToTheWarpsOfOneBlockPerMultiprocessor) {
  struct Expected {
    const char* what;
    int64_t windows, in, tokens;
    int parts, of_tokens, token_tiles, blocks;
  };
  for (const Expected& e : {Expected{"7B q, k, v", 48, 4096, 32, 8, 32, 1, kSms},
                            {"7B down", 16, 11008, 33, 22, 32, 2, kSms},
                            {"one window, one column", 1, 1, 1, 1, 8, 1, 16},
                            {"one column more than a part", 1, 513, 9, 2, 16, 1, 32}}) {
    const MmaPlan plan = plan_mma(e.windows, e.in, e.tokens, kSms);
    EXPECT_STREQ(plan.lacks, "") << e.what;
    EXPECT_EQ(plan.parts, e.parts) << e.what;
    EXPECT_EQ(plan.tokens, e.of_tokens) << e.what;
    EXPECT_EQ(plan.token_tiles, e.token_tiles) << e.what;
    EXPECT_EQ(plan.blocks, e.blocks) << e.what;
  }
  EXPECT_STREQ(plan_mma(1, 4096, 65, kSms).lacks, "at most 64 tokens");
  EXPECT_STREQ(plan_mma(1, 0, 1, kSms).lacks, "inputs");
  EXPECT_STREQ(plan_mma(2048, 8192, 64, kSms).lacks, "at most 2^28 sums of its parts");
  EXPECT_EQ(describe(plan_mma(86, 4096, 40, kSms)),
            "86 windows of 256 outputs in 8 parts, 2 x 32 tokens, 132 blocks of 12 warps, up to 14 units per "
            "warp");
}

/// Integers of at most 3, some zero: sums are exact in f32, and in f16 up to 2,048.
Tensor small_integers(const Shape& shape, uint64_t seed, auto&& is_zero) {
  Rng rng(seed);
  const Tensor values = Tensor::empty_packed(shape, DType::f32, Device::cpu());
  fill_uniform(values, -3.4999, 3.4999, rng);
  for (int64_t i = 0; i < values.count(); ++i) {
    float& value = values.data<float>()[i];
    value = is_zero(i / shape[1], i % shape[1]) ? 0.0f : std::round(value);
  }
  return values.to(DType::f16);
}

TEST(SparseLinearMma, IsExactWhereverTheElementsOfARowLie) {
  // sell_wgmma: a lane walks its row; rows of a slice that are far from each other make passes overlap, and
  // the chunks of one are read in all of them. mma: streams are very unequal, or empty.
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const Device gpu = Device::cuda(0);
  if (gpu.info().major != 9) GTEST_SKIP() << "skipped: no variants sell_wgmma and mma";
  for (const int64_t in : {40, 600, 4096, 4100, 11008, 14336})
    for (const int pattern : {0, 1, 2, 3}) {
      const auto is_zero = [&](int64_t row, int64_t column) {
        const uint64_t drawn = uint64_t(row * in + column) * 0x9E3779B97F4A7C15u >> 33;
        if (pattern == 0) return drawn % 2 == 0;
        if (pattern == 1)  // dense left, dense right, dense, empty, both ends, one element in 700
          switch (row % 6) {
            case 0:
              return column > in / 2;
            case 1:
              return column < in / 2;
            case 2:
              return false;
            case 3:
              return true;
            case 4:
              return column > 2 && column < in - 3;
            default:
              return column % 700 != row % 700;
          }
        if (pattern == 2) return drawn % 16 != 0;
        return (column / 512 + row) % 2 == 0;  // every other pass
      };
      const Tensor weight = small_integers({300, in}, 1, is_zero);
      const SparseWeight slices = compress(weight, SparseFormat::sell_delta4).to(gpu),
                         streams = compress(weight, SparseFormat::mma_delta4).to(gpu);
      for (const int64_t tokens : {1, 7, 16, 27, 60, 100}) {
        SCOPED_TRACE(testing::Message()
                     << in << " inputs, pattern " << pattern << ", " << tokens << " tokens");
        // Few inputs, so that sums stay exact.
        const Tensor x = small_integers({tokens, in}, 2, [&](int64_t token, int64_t column) {
          return (column * 7 + token) % (in > 600 ? 11 : 2) != 0;
        });
        const Tensor expected = sparse_linear(x, slices.to(Device::cpu()));
        for (const auto& [variant, there] : {std::pair("sell_wgmma", &slices), {"mma", &streams}}) {
          if (tokens > kMmaTokens && there == &streams) continue;
          const ForceVariant force("sparse_linear", variant);
          EXPECT_TRUE(same_bits(sparse_linear(x.to(gpu), *there).to(Device::cpu()), expected)) << variant;
        }
      }
    }
}

TEST(SparseLinearMma, GivesAWarpMoreStripsThanItsLanesKnow) {
  // Variant mma: 26,000 strips are 17 per warp of 132 SMs, and the lanes know 16 at a time.
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const Device gpu = Device::cuda(0);
  if (gpu.info().major != 9) GTEST_SKIP() << "skipped: no variant mma";
  const auto is_zero = [](int64_t row, int64_t column) {
    return uint64_t(row * 17 + column) * 0x9E3779B97F4A7C15u >> 63 == 0;
  };
  const SparseWeight made = compress(small_integers({416'100, 17}, 1, is_zero), SparseFormat::mma_delta4);
  const Tensor x = small_integers({9, 17}, 2, [](int64_t, int64_t) { return false; });
  const ForceVariant force("sparse_linear", "mma");
  EXPECT_TRUE(same_bits(sparse_linear(x.to(gpu), made.to(gpu)).to(Device::cpu()), sparse_linear(x, made)));
}

// ---- when arrays may be read ahead ----

Tensor half_zero(const Shape& shape, DType dtype, uint64_t seed) {
  Rng rng(seed);
  const Tensor values = Tensor::empty_packed(shape, DType::f32, Device::cpu());
  fill_normal(values, 0, 1, rng);
  for (int64_t i = 0; i < values.count(); i += 2) values.data<float>()[i] = 0;
  return values.to(dtype);
}

TEST(SparseLinearWeight, IsConstantOnlyWhereItsArraysWereWaitedFor) {
  for (const SparseFormat format :
       {SparseFormat::dense_columns, SparseFormat::tiled_cbc, SparseFormat::tca_bme,
        SparseFormat::sell_delta4, SparseFormat::mma_delta4}) {
    const SparseWeight made = compress(half_zero({70, 40}, DType::f16, 1), format);
    EXPECT_TRUE(made.constant) << name_of(format);
    SparseWeight by_hand{.format = format, .out = made.out, .in = made.in, .values = made.values};
    EXPECT_FALSE(by_hand.constant);
    EXPECT_FALSE(by_hand.to(Device::cpu()).constant) << "nothing was copied, nothing was waited for";
    by_hand.settle();
    EXPECT_TRUE(by_hand.constant);
    EXPECT_TRUE(by_hand.to(Device::cpu()).constant);
    SparseWeight other = made;
    other.constant = false;
    EXPECT_TRUE(other == made) << "the same arrays";
  }
}

// ---- SwiGLU ----

TEST(SparseLinearSwiglu, IsSwigluOfBothPartsEachUnderItsGate) {
  const Tensor gate = half_zero({37, 50}, DType::f16, 1), up = half_zero({37, 50}, DType::f16, 2);
  for (const auto& [first, second] : {std::pair{SparseFormat::sell_delta4, SparseFormat::sell_delta4},
                                      {SparseFormat::dense_columns, SparseFormat::dense_columns},
                                      {SparseFormat::tca_bme, SparseFormat::tiled_cbc}}) {
    const std::vector<SparsePart> parts = {
        {compress(gate, first), {.kind = Gate::Kind::threshold, .threshold = 0.6}},
        {compress(up, second), {.kind = Gate::Kind::top_k, .keep = 20}}};
    const Tensor x = half_zero({2, 3, 50}, DType::f16, 3);
    const Tensor y = sparse_linear_swiglu(x, parts[0], parts[1]);
    EXPECT_EQ(y.shape(), (Shape{2, 3, 37}));
    EXPECT_TRUE(same_bits(y, swiglu(sparse_linear(x, parts))));
    EXPECT_FALSE(same_bits(y, sparse_linear_swiglu(x, parts[1], parts[0])));
  }
}

TEST(SparseLinearSwiglu, SaysWhatDoesNotFit) {
  const auto part = [](int64_t out, int64_t in) {
    return SparsePart{compress(half_zero({out, in}, DType::f16, 1), SparseFormat::sell_delta4), {}};
  };
  const Tensor x = half_zero({1, 6}, DType::f16, 3);
  const auto expect = [](const char* says, auto&& call) {
    EXPECT_NE(message_of(call).find(says), std::string::npos) << message_of(call);
  };
  expect("sparse_linear_swiglu: gate has 4 outputs and up 5",
         [&] { sparse_linear_swiglu(x, part(4, 6), part(5, 6)); });
  expect("sparse_linear_swiglu: the weight of part 1 [4, 7] takes 7 features",
         [&] { sparse_linear_swiglu(x, part(4, 6), part(4, 7)); });
  expect("sparse_linear_swiglu: a tape is recording", [&] {
    const Tape tape;
    sparse_linear_swiglu(x, part(4, 6), part(4, 6));
  });
}

}  // namespace
}  // namespace tessera::ops

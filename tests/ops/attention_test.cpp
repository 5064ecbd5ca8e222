#include "ops/attention/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "autograd/gradcheck.h"
#include "ops/attention/attention_schedule.h"
#include "ops/attention/attention_variants.h"
#include "runtime/f32_math.h"
#include "runtime/philox.h"
#include "tensor/precision.h"
#include "tests/errors.h"
#include "tests/ops/tensors.h"

/// What the generic cases do not say: examples worked out by hand, where causal's diagonal lies, queries that
/// see nothing, huge scores, layouts of results, head sizes that only the CPU takes, and messages.

namespace tessera::ops {
namespace {

Tensor heads(const std::vector<double>& values, int64_t length, int64_t dim) {
  return Tensor::from(values, {1, length, 1, dim});
}

TEST(Attention, WorkedByHand) {
  // Scores 0 and ln 3: weights 1/4 and 3/4.
  const Tensor q = heads({1}, 1, 1), k = heads({0, std::log(3.0)}, 2, 1), v = heads({8, 4}, 2, 1);
  const auto [o, lse] = attention_with_lse(q, k, v, {.scale = 1});
  EXPECT_NEAR(o.item(), 5.0, 1e-14);
  EXPECT_NEAR(lse.item(), std::log(4.0), 1e-14);
  // With scale 2 the weights are 1/10 and 9/10.
  EXPECT_NEAR(attention(q, k, v, {.scale = 2}).item(), 4.4, 1e-14);
}

TEST(Attention, GradientsWorkedByHand) {
  // P = (1/4, 3/4), o = 5, do = 1: dv = P, dS = P (v - o) = (3/4, -3/4), dk = dS q, dq = dS . k = -3/4 ln 3.
  Tensor q = heads({1}, 1, 1), k = heads({0, std::log(3.0)}, 2, 1), v = heads({8, 4}, 2, 1);
  for (Tensor* leaf : {&q, &k, &v}) require_grad(*leaf);
  Tape tape;
  tape.backward(attention(q, k, v, {.scale = 1}));
  EXPECT_NEAR(grad(v).to_vector<double>()[0], 0.25, 1e-14);
  EXPECT_NEAR(grad(v).to_vector<double>()[1], 0.75, 1e-14);
  EXPECT_NEAR(grad(k).to_vector<double>()[0], 0.75, 1e-14);
  EXPECT_NEAR(grad(k).to_vector<double>()[1], -0.75, 1e-14);
  EXPECT_NEAR(grad(q).item(), -0.75 * std::log(3.0), 1e-14);
}

TEST(Attention, CausalIsAlignedAtTheEnd) {
  // Equal scores: o is the mean of the values that a query sees.
  const auto expect_means = [](int64_t queries, int64_t keys, const std::vector<double>& want) {
    std::vector<double> values;
    for (int64_t j = 0; j < keys; ++j) values.push_back(double(1 << j));
    const Tensor q = Tensor::zeros({1, queries, 1, 1}, DType::f64, Device::cpu()),
                 k = Tensor::zeros({1, keys, 1, 1}, DType::f64, Device::cpu());
    const auto got = attention(q, k, heads(values, keys, 1), {.causal = true}).to_vector<double>();
    for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-14) << queries << " " << keys;
  };
  expect_means(2, 2, {1, 1.5});
  expect_means(1, 4, {3.75});
  expect_means(2, 4, {7.0 / 3, 3.75});
  expect_means(4, 2, {0, 0, 1, 1.5});
}

TEST(Attention, QueriesThatSeeNothingGiveZero) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    Tensor q = uniform({2, 5, 2, 8}, dtype, 1), k = uniform({2, 2, 2, 8}, dtype, 2),
           v = uniform({2, 2, 2, 8}, dtype, 3);
    for (Tensor* leaf : {&q, &k, &v}) require_grad(*leaf);
    Tape tape;
    auto [o, lse] = attention_with_lse(q, k, v, {.causal = true});
    const Tensor blind = o.detach().slice(1, 0, 3), blind_lse = lse.slice(2, 0, 3);
    for (const double value : blind.to_vector<double>()) EXPECT_EQ(value, 0);
    for (const double value : blind_lse.to_vector<double>()) EXPECT_EQ(value, -kInf);
    tape.backward(std::vector{o}, std::vector{uniform(o.shape(), dtype, 4)});
    for (const double value : grad(q).slice(1, 0, 3).to_vector<double>()) EXPECT_EQ(value, 0);
    for (const Tensor& leaf : {q, k, v})
      for (const double value : grad(leaf).to_vector<double>()) EXPECT_TRUE(std::isfinite(value));
  }
}

TEST(Attention, NoKeysAndNoQueries) {
  const auto [o, lse] =
      attention_with_lse(uniform({2, 3, 2, 4}, DType::f32, 1), uniform({2, 0, 2, 4}, DType::f32, 2),
                         uniform({2, 0, 2, 4}, DType::f32, 3));
  for (const double value : o.to_vector<double>()) EXPECT_EQ(value, 0);
  for (const double value : lse.to_vector<double>()) EXPECT_EQ(value, -kInf);
  const Tensor none = attention(uniform({2, 0, 2, 4}, DType::f32, 1), uniform({2, 3, 2, 4}, DType::f32, 2),
                                uniform({2, 3, 2, 4}, DType::f32, 3));
  EXPECT_EQ(none.shape(), (Shape{2, 0, 2, 4}));
}

TEST(Attention, HugeScoresStayFinite) {
  // The larger score takes all; the log-sum-exp is that score, although its exponential overflows.
  for (const double size : {1e3, 1e4}) {
    const auto [o, lse] =
        attention_with_lse(heads({1}, 1, 1).to(DType::f32), heads({size, -size}, 2, 1).to(DType::f32),
                           heads({3, 5}, 2, 1).to(DType::f32), {.scale = 1});
    EXPECT_EQ(o.item(), 3);
    EXPECT_EQ(lse.item(), size);
  }
}

TEST(Attention, InfiniteAndMissingScores) {
  // A key at score -inf has no weight; if all are, the query sees nothing; a NaN reaches the result.
  const Tensor q = heads({1}, 1, 1), v = heads({3, 5}, 2, 1);
  EXPECT_EQ(attention(q, heads({-kInf, 0}, 2, 1), v, {.scale = 1}).item(), 5);
  EXPECT_EQ(attention(q, heads({-kInf, -kInf}, 2, 1), v, {.scale = 1}).item(), 0);
  EXPECT_TRUE(std::isnan(attention(q, heads({std::nan(""), 0}, 2, 1), v, {.scale = 1}).item()));
  EXPECT_TRUE(std::isnan(attention(q, heads({kInf, 0}, 2, 1), v, {.scale = 1}).item()));
}

TEST(Attention, OneKeyHasNoGradientOfItsScore) {
  Tensor q = uniform({3, 40, 2, 32}, DType::f32, 1), k = uniform({3, 1, 2, 32}, DType::f32, 2),
         v = uniform({3, 1, 2, 32}, DType::f32, 3);
  for (Tensor* leaf : {&q, &k, &v}) require_grad(*leaf);
  Tape tape;
  Tensor o = attention(q, k, v);
  tape.backward(std::vector{o}, std::vector{uniform(o.shape(), DType::f32, 4)});
  for (const double value : grad(q).to_vector<double>()) EXPECT_EQ(value, 0);
  for (const double value : grad(k).to_vector<double>()) EXPECT_EQ(value, 0);
}

TEST(Attention, BlasAgreesWithTheOracle) {
  // Several row tiles, both triangles. The bound is that of sums of some hundred f32 products, and of
  // operands and results that are rounded to the precision.
  for (const Precision& precision : {Precision(DType::f32), Precision(DType::f32, F32Math::tf32),
                                     Precision(DType::bf16), Precision(DType::f16)})
    for (const auto& [queries, keys] : {std::pair<int64_t, int64_t>{300, 1100}, {1100, 300}})
      for (const bool causal : {false, true}) {
        Tensor narrow[3], wide[3];
        for (int i = 0; i < 3; ++i) {
          narrow[i] = uniform({1, i == 0 ? queries : keys, 2, 48}, precision.dtype, uint64_t(i));
          wide[i] = narrow[i].to(DType::f64);
          require_grad(narrow[i]);
          require_grad(wide[i]);
        }
        const F32MathScope math(precision.math);
        Tape tape;
        auto ours = attention_with_lse(narrow[0], narrow[1], narrow[2], {.causal = causal});
        auto oracle = attention_with_lse(wide[0], wide[1], wide[2], {.causal = causal});
        const Tensor dout = uniform(ours.o.shape(), precision.dtype, 9);
        tape.backward(std::vector{ours.o, oracle.o}, std::vector{dout, dout.to(DType::f64)});
        const double rounding = precision == Precision(DType::f32) ? 0 : 4 * epsilon(precision);
        const auto near = [&](const Tensor& a, const Tensor& b) {
          const auto got = a.to_vector<double>(), want = b.to_vector<double>();
          double largest = 0;
          for (const double value : want)
            largest = std::max(largest, std::isfinite(value) ? std::abs(value) : 0);
          for (size_t i = 0; i < want.size(); ++i) {
            if (got[i] == want[i]) continue;  // infinities
            ASSERT_NEAR(got[i], want[i], (32 * epsilon(DType::f32) + rounding) * largest) << precision;
          }
        };
        near(ours.o.detach(), oracle.o.detach());
        near(ours.lse, oracle.lse);
        for (int i = 0; i < 3; ++i) near(grad(narrow[i]), grad(wide[i]));
      }
}

TEST(Attention, TilesRoundProbabilitiesAsOperands) {
  // One key of 64 has the score -1 and the value 1: its weight is rounded to TF32, the sum of all is not.
  const auto rows = [](double first) {
    std::vector<double> values(64 * 32, 0.0);
    values[0] = first;
    return Tensor::from(values, {1, 64, 1, 32}).to(DType::f32);
  };
  Tensor q = Tensor::zeros({1, 64, 1, 32}, DType::f32, kCpu);
  q.slice(3, 0, 1).fill(1);
  const F32MathScope math(F32Math::tf32);
  const Tensor o = attention(q, rows(-1), rows(1), {.scale = 1});
  const double weight = std::exp(-1.0), rounded = round_to_tf32(float(weight));
  ASSERT_GT(std::abs(rounded - weight) / weight, 1e-5);
  for (int64_t i = 0; i < 64; ++i)
    EXPECT_NEAR(o.at({0, i, 0, 0}).item(), rounded / (63 + weight), 1e-6 * rounded / 63);
}

TEST(Attention, ResultsLieAsTheirInputs) {
  // [L, B, H * D] rows, as a fused projection of time-major tokens makes them.
  const Tensor memory = uniform({5, 3, 3 * 2 * 4}, DType::f32, 1);
  const auto part = [&](int64_t which) {
    return memory.slice(2, which * 8, which * 8 + 8).reshape({5, 3, 2, 4}).transpose(0, 1);
  };
  Tensor q = part(0), k = part(1), v = part(2);
  const Tensor o = attention(q, k, v);
  EXPECT_TRUE(o.transpose(0, 1).can_reshape({5, 3, 8}));
  EXPECT_TRUE(o.transpose(0, 1).has_rows());
  EXPECT_EQ(o.layout().stride(0), 8);
  const Tensor plain = attention(q.clone(), k.clone(), v.clone());
  EXPECT_EQ(plain.to_vector<double>(), o.to_vector<double>());
  EXPECT_TRUE(plain.can_reshape({3, 5, 8}));
  // Odd heads: the pitch lies after all heads of a token, not after each.
  const Tensor odd = uniform({2, 3, 2, 5}, DType::bf16, 2);
  EXPECT_TRUE(attention(odd, odd, odd).can_reshape({2, 3, 10}));
}

TEST(Attention, AnyHeadSizeOnTheCpu) {
  for (const int64_t dim : {1, 5, 256}) {
    const auto result = gradcheck(
        [](const std::vector<Tensor>& in) {
          return std::vector{attention(in[0], in[1], in[2], {.causal = true})};
        },
        {uniform({1, 3, 1, dim}, DType::f64, 1), uniform({1, 4, 1, dim}, DType::f64, 2),
         uniform({1, 4, 1, dim}, DType::f64, 3)});
    EXPECT_TRUE(result.ok) << "D=" << dim << ": " << result.message;
  }
}

TEST(Attention, OneTensorThrice) {
  const auto result = gradcheck(
      [](const std::vector<Tensor>& in) {
        return std::vector{attention(in[0], in[0], in[0], {.causal = true})};
      },
      {uniform({2, 5, 2, 3}, DType::f64, 1)});
  EXPECT_TRUE(result.ok) << result.message;
}

TEST(Attention, Messages) {
  const Tensor q = uniform({2, 3, 2, 4}, DType::f32, 1), k = uniform({2, 5, 2, 4}, DType::f32, 2);
  const auto contains = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << "\"" << text << "\" lacks \"" << part << "\"";
  };
  contains(message_of([&] { attention(q, k, Tensor()); }), "undefined");
  contains(message_of([&] { attention(q.reshape({6, 2, 4}), k, k); }), "expected [B, Lq, H, D]");
  contains(message_of([&] { attention(q, k, q); }), "but v is f32[2, 3, 2, 4] on cpu");
  contains(message_of([&] { attention(q, k.slice(3, 0, 2), k.slice(3, 0, 2)); }), "B and D must agree");
  const Tensor three = uniform({2, 3, 3, 4}, DType::f32, 1);
  contains(message_of([&] { attention(three, k, k); }), "q has 3 heads, k and v 2; expected a multiple");
  contains(message_of([&] { attention(q, k.to(DType::f64), k.to(DType::f64)); }), "expected one dtype");
  contains(message_of([&] { attention(q, k, k, {.scale = -1}); }), "scale is -1; expected a positive number");
  contains(message_of([&] { attention(q, k, k, {.scale = kInf}); }), "scale is inf");
  contains(message_of([&] {
             const Tensor wide = uniform({1, 2, 1, 257}, DType::f32, 3);
             attention(wide, wide, wide);
           }),
           "head size 257 is not supported on device cpu; expected 1 ... 256");
  const Tensor whole = q.to(DType::i32);
  contains(message_of([&] { attention(whole, whole, whole); }), "dtype i32 is not supported on device cpu");
}

TEST(Attention, TilesOfTheLongestKeysAreWholeAndWorkedOnOnce) {
  // So many key blocks that nothing is cut, and their number times that of the blocks is beyond 2^31.
  constexpr int kHeads = 131, kGrid = 132;
  const AttentionSchedule schedule = attention_schedule(384, (1 << 30) - 1, kHeads, true, 192, 128, kGrid);
  ASSERT_EQ(schedule.rest(), 0);
  std::vector<int> whole(size_t(kHeads * schedule.tiles));
  for (int place = 0; place < kGrid; ++place) {
    AttentionWork work;
    for (int item = 0; attention_work(schedule, kGrid, place, item, work); ++item) {
      ASSERT_EQ(work.piece, -1);
      ASSERT_EQ(work.end, schedule.tile_blocks(work.tile));
      ++whole[size_t(work.head_row * schedule.tiles + work.tile)];
    }
  }
  EXPECT_EQ(whole, std::vector<int>(whole.size(), 1));
}

TEST(Attention, EveryKeyBlockIsWorkedOnOnce) {
  // Persistent blocks of the wgmma row: whole tiles, and the pieces of those that are cut, where the kernel
  // that adds them looks for them.
  constexpr int kRows = 12, kKeyRows = 8;
  for (const int grid : {1, 7, 132})
    for (const int heads : {1, 8, 33})
      for (const int queries : {1, 12, 25, 300, 700})
        for (const int keys : {1, 9, 24, 300, 632})
          for (const bool causal : {false, true}) {
            SCOPED_TRACE(testing::Message() << grid << " blocks, " << heads << " heads, " << queries << " x "
                                            << keys << ", causal " << causal);
            const AttentionSchedule schedule =
                attention_schedule(queries, keys, heads, causal, kRows, kKeyRows, grid);
            const int tiles = schedule.tiles, most = (keys + kKeyRows - 1) / kKeyRows;
            ASSERT_TRUE(schedule.rest() == 0 || schedule.share <= schedule.job_blocks);
            std::vector<int> seen(size_t(heads * tiles * most)), whole(size_t(heads * tiles));
            std::vector<int> pieces(size_t(kSplitsPerBlock * grid));
            for (int place = 0; place < grid; ++place) {
              AttentionWork work;
              for (int item = 0; attention_work(schedule, grid, place, item, work); ++item) {
                ASSERT_TRUE(0 <= work.head_row && work.head_row < heads && 0 <= work.tile &&
                            work.tile < tiles);
                ASSERT_LE(work.end, schedule.tile_blocks(work.tile));
                const int index = work.head_row * tiles + work.tile;
                for (int block = work.begin; block < work.end; ++block) ++seen[size_t(index * most + block)];
                whole[size_t(index)] += work.piece < 0;
                if (work.piece >= 0) ++pieces[size_t(work.piece)];
              }
            }
            for (int rest = 0; rest < schedule.rest(); ++rest)
              for (int which = 0; which < schedule.tiles_of_job(); ++which) {
                const AttentionSplits parts(schedule, rest, which);
                if (parts.tile >= 0 && parts.blind) ++whole[size_t(parts.head_row * tiles + parts.tile)];
                if (parts.none) continue;
                ++whole[size_t(parts.head_row * tiles + parts.tile)];
                for (int place = parts.first; place <= parts.last; ++place)
                  --pieces[size_t(parts.split_of(schedule, place))];
              }
            for (const int count : whole) ASSERT_EQ(count, 1);  // written by one
            for (const int count : pieces) ASSERT_EQ(count, 0);
            for (int index = 0; index < heads * tiles; ++index)
              for (int block = 0; block < most; ++block)
                ASSERT_EQ(seen[size_t(index * most + block)], block < schedule.tile_blocks(index % tiles));
          }
}

TEST(Attention, VariantsOfCuda) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const Tensor q = uniform({1, 20, 2, 64}, DType::f32, 1).to(Device::cuda());
  {
    const ForceVariant force("attention", "wgmma");
    EXPECT_NE(message_of([&] { attention(q, q, q); }).find("attention: variant wgmma needs"),
              std::string::npos);
  }
  {
    const ForceVariant force("attention", "wgma");
    EXPECT_NE(message_of([&] {
                attention(q, q, q);
              }).find("variant wgma does not exist; expected one of mma, wgmma"),
              std::string::npos);
  }
  // An expanded head has stride 0, which no tensor map encodes: variant mma takes it.
  const Tensor one = uniform({1, 20, 1, 64}, DType::bf16, 2).to(Device::cuda()).expand({1, 20, 2, 64});
  EXPECT_EQ(attention(one, one, one).shape(), one.shape());
}

TEST(Attention, RowsOfCudaAgree) {
  // Longer than the generic cases: several tiles and key blocks, tiles cut into pieces, blind queries. Both
  // rows round at the same places, o last: two units of it, and as much again for the weights.
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const Device gpu = Device::cuda(0);
  if (gpu.info().major != 9) GTEST_SKIP() << "skipped: one row only";
  struct Sizes {
    int64_t batch, queries, keys, heads, dim;
  };
  for (const Sizes& c : {Sizes{1, 1100, 1000, 2, 64},
                         {2, 700, 2300, 3, 128},
                         {1, 2300, 700, 2, 64},
                         {3, 260, 515, 5, 40},
                         {1, 5000, 129, 9, 64},
                         {40, 200, 400, 8, 64}})
    for (const DType dtype : {DType::bf16, DType::f16})
      for (const bool causal : {false, true}) {
        SCOPED_TRACE(testing::Message()
                     << c.queries << " x " << c.keys << " D " << c.dim << " causal " << causal);
        Tensor in[3];
        for (int i = 0; i < 3; ++i)
          in[i] = uniform({c.batch, i == 0 ? c.queries : c.keys, c.heads, c.dim}, dtype, uint64_t(i)).to(gpu);
        std::vector<double> o[2], lse[2];
        for (int row = 0; row < 2; ++row) {
          const ForceVariant force("attention", attention_variants()[size_t(row)]);
          const auto result = attention_with_lse(in[0], in[1], in[2], {.causal = causal, .scale = 1.5});
          o[row] = result.o.to_vector<double>();
          lse[row] = result.lse.to_vector<double>();
        }
        double largest = 0;
        for (const double value : o[0]) largest = std::max(largest, std::abs(value));
        for (size_t i = 0; i < o[0].size(); ++i)
          ASSERT_NEAR(o[1][i], o[0][i], 4 * epsilon(dtype) * largest) << i;
        for (size_t i = 0; i < lse[0].size(); ++i) {
          if (lse[0][i] == lse[1][i]) continue;  // infinities
          // Scores are sums of D products, which the two instructions round differently.
          ASSERT_NEAR(lse[1][i], lse[0][i], 64 * epsilon(DType::f32) * std::max(1.0, std::abs(lse[0][i])))
              << i;
        }
      }
}

TEST(Attention, FewQueriesAgreeOnAllRows) {
  // More keys than the generic cases have: many ranges of keys (row mma) and many sums of dQ (row wgmma).
  // Both rows round at the same places. What they sum in another order are f32 partial sums of up to 50,000
  // rounded products, which rounding of the result hides: two units of it for each row.
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const Device gpu = Device::cuda(0);
  if (gpu.info().major != 9) GTEST_SKIP() << "skipped: one row only";
  struct Sizes {
    int64_t batch, queries, keys, heads, kv_heads, dim;
  };
  for (const Sizes& c : {Sizes{1, 1, 50000, 2, 2, 64},
                         {1, 3, 20001, 4, 2, 128},
                         {2, 17, 7000, 3, 3, 64},
                         {1, 64, 9001, 2, 2, 128},
                         {1, 65, 9001, 2, 1, 64},
                         {3, 256, 5003, 4, 4, 128},
                         {300, 2, 700, 4, 4, 40}})
    for (const DType dtype : {DType::bf16, DType::f16})
      for (const bool causal : {false, true}) {
        SCOPED_TRACE(testing::Message()
                     << c.queries << " x " << c.keys << " D " << c.dim << " causal " << causal);
        std::vector<double> results[2][5];
        for (int row = 0; row < 2; ++row) {
          const ForceVariant force("attention", attention_variants()[size_t(row)]);
          Tensor in[3];
          for (int i = 0; i < 3; ++i) {
            in[i] = uniform({c.batch, i == 0 ? c.queries : c.keys, i == 0 ? c.heads : c.kv_heads, c.dim},
                            dtype, uint64_t(i))
                        .to(gpu);
            require_grad(in[i]);
          }
          Tape tape;
          auto [o, lse] = attention_with_lse(in[0], in[1], in[2], {.causal = causal, .scale = 0.3});
          tape.backward(std::vector{o}, std::vector{uniform(o.shape(), dtype, 4).to(gpu)});
          results[row][0] = o.to_vector<double>();
          results[row][1] = lse.to_vector<double>();
          for (int i = 0; i < 3; ++i) results[row][2 + i] = grad(in[i]).to_vector<double>();
        }
        for (int n = 0; n < 5; ++n) {
          double largest = 0;
          for (const double value : results[0][n]) largest = std::max(largest, std::abs(value));
          for (size_t i = 0; i < results[0][n].size(); ++i)
            ASSERT_NEAR(results[1][n][i], results[0][n][i],
                        4 * epsilon(n == 1 ? DType::f32 : dtype) * (n == 1 ? 16 : 1) * largest)
                << "result " << n << ", element " << i;
        }
      }
}

TEST(Attention, ManyShortSequencesAgreeOnAllRows) {
  // So many that a warp of row mma has several heads, which no generic case has: of uneven lengths, some
  // empty, of more keys than a tile. Both rows round at the same places: two units of it for each.
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const Device gpu = Device::cuda(0);
  if (gpu.info().major != 9) GTEST_SKIP() << "skipped: one row only";
  constexpr int64_t kCount = 600, kHeads = 66, kKeyHeads = 33;
  std::vector<int64_t> cu_seqlens_q{0}, cu_seqlens_k{0};
  for (int64_t s = 0; s < kCount; ++s) {
    cu_seqlens_q.push_back(cu_seqlens_q.back() + s * 7 % 13);
    cu_seqlens_k.push_back(cu_seqlens_k.back() + s * 5 % 41);
  }
  const AttentionSequences sequences{Tensor::from(cu_seqlens_q, {kCount + 1}).to(gpu),
                                     Tensor::from(cu_seqlens_k, {kCount + 1}).to(gpu)};
  for (const int64_t dim : {16, 72})
    for (const bool causal : {false, true}) {
      SCOPED_TRACE(testing::Message() << "D " << dim << " causal " << causal);
      const Tensor q = uniform({cu_seqlens_q.back(), kHeads, dim}, DType::bf16, 1).to(gpu),
                   k = uniform({cu_seqlens_k.back(), kKeyHeads, dim}, DType::bf16, 2).to(gpu),
                   v = uniform({cu_seqlens_k.back(), kKeyHeads, dim}, DType::bf16, 3).to(gpu);
      std::vector<double> o[2], lse[2];
      for (int row = 0; row < 2; ++row) {
        const ForceVariant force("attention", attention_variants()[size_t(row)]);
        const auto result = attention_with_lse(q, k, v, sequences, {.causal = causal, .scale = 1.5});
        o[row] = result.o.to_vector<double>();
        lse[row] = result.lse.to_vector<double>();
      }
      double largest = 0, off = 0, lse_off = 0;
      for (const double value : o[0]) largest = std::max(largest, std::abs(value));
      for (size_t i = 0; i < o[0].size(); ++i)
        if (!(std::abs(o[1][i] - o[0][i]) <= off)) off = std::abs(o[1][i] - o[0][i]);
      for (size_t i = 0; i < lse[0].size(); ++i)
        if (lse[0][i] != lse[1][i] && !(std::abs(lse[1][i] - lse[0][i]) <= lse_off))
          lse_off = std::abs(lse[1][i] - lse[0][i]);
      EXPECT_GT(largest, 0);
      EXPECT_LE(off, 4 * epsilon(DType::bf16) * largest);
      // Scores are sums of D products, which the two instructions round differently; up to 20 here.
      EXPECT_LE(lse_off, 64 * epsilon(DType::f32) * 20);
    }
}

TEST(Attention, HeadSizesOfCuda) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const Tensor q = uniform({1, 2, 1, 136}, DType::f32, 1).to(Device::cuda());
  EXPECT_NE(message_of([&] { attention(q, q, q); }).find("expected 1 ... 128"), std::string::npos);
  const Tensor wide = uniform({1, 2, 1, 8}, DType::f64, 1).to(Device::cuda());
  EXPECT_NE(message_of([&] { attention(wide, wide, wide); }).find("f64 is not supported on device cuda"),
            std::string::npos);
  // Smaller heads than the smallest tile.
  const Tensor small = uniform({2, 70, 3, 8}, DType::f32, 2);
  const auto ours = attention(small.to(Device::cuda()), small.to(Device::cuda()), small.to(Device::cuda()));
  const auto got = ours.to_vector<double>(), want = attention(small, small, small).to_vector<double>();
  for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], 16 * epsilon(DType::f32));
}

}  // namespace
}  // namespace tessera::ops

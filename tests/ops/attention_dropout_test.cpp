#include "ops/attention/attention_dropout.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "autograd/tape.h"
#include "ops/attention/attention.h"
#include "ops/attention/attention_variants.h"
#include "runtime/capture.h"
#include "tests/errors.h"
#include "tests/ops/tensors.h"

/// Dropout of probabilities, beyond the generic cases: the generator, the chances, that places decide and
/// nothing else, and that forward and backward agree, eagerly and in a replayed graph.

namespace tessera::ops {
namespace {

/// [B, L, H, D] whose row i is 1 at column i and 0 elsewhere: as values it shows the probabilities.
Tensor identity_values(int64_t batch, int64_t length, int64_t heads, int64_t dim) {
  std::vector<double> values(size_t(batch * length * heads * dim), 0.0);
  for (int64_t row = 0; row < batch * length * heads; ++row)
    values[size_t(row * dim + row / heads % length)] = 1;
  return Tensor::from(values, {batch, length, heads, dim});
}

TEST(AttentionDropout, IsPhiloxAfterSevenRoundsAndAfterTen) {
  // Known answers of the generator's authors (Random123, kat_vectors).
  const PhiloxKeys<10> zero = AttentionDropout(0.5, {.seed = 0}).philox,
                       one = AttentionDropout(0.5, {.seed = ~uint64_t{0}}).philox;
  const Uint4 zeros = zero.rounds<0, 7>({{0, 0, 0, 0}}), ones = one.rounds<0, 7>({{~0u, ~0u, ~0u, ~0u}});
  const uint32_t want_zeros[4] = {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48};
  const uint32_t want_ones[4] = {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662};
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(zeros.word[i], want_zeros[i]);
    EXPECT_EQ(ones.word[i], want_ones[i]);
  }
  // Three more rounds make it the generator of runtime/philox.h.
  const uint64_t seed = 0x123456789abcdef0, offset = 0xfedcba9876543210, index = 0x0f1e2d3c4b5a6978;
  const PhiloxKeys<10> keys(seed);
  const Uint4 ten = keys.rounds<7, 10>(keys.rounds<0, 7>(
                  {{uint32_t(index), uint32_t(index >> 32), uint32_t(offset), uint32_t(offset >> 32)}})),
              house = philox(seed, offset, index);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(ten.word[i], house.word[i]);
}

TEST(AttentionDropout, ComparesDigitsWithTheThreshold) {
  // Each bit of a word by its definition: a number of eight digits, inverted bits of Philox after 7 and after
  // 10 rounds.
  for (const double p : {0.1, 0.5, 1.0 / 256, 0.75, 0.998}) {
    const AttentionDropout drop(p, {.seed = 11, .delta = 3});
    const uint32_t threshold = AttentionDropout::threshold(p);
    EXPECT_EQ(double(drop.keep), 1 - threshold / 256.0);
    for (uint32_t place = 0; place < 20; ++place) {
      const uint32_t word = drop.word(3, 5, 7, place);
      const Uint4 seven = drop.philox.rounds<0, 7>({{place, 7, 3, 5}}),
                  blocks[2] = {seven, drop.philox.rounds<7, 10>(seven)};
      for (int n = 0; n < 32; ++n) {
        uint32_t number = 0;
        for (int digit = 0; digit < 8; ++digit)
          number |= (~blocks[digit / 4].word[digit % 4] >> n & 1u) << digit;
        EXPECT_EQ(word >> n & 1u, uint32_t(number < threshold));
      }
    }
  }
  // Places of a block's 2 x 16 probabilities: each bit once.
  uint32_t bits = 0;
  for (const int64_t i : {3, 11})
    for (int64_t j = 0; j < 16; ++j) bits |= 1u << AttentionDropout::place_of(i, j);
  EXPECT_EQ(bits, ~0u);
}

TEST(AttentionDropout, ChancesAreRounded) {
  EXPECT_EQ(AttentionDropout::threshold(0.1), 26u);
  EXPECT_EQ(AttentionDropout::threshold(0.5), 128u);
  EXPECT_EQ(AttentionDropout::threshold(0.999999), 255u);
  EXPECT_EQ(AttentionDropout::threshold(0.0019), 0u);
  EXPECT_EQ(applied_dropout(0), 0);
  EXPECT_EQ(applied_dropout(0.1), 26.0 / 256);
  EXPECT_EQ(applied_dropout(0.999999), 255.0 / 256);
  // A chance that would be rounded to 0 is refused and draws nothing; 0 itself draws nothing.
  Rng rng(1);
  const Tensor x = uniform({1, 2, 1, 4}, DType::f64, 1);
  EXPECT_EQ(
      message_of([&] { attention(x, x, x, {.dropout = 0.0019, .rng = rng}); }),
      "attention: dropout 0.0019 would be rounded to 0 (it is applied in steps of 1/256); expected 0, or "
      "at least 1/512 = 0.001953");
  attention(x, x, x, {.dropout = 0, .rng = rng});
  EXPECT_EQ(rng.state().offset, 0u);
  attention(x, x, x, {.dropout = 0.002, .rng = rng});
  EXPECT_EQ(rng.state().offset, 1u);
}

TEST(AttentionDropout, KeepsNaNVisible) {
  // A NaN in q reaches all of that query's row of o, one in k the rows of all queries, and one in v its
  // column of all queries, dropped or not.
  const int64_t length = 200, dim = 16;
  std::vector<Device> places{Device::cpu()};
  if (Device::cuda_count() > 0) places.push_back(Device::cuda(0));
  for (const Device device : places)
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
      for (const int where : {0, 1, 2}) {
        Tensor in[3];
        for (int n = 0; n < 3; ++n) {
          in[n] = uniform({1, length, 1, dim}, DType::f32, uint64_t(n));
          if (n == where) in[n].data<float>()[7 * in[n].layout().stride(1) + 3] = std::nanf("");
          in[n] = in[n].to(dtype).to(device);
        }
        Rng rng(3);
        const auto o = attention(in[0], in[1], in[2], {.dropout = 0.9, .rng = rng}).to_vector<float>();
        for (int64_t i = 0; i < length; ++i)
          for (int64_t d = 0; d < dim; ++d)
            if (where == 0 ? i == 7 : where == 1 || d == 3)
              EXPECT_TRUE(std::isnan(o[size_t(i * dim + d)])) << device.name() << " " << dtype << " "
                                                              << "qkv"[where] << " " << i << " " << d;
      }
}

TEST(AttentionDropout, Messages) {
  const Tensor x = uniform({1, 2, 1, 4}, DType::f64, 1);
  Rng rng(1);
  for (const double p : {-0.1, 1.0, std::nan("")})
    EXPECT_NE(message_of([&] { attention(x, x, x, {.dropout = p, .rng = rng}); }).find("expected 0 <= p < 1"),
              std::string::npos);
  EXPECT_NE(
      message_of([&] { attention(x, x, x, {.dropout = 0.1}); }).find("needs a source of random numbers"),
      std::string::npos);
}

/// The probabilities without dropout, what dropout makes of them, and the gradient of v for dO = 1, all seen
/// through identities: [B, Lq, H, Lk].
struct Seen {
  Tensor whole, dropped, lse, whole_lse;
};
Seen look(const Tensor& q, const Tensor& k, const AttentionOptions& options) {
  const Tensor v = identity_values(k.size(0), k.size(1), k.size(2), q.size(3)).to(q.dtype()).to(q.device());
  AttentionOptions plain = options;
  plain.dropout = 0;
  const AttentionResult dropped = attention_with_lse(q, k, v, options),
                        whole = attention_with_lse(q, k, v, plain);
  return {whole.o, dropped.o, dropped.lse, whole.lse};
}

TEST(AttentionDropout, DropsWithItsChanceAndRescales) {
  // 2 x 3 x 96 x 96 probabilities of chance 77/256: a deviation of sqrt(p (1 - p) / n) = 0.002; five of them.
  // Neighbours in a row, a column and another head: independent, so both are dropped with probability p^2.
  const Tensor q = uniform({2, 96, 3, 96}, DType::f64, 1), k = uniform({2, 96, 3, 96}, DType::f64, 2);
  Rng rng(5);
  const Seen seen = look(q, k, {.dropout = 0.3, .rng = rng});
  EXPECT_EQ(seen.lse.to_vector<double>(), seen.whole_lse.to_vector<double>());
  const auto whole = seen.whole.to_vector<double>(), dropped = seen.dropped.to_vector<double>();
  std::vector<int> lost(whole.size());
  int64_t count = 0;
  for (size_t at = 0; at < whole.size(); ++at) {
    lost[at] = dropped[at] == 0;
    count += lost[at];
    if (!lost[at]) EXPECT_NEAR(dropped[at], whole[at] * 256 / 179, 1e-14);
  }
  const double p = 77.0 / 256, all = double(whole.size());
  EXPECT_NEAR(double(count) / all, p, 5 * std::sqrt(p * (1 - p) / all));
  for (const size_t step : {size_t{1}, size_t{2}, size_t{8}, size_t{16}, size_t{96}, size_t{3 * 96},
                            size_t{8 * 3 * 96}, size_t{16 * 3 * 96}, size_t{96 * 3 * 96}}) {
    int64_t both = 0;
    for (size_t at = 0; at + step < lost.size(); ++at) both += lost[at] & lost[at + step];
    const double pairs = all - double(step), chance = p * p;
    EXPECT_NEAR(double(both) / pairs, chance, 5 * std::sqrt(chance * (1 - chance) / pairs)) << step;
  }
}

TEST(AttentionDropout, PlacesDecideAndStreamsDiffer) {
  const int64_t length = 40;
  const Tensor q = uniform({3, length, 2, 48}, DType::f64, 1), k = uniform({3, length, 2, 48}, DType::f64, 2);
  const auto dropped = [](const Tensor& seen) {
    std::vector<int> lost;
    for (const double value : seen.to_vector<double>()) lost.push_back(value == 0);
    return lost;
  };
  Rng rng(5), same(5), other(6);
  const auto first = dropped(look(q, k, {.dropout = 0.5, .rng = rng}).dropped);
  EXPECT_EQ(dropped(look(k, q, {.scale = 2, .dropout = 0.5, .rng = same}).dropped), first);
  EXPECT_NE(dropped(look(q, k, {.dropout = 0.5, .rng = rng}).dropped), first);  // the next stream
  EXPECT_NE(dropped(look(q, k, {.dropout = 0.5, .rng = other}).dropped), first);
  // Sequences of one length drop what batches drop, and fewer key heads what as many do.
  Rng packed(5);
  const auto flat = [&](const Tensor& x) { return x.reshape({3 * length, 2, 48}); };
  const Tensor v = identity_values(3, length, 2, 48),
               starts = Tensor::from(std::vector<int64_t>{0, 40, 80, 120}, {4});
  EXPECT_EQ(dropped(attention(flat(q), flat(k), flat(v), AttentionSequences{starts},
                              {.dropout = 0.5, .rng = packed})),
            first);
  Rng grouped(5);
  EXPECT_EQ(dropped(look(q, k.slice(2, 0, 1), {.dropout = 0.5, .rng = grouped}).dropped), first);
}

TEST(AttentionDropout, BackwardAndReplaysFollowForward) {
  // Seen through identities, o is Z P / (1 - p) and dv its transpose, whatever row, dtype and length: the
  // zeros say that both draw the same. A replay draws others.
  std::vector<Device> devices{Device::cpu()};
  if (Device::cuda_count() > 0) devices.push_back(Device::cuda(0));
  for (const Device device : devices)
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const int row : {0, 1})
        for (const int64_t length : {64, 128}) {
          if (device.is_cpu() ? row > 0 : row > 0 && (dtype == DType::f32 || device.info().major != 9))
            continue;
          SCOPED_TRACE(testing::Message()
                       << device.name() << " " << dtype << " row " << row << " " << length);
          const auto on = [&](const Tensor& x) { return x.to(dtype).to(device); };
          Tensor q = on(uniform({2, length, 2, length}, DType::f32, 1)),
                 k = on(uniform({2, length, 2, length}, DType::f32, 2)),
                 v = on(identity_values(2, length, 2, length));
          const Tensor dout = on(identity_values(2, length, 2, length));
          for (Tensor* leaf : {&q, &k, &v}) require_grad(*leaf);
          Rng rng(9);
          Tensor o, dv;
          const ForceVariant force("attention", attention_variants()[size_t(row)]);
          const auto pass = [&] {
            Tape tape;
            Tensor out = attention(q, k, v, {.scale = 0.1, .dropout = 0.25, .rng = rng});
            tape.backward(std::vector{out}, std::vector{dout});
            o = out.detach();
            dv = grad(v);
            zero_grad(v), zero_grad(q), zero_grad(k);
          };
          std::vector<std::vector<double>> drawn;
          const auto check_pass = [&] {
            const auto seen = o.to_vector<double>(), turned = dv.to_vector<double>();
            for (int64_t b = 0; b < 2; ++b)
              for (int64_t h = 0; h < 2; ++h)
                for (int64_t i = 0; i < length; ++i)
                  for (int64_t j = 0; j < length; ++j) {
                    const auto at = [&](int64_t row, int64_t column) {
                      return size_t(((b * length + row) * 2 + h) * length + column);
                    };
                    ASSERT_EQ(seen[at(i, j)] == 0, turned[at(j, i)] == 0) << b << h << " " << i << " " << j;
                  }
            for (const auto& before : drawn) EXPECT_NE(before, seen);
            drawn.push_back(seen);
          };
          if (device.is_cpu()) {
            for (int call = 0; call < 2; ++call) pass(), check_pass();
            continue;
          }
          Captured step(device, pass);
          for (int call = 0; call < 4; ++call) {
            step();
            device.synchronize();
            check_pass();
          }
          EXPECT_TRUE(step.is_graph());
        }
}

}  // namespace
}  // namespace tessera::ops

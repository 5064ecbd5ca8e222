#include "nn/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "nn/prefix_block.h"
#include "ops/attention/attention.h"
#include "ops/pointwise/pointwise.h"
#include "ops/random/random.h"
#include "ops/reduce/reduce.h"
#include "ops/shape/shape.h"
#include "tests/errors.h"
#include "tests/nn/random.h"

namespace tessera::nn {
namespace {

TEST(Sequences, CountTheirTokens) {
  const Sequences some{{3, 1, 2}};
  EXPECT_EQ(some.tokens(), 6);
  EXPECT_EQ(some.longest(), 3);
  EXPECT_FALSE(some.is_uniform());
  EXPECT_TRUE(Sequences::uniform(2, 5).is_uniform());
  EXPECT_TRUE(Sequences{}.is_uniform());
  EXPECT_EQ(some.positions(10, Device::cpu()).to_vector<int64_t>(),
            (std::vector<int64_t>{10, 11, 12, 10, 10, 11}));
  EXPECT_EQ(some.first_rows(Device::cpu()).to_vector<int64_t>(), (std::vector<int64_t>{0, 3, 4}));
  EXPECT_EQ(some.cu_seqlens(Device::cpu()).to_vector<int64_t>(), (std::vector<int64_t>{0, 3, 4, 6}));
  EXPECT_EQ(message_of([&] { some.check_tokens("model", 7); }),
            "model: 3 sequences of 6 tokens in all, but 7 are given");
  EXPECT_EQ(message_of([&] {
              Sequences{{3, 0}}.check_tokens("model", 3);
            }),
            "model: sequence 1 has 0 tokens; expected 1 or more");
}

/// What `attend` promises, by its definition: token by token, head by head.
std::vector<double> plainly(const Tensor& q, const Tensor& k, const Tensor& v, const Sequences& sequences,
                            bool causal) {
  const auto Q = q.to_vector<double>(), K = k.to_vector<double>(), V = v.to_vector<double>();
  const int64_t heads = q.size(1), groups = heads / k.size(1), head = q.size(2), kv = k.size(1);
  std::vector<double> out(Q.size());
  int64_t begin = 0;
  for (const int64_t length : sequences.lengths) {
    for (int64_t i = begin; i < begin + length; ++i)
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t last = causal ? i : begin + length - 1;
        std::vector<double> weights;
        double total = 0;
        for (int64_t j = begin; j <= last; ++j) {
          double score = 0;
          for (int64_t c = 0; c < head; ++c)
            score += Q[size_t((i * heads + h) * head + c)] * K[size_t((j * kv + h / groups) * head + c)];
          weights.push_back(std::exp(score / std::sqrt(double(head))));
          total += weights.back();
        }
        for (int64_t j = begin; j <= last; ++j)
          for (int64_t c = 0; c < head; ++c)
            out[size_t((i * heads + h) * head + c)] +=
                weights[size_t(j - begin)] / total * V[size_t((j * kv + h / groups) * head + c)];
      }
    begin += length;
  }
  return out;
}

TEST(Attend, StaysWithinItsSequenceAndSharesKeyHeads) {
  for (const Sequences& sequences : {Sequences{{4, 4}}, Sequences{{3, 1, 4}}})
    for (const int64_t kv_heads : {4, 2, 1})
      for (const bool causal : {false, true}) {
        const Tensor q = random({8, 4, 6}, 1), k = random({8, kv_heads, 6}, 2),
                     v = random({8, kv_heads, 6}, 3);
        const auto y = attend(q, k, v, sequences, {.causal = causal}).to_vector<double>();
        const auto wanted = plainly(q, k, v, sequences, causal);
        for (size_t i = 0; i < wanted.size(); ++i)
          EXPECT_NEAR(y[i], wanted[i], 1e-12) << i;  // f64, sums of 8
      }
  EXPECT_EQ(message_of([&] {
              attend(random({2, 3, 4}, 1), random({2, 2, 4}, 2), random({2, 2, 4}, 3), {{2}}, {});
            }),
            "attend: 3 query heads are not a multiple of 2 key heads");
}

TEST(Attend, ABiasIsAddedToTheScores) {
  // -inf before the last key: the sequences of 4 are as if they were cut to 3 keys. Other lengths have no
  // place for it.
  const Tensor q = random({8, 4, 6}, 1), k = random({8, 2, 6}, 2), v = random({8, 2, 6}, 3);
  Tensor bias = Tensor::zeros({4}, q.dtype());
  bias.slice(0, 3, 4).fill(-std::numeric_limits<double>::infinity());
  const auto y = attend(q, k, v, Sequences{{4, 4}}, {.bias = bias}).to_vector<double>();
  for (const int64_t first : {0, 4}) {
    const auto rows = [&](const Tensor& x, int64_t count) { return x.slice(0, first, first + count); };
    const auto wanted = ops::attention(rows(q, 4).reshape({1, 4, 4, 6}), rows(k, 3).reshape({1, 3, 2, 6}),
                                       rows(v, 3).reshape({1, 3, 2, 6}))
                            .to_vector<double>();
    for (size_t i = 0; i < wanted.size(); ++i) EXPECT_NEAR(y[size_t(first) * 24 + i], wanted[i], 1e-12) << i;
  }
  EXPECT_NE(message_of([&] {
              attend(q, k, v, Sequences{{3, 5}}, {.bias = bias});
            }).find("a bias cannot be combined with packed sequences"),
            std::string::npos);
}

TEST(Attend, LengthsOnTheDevice) {
  const Tensor q = random({8, 4, 6}, 1), k = random({8, 2, 6}, 2), v = random({8, 2, 6}, 3);
  const Sequences some{{3, 1, 4}};
  const Tensor cu_seqlens = some.cu_seqlens(Device::cpu());
  const auto wanted = attend(q, k, v, some, {.causal = true}).to_vector<double>();
  EXPECT_EQ(attend(q, k, v, cu_seqlens, {.causal = true}).to_vector<double>(), wanted);
  // With one stream the same probabilities are dropped.
  Rng rng(1), same(1);
  const Dropout dropout(0.5, rng), dropout_again(0.5, same);
  const auto some_dropped = attend(q, k, v, some, {.dropout = &dropout}).to_vector<double>();
  EXPECT_EQ(attend(q, k, v, cu_seqlens, {.dropout = &dropout_again}).to_vector<double>(), some_dropped);
  EXPECT_NE(attend(q, k, v, some, {}).to_vector<double>(), some_dropped);
}

TEST(SelfAttention, HeadsThatDoNotDivideTheWidth) {
  Rng rng(1);
  const auto make = [&](const SelfAttentionOptions& options) { return SelfAttention(8, rng, options); };
  expect_error([&] { make({.heads = 0}); }, {"self attention: 0 heads"});
  expect_error([&] { make({.heads = 3}); }, {"self attention: d 8", "number of heads 3"});
  expect_error([&] { make({.heads = 4, .kv_heads = 3}); }, {"self attention: 4 heads and 3 kv_heads"});
  expect_error([&] { make({.heads = 4, .head_dim = -2}); }, {"self attention: head_dim is -2"});
  EXPECT_EQ(make({.heads = 3, .head_dim = 5}).out.in, 15);
}

TEST(SelfAttention, StartsAsItsLinearLayersDo) {
  Rng rng(1), same(1), other(2);
  const SelfAttention layer(8, rng, {.heads = 2, .kv_heads = 1});
  const Linear qkv(8, 16, same), out(8, 8, same);
  for (const auto& [got, want] : {std::pair(layer.qkv, qkv), std::pair(layer.out, out)}) {
    EXPECT_EQ(got.weight.to_vector<float>(), want.weight.to_vector<float>());
    EXPECT_EQ(got.bias.to_vector<float>(), want.bias.to_vector<float>());
  }
  EXPECT_NE(qkv.weight.to_vector<float>(), std::vector<float>(8 * 16));
  const SelfAttention blank(8, other, {.heads = 2, .init = Init::zeros});
  EXPECT_EQ(blank.out.weight.to_vector<float>(), std::vector<float>(8 * 8));
}

TEST(PrefixBlock, NeedsTheWidthOfItsMlp) {
  Rng rng(1);
  const auto make = [&](int64_t hidden) { return PrefixBlock(8, hidden, rng, {.heads = 2}); };
  expect_error([&] { make(0); }, {"prefix block: hidden is 0", "1 or more", "4 d = 32"});
  expect_error([&] { make(-3); }, {"prefix block: hidden is -3"});
  EXPECT_EQ(make(1).mlp.down.in, 1);
}

TEST(SelfAttention, LayersShareCuSeqlens) {
  Rng rng(1);
  SelfAttention layer(8, rng, {.heads = 2, .kv_heads = 1, .causal = true, .dtype = DType::f64});
  const Tensor x = random({6, 8}, 4);
  const AttentionPass pass{.sequences = {{4, 2}}};
  const auto wanted = layer(x, pass).to_vector<double>();
  ASSERT_TRUE(pass.made_cu_seqlens.defined());
  const Tensor first = pass.made_cu_seqlens;
  layer(x, pass);
  EXPECT_TRUE(pass.made_cu_seqlens.shares_storage(first));
  // Given for a replayed step: they take precedence over the host's lengths.
  EXPECT_EQ(layer(x, {.sequences = {{3, 3}}, .cu_seqlens = first}).to_vector<double>(), wanted);
}

TEST(SelfAttention, MakesTheRowsThatAreWanted) {
  Rng rng(1);
  SelfAttention layer(8, rng, {.heads = 2, .dtype = DType::f64});
  const Tensor x = random({6, 8}, 4), rows = Tensor::from(std::vector<int64_t>{4, 0, 5}, {3});
  for (const std::vector<int64_t>& lengths : {std::vector<int64_t>{4, 2}, {3, 3}}) {
    const Tensor all = layer(x, {.sequences = {lengths}}),
                 some = layer(x, {.sequences = {lengths}, .rows = rows});
    ASSERT_EQ(some.shape(), Shape({3, 8}));
    for (int64_t i = 0; i < 3; ++i) {
      const auto got = some.detach().select(0, i).to_vector<double>(),
                 want = all.detach().select(0, rows.to_vector<int64_t>()[size_t(i)]).to_vector<double>();
      for (size_t c = 0; c < want.size(); ++c) EXPECT_NEAR(got[c], want[c], 1e-13);  // another order of sums
    }
  }
}

TEST(Attend, GradientsOfSharedKeyHeadsAreSums) {
  // d/dk of the shared form is the sum over the copies of the form with copies.
  const Tensor q = random({5, 4, 4}, 1);
  const auto gradient = [&](Tensor k, bool shared) {
    require_grad(k);
    Tape tape;
    const Tensor keys = shared ? k : ops::reshape(k, k.shape());
    const Tensor y = attend(q, keys, keys, {{5}}, {.causal = true});
    tape.backward(ops::sum(ops::mul(y, y)));
    return grad(k);
  };
  const Tensor k = random({5, 2, 4}, 2);
  const Tensor copies = k.reshape({5, 2, 1, 4}).expand({5, 2, 2, 4}).clone().reshape({5, 4, 4});
  const auto shared = gradient(k.clone(), true).to_vector<double>(),
             apart = gradient(copies, false).to_vector<double>();
  for (size_t token = 0; token < 5; ++token)
    for (size_t h = 0; h < 2; ++h)
      for (size_t c = 0; c < 4; ++c)
        EXPECT_NEAR(shared[(token * 2 + h) * 4 + c],
                    apart[(token * 4 + 2 * h) * 4 + c] + apart[(token * 4 + 2 * h + 1) * 4 + c], 1e-12);
}

TEST(Attend, DropoutOfProbabilitiesKeepsTheMean) {
  // Inverted dropout: over many masks the result is that without. 4,000 masks of p = 0.3 leave a deviation of
  // about sqrt(0.3 / 0.7 / 4000) = 1 % of a value near 1; 6 % would be six deviations. ops::attention drops
  // with 77 / 256.
  Rng rng(5);
  Dropout dropout(0.3, rng);
  const Tensor q = random({1, 1, 4}, 1), k = random({1, 1, 4}, 2),
               v = Tensor::full({1, 1, 4}, 1, DType::f64, Device::cpu());
  double sum = 0;
  int zeros = 0;
  for (int i = 0; i < 4000; ++i) {
    const double value = attend(q, k, v, {{1}}, {.causal = true, .dropout = &dropout}).to_vector<double>()[0];
    EXPECT_TRUE(value == 0 || std::abs(value - 256.0 / 179) < 1e-12);
    sum += value;
    zeros += value == 0;
  }
  EXPECT_NEAR(sum / 4000, 1, 0.06);
  EXPECT_GT(zeros, 0);
  dropout.training = false;
  EXPECT_EQ(attend(q, k, v, {{1}}, {.dropout = &dropout}).to_vector<double>()[0], 1);
}

TEST(KvCache, AFewTokensAtATimeEqualAllAtOnce) {
  for (const int64_t kv_heads : {4, 2, 1}) {
    const Tensor q = random({2, 6, 4, 8}, 1), k = random({2, 6, kv_heads, 8}, 2),
                 v = random({2, 6, kv_heads, 8}, 3);
    const auto flat = [](const Tensor& x) {
      return x.clone().reshape({x.size(0) * x.size(1), x.size(2), x.size(3)});
    };
    const Tensor whole =
        attend(flat(q), flat(k), flat(v), Sequences::uniform(2, 6), {.causal = true}).reshape({2, 6, 4, 8});
    KvCache cache(1, 2, 6, kv_heads, 8, DType::f64, Device::cpu());
    EXPECT_EQ(message_of([&] { cache.begin(Sequences::uniform(3, 4)); }), "KvCache: 3 sequences, made for 2");
    EXPECT_EQ(message_of([&] { cache.begin(Sequences::uniform(2, 7)); }),
              "KvCache: 7 tokens are more than its capacity of 6");
    cache.begin(Sequences::uniform(2, 3));
    cache.store(0, flat(k.slice(1, 0, 3)), flat(v.slice(1, 0, 3)), Sequences::uniform(2, 3));
    cache.advance(3);
    EXPECT_EQ(message_of([&] { cache.begin(Sequences::uniform(2, 3)); }),
              "KvCache: holds 3 tokens; a prompt needs an empty one");
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{3, 4}, {4, 6}}) {
      const auto part = [&, b = begin, e = end](const Tensor& x) { return x.slice(1, b, e); };
      const Tensor positions = cache.begin(end - begin);
      EXPECT_EQ(positions.select(1, 0).to_vector<int32_t>(),
                (std::vector<int32_t>{int32_t(begin), int32_t(begin)}));
      const Tensor y = cache.attend(0, ops::concat({part(q), part(k), part(v)}, 2), {});
      cache.advance(end - begin);
      EXPECT_LT(largest_difference(y, part(whole)), 1e-12) << kv_heads << " " << begin;
    }
    EXPECT_EQ(message_of([&] { cache.begin(1); }), "KvCache: 7 tokens are more than its capacity of 6");
    EXPECT_EQ(message_of([&] { cache.begin(17); }), "KvCache: 17 tokens in a pass; expected 1 to 16");
    cache.truncate(3);
    EXPECT_EQ(cache.length(), 3);
    EXPECT_EQ(cache.lengths().to_vector<int32_t>(), (std::vector<int32_t>{3, 3}));
    EXPECT_EQ(message_of([&] { cache.truncate(4); }), "KvCache: cannot keep 4 of 3 tokens");
  }
}

TEST(KvCache, SequencesOfDifferentLengthsGoOnWhereTheyEnd) {
  const Sequences given{{3, 1}};
  const Tensor q = random({2, 5, 4, 8}, 1), k = random({2, 5, 2, 8}, 2), v = random({2, 5, 2, 8}, 3);
  const auto packed = [](const Tensor& x) { return x.clone().reshape({10, x.size(2), 8}); };
  const Tensor keys = packed(k), values = packed(v);
  KvCache cache(1, 2, 5, 2, 8, DType::f64, Device::cpu());
  const auto first = [&](const Tensor& x) {  // three rows of the first sequence, one of the second
    const Tensor four = Tensor::empty({4, 2, 8}, DType::f64, Device::cpu());
    four.slice(0, 0, 3).copy_from(x.slice(0, 0, 3));
    four.slice(0, 3, 4).copy_from(x.slice(0, 5, 6));
    return four;
  };
  cache.begin(given);
  cache.store(0, first(keys), first(values), given);
  cache.advance(3);
  EXPECT_EQ(cache.length(), 3);
  EXPECT_EQ(cache.begin(1).to_vector<int32_t>(), (std::vector<int32_t>{3, 1}));
  const auto next = [&](const Tensor& x) {
    const Tensor two = Tensor::empty({2, 1, x.size(2), 8}, DType::f64, Device::cpu());
    two.select(0, 0).copy_from(x.select(0, 0).slice(0, 3, 4));
    two.select(0, 1).copy_from(x.select(0, 1).slice(0, 1, 2));
    return two;
  };
  const Tensor y = cache.attend(0, ops::concat({next(q), next(k), next(v)}, 2), {});
  const auto alone = [&](int64_t b, int64_t length) {
    const auto part = [&](const Tensor& x) { return x.select(0, b).slice(0, 0, length).clone(); };
    return attend(part(q), part(k), part(v), {{length}}, {.causal = true}).slice(0, length - 1, length);
  };
  EXPECT_LT(largest_difference(y.select(0, 0), alone(0, 4)), 1e-12);
  EXPECT_LT(largest_difference(y.select(0, 1), alone(1, 2)), 1e-12);
}

}  // namespace
}  // namespace tessera::nn

#include "ops/decode_attention/decode_attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ops/attention/attention.h"
#include "ops/decode_attention/rope_to_cache.h"
#include "ops/rope/rope.h"
#include "ops/rope/rope_table.h"
#include "runtime/capture.h"
#include "tests/errors.h"
#include "tests/ops/expect.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

Tensor lengths_of(const std::vector<int32_t>& values, Device device) {
  return Tensor::from(values, {int64_t(values.size())}, device);
}

TEST(DecodeAttention, EqualsCausalAttentionOverTheRowsThatCount) {
  for (const Device device : devices()) {
    const Tensor q = sines({2, 3, 4, 8}, device), k = sines({2, 12, 4, 8}, device, 2),
                 v = sines({2, 12, 4, 8}, device, 3);
    const Tensor o = decode_attention(q, k, v, lengths_of({7, 12}, device));
    for (int64_t b = 0; b < 2; ++b) {
      const int64_t length = b == 0 ? 7 : 12;
      const auto part = [&](const Tensor& x) { return x.slice(0, b, b + 1).slice(1, 0, length); };
      const auto wanted =
          attention(q.slice(0, b, b + 1), part(k), part(v), {.causal = true}).to_vector<float>();
      const auto ours = o.slice(0, b, b + 1).to_vector<float>();
      for (size_t i = 0; i < wanted.size(); ++i)
        EXPECT_NEAR(ours[i], wanted[i], 1e-6);  // sums of 12 numbers of size 1 in another order
    }
  }
}

TEST(DecodeAttention, WhatPadsTheHeadsOfACacheHasNoEffect) {
  for (const Device device : devices()) {
    const Tensor q = sines({2, 3, 4, 36}, device), wide_k = sines({2, 12, 2, 40}, device, 2),
                 wide_v = sines({2, 12, 2, 40}, device, 3), lengths = lengths_of({7, 12}, device);
    const auto padded = decode_attention(q, wide_k, wide_v, lengths).to_vector<float>(),
               exact = decode_attention(q, wide_k.slice(3, 0, 36), wide_v.slice(3, 0, 36), lengths)
                           .to_vector<float>();
    EXPECT_EQ(padded, exact);
  }
}

TEST(DecodeAttention, GroupsOfQueriesReadOneHead) {
  for (const Device device : devices()) {
    const Tensor q = sines({1, 2, 6, 16}, device), k = sines({1, 40, 2, 16}, device, 2),
                 v = sines({1, 40, 2, 16}, device, 3), lengths = lengths_of({37}, device);
    const Tensor grouped = decode_attention(q, k, v, lengths);
    for (int64_t h = 0; h < 6; ++h) {
      const auto head = [&](const Tensor& x) { return x.slice(2, h / 3, h / 3 + 1); };
      EXPECT_EQ(grouped.slice(2, h, h + 1).to_vector<float>().size(), 32u);
      const auto alone = decode_attention(q.slice(2, h, h + 1), head(k), head(v), lengths).to_vector<float>();
      const auto ours = grouped.slice(2, h, h + 1).to_vector<float>();
      for (size_t i = 0; i < alone.size(); ++i) EXPECT_NEAR(ours[i], alone[i], 1e-6);
    }
  }
}

TEST(DecodeAttention, RowsPastTheLengthAreNotRead) {
  for (const Device device : devices())
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Tensor q = sines({1, 1, 2, 32}, device).to(dtype), lengths = lengths_of({21}, device);
      Tensor k = sines({1, 64, 2, 32}, device, 2).to(dtype), v = sines({1, 64, 2, 32}, device, 3).to(dtype);
      const auto wanted = decode_attention(q, k, v, lengths).to_vector<float>();
      k.slice(1, 21, 64).fill(std::numeric_limits<double>::quiet_NaN());
      v.slice(1, 21, 64).fill(std::numeric_limits<double>::infinity());
      EXPECT_EQ(decode_attention(q, k, v, lengths).to_vector<float>(), wanted);
    }
}

TEST(DecodeAttention, OneGraphServesGrowingLengths) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const Device gpu = Device::cuda(0);
  const int64_t capacity = 1500;
  const Tensor q = sines({1, 1, 8, 64}, gpu).to(DType::bf16),
               k = sines({1, capacity, 2, 64}, gpu, 2).to(DType::bf16),
               v = sines({1, capacity, 2, 64}, gpu, 3).to(DType::bf16), lengths = lengths_of({1}, gpu);
  Tensor o;
  Captured step(gpu, [&] { o = decode_attention(q, k, v, lengths); });
  for (const int32_t length : {1, 2, 15, 16, 17, 600, 1499, 1500}) {
    lengths.copy_from(lengths_of({length}, gpu));
    step();
    const auto replayed = o.to_vector<float>();
    EXPECT_EQ(replayed, decode_attention(q, k, v, lengths).to_vector<float>()) << length;
    const auto exact =
        decode_attention(q.to(DType::f32), k.to(DType::f32), v.to(DType::f32), lengths).to_vector<float>();
    for (size_t i = 0; i < exact.size(); ++i)
      EXPECT_NEAR(replayed[i], exact[i], 1.0 / 64) << length;  // P and o rounded to 8 bits, values below 1
  }
  EXPECT_TRUE(step.is_graph());
}

TEST(DecodeAttention, AWrongLengthIsAnErrorOrNaN) {
  const Device cpu = Device::cpu();
  const Tensor q = sines({2, 2, 1, 8}, cpu), k = sines({2, 9, 1, 8}, cpu);
  EXPECT_EQ(message_of([&] {
              decode_attention(q, k, k, lengths_of({4, 10}, cpu));
            }),
            "decode_attention: length 10 of sequence 1 is outside 2 ... 9, the new tokens and the capacity");
  EXPECT_EQ(message_of([&] {
              decode_attention(q, k, k, lengths_of({1, 9}, cpu));
            }),
            "decode_attention: length 1 of sequence 0 is outside 2 ... 9, the new tokens and the capacity");
  if (Device::cuda_count() == 0) return;
  const Device gpu = Device::cuda(0);
  for (const DType dtype : {DType::f32, DType::f16})
    for (const int64_t capacity : {9, 900}) {
      const Tensor many = sines({2, capacity, 1, 8}, gpu).to(dtype);
      for (const int32_t wrong : {-5, 0, 1, int32_t(capacity) + 1, 1 << 30}) {
        const auto o =
            decode_attention(q.to(gpu).to(dtype), many, many, lengths_of({wrong, 5}, gpu)).to_vector<float>();
        for (size_t i = 0; i < o.size(); ++i) EXPECT_EQ(std::isnan(o[i]), i < 16) << wrong << " " << i;
      }
    }
}

TEST(DecodeAttention, ScoresOfMinusInfinityGiveZero) {
  for (const Device device : devices()) {
    const Tensor q = Tensor::full({1, 1, 1, 8}, 1, DType::f32, device), v = sines({1, 4, 1, 8}, device);
    const Tensor k = Tensor::full({1, 4, 1, 8}, -std::numeric_limits<double>::infinity(), DType::f32, device);
    EXPECT_EQ(decode_attention(q, k, v, lengths_of({4}, device)).to_vector<float>(),
              std::vector<float>(8, 0.0f));
  }
}

TEST(DecodeAttention, ErrorsNameWhatIsWrong) {
  const Device cpu = Device::cpu();
  const Tensor q = sines({1, 1, 4, 8}, cpu), k = sines({1, 9, 2, 8}, cpu), lengths = lengths_of({4}, cpu);
  EXPECT_EQ(message_of([&] {
              decode_attention(q, sines({1, 9, 3, 8}, cpu), sines({1, 9, 3, 8}, cpu), lengths);
            }),
            "decode_attention: 4 query heads are not a multiple of 3 key heads");
  EXPECT_EQ(message_of([&] {
              decode_attention(sines({1, 17, 2, 8}, cpu), k, k, lengths);
            }),
            "decode_attention: 17 new tokens; expected 1 ... 16 (attention takes more)");
  EXPECT_EQ(message_of([&] {
              decode_attention(q, k, k, lengths_of({4, 5}, cpu));
            }),
            "decode_attention: lengths is i32[2] on cpu; expected i32 or i64 [1]");
  EXPECT_EQ(
      message_of([&] { decode_attention(q, k, k.slice(1, 0, 5), lengths); }),
      "decode_attention: keys is f32[1, 9, 2, 8] on cpu but values is f32[1, 5, 2, 8] on cpu; expected one "
      "shape [B, capacity, Hk, C]");
  EXPECT_EQ(message_of([&] {
              decode_attention(sines({1, 2, 4, 9}, cpu), k, k, lengths);
            }),
            "decode_attention: q is f32[1, 2, 4, 9] on cpu but keys is f32[1, 9, 2, 8] on cpu; B must agree, "
            "and the heads of keys must not be shorter than those of q");
  Tensor leaf = q.clone();
  require_grad(leaf);
  Tape tape;
  EXPECT_EQ(message_of([&] { decode_attention(leaf, k, k, lengths); }),
            "decode_attention: has no gradient; run it without a tape, or use attention");
  const NoTape none;
  EXPECT_EQ(decode_attention(leaf, k, k, lengths).to_vector<float>(),
            decode_attention(q, k, k, lengths).to_vector<float>());
}

TEST(DecodeAttention, OverACacheWithoutRoomIsNaNOnAGpu) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "no GPU";
  const Device gpu = Device::cuda(0);
  const Tensor q = sines({1, 1, 1, 8}, gpu), none = Tensor::empty({1, 0, 1, 8}, DType::f32, gpu);
  for (const float x : decode_attention(q, none, none, lengths_of({1}, gpu)).to_vector<float>())
    EXPECT_TRUE(std::isnan(x));
}

TEST(AppendToCache, WritesBehindTheTokensOfEachSequence) {
  for (const Device device : devices())
    for (const int64_t dim : {3, 16}) {  // element by element, and in packs
      Tensor cache = Tensor::full({2, 5, 2, dim}, 9, DType::f32, device);
      const Tensor x = sines({2, 2, 2, dim}, device);
      append_to_cache(cache, x, lengths_of({2, 5}, device));
      EXPECT_EQ(cache.select(0, 0).slice(0, 0, 2).to_vector<float>(), x.select(0, 0).to_vector<float>());
      EXPECT_EQ(cache.select(0, 1).slice(0, 3, 5).to_vector<float>(), x.select(0, 1).to_vector<float>());
      EXPECT_EQ(cache.select(0, 0).slice(0, 2, 5).to_vector<float>(),
                std::vector<float>(size_t(6 * dim), 9.0f));
      EXPECT_EQ(cache.select(0, 1).slice(0, 0, 3).to_vector<float>(),
                std::vector<float>(size_t(6 * dim), 9.0f));
    }
}

TEST(AppendToCache, TakesEveryDtype) {
  for (const Device device : devices())
    for (const DType dtype : {DType::u8, DType::i32, DType::i64, DType::bf16, DType::f64}) {
      const Tensor cache = Tensor::full({1, 4, 1, 6}, 9, dtype, device),
                   x = Tensor::full({1, 1, 1, 3}, 5, dtype, device);
      Tensor middle = cache.slice(3, 1, 4);  // neighbours of all of its elements
      append_to_cache(middle, x, lengths_of({2}, device));
      std::vector<double> wanted(24, 9);
      for (const size_t at : {7, 8, 9}) wanted[at] = 5;
      EXPECT_EQ(cache.to_vector<double>(), wanted) << dtype << " " << device.name();
    }
}

TEST(AppendToCache, AWrongLengthIsAnErrorOrWritesNothing) {
  Tensor cache = Tensor::full({1, 5, 1, 8}, 9, DType::f32, Device::cpu());
  const Tensor x = sines({1, 2, 1, 8}, Device::cpu());
  EXPECT_EQ(message_of([&] { append_to_cache(cache, x, lengths_of({6}, Device::cpu())); }),
            "append_to_cache: length 6 of sequence 0 is outside 2 ... 5, the new tokens and the capacity");
  EXPECT_EQ(
      message_of([&] {
        append_to_cache(cache, sines({1, 2, 1, 4}, Device::cpu()), lengths_of({5}, Device::cpu()));
      }),
      "append_to_cache: cache is f32[1, 5, 1, 8] on cpu and x f32[1, 2, 1, 4] on cpu; expected [B, capacity, "
      "Hk, D] and [B, n, Hk, D], n >= 1");
  EXPECT_EQ(cache.to_vector<float>(), std::vector<float>(40, 9.0f));
  if (Device::cuda_count() == 0) return;
  const Device gpu = Device::cuda(0);
  for (const int32_t wrong : {-1, 0, 1, 6}) {
    Tensor there = cache.to(gpu);
    append_to_cache(there, x.to(gpu), lengths_of({wrong}, gpu));
    EXPECT_EQ(there.to_vector<float>(), std::vector<float>(40, 9.0f)) << wrong;
  }
}

TEST(RopeToCache, IsRopeAndTwoAppendsInOne) {
  for (const Device device : devices())
    for (const auto& [dim, rotary] : {std::pair<int64_t, int64_t>{16, 16}, {16, 8}, {6, 4}}) {
      const Tensor qkv = sines({2, 3, 8, dim}, device), lengths = lengths_of({3, 7}, device);
      const Tensor table = rope_table({}, rotary, 9, DType::f32, device);
      Tensor keys = Tensor::full({2, 8, 2, dim}, 9, DType::f32, device), values = keys.clone();
      Tensor wanted_keys = keys.clone(), wanted_values = keys.clone();
      const Tensor q = rope_to_cache(qkv, table, lengths, keys, values);
      const Tensor positions = Tensor::from(std::vector<int64_t>{0, 1, 2, 4, 5, 6}, {2, 3}, device);
      const Tensor turned = rope(qkv, table, positions);
      append_to_cache(wanted_keys, turned.slice(2, 4, 6), lengths);
      append_to_cache(wanted_values, qkv.slice(2, 6, 8), lengths);
      EXPECT_EQ(q.to_vector<float>(), turned.slice(2, 0, 4).to_vector<float>());
      EXPECT_EQ(keys.to_vector<float>(), wanted_keys.to_vector<float>());
      EXPECT_EQ(values.to_vector<float>(), wanted_values.to_vector<float>());
    }
}

TEST(RopeToCache, AWrongLengthIsAnErrorOrNaN) {
  for (const Device device : devices()) {
    const Tensor qkv = sines({1, 2, 3, 8}, device), table = rope_table({}, 8, 5, DType::f32, device);
    Tensor keys = Tensor::full({1, 9, 1, 8}, 9, DType::f32, device), values = keys.clone();
    for (const int32_t wrong : {0, 1, 6, 10}) {  // 6: after the table
      if (device.is_cpu()) {
        EXPECT_NE(message_of([&] { rope_to_cache(qkv, table, lengths_of({wrong}, device), keys, values); }),
                  "");
      } else {
        for (const float x :
             rope_to_cache(qkv, table, lengths_of({wrong}, device), keys, values).to_vector<float>())
          EXPECT_TRUE(std::isnan(x));
      }
      EXPECT_EQ(keys.to_vector<float>(), std::vector<float>(72, 9.0f)) << wrong;
      EXPECT_EQ(values.to_vector<float>(), std::vector<float>(72, 9.0f)) << wrong;
    }
  }
}

}  // namespace
}  // namespace tessera::ops

#include "bench/decode_bench.h"

#include <gtest/gtest.h>

namespace tessera::bench {
namespace {

TEST(DecodeBench, MeasuresTheFirstTokenAndTheOthersOfEachPrompt) {
  const auto records = bench_decode({.shape = "llama-tiny",
                                     .prompts = {3, 20},
                                     .new_tokens = 4,
                                     .batch = 2,
                                     .device = Device::cpu(),
                                     .dtype = DType::f32,
                                     .graph = {true, false},  // a CPU has no graph: once
                                     .repeats = 2,
                                     .warmups = 1});
  ASSERT_EQ(records.size(), 4u);
  for (size_t i = 0; i < records.size(); ++i) {
    const Record& record = records[i];
    EXPECT_EQ(record.op, "decode llama-tiny");
    EXPECT_EQ(record.mode, i % 2 ? "tpot" : "ttft");
    EXPECT_EQ(record.implementation, "tessera eager");
    EXPECT_EQ(record.shape.at("prompt"), i < 2 ? 3 : 20);
    EXPECT_EQ(record.ms.repeats, 2);
    EXPECT_GT(record.ms.p50, 0);
    EXPECT_LE(record.ms.p10, record.ms.p90);
  }
  // Two layers of 128 x (128 + 2 x 64) + 128 x 128 + 3 x 128 x 344, a head of 128 x 512, norms: in f32. The
  // cache at half of the new tokens: keys and values of 2 x 32, two layers, two texts.
  const double weights = 4.0 * (2 * (128 * 256 + 128 * 128 + 3 * 128 * 344 + 2 * 128) + 128 * 512 + 128);
  EXPECT_EQ(records[0].bytes, weights);
  EXPECT_EQ(records[1].bytes, weights + 2 * (3 + 2) * 64 * 2 * 4 * 2);
  EXPECT_EQ(records[1].flops, (2 * weights / 4 + 4 * 5 * 128 * 2) * 2);
}

TEST(DecodeBench, NamesTheShapesThatItHas) {
  try {
    bench_decode({.shape = "llama"});
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "decode: there is no shape \"llama\"; expected one of llama-2-7b, llama-3-8b, llama-tiny, "
                 "mistral-7b, qwen2.5-7b, qwen3-8b, qwen3-tiny");
  }
}

}  // namespace
}  // namespace tessera::bench

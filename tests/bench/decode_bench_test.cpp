#include "bench/decode_bench.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "models/llama.h"
#include "tests/errors.h"

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

TEST(DecodeBench, TimesOnlyWhatFitsTheModelAndSaysSoAtOnce) {
  bool told = false;
  DecodeBenchOptions options{.shape = "llama-tiny",
                             .prompts = {3, 4096},
                             .new_tokens = 2,
                             .device = Device::cpu(),
                             .dtype = DType::f32,
                             .repeats = 1,
                             .warmups = 0,
                             .listener = {.on_record = [&](const Record&) { told = true; }}};
  expect_error([&] { bench_decode(options); }, {"a prompt of 4096 tokens", "a smaller --prompt-tokens"});
  EXPECT_FALSE(told);
  // Of the usual prompts, 32 and 2048, the first has more room in 4096 positions, and not enough either.
  options.prompts = {}, options.new_tokens = 4066;
  expect_error([&] { bench_decode(options); }, {"a prompt of 32 tokens and 4066 new ones"});
}

TEST(DecodeBench, TellsTheRecordsOfEachRow) {
  std::vector<std::string> told;
  DecodeBenchOptions options{.shape = "llama-tiny",
                             .prompts = {3},
                             .new_tokens = 2,
                             .device = Device::cpu(),
                             .dtype = DType::f32,
                             .repeats = 1,
                             .warmups = 0,
                             .listener = {.on_record = [&](const Record& record) {
                               told.push_back(record.attrs.at("row") + " " + record.mode);
                             }}};
  options.rows = {parse_decode_row("dense"), parse_decode_row("mma-delta4:0.5")};
  options.batch = ops::most_sparse_tokens(ops::SparseFormat::mma_delta4) + 1;  // the second row fails
  EXPECT_THROW(bench_decode(options), Error);
  EXPECT_EQ(told, (std::vector<std::string>{"dense ttft", "dense tpot"}));
}

TEST(DecodeBench, TimesTheModelsOfItsRowsAndALayerOfEach) {
  DecodeBenchOptions options{.shape = "llama-tiny",
                             .prompts = {3},
                             .new_tokens = 4,
                             .device = Device::cpu(),
                             .dtype = DType::f32,
                             .repeats = 1,
                             .warmups = 0};
  for (const char* const row : {"dense", "composed", "sell-delta4:0.5", "dense-columns:0:0.75"})
    options.rows.push_back(parse_decode_row(row));
  const std::vector<Record> records = bench_decode(options);
  ASSERT_EQ(records.size(), 8u);
  for (size_t i = 0; i < records.size(); ++i) {
    EXPECT_EQ(records[i].attrs.at("row"), options.rows[i / 2].text);
    EXPECT_EQ(records[i].mode, i % 2 ? "tpot" : "ttft");
    if (i % 2 == 0) EXPECT_EQ(records[i].layer_us, 0) << "the first token is no step";
    Record timed = records[i];
    timed.layer_us = 90.5;
    EXPECT_EQ(from_json(to_json(timed)).layer_us, 90.5);
  }
  // All blocks are compressed alike, each in memory of its own, and the gates leave out what was asked for.
  const std::vector<Matmul>& sparse = records[5].matmuls;
  ASSERT_EQ(sparse.size(), 15u);
  for (size_t i = 0; i < 7; ++i) {
    EXPECT_NEAR(sparse[i].weight_sparsity, 0.5, 0.05) << sparse[i].layer;
    EXPECT_EQ(sparse[i].bytes, sparse[i + 7].bytes);
    EXPECT_EQ(sparse[i].format, "sell-delta4");
  }
  // The thresholds come from 64 tokens; with few before it, a token's attention is a mean of few values, and
  // larger.
  for (size_t i = 0; i < 14; ++i)
    if (const Matmul& one = records[7].matmuls[i]; !one.layer.ends_with("o_proj"))
      EXPECT_NEAR(one.activation_sparsity, 0.75, 0.15) << one.layer;
  const std::string text = decode_rows_text(records);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 5);
  EXPECT_NE(text.find("us per layer"), std::string::npos);
  EXPECT_NE(text.find("1.00x"), std::string::npos);
}

TEST(DecodeBench, BlocksOfSparseRowsShareNoMemory) {
  Rng rng(1);
  models::Llama model({.vocabulary = 64, .d_model = 32, .d_ff = 48, .heads = 2, .kv_heads = 1, .layers = 3},
                      rng, Device::cpu());
  make_sparse(model, {.format = ops::SparseFormat::sell_delta4, .weight_sparsity = 0.5}, 1);
  const auto weight = [&](size_t block) {
    return std::get<nn::Compressed>(model.blocks[block].mlp.up.form).parts.at(1).weight;
  };
  for (const size_t block : {1, 2}) {
    EXPECT_FALSE(weight(block) == weight(0)) << "the same memory";
    EXPECT_TRUE(weight(block).constant);
    EXPECT_EQ(ops::to_dense(weight(block)).to_vector<float>(), ops::to_dense(weight(0)).to_vector<float>());
  }
}

TEST(DecodeBench, SaysWhatIsWrongWithARow) {
  const auto message = [](const char* row) {
    try {
      parse_decode_row(row);
    } catch (const Error& error) {
      return error.message();
    }
    return std::string();
  };
  EXPECT_NE(message("sell-delta4").find("expected dense, composed, FORMAT:W"), std::string::npos);
  EXPECT_NE(message("csr:0.5").find("there is no format"), std::string::npos);
  EXPECT_NE(message("sell-delta4:1").find("\"1\" is no share"), std::string::npos);
  EXPECT_NE(message("sell-delta4:0.5:x").find("\"x\" is no share"), std::string::npos);
  EXPECT_NE(message("sell-delta4:").find("is no share"), std::string::npos);
  EXPECT_EQ(message("composed"), "");
  EXPECT_EQ(parse_decode_row("tiled-cbc:0.25:0.5").sparse.activation_sparsity, 0.5);
  EXPECT_FALSE(parse_decode_row("sell-delta4:0.5").composed);
  const DecodeRow composed = parse_decode_row("composed:sell-delta4:0.5");
  EXPECT_TRUE(composed.composed);
  EXPECT_EQ(composed.sparse.weight_sparsity, 0.5);
  EXPECT_NE(message("composed:sell-delta4").find("expected dense, composed"), std::string::npos);
}

TEST(DecodeBench, NamesTheShapesThatItHas) {
  try {
    bench_decode({.shape = "llama"});
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "decode: there is no shape \"llama\"; expected one of llama-130m, llama-2-7b, llama-3-8b, "
                 "llama-tiny, mistral-7b, qwen2.5-7b, qwen3-8b, qwen3-tiny");
  }
}

}  // namespace
}  // namespace tessera::bench

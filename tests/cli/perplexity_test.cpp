#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "io/safetensors.h"
#include "tests/cli/language_model.h"

// tessera eval ppl: what is counted, and what is said of what cannot be.

namespace tessera::cli::test {
namespace {

using nlohmann::json;

TEST(Perplexity, OfAModelThatKnowsNothingIsItsVocabulary) {
  const Workplace at;
  if (const std::string why = put_model(at, "m", {.deviation = 0}); !why.empty())
    GTEST_SKIP() << "skipped: " << why;
  at.put("a", std::string(70, 'a'));
  at.put("b", std::string(28, 'b'));  // with an empty line between them: 100 bytes, a token each
  const Outcome windows = run(at, "eval ppl --device cpu --model m --text a b --length 32 --json");
  ASSERT_EQ(windows.code, 0) << windows.err;
  json result = json::parse(windows.out);
  EXPECT_EQ(result["tokens"], 100);
  EXPECT_EQ(result["bytes"], 100);
  EXPECT_EQ(result["windows"], 3);
  EXPECT_EQ(result["predicted"], 93);
  EXPECT_NEAR(result["perplexity"], 260, 260 * 1e-5);  // f32
  EXPECT_NEAR(result["bits_per_byte"], std::log2(260), 1e-4);
  EXPECT_EQ(result["complete"], true);
  const Outcome sliding = run(at, "eval ppl --device cpu --model m --text a b --length 32 --stride 8 --json");
  result = json::parse(sliding.out);
  EXPECT_EQ(result["protocol"], "sliding");
  EXPECT_EQ(result["windows"], 9);  // from 0, 8, ... 64
  EXPECT_EQ(result["predicted"], 72);
  EXPECT_NEAR(result["perplexity"], 260, 260 * 1e-5);
  result = json::parse(
      run(at, "eval ppl --device cpu --model m --text a b --length 32 --windows 2 --batch-size 5 --json")
          .out);
  EXPECT_EQ(result["windows"], 2);
  EXPECT_TRUE(holds_all(run(at, "eval ppl --device cpu --model m --text a b --length 32").out,
                        "windows of 32|93 in 3 windows|260.00"));
}

TEST(Perplexity, OfDamagedWeightsIsAnError) {
  const Workplace at;
  if (const std::string why = put_model(at, "m", {.deviation = NAN}); !why.empty())
    GTEST_SKIP() << "skipped: " << why;
  at.put("a", std::string(70, 'a'));
  for (const char* const json : {"", " --json"}) {
    const Outcome outcome =
        run(at, std::string("eval ppl --device cpu --model m --text a --length 32") + json);
    EXPECT_EQ(outcome.code, 1) << outcome.out;
    EXPECT_EQ(outcome.out, "");
    EXPECT_TRUE(holds_all(outcome.err, "not finite|weights are damaged"));
  }
}

TEST(Perplexity, OfAFinalNormWithNanEndsCommandsThatMeasureIt) {
  const Workplace at;
  if (const std::string why = put_model(at, "m"); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  // Weights and inputs of all layers are finite; the norm after the last block is not.
  std::map<std::string, Tensor> weights = io::load_safetensors(at / "m/model.safetensors");
  bool found = false;
  for (auto& [name, tensor] : weights)
    if (name.find("ln_f.weight") != std::string::npos) tensor.fill(NAN), found = true;
  ASSERT_TRUE(found);
  io::save_safetensors(at / "m/model.safetensors", weights);
  std::string text;
  for (int i = 0; i < 60; ++i) text += "line " + std::to_string(i * i) + "\n";
  at.put("t", text);
  const std::string of_m = " --device cpu --model m --text t --length 16 --samples 8 ",
                    timed = "--total 0.5 --prompt-tokens 8 --new-tokens 4 --out p";
  for (const std::string& command :
       {"prune" + of_m + "--out p", "calibrate" + of_m + "--out p --activation-sparsity 0.5",
        "sparsify" + of_m + timed, "sparsity sweep" + of_m + timed}) {
    const Outcome outcome = run(at, command);
    EXPECT_EQ(outcome.code, 1) << command << ": " << outcome.out;
    EXPECT_TRUE(holds_all(outcome.err, "log-likelihood|not finite|weights are damaged")) << command;
    EXPECT_FALSE(fs::exists(at / "p/model.safetensors") || fs::exists(at / "p/calibration.json")) << command;
    fs::remove_all(at / "p");
  }
}

TEST(Perplexity, ShardsAreTheTextTheyWereMadeOf) {
  const Workplace at;
  if (const std::string why = put_model(at, "m"); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  std::string text;
  for (int i = 0; i < 40; ++i) text += "line " + std::to_string(i * i) + "\n";
  at.put("t", text);
  const Outcome data = run(
      at, "data tokenize --text t --tokenizer m/tokenizer.json --out d --validation 0.4 --shard-tokens 100");
  ASSERT_EQ(data.code, 0) << data.err;
  const Outcome shards = run(at, "eval ppl --device cpu --model m --data d --length 16 --json");
  ASSERT_EQ(shards.code, 0) << shards.err;
  const json from_shards = json::parse(shards.out);
  EXPECT_GT(from_shards["tokens"], 100);
  EXPECT_GT(from_shards["bits_per_byte"], 1);
  EXPECT_EQ(from_shards["predicted"], 15 * from_shards["windows"].get<int>());
  // Without a tokenizer next to them, they are read with the model's.
  fs::remove(at / "d/tokenizer.json");
  const json with_models =
      json::parse(said(at, "eval ppl --device cpu --model m --data d --length 16 --json"));
  EXPECT_EQ(with_models["nats_per_token"], from_shards["nats_per_token"]);
  EXPECT_EQ(with_models["bytes"], from_shards["bytes"]);
}

TEST(Perplexity, ShardsOfAnotherTokenizerAreRefused) {
  const Workplace at;
  if (const std::string why = put_model(at, "m"); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  at.put("t", "a few words\nand a few more\n");
  ASSERT_EQ(run(at, "tokenizer train --text t --out other.json --kind character").code, 0);
  ASSERT_EQ(run(at, "data tokenize --text t --tokenizer other.json --out d --validation 0").code, 0);
  // Its numbers are below the model's vocabulary, and mean something else.
  expect_failure(at, "eval ppl --device cpu --model m --data d --part train --length 4", 1,
                 "the shards of d come from the tokenizer|the model in m");
}

TEST(Perplexity, SaysWhatIsWrong) {
  const Workplace at;
  if (const std::string why = put_model(at, "m"); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  at.put("short", "abc");
  expect_failures(
      at,
      {{"eval ppl", 2, "--model|required"},
       {"eval pple", 2, "did you mean ppl?"},
       {"eval ppl --model m", 2, "--text FILE|--data DIR"},
       {"eval ppl --model m --text short --data d", 2, "--data"},
       {"eval ppl --model m --text short --length 1", 2, "--length"},
       {"eval ppl --model m --text short --length 16 --stride 16", 2, "--stride: 16 in windows of 16"},
       {"eval ppl --model m --text short --part train", 2, "--part"},
       {"eval ppl --model m --text short --length 2048 --device cpu", 1,
        "windows of 2048 tokens; the model has 64"},
       {"eval ppl --model m --text short --stride 64 --device cpu", 1, "--stride 64|windows of 64"},
       {"eval ppl --model m --text short --device cpu", 1, "fewer than one window of 64"},
       {"eval ppl --model m --text short --length 16 --device cpu", 1, "the text has 3 tokens, fewer than"},
       {"eval ppl --model m --text nowhere --length 16 --device cpu", 1, "there is no file nowhere"},
       {"eval ppl --model m --data nowhere --length 16 --device cpu", 1, "nowhere"},
       {"eval ppl --model nowhere --text short --device cpu", 1, "there is no folder nowhere"}});
}

}  // namespace
}  // namespace tessera::cli::test

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/cli/language_runs.h"

// Models of LLaMA's shape as a user meets them: trained from text, exported, fine-tuned from the export,
// evaluated, made to write, converted and planned.

namespace tessera::cli::test {
namespace {

using nlohmann::json;

class LlamaType : public ::testing::TestWithParam<const char*> {};

TEST_P(LlamaType, IsTrainedExportedAndUsed) {
  const Workplace at;
  const std::string type = GetParam();
  put_clauses(at, 40);
  const std::string sizes =
      " --type " + type + " --layers 2 --d-model 32 --heads 4 --kv-heads 2 --head-dim 12";
  expect_success(run(at,
                     "train llama --text a.txt --device cpu --steps 20 --length 16 --batch 4 --lr 0.01 "
                     "--quiet --name a --sample-tokens 4" +
                         sizes));
  const json config = json::parse(at.get("runs/a/model/config.json"));
  EXPECT_EQ(config.at("model_type"), type);
  EXPECT_EQ(config.at("head_dim"), 12);
  expect_success(run(at,
                     "train llama --model runs/a/model --text a.txt --device cpu --steps 2 --length 16 "
                     "--batch 4 --quiet --name b --sample-tokens 0"));
  EXPECT_EQ(json::parse(at.get("runs/b/model/config.json")).at("model_type"), type);
  const auto loss = [&](const std::string& name) {
    return metrics_of(at, "runs/" + name)[0].at("loss").get<double>();
  };
  EXPECT_LT(loss("b"), loss("a") - 0.2);
  expect_success(run(at, "convert runs/b c --dtype bf16"));
  expect_success(run(at, "generate --model c --prompt clause --max-tokens 5 --device cpu --json g.json"));
  EXPECT_EQ(json::parse(at.get("g.json")).at("texts")[0].at("tokens").size(), 5u);
  expect_success(run(at, "eval ppl --model runs/a --text a.txt --length 8 --device cpu"));
  expect_success(run(at, "bench decode --model c --prompt-tokens 3 --new-tokens 3 --repeats 1 --device cpu"));
  expect_success(run(at,
                     "bench decode --model runs/a/ --prompt-tokens 3 --new-tokens 3 --repeats 1 --device cpu "
                     "--json d.json"));
  EXPECT_NE(at.get("d.json").find("\"decode a\""), std::string::npos) << at.get("d.json");
  expect_success(run(at, "prune --model runs/a --method magnitude --device cpu --out p"));
  EXPECT_TRUE(
      holds_all(said(at, "sparsity import p --model runs/a --out i.safetensors"), "model        a, "));
  const Outcome plan = run(at, "plan llama --json --vocab-size 300" + sizes);
  expect_success(plan);
  const Outcome of_llama = run(at,
                               "plan llama --json --vocab-size 300 --layers 2 --d-model 32 --heads 4 "
                               "--kv-heads 2 --head-dim 12");
  const int64_t more = json::parse(plan.out).at("parameter_count").get<int64_t>() -
                       json::parse(of_llama.out).at("parameter_count").get<int64_t>();
  // Two blocks: biases of 4 + 2 + 2 heads, or two norms of a head.
  EXPECT_EQ(more, type == "qwen2" ? 2 * 8 * 12 : type == "qwen3" ? 2 * 2 * 12 : 0);
}
INSTANTIATE_TEST_SUITE_P(Types, LlamaType, ::testing::Values("mistral", "qwen2", "qwen3", "phi3", "arcee"),
                         [](const auto& info) { return std::string(info.param); });

TEST(LlamaWindow, ATextThatDoesNotFitIsRefusedAndNamed) {
  const Workplace at;
  at.put("a.txt", std::string(200, 'a') + "\nb\n");
  expect_success(run(at,
                     "train llama --text a.txt --device cpu --steps 1 --length 32 --batch 1 --quiet --name a "
                     "--type mistral --layers 1 --d-model 16 --heads 2 --sample-tokens 0"));
  std::string config = at.get("runs/a/model/config.json");
  const std::string none = "\"sliding_window\": null";
  config.replace(config.find(none), none.size(), "\"sliding_window\": 8");
  at.put("runs/a/model/config.json", config);
  const std::string generate = "generate --model runs/a/model --device cpu --greedy --ignore-end ";
  expect_failure(at, generate + "--prompt aaaaaaaaa --max-tokens 2", 1,
                 "the prompt has 9 tokens|has 8 tokens of the sliding window");
  const Outcome ends = run(at, generate + "--prompt aaaaa --max-tokens 9");
  expect_success(ends);
  EXPECT_TRUE(holds_all(ends.err, "stopped after 4 of 9 new tokens|all 8 tokens of the sliding window"));
  const Outcome text = run(at, "eval ppl --model runs/a/model --text a.txt --length 9 --device cpu");
  EXPECT_EQ(text.code, 1);
  EXPECT_NE(text.err, "");
  expect_failure(at,
                 "train llama --model runs/a/model --text a.txt --device cpu --steps 1 --length 9 "
                 "--batch 1 --quiet --name b",
                 1, "mistral|9 tokens|sliding window of 8");
}

}  // namespace
}  // namespace tessera::cli::test

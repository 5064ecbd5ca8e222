#include <gtest/gtest.h>

#include <csignal>
#include <nlohmann/json.hpp>

#include "tests/cli/language_model.h"

// tessera generate: options, texts that repeat and end, what is said of broken folders.

namespace tessera::cli::test {
namespace {

using nlohmann::json;

const std::string kGo = "generate --device cpu --model m --json out.json ";

json made(const Workplace& at, const std::string& options, int code = 0) {
  const bool has_length = options.find("--max-tokens") != std::string::npos;
  const Outcome outcome = run(at, kGo + (has_length ? "" : "--max-tokens 40 ") + options);
  EXPECT_EQ(outcome.code, code) << outcome.err;
  json result = json::parse(at.get("out.json"));
  if (result["texts"].size() == 1)
    EXPECT_EQ(outcome.out, result["texts"][0]["text"].get<std::string>() + "\n");
  return result;
}

bool is_utf8(const std::string& text) {
  try {
    return !json(text).dump().empty();  // throws for what is no UTF-8
  } catch (const json::exception&) {
    return false;
  }
}

TEST(Generate, TheSameSeedGivesTheSameTextWhichIsUtf8) {
  const Workplace at;
  if (const std::string why = put_model(at, "m"); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  const json first = made(at, "--prompt abc --seed 7"), again = made(at, "--prompt abc --seed 7"),
             other = made(at, "--prompt abc --seed 8");
  EXPECT_EQ(first["texts"], again["texts"]);
  EXPECT_NE(first["texts"], other["texts"]);
  EXPECT_EQ(first["texts"][0]["tokens"].size(), 40u);
  // Random bytes are seldom characters: what is cut or wrong comes as U+FFFD, whole in each piece.
  EXPECT_TRUE(is_utf8(first["texts"][0]["text"]));
  EXPECT_NE(first["texts"][0]["text"].get<std::string>().find("\xEF\xBF\xBD"), std::string::npos);
  const json greedy = made(at, "--prompt abc --greedy");
  EXPECT_EQ(greedy["texts"], made(at, "--prompt abc --temperature 0")["texts"]);
  EXPECT_EQ(greedy["texts"], made(at, "--prompt abc --top-k 1")["texts"]);
}

TEST(Generate, SaysThatTheModelHasNoMorePositions) {
  const Workplace at;
  if (const std::string why = put_model(at, "m"); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  // 64 positions: three of the prompt, and the last token is never run.
  const Outcome outcome = run(at, kGo + "--prompt abc --max-tokens 100");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(holds_all(outcome.err, "stopped after 62 of 100 new tokens|3 of the prompt|64 positions"));
  EXPECT_EQ(json::parse(at.get("out.json"))["texts"][0]["end"], "last position");
  const Outcome within = run(at, kGo + "--prompt abc --max-tokens 62");
  EXPECT_EQ(within.err, "");
  EXPECT_EQ(json::parse(at.get("out.json"))["texts"][0]["end"], "length");
}

TEST(Generate, ATextEndsAtItsOwnLastPosition) {
  const Workplace at;
  if (const std::string why = put_model(at, "m"); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  const std::string flags = "--max-tokens 100 --greedy --prompt ";
  const json alone = made(at, flags + "A");
  const Outcome both = run(at, kGo + flags + std::string(62, 'b') + " --prompt A");
  ASSERT_EQ(both.code, 0) << both.err;
  EXPECT_TRUE(holds_all(both.err,
                        "text 1 stopped after 3 of 100 new tokens|62 of the prompt|"
                        "text 2 stopped after 64 of 100 new tokens|1 of the prompt"));
  const json texts = json::parse(at.get("out.json"))["texts"];
  EXPECT_EQ(texts[0]["tokens"].size(), 3u);
  EXPECT_EQ(texts[1]["tokens"].size(), 64u);
  EXPECT_EQ(texts[1]["tokens"], alone["texts"][0]["tokens"]);
  EXPECT_EQ(texts[0]["end"], "last position");
  // A text that had positions for all its tokens did not end at the last one.
  const json few = made(at, "--max-tokens 20 --greedy --prompt " + std::string(62, 'b') + " --prompt A");
  EXPECT_EQ(few["texts"][0]["end"], "last position");
  EXPECT_EQ(few["texts"][1]["end"], "length");
  EXPECT_EQ(few["texts"][1]["tokens"].size(), 20u);
}

TEST(Generate, SamplesAndPromptsOfDifferentLengthsAreEachAlone) {
  const Workplace at;
  if (const std::string why = put_model(at, "m"); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  const json alone = made(at, "--prompt abc --seed 7"), three = made(at, "--prompt abc --seed 7 --samples 3");
  ASSERT_EQ(three["texts"].size(), 3u);
  EXPECT_EQ(three["texts"][0]["tokens"], alone["texts"][0]["tokens"]);
  EXPECT_NE(three["texts"][1]["tokens"], alone["texts"][0]["tokens"]);
  const json batch = made(at, "--greedy --prompt abc --prompt z --prompt longest");
  for (const auto& [number, prompt] : {std::pair<size_t, std::string>{0, "abc"}, {1, "z"}, {2, "longest"}})
    EXPECT_EQ(batch["texts"][number]["tokens"],
              made(at, "--greedy --prompt " + prompt)["texts"][0]["tokens"]);
}

TEST(Generate, APromptComesFromAFileToo) {
  const Workplace at;
  if (const std::string why = put_model(at, "m"); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  at.put("p", "abc");
  EXPECT_EQ(made(at, "--prompt-file p --greedy")["texts"], made(at, "--prompt abc --greedy")["texts"]);
  // The way around that the message names is there.
  at.put("bytes", std::string("a\0b\xFF", 4));
  const Outcome refused = run(at, "generate --device cpu --model m --prompt-file bytes");
  EXPECT_TRUE(holds_all(refused.err, "bytes is a binary file|--any-bytes"));
  const auto taken = made(at, "--prompt-file bytes --any-bytes --greedy");
  EXPECT_EQ(taken["texts"][0]["prompt"].get<std::string>().substr(0, 3), std::string("a\0b", 3));
  // And so does one from standard input.
  at.put("stdin", "abc");
  EXPECT_EQ(made(at, "--greedy")["texts"], made(at, "--prompt abc --greedy")["texts"]);
  at.put("stdin", at.get("bytes"));
  for (const char* how : {"", " --prompt-file -"})
    EXPECT_TRUE(holds_all(run(at, std::string("generate --device cpu --model m") + how).err,
                          "the standard input is a binary file|--any-bytes"));
  EXPECT_EQ(made(at, "--any-bytes --greedy")["texts"], taken["texts"]);
}

TEST(Generate, EndsAtEndTokensStopTextsAndTheLastPosition) {
  const Workplace at;
  if (const std::string why = put_model(at, "m"); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  const json whole = made(at, "--prompt abc --seed 7")["texts"][0];
  EXPECT_EQ(whole["end"], "length");
  const json last = made(at, "--prompt abc --seed 7 --max-tokens 1000")["texts"][0];
  EXPECT_EQ(last["tokens"].size(), 62u);  // 64 positions: 61 after the prompt, and one that is never run
  EXPECT_EQ(made(at, "--prompt abc --max-tokens 0")["texts"][0]["tokens"].size(), 0u);

  // A stop text of two tokens in the middle of what comes anyway.
  const std::string text = whole["text"];
  size_t begin = text.size() / 2;
  while ((static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) ++begin;
  size_t end = begin + 1;
  for (int characters = 0; characters < 2; ++characters) do
      ++end;
    while (end < text.size() && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80);
  const std::string stop = text.substr(begin, end - begin);
  if (stop.find_first_of(" \n\t'\"") == std::string::npos) {
    const json stopped = made(at, "--prompt abc --seed 7 --stop never --stop " + stop)["texts"][0];
    EXPECT_EQ(stopped["text"], text.substr(0, text.find(stop)));
    EXPECT_EQ(stopped["end"], "stop text");
  }

  const int64_t token = whole["tokens"][5];
  put_model(at, "m", {.more = "\"eos_token_id\": " + std::to_string(token)});
  const json ended = made(at, "--prompt abc --seed 7")["texts"][0];
  EXPECT_EQ(ended["end"], "end token");
  EXPECT_EQ(ended["tokens"].back(), token);
  EXPECT_LE(ended["tokens"].size(), 6u);
  EXPECT_EQ(made(at, "--prompt abc --seed 7 --ignore-end")["texts"][0]["tokens"], whole["tokens"]);
  // generation_config.json has the last word, as in transformers.
  put_model(at, "m", {.more = "\"eos_token_id\": 259"});
  at.put("m/generation_config.json", "{\"eos_token_id\": " + std::to_string(token) + "}");
  EXPECT_EQ(made(at, "--prompt abc --seed 7")["texts"][0]["tokens"], ended["tokens"]);
}

TEST(Generate, AnEmptyPromptBeginsWithTheFirstToken) {
  const Workplace at;
  if (const std::string why = put_model(at, "m"); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  expect_failure(at, kGo + "--prompt ''", 1, "the prompt is empty|names no bos_token_id");
  // GPT-2's own, which small models often keep.
  put_model(at, "m", {.more = "\"bos_token_id\": 50256"});
  EXPECT_TRUE(
      holds_all(run(at, kGo + "--prompt ''").err, "the prompt is empty|no bos_token_id of the model's"));
  put_model(at, "m", {.more = "\"bos_token_id\": 3"});
  EXPECT_EQ(made(at, "--prompt ''")["texts"][0]["prompt_tokens"], json::array({3}));
}

TEST(Generate, AFinishedRunIsAModelToo) {
  const Workplace at;
  if (const std::string why = put_model(at, "run/model"); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  const Outcome outcome = run(at, "generate --device cpu --model run --prompt abc --max-tokens 2");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_GT(outcome.out.size(), 1u);
}

TEST(Generate, AnInterruptEndsTheTextCleanly) {
  const Workplace at;
  if (const std::string why = put_model(at, "m", {.positions = 200000}); !why.empty())
    GTEST_SKIP() << "skipped: " << why;
  Process process(
      at, words_of("generate --device cpu --model m --prompt abc --max-tokens 199000 --json out.json"));
  ASSERT_TRUE(wait_for(process, [&] { return !process.out().empty(); }));
  process.send(SIGINT);
  const Outcome outcome = process.wait();
  EXPECT_EQ(outcome.code, 130) << outcome.err;
  const json result = json::parse(at.get("out.json"));
  EXPECT_EQ(result["texts"][0]["end"], "interrupted");
  EXPECT_EQ(outcome.out, result["texts"][0]["text"].get<std::string>() + "\n");
}

TEST(Generate, SaysWhatIsWrong) {
  const Workplace at;
  if (const std::string why = put_model(at, "m"); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  put_model(at, "small", {.vocabulary = 100});
  put_model(at, "bare");
  fs::remove(at / "bare/tokenizer.json");
  put_model(at, "hollow");
  fs::remove(at / "hollow/model.safetensors");
  put_model(at, "cut");
  at.put("cut/model.safetensors", at.get("cut/model.safetensors").substr(0, 500));
  put_model(at, "broken");
  at.put("broken/config.json", "{\"model_type\": \"gpt2\", \"n_layer\": -1}");
  fs::create_directories(at / "bert");
  at.put("bert/config.json", "{\"model_type\": \"bert\", \"architectures\": [\"BertForMaskedLM\"]}");
  at.put("bert/tokenizer.json", at.get("m/tokenizer.json"));
  fs::create_directories(at / "empty");
  at.put("adapter/adapter_config.json", "{}");
  fs::create_directories(at / "run");
  at.put("run/run.json", "{}");
  expect_failures(
      at,
      {{"generate", 2, "--model|required"},
       {"generate --model m --prompt a --temprature 1", 2, "did you mean --temperature?"},
       {"generate --model m --prompt a --temperature -1", 2, "--temperature"},
       {"generate --model m --prompt a --temperature nan", 2, "--temperature"},
       {"generate --model m --prompt a --top-p 0", 2, "--top-p"},
       {"generate --model m --prompt a --top-p 1.5", 2, "--top-p"},
       {"generate --model m --prompt a --top-k -1", 2, "--top-k"},
       {"generate --model m --prompt a --max-tokens 010", 2, "--max-tokens"},
       {"generate --model m --prompt a --greedy --temperature 1", 2, "--greedy"},
       {"generate --model m --prompt a --prompt-file b", 2, "--prompt"},
       {"generate --model m --prompt a --prompt b --samples 2", 2, "--samples: expected one prompt"},
       {"generate --model m --prompt a --stop ''", 2, "--stop: the value is empty"},
       {"generate --model m --prompt a --graph maybe", 2, "--graph"},
       {"generate --model m --prompt a --dtype f64", 2, "--dtype"},
       {"generate --model m --prompt a --device gpu", 2, "--device"},
       {"generate --model m --prompt a --json nowhere/o.json", 1, "there is no folder nowhere"},
       {"generate --model m --prompt-file nowhere", 1, "there is no file nowhere"},
       {"generate --model nowhere --prompt a", 1, "there is no folder nowhere"},
       {"generate --model empty --prompt a", 1, "empty has no config.json"},
       {"generate --model adapter --prompt a", 1, "adapter holds an adapter of peft|merge"},
       {"generate --model run --prompt a", 1, "run is a run without an export"},
       {"generate --model bert --prompt a", 1, "holds a bert|does not predict the next token"},
       {"generate --model bare --prompt a", 1, "tokenizer"},
       {"generate --model hollow --prompt a", 1, "weights: |has none of model.safetensors"},
       {"generate --model cut --prompt a", 1, "cut/model.safetensors"},
       {"generate --model broken --prompt a", 1, "broken/config.json"},
       {"generate --model small --prompt abc", 1, "gives token |knows 100|do not belong together"},
       {"generate --model m --prompt "
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        1, "the prompt has 74 tokens|64 positions"}},
      " --device cpu");
}

}  // namespace
}  // namespace tessera::cli::test

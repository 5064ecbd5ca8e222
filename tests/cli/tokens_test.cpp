#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/cli/command.h"

// The commands tokenizer and data, from text to shards and back.

namespace tessera::cli::test {
namespace {

using nlohmann::json;

std::string some_text() {
  std::string text;
  for (int i = 0; i < 300; ++i) text += "line " + std::to_string(i % 17) + " of a licence that is free\n";
  return text;
}

bool lacks_library(const Outcome& outcome) {
  return outcome.err.find("which this build lacks") != std::string::npos;
}

TEST(TokenCommands, FromTextToShardsAndBack) {
  const Workplace at;
  at.put("a.txt", some_text());
  at.put("b.txt", "caf\xC3\xA9 \xE4\xB8\xAD\n" + some_text());
  const Outcome trained = run(at, "tokenizer train --text a.txt b.txt --vocab-size 300 --out t.json");
  if (lacks_library(trained)) GTEST_SKIP() << "skipped: " << trained.err;
  ASSERT_EQ(trained.code, 0) << trained.err;
  run(at, "tokenizer train --text b.txt a.txt --vocab-size 300 --out again.json");
  EXPECT_EQ(at.get("t.json"), at.get("again.json"));

  const Outcome encoded = run(at, "tokenizer encode t.json --file b.txt");
  ASSERT_EQ(encoded.code, 0) << encoded.err;
  at.put("ids", encoded.out);
  EXPECT_EQ(run(at, "tokenizer decode t.json --file ids").out, at.get("b.txt") + "\n");
  const json info = json::parse(run(at, "tokenizer info t.json --json").out);
  EXPECT_EQ(info["kind"], "BPE, byte level");
  EXPECT_LE(info["tokens"], 300);
  const json tokens = json::parse(run(at, "tokenizer encode t.json --text free --json").out);
  EXPECT_EQ(tokens["ids"].size(), tokens["tokens"].size());

  const Outcome made =
      run(at, "data tokenize --text a.txt b.txt --tokenizer t.json --out d --shard-tokens 500 --workers 3");
  ASSERT_EQ(made.code, 0) << made.err;
  EXPECT_EQ(at.get("d/tokenizer.json"), at.get("t.json"));
  const json shards =
      json::parse(run(at, "data info d/train-00000.tokens d/validation-00000.tokens --json").out);
  EXPECT_EQ(shards[0]["fingerprint"], info["fingerprint"]);
  EXPECT_EQ(shards[1]["documents"], 2);
  // The number of workers changes nothing.
  run(at, "data tokenize --text a.txt b.txt --tokenizer t.json --out e --shard-tokens 500");
  EXPECT_EQ(at.get("d/train-00000.tokens"), at.get("e/train-00000.tokens"));
  EXPECT_EQ(at.get("d/validation-00000.tokens"), at.get("e/validation-00000.tokens"));
  expect_failure(at, "data tokenize --text a.txt --tokenizer t.json --out d", 1,
                 "d has shards of the part train already|name another folder");
}

TEST(TokenCommands, CharactersBytesAndGlue) {
  const Workplace at;
  at.put("a.txt", some_text());
  for (const char* kind : {"byte", "character"}) {
    const Outcome made = run(at, std::string("tokenizer train --text a.txt --out t.json --kind ") + kind);
    if (lacks_library(made)) GTEST_SKIP() << "skipped: " << made.err;
    ASSERT_EQ(made.code, 0) << made.err;
    EXPECT_EQ(run(at, "tokenizer encode t.json --text free").out.size() > 7, true);
    EXPECT_EQ(nlohmann::json::parse(run(at, "tokenizer info t.json --json").out).at("kind"),
              std::string(kind) + "s");
  }
  const Outcome glue = run(at, "data glue --out g --task sst2 --train 20 --dev 5 --test 5");
  const std::string dev = at.get("g/SST-2/dev.tsv"), mine = "sentence\tlabel\nmine\t1\n";
  at.put("g/SST-2/dev.tsv", mine);
  expect_failure(at, "data glue --out g --task sst2 --train 21 --dev 5 --test 5", 1,
                 "g/SST-2/train.tsv|already|another folder");
  EXPECT_EQ(run(at, "data glue --out g --task sst2 --train 20 --dev 5 --test 5").code, 1);
  EXPECT_EQ(at.get("g/SST-2/dev.tsv"), mine);
  at.put("g/SST-2/dev.tsv", dev);
  EXPECT_EQ(run(at, "data glue --out g --task sst2 --train 20 --dev 5 --test 5").code, 0);  // the same again
  ASSERT_EQ(glue.code, 0) << glue.err;
  EXPECT_EQ(first_line(at.get("g/SST-2/train.tsv")), "sentence\tlabel");
}

TEST(TokenCommands, KeepsEveryFileOfATokenizerWithItsTokens) {
  const Workplace at;
  at.put("a.txt", some_text());
  said(at, "tokenizer train --text a.txt --kind byte --out t.json");
  fs::create_directories(at / "old");
  at.put("old/vocab.json", json::parse(at.get("t.json")).at("model").at("vocab").dump());
  at.put("old/merges.txt", "#version: 0.2\n");
  at.put("old/tokenizer_config.json", R"({"eos_token": "<|im_end|>"})");
  at.put("old/added_tokens.json", R"({"<|im_end|>": 257})");
  const Outcome made = run(at, "data tokenize --text a.txt --tokenizer old --out d");
  if (lacks_library(made)) GTEST_SKIP() << "skipped: " << made.err;
  EXPECT_EQ(made.code, 0) << made.err;
  EXPECT_TRUE(holds_all(made.out, "documents end with token 257 (<|im_end|>)"));
  for (const char* name : {"vocab.json", "merges.txt", "tokenizer_config.json", "added_tokens.json"})
    EXPECT_EQ(at.get(std::string("d/") + name), at.get(std::string("old/") + name)) << name;
}

TEST(TokenCommands, CountDocumentsAndTheEmptyOnesAlike) {
  const Workplace at;
  at.put("a.txt", some_text());
  at.put("one.txt", "x");  // too short to hold out a part of it
  said(at, "tokenizer train --text a.txt --kind byte --out t.json");
  const auto made = [&](const std::string& more) {
    return said(at, "data tokenize --tokenizer t.json --text " + more);
  };
  const std::string usual = made("a.txt one.txt a.txt --out d");
  EXPECT_TRUE(holds_all(usual,
                        "train: | tokens, 3 documents, 1 shards\nvalidation: |"
                        " tokens, 3 documents (1 of them empty), 1 shards\n"));
  const std::string shards = " d/train-00000.tokens d/validation-00000.tokens";
  const std::string info = said(at, "data info" + shards);
  EXPECT_TRUE(holds_all(info,
                        "d/train-00000.tokens: | tokens, 3 documents, vocabulary|"
                        "d/validation-00000.tokens: | tokens, 3 documents (1 of them empty), vocabulary"));
  const json of_parts = json::parse(said(at, "data info --json" + shards));
  for (const size_t part : {0, 1}) {
    EXPECT_EQ(of_parts[part].at("documents"), 3);
    EXPECT_EQ(of_parts[part].at("empty_documents"), part);
  }
  // Documents without tokens make no shard.
  const std::string cut = made("a.txt a.txt one.txt --out e --shard-tokens 1");
  EXPECT_TRUE(
      holds_all(cut, " tokens, 3 documents, 3 shards\n| tokens, 3 documents (1 of them empty), 2 shards\n"))
      << cut;
  const std::string whole = made("a.txt a.txt --out f --validation 0");
  EXPECT_TRUE(holds_all(whole, "validation: 0 tokens, 0 documents, 0 shards\n"));
}

TEST(TokenCommands, SayWhatIsWrong) {
  const Workplace at;
  at.put("bad.json", "{\"model\":3}");
  at.put("cut.tokens", "TESSTOK1");
  at.put("text", "a");
  expect_failures(
      at, {{"tokenizer", 2, "a subcommand is needed|train"},
           {"tokenizer trian", 2, "did you mean train?"},
           {"tokenizer train --text text", 2, "--out|required"},
           {"tokenizer train --text text --out t.json --vocab-size 3", 2, "--vocab-size|3 not in range"},
           {"tokenizer train --text text --out t.json --kind word", 2, "--kind|word"},
           {"tokenizer encode", 2, "tokenizer|required"},
           {"tokenizer encode t.json --text a --file b", 2, "--file"},
           {"tokenizer decode t.json --ids -4", 2, "--ids|-4"},
           {"tokenizer decode t.json --ids x", 2, "--ids|x is not"},
           {"data tokenize --text text --out d", 2, "--tokenizer|required"},
           {"data tokenize --text text --tokenizer t --out d --validation 1", 2, "--validation|not in range"},
           {"data tokenize --text text --tokenizer t --out d --validation nan", 2, "--validation|not finite"},
           {"data glue --out g --task sst3", 2, "--task|did you mean sst2?"},
           {"data glue --out g --train 0", 2, "--train|not in range"},
           {"tokenizer info bad.json", 1, "tokenizer: bad.json: model has no \"vocab\""},
           {"tokenizer info nowhere.json", 1, "there is no file nowhere.json"},
           {"tokenizer info text", 1, "text is no tokenizer.json"},
           {"tokenizer train --text nowhere --out t.json", 1, "there is no file nowhere"},
           {"tokenizer train --text text --out nowhere/t.json", 1, "there is no folder nowhere"},
           {"data info cut.tokens", 1, "shard: cut.tokens has 8 bytes, fewer than the head"},
           {"data info text", 1, "shard: text"}});
  EXPECT_EQ(at.files(), (std::vector<std::string>{"bad.json", "cut.tokens", "text"}));
}

TEST(Tokenize, WarnsIfNothingIsHeldOut) {
  const Workplace at;
  at.put("good.txt", "some text\nand more\n");
  ASSERT_EQ(run(at, "tokenizer train --text good.txt --kind byte --out t.json").code, 0);
  const Outcome none =
      run(at, "data tokenize --tokenizer t.json --out a --text good.txt --piece 1 --validation 0.1");
  EXPECT_EQ(none.code, 0) << none.err;
  EXPECT_TRUE(holds_all(none.out, "validation: 0 tokens"));
  EXPECT_TRUE(holds_all(none.err, "warning: --validation 0.1 holds nothing out"));
  const Outcome some = run(at, "data tokenize --tokenizer t.json --out b --text good.txt --validation 0.5");
  EXPECT_EQ(some.err, "");
}

TEST(Tokenize, LeavesNoShardOfWhatItCouldNotFinish) {
  const Workplace at;
  at.put("good.txt", "some text\n");
  ASSERT_EQ(run(at, "tokenizer train --text good.txt --kind byte --out t.json").code, 0);
  const auto before = at.files();
  expect_failure(
      at, "data tokenize --tokenizer t.json --out a/b --shard-tokens 4 --text good.txt good.txt none.txt", 1,
      "none.txt");
  EXPECT_EQ(at.files(), before);
}

}  // namespace
}  // namespace tessera::cli::test

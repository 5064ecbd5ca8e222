#if defined(TESSERA_PROGRAM)  // a build without the command has nothing to launch
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/dist/launched_train.h"
#include "tests/errors.h"

// `tessera generate`, `eval ppl` and `bench decode` with --tensor-parallel: one text from all ranks, written
// by one of them.

namespace tessera::dist::test {
namespace {

/// A llama of four heads that has trained a few steps, and its folder.
std::string trained_llama(const TemporaryFolder& folder) {
  write_text(folder, 400);
  const Said said = launched(
      folder, {.ranks = 1,
               .command = tessera("train llama --device cpu --text " + folder / "text.txt" +
                                  " --layers 2 --d-model 16 --n-head 4 --kv-heads 2 --d-ff 24 --length 32 "
                                  "--batch-size 2 --steps 4 --quiet --name m --runs " +
                                  folder / "runs")});
  EXPECT_EQ(said.end.code, 0) << said.err;
  return folder / "runs/m";
}

Said run_command(const TemporaryFolder& folder, int ranks, const std::string& line) {
  return launched(folder, {.ranks = ranks, .command = tessera(line)});
}

/// What comes after "name": in a JSON text, up to the end of the list or the number.
std::string value_of(const std::string& json, const std::string& name) {
  const size_t begin = json.find("\"" + name + "\"");
  if (begin == std::string::npos) return "";
  const size_t first = json.find_first_of("[-0123456789", begin + name.size() + 2);
  return json.substr(first, json.find_first_of(json[first] == '[' ? "]" : ",\n}", first) - first);
}

TEST(LaunchDecode, AllRanksComeToTheTextOfOneAndOneWritesIt) {
  const TemporaryFolder folder;
  const std::string line = "generate --device cpu --model " + trained_llama(folder) +
                           " --prompt word --max-tokens 12 --ignore-end ";
  for (const std::string sampling : {"--greedy", "--top-k 8 --seed 5"}) {
    const Said one = run_command(folder, 1, line + sampling + " --json " + folder / "one.json");
    const Said two =
        run_command(folder, 2, line + sampling + " --tensor-parallel 2 --json " + folder / "two.json");
    EXPECT_EQ(one.end.code, 0) << one.err;
    EXPECT_EQ(two.end.code, 0) << two.err << two.end.cause;
    EXPECT_EQ(value_of(folder.get("two.json"), "tokens"), value_of(folder.get("one.json"), "tokens"));
    EXPECT_NE(value_of(folder.get("one.json"), "tokens"), "");
    EXPECT_EQ(two.out, one.out);  // rank 0 alone writes: every line begins with [0]
    EXPECT_EQ(value_of(folder.get("two.json"), "ranks"), "2");
  }
}

TEST(LaunchDecode, PerplexityIsThatOfOneRank) {
  const TemporaryFolder folder;
  const std::string line =
      "eval ppl --device cpu --json --model " + trained_llama(folder) + " --text " + folder / "text.txt";
  const Said one = run_command(folder, 1, line), two = run_command(folder, 2, line + " --tensor-parallel 2");
  ASSERT_EQ(two.end.code, 0) << two.err << two.end.cause;
  const double expected = std::stod(value_of(one.out, "nats_per_token"));
  EXPECT_NEAR(std::stod(value_of(two.out, "nats_per_token")), expected, 1e-5 * expected);  // sums of f32
}

TEST(LaunchDecode, TheBenchmarkRecordsTheRanks) {
  const TemporaryFolder folder;
  const Said said =
      run_command(folder, 2,
                  "bench decode --device cpu --shape qwen3-tiny --prompt-tokens 5 --new-tokens 3 --repeats 1 "
                  "--warmups 0 --tensor-parallel 2 --json " +
                      folder / "records.jsonl");
  ASSERT_EQ(said.end.code, 0) << said.err << said.end.cause;
  const std::string records = folder.get("records.jsonl");
  EXPECT_EQ(std::ranges::count(records, '\n'), 2) << records;  // of rank 0 alone
  expect_parts(records, {"\"ranks\":2", "\"ttft\"", "\"tpot\"", "communicator"});
}

TEST(LaunchDecode, CollectivesOfNoSizeAreAnError) {
  const TemporaryFolder folder;
  const Said said = run_command(
      folder, 2, "bench collective --device cpu --min 3 --max 5 --json " + folder / "records.jsonl");
  EXPECT_EQ(said.end.code, 1) << said.out;
  expect_parts(said.err, {"bench collective: no size from 3 to 5 bytes", "element of f32", "larger --max"});
}

TEST(LaunchDecode, SaysWhatDoesNotFit) {
  const TemporaryFolder folder;
  const std::string model = trained_llama(folder), generate = "generate --device cpu --model " + model;
  const std::string compressed = folder / "compressed";
  ASSERT_EQ(
      run_command(folder, 1, "convert " + model + "/model " + compressed + " --format tca-bme").end.code, 0);
  const struct {
    int ranks;
    std::string line;
    int code;
    std::vector<const char*> says;
  } cases[] = {
      {1,
       generate + " --prompt a --tensor-parallel 2",
       2,
       {"needs 2 ranks", "tessera launch -n 2 -- generate"}},
      {2, generate + " --prompt a", 2, {"2 ranks were started", "--tensor-parallel is 1"}},
      {2,
       generate + " --prompt a --tensor-parallel 4",
       2,
       {"2 ranks were started", "--tensor-parallel is 4"}},
      {4, generate + " --prompt a --tensor-parallel 4", 1, {"kv_heads is 2", "4 ranks do not divide"}},
      {2, generate + " --tensor-parallel 2", 2, {"no standard input", "--prompt"}},
      {2, generate + " --prompt a --tensor-parallel 2 --griffin 0.5", 2, {"--griffin"}},
      {2, generate + " --prompt a --tensor-parallel 2 --rank-exchange peer", 1, {"peer", "CPU"}},
      {1, generate + " --prompt a --rank-exchange peer", 2, {"of several ranks"}},
      {2,
       "generate --device cpu --model " + compressed + " --prompt a --tensor-parallel 2",
       2,
       {"compressed"}},
      {2, "bench decode --device cpu --shape llama-tiny --tensor-parallel 2 --format tca-bme", 2, {"dense"}},
  };
  for (const auto& [ranks, line, code, says] : cases) {
    const Said said = run_command(folder, ranks, line);
    EXPECT_EQ(said.end.code, code) << line << "\n" << said.err;
    for (const char* part : says) expect_parts(said.err, {part});
  }
}

}  // namespace
}  // namespace tessera::dist::test
#endif

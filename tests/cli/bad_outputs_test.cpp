#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "tests/cli/files.h"
#include "tests/place.h"

// Outputs that would replace an input, or cannot be written.

namespace tessera::cli::test {
namespace {

using nlohmann::json;

TEST(Output, IsNeverAnInput) {
  const Workplace at;
  at.put("text", "any text at all\n"), at.put("other", "more\n");
  put_tensors(at, "x.safetensors", {{"x", ramp({2, 3})}});
  fs::create_symlink("text", at / "link");
  ASSERT_EQ(run(at, "tokenizer train --text text --kind byte --out t.json").code, 0);
  for (const std::string line :
       {"tokenizer train --text other text --kind byte --out text",
        "tokenizer train --text text --out ./link", "op relu --in x.safetensors --out x.safetensors",
        "generate --model m --prompt-file text --json link",
        "train gpt --text other text --json-out text --device cpu"}) {
    const std::string text = at.get("text"), tensors = at.get("x.safetensors");
    expect_failure(at, line, 1, "is the input|would be replaced");
    EXPECT_TRUE(at.get("text") == text && at.get("x.safetensors") == tensors) << line;
  }
}

TEST(Output, IsNeverAFileOfAnInputFolder) {
  const Workplace at;
  at.put("r/run.json", "{}"), at.put("m/config.json", "{}"), at.put("m/model.safetensors", "w");
  at.put("c.toml", "quiet = true\n"), at.put("text", "some text\n"), at.put("items", "{}\n");
  fs::create_symlink("m", at / "link");
  const auto all = [&] {
    std::string bytes;
    for (const std::string& file : at.files())
      if (fs::is_regular_file(at / file)) bytes += file + "\n" + at.get(file);
    return bytes;
  };
  const std::string before = all();
  for (const std::string line :
       {"report r --out r/run.json", "train llama --resume r --json r/run.json",
        "train tnp --resume r --json ./r/run.json", "train bert --resume r --json r/run.json",
        "train bert --task mlm --text text --json text", "train llama --config c.toml --json c.toml",
        "train llama --text text --model m --json link/config.json",
        "generate --model m --prompt a --json m/config.json",
        "generate --model link --prompt a --json m/config.json",
        "eval choice items --model m --predictions m/model.safetensors",
        "sparsity compare m m --json m/model.safetensors",
        "sparsity activations --model m --text text --json m/config.json"}) {
    expect_failure(at, line, 1, "is |the input |would be replaced");
    EXPECT_EQ(all(), before) << line;
  }
  // A new file in such a folder replaces nothing: here the model's config.json is what is wrong.
  const Outcome fresh = run(at, "generate --model m --prompt a --json m/new.json");
  EXPECT_EQ(fresh.err.find("would be replaced"), std::string::npos) << fresh.err;
}

/// A shell's > and >> give a command its file as the standard output, which then has the name /dev/stdout,
/// too.
TEST(Output, IsNeverTheFileThatTheCommandPrintsTo) {
  const Workplace at;
  at.put("text", "any text at all\n"), at.put("log", "of earlier commands\n");
  put_tensors(at, "x.safetensors", {{"x", ramp({2, 3})}});
  for (const std::string line :
       {"tokenizer train --text text --kind byte --out log", "op relu --in x.safetensors --out /dev/stdout",
        "generate --model m --prompt a --json log", "bench op relu --seconds 0.001 --json /dev/stdout"}) {
    const Outcome outcome = Process(at, words_of(line), at / "log").wait();
    EXPECT_EQ(outcome.code, 1) << line;
    EXPECT_TRUE(holds_all(outcome.err, "is the file that this command's output goes to"));
    EXPECT_EQ(at.get("log"), "of earlier commands\n") << line;
  }
}

TEST(Output, ThatCannotBeWrittenIsAnError) {
  if (!fs::is_character_file("/dev/full")) GTEST_SKIP() << "skipped: there is no /dev/full";
  const Workplace workplace;
  // Little enough to wait in a buffer until the end, and more.
  for (const std::string line : {"--help", "--version", "plan gpt", "doctor --json", "op --list"}) {
    const Outcome outcome = Process(workplace, words_of(line), "/dev/full").wait();
    EXPECT_EQ(outcome.code, 1) << line;
    EXPECT_TRUE(outcome.err.starts_with("tessera: ") &&
                holds_all(outcome.err, "write: the standard output: "))
        << line << ": " << outcome.err;
    EXPECT_EQ(outcome.err.find('\n'), outcome.err.size() - 1) << outcome.err;
  }
}

/// What a shell makes of the line, the command's output and errors sent elsewhere.
int shell(const Workplace& at, const std::string& line) {
  std::string program = tessera::test::place("TESSERA_PROGRAM", TESSERA_PROGRAM);
  if (program.find('/') != std::string::npos) program = fs::absolute(program).string();
  const int status = std::system(("cd " + at.path() + " && " + program + " " + line).c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST(Output, ProgressThatCannotBeWrittenDoesNotEndARun) {
  if (!fs::is_character_file("/dev/full")) GTEST_SKIP() << "skipped: there is no /dev/full";
  const Workplace at;
  EXPECT_EQ(shell(at, "train tnp --steps 3 --name r" + kTiny + " 2>/dev/full >out"), 0);
  EXPECT_TRUE(fs::exists(at / "runs/r/report.html"));
  EXPECT_EQ(shell(at, "train tnp --stpes 3 2>/dev/full"), 2);
  EXPECT_EQ(shell(at, "eval tnp nowhere 2>/dev/full"), 1);
}

TEST(Output, WhereThereIsNoneNoFileOfARunGetsIt) {
  const Workplace at;
  EXPECT_EQ(shell(at, "train tnp --steps 3 --name r" + kTiny + " <&- >&- 2>&-"), 1);  // it could not say so
  EXPECT_EQ(json::parse(at.get("runs/r/run.json")).at("model"), "tnp");
  EXPECT_TRUE(fs::exists(at / "runs/r/report.html"));
  put_tensors(at, "x.safetensors", {{"x", ramp({2, 3})}});
  EXPECT_EQ(shell(at, "op relu --in x.safetensors --out y.safetensors <&- >&- 2>&-"), 0);
  EXPECT_EQ(io::load_safetensors(at / "y.safetensors").size(), 1u);
}

TEST(Output, LargerThanAFileMayBeIsAnError) {
  const Workplace workplace;
  put_tensors(workplace, "x.safetensors", {{"x", ramp({1000, 100})}});
  struct rlimit old {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
  struct rlimit little = old;
  little.rlim_cur = 100'000;  // processes inherit it
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &little), 0);
  const Outcome outcome = run(workplace, "op relu --in x.safetensors --out y.safetensors");
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old), 0);
  EXPECT_EQ(outcome.code, 1) << "signal " << outcome.signal;
  EXPECT_TRUE(holds_all(outcome.err, "write: y.safetensors|too large"));
  EXPECT_EQ(workplace.files(), std::vector<std::string>{"x.safetensors"});
}

}  // namespace
}  // namespace tessera::cli::test

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/cli/files.h"

// `--config`: flags from a TOML file.

namespace tessera::cli::test {
namespace {

using nlohmann::json;

constexpr BadText kBadConfigs[] = {
    {"UnknownKey", "stpes = 3\n", "run.toml|\"stpes\"|did you mean steps?"},
    {"UnknownKeyAmongGood", "steps = 3\nwidth_of_everything = 8\n", "run.toml|\"width_of_everything\""},
    {"Underscore", "batch_size = 3\n", "run.toml|\"batch_size\"|did you mean batch-size?"},
    {"BadNumber", "lr = \"fast\"\n", "run.toml:1: |--lr|fast is not a number"},
    {"NoQuotes", "\nlr = fast\n", "run.toml:2: not valid TOML"},
    {"TrailingGarbage", "lr = 1e-3x\n", "run.toml:1: not valid TOML"},
    {"TrailingComma", "steps = 1\nlr=0.5,\n", "run.toml:2: not valid TOML"},
    {"NoValue", "lr\n", "run.toml:1: not valid TOML"},
    {"SwitchWithoutValue", "pre-norm\n", "run.toml:1: not valid TOML"},
    {"EmptySection", "[]\n", "run.toml:1: not valid TOML"},
    {"Bytes", "\x01\xFE\xFF\n", "run.toml:1: not valid TOML"},
    {"Date", "steps = 2026-01-01\n", "run.toml:1: \"steps\"|expected a number"},
    {"NotFinite", "lr = nan\n", "run.toml|--lr|nan is not finite"},
    {"OutOfRange", "steps = 0\n", "run.toml|--steps|0 not in range"},
    {"Fraction", "steps = 1.5\n", "run.toml|--steps|1.5 is not a whole number"},
    {"BadChoice", "prior = \"rbg\"\n", "run.toml|--prior|rbg not in"},
    {"BadDevice", "device = \"gpu\"\n", "run.toml|--device|\"gpu\""},
    {"BadFlag", "pre-norm = 3\n", "run.toml|\"pre-norm\"|true or false"},
    {"List", "steps = [1, 2]\n", "run.toml|\"steps\"|one value"},
    {"Twice", "steps = 1\nlr = 1\nsteps = 2\n", "run.toml:3: |steps|redefine"},
    {"Section", "[training]\nsteps = 1\n", "run.toml:1: |[training]|sections"},
    {"ItsOwnName", "config = \"run.toml\"\n", "run.toml|\"config\""},
    {"Contradiction", "prior = \"rbf\"\nfeatures = 3\n", "rbf|one-dimensional"},
    {"ResumeAndLr", "resume = \"r\"\nlr = 1\n", "--resume|--lr cannot change it"},
};

class BadConfigs : public ::testing::TestWithParam<BadText> {};

TEST_P(BadConfigs, AreUsageErrors) {
  const Workplace workplace;
  workplace.put("run.toml", GetParam().text);
  const Outcome outcome = run(workplace, "train tnp --config run.toml");
  EXPECT_EQ(outcome.code, 2) << outcome.out << outcome.err;
  EXPECT_EQ(outcome.err.find('\n'), outcome.err.size() - 1) << outcome.err;
  EXPECT_TRUE(holds_all(outcome.err, GetParam().says)) << "expected " << GetParam().says;
  EXPECT_EQ(workplace.files(), std::vector<std::string>{"run.toml"});
}
INSTANTIATE_TEST_SUITE_P(Kinds, BadConfigs, ::testing::ValuesIn(kBadConfigs),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Config, AFileThatIsNoneIsARunTimeError) {
  const Workplace workplace;
  workplace.put("empty.toml", "");
  for (const std::string name : {"none.toml", ".", "empty.toml"}) {
    expect_failure(workplace, "train tnp --config " + name, 1, name);
  }
}

TEST(Config, MayHoldTheFlagsThatACommandNeeds) {
  const Workplace workplace;
  workplace.put("both.toml", "model = \"none\"\nout = \"o\"\ntext = [\"t\"]\n");
  workplace.put("model.toml", "model = \"none\"\ntext = [\"t\"]\n");
  for (const std::string command :
       {"prune", "calibrate", "sparsify --total 0.5", "sparsity sweep --total 0.5"}) {
    expect_failure(workplace, command + " --config both.toml", 1, "none");
    expect_failure(workplace, command + " --config model.toml", 2, "--out is required");
    expect_failure(workplace, command + " --out o --text t", 2, "--model is required");
  }
}

TEST(Config, GivesFlagsAndTheCommandLineWins) {
  const Workplace workplace;
  workplace.put("run.toml",
                "# a run\nsteps = 7\nlr = +2e-3\npre-norm = true\nquiet = false\nname = "
                "\"from \\u0066ile #1\" # not its name\nfeatures = 0x1\nprior = \"\"\"rbf\"\"\"\nwarmup = "
                "1_0\n");
  const Outcome outcome = run(workplace, "train tnp --config run.toml --steps 3" + kTiny);
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const json job = json::parse(workplace.get("runs/from file #1/run.json"))["job"];
  EXPECT_EQ(job["steps"], 3);
  EXPECT_EQ(job["lr"], 2e-3);
  EXPECT_EQ(job["prior"], "rbf");
  EXPECT_EQ(job["model.pre_norm"], true);
  EXPECT_EQ(job["model.d_model"], 8);
  EXPECT_EQ(job["warmup"], 10);
}

}  // namespace
}  // namespace tessera::cli::test

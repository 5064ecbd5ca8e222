#include <gtest/gtest.h>

#include "tests/cli/files.h"

// Records of benchmarks as files: what `bench compare` reads and `--json` writes.

namespace tessera::cli::test {
namespace {

constexpr const char* kRecord =
    R"({"op":"linear","shape":{"T":4},"dtype":"f32","mode":"fwd","implementation":"a","ms":{"p10":1,"p50":2,"p90":3}})";

constexpr BadText kBadRecords[] = {
    {"Empty", "", "bad.jsonl|empty"},
    {"Blank", "\n\n", "bad.jsonl|no benchmark records"},
    {"NoJson", "op linear 3 ms\n", "bad.jsonl:1|JSON"},
    {"Torn", R"({"op":"linear","shape":{"T":)", "bad.jsonl:1|JSON"},
    {"Array", "[1, 2]\n", "bad.jsonl:1|object"},
    {"Number", "3\n", "bad.jsonl:1|object"},
    {"NothingInIt", "{}\n", "bad.jsonl:1|op"},
    {"NoTiming", R"({"op":"linear","shape":{},"dtype":"f32","mode":"fwd","implementation":"a"})",
     "bad.jsonl:1|ms"},
    {"TimingIsText",
     R"({"op":"linear","shape":{},"dtype":"f32","mode":"fwd","implementation":"a","ms":"fast"})",
     "bad.jsonl:1|string"},
    {"MedianIsText",
     R"({"op":"linear","shape":{},"dtype":"f32","mode":"fwd","implementation":"a","ms":{"p10":1,"p50":"2","p90":3}})",
     "bad.jsonl:1|number"},
    {"MedianIsZero",
     R"({"op":"linear","shape":{},"dtype":"f32","mode":"fwd","implementation":"a","ms":{"p10":0,"p50":0,"p90":0}})",
     "bad.jsonl:1|p50|positive"},
    {"ShapeIsList",
     R"({"op":"linear","shape":[4],"dtype":"f32","mode":"fwd","implementation":"a","ms":{"p10":1,"p50":2,"p90":3}})",
     "bad.jsonl:1|array"},
    {"SizeIsText",
     R"({"op":"linear","shape":{"T":"4"},"dtype":"f32","mode":"fwd","implementation":"a","ms":{"p10":1,"p50":2,"p90":3}})",
     "bad.jsonl:1|number"},
    {"SizeIsFraction",
     R"({"op":"linear","shape":{"T":4.5},"dtype":"f32","mode":"fwd","implementation":"a","ms":{"p10":1,"p50":2,"p90":3}})",
     "bad.jsonl:1|\"T\"|4.5|whole number"},
    {"OperatorIsNumber",
     R"({"op":4,"shape":{},"dtype":"f32","mode":"fwd","implementation":"a","ms":{"p10":1,"p50":2,"p90":3}})",
     "bad.jsonl:1|string"},
    {"LfsPointer", kLfsPointer, "bad.jsonl|Git LFS"},
};

class BadRecords : public ::testing::TestWithParam<BadText> {};

TEST_P(BadRecords, AreRefusedWithFileAndLine) {
  const Workplace workplace;
  workplace.put("good.jsonl", std::string(kRecord) + "\n");
  workplace.put("bad.jsonl", GetParam().text);
  for (const std::string line :
       {"bench compare good.jsonl bad.jsonl", "bench compare bad.jsonl good.jsonl"}) {
    const Outcome outcome = run(workplace, line);
    EXPECT_EQ(outcome.code, 1) << outcome.out << outcome.err;
    EXPECT_TRUE(outcome.err.starts_with("tessera: ")) << outcome.err;
    EXPECT_TRUE(holds_all(first_line(outcome.err), GetParam().says)) << outcome.err;
  }
}
INSTANTIATE_TEST_SUITE_P(Kinds, BadRecords, ::testing::ValuesIn(kBadRecords),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Compare, NamesTheSecondLineAndTheMissingFileAndWorkThatIsNotCommon) {
  const Workplace workplace;
  workplace.put("good.jsonl", std::string(kRecord) + "\n");
  workplace.put("second.jsonl", std::string(kRecord) + "\nrubbish\n");
  std::string other = kRecord;
  other.replace(other.find("linear"), 6, "matmul");
  workplace.put("other.jsonl", other + "\n");
  const auto says = [&](const std::string& line) {
    const Outcome outcome = run(workplace, line);
    EXPECT_EQ(outcome.code, 1) << line;
    return outcome.err;
  };
  EXPECT_TRUE(holds_all(says("bench compare good.jsonl second.jsonl"), "second.jsonl:2|JSON"));
  EXPECT_TRUE(holds_all(says("bench compare good.jsonl none.jsonl"), "none.jsonl|no file"));
  EXPECT_TRUE(holds_all(says("bench compare good.jsonl ."), "directory"));
  EXPECT_TRUE(holds_all(says("bench compare good.jsonl other.jsonl"), "other.jsonl|no common work"));
  const std::string work = std::string(kRecord).substr(1) + "\n";
  workplace.put("cpu.jsonl", R"({"device":"cpu",)" + work);
  workplace.put("gpu.jsonl", R"({"device":"cuda:0",)" + work);
  EXPECT_TRUE(holds_all(says("bench compare cpu.jsonl gpu.jsonl --any-gpu"),
                        "no common work|on the same kind of device: one is of a CPU, the other of a GPU"));
  EXPECT_TRUE(
      holds_all(says("bench compare good.jsonl good.jsonl --html nowhere/p.html"), "nowhere|no folder"));
}

TEST(Json, RecordsBehindATornLineAreWhole) {
  const Workplace workplace;
  workplace.put("torn.jsonl", std::string(kRecord) + "\n" + std::string(kRecord).substr(0, 40));
  ASSERT_EQ(
      run(workplace, "bench op relu --device cpu --shape R=2,C=3 --seconds 0.001 --json torn.jsonl").code, 0);
  const Outcome torn = run(workplace, "bench compare torn.jsonl torn.jsonl");
  EXPECT_TRUE(torn.code == 1 && holds_all(torn.err, "torn.jsonl:2|JSON")) << torn.err;
  std::string text = workplace.get("torn.jsonl");
  text.erase(text.find('\n') + 1, 41);
  workplace.put("mended.jsonl", text + "\r\n");
  const Outcome mended = run(workplace, "bench compare mended.jsonl mended.jsonl");
  EXPECT_EQ(mended.code, 0) << mended.err;
  EXPECT_TRUE(holds_all(mended.out, "linear|relu"));
}

TEST(Json, AFileThatCannotBeWrittenIsNamedBeforeTheWork) {
  const Workplace workplace;
  for (const std::string line :
       {"bench op linear --device cpu --json nowhere/a.jsonl",
        "bench sweep relu --device cpu --json nowhere/a.jsonl",
        "bench optim --device cpu --json nowhere/a.jsonl", "bench copy --device cpu --json nowhere/a.jsonl",
        "bench host --device cpu --json nowhere/a.jsonl",
        "bench step tnp --device cpu --json nowhere/a.jsonl",
        "train tnp --device cpu --json-out nowhere/a.json"}) {
    const Outcome outcome = expect_failure(workplace, line, 1, "nowhere|no folder");
    EXPECT_EQ(outcome.out, "") << line << ": results are printed as they are measured";
    EXPECT_TRUE(workplace.files().empty()) << line;
  }
}

}  // namespace
}  // namespace tessera::cli::test

#if defined(TESSERA_PROGRAM)
#include <gtest/gtest.h>

#include "runtime/device.h"
#include "tests/dist/launched_train.h"
#include "tests/errors.h"

// Commands besides `train` on several ranks: rank 0 speaks for all.

namespace tessera::dist::test {
namespace {

const std::string kBenchSizes =
    " --device cpu --layers 2 --d-model 16 --n-head 2 --d-ff 32 --length 8 --batch-size 2 --vocab-size 50 "
    "--seconds 0.01";

class LaunchBench : public ::testing::TestWithParam<std::string> {};

TEST_P(LaunchBench, AStepNamesTheSlowestRankAndWhatOneTakesAlone) {
  const TemporaryFolder folder;
  const Said said = launched(
      folder,
      {.ranks = 2, .command = tessera("bench step " + GetParam() + " --json " + folder / "step.jsonl")});
  EXPECT_EQ(said.end.code, 0) << said.err << said.end.cause;
  expect_parts(said.out,
               {"% of one rank's", "ms of communication exposed", "slowest: rank ", "(cpu)", "tokens/s"});
  EXPECT_EQ(said.out.find("[1]"), std::string::npos) << said.out;
  const std::string record = folder.get("step.jsonl");
  expect_parts(record, {"\"ranks\":2", "\"alone_ms\":", "\"efficiency\":", "\"exposed_communication_ms\":",
                        "\"slowest\":\"rank "});
  EXPECT_EQ(std::count(record.begin(), record.end(), '\n'), 1);
}

INSTANTIATE_TEST_SUITE_P(
    Of, LaunchBench,
    ::testing::Values("gpt" + kBenchSizes, "llama" + kBenchSizes + " --zero 2 --bucket-mb 0.001",
                      "tnp --device cpu --layers 1 --d-model 8 --d-ff 8 --n-head 1 --emb-hidden 8 "
                      "--components 2 --m 4 --n 4 --batch-size 2 --seconds 0.01 --bucket-mb 0",
                      "bert --device cpu --layers 1 --d-model 8 --d-ff 8 --n-head 1 --vocab-size "
                      "50 --shape 2x8 --seconds 0.01 --zero 1"));

TEST(LaunchDoctor, LinksTellsTheVariablesOfEveryRank) {
  const TemporaryFolder folder;
  std::vector<std::string> command = tessera("doctor --links");
  if (Device::cuda_count() == 1)  // two ranks cannot share it
    command.insert(command.begin(), {"env", "CUDA_VISIBLE_DEVICES="});
  const Said said = launched(folder, {.ranks = 2, .command = command});
  EXPECT_EQ(said.end.code, 0) << said.err << said.end.cause;
  expect_parts(said.out, {"NCCL", "/dev/shm", "locked memory", "open files", "NVLink multicast: off",
                          "rank 0 on ", "rank 1 on ", "NCCL_NVLS_ENABLE=0"});
  EXPECT_EQ(said.out.find("[1]"), std::string::npos) << said.out;
}

}  // namespace
}  // namespace tessera::dist::test
#endif

#include <gtest/gtest.h>

#include <cmath>

#include "tests/cli/language_runs.h"

// Training with 2:4 weights as a user meets it: train, stop and go on, plan; and what is refused, each with
// one line.

namespace tessera::cli::test {
namespace {

using nlohmann::json;

TEST(Weights24Training, LearnsAndLogsFlipRateAndDecay) {
  const Workplace at;
  put_clauses(at);
  const std::string flags = kTrainOnClauses + " --steps 12 --warmup 2 --weights-24-every 4";
  const Outcome outcome = run(at, flags + " --name sparse --weights-24 attn,mlp --dense-first 2");
  expect_success(outcome);
  expect_success(run(at, kTrainOnClauses + " --steps 12 --warmup 2 --name dense"));
  const std::vector<json> sparse = metrics_of(at, "runs/sparse"), dense = metrics_of(at, "runs/dense");
  ASSERT_EQ(sparse.size(), 12u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_NEAR(sparse[i].at("loss").get<double>(), dense[i].at("loss").get<double>(), 1e-4);
    EXPECT_FALSE(sparse[i].contains("flip_rate"));
    EXPECT_EQ(sparse[i].at("masked_decay"), 0);
  }
  EXPECT_GT(std::abs(sparse[2].at("loss").get<double>() - dense[2].at("loss").get<double>()), 1e-3);
  EXPECT_LT(sparse[11].at("loss").get<double>(), sparse[0].at("loss").get<double>() - 0.2);  // it learns
  for (size_t i = 2; i < 12; ++i) {
    EXPECT_GT(sparse[i].at("masked_decay").get<double>(), 0);
    EXPECT_LT(sparse[i].at("flip_rate").get<double>(), 0.5);
  }
  EXPECT_GT(sparse[11].at("flip_rate").get<double>(), 0);
  const json job = json::parse(at.get("runs/sparse/run.json")).at("job");
  EXPECT_EQ(job.at("weights24"), "attn,mlp");
  EXPECT_EQ(job.at("weights24_every"), 4);
  EXPECT_FALSE(json::parse(at.get("runs/dense/run.json")).at("job").contains("weights24"));
}

TEST(Weights24Training, DrawsGradientsByMvueAndSaysSo) {
  const Workplace at;
  put_clauses(at);
  const std::string flags = kTrainOnClauses + " --steps 6 --warmup 2 --weights-24 mlp";
  expect_success(run(at, flags + " --name dense"));
  for (const std::string seed : {" --seed 1", " --seed 2"})
    expect_success(run(at, flags + " --weights-24-gradient mvue --name mvue" + seed.back() + seed));
  const std::vector<json> dense = metrics_of(at, "runs/dense"), one = metrics_of(at, "runs/mvue1");
  EXPECT_NE(one[5].at("loss"), dense[5].at("loss"));
  EXPECT_LT(one[5].at("loss").get<double>(), one[0].at("loss").get<double>());
  EXPECT_EQ(json::parse(at.get("runs/mvue1/run.json")).at("job").at("weights24_gradient"), "mvue");
  const Outcome told = run(at, "train llama --resume runs/mvue2 --steps 7 --device cpu");
  expect_success(told);
  EXPECT_TRUE(holds_all(told.out, "gradients by mvue|weight gradient by cpu"));
}

TEST(Weights24Training, GoesOnToTheSameBitsAndRefusesOtherSettings) {
  const Workplace at;
  put_clauses(at);
  expect_success(run(at, kTrainOnClauses +
                             " --ffn relu2 --sparse24 naive --weights-24 attn --weights-24-every 3 --steps 8 "
                             "--save-every 1 --keep 20 --dense-last 2 --name a"));
  const std::string end = "runs/a/checkpoints/step-000008.safetensors", whole = at.get(end);
  ASSERT_FALSE(whole.empty());
  for (const int step : {2, 3, 7}) {
    for (int later = step + 1; later <= 8; ++later)
      fs::remove(at / ("runs/a/checkpoints/step-00000" + std::to_string(later) + ".safetensors"));
    expect_success(run(at, "train llama --resume runs/a --device cpu --quiet"));
    EXPECT_TRUE(at.get(end) == whole) << "from step " << step;
  }
  for (const std::string flag :
       {"--weights-24 mlp", "--weights-24-every 5", "--weights-24-decay 0.5", "--weights-24-gradient mvue"}) {
    const Outcome other = run(at, "train llama --resume runs/a --steps 9 --device cpu --quiet " + flag);
    EXPECT_NE(other.code, 0) << flag;
    EXPECT_TRUE(holds_all(other.err, flag.substr(0, flag.find(' '))));
  }
}

TEST(Weights24Training, IsPlanned) {
  const Workplace at;
  const std::string plan = "plan llama --json --precision bf16 --vocab-size 300 --length 256";
  const auto parameters = [&](const std::string& more) {
    const Outcome outcome = run(at, plan + more);
    expect_success(outcome);
    return json::parse(outcome.out).at("parameters").get<double>();
  };
  // Of the 130m size: 12 blocks, widths 768 and 2,048; a bit per weight.
  EXPECT_DOUBLE_EQ(parameters(" --weights-24 attn") - parameters(""), 12.0 * 4 * 768 * 768 / 8);
  EXPECT_DOUBLE_EQ(parameters(" --weights-24 attn,mlp") - parameters(" --weights-24 attn"),
                   12.0 * 3 * 768 * 2048 / 8);
  const Outcome text = run(at, "plan llama --weights-24 mlp --weights-24-every 20");
  expect_success(text);
  EXPECT_TRUE(holds_all(text.out, "2:4 in mlp: masks every 20 steps"));
}

TEST(Weights24Training, RefusesWhatMakesNoSense) {
  const Workplace at;
  put_clauses(at);
  const std::string train = kTrainOnClauses + " --steps 4 ";
  expect_failures(
      at, {{train + "--weights-24 all", 2, "--weights-24: all not in {none,attn,mlp,\"attn,mlp\"}"},
           {train + "--weights-24-every 5", 2, "--weights-24-every|needs --weights-24"},
           {train + "--weights-24-decay 1", 2, "--weights-24-decay|needs --weights-24"},
           {train + "--weights-24-gradient mvue", 2, "--weights-24-gradient|needs --weights-24"},
           {train + "--weights-24 mlp --weights-24-gradient half", 2, "--weights-24-gradient"},
           {train + "--weights-24 mlp --weights-24-gradient mvue --order global", 2, "random choices"},
           {train + "--weights-24 mlp --weights-24-every 0", 2, "--weights-24-every"},
           {train + "--weights-24 mlp --weights-24-decay -1", 2, "--weights-24-decay"},
           {train + "--weights-24 mlp --dense-first 2 --dense-last 2", 2, "none of the 4 steps"},
           {train + "--weights-24 mlp --ffn relu2 --sparse24 naive", 2, "one sparse operand"},
           {train + "--weights-24 mlp --ffn relu2 --activation-l1 1", 2, "--activation-l1"},
           {train + "--weights-24 mlp --form low_rank --rank 4", 2, "--form low_rank"}});
}

}  // namespace
}  // namespace tessera::cli::test

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/cli/files.h"

// `tessera sparsity gradients` as a user meets it: of a run, its checkpoint and its model; bad input. And
// `train bert --missing-grad`, where gradients do not arrive.

namespace tessera::cli::test {
namespace {

const std::string kMeasure = " --data glue --batch-size 4 --max-length 24 --batches 2 --device cpu";

void train_for_gradients(const Workplace& at, const std::string& further = "") {
  said(at, "data glue --out glue --train 24 --dev 8 --test 4 --task sst2");
  said(at,
       "train bert --task sst2 --data glue --scratch --layers 2 --d-model 8 --n-head 1 --d-ff 8 --vocab-size "
       "300 "
       "--batch-size 4 --max-length 24 --lr 1e-3 --device cpu --quiet --seeds 1 --steps 3 --save-model "
       "--name g" +
           further);
}

void expect_checkpoint_as_model(const std::string& further) {
  const Workplace at;
  train_for_gradients(at, further);
  const std::string line = "sparsity gradients --model runs/g/seed-0 --task sst2 --no-dropout --out ";
  const std::string of_model = said(at, line + "a" + kMeasure);
  EXPECT_TRUE(
      holds_all(of_model, "bert.encoder.layer.1.attention.self.query|bert.pooler.dense|page: a/grad"));
  fs::remove_all(at / "runs/g/seed-0/model");
  said(at, line + "b" + kMeasure);
  for (const char* file : {"/gradients.csv", "/energy.csv", "/magnitudes.csv"}) {
    EXPECT_NE(at.get("a" + std::string(file)), "") << file;
    EXPECT_EQ(at.get("a" + std::string(file)), at.get("b" + std::string(file))) << file;
  }
  EXPECT_EQ(nlohmann::json::parse(at.get("b/gradients.json")).at("tasks").size(), 1u);
}

TEST(SparsityGradients, OfAModelAndOfTheCheckpointThatItIsFrom) {
  expect_checkpoint_as_model("");
}

/// The zeros are none of the run's own slice, nor the layers those that it drops.
TEST(SparsityGradients, OfACheckpointOfASlicedRunAreWhole) {
  expect_checkpoint_as_model(" --slice first --rows 2 --slice-layers all --dropbp 0.5");
}

TEST(SparsityGradients, RefuseWhatMakesNoSense) {
  const Workplace at;
  train_for_gradients(at);
  expect_failures(
      at,
      {{"sparsity gradients --task sst2 --data glue", 2, "--model is required"},
       {"sparsity gradients --model runs/g/seed-0", 2, "nothing to measure on|--task NAMES|--text FILE"},
       {"sparsity gradients --model runs/g/seed-0 --task sst2", 2, "--task needs --data"},
       {"sparsity gradients --model runs/g/seed-0 --task sst2, --data glue", 2, "--task|empty part"},
       {"sparsity gradients --model runs/g/seed-0 --task sst2 --data glue --top 0", 2, "--top|10%"},
       {"sparsity gradients --model runs/g/seed-0 --task sst2 --data glue --top 150%", 2, "--top|150%"},
       {"sparsity gradients --model runs/g/seed-0 --task sst2 --data glue --tolerance -1", 2, "--tolerance"},
       {"sparsity gradients --model runs/g/seed-0 --task sst2 --data glue --tolerance nan", 2, "--tolerance"},
       {"sparsity gradients --model runs/g/seed-0 --task sst2 --data glue --padding all", 2,
        "max, longest or none"},
       {"sparsity gradients --model runs/g/seed-0 --task sst2 --data glue --batches 0", 2, "--batches"},
       {"sparsity gradients --model runs/g/seed-0 --task sst2 --data glue --dtype f16", 2, "--dtype"},
       {"sparsity gradients --model runs/g/seed-0 --task sst2 --data glue --part test", 2, "--part"},
       {"sparsity gradients --model runs/g --task sst2 --data glue --device cpu", 1, "seed-0"},
       {"sparsity gradients --model glue --task sst2 --data glue --device cpu", 1, "config.json|run.json"},
       {"sparsity gradients --model runs/g/seed-0 --task sst2 --data nowhere --device cpu", 1, "nowhere"},
       {"sparsity gradients --model runs/g/seed-0 --task sst2 --data glue --batch-size 25 --device cpu", 1,
        "24 examples|--batch-size"},
       {"sparsity gradients --model runs/g/seed-0 --task sst2 --data glue --layers h.* --batch-size 4 "
        "--device cpu",
        1, "no linear module"},
       {"sparsity gradients --model runs/g/seed-0 --text missing.txt --device cpu", 1, "missing.txt"}});
  fs::remove_all(at / "runs/g/seed-0/model");
  expect_failures(
      at, {{"sparsity gradients --model runs/g/seed-0 --task rte --data glue --device cpu", 1,
            "checkpoint of task sst2|--save-model"},
           {"sparsity gradients --model runs/g/seed-0 --task sst2 --data glue --dtype bf16 --device cpu", 1,
            "is in f32|--dtype f32"}});
}

TEST(SparsityGradients, WithoutMaxLengthTextsAreAsLongAsTheModelTakes) {
  const Workplace at;
  train_for_gradients(at);
  const std::string model = "runs/g/seed-0/model";
  limit_positions(at, model, 20);
  const std::string measure = "sparsity gradients --model " + model +
                              " --task sst2 --data glue --batch-size 4 --batches 1 --device cpu --out a";
  said(at, measure);
  EXPECT_EQ(nlohmann::json::parse(at.get("a/gradients.json")).at("max_length"), 20);
  expect_failures(at, {{measure + " --max-length 21", 1, "--max-length is 21|positions for 20"}});
}

const std::string kDropped =
    "train bert --task sst2 --data glue --scratch --layers 2 --d-model 8 --n-head 1 --d-ff 8 --vocab-size "
    "300 "
    "--batch-size 4 --max-length 24 --lr 1e-3 --schedule constant --warmup 0 --device cpu --quiet --seeds 1 "
    "--dropbp 0.5 ";

TEST(MissingGrad, IsStoredAndARunGoesOnToTheSameBytes) {
  const Workplace at;
  said(at, "data glue --out glue --train 24 --dev 8 --test 4 --task sst2");
  const std::string out = said(at, kDropped + "--missing-grad skip --steps 6 --name whole");
  EXPECT_TRUE(holds_all(out, "parameters without a gradient are skipped"));
  said(at, kDropped + "--missing-grad skip --steps 3 --name parts");
  expect_failure(at, "train bert --resume runs/parts --steps 6 --device cpu --missing-grad zero", 2,
                 "--missing-grad cannot change it");
  said(at, "train bert --resume runs/parts --steps 6 --device cpu --quiet");
  const auto last = [&](const std::string& run) {
    return at.get("runs/" + run + "/seed-0/checkpoints/step-000006.safetensors");
  };
  EXPECT_NE(last("whole"), "");
  EXPECT_EQ(last("whole"), last("parts"));
  EXPECT_EQ(nlohmann::json::parse(at.get("runs/whole/run.json")).at("job").at("missing_grad"), "skip");
  said(at, kDropped + "--steps 6 --name zero");
  EXPECT_NE(last("whole"), last("zero"));
  EXPECT_FALSE(nlohmann::json::parse(at.get("runs/zero/run.json")).at("job").contains("missing_grad"));
}

TEST(MissingGrad, RefusesWhatHasNone) {
  const Workplace at;
  said(at, "data glue --out glue --train 24 --dev 8 --test 4 --task sst2");
  at.put("t.txt", "a line of text\n");
  const std::string train =
      "train bert --task sst2 --data glue --scratch --batch-size 4 --device cpu --missing-grad ";
  expect_failures(at,
                  {{(train + "none").c_str(), 2, "--missing-grad"},
                   {(train + "skip --optimizer muon").c_str(), 2, "--missing-grad skip|adamw or sgd"},
                   {(train + "skip --momentum-reset 5").c_str(), 2, "--missing-grad skip|--momentum-reset"},
                   {"train bert --task mlm --text t.txt --missing-grad skip", 2,
                    "--missing-grad: in pretraining every parameter"}});
}

}  // namespace
}  // namespace tessera::cli::test

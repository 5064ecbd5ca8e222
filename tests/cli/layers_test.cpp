#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/cli/files.h"

// `tessera bench layers` as a user meets it: its tables and files, tasks of GLUE, bad input.

namespace tessera::cli::test {
namespace {

const std::string kSmallLayers =
    " --layers 2 --d-model 8 --n-head 2 --d-ff 16 --vocab-size 40 --batch-size 2 --max-length 8 --device cpu "
    "--seconds 0.001";

TEST(BenchLayers, PrintsTimesAndWritesCsvTraceAndRecords) {
  const Workplace at;
  const std::string text =
      said(at,
           "bench layers bert --slice importance --rows 25% --unfused --csv l.csv --trace "
           "t.json --json r.json" +
               kSmallLayers);
  EXPECT_TRUE(
      holds_all(text,
                "synthetic: 2 texts, 16 tokens|modified: --slice importance|embeddings|query/key/value|"
                "attention output|  intermediate|  output|norms|head|speedup|"
                "the 20 operators that take longest|add_layernorm"))
      << text;
  const std::string csv = at.get("l.csv");
  EXPECT_TRUE(
      csv.starts_with("Task,Layer,Kind,Original Forward (ms),Modified Forward (ms),Forward Speedup,"
                      "Original Backward (ms),Modified Backward (ms),Backward Speedup"))
      << csv;
  EXPECT_NE(csv.find("\nsynthetic,all,all,"), std::string::npos) << csv;
  const auto trace = nlohmann::json::parse(at.get("t.json"));
  bool sliced = false;
  for (const auto& event : trace.at("traceEvents"))
    if (event.at("ph") == "M")
      sliced =
          sliced || event.at("args").at("name").get<std::string>().find("importance") != std::string::npos;
  EXPECT_TRUE(sliced);
  const auto records = json_lines(at.get("r.json"));
  for (const auto& record : records) {
    EXPECT_EQ(record.at("op"), "layers bert");
    EXPECT_GE(record.at("attrs").at("layer").get<std::string>().size(), 1u);
  }
  EXPECT_GT(records.size(), 4 * 10u);
}

TEST(BenchLayers, TimesTasksWithTheModelThatReadsThem) {
  const Workplace at;
  for (const char* const task : {"sst2", "rte"})
    said(at, std::string("data glue --out glue --train 24 --dev 8 --test 4 --task ") + task);
  said(at,
       "train bert --task sst2 --data glue --scratch --layers 2 --d-model 8 --n-head 1 --d-ff 8 --vocab-size "
       "300 --batch-size 4 --max-length 24 --device cpu --quiet --seeds 1 --steps 1 --save-model --name g");
  const std::string line =
      "bench layers bert --model runs/g/seed-0 --max-length 24 --device cpu --seconds 0.001 ";
  const std::string small = line + "--batch-size 4 ";
  const std::string text =
      said(at, small + "--task sst2,rte --data glue --slice random --rows 2 --csv l.csv");
  EXPECT_TRUE(holds_all(text, "sst2: 4 texts|rte: 4 texts|random"));
  EXPECT_TRUE(holds_all(at.get("l.csv"), "sst2,all,all,|rte,all,all,|sst2,1,feed-forward,"));
  EXPECT_TRUE(holds_all(said(at, small), "synthetic: 4 texts, 96 tokens"));
  expect_failures(at, {{line + "--task sst2", 2, "--task needs --data"},
                       {line + "--task sst3 --data glue", 2, "sst3"},
                       {line + "--layers 3", 2, "--model has its own sizes|--layers"},
                       {line + "--task sst2 --data nowhere", 1, "nowhere"},
                       {line + "--task sst2 --data glue --batch-size 25", 1, "24 examples|--batch-size"},
                       {"bench layers roberta --model runs/g/seed-0/model --device cpu", 1,
                        "holds a bert|bench layers bert"}});
}

TEST(BenchLayers, WithoutMaxLengthTextsAreAsLongAsTheModelTakes) {
  const Workplace at;
  said(at, "data glue --out glue --train 24 --dev 8 --test 4 --task sst2");
  said(at,
       "train bert --task sst2 --data glue --scratch --layers 1 --d-model 8 --n-head 1 --d-ff 8 --vocab-size "
       "300 --batch-size 4 --max-length 24 --device cpu --quiet --seeds 1 --steps 1 --save-model --name g");
  const std::string model = "runs/g/seed-0/model",
                    line = "bench layers bert --batch-size 4 --device cpu --seconds 0.001 --model " + model;
  EXPECT_TRUE(holds_all(said(at, line), "synthetic: 4 texts, 512 tokens")) << "128 of each";
  limit_positions(at, model, 20);
  const Outcome outcome = run(at, line + " --json r.json");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(holds_all(outcome.out, "synthetic: 4 texts, 80 tokens"));
  EXPECT_TRUE(holds_all(outcome.err, "20 tokens per text"));
  EXPECT_TRUE(holds_all(said(at, line + " --task sst2 --data glue"), "sst2: 4 texts"));
  expect_failures(at, {{line + " --max-length 21", 1, "--max-length is 21|positions for 20"}});
}

TEST(BenchLayers, RefusesWhatMakesNoSense) {
  const Workplace at;
  expect_failures(at,
                  {{"bench layers", 2, "subcommand"},
                   {"bench layers gpt", 2, "gpt"},
                   {"bench layers bert --rows 10%" + kSmallLayers, 2, "--rows|--slice"},
                   {"bench layers bert --slice importance" + kSmallLayers, 2, "--rows"},
                   {"bench layers bert --slice importance --rows 150%" + kSmallLayers, 2, "slice"},
                   {"bench layers bert --slice first --rows 2 --probe-gradient 3" + kSmallLayers, 2,
                    "--probe-gradient|train bert"},
                   {"bench layers bert --slice first --rows 2 --slice-layers h.*" + kSmallLayers, 1, "h.*"},
                   {"bench layers bert --data glue" + kSmallLayers, 2, "--data needs --task"},
                   {"bench layers bert --task sst2 --data glue" + kSmallLayers, 2, "--task needs --model"},
                   {"bench layers bert --max-length 600 --device cpu", 2, "--max-length is 600"},
                   {"bench layers bert --n-head 5 --device cpu", 2, "heads"},
                   {"bench layers bert --trace nowhere/t.json" + kSmallLayers, 1, "nowhere"},
                   {"bench layers bert --dropout 1" + kSmallLayers, 2, "--dropout"}});
}

}  // namespace
}  // namespace tessera::cli::test

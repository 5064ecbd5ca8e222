#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <nlohmann/json.hpp>

#include "io/safetensors.h"
#include "tests/cli/command.h"

// `tessera train bert` as a user meets it: several seeds in one folder, stopped and resumed, bad files.

namespace tessera::cli::test {
namespace {

using nlohmann::json;

const std::string kSmall =
    " --scratch --layers 1 --d-model 8 --n-head 1 --d-ff 8 --vocab-size 300 --batch 4 --max-length 32 --lr "
    "1e-3"
    " --device cpu --quiet --log-every 1";

void make_data(const Workplace& at, const std::string& task = "sst2") {
  const Outcome made = run(at, "data glue --out glue --train 40 --dev 12 --test 6 --task " + task);
  ASSERT_EQ(made.code, 0) << made.err;
}

/// The curve without its timings.
std::vector<std::string> bert_curve(const Workplace& at, const std::string& run) {
  return curve_of(at, run, {"loss", "grad_norm", "eval_"});
}

std::string last_checkpoint(const Workplace& at, const std::string& run, int64_t step) {
  std::string digits = std::to_string(step);
  return at.get(run + "/checkpoints/step-" + std::string(6 - digits.size(), '0') + digits + ".safetensors");
}

void expect_same_seeds(const Workplace& at, const std::string& a, const std::string& b, int seeds,
                       int64_t steps) {
  for (int seed = 0; seed < seeds; ++seed) {
    const std::string one = a + "/seed-" + std::to_string(seed), other = b + "/seed-" + std::to_string(seed);
    EXPECT_NE(last_checkpoint(at, one, steps), "") << one;
    EXPECT_EQ(last_checkpoint(at, one, steps), last_checkpoint(at, other, steps)) << other;
    EXPECT_EQ(bert_curve(at, one), bert_curve(at, other)) << other;
    EXPECT_EQ(int64_t(bert_curve(at, one).size()), steps);
  }
}

TEST(TrainBert, AModelOfWhichAPartIsTrainedIsSavedWhole) {
  const Workplace at;
  make_data(at);
  for (const std::string part : {"biases", "head"}) {
    const std::string given = "train bert --task sst2 --data glue --seeds 1 --steps 2 --save-model --name ";
    const Outcome trained = run(at, given + part + " --train " + part + kSmall);
    ASSERT_EQ(trained.code, 0) << trained.err;
    const Outcome again =
        run(at, "train bert --task sst2 --data glue --seeds 1 --steps 1 --device cpu --quiet --name from-" +
                    part + " --model runs/" + part + "/seed-0/model");
    EXPECT_EQ(again.code, 0) << again.err;
  }
}

TEST(TrainBert, BeginsWithTheModelOfARun) {
  const Workplace at;
  make_data(at);
  const std::string some = "train bert --task sst2 --data glue --seeds 1 --steps 2 --name ";
  expect_success(run(at, some + "a --save-model" + kSmall));
  expect_success(run(at, some + "without" + kSmall));
  const std::string rest = " --device cpu --quiet --max-length 32 --log-every 1";
  expect_success(run(at, some + "b --model runs/a/seed-0" + rest));
  expect_success(run(at, some + "c --model runs/a/seed-0/model" + rest));
  expect_same_seeds(at, "runs/b", "runs/c", 1, 2);
  expect_failure(at, some + "d --model runs/without/seed-0" + rest, 1,
                 "runs/without/seed-0 is a run without an export");
  expect_failure(at, some + "d --model runs/a" + rest, 1,
                 "runs/a is a run of several seeds|name the folder of one, runs/a/seed-*");
}

TEST(TrainBert, SeveralSeedsEndInOneTableAndOneFolder) {
  const Workplace at;
  make_data(at);
  const Outcome outcome =
      run(at,
          "train bert --task SST-2 --data glue --seeds 3 --steps 12 --predict --save-model "
          "--json-out out.json --name g" +
              kSmall);
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(holds_all(outcome.out,
                        "bert on SST-2: 3 seeds|seed-0|seed-1|seed-2|mean +- deviation|accuracy|report:"));
  const json out = json::parse(at.get("out.json"));
  EXPECT_EQ(out.at("seeds"), 3);
  const json& accuracy = out.at("metrics").at("eval_accuracy");
  EXPECT_EQ(accuracy.at("values").size(), 3u);
  const double mean = accuracy.at("mean");
  EXPECT_NEAR(mean * 3,
              accuracy["values"][0].get<double>() + accuracy["values"][1].get<double>() +
                  accuracy["values"][2].get<double>(),
              1e-12);
  for (const char* file :
       {"report.html", "summary.json", "run.json", "tokenizer.json", "seed-1/report.html",
        "seed-2/metrics.jsonl", "seed-0/model/model.safetensors", "seed-0/model/tokenizer.json"})
    EXPECT_TRUE(fs::exists(at / ("runs/g/" + std::string(file)))) << file;
  const std::string predictions = at.get("runs/g/seed-1/predictions/SST-2.tsv");
  EXPECT_TRUE(predictions.starts_with("index\tprediction\n0\t")) << predictions;
  EXPECT_EQ(std::count(predictions.begin(), predictions.end(), '\n'), 7);

  // What it saved is a model to begin with: the same dev part, the same evaluation before a step is worth
  // much.
  const Outcome again =
      run(at,
          "train bert --task sst2 --data glue --model runs/g/seed-0/model --seeds 1 --steps 1 "
          "--lr 1e-12 --batch 4 --max-length 32 --device cpu --quiet --json-out again.json --name h");
  ASSERT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(json::parse(at.get("again.json"))["metrics"]["eval_accuracy"]["mean"], accuracy["values"][0]);

  // A finished group is not trained again.
  const Outcome done = run(at, "train bert --resume runs/g --device cpu --quiet");
  EXPECT_EQ(done.code, 0) << done.err;
  EXPECT_EQ(done.out.find("trained"), std::string::npos) << done.out;
}

TEST(TrainBert, TheSummaryHasTheTimesOfTheRunsThatWereTrained) {
  const Workplace at;
  make_data(at);
  said(at, "train bert --task sst2 --data glue --seeds 2 --steps 4 --name g --json out.json" + kSmall);
  const json out = json::parse(at.get("out.json"));
  EXPECT_GT(out.at("timing_s").at("total").get<double>(), 0);
  const double step = out.at("avg_step_ms");
  EXPECT_GT(step, 0);
  EXPECT_NEAR(out.at("throughput").at("texts_per_s").get<double>(), 4e3 / step, 1e-6 * 4e3 / step);
  EXPECT_GT(out.at("throughput").at("tokens_per_s").get<double>(), 0);
  EXPECT_GT(out.at("peak_mem_bytes").get<int64_t>(), 0);
  said(at, "train bert --resume runs/g --device cpu --quiet --json out.json");
  for (const char* key : {"timing_s", "avg_step_ms", "throughput"})
    EXPECT_FALSE(json::parse(at.get("out.json")).contains(key)) << key << " of a group that was finished";
}

TEST(TrainBert, AFinishedGroupWritesWhatItIsAskedForLater) {
  const Workplace at;
  make_data(at);
  const std::string train = "train bert --task sst2 --data glue --seeds 2 --steps 4" + kSmall;
  ASSERT_EQ(run(at, train + " --name first --predict --save-model").code, 0);
  // Pairs need the types 0 and 1, which transformers 5 gives a model only if this file names them.
  EXPECT_TRUE(
      holds_all(at.get("runs/first/seed-0/model/tokenizer_config.json"), "model_input_names|token_type_ids"));
  const Outcome plain = run(at, train + " --name later");
  ASSERT_EQ(plain.code, 0) << plain.err;
  EXPECT_TRUE(holds_all(plain.out, "weights   all initialised at random"));
  const Outcome asked = run(at, "train bert --resume runs/later --predict --save-model --device cpu --quiet");
  ASSERT_EQ(asked.code, 0) << asked.err;
  EXPECT_TRUE(holds_all(
      asked.out, "predictions: runs/later/seed-1/predictions/SST-2.tsv|model: runs/later/seed-1/model"));
  EXPECT_EQ(asked.out.find("trained"), std::string::npos) << asked.out;
  for (const std::string file : {"predictions/SST-2.tsv", "model/model.safetensors", "model/config.json",
                                 "model/tokenizer.json", "report.html"})
    for (const std::string seed : {"seed-0/", "seed-1/"}) {
      EXPECT_TRUE(fs::exists(at / ("runs/later/" + seed + file))) << file;
      if (file != "report.html")
        EXPECT_TRUE(at.get("runs/later/" + seed + file) == at.get("runs/first/" + seed + file)) << file;
    }
  // What is there already is not recomputed.
  const Outcome again = run(at, "train bert --resume runs/later --device cpu --quiet");
  EXPECT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(again.out.find("predictions:"), std::string::npos) << again.out;
}

/// Options that a call gave the group and that its later seeds have not taken yet.
TEST(TrainBert, TheGroupsOptionsAreThoseOfEachSeed) {
  const Workplace at;
  make_data(at);
  ASSERT_EQ(
      run(at, "train bert --task sst2 --data glue --seeds 2 --steps 4 --save-every 2 --name g" + kSmall).code,
      0);
  cut_back(at, "runs/g/seed-1", 2);
  json group = json::parse(at.get("runs/g/run.json"));
  group["options"]["predict"] = true, group["options"]["log_every"] = 2;
  at.put("runs/g/run.json", group.dump());
  const Outcome outcome = run(at, "train bert --resume runs/g --device cpu --quiet");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(fs::exists(at / "runs/g/seed-1/predictions/SST-2.tsv"));
  EXPECT_EQ(json::parse(at.get("runs/g/seed-1/run.json")).at("options").at("log_every"), 2);
}

TEST(TrainBert, AGroupThatGoesOnTakesNoStepsThatDoNotFitItNorFlagsOfPretraining) {
  const Workplace at;
  make_data(at);
  ASSERT_EQ(
      run(at, "train bert --task sst2 --data glue --seeds 1 --steps 6 --warmup 4 --save-every 2 --name g" +
                  kSmall)
          .code,
      0);
  cut_back(at, "runs/g/seed-0", 2);
  const std::string before = at.get("runs/g/run.json"),
                    resume = "train bert --resume runs/g --device cpu --quiet ";
  expect_failure(at, resume + "--steps 3", 1, "warmup is 4 of 3 steps");
  expect_failure(at, resume + "--eval-tokens 5", 2, "--eval-tokens is only for --task mlm");
  EXPECT_EQ(at.get("runs/g/run.json"), before);
  EXPECT_EQ(run(at, resume).code, 0);
}

TEST(TrainBert, SaysWhichDropoutItApplies) {
  const Workplace at;
  make_data(at);
  const std::string train = "train bert --task sst2 --data glue --seeds 1 --steps 1" + kSmall;
  const Outcome usual = run(at, train + " --name a");
  ASSERT_EQ(usual.code, 0) << usual.err;
  EXPECT_NE(usual.out.find("dropout   0.1 of rows, 0.1016 of attention probabilities"), std::string::npos)
      << usual.out;
  const Outcome none = run(at, train + " --name b --dropout 0");
  ASSERT_EQ(none.code, 0) << none.err;
  EXPECT_EQ(none.out.find("dropout"), std::string::npos) << none.out;
  // Attention would apply 0: refused, and nothing is written.
  const Outcome tiny = run(at, train + " --name c --dropout 0.001");
  EXPECT_EQ(tiny.code, 1);
  EXPECT_NE(tiny.err.find("would be rounded to 0"), std::string::npos) << tiny.err;
  EXPECT_FALSE(std::filesystem::exists(at / "runs/c"));
}

TEST(TrainBert, SaysWhichWeightsAreNew) {
  const Workplace at;
  make_data(at);
  const std::string train = "train bert --seeds 1 --steps 2 --data glue" + kSmall;
  ASSERT_EQ(run(at, train + " --task sst2 --name a --save-model").code, 0);
  const std::string rest =
      " --seeds 1 --steps 2 --batch 4 --max-length 32 --device cpu --quiet --data glue --task sst2";
  const Outcome whole = run(at, "train bert --model runs/a/seed-0/model --name b" + rest);
  ASSERT_EQ(whole.code, 0) << whole.err;
  EXPECT_TRUE(holds_all(whole.out, "weights   from |none initialised at random"));
  EXPECT_EQ(whole.out.find("not used"), std::string::npos) << whole.out;
  // Without its classifier, and with a head that this model has not.
  io::NamedTensors tensors;
  for (const auto& [name, tensor] : io::load_safetensors(at / "runs/a/seed-0/model/model.safetensors"))
    if (!name.starts_with("classifier.")) tensors.emplace_back(name, tensor);
  tensors.emplace_back("cls.seq_relationship.bias", Tensor::zeros({2}, DType::f32, Device::cpu()));
  io::save_safetensors(at / "runs/a/seed-0/model/model.safetensors", tensors);
  const Outcome part = run(at, "train bert --model runs/a/seed-0/model --name c" + rest);
  ASSERT_EQ(part.code, 0) << part.err;
  EXPECT_TRUE(holds_all(part.out,
                        "initialised at random: classifier.out.weight, classifier.out.bias|not used: "
                        "cls.seq_relationship.bias"));
}

TEST(TrainBert, TheTwoPartsOfMnliAndAScore) {
  const Workplace at;
  make_data(at, "mnli");
  make_data(at, "stsb");
  const Outcome mnli =
      run(at, "train bert --task mnli --data glue --seeds 1 --epochs 0.5 --predict --name m" + kSmall);
  ASSERT_EQ(mnli.code, 0) << mnli.err;
  EXPECT_TRUE(holds_all(mnli.out, "accuracy_matched|accuracy_mismatched|5 steps"));
  EXPECT_TRUE(fs::exists(at / "runs/m/seed-0/predictions/MNLI-mm.tsv"));
  EXPECT_TRUE(holds_all(at.get("runs/m/seed-0/predictions/MNLI-m.tsv"), "index|0\t"));
  const Outcome stsb =
      run(at, "train bert --task stsb --data glue --seeds 1 --steps 3 --pad --name s" + kSmall);
  ASSERT_EQ(stsb.code, 0) << stsb.err;
  EXPECT_TRUE(holds_all(stsb.out, "pearson|spearman|padded"));
}

TEST(SlowTrainBert, TheNumberOfThreadsChangesNoBit) {
  const Workplace at;
  make_data(at);
  const std::string flags =
      "train bert --task sst2 --data glue --seeds 1 --steps 200 --scratch --layers 2 --d-model 64 --n-head 4 "
      "--d-ff 256 --vocab-size 300 --batch 16 --max-length 32 --lr 1e-3 --device cpu --quiet --log-every 1 "
      "--name threads-";
  for (const char* threads : {"1", "2", "4"}) {
    const Variable set("TESSERA_THREADS", threads);
    const Outcome outcome = run(at, flags + threads);
    ASSERT_EQ(outcome.code, 0) << outcome.err;
  }
  expect_same_seeds(at, "runs/threads-1", "runs/threads-2", 1, 200);
  expect_same_seeds(at, "runs/threads-1", "runs/threads-4", 1, 200);
}

class BertInterrupted : public ::testing::TestWithParam<int> {};

TEST_P(BertInterrupted, GoesOnWithTheRightSeedToTheSameBits) {
  constexpr int64_t kSteps = 1000;
  const Workplace at;
  make_data(at);
  const std::string flags =
      "train bert --task sst2 --data glue --seeds 2 --steps 1000 --save-every 50 --eval-every 250" + kSmall;
  const Outcome whole = run(at, flags + " --name whole");
  ASSERT_EQ(whole.code, 0) << whole.err;
  Process process(at, words_of(flags + " --name cut"));
  ASSERT_TRUE(wait_for(process, [&] { return steps_logged(at, "runs/cut/seed-1") >= 60; }));
  process.send(GetParam());
  const Outcome cut = process.wait();
  ASSERT_LT(steps_logged(at, "runs/cut/seed-1"), kSteps) << "it ended before the signal";
  if (GetParam() == SIGINT) {
    ASSERT_EQ(cut.code, 130) << cut.out << cut.err;
    EXPECT_TRUE(holds_all(cut.out, "saved|tessera train bert --resume runs/cut --device cpu"));
  } else {
    ASSERT_EQ(cut.signal, SIGKILL);
  }
  const Outcome resumed =
      run(at, GetParam() == SIGINT ? "train bert --resume runs/cut --device cpu --quiet"
                                   : "train bert --resume runs/cut/seed-0 --device cpu --quiet");
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_TRUE(holds_all(resumed.out, "resuming from|seed-1|mean +- deviation"));
  EXPECT_EQ(resumed.out.find("seed 0 on"), std::string::npos) << "the first seed was done: " << resumed.out;
  expect_same_seeds(at, "runs/whole", "runs/cut", 2, kSteps);
  EXPECT_EQ(json::parse(at.get("runs/whole/summary.json")).at("metrics"),
            json::parse(at.get("runs/cut/summary.json")).at("metrics"));
}
INSTANTIATE_TEST_SUITE_P(By, BertInterrupted, ::testing::Values(SIGINT, SIGKILL), [](const auto& info) {
  return std::string(info.param == SIGINT ? "Sigint" : "Sigkill");
});

TEST(TrainBert, ARunGoesOnWithItsOwnDataOnly) {
  const Workplace at;
  make_data(at);
  ASSERT_EQ(run(at, "train bert --task sst2 --data glue --seeds 1 --steps 4 --name g" + kSmall).code, 0);
  at.put("glue/SST-2/dev.tsv", at.get("glue/SST-2/dev.tsv") + "a fine film\t1\n");
  expect_failure(at, "train bert --resume runs/g --device cpu --steps 8", 1,
                 "the data or the tokenizer differs from those that|runs/g");
}

TEST(TrainBert, SlicesItsBackwardPassAndGoesOnToTheSameBits) {
  const Workplace at;
  make_data(at);
  const std::string line =
      "train bert --task sst2 --data glue --seeds 1 --eval-every 100 --schedule constant --warmup 0" + kSmall;
  const std::string slice = " --slice importance --rows 25% --weight-grad full --slice-layers all";
  const Outcome whole = run(at, line + slice + " --steps 6 --name whole");
  ASSERT_EQ(whole.code, 0) << whole.err;
  EXPECT_TRUE(holds_all(whole.out, "slice     importance 25%, weight_grad full, of all"));
  const json kept = json::parse(at.get("runs/whole/run.json"))["job"];
  EXPECT_EQ(kept["slice"], "importance");
  EXPECT_EQ(kept["rows"], "25%");
  EXPECT_EQ(kept["slice_layers"], "all");
  ASSERT_EQ(run(at, line + slice + " --steps 3 --name part").code, 0);
  const Outcome resumed = run(at, "train bert --resume runs/part --steps 6 --device cpu --quiet");
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  // The part was evaluated at its own end as well.
  const auto losses = [&](const char* name) { return curve_of(at, name, {"loss", "grad_norm"}); };
  EXPECT_EQ(losses("runs/part/seed-0"), losses("runs/whole/seed-0"));
  ASSERT_EQ(run(at, line + " --steps 6 --name dense").code, 0);
  EXPECT_NE(losses("runs/dense/seed-0"), losses("runs/whole/seed-0"));
  expect_failure(at, "train bert --resume runs/part --slice random --device cpu", 2,
                 "--resume continues a run as it was; --slice cannot change it");
  const Outcome frozen = run(at, line + " --steps 2 --slice first --rows 5 --weight-grad none --name frozen");
  ASSERT_EQ(frozen.code, 0) << frozen.err;
  EXPECT_TRUE(holds_all(frozen.out, "get no gradient"));
}

TEST(TrainBert, ChoosesItsRowsByTheirVarianceAndGoesOnToTheSameBits) {
  const Workplace at;
  make_data(at);
  const std::string line =
      "train bert --task sst2 --data glue --seeds 1 --eval-every 100 --schedule constant --warmup 0 --slice "
      "importance --rows auto --variance 0.3 --estimate-every 2" +
      kSmall;
  const Outcome whole = run(at, line + " --steps 6 --name whole");
  ASSERT_EQ(whole.code, 0) << whole.err;
  EXPECT_TRUE(holds_all(whole.out, "slice     importance auto, variance 0.3, weight_grad slice"));
  const json kept = json::parse(at.get("runs/whole/run.json"))["job"];
  EXPECT_EQ(kept["rows"], "auto");
  EXPECT_EQ(kept["variance"], 0.3);
  EXPECT_EQ(kept["estimate_every"], 2);
  ASSERT_EQ(run(at, line + " --steps 3 --name part").code, 0);
  const Outcome resumed = run(at, "train bert --resume runs/part --steps 6 --device cpu --quiet");
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  const auto losses = [&](const char* name) { return curve_of(at, name, {"loss", "grad_norm"}); };
  EXPECT_EQ(losses("runs/part/seed-0"), losses("runs/whole/seed-0"));
  const auto log = [&](const std::string& name) {
    std::vector<json> lines = json_lines(at.get("runs/" + name + "/seed-0/rows.jsonl"));
    for (json& each : lines) each.erase("seconds");
    return lines;
  };
  EXPECT_EQ(log("whole").size(), 3u);
  EXPECT_EQ(log("part"), log("whole"));
}

// ---- what is wrong is said in one line, and nothing is left behind ----

struct BadFiles {
  const char* name;
  const char* line;  // after "train bert --data glue --device cpu --seeds 1 --steps 1 --batch 4 "
  void (*put)(const Workplace& at);
  const char* says;
};
void PrintTo(const BadFiles& bad, std::ostream* out) {
  *out << bad.name;
}

const char* const kConfig =
    R"({"model_type":"bert","architectures":["BertModel"],"vocab_size":300,"hidden_size":8,"num_hidden_layers":1,)"
    R"("num_attention_heads":1,"intermediate_size":8,"max_position_embeddings":64,"type_vocab_size":2})";

const BadFiles kBadFiles[] = {
    {"NoFolder", "--task cola --scratch", [](const Workplace&) {}, "there is no train.tsv|CoLA|data glue"},
    {"TornRow", "--task sst2 --scratch",
     [](const Workplace& at) { at.put("glue/SST-2/train.tsv", "sentence\tlabel\na\t1\nb\n"); },
     "train.tsv|line 3|columns"},
    {"BadLabel", "--task sst2 --scratch",
     [](const Workplace& at) { at.put("glue/SST-2/train.tsv", "sentence\tlabel\na\t7\n"); },
     "line 2|label \"7\""},
    {"NoLabels", "--task sst2 --scratch",
     [](const Workplace& at) {
       fs::remove(at / "glue/SST-2/dev.tsv");
       at.put("glue/SST-2/dev.jsonl", "{\"sentence\":\"a\"}\n");
     },
     "dev.jsonl has no labels"},
    {"EmptyTest", "--task sst2 --scratch --predict",
     [](const Workplace& at) { at.put("glue/SST-2/test.tsv", "index\tsentence\n"); },
     "test.tsv has no examples"},
    {"TooFew", "--task sst2 --scratch --batch 64", [](const Workplace&) {},
     "40 examples give no batch of 64"},
    {"NoModel", "--task sst2 --model nowhere", [](const Workplace&) {}, "no folder nowhere"},
    {"Adapter", "--task sst2 --model m", [](const Workplace& at) { at.put("m/adapter_config.json", "{}"); },
     "m holds an adapter of peft"},
    {"NotJson", "--task sst2 --model m", [](const Workplace& at) { at.put("m/config.json", "{"); },
     "m/config.json"},
    {"OtherModel", "--task sst2 --model m",
     [](const Workplace& at) { at.put("m/config.json", R"({"model_type":"gpt2"})"); },
     "type gpt2|expected bert or roberta"},
    {"NoTokenizer", "--task sst2 --model m", [](const Workplace& at) { at.put("m/config.json", kConfig); },
     "m|tokenizer"},
    {"LongerThanTheModel", "--task sst2 --model m --max-length 65",
     [](const Workplace& at) {
       at.put("m/config.json", kConfig);
       at.put("m/tokenizer.json", at.get("tokenizer.json"));
     },
     "--max-length is 65|positions for 64"},
    {"NoWeights", "--task sst2 --model m",
     [](const Workplace& at) {
       at.put("m/config.json", kConfig);
       at.put("m/tokenizer.json", at.get("tokenizer.json"));
     },
     "m|weights"},
    {"BadWeights", "--task sst2 --model m",
     [](const Workplace& at) {
       at.put("m/config.json", kConfig);
       at.put("m/tokenizer.json", at.get("tokenizer.json"));
       at.put("m/model.safetensors", std::string(100, '\xA7'));
     },
     "model.safetensors"},
    {"ForeignTokenizer", "--task sst2 --model m",
     [](const Workplace& at) {
       std::string config = kConfig;
       config.replace(config.find("300"), 3, "200");
       at.put("m/config.json", config);
       at.put("m/tokenizer.json", at.get("tokenizer.json"));
     },
     "they do not belong together"},
    {"SliceOfNoLayer",
     "--task sst2 --scratch --slice first --rows 5 --slice-layers encoder.layer.99.output.dense",
     [](const Workplace&) {}, "no linear module of this model fits|encoder.layer.99.output.dense"},
    {"SliceOfAQuery",
     "--task sst2 --scratch --slice first --rows 5 --slice-layers encoder.layer.*.attention.self.query",
     [](const Workplace&) {}, "is one GEMM with|key|name both or neither"},
    {"ResumeOfNothing", "--resume nowhere", [](const Workplace&) {}, "nowhere|run.json"},
};

class BertBadFiles : public ::testing::TestWithParam<BadFiles> {};

TEST_P(BertBadFiles, OneLineAndNothingLeft) {
  const Workplace at;
  make_data(at);
  fs::create_directories(at / "m");
  ASSERT_EQ(run(at,
                "tokenizer train --text glue/SST-2/train.tsv --out tokenizer.json --vocab-size 290 --special "
                "[PAD] [CLS] [SEP]")
                .code,
            0);
  GetParam().put(at);
  const std::string line = GetParam().line;
  const bool resume = line.starts_with("--resume");
  const Outcome outcome = run(
      at, resume ? "train bert " + line : "train bert --data glue --device cpu --seeds 1 --steps 1 " + line);
  EXPECT_EQ(outcome.code, 1) << outcome.out << outcome.err;
  EXPECT_TRUE(outcome.err.starts_with("tessera: ")) << outcome.err;
  EXPECT_TRUE(holds_all(outcome.err, GetParam().says));
  for (const std::string& file : at.files()) EXPECT_FALSE(file.starts_with("runs/")) << file;
}
INSTANTIATE_TEST_SUITE_P(Files, BertBadFiles, ::testing::ValuesIn(kBadFiles),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace tessera::cli::test

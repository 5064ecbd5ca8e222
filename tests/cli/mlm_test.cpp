#include <gtest/gtest.h>

#include <csignal>
#include <map>
#include <nlohmann/json.hpp>

#include "io/safetensors.h"
#include "tests/cli/command.h"

// `tessera train bert --task mlm` as a user meets it: from text to an encoder that fine-tuning takes.

namespace tessera::cli::test {
namespace {

using nlohmann::json;

const std::string kSmallBatch = " --batch-size 4 --max-length 24 --device cpu --quiet ",
                  kSmallEncoder = " --layers 1 --d-model 16 --n-head 2 --d-ff 16" + kSmallBatch,
                  kSmallMlm = "train bert --task mlm --text t.txt --vocab-size 300 --log-every 1 --lr 1e-3" +
                              kSmallEncoder,
                  kGoOn = "train bert --device cpu --quiet --resume ";

class TrainMlm : public ::testing::Test {
 protected:
  TrainMlm() {
    for (int i = 0; i < 300; ++i)
      text +=
          "line " + std::to_string(i * i % 97) + " says that the film is " + (i % 3 ? "good" : "bad") + "\n";
    at.put("t.txt", text);
  }
  const Workplace at;
  std::string text;
};

/// As runs of language models do.
TEST_F(TrainMlm, TellsOfExactStepsThatWereCheap) {
  said(at, kSmallMlm + "--steps 1 --name m");
  const std::string file = at / "runs/m/model/model.safetensors",
                    zeroed = "bert.encoder.layer.0.output.dense.weight";
  std::map<std::string, Tensor> weights = io::load_safetensors(file);
  ASSERT_TRUE(weights.contains(zeroed));
  weights.at(zeroed).fill(0);  // its factors are singular
  io::save_safetensors(file, weights);
  const std::string out =
      said(at,
           "train bert --task mlm --text t.txt --model runs/m/model --form low_rank --rank 4 --optimizer "
           "loro --loro-every 1 --loro-singular cheap --steps 1 --name l" +
               kSmallBatch);
  EXPECT_TRUE(holds_all(out, "loro: 1 of |exact steps of a matrix were cheap ones instead"));
}

TEST_F(TrainMlm, PretrainsAnEncoderThatFineTuningTakes) {
  const std::string out =
      said(at, kSmallMlm + "--steps 20 --eval-every 10 --name m --save-model --json m.json");
  EXPECT_TRUE(holds_all(
      out, "masked language model|15 % masked|sequences held out|nats per masked token|model: |report: "));
  for (const char* file :
       {"model/config.json", "model/model.safetensors", "model/tokenizer.json", "report.html"})
    EXPECT_TRUE(fs::exists(at / ("runs/m/" + std::string(file)))) << file;
  EXPECT_TRUE(holds_all(at.get("runs/m/model/config.json"), "BertForMaskedLM"));
  EXPECT_TRUE(holds_all(at.get("runs/m/report.html"), "accuracy|nll"));
  const json run = json::parse(at.get("runs/m/run.json"));
  EXPECT_EQ(run.at("model"), "bert");
  EXPECT_EQ(run.at("job").at("task"), "mlm");
  EXPECT_TRUE(json::parse(at.get("m.json")).at("evaluation").contains("eval_nll"));
  EXPECT_TRUE(holds_all(said(at, "report runs/m --out p.html"), "held-out loss (nats per masked token)"));

  said(at, "data glue --out glue --train 40 --dev 12 --test 6 --task sst2");
  const std::string tuned = said(at,
                                 "train bert --task sst2 --data glue --model runs/m/model --seeds 2 --steps "
                                 "3 --name g" +
                                     kSmallBatch);
  EXPECT_TRUE(
      holds_all(tuned, "initialised at random: classifier.dense.weight|not used: |mean +- deviation"));
  // It goes on from its own weights, too.
  const std::string more = said(at,
                                "train bert --task mlm --text t.txt --model runs/m/model --steps 2 --name "
                                "more" +
                                    kSmallBatch);
  EXPECT_TRUE(holds_all(more, "from |runs/m/model"));
}

TEST_F(TrainMlm, AnInterruptedRunGoesOnToTheSameBytes) {
  said(at, kSmallMlm + "--steps 400 --name whole");
  {
    Process process(at, words_of(kSmallMlm + "--steps 400 --name parts"));
    ASSERT_TRUE(wait_for(process, [&] { return steps_logged(at, "runs/parts") > 5; }));
    process.send(SIGINT);
    const Outcome outcome = process.wait();
    EXPECT_EQ(outcome.code, 130);
    EXPECT_TRUE(holds_all(outcome.out, "To continue:|tessera train bert --resume runs/parts"));
  }
  expect_failure(at, kGoOn + "runs/parts --mask 0.3", 2, "--mask cannot change it");
  said(at, kGoOn + "runs/parts");
  EXPECT_EQ(curve_of(at, "runs/whole", {"loss", "grad_norm", "eval_"}),
            curve_of(at, "runs/parts", {"loss", "grad_norm", "eval_"}));
  EXPECT_EQ(at.get("runs/whole/checkpoints/step-000400.safetensors"),
            at.get("runs/parts/checkpoints/step-000400.safetensors"));
  EXPECT_EQ(at.get("runs/whole/model/model.safetensors"), at.get("runs/parts/model/model.safetensors"));
}

TEST_F(TrainMlm, EvaluationsOfOtherTextAreNotMixed) {
  said(at, kSmallMlm + "--steps 2 --name m");
  expect_failure(at, kGoOn + "runs/m --steps 4 --eval-tokens 30", 1,
                 "evaluated with sequences |leave --eval-tokens out");
  said(at, kGoOn + "runs/m --steps 4");
}

TEST_F(TrainMlm, WithoutHeldOutTextNothingThatNeedsItIsIgnored) {
  const std::string train = kSmallMlm + "--steps 4 --save-every 2";
  for (const std::string flag : {"--eval-every", "--eval-tokens"})
    expect_failure(at, train + " --validation 0 --name a " + flag + " 2", 1, "nothing is held out|" + flag);
  EXPECT_FALSE(fs::exists(at / "runs/a"));
  said(at, train + " --name m");
  cut_back(at, "runs/m", 2);
  for (const std::string& file : at.files())
    if (file.find("validation-") != std::string::npos) fs::remove(at / file);
  expect_failure(at, kGoOn + "runs/m", 1, "no validation shards any more");
}

TEST_F(TrainMlm, ARunThatGoesOnTakesNoFlagsOfOtherTasks) {
  said(at, kSmallMlm + "--steps 4 --save-every 2 --warmup 3 --name m");
  expect_failure(at, kGoOn + "runs/m --steps 6 --predict", 2, "--predict");
  cut_back(at, "runs/m", 2);
  const std::string before = at.get("runs/m/run.json");
  expect_failure(at, kGoOn + "runs/m --steps 2", 1, "warmup is 3 of 2 steps");
  EXPECT_EQ(at.get("runs/m/run.json"), before);
  said(at, kGoOn + "runs/m");
}

TEST_F(TrainMlm, OtherShardsAreNotTrainedOn) {
  said(at, kSmallMlm + "--steps 2 --name m");
  at.put("u.txt", text.substr(40));
  said(at, "data tokenize --text u.txt --tokenizer runs/m/data --out e");
  fs::copy(at / "e/train-00000.tokens", at / "runs/m/data/train-00000.tokens",
           fs::copy_options::overwrite_existing);
  expect_failure(at, kGoOn + "runs/m --steps 4", 1, "training shards in|not those that the run began with");
}

TEST_F(TrainMlm, TrainsOnShardsWithTheirTokenizer) {
  said(at, kSmallMlm + "--steps 1 --name m");
  said(at, "data tokenize --text t.txt --tokenizer runs/m/data --out shards");
  const std::string out = said(at, "train bert --task mlm --data shards --steps 2 --name s" + kSmallEncoder);
  EXPECT_TRUE(holds_all(out, "masked language model|model: "));
}

TEST_F(TrainMlm, WhatIsWrongIsSaidInOneLine) {
  at.put("short.txt", "a b\nc\n");
  expect_success(run(at, "tokenizer train --text t.txt --out tok.json --vocab-size 300"));
  const std::string mlm = "train bert --task mlm --device cpu --quiet ";
  const auto bad = [&](const std::string& flags, int code, const char* says) {
    expect_failure(at, mlm + flags, code, says);
    EXPECT_FALSE(fs::exists(at / "runs/bad")) << flags;
  };
  bad("", 2, "--text FILE... or --data DIR");
  bad("--text t.txt --data d", 2, "--text: --data is tokenized");
  bad("--text t.txt --pad", 2, "--pad: there are no labelled texts");
  bad("--text t.txt --predict", 2, "--predict");
  bad("--text t.txt --seeds 2", 2, "--seeds: pretraining is one run|tessera study");
  bad("--text t.txt --form cola --rank 4", 2, "--form: nothing loads an encoder");
  bad("--text t.txt --scratch --model m", 2, "--scratch: --model loads weights");
  bad("--text t.txt --model m --layers 2", 2, "--layers is for --scratch");
  bad("--text t.txt --tokenizer tok.json --vocab-size 300", 2,
      "--vocab-size: the --tokenizer has its own vocabulary");
  bad("--text t.txt --mask 0", 2, "--mask");
  bad("--text t.txt --mask 1", 2, "--mask");
  bad("--text t.txt --max-length 2 --name bad", 1, "--max-length is 2|3 ([CLS], a token, [SEP])");
  bad("--text t.txt --max-length 4000 --size tiny --layers 0", 2, "--layers");
  bad("--text none.txt --name bad", 1, "none.txt");
  bad("--text short.txt --vocab-size 261 --validation 0 --name bad", 1, "6 tokens|give no window");
  bad("--text t.txt --tokenizer tok.json --name bad", 1,
      "the tokenizer tok.json lacks|[CLS], [SEP] and [MASK]");
  bad("--text t.txt --batch-size 100000 --name bad", 1, "--batch-size");
  bad("--text t.txt --model none --name bad", 1, "none");
  bad("--data t.txt --name bad", 1, "t.txt");
  for (const char* flag :
       {"--text t.txt", "--mask 0.2", "--tokenizer x", "--validation 0.2", "--piece 9", "--any-bytes"}) {
    expect_failure(at, std::string("train bert --task sst2 --data d --scratch ") + flag, 2,
                   "is only for --task mlm");
  }
}

}  // namespace
}  // namespace tessera::cli::test

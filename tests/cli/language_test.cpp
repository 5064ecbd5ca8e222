#include <gtest/gtest.h>

#include <csignal>
#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "runtime/text.h"
#include "tests/cli/command.h"
#include "tests/cli/language_runs.h"

// `tessera train gpt` and `llama` as a user runs them: from text to a Hugging Face model directory, and to
// the same bytes however often they are stopped.

namespace tessera::cli::test {
namespace {

using nlohmann::json;

std::vector<std::string> language_curve(const Workplace& at, const std::string& run) {
  return curve_of(at, "runs/" + run, {"loss", "lr", "grad_norm", "eval_nll", "ngram_nll"});
}

std::string checkpoint_of(const Workplace& at, const std::string& run, int64_t step) {
  std::string digits = std::to_string(step);
  return at.get("runs/" + run + "/checkpoints/step-" + std::string(6 - digits.size(), '0') + digits +
                ".safetensors");
}

/// Everything that a run leaves but times: checkpoint, curve, samples, and the exported model.
void expect_same_end(const Workplace& at, const std::string& a, const std::string& b, int64_t step) {
  EXPECT_NE(checkpoint_of(at, a, step), "");
  EXPECT_TRUE(checkpoint_of(at, a, step) == checkpoint_of(at, b, step)) << "checkpoints differ";
  EXPECT_EQ(language_curve(at, a), language_curve(at, b));
  EXPECT_EQ(int64_t(language_curve(at, a).size()), step);
  for (const char* file :
       {"samples.jsonl", "model/config.json", "model/tokenizer.json", "model/model.safetensors"}) {
    const std::string first = at.get("runs/" + a + "/" + file);
    EXPECT_NE(first, "") << file;
    EXPECT_TRUE(first == at.get("runs/" + b + "/" + file)) << file << " differs";
  }
}

class TrainLanguage : public ::testing::TestWithParam<const char*> {};

TEST_P(TrainLanguage, MakesARunFolderAndAModelFromText) {
  const Workplace at;
  put_texts(at);
  const std::string model = GetParam();
  const Outcome outcome =
      run(at, "train " + model + " --steps 30 --name a --json-out out.json --sample-every 15" + kFromText);
  expect_success(outcome);
  EXPECT_TRUE(holds_all(outcome.out, model + " on cpu|held out|5-gram: |held-out text: |bits per byte|"
                                             "5-gram on it: |it writes:|runs/a/model|report.html"));
  for (const char* file : {"run.json", "metrics.jsonl", "samples.jsonl", "report.html", "data/tokenizer.json",
                           "data/train-00000.tokens", "data/validation-00000.tokens", "model/config.json",
                           "model/model.safetensors", "model/tokenizer.json"})
    EXPECT_TRUE(fs::exists(at / (std::string("runs/a/") + file))) << file;
  const json settings = json::parse(at.get("runs/a/run.json"));
  EXPECT_EQ(settings.at("model"), model);
  EXPECT_EQ(settings.at("baseline").at("order"), 5);
  EXPECT_EQ(settings.at("options").at("sample_every"), 15);
  const json out = json::parse(at.get("out.json"));
  EXPECT_EQ(out.at("evaluation").at("ngram_nll"), settings.at("baseline").at("nll"));
  EXPECT_GT(out.at("evaluation").at("eval_bits_per_byte").get<double>(), 0);
  const std::string page = at.get("runs/a/report.html");
  EXPECT_TRUE(holds_all(page, "training loss|held-out loss|5-gram|What it writes|Throughput|bits per byte"));
  // The model goes on from where it was exported, with its tokenizer. The run's folder names its model, too.
  const Outcome tuned = run(at, "train " + model +
                                    " --steps 3 --name b --model runs/a --text a.txt b.txt "
                                    "--device cpu --length 16 --batch 2 --quiet --sample-tokens 0");
  expect_success(tuned);
  const double start = metrics_of(at, "runs/b")[0].at("loss");
  const double drawn = metrics_of(at, "runs/a")[0].at("loss");
  EXPECT_LT(start, drawn - 0.2);
  EXPECT_EQ(at.get("runs/b/model/tokenizer.json"), at.get("runs/a/model/tokenizer.json"));
}
INSTANTIATE_TEST_SUITE_P(Models, TrainLanguage, ::testing::Values("gpt", "llama"),
                         [](const auto& info) { return std::string(info.param); });

TEST(TrainLanguageRuns, TheSameSeedGivesTheSameBits) {
  const Workplace at;
  put_texts(at);
  expect_success(run(at, "train gpt --steps 40 --name a --seed 7 --dropout 0.1" + kFromText));
  expect_success(run(at, "train gpt --steps 40 --name b --seed 7 --dropout 0.1 --save-every 9" + kFromText));
  expect_success(run(at, "train gpt --steps 40 --name c --seed 8 --dropout 0.1" + kFromText));
  expect_same_end(at, "a", "b", 40);
  EXPECT_NE(language_curve(at, "a"), language_curve(at, "c"));
}

TEST(SlowTrainLanguageRuns, TheNumberOfThreadsChangesNoBit) {
  const Workplace at;
  put_texts(at);
  const std::string flags =
      "train gpt --steps 200 --seed 7 --dropout 0.1 --text a.txt b.txt --device cpu --layers 2 --d-model 64 "
      "--heads 4 --d-ff 256 --length 64 --batch 8 --quiet --log-every 1 --eval-tokens 64 --sample-tokens 8 "
      "--name threads-";
  for (const char* threads : {"1", "2", "4"}) {
    const Variable set("TESSERA_THREADS", threads);
    expect_success(run(at, flags + threads));
  }
  expect_same_end(at, "threads-1", "threads-2", 200);
  expect_same_end(at, "threads-1", "threads-4", 200);
}

TEST(TrainLanguageRuns, InterruptedGoesOnToTheSameEnd) {
  const Workplace at;
  put_texts(at);
  const std::string flags = "train llama --steps 1500 --accumulate 2 --sample-every 400 --eval-every 300";
  expect_success(run(at, flags + " --name whole" + kFromText));
  Process process(at, words_of(flags + " --name cut" + kFromText));
  ASSERT_TRUE(wait_for(process, [&] { return steps_logged(at, "runs/cut") >= 5; }));
  process.send(SIGINT);
  const Outcome cut = process.wait();
  ASSERT_EQ(cut.code, 130) << cut.out << cut.err;
  EXPECT_FALSE(fs::exists(at / "runs/cut/model")) << "a model that is not done";
  fs::remove(at / "a.txt");  // the run has its own data
  const size_t command = cut.out.find("tessera train llama --resume");
  ASSERT_NE(command, std::string::npos) << cut.out;
  expect_success(run(at, first_line(cut.out.substr(command + std::string("tessera ").size()))));
  expect_same_end(at, "whole", "cut", 1500);
}

TEST(TrainLanguageRuns, StoppedEarlyWithAveragesEndsTheSameHoweverOftenItIsInterrupted) {
  const Workplace at;
  put_texts(at);
  const std::string flags =
      "train llama --steps 4000 --lr 0.02 --schedule constant --dropout 0.2 --ema 0.9 --eval-every 40 "
      "--patience 12 --export best --eval-stride 5 --keep 1";
  expect_success(run(at, flags + " --name whole" + kFromText));
  const json whole = json::parse(at.get("runs/whole/run.json"));
  const int64_t best = whole.at("best").at("step"), end = best + 12 * 40;
  ASSERT_LT(end, 4000) << "a text as small as this is learnt soon";
  Process process(at, words_of(flags + " --name cut" + kFromText));
  ASSERT_TRUE(wait_for(process, [&] { return steps_logged(at, "runs/cut") >= best + 50; }));
  process.send(SIGINT);
  const Outcome cut = process.wait();
  ASSERT_EQ(cut.code, 130) << cut.out << cut.err;
  EXPECT_EQ(checkpoint_of(at, "cut", best), checkpoint_of(at, "whole", best))
      << "kept, whatever came after it";
  const Outcome resumed = run(at, "train llama --quiet --resume runs/cut --device cpu");
  expect_success(resumed);
  expect_same_end(at, "whole", "cut", end);
  const json settings = json::parse(at.get("runs/cut/run.json"));
  EXPECT_EQ(settings.at("best"), whole.at("best"));
  EXPECT_EQ(settings.at("options").at("patience"), 12);
  EXPECT_EQ(settings.at("evaluation").at("stride"), 5);
  EXPECT_EQ(settings.at("evaluation").at("behind_training_part"), true);
  EXPECT_TRUE(holds_all(resumed.out,
                        "12 or more; a document continues after its training part|lowest of |ended "
                        "early (--patience)|model (of step " +
                            std::to_string(best) + ", chosen on the held-out text)"));
  expect_failure(at, "train llama --quiet --resume runs/cut --device cpu", 1,
                 "has ended after step|--patience");
  expect_failure(at, "train llama --quiet --resume runs/cut --device cpu --steps 5000 --eval-every 0", 2,
                 "--patience: without --eval-every");
  // Stopped after it had ended, but before its export and page: it does these.
  const std::string page = "runs/cut/report.html", weights = "runs/cut/model/model.safetensors";
  ASSERT_TRUE(fs::exists(at / page)) << "the refusal took the page away";
  const std::string exported = at.get(weights);
  fs::remove(at / page);
  fs::remove_all(at / "runs/cut/model");
  expect_success(run(at, "train llama --device cpu --quiet --resume runs/cut"));
  EXPECT_TRUE(fs::exists(at / page));
  EXPECT_TRUE(at.get(weights) == exported);
}

TEST(TrainLanguageRuns, TheModelOfTheBestEvaluationIsWhatARunUpToThereHas) {
  const Workplace at;
  put_texts(at);
  const std::string flags =
      "train gpt --lr 0.02 --schedule constant --warmup 0 --eval-every 40 --dropout 0.1 --ema 0.9 --stride 1";
  expect_success(run(at, flags + " --steps 1000 --export best --name best" + kFromText));
  const int64_t best = json::parse(at.get("runs/best/run.json")).at("best").at("step");
  ASSERT_LT(best, 1000);
  expect_success(run(at, flags + " --steps " + std::to_string(best) + " --name to_there" + kFromText));
  expect_success(run(at, flags + " --steps 1000 --name last" + kFromText));
  const auto weights = [&](const char* name) {
    return at.get(std::string("runs/") + name + "/model/model.safetensors");
  };
  EXPECT_TRUE(weights("best") == weights("to_there"));
  EXPECT_FALSE(weights("best") == weights("last"));
  // What was not kept cannot be exported: said before anything is trained or changed.
  expect_failure(at, "train gpt --resume runs/last --steps 1010 --export best", 1,
                 "--export best|after step " + std::to_string(best) + "|was not kept");
  expect_success(run(at, "train gpt --resume runs/last --steps 1010"));
}

TEST(TrainLanguageRuns, KilledBehindItsLastStepARunStillExportsItsModel) {
  const Workplace at;
  put_texts(at);
  const Outcome whole = run(at, "train gpt --steps 12 --name a" + kFromText);
  ASSERT_EQ(whole.code, 0) << whole.err;
  const std::string weights = at.get("runs/a/model/model.safetensors");
  fs::remove_all(at / "runs/a/model");
  fs::remove(at / "runs/a/report.html");
  const Outcome late = run(at, "train gpt --device cpu --quiet --resume runs/a");
  EXPECT_EQ(late.code, 0) << late.err;
  EXPECT_TRUE(!weights.empty() && at.get("runs/a/model/model.safetensors") == weights);
  EXPECT_EQ(late.out.substr(late.out.find("held-out text")),
            whole.out.substr(whole.out.find("held-out text")));
}

TEST(SlowTrainLanguageRuns, KilledAgainAndAgainEndsWithTheSameBits) {
  const Workplace at;
  put_texts(at);
  const std::string flags = "train gpt --steps 600 --dropout 0.2 --sample-every 50 --save-every 20";
  expect_success(run(at, flags + " --name whole" + kFromText));
  std::mt19937 random(3);
  int kills = 0;
  for (int round = 0; round < 30 && kills < 8; ++round) {
    const bool begun = fs::exists(at / "runs/cut/run.json");
    if (!begun) fs::remove_all(at / "runs/cut");  // killed before it said what it is
    Process process(at, words_of(begun ? "train gpt --quiet --resume runs/cut --device cpu"
                                       : flags + " --name cut" + kFromText));
    const int64_t enough = steps_logged(at, "runs/cut") + int64_t(random() % 90);
    if (!wait_for(process, [&] { return steps_logged(at, "runs/cut") >= enough; })) break;
    process.send(SIGKILL);
    if (process.wait().signal != SIGKILL) break;
    ++kills;
  }
  EXPECT_GE(kills, 4);
  expect_success(run(at, "train gpt --quiet --resume runs/cut --device cpu"));
  expect_same_end(at, "whole", "cut", 600);
}

TEST(TrainLanguageRuns, FromShardsWithDocumentsApart) {
  const Workplace at;
  put_texts(at);
  expect_success(run(at, "tokenizer train --kind byte --text a.txt --out t.json"));
  expect_success(run(at, "data tokenize --text a.txt b.txt --tokenizer t.json --out d"));
  expect_success(run(at, "train gpt --data d --documents --steps 12 --save-every 6 --name a" + kModel));
  expect_success(
      run(at, "train gpt --data d --documents --steps 6 --schedule constant --warmup 0 --name b" + kModel));
  expect_success(run(at, "train gpt --quiet --device cpu --resume runs/b --steps 12"));
  EXPECT_EQ(language_curve(at, "b").size(), 12u);
  EXPECT_EQ(at.get("runs/a/model/tokenizer.json"), at.get("t.json"));
  const json settings = json::parse(at.get("runs/a/run.json"));
  EXPECT_EQ(settings.at("job").at("data"), at / "d");
  // Shards that have been made again are not the run's.
  fs::remove_all(at / "d");
  expect_success(run(at, "tokenizer train --text a.txt --vocab-size 300 --out t2.json"));
  expect_success(run(at, "data tokenize --text a.txt b.txt --tokenizer t2.json --out d"));
  expect_failure(at, "train gpt --quiet --device cpu --resume runs/b --steps 20", 1,
                 "fingerprint|tokenize the text again");
}

TEST(TrainLanguageRuns, TheEndTokenIsTheOneOfTheTokenizersConfig) {
  const Workplace at;
  put_texts(at);
  fs::create_directories(at / "chat");
  expect_success(run(at, "tokenizer train --kind byte --text a.txt --out chat/tokenizer.json"));
  json tokenizer = json::parse(at.get("chat/tokenizer.json"));
  json end = tokenizer.at("added_tokens").at(0);
  end["id"] = 257, end["content"] = "<|im_end|>";
  tokenizer["added_tokens"].push_back(end);
  at.put("chat/tokenizer.json", tokenizer.dump());
  at.put("chat/tokenizer_config.json", R"({"eos_token": "<|im_end|>"})");
  EXPECT_TRUE(holds_all(said(at, "data tokenize --text a.txt b.txt --tokenizer chat --out d"),
                        "documents end with token 257"));
  EXPECT_EQ(at.get("d/tokenizer_config.json"), at.get("chat/tokenizer_config.json"));
  expect_success(run(at, "train gpt --data d --steps 2 --name a" + kModel));
  EXPECT_EQ(json::parse(at.get("runs/a/model/config.json")).at("eos_token_id"), 257);
  // A tokenizer that lost its config would stop at another token than the one that was trained.
  fs::remove(at / "d/tokenizer_config.json");
  expect_failure(at, "train gpt --data d --steps 2 --name b" + kModel, 1,
                 "end with token 257|data/tokenizer.json is 0|tokenizer_config.json");
  // Shards without a tokenizer are those of the model's.
  fs::remove(at / "d/tokenizer.json");
  expect_success(run(at,
                     "train gpt --data d --model runs/a/model --steps 2 --name c --device cpu --length 16 "
                     "--batch 2 --quiet --sample-tokens 0"));
  EXPECT_EQ(json::parse(at.get("runs/c/model/config.json")).at("eos_token_id"), 257);
}

/// The memory that `plan` computes of a run with these flags, which the run's header names.
std::string planned_memory(const Workplace& at, const std::string& flags) {
  const std::string header = said(at, "train gpt --steps 1 --ngram 0 --name a" + kFromText + flags);
  const json config = json::parse(at.get("runs/a/model/config.json"));
  const json planned = json::parse(
      said(at,
           "plan gpt --json --precision f32 --layers 1 --d-model 16 --heads 2 --d-ff 32 --length 16 "
           "--batch 2 --vocab-size " +
               config.at("vocab_size").dump() + flags));
  const std::string total = format_bytes(size_t(planned.at("total").get<double>()));
  EXPECT_TRUE(holds_all(header, "memory    " + total + " planned a step\n")) << planned;
  fs::remove_all(at / "runs");
  return total;
}

TEST(TrainLanguageRuns, TheHeaderPlansTheSumsThatWait) {
  const Workplace at;
  put_texts(at);
  planned_memory(at, " --accumulate 8 --order global");
}

TEST(TrainLanguageRuns, TheHeaderAndThePlanHaveTheStatesOfTheOptimizer) {
  const Workplace at;
  put_texts(at);
  std::set<std::string> totals;
  for (const std::string states : {"", " --optimizer sgd --momentum 0", " --optimizer muon", " --ema 0.9",
                                   " --optimizer galore --galore-rank 4"})
    totals.insert(planned_memory(at, states));
  EXPECT_EQ(totals.size(), 5u);
  expect_failures(at,
                  {{"plan gpt --galore-rank 4", 2, "--galore-rank is for --optimizer galore"},
                   {"plan tnp --galore-rank 4", 2, "--galore-rank is for --optimizer galore"},
                   {"plan gpt --ranks 2 --zero 1 --ema 0.9 --precision bf16", 2, "--ema with --zero 1"},
                   {"plan gpt --ranks 2 --zero 1 --optimizer muon", 2, "--zero 1 with --optimizer muon"}});
  // Averages of f32 weights are whole on each rank, whatever is spread.
  const auto optimizer = [&](const std::string& flags) {
    return json::parse(said(at, "plan gpt --precision f32 --ranks 2 --json " + flags))
        .at("optimizer")
        .get<double>();
  };
  EXPECT_EQ(optimizer("--zero 1 --ema 0.9") - optimizer("--zero 1"), optimizer("--ema 0.9") - optimizer(""));
}

TEST(TrainLanguageRuns, EpochsAndMinutesAreSteps) {
  const Workplace at;
  put_texts(at);
  expect_success(run(at, "train gpt --epochs 2 --name a" + kFromText));
  const json job = json::parse(at.get("runs/a/run.json")).at("job");
  // Two passes over about 26,000 characters, 32 a step.
  EXPECT_GT(job.at("steps"), 1000);
  EXPECT_LT(job.at("steps"), 2000);
  const auto steps_of = [&](const std::string& flags, const std::string& name) {
    expect_success(run(at, "train gpt " + flags + " --name " + name + kFromText));
    return json::parse(at.get("runs/" + name + "/run.json")).at("job").at("steps").get<int64_t>();
  };
  EXPECT_GE(steps_of("--minutes 0.02", "b"), 1);
  // Both: the shorter one.
  EXPECT_EQ(steps_of("--epochs 0.01 --minutes 0.3", "c"), steps_of("--epochs 0.01", "d"));
  EXPECT_LT(steps_of("--epochs 1000 --minutes 0.0001", "e"), 1000);
  EXPECT_LT(steps_of("--epochs 1000 --minutes 0.0001 --documents", "f"), 1000);
}

TEST(TrainLanguageRuns, ATextOfOneLineIsCutAtASpace) {
  const Workplace at;
  put_texts(at);
  std::string text = at.get("a.txt");
  std::replace(text.begin(), text.end(), '\n', ' ');
  at.put("line.txt", text);
  const Outcome outcome = run(at, "train gpt --steps 2 --name a --text line.txt" + kModel);
  expect_success(outcome);
  EXPECT_TRUE(holds_all(outcome.out, "to predict|documents of one line, cut at a space: 1"));
  EXPECT_EQ(said(at, "train gpt --steps 2 --name b --text a.txt" + kModel).find("cut at a space"),
            std::string::npos);
}

TEST(TrainLanguageRuns, EvaluationsOfOtherTextAreNotMixed) {
  const Workplace at;
  put_texts(at);
  expect_success(run(at, "train gpt --steps 12 --eval-every 4 --name a" + kFromText));
  const json settings = json::parse(at.get("runs/a/run.json"));
  EXPECT_EQ(settings.at("evaluation").at("targets"), 64);
  const std::string metrics = at.get("runs/a/metrics.jsonl"),
                    resume = "train gpt --device cpu --quiet --resume runs/a --steps 16 ";
  const auto refused = [&](const std::string& flags, const char* says) {
    expect_failure(at, resume + flags, 1, says);
    EXPECT_EQ(at.get("runs/a/metrics.jsonl"), metrics) << flags;
    EXPECT_EQ(json::parse(at.get("runs/a/run.json")), settings) << flags;
    EXPECT_TRUE(fs::exists(at / "runs/a/report.html")) << flags;
  };
  refused("--eval-tokens 32", "evaluated with targets 64|with targets 32|leave --eval-tokens out");
  refused("--eval-stride 3", "evaluated with stride 8|with stride 3|leave --eval-stride out");
  expect_success(run(at, resume + "--eval-tokens 64 --eval-stride 8"));
  EXPECT_EQ(json::parse(at.get("runs/a/run.json")).at("evaluation"), settings.at("evaluation"));
}

// As where the run begins; samples that are turned on again are another matter.
TEST(TrainLanguageRuns, FlagsOfSamplesAreRefusedByARunThatGoesOnWithoutSamples) {
  const Workplace at;
  put_texts(at);
  expect_success(
      run(at,
          "train gpt --text a.txt --device cpu --layers 1 --d-model 16 --heads 2 --d-ff 32 --length 16 "
          "--batch 2 --quiet --steps 2 --sample-tokens 0 --name a"));
  const std::string resume = "train gpt --device cpu --quiet --resume runs/a --steps 4 ";
  for (const std::string flag : {"--sample-prompt", "--sample-every"}) {
    expect_failure(at, resume + flag + " 1", 2, flag + "|with --sample-tokens 0 there are no samples");
  }
  expect_success(run(at, resume + "--sample-every 1 --sample-tokens 4"));
}

TEST(TrainLanguageRuns, BeforeItsFirstEvaluationARunMayTakeAnother) {
  const Workplace at;
  put_texts(at);
  expect_success(run(at, "train gpt --steps 12 --save-every 4 --name a" + kFromText));
  // As if it had been killed after step 8, which was not evaluated.
  fs::remove(at / "runs/a/checkpoints/step-000012.safetensors");
  fs::remove(at / "runs/a/report.html");
  expect_success(run(at, "train gpt --device cpu --quiet --resume runs/a --eval-tokens 32"));
  EXPECT_EQ(json::parse(at.get("runs/a/run.json")).at("evaluation").at("targets"), 32);
}

struct BadLanguageRun {
  const char* name;
  const char* line;
  const char* says;
};
void PrintTo(const BadLanguageRun& bad, std::ostream* out) {
  *out << bad.name;
}

class TrainLanguageErrors : public ::testing::TestWithParam<BadLanguageRun> {};

TEST_P(TrainLanguageErrors, SayWhatIsWrongAndLeaveNoRun) {
  const Workplace at;
  put_texts(at);
  at.put("short.txt", "too short\n");
  at.put("one.txt", "twenty letters there");
  at.put("words.txt", "one-word-of-a-line\nanother-word-of-one\n");
  at.put("empty.txt", "");
  at.put("bad.json", "{");
  fs::create_directories(at / "nothing");
  const Outcome outcome = run(at, std::string(GetParam().line) + kModel);
  EXPECT_EQ(outcome.code, 1) << outcome.out << outcome.err;
  EXPECT_TRUE(outcome.err.starts_with("tessera: ")) << outcome.err;
  EXPECT_TRUE(holds_all(outcome.err, GetParam().says));
  EXPECT_FALSE(fs::exists(at / "runs/a"));
}
INSTANTIATE_TEST_SUITE_P(
    Runs, TrainLanguageErrors,
    ::testing::Values(
        BadLanguageRun{"NoFile", "train gpt --name a --text none.txt", "none.txt"},
        BadLanguageRun{"ShortText", "train gpt --name a --text short.txt --validation 0",
                       "tokens|no window of 16"},
        BadLanguageRun{"ShortValidation", "train gpt --name a --text short.txt", "nothing is held out"},
        BadLanguageRun{"ShortPieces", "train gpt --name a --text words.txt --piece 20",
                       "nothing is held out|--piece of 20 bytes|a larger --piece or --validation"},
        BadLanguageRun{"EmptyText", "train gpt --name a --text empty.txt", "empty.txt is empty"},
        BadLanguageRun{"LargeBatch", "train gpt --name a --text one.txt --validation 0 --stride 16 --steps 1",
                       "1 windows of 16; a batch takes 2|--batch"},
        BadLanguageRun{"NoTokenizer", "train gpt --name a --text a.txt --tokenizer nowhere",
                       "nowhere is neither a file nor a folder"},
        BadLanguageRun{"WideStride", "train gpt --name a --text a.txt --eval-stride 17",
                       "--eval-stride 17|--length of 16"},
        BadLanguageRun{"NothingToBeBestOn",
                       "train gpt --name a --text a.txt --validation 0 --export best --steps 1",
                       "nothing is held out|--export best"},
        BadLanguageRun{"NothingToEvaluate",
                       "train gpt --name a --text a.txt --validation 0 --eval-every 2 --steps 4",
                       "nothing is held out|--eval-every|--validation"},
        BadLanguageRun{"NothingToCompareWith",
                       "train gpt --name a --text a.txt --validation 0 --ngram 2 --steps 4",
                       "nothing is held out|--ngram"},
        BadLanguageRun{"SmallShare", "train gpt --name a --text a.txt --validation 0.0005",
                       "nothing is held out"},
        BadLanguageRun{"LongPrompt", "train gpt --name a --text a.txt --sample-prompt everyone_may_copy_this",
                       "prompt of samples has|sequences have 16|--sample-prompt"},
        BadLanguageRun{"NoShards", "train gpt --name a --data nothing", "nothing"},
        BadLanguageRun{"DataIsAFile", "train gpt --name a --data a.txt",
                       "--data: a.txt is not a directory|tessera data tokenize"},
        BadLanguageRun{"BadTokenizer", "train gpt --name a --text a.txt --tokenizer bad.json", "bad.json"},
        BadLanguageRun{"NoModel", "train gpt --name a --text a.txt --tokenizer nothing", "nothing"}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(TrainLanguageRuns, WithoutHeldOutTextARunThatAsksForNoEvaluationTrains) {
  const Workplace at;
  put_texts(at);
  const Outcome outcome = run(at, "train gpt --validation 0 --eval-every 0 --steps 2 --name a" + kFromText);
  expect_success(outcome);
  EXPECT_TRUE(holds_all(outcome.out, "none held out, characters; sequences of 16"));
  expect_failure(at, "train gpt --quiet --resume runs/a --steps 4 --eval-every 1 --device cpu", 1,
                 "nothing is held out|--eval-every");
}

TEST(TrainLanguageRuns, PathsThatRunJsonCannotKeepAreRefused) {
  const Workplace at;
  put_texts(at);
  fs::create_directories(at / "d\xE9");
  for (const char* line :
       {"train gpt --data d\xE9", "train llama --text a.txt --model d\xE9",
        "train gpt --text a.txt --sample-prompt \xE9", "train bert --task sst2 --data d\xE9 --scratch",
        "train bert --task sst2 --data a --model d\xE9"}) {
    expect_failure(at, line, 2, "\\xE9\" is not UTF-8|run.json");
    EXPECT_FALSE(fs::exists(at / "runs"));
  }
  expect_success(run(at, "train gpt --steps 1 --name a" + kFromText));
  EXPECT_EQ(run(at, "train gpt --resume runs/a --steps 2 --sample-prompt \xE9").code, 2);
}

TEST(TrainLanguageRuns, PiecesOfAFileHoldOutSomeOfEverything) {
  const Workplace at;
  put_texts(at);
  expect_success(run(at, "train llama --steps 2 --name whole" + kFromText));
  expect_success(run(at, "train llama --steps 2 --name pieces --piece 1000" + kFromText));
  const auto documents = [&](const std::string& name, const std::string& part) {
    const Outcome info = run(at, "data info runs/" + name + "/data/" + part + "-00000.tokens --json");
    expect_success(info);
    return json::parse(info.out)[0].at("documents").get<int>();
  };
  EXPECT_EQ(documents("whole", "train"), 2);
  EXPECT_GT(documents("pieces", "train"), 20);
  EXPECT_GT(documents("pieces", "validation"), 20);
}

TEST(TrainLanguageRuns, ATomlFileGivesSeveralTextsAndOneNameOfAFlag) {
  const Workplace at;
  put_texts(at);
  at.put("run.toml", "\xEF\xBB\xBFtext = [\"a.txt\", \"b.txt\"]\nsteps = 2\nname = \"a\"\n");
  expect_success(run(at, "train gpt --config run.toml" + kModel));
  const Outcome info = run(at, "data info runs/a/data/train-00000.tokens --json");
  EXPECT_EQ(json::parse(info.out)[0].at("documents"), 2);
  at.put("twice.toml", "text = \"a.txt\"\nheads = 2\nn-head = 4\n");
  expect_failure(at, "train gpt --config twice.toml", 2, "twice.toml|\"n-head\" is given twice");
}

TEST(TrainLanguageRuns, TheCommandLineWinsOverAnExcludedFlagOfTheConfig) {
  const Workplace at;
  put_texts(at);
  at.put("run.toml", "epochs = 30\nname = \"a\"\n");
  expect_success(run(at, "train gpt --config run.toml --steps 2" + kFromText));
  EXPECT_EQ(steps_logged(at, "runs/a"), 2);
  at.put("both.toml", "epochs = 30\nsteps = 2\n");
  expect_failure(at, "train gpt --config both.toml" + kFromText, 2,
                 "both.toml:2: |\"steps\" and \"epochs\" exclude each other");
}

TEST(TrainLanguageRuns, RunsOfAGptAreToldApartByTheirDropout) {
  const Workplace at;
  put_texts(at);
  expect_success(run(at, "train gpt --steps 2 --name a --dropout 0.25" + kFromText));
  expect_success(run(at, "train gpt --steps 2 --name b" + kFromText));
  const json job = json::parse(at.get("runs/a/run.json")).at("job");
  EXPECT_EQ(job.at("dropout"), 0.25);
  EXPECT_EQ(job.at("model").at("resid_pdrop"), 0.25);
  EXPECT_EQ(json::parse(at.get("runs/b/run.json")).at("job").at("dropout"), 0);
  const std::string groups = said(at, "report runs/a runs/b --by dropout");
  EXPECT_TRUE(holds_all(groups, "\n0.25  |\n0.0  "));
  expect_success(run(at, "train gpt --resume runs/a --steps 3 --device cpu --quiet"));
}

TEST(TrainLanguageRuns, ADivergedRunSaysSoAndEndsWithOne) {
  const Workplace at;
  put_texts(at);
  expect_failure(at, "train gpt --steps 4 --lr 1e20 --clip 0 --name a" + kFromText, 1,
                 "the last step (4) is not finite|diverged|lower learning rate");
}

TEST(TrainLanguageRuns, AFolderOfAnotherModelIsRefused) {
  const Workplace at;
  put_texts(at);
  expect_success(run(at, "train llama --steps 2 --name l" + kFromText));
  expect_failure(at, "train gpt --text a.txt --device cpu --model runs/l/model --length 16 --name a", 2,
                 "--model|llama|expected gpt2 or opt");
  expect_failure(at, "train gpt --device cpu --resume runs/l --steps 5", 1,
                 "runs/l/run.json|train llama|not of `train gpt`");
  // Whatever asks for a run of a model says so when it gets another's.
  for (const char* line : {"train tnp --device cpu --resume runs/l --steps 5",
                           "train bert --device cpu --resume runs/l", "eval tnp runs/l --device cpu"}) {
    expect_failure(at, line, 1, "runs/l/run.json: a run of `train llama`, not of");
  }
  expect_failure(at, "train llama --text a.txt --device cpu --model runs/l/model --length 17 --name a", 1,
                 "length is 17|16 positions");
  EXPECT_FALSE(fs::exists(at / "runs/a"));
}

TEST(TrainLanguageRuns, ABaselineThatIsLeftOutIsNotInRunJson) {
  const Workplace at;
  put_texts(at);
  expect_success(run(at, "train gpt --steps 2 --ngram 2 --name a" + kFromText));
  EXPECT_TRUE(json::parse(at.get("runs/a/run.json")).contains("baseline"));
  expect_success(run(at, "train gpt --resume runs/a --steps 4 --ngram 0 --device cpu --quiet"));
  EXPECT_FALSE(json::parse(at.get("runs/a/run.json")).contains("baseline"));
}

TEST(TrainLanguageRuns, StepsThatLeaveNoneSparseAreRefusedBeforeAnythingIsWritten) {
  const Workplace at;
  put_texts(at);
  expect_success(run(at,
                     "train llama --ffn relu2 --sparse24 naive --dense-first 2 --dense-last 2 --steps 8 "
                     "--save-every 2 --keep 9 --name a" +
                         kFromText));
  cut_back(at, "runs/a", 2);
  const std::string before = at.get("runs/a/run.json"),
                    resume = "train llama --device cpu --quiet --resume runs/a";
  expect_failure(at, resume + " --steps 4", 1, "leave none of the 4 steps sparse");
  EXPECT_EQ(at.get("runs/a/run.json"), before);
  expect_success(run(at, resume));
}

TEST(TrainLanguageRuns, FlagsAreCheckedAgainstTheModelThatTheyAreFor) {
  const Workplace at;
  put_texts(at);
  expect_success(
      run(at, "train llama --type arcee --ffn relu2 --steps 1 --name l --d-model 192 --n-head 2 --layers 1" +
                  std::string(" --text a.txt --device cpu --d-ff 256 --length 16 --batch-size 2 --quiet "
                              "--sample-tokens 0 --eval-tokens 64")));
  const std::string train =
      "train llama --text a.txt --model runs/l --device cpu --steps 1 --length 16 --batch-size 2 "
      "--quiet --sample-tokens 0 --eval-tokens 64 ";
  for (const std::string flags : {"--sparse24 naive", "--activation-l1 0.1",
                                  "--form low_rank --rank 160"})  // a demo has gates, and d 128
    expect_success(run(at, train + flags));
  expect_failure(at, train + "--form low_rank --rank 200 --name a", 1, "rank");
  EXPECT_FALSE(fs::exists(at / "runs/a"));
}

TEST(TrainLanguageRuns, WhatDoesNotTrainIsRefusedBeforeTheTextIsRead) {
  const Workplace at;  // without the text
  const std::string text = " --text none.txt --device cpu --name a";
  expect_failures(
      at, {{"train llama --precision f16 --optimizer-states bf16" + text, 2, "which f16 weights cannot have"},
           {"train gpt --optimizer galore --galore-rank 4000" + text, 1, "--galore-rank"},
           {"train bert --task mlm --optimizer muon --optimizer-states bf16" + text, 2, "take adamw or sgd"},
           {"train bert --task mlm --restarts 2" + text, 2, "schedule: 2 restarts"}});
}

TEST(TrainLanguageRuns, OtherShardsAreNotTrainedOn) {
  const Workplace at;
  put_texts(at);
  expect_success(run(at, "train gpt --text a.txt --tokenizer-kind byte --steps 2 --name g" + kModel));
  expect_success(run(at, "train gpt --resume runs/g --steps 3 --device cpu --quiet"));
  said(at, "data tokenize --text b.txt --tokenizer runs/g/data --out e");
  const std::string shard = "train-00000.tokens";
  fs::copy(at / ("e/" + shard), at / ("runs/g/data/" + shard), fs::copy_options::overwrite_existing);
  expect_failure(at, "train gpt --resume runs/g --steps 4 --device cpu --quiet", 1,
                 "training shards in|not those that the run began with");
}

TEST(TrainLanguageRuns, WithoutAFiniteEvaluationNoneIsTheBest) {
  const Workplace at;
  put_clauses(at);
  expect_failure(
      at,
      "train gpt --batch-size 4 --steps 1 --warmup 0 --lr 1e30 --clip 0 --export best --name a" + kOnClauses,
      1, "no evaluation of the run in runs/a had a finite loss|--export last");
  expect_success(run(at, "train gpt --resume runs/a --export last --device cpu --quiet"));
}

TEST(TrainLanguage, ARunWhoseHeldOutTextIsGoneIsNotContinued) {
  const Workplace at;
  put_texts(at);
  expect_success(run(at, "train gpt --steps 4 --name a" + kFromText));
  for (const std::string& file : at.files())
    if (file.find("validation-") != std::string::npos) fs::remove(at / file);
  const std::string curve_before = at.get("runs/a/metrics.jsonl");
  expect_failure(at, "train gpt --resume runs/a --steps 8 --device cpu --quiet", 1,
                 "runs/a|no validation shards|runs/a/data|restore them|new run");
  EXPECT_EQ(at.get("runs/a/metrics.jsonl"), curve_before);
}

}  // namespace
}  // namespace tessera::cli::test

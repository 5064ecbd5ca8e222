#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <nlohmann/json.hpp>

#include "tests/cli/language_model.h"
#include "train/run_folder.h"

// tessera prune: what it writes and says, and what is said of what cannot be.

namespace tessera::cli::test {
namespace {

using nlohmann::json;

constexpr const char* kPrune = "prune --device cpu --model m --text t --length 16 --samples 8 ";

std::string prune_text() {
  std::string text;
  for (int i = 0; i < 60; ++i) text += "line " + std::to_string(i * i) + "\n";
  return text;
}

TEST(PruneCommand, WritesAModelItsMasksAndAReport) {
  const Workplace at;
  if (const std::string why = put_model(at, "m"); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  at.put("t", prune_text());
  const std::string out = said(at, std::string(kPrune) + "--pattern 2:4 --out p");
  EXPECT_TRUE(holds_all(
      out,
      "8 matrices|wanda, 2 of each 4 weights|8 samples of 16 tokens, seed 0|memory|about|attn.c_proj|"
      "transformer.h.1  |0.5000|perplexity|before|written      p"));
  EXPECT_EQ(out.find("memory") < out.find("perplexity"), true);
  for (const char* file :
       {"p/config.json", "p/masks.safetensors", "p/model.safetensors", "p/pruning.json", "p/tokenizer.json"})
    EXPECT_TRUE(fs::exists(at / file)) << file;
  EXPECT_FALSE(fs::exists(at / "p.partial"));
  EXPECT_EQ(at.get("p/config.json"), at.get("m/config.json"));
  const json report = json::parse(at.get("p/pruning.json"));
  EXPECT_EQ(report["matrices"].size(), 8u);
  EXPECT_EQ(report["sparsity"], 0.5);
  EXPECT_EQ(report["calibration"]["begins"].size(), 8u);
  // The perplexity is that of eval ppl on the same windows.
  const std::string text = prune_text();
  at.put("held", text.substr(text.size() - size_t(double(text.size()) * 0.1)));
  for (const auto& [model, when] : {std::pair("m", "before"), {"p", "after"}})
    EXPECT_EQ(
        json::parse(said(at, std::string("eval ppl --device cpu --text held --length 16 --json --model ") +
                                 model))["perplexity"],
        report["perplexity"][when])
        << when;
  // Same seed, same bytes; another seed, other samples.
  const json again = json::parse(said(at, std::string(kPrune) + "--pattern 2:4 --out q --json"));
  EXPECT_EQ(again["sparsity"], 0.5);
  for (const char* file : {"masks.safetensors", "model.safetensors", "pruning.json"})
    EXPECT_EQ(at.get(std::string("p/") + file), at.get(std::string("q/") + file)) << file;
  said(at, std::string(kPrune) + "--pattern 2:4 --seed 1 --out r");
  EXPECT_NE(at.get("p/masks.safetensors"), at.get("r/masks.safetensors"));
}

TEST(PruneCommand, MethodsAndUpdatesRun) {
  const Workplace at;
  if (const std::string why = put_model(at, "m", {.dtype = DType::bf16}); !why.empty())
    GTEST_SKIP() << "skipped: " << why;
  at.put("t", prune_text());
  at.put("a.json", "{\"c_attn\": 0.25}");
  at.put("c.toml", "method = \"ria\"\nsparsity = 0.25\n");
  int number = 0;
  const auto sparsity = [&](const std::string& flags) {
    return json::parse(said(at, kPrune + flags + " --json --out o" + std::to_string(number++)))["sparsity"]
        .get<double>();
  };
  EXPECT_EQ(sparsity("--method sparsegpt --block-size 8"), 0.5);
  EXPECT_NEAR(sparsity("--method sparsegpt --bits 4 --true-sequential"), 0.5, 0.25);
  EXPECT_EQ(sparsity("--method ria --update admm"), 0.5);
  EXPECT_NEAR(sparsity("--allocation owl --sparsity 0.6"), 0.6, 0.05);
  EXPECT_NEAR(sparsity("--variant --sparsity 0.4"), 0.4, 0.01);
  EXPECT_EQ(sparsity("--allocation a.json --only c_attn"), 0.25);
  EXPECT_EQ(sparsity("--config c.toml"), 0.25);
  EXPECT_EQ(sparsity("--layers 1:2 --pattern 4:8"), 0.5);
  EXPECT_EQ(json::parse(at.get("o7/pruning.json"))["matrices"].size(), 4u);
  // Without text nothing is measured, and magnitude needs none.
  const std::string out = said(at, "prune --device cpu --model m --method magnitude --out plain");
  EXPECT_EQ(out.find("perplexity"), std::string::npos) << out;
  EXPECT_TRUE(holds_all(said(at, std::string(kPrune) + "--plan --out never"), "memory|samples"));
  EXPECT_FALSE(fs::exists(at / "never"));
}

TEST(PruneCommand, SaysWhatIsWrongAndWritesNothing) {
  const Workplace at;
  if (const std::string why = put_model(at, "m"); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  at.put("t", prune_text());
  at.put("few", "abc");
  at.put("bad.json", "{\"c_attn\": 2}");
  at.put("twice.json", R"({"c_attn": 0.2, "c_fc": 0.3, "c_attn": 0.4})");
  at.put("other/notes", "no model");
  const std::vector<std::string> before = at.files();
  expect_failures(
      at,
      {{"prune --model m --text t", 2, "--out is required"},
       {"prune --model m --text t --out p --method best", 2, "--method|best"},
       {"prune --model m --text t --out p --sparsity 0", 2, "a sparsity of 0; expected more than 0"},
       {"prune --model m --text t --out p --sparsity 1", 2,
        "a sparsity of 1; expected more than 0 and less than 1"},
       {"prune --model m --text t --out p --sparsity nan", 2, "nan"},
       {"prune --model m --text t --out p --sparsity much", 2, "--sparsity"},
       {"prune --model m --text t --out p --pattern 4:2", 2, "drops 4 of each 2 weights"},
       {"prune --model m --text t --out p --pattern 2:2", 2, "expected n:m with 0 < n < m"},
       {"prune --model m --text t --out p --pattern 0:4", 2, "expected n:m with 0 < n < m"},
       {"prune --model m --text t --out p --pattern 2:", 2, "expected unstructured, or n:m as in 2:4"},
       {"prune --model m --text t --out p --pattern 2:4 --sparsity 0.6", 2, "drops a share of 0.5, not 0.6"},
       {"prune --model m --text t --out p --layers 3", 2, "expected FIRST:END"},
       {"prune --model m --text t --out p --layers 2:1", 2, "expected the second to be larger"},
       {"prune --model m --text t --out p --bits 4", 2, "part of the update obs"},
       {"prune --model m --text t --out p --allocation bad.json", 2, "'c_attn' is 2"},
       {"prune --model m --text t --out p --allocation none.json", 2, "none.json"},
       {"prune --model m --text t --out p --allocation twice.json", 2, "twice.json has 'c_attn' twice"},
       {"prune --model m --out p", 2, "give --text FILE..., or --data DIR"},
       {"prune --model m --text t --data d --out p", 2, "--text|--data"},
       {"prune --device cpu --model m --text t --out p --length 16 --pattern 3:6", 1,
        "groups of 6 do not divide"},
       {"prune --device cpu --model m --text t --out p --length 16 --only nothing", 1,
        "no linear module|nothing"},
       {"prune --device cpu --model m --text t --out p --length 16 --layers 0:9", 1, "the model has 2"},
       {"prune --device cpu --model m --text t --out p --length 65", 1, "the model has 64 positions"},
       {"prune --device cpu --model m --text few --out p --length 16", 1, "fewer than one sample of 16"},
       {"prune --device cpu --model m --text t --out p --length 16 --samples 4000", 1, "fewer than 4000"},
       {"prune --device cpu --model m --text t --eval-text few --out p --length 16", 1,
        "fewer than one window"},
       {"prune --device cpu --model m --text missing --out p --length 16", 1, "missing"},
       {"prune --device cpu --model m --text t --out m --length 16", 1, "m has model.safetensors already"},
       {"prune --device cpu --model other --text t --out p", 1, "has no config.json"}});
  // Where nothing can be written, before the model is loaded and samples pass a block for the plan.
  expect_failure(at, "prune --device cpu --model other --text t --length 16 --out few/p", 1,
                 "write: cannot create the folder |few");
  EXPECT_EQ(at.files(), before);
}

TEST(PruneCommand, KeepsTheDtypeOfTheFile) {
  const Workplace at;
  const std::string how = "prune --device cpu --method magnitude --model m --out ";
  for (const auto& [dtype, stated] : {std::pair(DType::f32, "\"bfloat16\""), {DType::bf16, "null"}}) {
    if (const std::string why = put_model(at, "m", {.dtype = dtype}); !why.empty())
      GTEST_SKIP() << "skipped: " << why;
    std::string config = at.get("m/config.json");
    const size_t begin = config.find(pretrained::dtype_name(dtype)) - 1;
    config.replace(begin, config.find_first_of(",\n", begin) - begin, stated);
    at.put("m/config.json", config);
    const std::string out = std::string("p-") + name_of(dtype);
    const Outcome outcome = run(at, how + out);
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_EQ(
        outcome.err.find("are f32, which is taken, though config.json says bfloat16") != std::string::npos,
        dtype == DType::f32)
        << outcome.err;
    EXPECT_EQ(pretrained::stored_dtype(at / out), dtype);
    EXPECT_EQ(pretrained::read_config(at / out).stated_dtype, dtype);
    expect_success(run(at, "convert " + out + " " + out + "-c --format tca-bme"));
  }
}

TEST(PruneCommand, SaysWhichShareOfTheModelIsPruned) {
  const Workplace at;
  if (const std::string why = put_model(at, "m"); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  const std::string how =
      "prune --device cpu --method magnitude --model m --only transformer.h.*.mlp.c_proj --out ";
  // 2 of 24 x 16 among 2 of 16 x (48 + 16 + 24 + 24) weights.
  EXPECT_TRUE(holds_all(said(at, how + "p"), "0.500000 of 2 of the 8 matrices; 0.107143 of all of them"));
  EXPECT_EQ(json::parse(at.get("p/pruning.json"))["block_matrices"], 8);
}

TEST(PruneCommand, SaysThatNothingWasDropped) {
  const Workplace at;
  if (const std::string why = put_model(at, "m"); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  at.put("t", prune_text());
  for (const auto& [flags, says] : {std::pair("--sparsity 0.0001 --out p", true),
                                    {"--sparsity 0.0001 --json --out q", true},
                                    {"--sparsity 0.2 --out s", false}}) {
    const Outcome outcome = run(at, kPrune + std::string(flags));
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_EQ(outcome.err.find("no weight was dropped") != std::string::npos, says) << outcome.err;
  }
}

/// A model whose logits overflow.
models::Gpt overflowing() {
  Rng rng(5);
  models::Gpt model({.vocabulary = 260, .positions = 64, .d_model = 16, .d_ff = 24, .heads = 2, .layers = 2},
                    rng, Device::cpu());
  model.norm.weight.detach().fill(3e38);
  return model;
}

TEST(PruneCommand, DamagedAndLockedBlocksAreSaid) {
  const Workplace at;
  if (const std::string why = put_model(at, "m"); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  const std::string how = "prune --device cpu --method magnitude --model m --out p";
  at.put("p.partial/block-00000.safetensors", "cut off");
  const Outcome damaged = run(at, how);
  EXPECT_EQ(damaged.code, 1);
  EXPECT_TRUE(
      holds_all(damaged.err, "a finished block is damaged|block-00000|remove p.partial to start over"))
      << damaged.err;
  // Before the perplexity, which takes longer, and of this model is not finite.
  at.put("t", prune_text());
  pretrained::save(overflowing(), at / "o");
  fs::copy(at / "m/tokenizer.json", at / "o/tokenizer.json");
  expect_failure(at, "prune --device cpu --method magnitude --model o --text t --length 16 --out p", 1,
                 "a finished block is damaged");
  fs::remove_all(at / "p.partial");
  fs::create_directory(at / "p.partial");
  {
    const train::FolderLock other(at / "p.partial");
    expect_failure(at, how, 1, "p.partial: another process is writing in it");
    expect_failure(at, how + "/", 1, "p.partial: another process is writing in it");
  }
  EXPECT_FALSE(fs::exists(at / "p"));
  said(at, how);
  EXPECT_FALSE(fs::exists(at / "p.partial"));
}

TEST(PruneCommand, GoesOnAfterASignal) {
  const Workplace at;
  if (const std::string why = put_model(at, "m"); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  at.put("t", prune_text());
  const std::string command =
      "prune --device cpu --model m --text t --length 16 --samples 200 --method sparsegpt --eval-windows 2 "
      "--out ";
  said(at, command + "whole");
  {
    Process process(at, words_of(command + "p"));
    const bool running =
        wait_for(process, [&] { return fs::exists(at / "p.partial/block-00000.safetensors"); });
    if (running) process.send(SIGKILL);
    process.wait();
  }
  if (fs::exists(at / "p.partial")) {
    Process process(at, words_of(command + "q"));
    if (wait_for(process, [&] { return fs::exists(at / "q.partial/block-00000.safetensors"); }))
      process.send(SIGINT);
    const Outcome outcome = process.wait();
    if (outcome.code == 130)
      EXPECT_TRUE(holds_all(outcome.err,
                            "stopping; finished blocks are kept|tessera: interrupted by Ctrl-C; the "
                            "same command continues after the finished blocks"));
    EXPECT_EQ(outcome.err.find("before there was a result"), std::string::npos) << outcome.err;
  }
  if (!fs::exists(at / "p.partial")) return;  // it was faster than this test
  const json report = json::parse(said(at, command + "p --json"));
  EXPECT_GE(report["resumed_blocks"], 1);
  for (const char* file : {"masks.safetensors", "model.safetensors", "pruning.json"})
    EXPECT_EQ(at.get(std::string("p/") + file), at.get(std::string("whole/") + file)) << file;
  EXPECT_FALSE(fs::exists(at / "p.partial"));
}

// A pipe without space keeps the command from ending: it has written its folder then, and waits to print. One
// signal, since a second one may come before the command has returned from writing.
void expect_output_in_spite_of(int signal, const Workplace& at, const std::string& command,
                               const std::string& file) {
  const std::string pipe = at / ("pipe-of-" + fs::path(file).parent_path().string());
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const int end = ::open(pipe.c_str(), O_RDWR | O_NONBLOCK);
  ASSERT_GE(end, 0);
  std::string bytes(1 << 16, ' ');
  while (::write(end, bytes.data(), bytes.size()) > 0 || ::write(end, bytes.data(), 1) > 0) continue;
  Process process(at, words_of(command), pipe);
  wait_for(process, [&] { return fs::exists(at / file) && process.waiting(); });
  process.send(signal);
  while (process.running())
    if (::read(end, bytes.data(), bytes.size()) < 0) wait_a_little();
  ::close(end);
  const Outcome outcome = process.wait();
  EXPECT_EQ(outcome.code, 0) << command << ": signal " << outcome.signal << " " << outcome.err;
}

TEST(WrittenFolder, AnswersForTheCommandWhateverSignalComes) {
  const Workplace at;
  if (const std::string why = put_model(at, "m"); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  at.put("t", prune_text());
  expect_output_in_spite_of(SIGTERM, at, std::string(kPrune) + "--json --eval-windows 2 --out p",
                            "p/pruning.json");
  expect_output_in_spite_of(SIGINT, at, "convert m c", "c/model.safetensors");
  // Without perplexities, since a signal may come while they are computed: the calibration is written by
  // then.
  expect_output_in_spite_of(
      SIGHUP, at,
      "calibrate --device cpu --model m --text t --length 16 --samples 8 --validation 0 --allocation uniform "
      "--out g",
      "g/calibration.json");
}

TEST(PruneCommand, KeepsFinishedBlocksAfterAnError) {
  const Workplace at;
  if (const std::string why = put_model(at, "m"); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  // Little is pruned of the first block and much of the second, whose file is larger than files may be.
  const std::string how =
      "prune --device cpu --method magnitude --model m --only transformer.h.0.attn.c_proj --only "
      "transformer.h.1.** --json --out ";
  struct rlimit old {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
  struct rlimit little = old;
  little.rlim_cur = 4'000;  // processes inherit it
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &little), 0);
  const Outcome outcome = run(at, how + "p");
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old), 0);
  EXPECT_EQ(outcome.code, 1) << "signal " << outcome.signal;
  EXPECT_TRUE(holds_all(outcome.err,
                        "block-00001.safetensors|too large|1 finished block is kept in p.partial: the same "
                        "command continues after it"));
  EXPECT_EQ(json::parse(said(at, how + "p"))["resumed_blocks"], 1);
  said(at, how + "whole");
  EXPECT_EQ(at.get("p/model.safetensors"), at.get("whole/model.safetensors"));
  EXPECT_FALSE(fs::exists(at / "p.partial"));
}

TEST(SparsityImportCommand, WritesMasksThatCompareReads) {
  const Workplace at;
  if (const std::string why = put_model(at, "m"); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  said(at, "prune --device cpu --model m --method magnitude --out p");
  const std::string out = said(at, "sparsity import p --model m --seed 4 --out i.safetensors");
  EXPECT_TRUE(holds_all(out,
                        "mlp.c_proj|0.5000|of 8 matrices|model        m, fingerprint|method       magnitude, "
                        "pattern unstructured, asked 0.5, seed 4|written      i.safetensors"));
  EXPECT_TRUE(
      holds_all(said(at, "sparsity compare i.safetensors p"), "transformer.h.1.mlp.c_fc|1.0000 +- 0.0000"));
  const json report =
      json::parse(said(at, "sparsity import i.safetensors --model m --json --out j.safetensors"));
  EXPECT_EQ(report["matrices"].size(), 8u);
  EXPECT_EQ(report["seed"], "4");
  EXPECT_EQ(report["matrices"][0]["from"], "i.safetensors");
  EXPECT_EQ(at.get("i.safetensors"), at.get("j.safetensors"));
  at.put("layer0-c_fc-0-0-0.5.npy", "no array");
  at.put("layer7-c_fc-0-0-0.5.npy", "no array");
  at.put("notes.pt", "no archive");
  const std::vector<std::string> before = at.files();
  expect_failures(
      at,
      {{"sparsity import p --model m", 2, "--out is required"},
       {"sparsity import p --out o", 2, "--model is required"},
       {"sparsity import --model m --out o", 2, "inputs is required"},
       {"sparsity import p --model m --seed x --out o", 2, "--seed"},
       {"sparsity import p --model p --out o", 1, "masks of another model"},
       {"sparsity import p i.safetensors --model m --out o", 1, "is given twice, by p and by i.safetensors"},
       {"sparsity import none --model m --out o", 1, "none"},
       {"sparsity import p --model none --out o", 1, "none"},
       {"sparsity import layer0-c_fc-0-0-0.5.npy --model m --out o", 1, "layer0-c_fc-0-0-0.5.npy"},
       {"sparsity import layer7-c_fc-0-0-0.5.npy --model m --out o", 1, "layers of m are 0 to 1"},
       {"sparsity import notes.pt --model m --out o", 1, "notes.pt|has no matrix 'notes'"},
       {"sparsity import p --model m --out no/o", 1, "no/o"}});
  EXPECT_EQ(at.files(), before);
}

}  // namespace
}  // namespace tessera::cli::test

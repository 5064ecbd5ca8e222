#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>

#include "models/llama.h"
#include "tests/cli/language_model.h"

// From a dense model to one that runs sparse: prune, calibrate, convert, generate; sparsify and the sweep,
// which do all of it; and multiple choice.

namespace tessera::cli::test {
namespace {

using nlohmann::json;

/// A LLaMA "m" of random weights with a tokenizer of bytes, and a text "t". Empty, or why it cannot be made.
std::string put_llama(const Workplace& at) {
  if (const std::string why = put_model(at, "tokens"); !why.empty()) return why;
  Rng rng(7);
  const models::Llama model({.vocabulary = 260,
                             .positions = 64,
                             .d_model = 32,
                             .d_ff = 72,
                             .heads = 4,
                             .kv_heads = 2,
                             .layers = 2,
                             .init_deviation = 0.2,
                             .dtype = DType::f16},
                            rng, Device::cpu());
  pretrained::save(model, at / "m");
  fs::copy(at / "tokens/tokenizer.json", at / "m/tokenizer.json");
  std::string text;
  for (int i = 0; i < 200; ++i) text += "line " + std::to_string(i * i) + "\n";
  at.put("t", text);
  return "";
}

const std::string kTexts = "--device cpu --text t --length 32 --samples 4 --eval-windows 4 ";
const std::string kGreedy = "--step 0.3 --most 0.7 ";

TEST(PatternsCommand, AnalyzesMasksWithNormsOfTheDenseModelAndReports) {
  const Workplace at;
  if (const std::string why = put_llama(at); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  expect_success(run(at, "prune --model m --method magnitude --sparsity 0.4 --out p --device cpu"));
  at.put(
      "a.toml",
      "draws = 3\nexecutions = 2\nk = \"4\"\nonly = [\"layers.0.\"]\nmodel = \"m\"\ntext = [\"t\"]\nlength = "
      "32\nsamples = 4\n");
  const std::string analyze = "sparsity analyze p/masks.safetensors --device cpu --config a.toml ";
  const Outcome analyzed = run(at, analyze + "--out r");
  expect_success(analyzed);
  EXPECT_EQ(analyzed.err.find("nothing is said of input norms"), std::string::npos) << analyzed.err;
  expect_success(run(at, "sparsity export r --out csv"));
  std::istringstream norms(at.get("csv/input_norms.csv"));
  EXPECT_EQ(std::count(std::istreambuf_iterator<char>(norms), {}, '\n'), 1 + 6 * 32 + 72);  // per column
  const std::string report = said(at, "sparsity report r --json report.json");
  EXPECT_TRUE(
      holds_all(report, "# Sparsity patterns|## Clusters over executions|## Coherence|masks.safetensors"));
  const json figures = json::parse(at.get("report.json"));
  EXPECT_EQ(figures["clusters"].size(), 7u);
  EXPECT_EQ(figures["clusters"][0]["executions"], 2);
  EXPECT_TRUE(figures["singletons"][0].contains("chance_without_singletons"));

  const auto refused = [&](const std::string& command, int code, const char* parts) {
    const Outcome outcome = run(at, command);
    EXPECT_EQ(outcome.code, code) << command << ": " << outcome.err;
    EXPECT_TRUE(holds_all(outcome.err, parts)) << command << ": " << outcome.err;
  };
  refused("sparsity analyze p/masks.safetensors --out q --model m", 2, "--model, --text");
  refused("sparsity analyze p/masks.safetensors --out q --text t", 2, "--model, --text");
  refused("sparsity analyze p/masks.safetensors --out q --length 8", 2, "--length|need --model and --text");
  refused("sparsity analyze p/masks.safetensors", 2, "--out");
  refused(analyze + "--out q --model p", 1, "masks.safetensors|--model the dense model");
  refused("sparsity report nothing", 1, "nothing");
  refused("sparsity report r --json r/sparsity.sqlite", 1, "sparsity.sqlite");
  EXPECT_FALSE(fs::exists(at / "q"));
}

TEST(ChainCommand, PruneCalibrateConvertGenerate) {
  const Workplace at;
  if (const std::string why = put_llama(at); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  expect_success(run(at, "prune --model m/ --sparsity 0.2 --out p " + kTexts));
  const json pruning = json::parse(at.get("p/pruning.json"));
  EXPECT_EQ(pruning["model"], "m");
  EXPECT_NE(pruning["pruned_fingerprint"], pruning["fingerprint"]);
  const std::string out =
      said(at, "calibrate --model p/ --out g --total 0.5 --weight-sparsity 0.2 " + kTexts + kGreedy);
  EXPECT_TRUE(holds_all(out, "model.layers.0.self_attn.q_proj|threshold|uniform|greedy|written to g"));
  EXPECT_TRUE(fs::exists(at / "g/layer-1/results.csv"));
  const json calibration = json::parse(at.get("g/calibration.json"));
  EXPECT_EQ(calibration["model"], "p");
  EXPECT_EQ(calibration["fingerprint"], pruning["pruned_fingerprint"]);
  EXPECT_EQ(calibration["layers"].size(), 14u);
  expect_success(run(at, "convert p c --format tiled-cbc --gates g"));
  EXPECT_TRUE(fs::exists(at / "c/calibration.json"));
  const std::string generate = "generate --device cpu --prompt line --greedy --max-tokens 8 --json o.json ";
  // The calibration in the model's directory; and the same by its own name, for the pruned model under gates
  // alone.
  expect_success(run(at, generate + "--model c --sparse required --activation-sparsity 0.375"));
  const json chain = json::parse(at.get("o.json"));
  expect_success(run(at, generate + "--model p --gates g --activation-sparsity 0.375"));
  const json gates = json::parse(at.get("o.json"));
  EXPECT_EQ(chain["texts"][0]["tokens"], gates["texts"][0]["tokens"]);
  double inputs = 0;
  for (const json& layer : chain["sparse"]) {
    EXPECT_EQ(layer["format"], "tiled-cbc");
    EXPECT_NEAR(layer["weight_sparsity"], 0.2, 0.06);
    inputs += layer["activation_sparsity"].get<double>() / 14;
  }
  EXPECT_NEAR(inputs, 0.375, 0.15);
  // The total: that of the weights is counted in the file.
  const Outcome total = run(at, generate + "--model c --total 0.5 --allocation uniform");
  EXPECT_TRUE(holds_all(total.err, "total sparsity 0.5 = 1 - (1 - 0.1|of the inputs)"));
  EXPECT_TRUE(holds_all(run(at, generate + "--model c --sp-ratio 0.4").err,
                        "--sp-ratio 0.4 is taken as --activation-"));
  // Gates on all of a prompt, or none of it, give another perplexity than on half of it.
  const auto perplexity = [&](const std::string& flags) {
    return json::parse(said(
        at, "eval ppl --device cpu --text t --length 32 --windows 4 --json --model c " + flags))["perplexity"]
        .get<double>();
  };
  const double half = perplexity("--activation-sparsity 0.5"),
               all = perplexity("--activation-sparsity 0.5 --gate-prefill 1"),
               none = perplexity("--activation-sparsity 0.5 --gate-prefill 0"), open = perplexity("");
  EXPECT_NE(half, all);
  EXPECT_NE(half, none);
  EXPECT_NEAR(none, open, 1e-6 * open);
}

TEST(ChainCommand, PruneForGates) {
  const Workplace at;
  if (const std::string why = put_llama(at); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  expect_success(run(at, "calibrate --model m --out g " + kTexts + kGreedy));
  const std::string prune = "prune --model m --sparsity 0.2 " + kTexts,
                    gates = "--gates g --activation-sparsity ";
  const std::string out = said(at, prune + "--method sparsegpt --out p " + gates + "0.5");
  EXPECT_TRUE(holds_all(out, "gate-aware sparsegpt|under gates|by the gates|corrected"));
  const json report = json::parse(at.get("p/pruning.json"));
  EXPECT_EQ(report["options"]["gates"]["fingerprint"], report["fingerprint"]);
  EXPECT_EQ(report["options"]["gates"]["layers"].size(), 14u);
  EXPECT_EQ(report["options"]["gates"]["prefill"], 0.5);
  for (const json& matrix : report["matrices"])
    EXPECT_LT(matrix["corrected_error"], matrix["gate_error"]) << matrix["name"];
  EXPECT_GT(report["perplexity"]["gated_before"], 0);
  EXPECT_NE(report["perplexity"]["gated_before"], report["perplexity"]["before"]);
  EXPECT_NE(report["perplexity"]["gated_after"], report["perplexity"]["gated_before"]);
  // The pruned model goes on along the chain; gates of the dense one are not its own.
  expect_success(run(at, "calibrate --model p --out h " + kTexts + kGreedy));
  expect_success(run(at, "convert p c --format tiled-cbc --gates h"));
  const auto refused = [&](const std::string& line, int code, const char* says) {
    expect_failure(at, prune + "--out q " + line, code, says);
    EXPECT_FALSE(fs::exists(at / "q")) << line;
  };
  refused("--method sparsegpt --gates h --activation-sparsity 0.5", 1, "calibrate them on this model");
  refused("--method sparsegpt --gates g", 2, "--gates|g is a calibration; say which --activation-sparsity");
  refused("--method sparsegpt --activation-sparsity 0.5", 2, "name their calibration with --gates");
  refused("--method sparsegpt --gates absent", 1, "absent");
  refused("--method wanda " + gates + "0.5", 2, "choose the update obs or admm");
  refused("--method sparsegpt --true-sequential " + gates + "0.5", 2, "--true-sequential");
  at.put("plain", R"({"format": "tessera-gates", "layers": {"model.layers.0.mlp.up_proj": 0.1}})");
  refused("--method sparsegpt --gates plain", 1, "there is none for layer model.layers.0.");
  refused("--method sparsegpt --gates plain --activation-sparsity 0.5", 2, "plain is not one");
  // A file of gates, another score and another update.
  at.put("gates.json",
         json{{"format", "tessera-gates"}, {"layers", report["options"]["gates"]["layers"]}}.dump());
  expect_success(run(at, prune + "--method wanda --update admm --gates gates.json --out r"));
  EXPECT_EQ(json::parse(at.get("r/pruning.json"))["options"]["gates"]["prefill"], 1.0);
}

TEST(ChainCommand, NeuronsChosenByThePrompt) {
  const Workplace at;
  if (const std::string why = put_llama(at); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  const std::string generate =
      "generate --device cpu --model m --prompt line --greedy --ignore-end --max-tokens 8 --json o.json ";
  const auto generated = [&](const std::string& flags) {
    expect_success(run(at, generate + flags));
    return json::parse(at.get("o.json"));
  };
  const json dense = generated(""), all = generated("--griffin 0"), half = generated("--griffin 0.5");
  EXPECT_FALSE(dense.contains("griffin"));
  EXPECT_EQ(half["griffin"], 0.5);
  EXPECT_EQ(dense["texts"], all["texts"]);
  EXPECT_EQ(dense["texts"][0]["tokens"][0], half["texts"][0]["tokens"][0]);  // the prompt runs dense
  EXPECT_NE(dense["texts"][0]["tokens"], half["texts"][0]["tokens"]);
  const auto perplexity = [&](const std::string& flags) {
    const std::string line = "eval ppl --device cpu --text t --length 32 --windows 4 --json --model m ";
    return json::parse(said(at, line + flags))["perplexity"].get<double>();
  };
  const double open = perplexity("");
  EXPECT_NEAR(perplexity("--griffin 0"), open, 1e-3 * open);  // f16, other sums
  EXPECT_GT(std::abs(perplexity("--griffin 0.9") - open), 1e-3 * open);
  const auto refused = [&](const std::string& line, int code, const char* says) {
    const Outcome outcome = run(at, line);
    EXPECT_EQ(outcome.code, code) << line << "\n" << outcome.err;
    EXPECT_TRUE(holds_all(outcome.err, says)) << line;
  };
  refused(generate + "--griffin 1", 2, "--griffin|less than 1");
  refused("eval ppl --device cpu --text t --model m --griffin 1.0", 2, "--griffin|less than 1");
  refused(generate + "--griffin 1.5", 2, "--griffin");
  refused(generate + "--griffin nan", 2, "--griffin");
  refused(generate + "--griffin 0.5 --gate-threshold 0.1", 2, "leave out gates");
  refused("eval ppl --device cpu --text t --model m --griffin 0.5 --gate-threshold 0.1", 2,
          "leave out gates");
}

TEST(ChainCommand, EachStepChecksTheOneBefore) {
  const Workplace at;
  if (const std::string why = put_llama(at); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  const std::string quick =
      "--device cpu --text t --length 32 --samples 4 --allocation uniform --validation 0 ";
  expect_success(run(at, "prune --model m --method magnitude --sparsity 0.2 --out p --device cpu"));
  expect_success(run(at, "calibrate --model p --out g " + quick));
  expect_success(run(at, "calibrate m --out other " + quick));
  // Weights that are not those of the report next to them.
  fs::copy(at / "p", at / "changed", fs::copy_options::recursive);
  fs::copy_file(at / "m/model.safetensors", at / "changed/model.safetensors",
                fs::copy_options::overwrite_existing);
  expect_success(run(at, "convert p c --format tiled-cbc --gates g"));
  at.put("plain", R"({"format": "tessera-gates", "layers": {}})");
  const std::string damaged = at.get("g/calibration.json");
  at.put("bent/calibration.json", damaged.substr(0, damaged.size() / 2));
  const std::vector<std::string> before = at.files();
  const std::string calibrate = "calibrate --out d " + quick,
                    generate = "generate --device cpu --prompt a --max-tokens 1 ";
  const auto refused = [&](const std::string& line, int code, const char* says) {
    EXPECT_EQ(expect_failure(at, line, code, says).out, "") << line;
  };
  refused(calibrate + "--model changed", 1, "changed/pruning.json|they were changed");
  refused("convert changed d --format tiled-cbc", 1, "fingerprint|do not belong together");
  refused("convert p d --format tiled-cbc --gates other", 1, "other|was pruned to|calibrate that model");
  refused("convert m d --format tiled-cbc --gates g", 1, "do not belong together");
  refused("convert p d --gates g", 2, "--gates");
  refused("convert p d --format dense --gates g", 2, "--gates");
  refused("convert p d --format tiled-cbc --gates absent", 1, "absent");
  refused("convert p c --format tiled-cbc --gates g", 1, "c has");
  refused("convert changed c --format tiled-cbc", 1, "c has");  // before the weights are read
  refused("calibrate --model p --out g " + quick, 1, "already");
  const Outcome no_folder = run(at, "calibrate --model p --out plain " + quick);
  EXPECT_TRUE(holds_all(no_folder.err, "plain is a file; name a folder"));
  EXPECT_EQ(no_folder.err.find("calibrated block"), std::string::npos) << "said after the work";
  refused(calibrate + "--model p --total 0.2 --weight-sparsity 0.2", 2, "something is left for the gates");
  refused(calibrate + "--model p --total 0.1 --weight-sparsity 0.2", 2, "something is left for the gates");
  refused(calibrate + "--model p --activation-sparsity 2", 2, "--activation-sparsity");
  refused(calibrate + "--model p --rule symmetric --scale column-norm", 2, "magnitude");
  refused("calibrate --model p --out d --device cpu", 2, "give the text");
  refused("calibrate --model nothing --out d " + quick, 1, "nothing");
  refused("calibrate --out d " + quick, 2, "--model is required");
  refused(generate + "--model m --gates g --activation-sparsity 0.3", 1,
          "calibrated on the model with fingerprint");
  refused(generate + "--model m --activation-sparsity 0.3", 2, "tessera calibrate");
  refused(generate + "--model c --gates g", 2, "say which --activation-sparsity");
  refused(generate + "--model c --activation-sparsity 0.3 --total 0.5", 2, "give one");
  refused(generate + "--model c --activation-sparsity 0.3 --sp-ratio 0.5", 2, "--sp-ratio");
  refused(generate + "--model c --activation-sparsity 1.5", 2, "--activation-sparsity");
  refused(generate + "--model c --activation-sparsity 1", 1, "less than 1");
  refused(generate + "--model c --total 0.1", 1, "something is left for the gates");
  refused(generate + "--model c --activation-sparsity 0.3 --allocation greedy", 1, "no greedy distribution");
  refused(generate + "--model c --sparse off --activation-sparsity 0.3", 2, "--sparse off");
  refused(generate + "--model c --gate-prefill 0.5", 2, "--gate-prefill");
  refused(generate + "--model c --gates plain --activation-sparsity 0.3", 2, "plain");
  refused(generate + "--model c --gates bent --activation-sparsity 0.3", 1, "damaged");
  refused(generate + "--model c --activation-sparsity 0.3 --samples 9", 1, "9 tokens");
  EXPECT_EQ(at.files(), before);
}

TEST(ChainCommand, SparsifyDoesAllOfIt) {
  const Workplace at;
  if (const std::string why = put_llama(at); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  const std::string how = kTexts + kGreedy + "--prompt-tokens 8 --new-tokens 4 --repeats 1 --validation 0.4 ";
  at.put(".s.intermediate.tmp-1-0/pruned/config.json", "of a call that was killed");
  at.put("s.pruned/config.json", "mine");
  const json report = json::parse(said(at, "sparsify --model m --total 0.5 --out s --json " + how));
  EXPECT_NEAR(report["weight_sparsity"], 0.2, 1e-12);  // SPDP's operating point
  EXPECT_NEAR(report["activation_sparsity"], 0.375, 1e-12);
  EXPECT_EQ(report["format"], "tiled-cbc");
  EXPECT_NEAR(report["sparse"]["weight_sparsity"], 0.2, 0.05);
  EXPECT_LT(report["sparse"]["bytes"], report["dense"]["bytes"]);
  EXPECT_EQ(report["layers"].size(), 14u);
  for (const std::string& name : at.names()) EXPECT_FALSE(name.starts_with(".s")) << name;
  EXPECT_EQ(at.get("s.pruned/config.json"), "mine");
  expect_success(
      run(at,
          "generate --device cpu --model s --sparse required --activation-sparsity 0.375 --prompt a "
          "--max-tokens 4"));
  // Any bound is kept by some split of a wide search; the result is within it on held-out text.
  const std::string out = said(at, "sparsify --model m --max-ppl 1.5x --search 0.2,0.4 --out b(1) " + how);
  EXPECT_TRUE(holds_all(out, "searched|perplexity|written to b(1)"));
  EXPECT_TRUE(holds_all(out, "tessera generate --model 'b(1)' --sparse required"));  // for a shell
  EXPECT_TRUE(fs::exists(at / "b(1)/sparse.safetensors"));
  expect_failures(
      at, {{"sparsify --model m --out d --text t", 2, "give the sparsity"},
           {"sparsify --model m --out d --text t --total 1.5", 2, "--total"},
           {"sparsify --model m --out d --text t --total 0", 2, "more than 0"},
           {"sparsify --model m --out d --text t --max-ppl 0.5", 2, "--max-ppl"},
           {"sparsify --model m --out d --text t --max-ppl much", 2, "--max-ppl"},
           {"sparsify --model m --out d --text t --total 0.3 --weight-sparsity 0.4", 2, "is less than"},
           {"sparsify --model m --out d --text t --total 0.3 --weight-sparsity 0.1 --activation-sparsity 0.2",
            2, "follows from the other two"},
           {"sparsify --model m --out d --text t --max-ppl 1.1x --activation-sparsity 0.2", 2, "--max-ppl"},
           {"sparsify --model m --out d --text t --max-ppl 1.1x --format mma-delta4", 2,
            "sparsify: no split is in mma-delta4"},
           {"sparsify --model m --out d --total 0.5", 2, "give the text"},
           {"sparsify --model m --out d --weight-sparsity 0.4", 2, "give the text"},
           {"sparsify --model m --out d --weight-sparsity 0", 2, "give the sparsity"},
           {"sparsify --device cpu --model m --out s --total 0.5 --text t --length 32", 1, "has weights"},
           {"sparsify --device cpu --model m --out d --total 0.5 --text t --length 32 --new-tokens 60", 1,
            "a smaller --prompt-tokens"},
           {"sparsify --device cpu --model s --out d --total 0.5 --text t --length 32 --prompt-tokens 8", 1,
            "compressed already"},
           {"sparsify --device cpu --model nothing --out t/d --total 0.5 --text t", 1,
            "cannot create the folder"}});
  EXPECT_FALSE(fs::exists(at / "d"));
  // A search among splits in one format measures only those; weights alone can be bounded, too.
  const json columns = json::parse(said(
      at, "sparsify --model m --max-ppl 99x --search 0.2,0.4 --format dense-columns --out f --json " + how));
  EXPECT_EQ(columns["searched"], 2);
  EXPECT_EQ(columns["format"], "dense-columns");
  const json alone = json::parse(
      said(at, "sparsify --model m --max-ppl 99x --total 0.3 --weight-sparsity 0.3 --out w/ --json " +
                   kTexts + "--prompt-tokens 8 --new-tokens 4 --repeats 1 --validation 0.4"));
  EXPECT_EQ(alone["searched"], 3);
  EXPECT_EQ(alone["activation_sparsity"], 0);
}

// What was calibrated is there before it is measured, which takes longer.
TEST(ChainCommand, CalibrationsStayWhenMeasuringThemIsInterrupted) {
  const Workplace at;
  if (const std::string why = put_llama(at); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  Process process(at, words_of("calibrate --model m --out g --device cpu --text t --length 32 --samples 4 "
                               "--allocation uniform --validation 0.5 --activation-sparsity 0:0.99:0.001"));
  ASSERT_TRUE(wait_for(process, [&] { return fs::exists(at / "g/calibration.json"); }));
  process.send(SIGINT);
  const Outcome outcome = process.wait();
  EXPECT_EQ(outcome.code, 130);
  EXPECT_TRUE(holds_all(outcome.err,
                        "stopping; the calibration is complete and stays|tessera: interrupted by Ctrl-C; the "
                        "calibration in g is complete, its perplexity was not measured"));
  for (const char* const wrong : {"is removed", "before there was a result"})
    EXPECT_EQ(outcome.err.find(wrong), std::string::npos) << outcome.err;
  expect_success(run(
      at,
      "generate --device cpu --prompt line --max-tokens 2 --model m --gates g --activation-sparsity 0.3"));
}

TEST(ChainCommand, SweepsGoOnAfterFinishedSplits) {
  const Workplace at;
  if (const std::string why = put_llama(at); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  const std::string how =
      "sparsity sweep --model m " + kTexts +
      "--prompt-tokens 8 --new-tokens 4 --repeats 2 --validation 0.4 --allocation uniform ";
  const Outcome first = run(at, how + "--out r --total 0.3 --weight-sparsity 0,0.1");
  if (first.err.find("SQLite") != std::string::npos) GTEST_SKIP() << "skipped: " << first.err;
  expect_success(first);
  EXPECT_TRUE(holds_all(first.out, "dense|0.3|Pareto front of 5 splits"));
  const auto dense = [&](const char* result = "r") {
    return Process(at, {"sparsity", "query", result, "SELECT * FROM dense", "--format", "csv"}).wait().out;
  };
  const std::string measured = dense();
  EXPECT_EQ(dense("r/sparsity.sqlite"), measured);
  // Five more of another total; the first five and the dense model are taken from the folder.
  const std::string more = said(at, how + "--out r --total 0.3,0.4 --weight-sparsity 0,0.1");
  EXPECT_TRUE(holds_all(more, "5 splits were measured by an earlier call|of 10 splits"));
  EXPECT_EQ(dense(), measured);
  EXPECT_EQ(std::count(measured.begin(), measured.end(), '\n'), 2) << measured;
  const std::string csv = at.get("r/sweep.csv");
  EXPECT_TRUE(csv.starts_with("s,s1,s2,format,Uniform_PPL,Greedy_PPL,ttft_ms")) << csv;
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 11);
  EXPECT_TRUE(holds_all(csv, "\n0.3,0.1,0.222222222,|\n0.4,0.1,0.333333333,|\n0.3,0,0.3,"));
  const std::string page = at.get("r/sweep.html");
  EXPECT_TRUE(holds_all(page, "Pareto front|Distributions of inputs|Time per layer|blocks.0.attention.qkv"));
  const std::string rows = Process(at, {"sparsity", "query", "r",
                                        "SELECT weights, activations FROM splits WHERE total = 0.3 AND "
                                        "format = 'tiled-cbc' ORDER BY weights",
                                        "--format", "csv"})
                               .wait()
                               .out;
  EXPECT_TRUE(rows.starts_with("weights,activations\n0.1,0.2222222222222")) << rows;
  fs::remove(at / "r/sweep.html");
  expect_success(run(at, "sparsity page r"));
  EXPECT_EQ(at.get("r/sweep.html"), page);
  EXPECT_TRUE(holds_all(run(at, "sparsity page none").err, "none/sparsity.sqlite|there is no such file"));
  const Outcome other = expect_failure(at, how + "--out r --total 0.3 --seed 5", 1, "other settings (seed)");
  EXPECT_TRUE(holds_all(run(at, how + "--out r --total 0.3 --warmups 7").err, "other settings (warmups)"));
  // Weights of f16 have one fingerprint in f16 and f32, which compute other perplexities.
  EXPECT_TRUE(holds_all(run(at, how + "--out r --total 0.3 --dtype f16").err, "other settings (dtype)"));
  at.put("f/sparsity.sqlite", std::string(200, 'x'));
  expect_failures(
      at,
      {{"sparsity sweep --model m --text t --out d --total 0.5:0.1:0.1", 2, "--total"},
       {"sparsity sweep --model m --text t --out d --total 0.5 --weight-sparsity 1", 2, "--weight"},
       {"sparsity sweep --model m --out d", 2, "give the text"},
       {"sparsity sweep --model m --text t --validation 0 --out d", 2, "no text is held out to measure on"}});
  EXPECT_TRUE(holds_all(run(at, how + "--out f --total 0.3").err, "sparsity.sqlite is not"));
  EXPECT_FALSE(fs::exists(at / "d"));
}

TEST(ChainCommand, GateAwareInSparsifyAndSweeps) {
  const Workplace at;
  if (const std::string why = put_llama(at); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  const std::string texts = kTexts + "--validation 0.4 --dtype f32 ",
                    how = texts + kGreedy + "--prompt-tokens 8 --new-tokens 4 --repeats 1 ",
                    split = "--total 0.5 --weight-sparsity 0.2 --method sparsegpt ";
  const Outcome made = run(at, "sparsify --model m --out s --json --gate-aware on " + split + how);
  expect_success(made);
  EXPECT_TRUE(holds_all(made.err,
                        "calibrate: the dense model|of the weights, gate-aware sparsegpt|"
                        "calibrate: 0.375"));
  const json report = json::parse(made.out);
  EXPECT_EQ(report["pruning"], "gate-aware sparsegpt");
  // Command by command.
  expect_success(run(at, "calibrate --model m --out g " + texts + kGreedy));
  expect_success(run(at,
                     "prune --model m --method sparsegpt --sparsity 0.2 --gates g --activation-sparsity "
                     "0.375 --out p " +
                         texts));
  expect_success(run(at, "calibrate --model p --out h " + texts + kGreedy));
  expect_success(run(at, "convert p c --format tiled-cbc --gates h --dtype f32"));
  EXPECT_EQ(report["fingerprint"], json::parse(at.get("p/pruning.json"))["pruned_fingerprint"]);
  EXPECT_TRUE(at.get("c/sparse.safetensors") == at.get("s/sparse.safetensors"));
  const json by_hand = json::parse(at.get("c/calibration.json")),
             written = json::parse(at.get("s/calibration.json"));
  EXPECT_EQ(by_hand["fingerprint"], written["fingerprint"]);
  EXPECT_EQ(by_hand["layers"], written["layers"]);

  const std::string sweep = "sparsity sweep --model m --weights-alone off " + split + how;
  const Outcome plain = run(at, sweep + "--out r");
  if (plain.err.find("SQLite") == std::string::npos) {
    expect_success(plain);
    const std::string both = said(at, sweep + "--out r --gate-aware off,on");
    EXPECT_TRUE(holds_all(both, "1 splits were measured by an earlier call|of 2 splits|pruning"));
    const std::string csv = at.get("r/sweep.csv");
    EXPECT_TRUE(holds_all(csv, ",counted_activations,pruning|,gate-aware sparsegpt|,sparsegpt"));
    EXPECT_TRUE(holds_all(at.get("r/sweep.html"),
                          "0.2 of the weights, then gates|0.2 of the weights, gate-aware, then gates"));
    EXPECT_TRUE(holds_all(said(at, sweep + "--out r --gate-aware off,on"), "2 splits were measured"));
    EXPECT_EQ(at.get("r/sweep.csv"), csv);
  }
  const std::string aware = "sparsify --model m --out d --gate-aware on --method sparsegpt " + how;
  const char* const zero = "above 0 and below the total one";
  expect_failures(
      at,
      {{"sparsify --model m --out d --text t --total 0.5 --gate-aware on", 2, "wanda|--method sparsegpt"},
       {"sparsity sweep --model m --out d --text t --method ria --gate-aware off,on", 2,
        "ria|--method sparsegpt"},
       {"sparsify --model m --out d --text t --total 0.5 --gate-aware maybe", 2, "--gate-aware|on or off"},
       {aware + "--weight-sparsity 0.4", 1, zero},
       {aware + "--weight-sparsity 0.2 --activation-sparsity 0", 1, zero},
       {aware + "--total 0.2 --activation-sparsity 0", 1, zero},
       {aware + "--activation-sparsity 0.4", 1, zero},
       {"sparsify --model m --out d --gate-aware off,on " + split + how, 1, "2 kinds of pruning|--max-ppl"},
       {"sparsity sweep --model m --out d --method sparsegpt --gate-aware on --weight-sparsity 0 " + how, 1,
        "no split has both zeros and gates"}});
  EXPECT_FALSE(fs::exists(at / "d"));
}

TEST(ChoiceCommand, AModelThatKnowsNothingIsAtChance) {
  const Workplace at;
  if (const std::string why = put_model(at, "m", {.deviation = 0}); !why.empty())
    GTEST_SKIP() << "skipped: " << why;
  std::string items;
  for (int i = 0; i < 40; ++i)
    items += json{{"context", "Is it " + std::to_string(i)}, {"choices", {" yes", " nay"}}, {"answer", i % 2}}
                 .dump() +
             "\n";
  at.put("f", items);
  const json result = json::parse(said(at, "eval choice f --device cpu --model m --json --predictions p"));
  EXPECT_EQ(result["items"], 40);
  EXPECT_EQ(result["chance"], 0.5);
  EXPECT_EQ(result["by_likelihood"]["accuracy"], 0.5);  // every choice is as likely: the first is taken
  EXPECT_LT(result["by_likelihood"]["interval_95"][0], 0.36);
  const std::string lines = at.get("p");
  EXPECT_EQ(std::count(lines.begin(), lines.end(), '\n'), 40);
  EXPECT_NEAR(json::parse(lines.substr(0, lines.find('\n')))["log_likelihoods"][1], -4 * std::log(260), 1e-3);
  EXPECT_TRUE(
      holds_all(said(at, "eval choice f --device cpu --model m --items 4"), "items|4|chance|within chance"));
  at.put("bad", "{\"context\": \"a\"}\n");
  at.put("zeros", std::string(16, '\0'));
  EXPECT_EQ(run(at, "eval choice zeros --device cpu --model m").err.find("--any-bytes"), std::string::npos);
  expect_failures(at,
                  {{"eval choice bad --device cpu --model m", 1, "bad: line 1|choices"},
                   {"eval choice zeros --device cpu --model m", 1, "zeros is a binary file|extract its text"},
                   {"eval choice absent --device cpu --model m", 1, "absent"},
                   {"eval choice f --device cpu --model absent", 1, "absent"},
                   {"eval choice f --device cpu --model m --predictions f", 1, "is the input"},
                   {"eval choice --model m", 2, "FILE"}});
}

}  // namespace
}  // namespace tessera::cli::test

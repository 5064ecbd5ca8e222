#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "tests/cli/language_runs.h"
#include "tests/place.h"

// Training with 2:4 sparse activations as a user meets it: train, stop and go on, plan, measure; and what is
// refused, each with one line.

namespace tessera::cli::test {
namespace {

using nlohmann::json;

/// The values of one name, of a run's curve.
std::vector<double> curve(const Workplace& at, const std::string& run, const char* name = "loss") {
  std::vector<double> list;
  for (const json& record : metrics_of(at, "runs/" + run)) list.push_back(record.at(name));
  return list;
}

TEST(Sparse24Training, StartsDenseThenSparsifiesThenIsDenseAgain) {
  const Workplace at;
  put_clauses(at);
  const std::string dense = kTrainOnClauses + " --ffn relu2 --steps 12";
  expect_success(run(at, dense + " --name dense --sparse24 naive --sparse24-y dense --sparse24-dx dense "
                                 "--sparse24-dup dense --sparse24-ddown dense"));
  const Outcome outcome = run(at, dense + " --name sparse --sparse24 naive --dense-first 5 --dense-last 3");
  expect_success(outcome);
  const std::vector<double> one = curve(at, "dense"), other = curve(at, "sparse");
  ASSERT_EQ(one.size(), 12u);
  // The loss of step 6 is the first that a sparse forward pass gives.
  EXPECT_EQ(std::vector(one.begin(), one.begin() + 5), std::vector(other.begin(), other.begin() + 5));
  EXPECT_NE(one[5], other[5]);
  EXPECT_LT(other.back(), other.front() - 0.2);  // it learns
  const json model = json::parse(at.get("runs/sparse/model/config.json"));
  EXPECT_EQ(model.at("model_type"), "arcee");  // a model that transformers reads, without a word of 2:4
  EXPECT_EQ(model.at("hidden_act"), "relu2");
  EXPECT_EQ(json::parse(at.get("runs/sparse/run.json")).at("job").at("sparse24"), "naive");
  const json values = metrics_of(at, "runs/sparse").back();
  EXPECT_GT(values.at("activation_zeros"), 0.2);
  EXPECT_LT(values.at("dropped_energy"), 0.5);
  EXPECT_TRUE(values.contains("zeros.blocks.1.mlp"));
}

TEST(Sparse24Training, GoesOnToTheSameBitsAcrossASwitch) {
  const std::string cola = "--form cola --rank 8 --cola-activation relu_squared --sparse24 ";
  for (const std::string& how :
       {std::string("--ffn relu2 --sparse24 naive --permute random"),
        std::string("--ffn relu2 --sparse24 mvue --sparse24-tokens mvue --dense-share 0"),
        std::string("--ffn relu2 --sparse24 soft_dynamic --dynamic-steps 2 --permute stride"),
        cola + "naive --permute random", cola + "mvue --sparse24-tokens mvue",
        cola + "soft_threshold --dense-share 0", cola + "soft_dynamic --dynamic-steps 2",
        std::string("--ffn relu2 --form low_rank --rank 8 --sparse24 naive --permute stride")}) {
    const Workplace at;
    put_clauses(at);
    const std::string flags = kTrainOnClauses +
                              " --steps 9 --save-every 1 --keep 20 --dense-first 3 --dense-last 2 "
                              "--name a " +
                              how;
    expect_success(run(at, flags));
    const std::string end = "runs/a/checkpoints/step-000009.safetensors", whole = at.get(end);
    ASSERT_FALSE(whole.empty());
    for (const int step : {2, 3, 5, 7}) {
      for (int later = step + 1; later <= 9; ++later)
        fs::remove(at / ("runs/a/checkpoints/step-00000" + std::to_string(later) + ".safetensors"));
      expect_success(run(at, "train llama --resume runs/a --device cpu --quiet"));
      EXPECT_TRUE(at.get(end) == whole) << how << " from step " << step;
    }
  }
}

std::vector<std::string> sparse_places(const json& values) {
  std::vector<std::string> names;
  for (const auto& [name, value] : values.items())
    if (name.starts_with("zeros.blocks.0."))
      names.push_back(name.substr(std::string("zeros.blocks.0.").size()));
  return names;
}

TEST(Sparse24Training, SparsifiesBetweenTheFactorsOfColaLayers) {
  const Workplace at;
  put_clauses(at);
  const std::string cola =
      kTrainOnClauses + " --form cola --rank 8 --cola-activation relu_squared --steps 12";
  expect_success(run(at, cola + " --name dense --sparse24 naive --sparse24-y dense --sparse24-dx dense "
                                "--sparse24-dup dense --sparse24-ddown dense"));
  expect_success(run(at, cola + " --name sparse --sparse24 naive --dense-first 5 --dense-last 3"));
  const std::vector<double> one = curve(at, "dense"), other = curve(at, "sparse");
  ASSERT_EQ(one.size(), 12u);
  // Next to a gate, too: the first sparse forward pass is that of step 6.
  EXPECT_EQ(std::vector(one.begin(), one.begin() + 5), std::vector(other.begin(), other.begin() + 5));
  EXPECT_NE(one[5], other[5]);
  EXPECT_LT(other.back(), other.front());  // it learns
  const json values = metrics_of(at, "runs/sparse").back();
  const std::vector<std::string> places = sparse_places(values);
  // Each part is measured by itself, and the gated network's hidden activations, which stay dense, are not.
  for (const char* const name : {"attention.qkv.0", "attention.qkv.2", "mlp.up.0", "mlp.up.1", "mlp.down"})
    EXPECT_NE(std::ranges::find(places, name), places.end()) << name;
  EXPECT_EQ(places.size(), 7u);
  EXPECT_GT(values.at("activation_zeros"), 0.2);
  EXPECT_GT(values.at("dropped_energy"), 0);
  EXPECT_LT(values.at("dropped_energy"), 0.5);
  // What is exported says nothing of 2:4, and is used as any model of cola layers.
  EXPECT_TRUE(json::parse(at.get("runs/sparse/model/config.json")).contains("tessera_cola"));
  expect_success(run(at, "generate --model runs/sparse --prompt clause --max-tokens 4 --device cpu"));
  const Outcome measured =
      run(at, "sparsity activations --model runs/sparse --text a.txt --length 16 --windows 4 --device cpu");
  expect_success(measured);
  EXPECT_TRUE(holds_all(measured.out, "blocks.0.attention.qkv.1|blocks.1.mlp.down"));
  // By default, windows are no longer than the model takes.
  expect_success(run(at, "sparsity activations --model runs/sparse --text a.txt --device cpu"));
  std::istringstream rows(measured.out);
  std::string row, names;
  std::getline(rows, row), std::getline(rows, names),
      std::getline(rows, names);  // the model, two rows of names
  while (std::getline(rows, row)) EXPECT_EQ(row.size(), names.size()) << measured.out;

  // In attention alone, with networks that are sparse by themselves; of a GPT, whose fused q, k and v are
  // one.
  expect_success(run(at, kTrainOnClauses +
                             " --ffn relu2 --form cola --form-layers attention --rank 8 --steps 2 "
                             "--cola-activation relu_squared --sparse24 naive --name both"));
  const std::vector<std::string> both = sparse_places(metrics_of(at, "runs/both").back());
  EXPECT_NE(std::ranges::find(both, "attention.qkv.0"), both.end());
  EXPECT_NE(std::ranges::find(both, "mlp"), both.end());
  EXPECT_EQ(both.size(), 5u);
  expect_success(run(at,
                     "train gpt --steps 2 --batch-size 4 --form cola --rank 8 --cola-activation relu_squared "
                     "--sparse24 naive --name gpt" +
                         kOnClauses));
  EXPECT_EQ(sparse_places(metrics_of(at, "runs/gpt").back()).size(), 4u);
}

TEST(Sparse24Training, SparsifiesNetworksOfLowRankLayers) {
  const Workplace at;
  put_clauses(at);
  const std::string low = kTrainOnClauses + " --ffn relu2 --form low_rank --rank 8 --steps 8";
  expect_success(run(at, low + " --name dense"));
  expect_success(run(at, low + " --name sparse --sparse24 naive"));
  const std::vector<double> one = curve(at, "dense"), other = curve(at, "sparse");
  EXPECT_NE(one[0], other[0]);
  EXPECT_LT(other.back(), other.front());  // it learns
  EXPECT_EQ(sparse_places(metrics_of(at, "runs/sparse").back()), std::vector<std::string>{"mlp"});
  const json model = json::parse(at.get("runs/sparse/model/config.json"));
  EXPECT_EQ(model.at("model_type"), "arcee");  // the dense weights that the factors stand for
  // Factors of the manifold's optimizer, and of attention alone, whose networks are dense.
  expect_success(run(at, low + " --name loro --sparse24 naive --optimizer loro --loro-every 3"));
  expect_success(run(at, kTrainOnClauses + " --ffn relu2 --form lost --rank 8 --columns gradient --steps 2 "
                                           "--form-layers attention --sparse24 naive --name attention"));
}

TEST(ActivationL1, MakesActivationsSparserAndIsLoggedApartFromTheLoss) {
  const Workplace at;
  put_clauses(at);
  for (const std::string more : {"", " --sparse24 naive --dense-first 3"}) {
    const std::string flags =
        kTrainOnClauses + " --ffn relu2 --steps 12 --warmup 2 --save-every 1 --keep 20" + more;
    expect_success(run(at, flags + " --name plain"));
    expect_success(run(at, flags + " --name weak --activation-l1 1e-3"));
    expect_success(run(at, flags + " --name strong --activation-l1 10"));
    // The loss of the first step has no penalty in it.
    EXPECT_NEAR(curve(at, "strong")[0], curve(at, "plain")[0], 1e-4);
    EXPECT_NE(curve(at, "weak").back(), curve(at, "plain").back());
    const std::vector<double> weak = curve(at, "weak", "activation_l1"),
                              strong = curve(at, "strong", "activation_l1");
    // At the first step the same activations, which strong weighs 1e4 times.
    EXPECT_NEAR(strong[0] / weak[0], 1e4, 1);
    EXPECT_GT(strong[0], 0);
    EXPECT_LT(strong.back() / 10, weak.back() / 1e-3 / 2);  // half as large at the end
    EXPECT_EQ(json::parse(at.get("runs/strong/run.json")).at("job").at("activation_l1"), 10);
    EXPECT_FALSE(json::parse(at.get("runs/plain/run.json")).at("job").contains("activation_l1"));
    // Stopped and continued: the same bits; another value is refused.
    const std::string end = "runs/strong/checkpoints/step-000012.safetensors", whole = at.get(end);
    for (int later = 5; later <= 12; ++later)
      fs::remove(at / ("runs/strong/checkpoints/step-0000" + std::string(later < 10 ? "0" : "") +
                       std::to_string(later) + ".safetensors"));
    const Outcome other = run(at, "train llama --resume runs/strong --device cpu --quiet --activation-l1 1");
    EXPECT_NE(other.code, 0);
    EXPECT_TRUE(holds_all(other.err, "--activation-l1"));
    expect_success(run(at, "train llama --resume runs/strong --device cpu --quiet"));
    EXPECT_TRUE(at.get(end) == whole) << more;
    fs::remove_all(at / "runs");
  }
}

TEST(ActivationL1, IsTheMeanOverMicroBatchesAndRefusedWithoutZeros) {
  const Workplace at;
  put_clauses(at);
  // Micro-batches of one step are the sequences of one larger batch.
  const std::string flags = "train llama --lr 0.01 --ffn relu --steps 3 --activation-l1 0.1" + kOnClauses;
  expect_success(run(at, flags + " --batch-size 4 --name one"));
  expect_success(run(at, flags + " --batch-size 2 --accumulate 2 --name two"));
  expect_success(run(at, flags + " --batch-size 2 --accumulate 2 --order global --name tree"));
  const std::vector<double> one = curve(at, "one", "activation_l1"), two = curve(at, "two", "activation_l1"),
                            tree = curve(at, "tree", "activation_l1");
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_NEAR(two[i], one[i], 1e-4 * one[i]);
    EXPECT_NEAR(tree[i], one[i], 1e-4 * one[i]);
  }
  const std::string train = kTrainOnClauses + " --steps 4 ";
  expect_failures(at, {{train + "--activation-l1 1", 2, "--activation-l1|without a gate|--ffn relu2"},
                       {train + "--ffn relu2 --activation-l1 -1", 2, "--activation-l1"},
                       {train + "--ffn relu2 --activation-l1 many", 2, "--activation-l1"},
                       {train + "--ffn relu2 --activation-l1 1 --form low_rank --rank 4", 2,
                        "--activation-l1|--form low_rank"},
                       {"train gpt --text a.txt --device cpu --quiet --steps 2 --activation-l1 1", 2,
                        "activations with zeros"}});
}

TEST(Sparse24Training, IsPlannedAndMeasured) {
  const Workplace at;
  put_clauses(at);
  const std::string plan = "plan llama --json --precision bf16 --vocab-size 300 --ffn relu2 --length 256";
  const auto saved = [&](const std::string& more) {
    const Outcome outcome = run(at, plan + more);
    expect_success(outcome);
    return json::parse(outcome.out).at("saved").get<double>();
  };
  // Of the 130m size: 12 blocks, 16 sequences of 256 tokens, 3,072 hidden features.
  const double elements = 12.0 * 16 * 256 * 3072;
  EXPECT_DOUBLE_EQ(saved("") - saved(" --sparse24 naive"), elements * (2 * 2 - 1.125 - 0.05 * 2));
  EXPECT_DOUBLE_EQ(saved("") - saved(" --sparse24 naive --dense-share 0"), elements * (2 * 2 - 1.125));
  // Of cola layers of rank 64 the activations between the factors of the seven modules of a block.
  const std::string cola = " --form cola --rank 64 --cola-activation relu_squared";
  const double between = 12.0 * 16 * 256 * 64 * 7 * (2 * 2 - 1.125 - 0.05 * 2);
  const std::string gated = "plan llama --json --precision bf16 --vocab-size 300 --length 256";
  const auto saved_gated = [&](const std::string& more) {
    const Outcome outcome = run(at, gated + more);
    expect_success(outcome);
    return json::parse(outcome.out).at("saved").get<double>();
  };
  EXPECT_NEAR(saved_gated(cola) - saved_gated(cola + " --sparse24 naive"), between, 1e-6 * between);
  expect_success(run(at, kTrainOnClauses + " --ffn relu --steps 3 --name m --sparse24 naive"));
  const Outcome measured =
      run(at,
          "sparsity activations --model runs/m runs/m --text a.txt --length 16 --windows 4 "
          "--device cpu --json m.json");
  expect_success(measured);
  EXPECT_TRUE(holds_all(measured.out, "blocks.0.mlp|blocks.1.mlp|neighbours"));
  const json figures = json::parse(at.get("m.json"));
  ASSERT_EQ(figures.size(), 2u);
  const json& first = figures[0].at("networks")[0];
  EXPECT_EQ(first.at("column_counts").size(), 64u);
  EXPECT_EQ(first.at("tokens"), 60);  // four windows of 15 inputs
  EXPECT_LE(first.at("dropped_features"), first.at("dropped_both"));
  EXPECT_LE(first.at("dropped_both_split"), first.at("dropped_both"));
}

TEST(Sparse24Training, ChecksDenseStepsAgainstTheStepsThatThereAre) {
  const Workplace at;
  put_clauses(at);
  // 1,000 is the default of --steps, which --epochs, --minutes, plans and benchmarks do not have.
  const std::string sparse = "--ffn relu2 --sparse24 naive --dense-first 1000 ";
  expect_failure(at, kTrainOnClauses + " --epochs 0.01 " + sparse, 1,
                 "1000 dense steps first|leave none of the 1 steps");
  expect_success(run(at, kTrainOnClauses + " --epochs 80 --name r --eval-tokens 8 " + sparse));
  EXPECT_GT(json::parse(at.get("runs/r/run.json")).at("job").at("steps").get<int64_t>(), 1000);
  expect_success(run(at, "plan llama --size demo " + sparse));
}

TEST(Sparse24Training, RefusesWhatMakesNoSense) {
  const Workplace at;
  put_clauses(at);
  const std::string train = kTrainOnClauses + " --steps 4 ";
  expect_failures(
      at, {{train + "--sparse24 naive", 2, "--sparse24 naive|without a gate|--ffn relu2"},
           {train + "--ffn relu2 --sparse24 best", 2, "--sparse24"},
           {train + "--ffn relu2 --dense-share 0.1", 2, "--dense-share|needs --sparse24"},
           {train + "--ffn relu2 --dense-first 3", 2, "--dense-first|needs --sparse24 or --weights-24"},
           {train + "--ffn relu2 --permute stride", 2, "--permute|needs --sparse24"},
           {train + "--ffn relu2 --sparse24-require", 2, "--sparse24-require|needs --sparse24"},
           {train + "--ffn relu2 --sparse24 naive --dense-share 1.5", 2, "--dense-share"},
           {train + "--ffn relu2 --sparse24 naive --dense-share -0.1", 2, "--dense-share"},
           {train + "--ffn relu2 --sparse24 naive --dense-share 0 --sparse24-y split", 2,
            "split|--dense-share is 0"},
           {train + "--ffn relu2 --sparse24 naive --dense-first 2 --dense-last 2", 2, "none of the 4 steps"},
           {train + "--ffn relu2 --sparse24 naive --dynamic-steps 5", 2, "--dynamic-steps|soft_dynamic"},
           {train + "--ffn relu2 --sparse24 naive --permute zigzag", 2, "--permute"},
           {train + "--ffn relu2 --sparse24 naive --sparse24-dx half", 2, "--sparse24-dx"},
           {train + "--ffn relu2 --sparse24 naive --sparse24-tokens soft_dynamic", 2, "--sparse24-tokens"},
           {train + "--ffn relu2 --sparse24 naive --order global", 2, "--order global"},
           {train + "--form cola --rank 8 --sparse24 naive", 2,
            "--sparse24 naive|--form cola|silu|--cola-activation relu_squared"},
           {train + "--form cola --rank 8 --cola-activation relu_squared --sparse24 naive --order global", 2,
            "--order global"},
           {train + "--form low_rank --rank 8 --sparse24 naive", 2,
            "--sparse24 naive|without a gate|--ffn relu2"},
           {train + "--ffn relu2 --form sltrain --rank 8 --sparse24 naive", 2,
            "--form sltrain in the MLPs|--form-layers attention|low_rank or cola"},
           {train + "--ffn relu2 --form lost --rank 8 --sparse24 naive", 2, "--form lost in the MLPs"},
           {train + "--ffn relu2 --type qwen2", 2, "--ffn relu2 and --type qwen2"},
           {train + "--ffn swiglu --type arcee", 2, "--ffn swiglu and --type arcee"},
           {train + "--ffn gelu", 2, "--ffn"},
           {train + "--ffn relu2 --ffn-ratio 2", 2, "--d-ff and --ffn-ratio"},
           {"train gpt --text a.txt --device cpu --quiet --steps 2 --sparse24 naive", 2,
            "activations with zeros"},
           {"sparsity activations --model nowhere --text a.txt", 1, "nowhere"},
           {"sparsity activations --model a --text a.txt --dense-share 2", 2, "--dense-share"},
           {"plan llama --sparse24 naive", 2, "without a gate"},
           {"bench ffn --device cpu --sparsity 1.5", 2, "--sparsity"},
           {"bench ffn --device cpu --shape T=8,D=4", 2, "--shape"},
           {"bench ffn --device cpu --variant fused", 2, "--variant"},
           {"bench ffn --device cpu --variant other", 2, "--variant"}});
  // Known before anything is written.
  for (const std::string more : {"--ffn relu2", "--form cola --rank 8 --cola-activation relu_squared"}) {
    const Outcome refused =
        expect_failure(at, train + more + " --name q --sparse24 naive --sparse24-require", 1,
                       "sparse tensor cores are required|the GEMM of y|\"cpu\"|--sparse24-y dense");
    EXPECT_EQ(refused.out, "") << "no header";
    EXPECT_FALSE(fs::exists(at / "runs/q"));
    expect_failure(at,
                   train + more +
                       " --name q --sparse24 naive --sparse24-require --sparse24-y dense "
                       "--sparse24-dx dense",
                   1, "the GEMM of dup");
  }
  // Nothing is sparse: nothing is missing.
  expect_success(run(at, train + "--ffn relu2 --sparse24 naive --sparse24-require --sparse24-y dense "
                                 "--sparse24-dx dense --sparse24-dup dense --sparse24-ddown dense"));
  // Another setting on resume.
  expect_success(run(at, train + "--ffn relu2 --name r --sparse24 naive"));
  const Outcome other = run(at, "train llama --resume runs/r --steps 6 --device cpu --quiet --sparse24 mvue");
  EXPECT_NE(other.code, 0);
  EXPECT_TRUE(holds_all(other.err, "--sparse24"));
}

TEST(Sparse24Training, TheTableOfOptionsNamesFlagsThatExist) {
  std::ifstream in(tessera::test::place("TESSERA_TEST_DATA", TESSERA_TEST_DATA) +
                   "/../docs/sparse_training.md");
  ASSERT_TRUE(in);
  const Workplace at;
  const Outcome help = run(at, "train llama --help");
  expect_success(help);
  int flags = 0;
  bool in_table = false;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("| option of run_c4.py")) in_table = true;
    if (!in_table || !line.starts_with("|")) continue;
    std::string cell = line.substr(0, line.size() - 2);
    for (size_t bar = cell.find('|', 1); bar != std::string::npos; bar = cell.find('|', bar + 1))
      if (cell[bar - 1] != '\\') {
        cell = cell.substr(bar + 1);
        break;
      }
    for (size_t begin = cell.find("`--"); begin != std::string::npos; begin = cell.find("`--", begin + 1)) {
      const std::string flag = cell.substr(begin + 1, cell.find('`', begin + 1) - begin - 1);
      EXPECT_NE((help.out + " ").find(flag + " "), std::string::npos) << flag << " of: " << line;
      ++flags;
    }
  }
  EXPECT_GT(flags, 35);
}

TEST(FfnBench, TimesTheGemmsAndTheNetworks) {
  Workplace at;
  const Outcome outcome =
      run(at,
          "bench ffn --device cpu --precision f32 --shape T=64,D=32,F=128 --seconds 0.001 "
          "--sparsity 0.9,0.99 --json ffn.json");
  expect_success(outcome);
  EXPECT_TRUE(holds_all(outcome.out, "y dense|y sparse|dup sparse|ddown sparse|swiglu|relu2|sparse24"));
  const auto forms = [&](const std::string& flags) {
    const std::string file = "forms.json";
    fs::remove(at / file);
    expect_success(
        run(at,
            "bench ffn --device cpu --precision f32 --shape T=64,D=32,F=128 --seconds 0.001 --no-gemms "
            "--json forms.json" +
                flags));
    std::string found;
    for (const nlohmann::json& record : json_lines(at.get(file)))
      if (record["attrs"]["what"] == "sparse24")
        for (const char* const gemm : {"y", "dx", "dup", "ddown"})
          if (record["attrs"].contains(gemm))
            found += std::string(gemm) + "=" + record["attrs"][gemm].get<std::string>() + " ";
    return found;
  };
  EXPECT_EQ(forms(""), "");
  EXPECT_EQ(forms(" --dense-share 0"), "");
  EXPECT_EQ(forms(" --sparse24-y dense --sparse24-ddown sparse"), "y=dense ddown=sparse ");
}

}  // namespace
}  // namespace tessera::cli::test

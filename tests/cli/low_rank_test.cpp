#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tests/cli/language_runs.h"

// Weights made of factors, and the optimizers of their family, as a user meets them.

namespace tessera::cli::test {
namespace {

using nlohmann::json;

constexpr const char* kSmallLlama = " --layers 2 --d-model 24 --n-head 4 --kv-heads 2 --d-ff 36";

std::string train(const std::string& more, const std::string& name, int steps = 8) {
  return "train llama --text a.txt --device cpu --length 16 --batch-size 4 --lr 0.01 --quiet --sample-tokens "
         "4 --ngram 0 "
         "--save-every 3 --schedule constant --warmup 0 --steps " +
         std::to_string(steps) + " --name " + name + kSmallLlama + " " + more;
}

double last_loss(const Workplace& at, const std::string& run) {
  return metrics_of(at, "runs/" + run).back().at("loss");
}

double perplexity(const Workplace& at, const std::string& model) {
  const Outcome outcome =
      run(at, "eval ppl --model " + model + " --text a.txt --length 16 --device cpu --json");
  expect_success(outcome);
  return json::parse(outcome.out).at("perplexity").get<double>();
}

struct Arm {
  const char *name, *flags;
};
constexpr Arm kLowRankArms[] = {
    {"low_rank", "--form low_rank --rank 6"},
    {"narrow", "--form low_rank --rank 6 --precision bf16 --accumulate 2"},
    {"mlp_alone", "--form low_rank --mlp-rank 5 --form-layers mlp"},
    {"cola", "--form cola --rank 6 --cola-activation relu_squared"},
    {"sltrain", "--form sltrain --attention-rank 3 --mlp-rank 6 --density 0.1"},
    {"lost", "--form lost --rank 6 --column-share 0.2 --columns gradient"},
    {"galore", "--optimizer galore --galore-rank 6 --galore-every 3 --momentum-reset 4"},
    {"loro", "--form low_rank --rank 6 --optimizer loro --loro-every 3"}};

class LowRankRun : public ::testing::TestWithParam<Arm> {};

TEST_P(LowRankRun, IsTrainedResumedExportedAndUsed) {
  const Workplace at;
  put_clauses(at);
  const std::string flags = GetParam().flags;
  expect_success(run(at, train(flags, "whole")));
  // The same in two parts has the same bits.
  expect_success(run(at, train(flags, "parts", 4)));
  expect_success(run(at, "train llama --resume runs/parts --steps 8 --quiet --device cpu"));
  EXPECT_EQ(last_loss(at, "whole"), last_loss(at, "parts"));
  EXPECT_EQ(at.get("runs/whole/model/model.safetensors"), at.get("runs/parts/model/model.safetensors"));
  // What the run evaluated is what the export computes.
  const double ppl = perplexity(at, "runs/whole/model");
  expect_success(
      run(at, "generate --model runs/whole --prompt clause --max-tokens 4 --device cpu --json g.json"));
  EXPECT_EQ(json::parse(at.get("g.json")).at("texts")[0].at("tokens").size(), 4u);
  const json config = json::parse(at.get("runs/whole/model/config.json"));
  const bool is_cola = flags.find("cola") != std::string::npos;
  EXPECT_EQ(config.contains("tessera_cola"), is_cola);
  // A type that transformers does not have: it would load the directory with random blocks.
  EXPECT_EQ(config.at("model_type") == "tessera_cola", is_cola);
  const Outcome converted = run(at, "convert runs/whole/model c --dtype f32");
  if (is_cola) {
    EXPECT_EQ(converted.code, 1);
    EXPECT_TRUE(holds_all(converted.err, "activation between them|generate, eval and sparsity activations"));
    const Outcome on = run(at, "train llama --model runs/whole/model --text a.txt --device cpu --steps 1");
    EXPECT_NE(on.code, 0);
    EXPECT_TRUE(holds_all(on.err, "activation between them"));
    expect_failure(at, "calibrate --model runs/whole/model --text a.txt --out g --device cpu", 1,
                   "calibrate: the weights|factors (cola)");
  } else {
    expect_success(converted);
    EXPECT_NEAR(perplexity(at, "c"), ppl, 1e-4 * ppl);
  }
}
INSTANTIATE_TEST_SUITE_P(Arms, LowRankRun, ::testing::ValuesIn(kLowRankArms),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(LowRankRun, BeginsWithGivenWeights) {
  const Workplace at;
  put_clauses(at);
  expect_success(run(at, train("", "dense", 20)));
  for (const std::string form : {"low_rank", "sltrain", "lost"}) {
    const std::string more = form == "sltrain" ? " --density 1" : form == "lost" ? " --column-share 1" : "";
    const std::string rank = form == "low_rank" ? "12" : "4";
    expect_success(
        run(at,
            "train llama --model runs/dense/model --text a.txt --device cpu --length 16 --batch-size 4 "
            "--steps 1 --lr 1e-20 --quiet --sample-tokens 0 --ngram 0 --name " +
                form + " --form " + form + " --rank " + rank + more));
    // Values or columns take all that the rank leaves; the half of the ranks most of it.
    const double dense = perplexity(at, "runs/dense/model"),
                 factored = perplexity(at, "runs/" + form + "/model");
    EXPECT_NEAR(factored, dense, (form == "low_rank" ? 0.5 : 1e-3) * dense) << form;
  }
}

TEST(LowRankRun, BertTakesTheSame) {
  const Workplace at;
  put_clauses(at, 120);
  const std::string mlm =
      "train bert --task mlm --text a.txt --device cpu --layers 2 --d-model 24 --n-head 2 --d-ff 36 "
      "--max-length 16 "
      "--batch-size 4 --steps 4 --vocab-size 300 --quiet ";
  expect_success(run(at, mlm + "--name a --form sltrain --rank 4"));
  expect_success(run(at, mlm + "--name b --form low_rank --rank 4 --optimizer loro --loro-every 2"));
  expect_success(run(at, mlm + "--name c --optimizer galore --galore-rank 4 --galore-every 2"));
  EXPECT_EQ(json::parse(at.get("runs/b/run.json")).at("job").at("form"), "low_rank");
  expect_success(run(at, "data glue --out GLUE --train 32 --dev 16"));
  expect_success(
      run(at,
          "train bert --task sst2 --data GLUE --model runs/a/model --device cpu --steps 3 --batch-size 4 "
          "--max-length 16 --seeds 1 --quiet --form low_rank --rank 8 --name d"));
}

TEST(LowRankRun, PlansCountTheFactors) {
  const Workplace at;
  const auto plan = [&](const std::string& flags) {
    const Outcome done =
        run(at,
            "plan llama --json --vocab-size 300 --layers 2 --d-model 24 --n-head 4 --kv-heads 2 "
            "--d-ff 36 --length 16 --batch-size 4 --precision f32 " +
                flags);
    expect_success(done);
    return json::parse(done.out);
  };
  const json dense = plan(""), low = plan("--form low_rank --rank 6"),
             sparse = plan("--form sltrain --rank 6"), mlp = plan("--form cola --rank 6 --form-layers mlp");
  // Of a block: q, out [24, 24], k, v [12, 24], gate, up [36, 24], down [24, 36].
  const int64_t attention = 2 * 6 * 48 + 2 * 6 * 36, feed_forward = 3 * 6 * 60,
                blocks = 2 * (2 * 24 * 24 + 2 * 12 * 24 + 3 * 24 * 36);
  const auto count = [](const json& of) { return of.at("parameter_count").get<int64_t>(); };
  EXPECT_EQ(count(dense) - count(low), blocks - 2 * (attention + feed_forward));
  EXPECT_EQ(count(dense) - count(mlp), 2 * (3 * 24 * 36 - feed_forward));
  EXPECT_EQ(count(sparse) - count(low), 2 * (2 * 17 + 2 * 9 + 3 * 26));  // round(0.03 elements)
  EXPECT_LT(low.at("flops").get<double>(), dense.at("flops").get<double>());
  EXPECT_EQ(sparse.at("flops").get<double>(), dense.at("flops").get<double>());
  EXPECT_LT(low.at("optimizer").get<double>(), dense.at("optimizer").get<double>());
}

struct Wrong {
  const char *flags, *says;
};

TEST(LowRankRun, EndsWithOneLineForBadInputs) {
  const Workplace at;
  put_clauses(at);
  for (const Wrong& wrong : std::initializer_list<Wrong>{
           {"--form lora", "--form|lora"},
           {"--form low_rank", "rank of attention|is not given|--rank"},
           {"--form low_rank --form-layers mlp", "rank of the MLPs|--mlp-rank"},
           {"--form low_rank --attention-rank 4", "rank of the MLPs|is not given"},
           {"--form low_rank --rank 0", "--rank"},
           {"--form low_rank --rank -2", "--rank"},
           {"--form low_rank --rank 13", "rank (--rank) is 13|12 x 24 takes 1 to 12"},
           {"--form sltrain --rank 4 --mlp-rank 25", "rank (--rank) is 25|36 x 24 takes 1 to 24"},
           {"--form cola --rank 4 --cola-activation gelu", "--cola-activation"},
           {"--form low_rank --rank 4 --factor-init zeros", "--factor-init|zeros|drawn or svd"},
           {"--form cola --rank 4 --factor-init svd", "cola|cannot start from one"},
           {"--form lost --rank 4 --factor-init drawn", "lost|--factor-init svd"},
           {"--form sltrain --rank 4 --density 1.5", "--density"},
           {"--form sltrain --rank 4 --density -0.1", "--density"},
           {"--form sltrain --rank 4 --alpha 0", "--alpha"},
           {"--form lost --rank 4 --gamma 1", "--gamma"},
           {"--form lost --rank 4 --gamma 0", "--gamma"},
           {"--form lost --rank 4 --column-share 2", "--column-share"},
           {"--form lost --rank 4 --columns best", "--columns"},
           {"--form lost --rank 4 --columns random --residual-rank 3", "--residual-rank|--columns residual"},
           {"--rank 4", "--rank is for weights made of factors|--form is dense"},
           {"--form low_rank --rank 4 --alpha 2", "--alpha is for --form sltrain"},
           {"--form low_rank --rank 4 --gamma 0.2", "--gamma is for --form lost"},
           {"--form sltrain --rank 4 --cola-activation silu", "--cola-activation is for --form cola"},
           {"--form low_rank --rank 4 --form-layers mlp --attention-rank 3",
            "--attention-rank is for attention"},
           {"--optimizer galore --galore-rank 0", "--galore-rank"},
           {"--optimizer galore --galore-rank 13", "the rank (--galore-rank) is 13|has 12 x 24 elements"},
           {"--optimizer galore --galore-every 0", "--galore-every"},
           {"--optimizer galore --galore-scale 0", "--galore-scale"},
           {"--optimizer galore --galore-projection both", "--galore-projection"},
           {"--optimizer galore --galore-svd fast", "--galore-svd"},
           {"--galore-rank 4", "--galore-rank is for --optimizer galore|--optimizer is adamw"},
           {"--optimizer sgd --momentum-reset 3",
            "--momentum-reset is for --optimizer adamw, galore and loro"},
           {"--momentum 0.5", "--momentum is for --optimizer sgd and muon|--optimizer is adamw"},
           {"--optimizer sgd --beta2 0.9", "--beta2 is for --optimizer adamw"},
           {"--min-lr-ratio 0.1", "--min-lr-ratio|--schedule is constant"},
           {"--optimizer loro", "loro|--form is dense|--form low_rank"},
           {"--optimizer loro --form cola --rank 4", "loro|--form is cola"},
           {"--optimizer loro --form low_rank --rank 4 --loro-lr-scale -0.5", "--loro-lr-scale"},
           {"--optimizer loro --form low_rank --rank 4 --loro-singular skip", "--loro-singular"},
           {"--optimizer loro --form low_rank --rank 4 --loro-moments reset_all --momentum-reset 3",
            "--loro-moments reset_all with --momentum-reset 3"},
           {"--optimizer galore --loro-every 3", "--loro-every is for --optimizer loro"}}) {
    const Outcome done = run(at, train(wrong.flags, "x", 2));
    EXPECT_NE(done.code, 0) << wrong.flags;
    EXPECT_TRUE(holds_all(done.err, wrong.says)) << wrong.flags;
    EXPECT_LE(std::count(done.err.begin(), done.err.end(), '\n'), 2) << done.err;
  }
  // A run keeps its form.
  expect_success(run(at, train("--form low_rank --rank 4", "kept", 2)));
  for (const char* other : {"--form cola", "--rank 5", "--optimizer loro"}) {
    const Outcome done = run(at, std::string("train llama --resume runs/kept --steps 4 --quiet ") + other);
    EXPECT_EQ(done.code, 2) << done.err;
  }
  const Outcome drawn =
      run(at,
          "train llama --model runs/kept/model --text a.txt --device cpu --steps 1 --form low_rank "
          "--rank 4 --factor-init drawn");
  EXPECT_TRUE(holds_all(drawn.err, "would replace the weights of --model"));
  const Outcome cola =
      run(at, "train llama --model runs/kept/model --text a.txt --device cpu --steps 1 --form cola --rank 4");
  EXPECT_TRUE(holds_all(cola.err, "cola|cannot start from --model"));
}

}  // namespace
}  // namespace tessera::cli::test

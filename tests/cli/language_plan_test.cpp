#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/cli/command.h"
#include "tests/cli/language_runs.h"

// plan and bench step of language models: what they tell, and what they refuse.

namespace tessera::cli::test {
namespace {

using nlohmann::json;

TEST(PlanAndBench, TellAStepOfALanguageModel) {
  const Workplace at;
  const Outcome plan = run(at, "plan gpt --batch 64 --precision bf16 --memory 78 --json");
  expect_success(plan);
  const json record = json::parse(plan.out);
  EXPECT_EQ(record.at("parameter_count"), 124'439'808);
  EXPECT_EQ(record.at("parameters"), 2 * 124'439'808.0);
  EXPECT_GT(record.at("largest_batch"), 64);
  const Outcome spread =
      run(at, "plan gpt --batch 64 --precision bf16 --memory 78 --ranks 4 --zero 1 --json");
  expect_success(spread);
  const json of_four = json::parse(spread.out);
  EXPECT_EQ(4 * of_four.at("optimizer").get<double>(), record.at("optimizer").get<double>());
  EXPECT_EQ(of_four.at("gradients"), record.at("gradients"));
  EXPECT_GT(of_four.at("sent"), 0);
  EXPECT_EQ(record.at("sent"), 0);
  EXPECT_EQ(record.at("efficiency"), 1);
  const Outcome all = run(at, "plan gpt --batch 64 --precision bf16 --memory 78 --gpus 128 --zero 2 --json");
  expect_success(all);
  const json of_many = json::parse(all.out);
  EXPECT_LT(of_many.at("gradients"), record.at("gradients"));
  EXPECT_NEAR(of_many.at("step_ms").get<double>(),
              of_many.at("compute_ms").get<double>() + of_many.at("exposed_communication_ms").get<double>(),
              1e-9);
  EXPECT_LT(of_many.at("efficiency"), 1);
  expect_success(
      run(at, "plan gpt --ranks 2 --accumulate 8 --order global --bucket-mb 0 --link-gbs 50 --step-ms 60"));
  const auto flops = [&](const char* more) {
    return json::parse(run(at, std::string("plan gpt --batch 4 --memory 20 --json") + more).out)
        .at("flops")
        .get<double>();
  };
  EXPECT_EQ(flops(" --accumulate 8"), 8 * flops("")) << "of the whole step, as its time is";
  const auto gradients = [&](const char* more) {
    return json::parse(said(at, std::string("plan gpt --batch 4 --memory 20 --json --accumulate 8") + more))
        .at("gradients")
        .get<double>();
  };
  EXPECT_EQ(gradients(" --order global"), 4 * gradients("")) << "sums of 1, 2 and 4 micro-batches wait";
  expect_failure(at, "plan gpt --ranks 2 --accumulate 3", 2, "--accumulate 3|multiple of --ranks 2");
  const std::string bert = "train bert --task sst2 --data glue --scratch ";
  expect_failures(
      at, {{"plan llama --size 60m --ranks 3 --accumulate 9", 2, "--order global needs a power of two"},
           {"plan llama --ranks 2 --ffn relu2 --sparse24 soft_dynamic", 2, "sparse24 on 2 ranks"},
           {"plan gpt --ranks 3 --accumulate 6 --zero 2", 2, "--zero 2 on 3 ranks"},
           {"plan gpt --zero 1", 2, "--zero says nothing of one rank"},
           {"plan tnp --link-gbs 50", 2, "--link-gbs says nothing of one rank"},
           {"plan tnp --ranks 3 --accumulate 9", 2, "--order global needs a power of two"},
           {"plan tnp --ranks 2 --context-parallel 2 --order global", 2, "--context-parallel"},
           {"plan tnp --optimizer loro", 2, "loro|a TNP has none"},
           {"train tnp --optimizer loro", 2, "loro|a TNP has none"},
           {"plan tnp --precision f16 --optimizer-states bf16", 2, "which f16 weights cannot have"},
           {"train tnp --precision f16 --optimizer-states bf16", 2, "which f16 weights cannot have"},
           {"train gpt --text t --precision f16 --optimizer-states bf16", 2, "which f16 weights cannot have"},
           {bert + "--precision f16 --optimizer-states bf16", 2, "which f16 weights cannot have"},
           {bert + "--optimizer muon --optimizer-states bf16", 2, "works on f32 states"},
           {"train bert --task mlm --text t --precision f16 --optimizer-states bf16", 2,
            "f16 weights cannot have"},
           {"bench step gpt --precision bf16,f16 --optimizer-states bf16", 2, "f16 weights cannot have"}});
  const std::string sizes =
      " --layers 2 --d-model 32 --heads 2 --d-ff 64 --length 32 --batch 4 --vocab-size 100";
  for (const char* model : {"gpt", "llama"}) {
    expect_success(run(at, std::string("bench step ") + model + sizes +
                               " --device cpu --seconds 0.05 --json " + model + ".jsonl"));
    const json step = json::parse(first_line(at.get(std::string(model) + ".jsonl")));
    EXPECT_EQ(step.at("op"), std::string("step ") + model);
    EXPECT_EQ(step.at("shape").at("T"), 32);
    EXPECT_EQ(step.at("implementation"), "tessera eager");
    EXPECT_GT(step.at("tokens_per_s"), 0);
    const double planned = step.at("planned_bytes"), live = step.at("live_bytes");
    // A plan names the large parts; what is small (statistics of rows, gradients on their way) is not in it.
    EXPECT_GT(planned, 0.75 * live) << model;
    EXPECT_LT(planned, 1.25 * live) << model;
  }
}

TEST(PlanAndBench, TellAStepOfBert) {
  const Workplace at;
  const auto plan = [&](const std::string& more) {
    return json::parse(said(at, "plan bert --precision bf16 --memory 78 --json " + more));
  };
  const json dense = plan("--batch-size 32");
  EXPECT_EQ(dense.at("parameter_count"), 109'483'778);  // BertForSequenceClassification of bert-base-uncased
  EXPECT_EQ(dense.at("parameters"), 2 * 109'483'778.0);
  EXPECT_EQ(dense.at("optimizer"), 12 * 109'483'778.0);
  EXPECT_EQ(dense.at("task"), "sst2");
  EXPECT_GT(dense.at("largest_batch"), 32);
  EXPECT_EQ(plan("--batch-size 32 --optimizer sgd --momentum 0").at("optimizer"), 4 * 109'483'778.0);
  const json sliced = plan("--batch-size 32 --slice random --rows 10%");
  EXPECT_LT(sliced.at("saved_sliced").get<double>(), 0.15 * sliced.at("saved_unsliced").get<double>());
  EXPECT_LT(sliced.at("saved"), dense.at("saved"));
  EXPECT_LT(sliced.at("flops"), dense.at("flops"));
  EXPECT_GT(sliced.at("largest_batch"), dense.at("largest_batch"));
  EXPECT_LT(plan("--batch-size 32 --dropbp 0.5").at("saved"), dense.at("saved"));
  const json biases = plan("--batch-size 32 --train biases");
  EXPECT_LT(biases.at("trained_count").get<double>(), 0.01 * 109'483'778);
  EXPECT_EQ(biases.at("gradients"), 4 * biases.at("trained_count").get<double>());
  EXPECT_LT(plan("--batch-size 32 --train head").at("saved"), biases.at("saved"));
  EXPECT_LT(plan("--batch-size 32 --form low_rank --rank 32").at("parameters"), dense.at("parameters"));
  const json mlm = plan("--task mlm --size tiny --vocab-size 1000");
  EXPECT_EQ(mlm.at("parameter_count"),
            (1000 + 512 + 2) * 128 + 2 * 128 + 2 * 198272 + 128 * 129 + 2 * 128 + 1000);
  EXPECT_GT(plan("--task mlm --size tiny --mask 0.9").at("saved"),
            plan("--task mlm --size tiny").at("saved"));
  EXPECT_EQ(plan("--ranks 4 --zero 1").at("optimizer").get<double>() * 4,
            dense.at("optimizer").get<double>());
  for (const char* more : {"", "--slice random --rows 10%", "--dropbp 0.5", "--task mlm", "--ranks 2"})
    EXPECT_TRUE(holds_all(said(at, std::string("plan bert --memory 8 ") + more),
                          "parameters|activations kept for backward|total|FLOP of a step|largest batch"));
  expect_failures(at, {{"plan bert --rows 10%", 2, "--rows needs --slice"},
                       {"plan bert --slice random", 2, "needs to know how many rows"},
                       {"plan bert --slice random --rows 10% --slice-layers nothing", 1, "nothing"},
                       {"plan bert --slice importance --rows auto --dropbp 0.5", 2, "leave one of them out"},
                       {"plan bert --dropbp 2", 2, "--dropbp"},
                       {"plan bert --dropbp 0.5 --optimizer galore", 2, "--optimizer galore"},
                       {"plan bert --train biases --slice random --rows 5", 2, "--train biases"},
                       {"plan bert --task mlm --slice random --rows 5", 2, "fine-tuning only"},
                       {"plan bert --task mlm --train head", 2, "pretraining trains every parameter"},
                       {"plan bert --mask 0.2", 2, "--mask is only for --task mlm"},
                       {"plan bert --task sst3", 2, "sst3"},
                       {"plan bert --n-head 7", 2, "d_model 768|heads 7"},
                       {"plan bert --model nowhere", 1, "nowhere"},
                       {"plan bert --model nowhere --size base", 2, "--size is for --scratch"},
                       {"plan bert --form low_rank --rank 2000", 1, "rank"}});
}

TEST(PlanAndBench, RefuseFlagsWithoutEffectAsTrainingDoes) {
  const Workplace at;
  put_texts(at);
  const std::string sizes =
      " --layers 1 --d-model 16 --heads 2 --d-ff 32 --length 16 --batch 2 --vocab-size 100 ";
  struct Idle {
    const char *flags, *says;
  };
  for (const Idle& idle : {Idle{"--rank 4", "--rank is for weights made of factors|--form is dense"},
                           {"--form low_rank --rank 4 --alpha 2", "--alpha is for --form sltrain"},
                           {"--weights-24-every 5", "--weights-24-every needs --weights-24"},
                           {"--dense-share 0.1", "--dense-share needs --sparse24"},
                           {"--dense-first 2", "--dense-first needs --sparse24 or --weights-24"}})
    for (const std::string model : {"gpt", "llama"}) {
      const Outcome train = expect_failure(at, "train " + model + kFromText + " " + idle.flags, 2, idle.says);
      for (const std::string& command :
           {"plan " + model, "bench step " + model + " --device cpu --seconds 0.01"}) {
        const Outcome other = run(at, command + sizes + idle.flags);
        EXPECT_EQ(other.code, 2) << command << " " << idle.flags;
        EXPECT_EQ(other.err, train.err) << command << " " << idle.flags;
      }
    }
}

}  // namespace
}  // namespace tessera::cli::test

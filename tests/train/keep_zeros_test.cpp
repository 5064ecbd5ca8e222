#include <nlohmann/json.hpp>

#include "ops/bits/bits.h"
#include "pretrained/load.h"
#include "tests/errors.h"
#include "tests/folder.h"
#include "tests/train/token_batch.h"
#include "train/language_job.h"
#include "train/step.h"

// Fine-tuning a pruned model: zeros stay zeros.

namespace tessera::train {
namespace {

/// A directory with a small LLaMA of which every third weight of the blocks' matrices is 0.
std::string sparse_llama(const TemporaryFolder& folder, DType dtype, bool prune = true) {
  Rng rng(3);
  const models::Llama model({.vocabulary = 50,
                             .positions = 16,
                             .d_model = 12,
                             .d_ff = 20,
                             .heads = 2,
                             .kv_heads = 1,
                             .layers = 2,
                             .dtype = dtype},
                            rng, Device::cpu());
  nn::for_each<nn::Linear>(model, [&](const std::string& name, const nn::Linear& layer) {
    if (!name.starts_with("blocks.") || !prune) return;
    std::vector<float> keep;
    for (int64_t i = 0; i < layer.weight.count(); ++i) keep.push_back(i % 3 == 1 ? 0.0f : 1.0f);
    const Tensor weight = layer.weight.detach();
    std::vector<float> values = weight.clone().to(DType::f32).to_vector<float>();
    for (size_t i = 0; i < values.size(); ++i) values[i] *= keep[i];
    weight.copy_from(Tensor::from(values, weight.shape()));
  });
  const std::string path = folder / "sparse";
  pretrained::save(model, path);
  return path;
}

LanguageSettings sparse_job(const std::string& path, DType dtype, const std::string& optimizer) {
  LanguageSettings job;
  job.model = std::get<models::LlamaConfig>(pretrained::read_config(path).model);
  std::visit([&](auto& model) { model.dtype = dtype; }, job.model);
  job.start = path, job.keep_zeros = true, job.optimizer = optimizer;
  job.length = 8, job.batch = 2, job.steps = 6, job.warmup = 1, job.lr = 0.05, job.ema = 0.5;
  return job;
}

TEST(KeepZeros, HoldsEveryZeroAndMovesAllOthers) {
  const TemporaryFolder folder;
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const char* optimizer : {"adamw", "sgd"}) {
      const std::string path = sparse_llama(folder, dtype);
      LanguageJob job(sparse_job(path, dtype, optimizer), Device::cpu(), path);
      Step step(job, {.graph = false});
      for (int64_t i = 0; i < 4; ++i) step([&](int) { job.load(batch_number(i)); });
      job.save(folder / "trained");
      const io::WeightSource before(path), after(folder / "trained");
      int64_t matrices = 0;
      for (const io::WeightEntry& entry : after.entries()) {
        if (entry.name.find("_proj.weight") == std::string::npos) continue;
        const std::vector<double> a = before.load(entry.name).to(DType::f64).to_vector<double>(),
                                  b = after.load(entry.name).to(DType::f64).to_vector<double>();
        int64_t moved = 0, others = 0;
        for (size_t i = 0; i < a.size(); ++i) {
          if (a[i] == 0) EXPECT_EQ(b[i], 0) << optimizer << " " << entry.name << " " << i;
          others += a[i] != 0, moved += a[i] != 0 && a[i] != b[i];
        }
        EXPECT_GT(moved, others / 4) << optimizer << " " << entry.name;
        ++matrices;
      }
      EXPECT_EQ(matrices, 14);
      std::filesystem::remove_all(folder / "trained");
      std::filesystem::remove_all(path);
    }
}

TEST(KeepZeros, NormsOfGradientsLeaveZerosOut) {
  const TemporaryFolder folder;
  const std::string path = sparse_llama(folder, DType::f32);
  LanguageJob job(sparse_job(path, DType::f32, "adamw"), Device::cpu(), path);
  job.load(batch_number(1));
  {
    Tape tape;
    tape.backward(job.loss());
  }
  const auto squares = [&](bool of_zeros) {
    double sum = 0;
    const io::WeightSource source(path);
    for (const nn::NamedParameter& parameter : job.optimizer().parameters()) {
      if (parameter.name.find("blocks.0.mlp.down.weight") == std::string::npos) continue;
      const auto weights = parameter.tensor.detach().clone().to_vector<float>(),
                 gradients = grad(parameter.tensor).clone().to_vector<float>();
      for (size_t i = 0; i < weights.size(); ++i)
        if ((weights[i] == 0) == of_zeros) sum += double(gradients[i]) * double(gradients[i]);
    }
    return sum;
  };
  EXPECT_EQ(squares(true), 0);
  EXPECT_GT(squares(false), 0);
}

TEST(KeepZeros, AreInTheCheckpoint) {
  const TemporaryFolder folder;
  const std::string path = sparse_llama(folder, DType::f32);
  const LanguageSettings settings = sparse_job(path, DType::f32, "adamw");
  LanguageJob whole(settings, Device::cpu(), path), begun(settings, Device::cpu(), path);
  const auto run = [](LanguageJob& job, int64_t from, int64_t to) {
    Step step(job, {.graph = false});
    for (int64_t i = from; i < to; ++i) step([&](int) { job.load(batch_number(i)); });
  };
  run(whole, 0, 4);
  run(begun, 0, 2);
  const auto file = folder / "checkpoint";
  begun.checkpoint(2).save(file);
  LanguageJob resumed(settings,
                      Device::cpu());  // as a run that goes on: its weights come from the checkpoint
  EXPECT_EQ(resumed.restore(file), 2);
  run(resumed, 2, 4);
  whole.save(folder / "a"), resumed.save(folder / "b");
  EXPECT_EQ(io::read_file(folder / "a/model.safetensors", 1 << 20),
            io::read_file(folder / "b/model.safetensors", 1 << 20));
}

TEST(KeepZeros, NeedsAPrunedModel) {
  const TemporaryFolder folder;
  const std::string path = sparse_llama(folder, DType::f32, false);
  const LanguageSettings settings = sparse_job(path, DType::f32, "adamw");
  expect_error([&] { LanguageJob(settings, Device::cpu(), path); },
               {"keep_zeros: no weight of", "tessera prune"});
  LanguageSettings drawn = settings;
  drawn.start = "";
  expect_error([&] { drawn.validate(); }, {"keep_zeros keeps the zeros of a pruned model", "--model"});
  LanguageSettings mixing = settings;
  mixing.optimizer = "muon";
  expect_error([&] { mixing.validate(); }, {"mixes the elements of a matrix", "choose adamw or sgd"});
  EXPECT_EQ(job_settings<LanguageSettings>(to_json(settings)).keep_zeros, true);
}

}  // namespace
}  // namespace tessera::train

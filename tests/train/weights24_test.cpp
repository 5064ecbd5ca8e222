#include <map>
#include <nlohmann/json.hpp>

#include "autograd/tape.h"
#include "io/file.h"
#include "ops/bits/bits.h"
#include "ops/pointwise/pointwise.h"
#include "ops/sparse24/weight24.h"
#include "pretrained/load.h"
#include "runtime/parallel.h"
#include "tests/errors.h"
#include "tests/folder.h"
#include "train/language_job.h"
#include "train/step.h"

// Training with 2:4 weights: what a step computes, which masks it has, and what is saved of it.

namespace tessera::train {
namespace {

LanguageSettings weights24_job(const std::string& layers = "attn,mlp") {
  LanguageSettings job;
  job.model = models::LlamaConfig{
      .vocabulary = 257, .positions = 16, .d_model = 16, .d_ff = 20, .heads = 4, .kv_heads = 2, .layers = 2};
  job.length = 16, job.batch = 2, job.steps = 20, job.warmup = 2, job.lr = 0.02;
  job.weights24 = {.layers = layers, .every = 3, .decay = 0.01};
  return job;
}

LanguageData weights24_data(const TemporaryFolder& root) {
  const std::string folder = root / "data";
  if (!std::filesystem::exists(folder)) {
    std::ofstream out(root / "a.txt");
    for (int i = 0; i < 60; ++i) out << "line " << i * 7 % 23 << " is free, as in speech\n";
    out.close();
    write_language_data({.files = {root / "a.txt"}, .tokenizer = {}, .kind = "byte", .validation = 0.2},
                        folder);
  }
  return LanguageData(folder, folder, 16, false);
}

/// Steps from `first` to before `last`; state_values after each.
std::vector<double> flip_rates(LanguageJob& job, int64_t first, int64_t last) {
  std::vector<double> rates;
  Step step(job);
  for (int64_t at = first; at < last; ++at) {
    step([&](int) { job.batch(uint64_t(at)); });
    const Values values = job.state_values();
    rates.push_back(values.contains("flip_rate") ? values.at("flip_rate") : -1);
  }
  return rates;
}

void set_data(LanguageJob& job, const LanguageData& data) {
  job.set_data(data, {.sample_tokens = 0}, {}, {});
}

TEST(Weights24Job, RefreshesMasksAsScheduledAndReportsTheFlipRate) {
  const TemporaryFolder root;
  const LanguageData data = weights24_data(root);
  LanguageSettings settings = weights24_job();
  settings.steps = 10, settings.sparse24.dense_first = 2, settings.sparse24.dense_last = 1;
  LanguageJob job(settings, Device::cpu());
  set_data(job, data);
  const std::vector<double> rates = flip_rates(job, 0, 10);
  // Dense; masks before steps 2 (the first sparse one), 3, 6 and, were it not dense, 9.
  EXPECT_EQ(rates[0], -1);
  EXPECT_EQ(rates[1], -1);
  EXPECT_GT(rates[2], 0);  // since the masks of the initial weights
  EXPECT_NE(rates[3], rates[2]);
  EXPECT_EQ(rates[4], rates[3]);
  EXPECT_EQ(rates[5], rates[3]);
  EXPECT_NE(rates[6], rates[5]);
  EXPECT_EQ(rates[8], rates[6]);
  EXPECT_EQ(rates[9], -1);
  for (const double rate : rates) EXPECT_LT(rate, 0.5);
}

TEST(Weights24Job, GoesOnToTheSameBitsAcrossARefreshAndASwitchWithAnyNumberOfThreads) {
  const int threads = cpu_threads();
  const TemporaryFolder root;
  const LanguageData data = weights24_data(root);
  for (const auto& [layers, gradient] :
       {std::pair{"attn", "dense"}, {"attn,mlp", "dense"}, {"attn,mlp", "mvue"}}) {
    LanguageSettings settings = weights24_job(layers);
    settings.weights24.gradient = gradient;
    settings.steps = 9, settings.sparse24.dense_first = 1, settings.sparse24.dense_last = 2;
    settings.accumulate = 2;
    const auto bytes_after = [&](int first, int last, const std::string& from) {
      LanguageJob job(settings, Device::cpu());
      set_data(job, data);
      EXPECT_EQ(from.empty() ? 0 : job.restore(from), first);
      Step step(job);
      for (int64_t at = first; at < last; ++at) step([&](int micro) { job.batch(uint64_t(2 * at + micro)); });
      const std::string file = root / "c.safetensors";
      job.checkpoint(last).save(file);
      return io::read_file(file, 1 << 24);
    };
    set_cpu_threads(1);
    const std::string whole = bytes_after(0, 9, "");
    for (const int stop : {1, 2, 3, 5, 7, 8}) {
      const std::string part = root / "part.safetensors";
      io::write_file(part, bytes_after(0, stop, ""));
      set_cpu_threads(3);
      EXPECT_TRUE(bytes_after(stop, 9, part) == whole)
          << layers << " " << gradient << " stopped after " << stop;
      set_cpu_threads(1);
    }
    set_cpu_threads(threads);
  }
}

TEST(Weights24Job, AddsTheDecayToTheGradientAndLogsItApart) {
  const TemporaryFolder root;
  const LanguageData data = weights24_data(root);
  LanguageSettings settings = weights24_job("mlp"), other = settings;
  other.weights24.decay = 0;
  settings.accumulate = other.accumulate = 2;
  EXPECT_EQ(settings.penalties(), std::vector<std::string>{"masked_decay"});
  EXPECT_TRUE(other.penalties().empty());
  LanguageJob with(settings, Device::cpu()), without(other, Device::cpu());
  set_data(with, data), set_data(without, data);
  double half = 0;
  const auto gradients = [&](LanguageJob& job) {
    job.batch(0);
    Tape tape;
    Tensor loss = job.loss();
    for (const Tensor& penalty : job.penalties()) loss = ops::add(loss, penalty);
    for (const Tensor& penalty : job.penalties()) EXPECT_FALSE(penalty.defined()) << "kept";
    tape.backward(loss);
    std::map<std::string, std::vector<double>> all;
    for (const nn::NamedParameter& parameter : job.optimizer().parameters())
      all[parameter.name] = grad(parameter.tensor).to_vector<double>();
    return all;
  };
  const auto decayed = gradients(with), plain = gradients(without);
  for (const nn::NamedParameter& parameter : with.optimizer().parameters()) {
    const std::vector<double>&g = decayed.at(parameter.name), &before = plain.at(parameter.name);
    const bool sparse = parameter.name.find(".mlp.") != std::string::npos;
    std::vector<double> pruned(g.size(), 0);
    if (sparse) {
      const Tensor weight = parameter.tensor.detach(), mask = ops::transposable24(weight);
      const Tensor kept = ops::unpack_bits(mask, weight.size(1));
      pruned = ops::sub(weight, ops::mul(weight, kept)).to_vector<double>();
    }
    for (size_t i = 0; i < g.size(); ++i) {
      EXPECT_NEAR(g[i] - before[i], 0.01 * pruned[i], 1e-6) << parameter.name << " " << i;
      half += 0.5 * pruned[i] * pruned[i];
    }
  }
  ASSERT_GT(half, 0);
  // The term is that of each micro-batch, and of their mean.
  Step one(with), two(without);
  one([&](int micro) { with.batch(uint64_t(micro)); });
  two([&](int micro) { without.batch(uint64_t(micro)); });
  EXPECT_EQ(one.mean_loss(), two.mean_loss());
  EXPECT_NEAR(one.mean_penalty(0), 0.01 * half, 1e-5 * half);
}

TEST(Weights24Job, TrainsInAGraphAcrossSwitchesAsEagerly) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const TemporaryFolder root;
  const LanguageData data = weights24_data(root);
  LanguageSettings settings = weights24_job();
  std::get<models::LlamaConfig>(settings.model).heads = 2;  // of a size that the GPU has
  std::get<models::LlamaConfig>(settings.model).kv_heads = 2;
  settings.steps = 12, settings.sparse24.dense_first = 3, settings.sparse24.dense_last = 3;
  const auto losses = [&](bool graph) {
    LanguageJob job(settings, Device::cuda());
    set_data(job, data);
    Step step(job, {.graph = graph});
    std::vector<double> all;
    for (int64_t at = 0; at < 12; ++at) {
      step([&](int) { job.batch(uint64_t(at)); });
      all.push_back(step.mean_loss()), all.push_back(step.mean_penalty(0));
    }
    return all;
  };
  EXPECT_EQ(losses(true), losses(false));
}

TEST(Weights24Job, ExportsWhatItEvaluates) {
  const TemporaryFolder root;
  const LanguageData data = weights24_data(root);
  for (const double ema : {0.0, 0.5})
    for (const bool dense_at_end : {false, true}) {
      LanguageSettings settings = weights24_job();
      settings.ema = ema, settings.steps = 4, settings.sparse24.dense_last = dense_at_end ? 1 : 0;
      LanguageJob job(settings, Device::cpu());
      set_data(job, data);
      flip_rates(job, 0, 4);
      const std::string folder = root / "model", file = root / "before.safetensors";
      job.checkpoint(4).save(file);
      const std::string before = io::read_file(file, 1 << 24);
      job.save(folder);
      job.checkpoint(4).save(file);
      EXPECT_TRUE(io::read_file(file, 1 << 24) == before);  // the dense weights are back
      std::vector<int64_t> tokens;
      for (int64_t i = 0; i < 16; ++i) tokens.push_back(i * 11 % 257);
      const std::vector<eval::PerplexityWindow> windows{{tokens, 1}};
      Rng rng(1);
      const models::Llama loaded = pretrained::load_llama(folder, rng, Device::cpu());
      const double exported = eval::measure_perplexity(loaded, windows, Device::cpu(), 1).nats;
      EXPECT_NEAR(exported, job.measure(windows).nats, 1e-5);
      const io::WeightSource source(folder);
      for (const io::WeightEntry& entry : source.entries()) {
        if (entry.name.find("_proj.weight") == std::string::npos) continue;
        const Tensor weight = source.load(entry.name);
        const std::vector<double> values = weight.to_vector<double>();
        int64_t zeros = 0;
        for (size_t i = 0; i < values.size(); ++i) zeros += values[i] == 0;
        EXPECT_EQ(zeros, dense_at_end ? 0 : weight.count() / 2) << entry.name;
      }
      std::filesystem::remove_all(folder);
    }
}

TEST(Weights24Job, RefusesWhatDoesNotGoTogether) {
  const auto refuses = [](auto&& change, const char* part) {
    LanguageSettings job = weights24_job();
    auto& llama = std::get<models::LlamaConfig>(job.model);
    llama.family = models::LlamaFamily::arcee, llama.gated = false;
    llama.activation = ops::Activation::relu_squared;
    change(job);
    EXPECT_NE(message_of([&] { job.validate(); }).find(part), std::string::npos)
        << part << " in: " << message_of([&] { job.validate(); });
  };
  refuses([](LanguageSettings& job) { job.weights24.layers = "all"; },
          "expected none, attn, mlp or attn,mlp");
  refuses([](LanguageSettings& job) { job.weights24.every = 0; }, "--weights-24-every");
  refuses([](LanguageSettings& job) { job.weights24.decay = -1; }, "--weights-24-decay");
  refuses([](LanguageSettings& job) { job.weights24.gradient = "naive"; }, "--weights-24-gradient");
  refuses([](LanguageSettings& job) { job.weights24.gradient = "mvue", job.order = "global"; },
          "random choices are not those of any number of ranks");
  refuses([](LanguageSettings& job) { job.sparse24.method = "naive"; }, "a GEMM has one sparse operand");
  refuses([](LanguageSettings& job) { job.activation_l1 = 1; }, "with --activation-l1");
  refuses([](LanguageSettings& job) { job.factors.form = "low_rank", job.factors.rank = 4; },
          "--form low_rank");
  refuses([](LanguageSettings& job) { job.keep_zeros = true, job.start = "x"; }, "--keep-zeros");
  refuses([](LanguageSettings& job) { job.sparse24.dense_first = 15, job.sparse24.dense_last = 5; },
          "none of the 20 steps");
  LanguageSettings fits = weights24_job("attn");
  EXPECT_EQ(message_of([&] { fits.validate(); }), "");
  fits.weights24.gradient = "mvue";
  EXPECT_EQ(message_of([&] { fits.validate(); }), "");
  EXPECT_NE(message_of([&] { fits.check_on_ranks(2); }).find("--weights-24-gradient dense"),
            std::string::npos);
}

}  // namespace
}  // namespace tessera::train

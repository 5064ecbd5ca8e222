#include "bench/step_bench.h"

#include "bench/step_internal.h"
#include "ops/random/random.h"
#include "plan/plan.h"
#include "plan/ranks.h"
#include "runtime/philox.h"
#include "train/language_sizes.h"

namespace tessera::bench {
namespace {

/// A batch of noise in place of the prior's: the step's work does not depend on the values.
datasets::RegressionBatch random_batch(const train::TnpSettings& settings) {
  Rng rng(1);
  const auto normal = [&](const Shape& shape) {
    Tensor tensor = Tensor::empty(shape, DType::f32, Device::cpu());
    ops::fill_normal(tensor, 0, 1, rng);
    return tensor;
  };
  datasets::RegressionBatch batch;
  batch.xc = normal({settings.batch, settings.context, settings.model.features});
  batch.yc = normal({settings.batch, settings.context, 1});
  batch.xt = normal({settings.batch, settings.targets, settings.model.features});
  batch.yt = normal({settings.batch, settings.targets, 1});
  return batch;
}

/// Random tokens, and as targets others: what is predicted does not matter.
datasets::TokenBatch random_tokens(const train::LanguageSettings& settings) {
  const int64_t vocabulary = std::visit([](const auto& model) { return model.vocabulary; }, settings.model);
  datasets::TokenBatch batch;
  for (auto [tensor, stream] : {std::pair(&batch.inputs, 0), std::pair(&batch.targets, 1)}) {
    std::vector<int64_t> tokens(size_t(settings.batch * settings.length));
    for (size_t i = 0; i < tokens.size(); ++i)
      tokens[i] = int64_t(philox(1, uint64_t(stream), i).word[0] % uint64_t(vocabulary));
    *tensor = Tensor::from(tokens, {settings.batch, settings.length});
  }
  return batch;
}

/// Bytes of each rank.
double planned_bytes(const plan::Memory& memory, const plan::ArenaSizes& sizes, const StepRanks& ranks,
                     Device device) {
  const plan::RankOptions options{.ranks = ranks.size(),
                                  .zero = ranks.zero,
                                  .bucket_mb = ranks.bucket_mb,
                                  .copies = device.is_cuda(),
                                  .rate = 1};
  return plan::plan_ranks(memory, 1, sizes, options).memory.total();
}

/// Of a task that several ranks share, FLOPs and tokens are one rank's share of it.
Record measure_tnp(const train::TnpSettings& settings, const StepBenchOptions& options, bool graph) {
  const auto make = [&](const train::TnpSettings& own) {
    auto job = std::make_unique<train::TnpJob>(own, options.device);
    job->load(random_batch(own));
    return job;
  };
  Record record = measure_job(settings, options.device, graph, options.timer, options.ranks, make);
  const bool checkpointed = settings.model.checkpoint_every > 0;
  record.op = "step tnp";
  record.shape = {{"B", settings.batch}, {"M", settings.context}, {"N", settings.targets}};
  record.attrs["checkpoint"] = checkpointed ? "on" : "off";
  record.does["recomputed"] = checkpointed ? "every block" : "nothing";
  const models::TnpConfig& m = settings.model;
  const models::TnpConfig usual;
  add_unusual(record, {{"F", m.features, usual.features},
                       {"d", m.d_model, usual.d_model},
                       {"d_ff", m.d_ff, usual.d_ff},
                       {"heads", m.heads, usual.heads},
                       {"layers", m.layers, usual.layers},
                       {"K", m.components, usual.components},
                       {"embed", m.embed_hidden, usual.embed_hidden},
                       {"pre_norm", m.pre_norm, usual.pre_norm},
                       {"group", std::max<int64_t>(1, m.checkpoint_every), 1}});
  record.dtype = name_of(settings.precision());
  const double share = 1.0 / double(settings.split.ranks);
  if (settings.split.ranks > 1) {
    record.shape["context_parallel"] = settings.split.ranks;
    record.attrs["split"] = nn::name_of(settings.split.by);
  }
  record.flops = share * plan::count_flops(settings.model, settings.batch, settings.context, settings.targets)
                             .step(checkpointed);
  record.planned_bytes = planned_bytes(settings.planned(options.device), plan::arena_sizes(settings.model),
                                       options.ranks, options.device);
  record.tokens_per_s =
      share * double(settings.batch * (settings.context + settings.targets)) / record.ms.p50 * 1e3;
  return record;
}

Record measure_language(const train::LanguageSettings& settings, const LanguageStepOptions& options,
                        bool graph) {
  const auto make = [&](const train::LanguageSettings& own) {
    auto job = std::make_unique<train::LanguageJob>(own, options.device);
    job->load(random_tokens(own));
    return job;
  };
  Record record = measure_job(settings, options.device, graph, options.timer, options.ranks, make);
  record.op = std::string("step ") + settings.family();
  record.shape = {{"B", settings.batch}, {"T", settings.length}};
  std::visit(
      [&]<class Model>(const Model& model) {
        train::LanguageConfig named = Model{};
        train::apply_size(named, settings.is_llama() ? "130m" : "small");
        const Model& usual = std::get<Model>(named);
        add_unusual(record, {{"heads", model.heads, usual.heads}, {"d_ff", model.d_ff, usual.d_ff}});
        if constexpr (requires { model.kv_heads; })
          add_unusual(record,
                      {{"kv_heads", model.kv_heads, usual.kv_heads}, {"head_dim", model.head_dim, 0}});
        if constexpr (std::is_same_v<Model, models::LlamaConfig>)
          if (model.family != usual.family) record.attrs["type"] = name_of(model.family);
        if (model.tied != usual.tied) record.attrs["tied"] = model.tied ? "true" : "false";
        record.shape["V"] = model.vocabulary;
        record.shape["d"] = model.d_model;
        record.shape["layers"] = model.layers;
      },
      settings.model);
  if (settings.sparse24.on()) record.attrs["sparse24"] = settings.sparse24.description();
  if (settings.weights24.on()) record.attrs["weights24"] = settings.weights24.description();
  if (settings.factors.factorizes()) record.attrs["form"] = settings.factors.description();
  record.dtype = name_of(settings.precision());
  record.flops = plan::count_flops(settings.model, settings.batch, settings.length, settings.forms()).step();
  record.planned_bytes =
      planned_bytes(settings.planned(options.device), plan::arena_sizes(settings.model, settings.forms()),
                    options.ranks, options.device);
  record.tokens_per_s = double(settings.batch * settings.length) / record.ms.p50 * 1e3;
  return record;
}

}  // namespace

std::vector<Record> bench_tnp_step(const StepBenchOptions& options) {
  const std::string& states = options.settings.optimizer_states;
  return matrix("step tnp", options, states, [&](Precision precision, bool graph, const auto& add) {
    for (const bool checkpoint : options.checkpoint) {
      train::TnpSettings settings = options.settings;
      settings.set_precision(precision);
      settings.model.checkpoint_every =
          checkpoint ? std::max<int64_t>(1, settings.model.checkpoint_every) : 0;
      add(measure_tnp(settings, options, graph));
    }
  });
}

void set_length(train::LanguageSettings& settings, int64_t tokens) {
  settings.length = tokens;
  std::visit([&](auto& model) { model.positions = tokens; }, settings.model);
}

std::vector<Record> bench_language_step(const LanguageStepOptions& options) {
  const std::string name = std::string("step ") + options.settings.family(),
                    &states = options.settings.optimizer_states;
  return matrix(name, options, states, [&](Precision precision, bool graph, const auto& add) {
    train::LanguageSettings settings = options.settings;
    settings.set_precision(precision);
    add(measure_language(settings, options, graph));
  });
}

}  // namespace tessera::bench

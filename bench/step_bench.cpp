#include "bench/step_bench.h"

#include "bench/step_internal.h"
#include "runtime/philox.h"
#include "tensor/random.h"
#include "train/language_plan.h"

namespace tessera::bench {
namespace {

/// A batch of noise in place of the prior's: the step's work does not depend on the values.
datasets::RegressionBatch random_batch(const train::TnpJob& job) {
  Rng rng(1);
  const auto normal = [&](const Shape& shape) {
    Tensor tensor = Tensor::empty(shape, DType::f32, Device::cpu());
    fill_normal(tensor, 0, 1, rng);
    return tensor;
  };
  datasets::RegressionBatch batch;
  batch.xc = normal({job.batch, job.context, job.model.features});
  batch.yc = normal({job.batch, job.context, 1});
  batch.xt = normal({job.batch, job.targets, job.model.features});
  batch.yt = normal({job.batch, job.targets, 1});
  return batch;
}

/// Random tokens, and as targets others: what is predicted does not matter.
datasets::TokenBatch random_tokens(const train::LanguageJob& job) {
  const int64_t vocabulary = std::visit([](const auto& model) { return model.vocabulary; }, job.model);
  datasets::TokenBatch batch;
  for (auto [tensor, stream] : {std::pair(&batch.inputs, 0), std::pair(&batch.targets, 1)}) {
    std::vector<int64_t> tokens(size_t(job.batch * job.length));
    for (size_t i = 0; i < tokens.size(); ++i)
      tokens[i] = int64_t(philox(1, uint64_t(stream), i).word[0] % uint64_t(vocabulary));
    *tensor = Tensor::from(tokens, {job.batch, job.length});
  }
  return batch;
}

Record measure_tnp(const train::TnpJob& job, Device device, bool graph, const TimerOptions& timer) {
  clear_memory(device);
  train::TnpSession session(job, device);
  session.load(random_batch(job));
  Record record = measure_step(session, graph, timer);
  const bool checkpointed = job.model.checkpoint_every > 0;
  record.op = "step tnp";
  record.shape = {{"B", job.batch}, {"M", job.context}, {"N", job.targets}};
  record.attrs["checkpoint"] = checkpointed ? "on" : "off";
  record.does["recomputed"] = checkpointed ? "every block" : "nothing";
  const models::TnpConfig& m = job.model;
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
  record.dtype = name_of(job.precision());
  record.flops = count_flops(job.model, job.batch, job.context, job.targets).step(checkpointed);
  record.planned_bytes = plan_memory(job.model, job.batch, job.context, job.targets).total();
  record.tokens_per_s = double(job.batch * (job.context + job.targets)) / record.ms.p50 * 1e3;
  return record;
}

Record measure_language(const train::LanguageJob& job, Device device, bool graph, const TimerOptions& timer) {
  clear_memory(device);
  train::LanguageSession session(job, device);
  session.load(random_tokens(job));
  Record record = measure_step(session, graph, timer);
  record.op = std::string("step ") + job.family();
  record.shape = {{"B", job.batch}, {"T", job.length}};
  std::visit(
      [&]<class Model>(const Model& model) {
        train::LanguageConfig named = Model{};
        train::apply_size(named, job.is_llama() ? "130m" : "small");
        const Model& usual = std::get<Model>(named);
        add_unusual(record, {{"heads", model.heads, usual.heads}, {"d_ff", model.d_ff, usual.d_ff}});
        if constexpr (requires { model.kv_heads; })
          add_unusual(record, {{"kv_heads", model.kv_heads, usual.kv_heads}, {"head_dim", model.head, 0}});
        if constexpr (std::is_same_v<Model, models::LlamaConfig>)
          if (model.family != usual.family) record.attrs["type"] = name_of(model.family);
        if (model.tied != usual.tied) record.attrs["tied"] = model.tied ? "true" : "false";
        record.shape["V"] = model.vocabulary;
        record.shape["d"] = model.d_model;
        record.shape["layers"] = model.layers;
      },
      job.model);
  record.dtype = name_of(job.precision());
  record.flops = train::count_flops(job.model, job.batch, job.length).step();
  record.planned_bytes = train::plan_memory(job.model, job.batch, job.length).total();
  record.tokens_per_s = double(job.batch * job.length) / record.ms.p50 * 1e3;
  return record;
}

}  // namespace

std::vector<Record> bench_tnp_step(const StepBenchOptions& options) {
  return matrix(options.device, options.precisions, options.graph, [&](Precision precision, bool graph) {
    std::vector<Record> records;
    for (const bool checkpoint : options.checkpoint) {
      train::TnpJob job = options.job;
      job.set_precision(precision);
      job.model.checkpoint_every = checkpoint ? std::max<int64_t>(1, job.model.checkpoint_every) : 0;
      records.push_back(measure_tnp(job, options.device, graph, options.timer));
    }
    return records;
  });
}

std::vector<Record> bench_language_step(const LanguageStepOptions& options) {
  return matrix(options.device, options.precisions, options.graph, [&](Precision precision, bool graph) {
    train::LanguageJob job = options.job;
    job.set_precision(precision);
    return std::vector<Record>{measure_language(job, options.device, graph, options.timer)};
  });
}

}  // namespace tessera::bench

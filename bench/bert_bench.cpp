#include "bench/bert_bench.h"

#include <fmt/format.h>

#include "bench/step_internal.h"
#include "plan/plan.h"
#include "train/glue_job.h"

namespace tessera::bench {

datasets::GlueBatch fixed_batch(const models::BertConfig& config, int64_t count, int64_t length) {
  std::vector<int64_t> tokens, types, classes;
  std::vector<int32_t> ends{0};
  for (int64_t i = 0; i < count * length; ++i) {
    tokens.push_back(i * 7919 % config.vocabulary);
    types.push_back(i % length * 2 / length % config.types);
  }
  for (int64_t i = 0; i < count; ++i) classes.push_back(i % 2), ends.push_back(int32_t((i + 1) * length));
  const Shape flat{count * length};
  return {Tensor::from(tokens, flat), Tensor::from(types, flat),
          Tensor::zeros({0}, DType::boolean, Device::cpu()), Tensor::from(ends, {count + 1}),
          Tensor::from(classes, {count})};
}

namespace {

Record measure_bert(const models::BertConfig& config, const BertBenchOptions& options, Precision precision,
                    int64_t count, int64_t length, bool graph) {
  train::GlueSettings settings;
  settings.slice = options.slice, settings.drop = options.drop;
  settings.optimizer_states = options.optimizer_states;
  settings.bert = config, settings.batch = count, settings.max_length = length;
  settings.lr = 1e-5, settings.max_grad_norm = 0, settings.steps = 1;
  settings.set_precision(precision);
  Record record = measure_job(settings, options.device, graph, options.timer, options.ranks,
                              [&](const train::GlueSettings& own) {
                                auto job = std::make_unique<train::GlueJob>(own, options.device);
                                job->load(fixed_batch(config, count, length));
                                return job;
                              });
  record.op = "step bert";
  record.shape = {{"B", count}, {"T", length}};
  const models::BertConfig usual;
  add_unusual(record, {{"V", config.vocabulary, usual.vocabulary},
                       {"d", config.d_model, usual.d_model},
                       {"d_ff", config.d_ff, usual.d_ff},
                       {"heads", config.heads, usual.heads},
                       {"layers", config.layers, usual.layers}});
  record.does["last block"] = "first token";  // nothing reads the rows of the others
  record.attrs["dropout"] = fmt::format("{:g}", config.hidden_dropout);
  if (options.slice.slices()) record.attrs["slice"] = options.slice.description();
  if (options.drop.drops()) record.attrs["dropbp"] = options.drop.description();
  record.dtype = name_of(precision);
  record.flops = plan::step_flops(config, double(count * length), double(length));
  record.tokens_per_s = double(count * length) / record.ms.p50 * 1e3;
  return record;
}

}  // namespace

std::vector<Record> bench_bert_step(const BertBenchOptions& options) {
  BertBenchOptions measured = options;
  if (options.drop.drops()) measured.graph = {false};
  if (options.shapes.empty()) measured.shapes = default_bert_batches(options.device);
  const std::string& states = options.optimizer_states;
  return matrix("step bert", measured, states, [&](Precision precision, bool graph, const auto& add) {
    for (const auto& [count, length] : measured.shapes)
      for (const double dropout : options.dropout) {
        models::BertConfig config = options.model;
        config.head = models::BertHead::classify;
        config.hidden_dropout = config.attention_dropout = config.classifier_dropout = dropout;
        add(measure_bert(config, options, precision, count, length, graph));
      }
  });
}

}  // namespace tessera::bench

#include "bench/bert_bench.h"

#include <fmt/format.h>

#include "autograd/tape.h"
#include "optim/adamw.h"
#include "runtime/allocator.h"
#include "runtime/capture.h"
#include "train/build_info.h"
#include "train/run_folder.h"

namespace tessera::bench {
namespace {

struct Batch {
  models::BertBatch texts;
  Tensor targets;
};

/// Tokens of a fixed pattern: the step's work does not depend on them, but which rows of the table are met
/// how often does, so they are spread over all of it.
Batch make_batch(const models::BertConfig& config, int64_t count, int64_t length, Device device) {
  std::vector<int64_t> tokens, types, classes, first;
  for (int64_t i = 0; i < count * length; ++i) {
    tokens.push_back(i * 7919 % config.vocabulary);
    types.push_back(i % length * 2 / length % config.types);
  }
  for (int64_t i = 0; i < count; ++i) classes.push_back(i % 2), first.push_back(i * length);
  const nn::Sequences sequences = nn::Sequences::uniform(count, length);
  const Shape flat{count * length};
  return {{.tokens = Tensor::from(tokens, flat, device),
           .types = Tensor::from(types, flat, device),
           .sequences = sequences,
           .positions = sequences.positions(config.position_offset(), device),
           .first = Tensor::from(first, {count}, device)},
          Tensor::from(classes, {count}, device)};
}

Record measure_step(const models::BertConfig& config, int64_t count, int64_t length, Device device,
                    bool graph, const TimerOptions& timer) {
  device.synchronize();
  device.allocator().release_cached();
  device.allocator().reset_peaks();
  Rng rng(1);
  models::Bert model(config, rng, device);
  optim::AdamW optimizer(nn::parameters(model), {.lr = 1e-5});
  const Batch batch = make_batch(config, count, length, device);
  optimizer.zero_grad();
  const auto body = [&] {
    {
      const MemoryTag tag("activations");
      Tape tape;
      tape.backward(model.loss(batch.texts, batch.targets));
    }
    optimizer.step();
    optimizer.zero_grad();
  };
  Captured captured(device, body);
  Record record;
  record.ms = graph ? measure(
                          device, [&] { captured(); }, timer)
                    : measure(device, body, timer);
  device.synchronize();
  record.op = "step bert";
  record.shape = {{"B", count}, {"T", length}};
  record.attrs["dropout"] = fmt::format("{:g}", config.hidden_dropout);
  record.dtype = name_of(config.dtype);
  record.device = device.name();
  record.card = device.card().name;
  record.mode = "step";
  record.implementation = graph ? "tessera graph" : "tessera eager";
  record.flops = models::step_flops(config, double(count * length), double(length));
  record.peak_bytes = double(device.allocator().stats().reserved_peak);
  record.live_bytes = double(device.allocator().stats().allocated_peak);
  record.tokens_per_s = double(count * length) / record.ms.p50 * 1e3;
  record.build = train::kRevision;
  record.time = train::utc_now();
  return record;
}

}  // namespace

std::vector<Record> bench_bert_step(const BertBenchOptions& options) {
  std::vector<DType> dtypes = options.dtypes;
  if (dtypes.empty()) dtypes = {options.device.is_cuda() ? DType::bf16 : DType::f32};
  std::vector<bool> graphs = options.graph;
  if (options.device.is_cpu()) graphs = {false};
  std::vector<Record> records;
  for (const DType dtype : dtypes)
    for (const auto& [count, length] : options.shapes)
      for (const double dropout : options.dropout)
        for (const bool graph : graphs) {
          models::BertConfig config = options.model;
          config.dtype = dtype;
          config.head = models::BertHead::classify;
          config.hidden_dropout = config.attention_dropout = config.classifier_dropout = dropout;
          records.push_back(measure_step(config, count, length, options.device, graph, options.timer));
          const Ceilings& best =
              ceilings(options.device, size_of(dtype) == 2 ? DTypeClass::half : DTypeClass::single);
          records.back().ceiling_share = records.back().tflops() / best.tflops;
        }
  return records;
}

}  // namespace tessera::bench

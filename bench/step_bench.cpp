#include "bench/step_bench.h"

#include "autograd/tape.h"
#include "runtime/allocator.h"
#include "runtime/capture.h"
#include "tensor/random.h"
#include "train/build_info.h"

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

Record measure_step(const train::TnpJob& job, Device device, bool graph, const TimerOptions& timer) {
  device.synchronize();
  device.allocator().release_cached();
  device.allocator().reset_peaks();
  train::TnpSession session(job, device);
  session.load(random_batch(job));
  session.optimizer().zero_grad();
  const auto body = [&] {
    {
      const MemoryTag tag("activations");
      Tape tape;
      tape.backward(session.loss());
    }
    session.optimizer().step();
    session.optimizer().zero_grad();
  };
  Captured captured(device, body);
  Record record;
  record.ms = graph ? measure(
                          device, [&] { captured(); }, timer)
                    : measure(device, body, timer);
  device.synchronize();
  const bool checkpointed = job.model.checkpoint_every > 0;
  record.op = "step tnp";
  record.shape = {{"B", job.batch}, {"M", job.context}, {"N", job.targets}};
  record.attrs["checkpoint"] = checkpointed ? "on" : "off";
  record.dtype = name_of(job.model.dtype);
  record.device = device.name();
  record.card = device.card().name;
  record.mode = "step";
  record.implementation = graph ? "tessera graph" : "tessera eager";
  record.flops = count_flops(job.model, job.batch, job.context, job.targets).step(checkpointed);
  record.peak_bytes = double(device.allocator().stats().reserved_peak);
  record.live_bytes = double(device.allocator().stats().allocated_peak);
  record.planned_bytes = plan_memory(job.model, job.batch, job.context, job.targets).total();
  record.tokens_per_s = double(job.batch * (job.context + job.targets)) / record.ms.p50 * 1e3;
  record.build = train::kRevision;
  record.time = train::utc_now();
  return record;
}

}  // namespace

std::vector<Record> bench_tnp_step(const StepBenchOptions& options) {
  std::vector<DType> dtypes = options.dtypes;
  if (dtypes.empty()) dtypes = {options.device.is_cuda() ? DType::bf16 : DType::f32};
  std::vector<bool> graphs = options.graph;
  if (options.device.is_cpu()) graphs = {false};
  std::vector<Record> records;
  for (const DType dtype : dtypes) {
    for (const bool checkpoint : options.checkpoint) {
      for (const bool graph : graphs) {
        train::TnpJob job = options.job;
        job.model.dtype = dtype;
        job.model.checkpoint_every = checkpoint ? std::max<int64_t>(1, job.model.checkpoint_every) : 0;
        records.push_back(measure_step(job, options.device, graph, options.timer));
        const Ceilings& best =
            ceilings(options.device, size_of(dtype) == 2 ? DTypeClass::half : DTypeClass::single);
        records.back().ceiling_share = records.back().tflops() / best.tflops;
      }
    }
  }
  return records;
}

}  // namespace tessera::bench

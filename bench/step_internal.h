#pragma once

#include <initializer_list>
#include <utility>
#include <vector>

#include "bench/record.h"
#include "report/facts.h"
#include "runtime/allocator.h"
#include "train/step.h"

/// What the benchmarks of whole training steps share.

namespace tessera::bench {

/// What the session that follows takes is what is measured.
inline void clear_memory(Device device) {
  device.synchronize();
  device.allocator().release_cached();
  device.allocator().reset_peaks();
}

/// Times a job's step on the batch that it holds.
inline Record measure_step(train::Job& job, bool graph, const TimerOptions& timer) {
  const Device device = job.device();
  train::Step step(job, {.graph = graph});
  Record record;
  record.ms = measure(
      device, [&] { step(); }, timer);
  device.synchronize();
  record.device = device.name();
  record.gpu = device.info().name;
  record.mode = "step";
  record.implementation = graph ? "tessera graph" : "tessera eager";
  record.peak_bytes = double(device.allocator().stats().reserved_peak);
  record.live_bytes = double(device.allocator().stats().allocated_peak);
  record.build = report::kRevision;
  record.time = report::utc_now();
  return record;
}

/// A model's own sizes are part of the work. A record without them is of the usual model, as the peers' are.
struct ModelSize {
  const char* name;
  int64_t size, usual;
};
inline void add_unusual(Record& record, std::initializer_list<ModelSize> sizes) {
  for (const ModelSize& one : sizes)
    if (one.size != one.usual) record.shape[one.name] = one.size;
}

/// Calls measure(precision, graph) for the matrix of precisions and graphs.
template <class Measure>
std::vector<Record> matrix(Device device, std::vector<Precision> precisions, std::vector<bool> graphs,
                           Measure&& measure) {
  if (precisions.empty()) precisions = {default_precision(device)};
  if (device.is_cpu()) graphs = {false};
  std::vector<Record> records;
  for (const Precision precision : precisions) {
    const Ceilings& best = ceilings(device, precision);
    for (const bool graph : graphs)
      for (Record& record : measure(precision, graph)) {
        record.ceiling_share = record.tflops() / best.tflops;
        const bool half = record.dtype == "bf16" || record.dtype == "f16";
        record.does["weights"] = half ? record.dtype + " with f32 masters" : "f32";
        records.push_back(std::move(record));
      }
  }
  return records;
}

}  // namespace tessera::bench

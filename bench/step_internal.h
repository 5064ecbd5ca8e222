#pragma once

#include <algorithm>
#include <functional>
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

/// Times a step that several ranks make together: as many repeats on all of them; the slowest rank's times.
inline Timing measure_together(const dist::World& world, Device device, const std::function<void()>& step,
                               const TimerOptions& timer) {
  const auto slowest = [&](double ms) { return double(world.host().largest(int64_t(ms * 1e6))) * 1e-6; };
  // No rank decides alone how often: these limits leave nothing to decide. (No step takes 2000 s.)
  TimerOptions fixed = timer;
  fixed.seconds = 2000, fixed.least = fixed.most = 1, fixed.warmups = std::min(timer.warmups, 2);
  const double once = slowest(measure(device, step, fixed).p50), budget = timer.seconds * 1e3;
  const int least = once > budget ? std::min(timer.least, 2) : timer.least;
  fixed.least = fixed.most = std::clamp(int(budget / std::max(once, 1e-3)), least, timer.most);
  fixed.warmups = 1;
  world.host().barrier();
  const Timing own = measure(device, step, fixed);
  return {slowest(own.p10), slowest(own.p50), slowest(own.p90), own.repeats};
}

/// Times a job's step on the batch that it holds; with `world` that of all its ranks.
inline Record measure_step(train::Job& job, bool graph, const TimerOptions& timer,
                           const dist::World* world = nullptr) {
  const Device device = job.device();
  train::Step step(job, {.graph = graph, .world = world});
  Record record;
  record.ms = world ? measure_together(
                          *world, device, [&] { step(); }, timer)
                    : measure(
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
        const auto ranks = record.shape.find("ranks");  // each with a ceiling of its own
        record.ceiling_share =
            record.tflops() / best.tflops / (ranks == record.shape.end() ? 1.0 : double(ranks->second));
        const bool half = record.dtype == "bf16" || record.dtype == "f16";
        record.does["weights"] = half ? record.dtype + " with f32 masters" : "f32";
        records.push_back(std::move(record));
      }
  }
  return records;
}

}  // namespace tessera::bench

#pragma once

#include <initializer_list>
#include <utility>
#include <vector>

#include "bench/record.h"
#include "bench/step_ranks.h"
#include "report/facts.h"
#include "runtime/allocator.h"
#include "train/step.h"

/// What the benchmarks of whole training steps share.

namespace tessera::bench {

/// Releases cached memory and resets the peaks, so that what is measured next is what the step itself takes.
inline void clear_memory(Device device) {
  device.synchronize();
  device.allocator().release_cached();
  device.allocator().reset_peaks();
}

inline void describe_step(Record& record, Device device, bool graph) {
  device.synchronize();
  record.device = device.name();
  record.gpu = device.info().name;
  record.mode = "step";
  record.implementation = graph ? "tessera graph" : "tessera eager";
  record.peak_bytes = double(device.allocator().stats().reserved_peak);
  record.live_bytes = double(device.allocator().stats().allocated_peak);
  record.build = report::kRevision;
  record.time = report::utc_now();
}

/// Times a job's step on the batch that it holds.
inline Record measure_step(train::Job& job, bool graph, const TimerOptions& timer) {
  const Device device = job.device();
  train::Step step(job, {.graph = graph});
  Record record;
  record.ms = measure(
      device, [&] { step(); }, timer);
  describe_step(record, device, graph);
  return record;
}

/// The same on several ranks, each with its own micro-batch, or `ranks.each` of them with one together: then
/// none is timed alone, since one may not have the memory for it. `make(settings)` gives a job that holds a
/// batch, which is dropped before the next one is made.
template <class Settings, class Make>
Record measure_job(const Settings& settings, Device device, bool graph, const TimerOptions& timer,
                   const StepRanks& ranks, Make&& make) {
  clear_memory(device);
  if (!ranks.several()) {
    const auto job = make(settings);
    return measure_step(*job, graph, timer);
  }
  Record alone, record;
  if (ranks.each == 1) {
    const auto job = make(settings);
    train::Step step(*job, {.graph = graph});
    time_on_ranks(
        *ranks.world, device, [&] { step(); }, timer, alone);
  }
  clear_memory(device);
  Settings own = settings;
  own.accumulate = ranks.size() / ranks.each;
  own.sharding = ranks.sharding();
  const auto job = make(own);
  train::Step step(*job, {.graph = graph,
                          .world = ranks.world,
                          .global_order = ranks.each == 1,
                          .bucket_mb = ranks.bucket_mb,
                          .exchange = ranks.exchange});
  time_on_ranks(
      *ranks.world, device, [&] { step(); }, timer, record);
  std::vector<double> exposed;
  for (int i = 0; i < 5; ++i) step(), exposed.push_back(step.exposed_ms());
  record.ranks.alone_ms = alone.ms.p50;
  record.ranks.exposed_ms = percentiles(std::move(exposed)).p50;
  describe_step(record, device, graph);
  record.implementation += ", " + ranks.description(step.exchange());
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

/// Calls measure(precision, graph, add) for the matrix of precisions and graphs, which adds its records.
/// `options`: of a benchmark of steps, whose name is `name`; `states`: TrainingSettings::optimizer_states.
template <class Options, class Measure>
std::vector<Record> matrix(const std::string& name, const Options& options, const std::string& states,
                           Measure&& measure) {
  const Device device = options.device;
  const StepRanks& ranks = options.ranks;
  std::vector<Precision> precisions = options.precisions;
  if (precisions.empty()) precisions = {default_precision(device)};
  const std::vector<bool> graphs = device.is_cpu() ? std::vector<bool>{false} : options.graph;
  const bool masters = states == "f32";
  std::vector<Record> records;
  for (const Precision precision : precisions) {
    const Ceilings& best = ceilings(device, precision);
    for (const bool graph : graphs) {
      options.listener.begin(name + " " + name_of(precision) + (graph ? " graph" : " eager"));
      measure(precision, graph, [&](Record record) {
        if (ranks.several()) record.shape["ranks"] = ranks.size();
        record.tokens_per_s *= ranks.size();
        record.ceiling_share = record.tflops() / best.tflops;
        const bool half = record.dtype == "bf16" || record.dtype == "f16";
        record.does["weights"] =
            half ? record.dtype + (masters ? " with f32 masters" : " without masters") : "f32";
        if (!masters) record.attrs["states"] = states;
        options.listener.add(std::move(record), records);
      });
    }
  }
  return records;
}

}  // namespace tessera::bench

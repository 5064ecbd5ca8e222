#include "train/language_pace.h"

#include <algorithm>
#include <chrono>

#include "runtime/interrupt.h"
#include "train/language_job.h"
#include "train/step.h"

namespace tessera::train {

std::vector<int64_t TrainingSettings::*> periods_of(const LanguageSettings& settings) {
  std::vector<int64_t TrainingSettings::*> periods;
  if (settings.optimizer == "galore") periods = {&TrainingSettings::galore_every};
  if (settings.optimizer == "loro")
    periods = {&TrainingSettings::loro_every, &TrainingSettings::refactor_every};
  std::erase_if(periods, [&](const auto period) { return settings.*period == 0; });
  return periods;
}

namespace {

/// Seconds per step, timed for some `seconds`; the first one fills caches and is not counted.
double timed_step(const LanguageSettings& settings, Device device, double seconds) {
  using Clock = std::chrono::steady_clock;
  LanguageJob job(settings, device);
  datasets::TokenBatch batch;
  batch.inputs = Tensor::zeros({settings.batch, settings.length}, DType::i64, Device::cpu());
  batch.targets = batch.inputs.clone();
  std::vector<int32_t> ends;  // of documents as long as the sequences
  for (int64_t row = 0; row <= settings.batch; ++row) ends.push_back(int32_t(row * settings.length));
  batch.lengths = Tensor::from(ends, {settings.batch + 1});
  job.load(batch);
  Step step(job, {.graph = false});
  check_interrupt();
  step();
  device.synchronize();
  const Clock::time_point warm = Clock::now();
  double passed = 0;
  int64_t timed = 0;
  do {
    check_interrupt();
    step();
    device.synchronize();
    passed = std::chrono::duration<double>(Clock::now() - warm).count();
    timed += 1;
  } while (passed < seconds && timed < 100);
  return passed / double(timed);
}

}  // namespace

int64_t steps_within(const LanguageSettings& settings, Device device, double seconds) {
  const auto begun = std::chrono::steady_clock::now();
  // What the optimizer does every few steps is timed in steps that all do it.
  LanguageSettings plain = settings;
  const auto periods = periods_of(settings);
  for (const auto period : periods) plain.*period = LanguageSettings::kLargest;
  const double usual = timed_step(plain, device, std::min(0.01 * seconds, 5.0));  // which tells the pace
  double each = usual;
  for (const auto period : periods) {
    LanguageSettings often = plain;
    often.*period = 1;
    each += std::max(0.0, timed_step(often, device, 0) - usual) / double(settings.*period);
  }
  const double spent = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  // A tenth is left for evaluations, samples and saves.
  return std::clamp(int64_t(0.9 * (seconds - spent) / each), int64_t{1}, LanguageSettings::kLargest);
}

}  // namespace tessera::train

#include "bench/timer.h"

#include <algorithm>
#include <map>
#include <vector>

#include "bench/cold.h"
#include "ops/matmul/matmul.h"
#include "ops/random/random.h"
#include "runtime/has_cuda.h"
#include "tensor/tensor.h"

namespace tessera::bench {
namespace {

double percentile(const std::vector<double>& sorted, double share) {
  const double at = share * double(sorted.size() - 1);
  const size_t low = size_t(at);
  const double high = sorted[std::min(low + 1, sorted.size() - 1)];
  return sorted[low] + (high - sorted[low]) * (at - double(low));
}

}  // namespace

Tensor make_flush(Device device) {
  if (device.is_cpu()) return Tensor();
  const int64_t bytes = std::max<int64_t>(int64_t(device.info().l2_bytes) * 2, 64 << 20);
  const Tensor flush = Tensor::empty_packed({bytes / 4}, DType::f32, device);
  flush.fill(0);
  return flush;
}

Timing percentiles(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return {percentile(times, 0.1), percentile(times, 0.5), percentile(times, 0.9), int(times.size())};
}

Timing measure(Device device, const std::function<void()>& work, const TimerOptions& options,
               const std::function<void()>& prepare) {
  const Tensor flush = options.cold ? make_flush(device) : Tensor();
  const auto repeat = [&](Event& start, Event& stop) {
    if (prepare) prepare();
    if constexpr (kCuda)
      if (flush.defined()) make_cold_cuda(flush);
    start.record();
    work();
    stop.record();
  };
  Event start(device), stop(device);
  double estimate = 0;
  int least = options.least;
  for (int i = 0; i < std::max(1, options.warmups); ++i) {
    repeat(start, stop);
    estimate = stop.milliseconds_since(start);
    if (i > 0 &&
        estimate > options.seconds * 1e3) {  // the first call may have captured nothing, the second has
      least = std::min(least, 2);
      break;
    }
  }
  const int repeats = std::clamp(int(options.seconds * 1e3 / std::max(estimate, 1e-3)), least, options.most);
  std::vector<double> times;
  // A batch of repeats is in flight at once, so that the host never holds the GPU up.
  std::vector<std::pair<Event, Event>> events;
  for (int i = 0; i < repeats; ++i) {
    events.emplace_back(Event(device), Event(device));
    repeat(events.back().first, events.back().second);
  }
  for (auto& [begin, end] : events) times.push_back(end.milliseconds_since(begin));
  return percentiles(std::move(times));
}

void copy_at_best(const Tensor& to, const Tensor& from) {
  if constexpr (kCuda)
    if (to.device().is_cuda()) return driver_copy_cuda(to, from);
  to.copy_from(from);
}

const Ceilings& ceilings(Device device, Precision precision) {
  const bool half = size_of(precision.dtype) == 2, tf32 = precision.math == F32Math::tf32;
  static auto& known = *new std::map<std::pair<std::string, int>, Ceilings>;
  const auto key = std::pair(device.name(), half ? 2 : tf32 ? 1 : 0);
  if (const auto found = known.find(key); found != known.end()) return found->second;
  Ceilings measured;
  // Every process that times an operator measures them, so briefly.
  const auto median = [&](const std::function<void()>& work) {
    return measure(device, work, {.seconds = 0.1}).p50;
  };
  {
    const int64_t count = device.is_cpu() ? 1 << 24 : int64_t(1) << 28;
    const Tensor from = Tensor::empty({count}, DType::f32, device), to = Tensor::empty_like(from);
    Rng rng(1);
    ops::fill_normal(from, 0, 1, rng);
    measured.copy_gbs = 8.0 * double(count) / median([&] { copy_at_best(to, from); }) / 1e6;
  }
  {
    // The CPU has no units for fewer bits: all precisions have the ceiling of f32 there.
    const int64_t n = device.is_cpu() ? 1024 : half || tf32 ? 8192 : 4096;
    const DType dtype = half && device.is_cuda() ? DType::bf16 : DType::f32;
    const F32MathScope math(tf32 && device.is_cuda() ? F32Math::tf32 : F32Math::ieee);
    const Tensor a = Tensor::empty({n, n}, dtype, device);
    Rng rng(2);
    ops::fill_uniform(a, -1, 1, rng);
    const double ms = median([&] { ops::matmul(a, a); });
    measured.tflops = 2.0 * double(n) * double(n) * double(n) / ms / 1e9;
  }
  return known.emplace(key, measured).first->second;
}

}  // namespace tessera::bench

#pragma once

#include <functional>
#include <vector>

#include "tensor/precision.h"
#include "tensor/tensor.h"

namespace tessera::bench {

/// Percentiles of repeated timings, in milliseconds.
struct Timing {
  double p10 = 0, p50 = 0, p90 = 0;
  int repeats = 0;
};

/// Of measured milliseconds; at least one.
Timing percentiles(std::vector<double> milliseconds);

struct TimerOptions {
  /// Seconds to measure after warm-up; at least `least` and at most `most` repeats. Work that takes longer
  /// than this is warmed up twice and repeated twice.
  double seconds = 0.5;
  int least = 5, most = 200;
  int warmups = 3;
  bool cold = true;  // clear the L2 cache (GPU) before each repeat, untimed: see bench/cold.h
};

/// Times `work` on the device: events around each repeat on a GPU (clearing the cache before it keeps the GPU
/// busy while the host issues the work, so launch latency is hidden as in a full queue), a wall clock on the
/// CPU. `prepare` runs before each repeat, untimed.
Timing measure(Device device, const std::function<void()>& work, const TimerOptions& options = {},
               const std::function<void()>& prepare = {});

/// What make_cold_cuda reads (bench/cold.h): twice the L2 cache of a GPU; undefined for the CPU.
Tensor make_flush(Device device);

/// Copies a packed tensor to another as fast as the device is known to: by the driver on a GPU.
void copy_at_best(const Tensor& to, const Tensor& from);

/// The ceilings of a device, measured once per process: a large copy (bytes read + written) and a large GEMM
/// in that precision (f16 counts as bf16, f64 as f32).
struct Ceilings {
  double copy_gbs = 0;
  double tflops = 0;
};
const Ceilings& ceilings(Device device, Precision precision);

}  // namespace tessera::bench

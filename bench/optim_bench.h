#pragma once

#include <vector>

#include "bench/record.h"
#include "tensor/dtype.h"

namespace tessera::bench {

struct OptimBenchOptions {
  Device device = Device::cpu();
  std::vector<DType> dtypes = {DType::f32};  // of the parameters; bf16 and f16 have f32 masters
  std::vector<bool> clip = {true, false};
  int64_t parameters = 0;  // 0: default_optim_parameters
  TimerOptions timer = {};
  Listener listener = {};
};

/// Times AdamW's step on random parameters and gradients, in matrices of 2048 x 2048 and what is left: op
/// "adamw", attribute "clip", mode "step". The bytes are those that must travel: weights, moments and masters
/// read and written, gradients read, and read once more for their norm if they are clipped.
std::vector<Record> bench_optim(const OptimBenchOptions& options);

/// Copies default_copy_mib() of f32: op "copy", bytes read + written, by Tensor::copy_from and, on a
/// GPU, by the driver, which is the ceiling of `Ceilings`.
std::vector<Record> bench_copy(Device device, const Listener& listener = {}, const TimerOptions& timer = {});

}  // namespace tessera::bench

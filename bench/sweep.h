#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "bench/op_bench.h"

namespace tessera::bench {

struct SweepOptions {
  Device device = Device::cpu();
  std::optional<Precision> precision = {};  // default: see precisions_of
  int64_t count = 200;
  uint64_t seed = 1;
  std::vector<std::string> modes = {"fwd", "bwd"};  // and "fwd+bwd", see bench_op
  // Few repeats: a sweep finds the shape that is several times too slow, not the last percent.
  TimerOptions timer = {.seconds = 0.004, .least = 5, .most = 10, .warmups = 2, .cold = true};
};

/// The problems of a sweep: `count` draws of OpSpec::sweep, each a function of (operator, seed, number),
/// drawn again until it fits the budget of the device and precision (in sweep.cpp, next to the reasons).
std::vector<ops::Case> sweep_cases(const ops::OpSpec& op, const SweepOptions& options);

/// Checks and times random problems of an operator; one record per mode, with its verdict.
///
/// A problem that the CPU can do in some milliseconds is checked against the f64 oracle by the rule of
/// tests/ops/cases_test.cpp. A larger one, in 16 bits on a GPU, is checked by the same rule against the
/// operator's own f32 kernels on the same rounded inputs; the baseline is what rounding does to an exact
/// computation: the f32 kernels once more, on inputs and output gradients whose elements all moved by up to
/// half an ulp of the 16-bit dtype. Outputs whose dtype is not the operator's must be equal, but for counts
/// of computed values. (On an H100, 16 operators with 60 problems each, the worst error was 0.4 of its
/// tolerance by the oracle and 0.6 by the f32 kernels: the two ways are about equally strict.) `progress`, if
/// given, is called after each problem with how many are done.
std::vector<Record> sweep_op(const ops::OpSpec& op, const SweepOptions& options,
                             const std::function<void(int64_t)>& progress = {});

}  // namespace tessera::bench

#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bench/record.h"
#include "ops/op.h"

namespace tessera::bench {

struct OpBenchOptions {
  Device device = Device::best();
  std::vector<DType> dtypes;  // empty: bf16 on a GPU, f32 on the CPU
  std::vector<std::string> modes = {"fwd", "bwd"};
  std::vector<ops::Case> cases;  // empty: the operator's committed list
  bool all_rows = false;         // every kernel configuration, not only the chosen one
  std::optional<int> row;        // this one
  TimerOptions timer;
};

/// Times an operator on random inputs. "bwd" is the backward pass alone, from given output gradients to
/// gradients of all differentiable inputs.
std::vector<Record> bench_op(const ops::OpSpec& op, const OpBenchOptions& options);

}  // namespace tessera::bench

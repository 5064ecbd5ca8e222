#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bench/record.h"
#include "ops/op.h"
#include "tensor/precision.h"

namespace tessera::bench {

struct OpBenchOptions {
  Device device = Device::cpu();
  std::vector<Precision> precisions = {};  // see precisions_of
  std::vector<std::string> modes = {"fwd", "bwd"};
  std::vector<ops::Case> cases = {};  // empty: default_cases
  bool all_variants = false;          // every kernel variant, not only the chosen one
  std::string variant = {};           // this one; empty: the chosen one
  TimerOptions timer = {};
  Listener listener = {};
};

/// What an operator is timed in: the precisions asked for, or default_precision; one without floating inputs
/// in its own dtype, whatever is asked for.
std::vector<Precision> precisions_of(const ops::OpSpec& op, const std::vector<Precision>& asked,
                                     Device device);

/// Random inputs made where they are needed: the host-side generator of the checks would take minutes for
/// large ones. Normal, but for Fill::positive, which is uniform in [0.5, 2) times the scale. Packed bits, and
/// inputs that are made from others, come from the host.
std::vector<Tensor> random_inputs(const ops::OpSpec& op, const ops::Problem& problem, const ops::Attrs& attrs,
                                  DType dtype, Device device, uint64_t seed = 1);

/// A record of that work without its times.
Record describe_work(const ops::OpSpec& op, const ops::Case& c, Precision precision, Device device,
                     const std::string& mode);

/// Times one problem on those inputs, which have the precision's dtype, in one mode; nothing if there is no
/// gradient to time, or if the operator gives its inputs back where it should move bytes.
std::optional<Record> time_op(const ops::OpSpec& op, const ops::Case& c, const std::vector<Tensor>& inputs,
                              Precision precision, const std::string& mode, const TimerOptions& timer);

/// Records without times of all that bench_op() would time, in its order, and perhaps of more: of modes that
/// the operator does not have, and of variants that refuse.
std::vector<Record> planned_records(const ops::OpSpec& op, const OpBenchOptions& options);

/// Times an operator on random inputs, problem by problem. "bwd" is the backward pass alone, from given
/// output gradients to gradients of all differentiable inputs; "fwd+bwd" is a recorded forward pass and its
/// backward: what an operator that already makes gradients in forward must be judged by. A forced variant
/// that refuses a problem throws; among all variants it is left out.
std::vector<Record> bench_op(const ops::OpSpec& op, const OpBenchOptions& options);

}  // namespace tessera::bench

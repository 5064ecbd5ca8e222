#include "bench/sweep.h"

#include <fmt/format.h>

#include <algorithm>

#include "bench/difference.h"
#include "ops/pointwise/pointwise.h"
#include "ops/random/random.h"
#include "ops/verify.h"
#include "runtime/allocator.h"
#include "runtime/has_cuda.h"

namespace tessera::bench {
namespace {

using ops::Case;
using ops::OpSpec;
using ops::Problem;
using ops::Results;

struct Budget {
  double flops, elements;  // of the forward pass
};

/// What the oracle and its baseline do on one core in some 50 ms, backward and inputs included.
constexpr Budget kOracle = {1e7, 1e5};

/// Whether the f32 kernels, which round less, may check the precision where the oracle would take too long.
bool f32_can_check(const OpSpec& op, Device device, Precision precision) {
  return op.f32_checks && device.is_cuda() &&
         (size_of(precision.dtype) == 2 || precision.math == F32Math::tf32);
}

/// The largest problem. 16 bits and TF32 on a GPU: a millisecond of tensor cores or a fifth of one of memory;
/// the f32 kernels that check it, twice and some twenty times slower, stay below 200 ms. Else the oracle must
/// check it, on the CPU.
Budget budget_of(const OpSpec& op, Device device, Precision precision) {
  if (f32_can_check(op, device, precision)) return {4e11, 2e8};
  return device.is_cuda() ? Budget{5e7, 3e5} : kOracle;
}

bool fits(const Problem& problem, const Budget& budget) {
  double largest = 0;
  for (const ops::InputCase& input : problem.inputs)
    if (input.fill != ops::Fill::absent) largest = std::max(largest, double(input.shape.count()));
  return problem.forward_flops <= budget.flops && problem.forward_elements <= budget.elements &&
         largest <= budget.elements;
}

/// How far the results of one mode are from the reference, in tolerances.
struct Verdict {
  std::string checked;  // against what
  double worst = 0;     // error / tolerance
  std::string wrong;    // the first result that is too far off, and how far
  void judge(const std::string& name, const ops::Errors& errors, double bound) {
    const double share = errors.largest == 0 ? 0 : errors.largest / bound;
    worst = std::max(worst, share);
    if (share > 1 && wrong.empty())
      wrong = fmt::format("{}: error {:.3g}, tolerance {:.3g}{}", name, errors.largest, bound,
                          errors.at >= 0 ? fmt::format(", element {}", errors.at) : "");
  }
};
struct Verdicts {
  Verdict forward, backward;
};

void judge_all(
    const OpSpec& op, const Results& ours, Verdicts& verdicts,
    const std::function<std::pair<ops::Errors, double>(const Tensor& y, size_t, bool output)>& one) {
  for (size_t n = 0; n < ours.outputs.size(); ++n) {
    const auto [errors, bound] = one(ours.outputs[n], n, true);
    verdicts.forward.judge(op.outputs[n].name, errors, bound);
  }
  for (size_t i = 0; i < ours.gradients.size(); ++i) {
    if (!ours.gradients[i].defined()) continue;
    const auto [errors, bound] = one(ours.gradients[i], i, false);
    verdicts.backward.judge("d_" + op.inputs[i].name, errors, bound);
  }
}

Verdicts check_by_oracle(const OpSpec& op, const ops::Attrs& attrs, const Problem& problem,
                         Precision precision, Device device, uint64_t seed) {
  const DType dtype = precision.dtype;
  const F32MathScope math(precision.math);  // not of the oracle, which is in f64
  const Device cpu = Device::cpu();
  const auto placed = ops::Placement::pitched;
  const auto rounded = ops::make_inputs(op, problem, attrs, placed, dtype, cpu, seed);
  const auto inputs = ops::make_inputs(op, problem, attrs, placed, dtype, device, seed);
  const auto outputs = ops::run_with_gradients(op, rounded, attrs, {}).outputs;
  const auto gradients = ops::make_gradients(op, outputs, cpu, seed);
  const Results ours =
      ops::run_with_gradients(op, inputs, attrs, ops::make_gradients(op, outputs, device, seed));
  const Results reference = ops::run_with_gradients(op, ops::oracle_inputs(op, rounded, placed), attrs,
                                                    ops::oracle_gradients(op, gradients));
  const Results baseline =
      device.is_cpu() ? Results{} : ops::run_with_gradients(op, rounded, attrs, gradients);
  Verdicts verdicts{{"f64 oracle"}, {"f64 oracle"}};
  judge_all(op, ours, verdicts, [&](const Tensor& y, size_t i, bool output) {
    const Tensor& want = output ? reference.outputs[i] : reference.gradients[i];
    const ops::Errors errors = ops::compare(y, want);
    // The CPU is the baseline itself.
    const Precision of_y = ops::precision_of(op, y, precision.math);
    if (device.is_cpu()) return std::pair(errors, ops::cpu_tolerance(op, of_y, errors.reference));
    const double base = ops::compare(output ? baseline.outputs[i] : baseline.gradients[i], want).largest;
    return std::pair(errors, ops::tolerance(op, of_y, base, errors.reference));
  });
  return verdicts;
}

ops::Errors difference(const Tensor& y, const Tensor& reference) {
  if constexpr (kCuda) return difference_cuda(y, reference);
  return ops::compare(y, reference);
}

/// f32 copies of those in the operator's floating dtype; with `moved`, every element by up to half an ulp of
/// the precision up or down. `specs` are those of the inputs or outputs.
template <class Spec>
std::vector<Tensor> widened(const std::vector<Tensor>& tensors, const std::vector<Spec>& specs,
                            Precision precision, bool moved, uint64_t seed) {
  std::vector<Tensor> wide;
  Rng rng(seed);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    const bool fixed =
        std::is_same_v<Spec, ops::InputSpec> ? !specs[i].dtypes.empty() : specs[i].dtypes.size() == 1;
    if (!tensor.defined() || fixed || !is_floating(tensor.dtype())) {
      wide.push_back(tensor);
      continue;
    }
    Tensor copy = tensor.to(DType::f32);
    if (moved) {
      const Tensor factor = Tensor::empty_like(copy);
      ops::fill_uniform(factor, 1 - epsilon(precision) / 2, 1 + epsilon(precision) / 2, rng);
      copy = ops::mul(copy, factor);
    }
    wide.push_back(copy);
  }
  return wide;
}

Verdicts check_by_f32(const OpSpec& op, const ops::Attrs& attrs, const std::vector<Tensor>& inputs,
                      Precision precision, uint64_t seed) {
  std::vector<Tensor> grads;
  {
    Rng rng(seed + 1);
    const auto outputs = ops::run_with_gradients(op, inputs, attrs, {}).outputs;
    for (size_t n = 0; n < outputs.size(); ++n) {
      grads.push_back(op.outputs[n].differentiable ? Tensor::empty_like(outputs[n]) : Tensor());
      if (grads.back().defined()) ops::fill_uniform(grads.back(), -1, 1, rng);
    }
  }
  const auto in_precision = [&] {
    const F32MathScope math(precision.math);
    return ops::run_with_gradients(op, inputs, attrs, grads);
  };
  const Results ours = in_precision();
  const auto in_f32 = [&](bool moved) {
    return ops::run_with_gradients(op, widened(inputs, op.inputs, precision, moved, seed + 2), attrs,
                                   widened(grads, op.outputs, precision, moved, seed + 3));
  };
  const Results reference = in_f32(false), baseline = in_f32(true);
  Verdicts verdicts{{"f32 kernels"}, {"f32 kernels"}};
  judge_all(op, ours, verdicts, [&](const Tensor& y, size_t i, bool output) {
    const Tensor& want = output ? reference.outputs[i] : reference.gradients[i];
    const Tensor& rounded = output ? baseline.outputs[i] : baseline.gradients[i];
    // Indices, counts, masks and outputs of a given dtype: exact inputs give the same ones in f32.
    if (want.dtype() != DType::f32) {
      const bool counts_results = output && op.outputs[i].counts_results;
      return std::pair(ops::compare(y, want), counts_results ? ops::compare(rounded, want).largest : 0.0);
    }
    const ops::Errors errors = difference(y, want);
    const double base = difference(rounded, want).largest;
    return std::pair(errors,
                     ops::tolerance(op, ops::precision_of(op, y, precision.math), base, errors.reference));
  });
  return verdicts;
}

}  // namespace

std::vector<Case> sweep_cases(const OpSpec& op, const SweepOptions& options) {
  check(bool(op.sweep), op.name, ": it declares no random problems (OpSpec::sweep)");
  const Precision precision = options.precision.value_or(precisions_of(op, {}, options.device).front());
  const Budget budget = budget_of(op, options.device, precision);
  uint64_t own = 14695981039346656037u;  // FNV-1a of the name: every operator has draws of its own
  for (const char c : op.name) own = (own ^ uint64_t(uint8_t(c))) * 1099511628211u;
  std::vector<Case> cases;
  for (int64_t number = 0; number < options.count; ++number) {
    bool found = false;
    for (uint64_t attempt = 0; attempt < 1000 && !found; ++attempt) {
      ops::Draw draw(options.seed ^ own, uint64_t(number) * 1000 + attempt);
      Case drawn = op.sweep(draw);
      found = fits(op.problem(drawn.dims, ops::complete(op, drawn.attrs)), budget);
      if (found) cases.push_back(std::move(drawn));
    }
    check(found, op.name, ": none of 1,000 random problems is within the sweep's budget of ", budget.flops,
          " FLOPs and ", budget.elements, " elements");
  }
  return cases;
}

std::vector<Record> sweep_op(const OpSpec& op, const SweepOptions& options,
                             const std::function<void(int64_t)>& progress) {
  const Device device = options.device;
  const Precision precision = options.precision.value_or(precisions_of(op, {}, device).front());
  std::vector<Record> records;
  int64_t number = 0;
  int thrown_in_a_row = 0;
  for (const Case& c : sweep_cases(op, options)) {
    const ops::Attrs attrs = ops::complete(op, c.attrs);
    const Problem problem = op.problem(c.dims, attrs);
    try {
      const std::vector<Tensor> inputs =
          random_inputs(op, problem, attrs, precision.dtype, device, options.seed);
      ops::check_inputs(op, inputs);
      const bool small = fits(problem, kOracle) || !f32_can_check(op, device, precision);
      const Verdicts verdicts = small ? check_by_oracle(op, attrs, problem, precision, device, options.seed)
                                      : check_by_f32(op, attrs, inputs, precision, options.seed);
      for (const std::string& mode : options.modes) {
        std::optional<Record> record = time_op(op, c, inputs, precision, mode, options.timer);
        if (!record) continue;
        const bool whole = mode == "fwd+bwd" && !verdicts.forward.wrong.empty();
        const Verdict& verdict = mode == "fwd" || whole ? verdicts.forward : verdicts.backward;
        record->sweep = {.number = number,
                         .checked = verdict.checked,
                         .worst = std::min(verdict.worst, 1e9),
                         .verdict = verdict.wrong.empty() ? "ok" : verdict.wrong};
        records.push_back(*record);
      }
      thrown_in_a_row = 0;
    } catch (const Error& error) {
      if (++thrown_in_a_row == 5) throw;  // not a matter of the shape
      Record record = describe_work(op, c, precision, device, "fwd");
      record.sweep = {.number = number, .verdict = "threw: " + error.message()};
      records.push_back(record);
    }
    // Two hundred shapes leave as many sizes of cached memory behind.
    if (device.is_cuda() && device.allocator().stats().reserved > (size_t(16) << 30)) {
      device.synchronize();
      device.allocator().release_cached();
    }
    if (progress) progress(number + 1);
    ++number;
  }
  return records;
}

}  // namespace tessera::bench

#include "bench/op_bench.h"

#include <algorithm>
#include <memory>

#include "autograd/tape.h"
#include "bench/default_sizes.h"
#include "ops/dropout/dropout.h"
#include "ops/pointwise/pointwise.h"
#include "ops/random/random.h"
#include "ops/variant.h"
#include "report/facts.h"

namespace tessera::bench {
namespace {

std::string attr_text(const ops::AttrValue& value) {
  MessageStream text;
  text << std::boolalpha;
  std::visit([&](const auto& v) { text << v; }, value);
  return text.str();
}

/// Whether the operator gives its inputs back where it should move bytes, as a cast to their own dtype does.
bool does_nothing(const ops::OpSpec& op, const std::vector<Tensor>& inputs, const ops::Attrs& attrs) {
  return std::ranges::all_of(op.run(inputs, attrs), [&](const Tensor& output) {
    return std::ranges::any_of(
        inputs, [&](const Tensor& input) { return input.defined() && input.storage() == output.storage(); });
  });
}

/// One backward pass ready to be timed: the forward pass has run, the tape waits.
struct PendingBackward {
  std::unique_ptr<Tape> tape;
  std::vector<Tensor> results, grads;
};

PendingBackward prepare_backward(const ops::OpSpec& op, std::vector<Tensor> inputs, const ops::Attrs& attrs,
                                 std::vector<Tensor>& known_grads) {
  for (size_t i = 0; i < inputs.size(); ++i)
    if (inputs[i].defined() && op.inputs[i].has_gradient()) require_grad(inputs[i]);
  PendingBackward pending;
  pending.tape = std::make_unique<Tape>();
  const std::vector<Tensor> outputs = op.run(inputs, attrs);
  for (size_t n = 0; n < outputs.size(); ++n)
    if (op.outputs[n].differentiable && requires_grad(outputs[n])) pending.results.push_back(outputs[n]);
  if (known_grads.empty()) {
    Rng rng(2);
    for (const Tensor& result : pending.results) {
      known_grads.push_back(Tensor::empty_like(result.detach()));
      if (result.count() == 1) {
        known_grads.back().fill(1);  // a loss
      } else {
        ops::fill_normal(known_grads.back(), 0.0, 1.0, rng);
      }
    }
  }
  pending.grads = known_grads;
  return pending;
}

}  // namespace

std::vector<Precision> precisions_of(const ops::OpSpec& op, const std::vector<Precision>& asked,
                                     Device device) {
  if (!ops::takes_floating(op)) return {(device.is_cpu() ? op.cpu_dtypes : op.cuda_dtypes).front()};
  return asked.empty() ? std::vector{default_precision(device)} : asked;
}

namespace {

Tensor random_input(const ops::OpSpec& op, size_t number, const ops::InputCase& input, DType dtype,
                    Device device, uint64_t seed, const Rng& rng) {
  // The generators on the device write floats and integers; other dtypes are converted from those.
  const bool integers = input.fill == ops::Fill::index || dtype == DType::u8;
  const DType drawn = integers && dtype != DType::i64 ? DType::i32
                      : dtype == DType::f8e4m3        ? DType::f32
                                                      : dtype;
  Tensor x = Tensor::empty(input.shape, drawn, device);
  if (!input.values.empty()) {
    x.copy_from(Tensor::from(input.values, input.shape));
  } else if (input.fill == ops::Fill::bits) {
    x.copy_from(ops::input_values(input, seed, number));
  } else if (input.fill == ops::Fill::index) {
    check(input.high >= 1 || x.count() == 0, op.name, ": these sizes leave no valid index for \"",
          op.inputs[number].name, "\"; expected at least one");
    if (x.count() > 0) ops::fill_integers(x, input.high, rng);
  } else if (input.fill == ops::Fill::positive) {
    ops::fill_uniform(x, 0.5 * input.scale, 2 * input.scale, rng);
  } else {
    ops::fill_normal(x, 0.0, input.scale, rng);
  }
  // Dropout makes -0 of what was negative, which formats of sparse weights store: + 0 makes it 0.
  if (input.density < 1 && is_floating(drawn))
    x = ops::add(ops::dropout(x, 1 - input.density, rng), Tensor::zeros(input.shape, drawn, device));
  return x.to(dtype);
}

}  // namespace

std::vector<Tensor> random_inputs(const ops::OpSpec& op, const ops::Problem& problem, const ops::Attrs& attrs,
                                  DType dtype, Device device, uint64_t seed) {
  std::vector<Tensor> inputs;
  Rng rng(seed);
  for (size_t i = 0; i < problem.inputs.size(); ++i) {
    const std::vector<DType>& own = op.inputs[i].dtypes;
    const ops::InputCase& input = problem.inputs[i];
    const bool made = input.fill != ops::Fill::absent && !op.inputs[i].is_derived();
    inputs.push_back(made ? random_input(op, i, input, own.empty() ? dtype : own.front(), device, seed, rng)
                          : Tensor());
  }
  ops::derive_inputs(op, inputs, attrs);
  return inputs;
}

Record describe_work(const ops::OpSpec& op, const ops::Case& c, Precision precision, Device device,
                     const std::string& mode) {
  const ops::Problem problem = op.problem(c.dims, ops::complete(op, c.attrs));
  const double forward = mode != "bwd", backward = mode != "fwd";
  Record record;
  record.op = op.name;
  record.shape = c.dims;
  for (const auto& [name, value] : c.attrs.values()) record.attrs[name] = attr_text(value);
  record.dtype = name_of(precision);
  record.device = device.name();
  record.gpu = device.info().name;
  record.mode = mode;
  record.flops = forward * problem.forward_flops + backward * problem.backward_flops;
  record.bytes = (forward * problem.forward_elements + backward * problem.backward_elements) *
                     double(size_of(precision.dtype)) +
                 forward * problem.forward_bytes + backward * problem.backward_bytes;
  record.build = report::kRevision;
  record.time = report::utc_now();
  return record;
}

std::optional<Record> time_op(const ops::OpSpec& op, const ops::Case& c, const std::vector<Tensor>& inputs,
                              Precision precision, const std::string& mode, const TimerOptions& timer) {
  check(mode == "fwd" || mode == "bwd" || mode == "fwd+bwd", op.name, ": mode \"", mode,
        "\": expected fwd, bwd or fwd+bwd");
  const ops::Attrs attrs = ops::complete(op, c.attrs);
  Device device = Device::cpu();
  for (const Tensor& input : inputs)
    if (input.defined()) device = input.device();
  Record record = describe_work(op, c, precision, device, mode);
  const F32MathScope math(precision.math);
  if (describe_work(op, c, precision, device, "fwd").bytes > 0 && does_nothing(op, inputs, attrs))
    return std::nullopt;
  if (mode == "fwd") {
    record.ms = measure(
        device, [&] { op.run(inputs, attrs); }, timer);
  } else if (std::ranges::none_of(op.inputs, &ops::InputSpec::has_gradient)) {
    return std::nullopt;  // it may refuse to run while a tape is recording
  } else {
    std::vector<Tensor> grads;
    PendingBackward pending = prepare_backward(op, inputs, attrs, grads);
    if (pending.results.empty()) return std::nullopt;
    const auto forward = [&] {
      pending = {};  // the old tape goes before the new one begins
      pending = prepare_backward(op, inputs, attrs, grads);
    };
    const auto backward = [&] { pending.tape->backward(pending.results, pending.grads); };
    record.ms = mode == "bwd" ? measure(device, backward, timer, forward)
                              : measure(
                                    device,
                                    [&] {
                                      forward();
                                      backward();
                                    },
                                    timer);
  }
  const Ceilings& best = ceilings(device, precision);
  const double floor_ms = std::max(record.flops / best.tflops / 1e9, record.bytes / best.copy_gbs / 1e6);
  record.ceiling_share = floor_ms / record.ms.p50;
  record.copy_gbs = best.copy_gbs;
  return record;
}

namespace {

std::vector<ops::Case> cases_of(const ops::OpSpec& op, const OpBenchOptions& options) {
  std::vector<ops::Case> cases = options.cases.empty() ? default_cases(op, options.device) : options.cases;
  check(!cases.empty(), op.name, ": it has no default benchmark shapes; give --shape");
  return cases;
}

std::vector<std::string> variants_of(const ops::OpSpec& op, const OpBenchOptions& options) {
  std::vector<std::string> variants{options.variant};
  if (options.all_variants) variants.insert(variants.end(), op.variants.begin(), op.variants.end());
  return variants;
}

Record planned_record(const ops::OpSpec& op, const OpBenchOptions& options, const ops::Case& c,
                      Precision precision, const std::string& variant, const std::string& mode) {
  Record record = describe_work(op, c, precision, options.device, mode);
  record.variant = variant;
  if (!options.timer.cold) record.attrs["L2"] = "warm";
  return record;
}

}  // namespace

std::vector<Record> planned_records(const ops::OpSpec& op, const OpBenchOptions& options) {
  std::vector<Record> records;
  for (const ops::Case& c : cases_of(op, options))
    for (const Precision precision : precisions_of(op, options.precisions, options.device))
      for (const std::string& variant : variants_of(op, options))
        for (const std::string& mode : options.modes)
          records.push_back(planned_record(op, options, c, precision, variant, mode));
  return records;
}

std::vector<Record> bench_op(const ops::OpSpec& op, const OpBenchOptions& options) {
  const Device device = options.device;
  std::vector<Record> records;
  for (const ops::Case& c : cases_of(op, options)) {
    const ops::Attrs attrs = ops::complete(op, c.attrs);
    const ops::Problem problem = op.problem(c.dims, attrs);
    for (const Precision precision : precisions_of(op, options.precisions, device)) {
      std::vector<Tensor> inputs;
      for (const std::string& variant : variants_of(op, options)) {
        std::optional<ops::ForceVariant> force;
        if (!variant.empty()) force.emplace(op.name, variant);
        for (const std::string& mode : options.modes) {
          options.listener.begin(work_text(planned_record(op, options, c, precision, variant, mode)));
          if (inputs.empty()) {
            inputs = random_inputs(op, problem, attrs, precision.dtype, device);
            ops::check_inputs(op, inputs);
          }
          try {
            if (auto record = time_op(op, c, inputs, precision, mode, options.timer)) {
              record->variant = variant;
              if (!options.timer.cold) record->attrs["L2"] = "warm";
              options.listener.add(*std::move(record), records);
            }
          } catch (const Error& error) {
            // Among all variants, one may refuse a problem by its name.
            const bool refused =
                options.all_variants && !variant.empty() &&
                std::string_view(error.what()).find("variant " + variant) != std::string_view::npos;
            if (!refused) throw;
          }
        }
      }
    }
  }
  return records;
}

}  // namespace tessera::bench

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "autograd/gradcheck.h"
#include "ops/op.h"
#include "runtime/capture.h"
#include "runtime/philox.h"
#include "runtime/tuning.h"

/// Every case of every operator, checked in the ways that its one declaration allows:
///   gradcheck  f64 backward against central differences (CPU)
///   dtype      each CPU dtype against the f64 oracle on the same rounded inputs, outputs and gradients
///   cuda       each CUDA dtype and row against the oracle by the computed tolerance; twice, bitwise equal;
///   outputs poisoned
///              and guard bands untouched; a replayed graph bitwise equal to eager

namespace tessera::ops {
namespace {

constexpr uint64_t kSeed = 20240601;

struct Results {
  std::vector<Tensor> outputs;    // on the device where they were made
  std::vector<Tensor> gradients;  // of the differentiable inputs; undefined where none arrived
};

Tensor output_gradient(const Tensor& output, uint64_t number, DType round_to) {
  std::vector<double> values(size_t(output.count()));
  for (size_t i = 0; i < values.size(); ++i) {
    const Uint4 random = philox(kSeed, 1000 + number, i);
    values[i] = double(uniform_half_open(random.word[0])) * 2 - 1;
  }
  return Tensor::from(values, output.shape()).to(round_to);
}

/// Runs forward and, if anything is differentiable, backward. `grads`: dOutputs, made once on the CPU.
Results run(const OpSpec& op, std::vector<Tensor> inputs, const Attrs& attrs,
            const std::vector<Tensor>& grads) {
  Results results;
  bool any = false;
  for (size_t i = 0; i < inputs.size(); ++i)
    if (inputs[i].defined() && op.inputs[i].differentiable && !op.inputs[i].index)
      require_grad(inputs[i]), any = true;
  if (!any || grads.empty()) {
    results.outputs = op.run(inputs, attrs);
    return results;
  }
  Tape tape;
  results.outputs = op.run(inputs, attrs);
  std::vector<Tensor> on_tape, used;
  for (size_t n = 0; n < results.outputs.size(); ++n) {
    if (!op.outputs[n].differentiable || !requires_grad(results.outputs[n])) continue;
    on_tape.push_back(results.outputs[n]);
    used.push_back(grads[n]);
  }
  if (!on_tape.empty()) tape.backward(on_tape, used);
  for (const Tensor& input : inputs)
    results.gradients.push_back(requires_grad(input) ? grad(input) : Tensor());
  for (Tensor& output : results.outputs) output = output.detach();
  return results;
}

/// Gradients of the outputs, rounded to `dtype`, on `device`, as f64 for the oracle.
std::vector<Tensor> make_gradients(const OpSpec& op, const std::vector<Tensor>& outputs, DType dtype,
                                   Device device, bool oracle) {
  std::vector<Tensor> grads;
  for (size_t n = 0; n < outputs.size(); ++n) {
    if (!op.outputs[n].differentiable) {
      grads.emplace_back();
      continue;
    }
    // The output may have a dtype of its own (a loss in f32): gradients follow it.
    const DType own = oracle || !is_floating(outputs[n].dtype()) ? dtype : outputs[n].dtype();
    const Tensor rounded = output_gradient(outputs[n], n, own);
    grads.push_back(oracle ? rounded.to(outputs[n].dtype()) : rounded.to(device));
  }
  return grads;
}

struct Errors {
  double largest = 0, reference = 0;  // max |y - ref|, max |ref|
  int64_t at = -1;
};

Errors compare(const Tensor& y, const Tensor& reference) {
  Errors errors;
  const auto got = y.to_vector<double>(), want = reference.to_vector<double>();
  for (size_t i = 0; i < want.size(); ++i) {
    errors.reference = std::max(errors.reference, std::isfinite(want[i]) ? std::abs(want[i]) : 0.0);
    const bool same = got[i] == want[i] || (std::isnan(got[i]) && std::isnan(want[i]));
    const double error = same ? 0 : std::abs(got[i] - want[i]);
    if (!(error <= errors.largest))
      errors.largest = std::isnan(error) ? INFINITY : error, errors.at = int64_t(i);
  }
  return errors;
}

/// The rule of the house: max|y - ref| <= k max|baseline - ref| + 2 ulp max|ref|. Without a baseline its
/// error counts as 0.
void expect_close(const OpSpec& op, const char* what, const Tensor& y, const Tensor& reference,
                  const Tensor* baseline) {
  ASSERT_EQ(y.shape(), reference.shape()) << what;
  const Errors ours = compare(y, reference);
  const double base = baseline ? compare(*baseline, reference).largest : 0;
  const double bound = (y.dtype() == DType::f32 ? op.tolerance_factor_f32 : op.tolerance_factor) * base +
                       2 * epsilon(y.dtype()) * ours.reference;
  EXPECT_LE(ours.largest, bound) << what << " " << y.dtype() << y.shape() << ": element " << ours.at
                                 << ", baseline error " << base << ", largest reference " << ours.reference;
}

std::string case_name(const OpSpec& op, const Case& c) {
  std::ostringstream name;
  name << op.name;
  for (const auto& [key, value] : c.dims) name << " " << key << "=" << value;
  for (const auto& [key, value] : c.attrs.values()) {
    name << " " << key << "=";
    std::visit([&](const auto& v) { name << v; }, value);
  }
  if (c.placement != Placement::pitched)
    name << (c.placement == Placement::strided ? " strided" : " transposed");
  return name.str();
}

class OpCases : public testing::TestWithParam<size_t> {
 protected:
  const OpSpec& op() const { return all_ops()[GetParam()]; }
  template <class F>
  void for_each_case(F&& f) {
    ASSERT_FALSE(op().cases.empty()) << op().name << " declares no cases";
    const char* const subset = std::getenv("TESSERA_CASES");  // "small": for runs under a sanitizer
    const bool small = subset && std::string_view(subset) == "small";
    for (const Case& c : op().cases) {
      if (small && !c.gradcheck) continue;
      SCOPED_TRACE(case_name(op(), c));
      const Attrs attrs = complete(op(), c.attrs);
      f(c, attrs, op().problem(c.dims, attrs));
    }
  }
};

TEST_P(OpCases, Gradcheck) {
  for_each_case([&](const Case& c, const Attrs& attrs, const Problem& problem) {
    if (!c.gradcheck) return;
    const auto inputs = make_inputs(op(), problem, c.placement, DType::f64, Device::cpu(), kSeed, true);
    std::vector<bool> differentiable;
    bool any = false;
    for (const InputSpec& input : op().inputs) {
      differentiable.push_back(input.differentiable && !input.index);
      any = any || differentiable.back();
    }
    if (!any) return;
    const auto result = gradcheck(
        [&](const std::vector<Tensor>& in) {
          std::vector<Tensor> outputs = op().run(in, attrs);
          std::vector<Tensor> wanted;
          for (size_t n = 0; n < outputs.size(); ++n)
            if (op().outputs[n].differentiable) wanted.push_back(outputs[n]);
          return wanted;
        },
        inputs, differentiable);
    EXPECT_TRUE(result.ok) << result.message << " (" << result.worst << " times the tolerance)";
  });
}

TEST_P(OpCases, EveryCpuDtypeAgreesWithTheOracle) {
  for_each_case([&](const Case& c, const Attrs& attrs, const Problem& problem) {
    for (const DType dtype : op().cpu_dtypes) {
      if (dtype == DType::f64) continue;
      SCOPED_TRACE(name_of(dtype));
      const auto oracle_inputs = make_inputs(op(), problem, c.placement, dtype, Device::cpu(), kSeed, true);
      const auto inputs = make_inputs(op(), problem, c.placement, dtype, Device::cpu(), kSeed);
      const auto shapes = run(op(), oracle_inputs, attrs, {}).outputs;
      const auto ours =
          run(op(), inputs, attrs,
              make_gradients(op(), run(op(), inputs, attrs, {}).outputs, dtype, Device::cpu(), false));
      const auto reference =
          run(op(), oracle_inputs, attrs, make_gradients(op(), shapes, dtype, Device::cpu(), true));
      // The CPU result is the baseline of the CUDA rule; its own bound grows with the length of the sums.
      const auto near = [&](const char* what, const Tensor& y, const Tensor& ref) {
        ASSERT_EQ(y.shape(), ref.shape()) << what;
        const Errors errors = compare(y, ref);
        const double bound = 64 * epsilon(y.dtype()) * std::max(errors.reference, 1e-30);
        EXPECT_LE(errors.largest, bound)
            << what << ": element " << errors.at << " of " << y.dtype() << y.shape();
      };
      for (size_t n = 0; n < ours.outputs.size(); ++n)
        near(op().outputs[n].name.c_str(), ours.outputs[n], reference.outputs[n]);
      for (size_t i = 0; i < ours.gradients.size(); ++i)
        if (ours.gradients[i].defined())
          near(("d_" + op().inputs[i].name).c_str(), ours.gradients[i], reference.gradients[i]);
    }
  });
}

bool bitwise_equal(const Tensor& a, const Tensor& b) {
  const Tensor x = a.packed().to(Device::cpu()).packed(), y = b.packed().to(Device::cpu()).packed();
  return x.bytes() == y.bytes() && (x.bytes() == 0 || std::memcmp(x.raw(), y.raw(), x.bytes()) == 0);
}

void expect_bitwise(const OpSpec& op, const char* what, const Results& a, const Results& b) {
  for (size_t n = 0; n < a.outputs.size(); ++n)
    EXPECT_TRUE(bitwise_equal(a.outputs[n], b.outputs[n])) << what << ": output " << op.outputs[n].name;
  for (size_t i = 0; i < a.gradients.size(); ++i)
    EXPECT_TRUE(!a.gradients[i].defined() || bitwise_equal(a.gradients[i], b.gradients[i]))
        << what << ": d_" << op.inputs[i].name;
}

TEST_P(OpCases, CudaAgreesRepeatsGuardsAndCaptures) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const Device gpu = Device::cuda(0);
  for_each_case([&](const Case& c, const Attrs& attrs, const Problem& problem) {
    for (const DType dtype : op().cuda_dtypes) {
      SCOPED_TRACE(name_of(dtype));
      const auto oracle_inputs = make_inputs(op(), problem, c.placement, dtype, Device::cpu(), kSeed, true);
      const auto cpu_inputs = make_inputs(op(), problem, c.placement, dtype, Device::cpu(), kSeed);
      const auto inputs = make_inputs(op(), problem, c.placement, dtype, gpu, kSeed);
      const auto oracle_shapes = run(op(), oracle_inputs, attrs, {}).outputs;
      const auto shapes = run(op(), cpu_inputs, attrs, {}).outputs;
      const auto reference =
          run(op(), oracle_inputs, attrs, make_gradients(op(), oracle_shapes, dtype, gpu, true));
      const auto baseline =
          run(op(), cpu_inputs, attrs, make_gradients(op(), shapes, dtype, Device::cpu(), false));
      const auto grads = make_gradients(op(), shapes, dtype, gpu, false);

      for (int row = -1; row < int(op().rows.size()); ++row) {
        std::optional<tuning::ForceRow> force;
        if (row >= 0) force.emplace(op().name, row);
        SCOPED_TRACE(row < 0 ? "chosen row" : op().rows[size_t(row)]);
        gpu.allocator().set_guard(4096);
        const Results ours = run(op(), inputs, attrs, grads);
        const Results again = run(op(), inputs, attrs, grads);
        gpu.synchronize();
        gpu.allocator().set_guard(0);
        EXPECT_NO_THROW(gpu.allocator().check_guards());
        expect_bitwise(op(), "second run", ours, again);
        for (size_t n = 0; n < ours.outputs.size(); ++n)
          expect_close(op(), op().outputs[n].name.c_str(), ours.outputs[n], reference.outputs[n],
                       &baseline.outputs[n]);
        for (size_t i = 0; i < ours.gradients.size(); ++i)
          if (ours.gradients[i].defined())
            expect_close(op(), ("d_" + op().inputs[i].name).c_str(), ours.gradients[i],
                         reference.gradients[i], &baseline.gradients[i]);

        // A random operator draws the next numbers with each replay: only its first launch repeats the eager
        // run.
        bool random = false;
        for (const AttrSpec& attr : op().attrs) random = random || attr.name == "seed";
        Results captured;
        {
          Captured step(gpu, [&] { captured = run(op(), inputs, attrs, grads); });
          for (int call = 0; call < (random ? 2 : 3); ++call) step();
          gpu.synchronize();
          EXPECT_TRUE(step.is_graph());
          expect_bitwise(op(), "graph replay", ours, captured);
          captured = {};
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, OpCases, testing::Range<size_t>(0, all_ops().size()),
                         [](const auto& info) { return all_ops()[info.param].name; });

}  // namespace
}  // namespace tessera::ops

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>

#include "autograd/gradcheck.h"
#include "ops/variant.h"
#include "ops/verify.h"
#include "runtime/allocator.h"
#include "runtime/capture.h"
#include "runtime/parallel.h"
#include "tests/ops/example_op.h"

/// Every case of every operator, checked in the ways that its one declaration allows:
///   gradcheck  f64 backward against central differences (CPU)
///   aliases    f64 gradients of one leaf that is several inputs, in a buffer that it has already (CPU)
///   tf32       on the CPU: operators that honour f32_math(), by the computed tolerance
///   dtype      each CPU dtype against the f64 oracle on the same rounded inputs, outputs and gradients,
///              within cpu_tolerance
///   threads    each CPU dtype on one and on several threads, bitwise equal
///   cuda       each CUDA dtype, and TF32 where it is honoured, against the oracle by the computed tolerance,
///              on the row that is chosen and
///              forced onto every row of the operator that takes the case; twice, bitwise equal; outputs
///              poisoned and guard bands untouched; a replayed graph bitwise equal to eager

namespace tessera::ops {
namespace {

constexpr uint64_t kCaseSeed = 20240601;

/// The tolerance rule (ops/verify.h). Without a baseline its error counts as 0.
void expect_close(const OpSpec& op, F32Math math, const char* what, const Tensor& y, const Tensor& reference,
                  const Tensor* baseline) {
  ASSERT_EQ(y.shape(), reference.shape()) << what;
  const Errors ours = compare(y, reference);
  const double base = baseline ? compare(*baseline, reference).largest : 0;
  EXPECT_LE(ours.largest, tolerance(op, precision_of(op, y, math), base, ours.reference))
      << what << " " << precision_of(op, y, math) << y.shape() << ": element " << ours.at
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

/// TESSERA_CASES=small, for runs under a sanitizer and of mutants: only the cases that are small enough for
/// gradcheck, and on a GPU each once, eagerly.
bool small_only() {
  const char* const subset = std::getenv("TESSERA_CASES");
  return subset && std::string_view(subset) == "small";
}

/// TESSERA_CASES_PART=i/n: the i-th (from 0) of n parts of an operator's cases, for processes side by side.
struct Part {
  int64_t index = 0, count = 1;

  bool has(int64_t number) const { return number % count == index; }
  bool whole() const { return count == 1; }
  static Part own() {
    Part part;
    const char* const text = std::getenv("TESSERA_CASES_PART");
    if (!text) return part;
    char slash = 0, rest = 0;
    std::istringstream in(text);
    const bool read = bool(in >> part.index >> slash >> part.count) && !(in >> rest) && slash == '/' &&
                      part.index >= 0 && part.index < part.count;
    check(read, "TESSERA_CASES_PART is \"", text, "\"; expected i/n with 0 <= i < n, as 0/4");
    return part;
  }
};

class OpCases : public testing::TestWithParam<size_t> {
 protected:
  const OpSpec& op() const { return tested_ops()[GetParam()]; }
  template <class F>
  void for_each_case(F&& f) {
    ASSERT_FALSE(op().cases.empty()) << op().name << " declares no cases";
    int64_t number = 0;
    for (const Case& c : op().cases) {
      if (small_only() && !c.gradcheck) continue;
      if (!Part::own().has(number++)) continue;
      SCOPED_TRACE(case_name(op(), c));
      const Attrs attrs = complete(op(), c.attrs);
      f(c, attrs, op().problem(c.dims, attrs));
    }
  }
};

TEST_P(OpCases, Gradcheck) {
  for_each_case([&](const Case& c, const Attrs& attrs, const Problem& problem) {
    if (!c.gradcheck) return;
    const auto inputs = make_inputs(op(), problem, attrs, c.placement, DType::f64, Device::cpu(), kCaseSeed);
    std::vector<bool> differentiable;
    bool any = false;
    for (const InputSpec& input : op().inputs) {
      differentiable.push_back(input.has_gradient());
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

/// Inputs that one tensor can be at once: each two of one shape and kind of values, and all of them. None is
/// made from another input, or another from it.
std::vector<std::vector<size_t>> alike_inputs(const OpSpec& op, const Problem& problem,
                                              const std::vector<Tensor>& inputs) {
  const auto is_free = [&](size_t i) {
    return inputs[i].defined() && op.inputs[i].has_gradient() && !op.inputs[i].is_derived() &&
           std::ranges::none_of(op.inputs, [&](const InputSpec& other) {
             return std::ranges::find(other.from, op.inputs[i].name) != other.from.end();
           });
  };
  std::vector<std::vector<size_t>> groups;
  for (size_t i = 0; i < inputs.size(); ++i) {
    std::vector<size_t> all{i};
    for (size_t j = i + 1; is_free(i) && j < inputs.size(); ++j) {
      if (!is_free(j) || inputs[i].shape() != inputs[j].shape() ||
          problem.inputs[i].fill != problem.inputs[j].fill)
        continue;
      groups.push_back({i, j});
      all.push_back(j);
    }
    if (all.size() > 2) groups.push_back(all);
  }
  return groups;
}

/// One leaf in place of the inputs of `group`: its gradient is the sum of theirs, in a buffer that it has
/// before the first pass, and is added to by the second one.
void expect_sum_of_gradients(const OpSpec& op, const Attrs& attrs, std::vector<Tensor> inputs,
                             const std::vector<size_t>& group) {
  Tensor leaf = inputs[group[0]].detach();
  for (const size_t i : group) inputs[i] = leaf;
  const auto grads =
      make_gradients(op, run_with_gradients(op, inputs, attrs, {}).outputs, Device::cpu(), kCaseSeed);
  const Results apart = run_with_gradients(op, inputs, attrs, grads);
  Tensor sum = Tensor::zeros(leaf.shape(), DType::f64, Device::cpu());
  double largest = 1;
  for (const size_t i : group) {
    if (apart.gradients.empty() || !apart.gradients[i].defined()) return;
    sum = add(sum, apart.gradients[i]);
    largest = std::max(largest, compare(sum, apart.gradients[i]).reference);
  }
  require_grad(leaf);
  set_grad_buffer(leaf, Tensor::full(leaf.shape(), NAN, DType::f64, Device::cpu()));
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (std::ranges::find(group, i) != group.end()) {
      inputs[i] = leaf;
    } else if (inputs[i].defined() && op.inputs[i].has_gradient()) {
      require_grad(inputs[i]);
    }
  }
  for (const int pass : {1, 2}) {
    Tape tape;
    const std::vector<Tensor> outputs = op.run(inputs, attrs);
    std::vector<Tensor> results, used;
    for (size_t n = 0; n < outputs.size(); ++n)
      if (op.outputs[n].differentiable && requires_grad(outputs[n]))
        results.push_back(outputs[n]), used.push_back(grads[n]);
    tape.backward(results, used);
    const Errors errors = compare(grad(leaf), scale(sum, pass));
    EXPECT_LE(errors.largest, 1e-12 * largest) << "pass " << pass << ": element " << errors.at;
  }
}

TEST_P(OpCases, OneLeafThatIsSeveralInputsGetsTheSumOfTheirGradients) {
  for_each_case([&](const Case& c, const Attrs& attrs, const Problem& problem) {
    if (!c.gradcheck) return;
    const auto inputs = make_inputs(op(), problem, attrs, c.placement, DType::f64, Device::cpu(), kCaseSeed);
    for (const std::vector<size_t>& group : alike_inputs(op(), problem, inputs)) {
      std::string names;
      for (const size_t i : group) names += " " + op().inputs[i].name;
      SCOPED_TRACE("one leaf as" + names);
      expect_sum_of_gradients(op(), attrs, inputs, group);
    }
  });
}

TEST_P(OpCases, EveryCpuDtypeAgreesWithTheOracle) {
  for_each_case([&](const Case& c, const Attrs& attrs, const Problem& problem) {
    for (const DType dtype : op().cpu_dtypes) {
      if (dtype == DType::f64) continue;
      SCOPED_TRACE(name_of(dtype));
      const auto inputs = make_inputs(op(), problem, attrs, c.placement, dtype, Device::cpu(), kCaseSeed);
      const auto grads =
          make_gradients(op(), run_with_gradients(op(), inputs, attrs, {}).outputs, Device::cpu(), kCaseSeed);
      const auto ours = run_with_gradients(op(), inputs, attrs, grads);
      const auto reference = run_with_gradients(op(), oracle_inputs(op(), inputs, c.placement), attrs,
                                                oracle_gradients(op(), grads));
      // The CPU result is the baseline of the CUDA rule.
      const auto near = [&](const char* what, const Tensor& y, const Tensor& ref) {
        ASSERT_EQ(y.shape(), ref.shape()) << what;
        const Errors errors = compare(y, ref);
        EXPECT_LE(errors.largest, cpu_tolerance(op(), y.dtype(), errors.reference))
            << what << ": element " << errors.at << " of " << y.dtype() << y.shape() << " is off by "
            << errors.largest << ", largest reference " << errors.reference;
      };
      for (size_t n = 0; n < ours.outputs.size(); ++n)
        near(op().outputs[n].name.c_str(), ours.outputs[n], reference.outputs[n]);
      for (size_t i = 0; i < ours.gradients.size(); ++i)
        if (ours.gradients[i].defined())
          near(("d_" + op().inputs[i].name).c_str(), ours.gradients[i], reference.gradients[i]);
    }
  });
}

/// Every result of all cases in TF32, judged as on a GPU. The baseline is the oracle on operands that were
/// rounded beforehand.
TEST_P(OpCases, Tf32OnTheCpuAgreesWithTheOracle) {
  if (!op().honours_f32_math) return;
  const Device cpu = Device::cpu();
  // The oracle's f64 tensors are those in the operator's floating dtype.
  const auto rounded = [](const std::vector<Tensor>& tensors) {
    std::vector<Tensor> out;
    for (const Tensor& x : tensors)
      out.push_back(x.defined() && x.dtype() == DType::f64 ? rounded_to_tf32(x.to(DType::f32)).to(DType::f64)
                                                           : x);
    return out;
  };
  bool differs = false;
  for_each_case([&](const Case& c, const Attrs& attrs, const Problem& problem) {
    const auto inputs = make_inputs(op(), problem, attrs, c.placement, DType::f32, cpu, kCaseSeed);
    const auto grads =
        make_gradients(op(), run_with_gradients(op(), inputs, attrs, {}).outputs, cpu, kCaseSeed);
    const auto exact = oracle_inputs(op(), inputs, c.placement), wide_grads = oracle_gradients(op(), grads);
    const auto in = [&](F32Math math) {
      const F32MathScope scope(math);
      return run_with_gradients(op(), inputs, attrs, grads);
    };
    const Results ours = in(F32Math::tf32), ieee = in(F32Math::ieee);
    const Results reference = run_with_gradients(op(), exact, attrs, wide_grads);
    const Results baseline = run_with_gradients(op(), rounded(exact), attrs, rounded(wide_grads));
    for (size_t n = 0; n < ours.outputs.size(); ++n) {
      expect_close(op(), F32Math::tf32, op().outputs[n].name.c_str(), ours.outputs[n], reference.outputs[n],
                   &baseline.outputs[n]);
      differs = differs || compare(ours.outputs[n], ieee.outputs[n]).largest > 0;
    }
    for (size_t i = 0; i < ours.gradients.size(); ++i)
      if (ours.gradients[i].defined())
        expect_close(op(), F32Math::tf32, ("d_" + op().inputs[i].name).c_str(), ours.gradients[i],
                     reference.gradients[i], &baseline.gradients[i]);
  });
  EXPECT_TRUE(differs) << op().name << " multiplies as if TF32 had not been asked for";
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

TEST_P(OpCases, TheNumberOfCpuThreadsChangesNoBit) {
  const int before = cpu_threads();
  for_each_case([&](const Case& c, const Attrs& attrs, const Problem& problem) {
    for (const DType dtype : op().cpu_dtypes) {
      SCOPED_TRACE(name_of(dtype));
      const auto inputs = make_inputs(op(), problem, attrs, c.placement, dtype, Device::cpu(), kCaseSeed);
      const auto grads =
          make_gradients(op(), run_with_gradients(op(), inputs, attrs, {}).outputs, Device::cpu(), kCaseSeed);
      const auto run_on = [&](int threads) {
        set_cpu_threads(threads);
        return run_with_gradients(op(), inputs, attrs, grads);
      };
      const Results alone = run_on(1);
      expect_bitwise(op(), "3 threads", alone, run_on(3));
    }
  });
  set_cpu_threads(before);
}

/// Memory taken while it lives is poisoned and stands between guard bands.
struct Guard {
  Allocator& allocator;
  explicit Guard(Allocator& allocator) : allocator(allocator) { allocator.set_guard(4096); }
  ~Guard() { allocator.set_guard(0); }
};

/// What one case is compared with on a GPU, for all rows.
struct ExpectedOnGpu {
  std::vector<Tensor> inputs, grads;
  Results reference, baseline;
};

/// Runs the case on the row that is forced, if one is, and checks it.
void check_on_gpu(const OpSpec& op, const Attrs& attrs, const ExpectedOnGpu& expected, F32Math math,
                  Device gpu) {
  Results ours;
  {
    const Guard guard(gpu.allocator());
    ours = run_with_gradients(op, expected.inputs, attrs, expected.grads);
    if (!small_only()) {
      const Results again = run_with_gradients(op, expected.inputs, attrs, expected.grads);
      gpu.synchronize();
      expect_bitwise(op, "second run", ours, again);
    }
    gpu.synchronize();
  }
  EXPECT_NO_THROW(gpu.allocator().check_guards());
  for (size_t n = 0; n < ours.outputs.size(); ++n)
    expect_close(op, math, op.outputs[n].name.c_str(), ours.outputs[n], expected.reference.outputs[n],
                 &expected.baseline.outputs[n]);
  for (size_t i = 0; i < ours.gradients.size(); ++i)
    if (ours.gradients[i].defined())
      expect_close(op, math, ("d_" + op.inputs[i].name).c_str(), ours.gradients[i],
                   expected.reference.gradients[i], &expected.baseline.gradients[i]);

  if (small_only() || !op.captures) return;  // the same kernels again
  Results captured;
  {
    Captured step(gpu, [&] { captured = run_with_gradients(op, expected.inputs, attrs, expected.grads); });
    for (int call = 0; call < 3; ++call) step();
    gpu.synchronize();
    EXPECT_TRUE(step.is_graph());
    expect_bitwise(op, "graph replay", ours, captured);
    captured = {};
  }
}

/// Whether the operator says that this variant computes the dtype.
bool variant_takes(const OpSpec& op, int variant, DType dtype) {
  if (size_t(variant) >= op.variant_dtypes.size() || op.variant_dtypes[size_t(variant)].empty()) return true;
  const auto& dtypes = op.variant_dtypes[size_t(variant)];
  return std::find(dtypes.begin(), dtypes.end(), dtype) != dtypes.end();
}

/// What a GPU computes the operator in: its dtypes, and TF32 if it honours that.
std::vector<Precision> cuda_precisions(const OpSpec& op) {
  std::vector<Precision> precisions(op.cuda_dtypes.begin(), op.cuda_dtypes.end());
  if (op.honours_f32_math) precisions.push_back({DType::f32, F32Math::tf32});
  return precisions;
}

/// What the variants of an operator did with its cases, by variant and precision.
struct VariantTally {
  using Key = std::pair<int, std::string>;
  static Key key(int variant, Precision precision) { return {variant, name_of(precision)}; }
  std::map<Key, int> accepted;
  std::map<Key, std::string> refusal;  // the last one
  bool lacks_gpu(int variant, Precision precision) {
    return refusal[key(variant, precision)].find("compute capability") != std::string::npos;
  }
};

/// Checks one case in one precision on each of the variants; -1 is the variant that the operator chooses,
/// which must take it.
void check_variants_on_gpu(const OpSpec& op, const Case& c, Precision precision,
                           const std::vector<int>& variants, Device gpu, VariantTally& tally) {
  SCOPED_TRACE(name_of(precision));
  const DType dtype = precision.dtype;
  const F32MathScope math(precision.math);  // of the GPU and of the baseline; the oracle is in f64
  const Device cpu = Device::cpu();
  const Attrs attrs = complete(op, c.attrs);
  const Problem problem = op.problem(c.dims, attrs);
  const auto cpu_inputs = make_inputs(op, problem, attrs, c.placement, dtype, cpu, kCaseSeed);
  const auto outputs = run_with_gradients(op, cpu_inputs, attrs, {}).outputs;
  const auto cpu_grads = make_gradients(op, outputs, cpu, kCaseSeed);
  const auto with_poisoned_row_padding = [&](auto&& make) {
    const Guard guard(gpu.allocator());  // pads and gaps are NaN
    return make();
  };
  const ExpectedOnGpu expected{
      .inputs = with_poisoned_row_padding(
          [&] { return make_inputs(op, problem, attrs, c.placement, dtype, gpu, kCaseSeed); }),
      .grads = with_poisoned_row_padding([&] { return make_gradients(op, outputs, gpu, kCaseSeed); }),
      .reference = run_with_gradients(op, oracle_inputs(op, cpu_inputs, c.placement), attrs,
                                      oracle_gradients(op, cpu_grads)),
      .baseline = run_with_gradients(op, cpu_inputs, attrs, cpu_grads)};
  for (const int variant : variants) {
    if (variant < 0) {
      SCOPED_TRACE("chosen variant");
      check_on_gpu(op, attrs, expected, precision.math, gpu);
      continue;
    }
    const std::string name = "variant " + op.variants[size_t(variant)];
    SCOPED_TRACE(name);
    const ForceVariant force(op.name, op.variants[size_t(variant)]);
    try {
      check_on_gpu(op, attrs, expected, precision.math, gpu);
      ++tally.accepted[VariantTally::key(variant, precision)];
    } catch (const Error& error) {
      // The variant may refuse a problem, if it says so itself; a failed launch does not.
      tally.refusal[VariantTally::key(variant, precision)] = error.what();
      EXPECT_NE(std::string_view(error.what()).find(name), std::string_view::npos)
          << "a refusal reads \"<op>: " << name << " needs ...\", not: " << error.what();
    }
  }
}

/// Whether the variant runs the case forward.
bool accepts(const OpSpec& op, const Case& c, Precision precision, int variant, Device gpu) {
  const F32MathScope math(precision.math);
  const Attrs attrs = complete(op, c.attrs);
  const ForceVariant force(op.name, op.variants[size_t(variant)]);
  try {
    op.run(make_inputs(op, op.problem(c.dims, attrs), attrs, c.placement, precision.dtype, gpu, kCaseSeed),
           attrs);
    return true;
  } catch (const Error&) {
    return false;
  }
}

/// For variants that need more than the small cases have, the smallest of the others that they take. Each
/// part has its share of the variants and precisions.
void check_variants_without_small_cases(const OpSpec& op, Device gpu, VariantTally& tally) {
  std::vector<Case> small, larger;
  for (const Case& c : op.cases) (c.gradcheck ? small : larger).push_back(c);
  std::ranges::sort(
      larger, {}, [&](const Case& c) { return op.problem(c.dims, complete(op, c.attrs)).forward_elements; });
  int64_t number = 0;
  for (int variant = 0; variant < int(op.variants.size()); ++variant)
    for (const Precision precision : cuda_precisions(op)) {
      if (!variant_takes(op, variant, precision.dtype) || !Part::own().has(number++)) continue;
      const auto takes = [&](const Case& c) { return accepts(op, c, precision, variant, gpu); };
      if (tally.accepted[VariantTally::key(variant, precision)] > 0 || std::ranges::any_of(small, takes))
        continue;
      const auto found = std::ranges::find_if(larger, takes);
      if (found == larger.end()) continue;
      SCOPED_TRACE(case_name(op, *found));
      check_variants_on_gpu(op, *found, precision, {variant}, gpu, tally);
    }
}

TEST_P(OpCases, CudaAgreesRepeatsGuardsAndCapturesOnEveryVariant) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const Device gpu = Device::cuda(0);
  const int variants = int(op().variants.size());
  // The variant that is chosen is one of them: under a sanitizer it need not run twice.
  std::vector<int> all;
  if (!small_only() || variants == 0) all.push_back(-1);
  for (int variant = 0; variant < variants; ++variant) all.push_back(variant);
  VariantTally tally;
  for_each_case([&](const Case& c, const Attrs&, const Problem&) {
    for (const Precision precision : cuda_precisions(op()))
      check_variants_on_gpu(op(), c, precision, all, gpu, tally);
  });
  if (small_only()) check_variants_without_small_cases(op(), gpu, tally);
  if (!Part::own().whole()) return;  // which variants take a case is a question to all parts together
  for (int variant = 0; variant < variants; ++variant) {
    for (const Precision precision : cuda_precisions(op())) {
      if (tally.lacks_gpu(variant, precision)) continue;
      const int count = tally.accepted[VariantTally::key(variant, precision)];
      if (variant_takes(op(), variant, precision.dtype)) {
        EXPECT_GT(count, 0) << op().name << ": variant " << op().variants[size_t(variant)]
                            << " took no case in " << precision
                            << " (it said: " << tally.refusal[VariantTally::key(variant, precision)]
                            << "); add one, or leave the dtype out of OpSpec::variant_dtypes";
      } else {
        EXPECT_EQ(count, 0) << op().name << ": variant " << op().variants[size_t(variant)] << " took "
                            << count << " cases in " << precision
                            << ", which OpSpec::variant_dtypes leaves out";
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, OpCases, testing::Range<size_t>(0, tested_ops().size()),
                         [](const auto& info) { return tested_ops()[info.param].name; });

}  // namespace
}  // namespace tessera::ops

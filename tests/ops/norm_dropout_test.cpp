#include <gtest/gtest.h>

#include <cmath>

#include "autograd/checkpoint.h"
#include "ops/dropout/dropout.h"
#include "ops/linear/linear.h"
#include "ops/norm/norm.h"
#include "ops/pointwise/pointwise.h"
#include "ops/random/random.h"
#include "runtime/capture.h"
#include "tests/errors.h"
#include "tests/ops/expect.h"
#include "tests/ops/tensors.h"

/// Dropout of the residual in add_layernorm and add_rmsnorm, beyond the generic cases: it is ops::dropout's,
/// forward and backward, for every subset of gradients, and in a replayed graph.

namespace tessera::ops {
namespace {

/// The residual's gradient and the others, in the order of the inputs, and the results.
struct Pass {
  AddNorm results;
  std::vector<Tensor> gradients;
};

struct NormProblem {
  Shape shape;
  DType dtype = DType::f32;
  Device device = Device::cpu();
  bool centred = true, with_sum = true, with_y = true;
  bool wants_x = true, wants_residual = true;
};

constexpr double kHalf = 0.5;  // times 2 nothing is rounded, so parts and whole agree

/// But for the smallest numbers of f16, which are rounded before they are doubled or after.
void expect_same_gradient(const Tensor& a, const Tensor& b, const char* what) {
  if (a.dtype() != DType::f16) return expect_same(a, b, what);
  const auto u = a.to_vector<double>(), v = b.to_vector<double>();
  ASSERT_EQ(u.size(), v.size()) << what;
  for (size_t i = 0; i < u.size(); ++i) EXPECT_NEAR(u[i], v[i], 0x1p-24) << what << " " << i;
}

/// One pass forward and backward, with dropout inside the norm or ahead of it.
Pass run_norm(const NormProblem& of, bool inside) {
  const int64_t width = of.shape[of.shape.rank() - 1];
  std::vector<Tensor> leaves{
      normal_on(of.device, of.shape, of.dtype, 1), normal_on(of.device, of.shape, of.dtype, 2),
      normal_on(of.device, {width}, of.dtype, 3), normal_on(of.device, {width}, of.dtype, 4)};
  const bool wanted[] = {of.wants_x, of.wants_residual, true, of.centred};
  for (size_t i = 0; i < 4; ++i)
    if (wanted[i]) require_grad(leaves[i]);
  Rng rng(11);
  rng.reserve(of.device);  // so that the stream is number 1
  Tape tape;
  const Tensor added = inside ? leaves[1] : dropout(leaves[1], kHalf, rng);
  const ResidualDropout drop = inside ? ResidualDropout{kHalf, rng} : ResidualDropout{};
  Pass pass;
  pass.results = of.centred ? add_layernorm(leaves[0], added, leaves[2], leaves[3], 1e-5, drop)
                            : add_rmsnorm(leaves[0], added, leaves[2], 1e-6, drop);
  std::vector<Tensor> results, grads;
  if (of.with_sum)
    results.push_back(pass.results.sum), grads.push_back(normal_on(of.device, of.shape, of.dtype, 5));
  if (of.with_y)
    results.push_back(pass.results.y), grads.push_back(normal_on(of.device, of.shape, of.dtype, 6));
  tape.backward(results, grads);
  for (size_t i = 0; i < 4; ++i) pass.gradients.push_back(wanted[i] ? grad(leaves[i]) : Tensor());
  return pass;
}

void expect_parts_and_whole_agree(const NormProblem& of) {
  const Pass parts = run_norm(of, false), whole = run_norm(of, true);
  expect_same(whole.results.sum, parts.results.sum, "sum");
  expect_same(whole.results.y, parts.results.y, "y");
  const char* const names[] = {"dx", "dresidual", "dweight", "dbias"};
  for (size_t i = 0; i < 4; ++i) {
    ASSERT_EQ(whole.gradients[i].defined(), parts.gradients[i].defined()) << names[i];
    if (whole.gradients[i].defined()) expect_same_gradient(whole.gradients[i], parts.gradients[i], names[i]);
  }
}

TEST(NormDropout, IsDropoutAheadOfTheNorm) {
  // Every way in which the kernels hold rows, whose elements begin anywhere in a Philox block.
  for (const Device device : devices())
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
      for (const int64_t width : {1, 5, 200, 512, 700, 768, 1024, 1021, 1500, 4096, 4100, 9000, 9003})
        for (const bool centred : {true, false})
          expect_parts_and_whole_agree(
              {.shape = {7, width}, .dtype = dtype, .device = device, .centred = centred});
}

TEST(NormDropout, LeadingDimensionsCountInRowMajorOrder) {
  for (const Device device : devices()) expect_parts_and_whole_agree({.shape = {3, 5, 18}, .device = device});
}

TEST(NormDropout, AnyGradientMayBeAbsent) {
  for (const Device device : devices())
    for (int absent = 0; absent < 16; ++absent) {
      const NormProblem of{.shape = {7, 12},
                           .device = device,
                           .with_sum = !(absent & 1),
                           .with_y = !(absent & 2),
                           .wants_x = !(absent & 4),
                           .wants_residual = !(absent & 8)};
      SCOPED_TRACE(absent);
      if (of.with_sum || of.with_y) expect_parts_and_whole_agree(of);
    }
}

TEST(NormDropout, KeepsTheShareAndScalesIt) {
  constexpr double kP = 0.1;
  for (const Device device : devices()) {
    const Tensor zeros = Tensor::zeros({1000, 768}, DType::f32, device),
                 ones = Tensor::full({1000, 768}, 1, DType::f32, device);
    Rng rng(5);
    double kept = 0;
    for (const float value : add_rmsnorm(zeros, ones, {}, 1e-6, {kP, rng}).sum.to_vector<float>()) {
      EXPECT_TRUE(value == 0 || value == float(1 / (1 - kP)));
      kept += value != 0;
    }
    // Five standard deviations of the binomial distribution.
    EXPECT_NEAR(kept, 768000 * (1 - kP), 5 * std::sqrt(768000 * kP * (1 - kP)));
  }
}

TEST(NormDropout, ZeroDrawsNothing) {
  Rng rng(4);
  const Tensor x = normal_on(Device::cpu(), {3, 8}, DType::f32, 1);
  expect_same(add_layernorm(x, x, {}, {}, 1e-5, {0, rng}).y, add_layernorm(x, x).y, "y");
  EXPECT_EQ(rng.state().offset, 0u);
  add_layernorm(x, x, {}, {}, 1e-5, {0.1, rng});
  EXPECT_EQ(rng.state().offset, 1u);
}

TEST(NormDropout, ARecomputedFunctionSeesTheSameMask) {
  Tensor x = normal_on(Device::cpu(), {5, 24}, DType::f32, 1);
  require_grad(x);
  const Tensor dy = normal_on(Device::cpu(), {5, 24}, DType::f32, 2);
  const auto gradient = [&](auto&& body) {
    zero_grad(x);
    Rng rng(2);
    Tape tape;
    const Tensor y = body(rng);
    dropout(x, kHalf, rng);  // another stream between forward and backward
    tape.backward(std::vector{y}, std::vector{dy});
    return grad(x).to_vector<float>();
  };
  const auto norm = [](const Tensor& v, Rng& rng) {
    return add_layernorm(v, v, {}, {}, 1e-5, {kHalf, rng}).y;
  };
  const auto plain = gradient([&](Rng& rng) { return norm(x, rng); });
  const auto again =
      gradient([&](Rng& rng) { return checkpoint([&](const Tensor& v) { return norm(v, rng); }, x); });
  EXPECT_EQ(again, plain);
}

TEST(NormDropout, AGraphDrawsTheMasksThatEagerCallsDraw) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const Device gpu = Device::cuda(0);
  const Tensor x = normal_on(gpu, {33, 768}, DType::bf16, 1), dy = normal_on(gpu, {33, 768}, DType::bf16, 2);
  Tensor in_graph = normal_on(gpu, {33, 768}, DType::bf16, 3), eager = in_graph.clone();
  require_grad(in_graph), require_grad(eager);
  Rng graph_rng(6), eager_rng(6);
  const auto step = [&](Tensor& residual, Rng& rng) {
    Tape tape;
    const Tensor y = add_layernorm(x, residual, {}, {}, 1e-5, {0.3, rng}).y;
    zero_grad(residual);
    tape.backward(std::vector{y}, std::vector{dy});
    return y.detach();
  };
  Tensor y;  // of the graph
  Captured captured(gpu, [&] { y = step(in_graph, graph_rng); });
  std::vector<float> before;
  for (int call = 0; call < 5; ++call) {
    captured();
    const auto from_graph = y.to_vector<float>();
    EXPECT_EQ(from_graph, step(eager, eager_rng).to_vector<float>()) << call;
    EXPECT_EQ(grad(in_graph).to_vector<float>(), grad(eager).to_vector<float>()) << call;
    EXPECT_NE(from_graph, before) << call;
    before = from_graph;
  }
  EXPECT_TRUE(captured.is_graph());
}

/// The gradient of the bias of a linear layer that makes the residual, next to the sums over the rows of the
/// gradient of its result as that is stored.
void expect_bias_gradient_is_sum(const NormProblem& of, bool into_buffer) {
  const int64_t width = of.shape[1];
  Tensor hidden = normal_on(of.device, {of.shape[0], 16}, of.dtype, 1),
         weight = normal_on(of.device, {width, 16}, of.dtype, 2),
         bias = normal_on(of.device, {width}, of.dtype, 3), x = normal_on(of.device, of.shape, of.dtype, 4);
  const Tensor scale = normal_on(of.device, {width}, of.dtype, 5),
               shift = normal_on(of.device, {width}, of.dtype, 6);
  const DType wide = of.dtype == DType::f64 ? DType::f64 : DType::f32;
  require_grad(x), require_grad(weight, wide), require_grad(bias, wide);
  if (into_buffer) set_grad_buffer(bias, Tensor::empty_packed({width}, wide, of.device));
  Rng rng(11);
  Tape tape;
  const Tensor residual = linear(hidden, weight, bias);
  retain_grad(residual);
  const auto [sum, y] = add_layernorm(x, residual, scale, shift, 1e-5, {0.25, rng});
  std::vector<Tensor> results{y}, grads{normal_on(of.device, of.shape, of.dtype, 7)};
  if (of.with_sum) results.push_back(sum), grads.push_back(normal_on(of.device, of.shape, of.dtype, 8));
  tape.backward(results, grads);
  const auto dy = grad(residual).to_vector<double>(), dbias = grad(bias).to_vector<double>();
  for (int64_t c = 0; c < width; ++c) {
    double expected = 0, magnitude = 0;
    for (int64_t row = 0; row < of.shape[0]; ++row) {
      const double value = dy[size_t(row * width + c)];
      expected += value, magnitude += std::abs(value);
    }
    ASSERT_NEAR(dbias[size_t(c)], expected, 1e-6 * magnitude + 1e-30) << "column " << c << " of " << width;
  }
}

TEST(NormDropout, SumsTheResidualsGradientForTheBiasOfTheLayerThatMadeIt) {
  for (const Device device : devices())
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
      for (const int64_t width : {5, 8, 200, 512, 700, 768, 1021, 1024, 1500})
        for (const int64_t rows : {1, 7, 3000})
          for (const bool flag : {false, true}) {
            SCOPED_TRACE(text_of(device.name(), " ", dtype, " ", rows, " x ", width, " ", flag));
            if (rows == 3000 && (device.is_cpu() || width < 512)) continue;
            expect_bias_gradient_is_sum(
                {.shape = {rows, width}, .dtype = dtype, .device = device, .with_sum = flag}, flag);
          }
}

TEST(NormDropout, ErrorsNameWhatIsWrong) {
  const Tensor x = Tensor::zeros({2, 3}, DType::f32, Device::cpu());
  Rng rng(1);
  EXPECT_EQ(message_of([&] {
              add_layernorm(x, x, {}, {}, 1e-5, {1, rng});
            }),
            "add_layernorm: dropout is 1; expected 0 <= p < 1");
  EXPECT_EQ(message_of([&] {
              add_rmsnorm(x, x, {}, 1e-6, {-0.5, rng});
            }),
            "add_rmsnorm: dropout is -0.5; expected 0 <= p < 1");
  EXPECT_THROW(add_rmsnorm(x, x, {}, 1e-6, {std::nan(""), rng}), Error);
  EXPECT_EQ(message_of([&] {
              add_layernorm(x, x, {}, {}, 1e-5, {0.1, {}});
            }),
            "add_layernorm: dropout needs a source of random numbers (rng)");
}

TEST(NormDropout, KeepsNaNOfTheResidual) {
  // Dropped or not, in the sum and in the gradient of the residual.
  for (const Device device : devices())
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const int64_t width : {5, 200, 700, 1500, 9000}) {
        const Tensor x = normal_on(device, {3, width}, dtype, 1);
        const Tensor broken = Tensor::full({3, width}, std::nan(""), dtype, device);
        for (const bool centred : {true, false}) {
          const auto norm = [&](const Tensor& residual) {
            Rng rng(4);
            const ResidualDropout dropout{.p = 0.9, .rng = rng};
            return centred ? add_layernorm(x, residual, {}, {}, 1e-5, dropout)
                           : add_rmsnorm(x, residual, {}, 1e-6, dropout);
          };
          for (const double value : norm(broken).sum.to_vector<double>())
            EXPECT_TRUE(std::isnan(value)) << device.name() << " " << dtype << " " << width;
          const Tensor dresidual = gradient_of(normal_on(device, {3, width}, dtype, 2), broken,
                                               [&](const Tensor& residual) { return norm(residual).sum; });
          for (const double value : dresidual.to_vector<double>())
            EXPECT_TRUE(std::isnan(value)) << device.name() << " " << dtype << " " << width;
        }
      }
}

}  // namespace
}  // namespace tessera::ops

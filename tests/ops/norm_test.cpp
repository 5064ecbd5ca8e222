#include "ops/norm/norm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/pointwise/pointwise.h"
#include "ops/random/random.h"
#include "tests/errors.h"
#include "tests/ops/expect.h"
#include "tests/ops/tensors.h"

namespace tessera::ops {
namespace {

TEST(Norm, LayernormWorkedByHand) {
  // Mean 2.5, variance (2.25 + 0.25 + 0.25 + 2.25) / 4 = 1.25; eps makes it 4, so rstd is 1/2.
  const Tensor x = Tensor::from(std::vector<double>{1, 2, 3, 4}, {1, 4});
  const Tensor weight = Tensor::from(std::vector<double>{1, 2, -1, 4}, {4});
  const Tensor bias = Tensor::from(std::vector<double>{0, 1, 0, -1}, {4});
  EXPECT_EQ(layernorm(x, {}, {}, 2.75).to_vector<double>(), (std::vector<double>{-0.75, -0.25, 0.25, 0.75}));
  EXPECT_EQ(layernorm(x, weight, {}, 2.75).to_vector<double>(), (std::vector<double>{-0.75, -0.5, -0.25, 3}));
  EXPECT_EQ(layernorm(x, {}, bias, 2.75).to_vector<double>(),
            (std::vector<double>{-0.75, 0.75, 0.25, -0.25}));
  EXPECT_EQ(layernorm(x, weight, bias, 2.75).to_vector<double>(),
            (std::vector<double>{-0.75, 0.5, -0.25, 2}));
  // dy = (1, 0, 0, 0), w = 1: mean(g) = 1/4, mean(g xhat) = -3/16; dx = (g - 1/4 + 3/16 xhat) / 2.
  const Tensor dy = Tensor::from(std::vector<double>{1, 0, 0, 0}, {1, 4});
  const auto dx = gradient_of(x, dy, [](const Tensor& in) { return layernorm(in, {}, {}, 2.75); });
  EXPECT_EQ(dx.to_vector<double>(), (std::vector<double>{0.3046875, -0.1484375, -0.1015625, -0.0546875}));
}

TEST(Norm, RmsnormWorkedByHand) {
  // mean(x^2) = (4 + 16 + 4 + 8) / 4 = 8; eps makes it 16, so rstd is 1/4.
  const Tensor x = Tensor::from(std::vector<double>{2, -4, 2, std::sqrt(8)}, {1, 4});
  const Tensor weight = Tensor::from(std::vector<double>{1, 3, -1, 0}, {4});
  const auto y = rmsnorm(x, weight, 8).to_vector<double>();
  const double expected[] = {0.5, -3, -0.5, 0};
  for (size_t i = 0; i < 4; ++i) EXPECT_DOUBLE_EQ(y[i], expected[i]);
  // dy = (1, 0, 0, 0), w = 1: mean(g xhat) = 1/8; dx = (g - xhat / 8) / 4.
  const Tensor dy = Tensor::from(std::vector<double>{1, 0, 0, 0}, {1, 4});
  const auto dx = gradient_of(x, dy, [](const Tensor& in) { return rmsnorm(in, {}, 8); }).to_vector<double>();
  const double slope[] = {(1 - 0.5 / 8) / 4, 1.0 / 32, -0.5 / 32, -std::sqrt(8) / 4 / 32};
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(dx[i], slope[i], 1e-16);  // half an ulp of 1/4, a few times
}

TEST(Norm, ParameterGradientsAddOverTheRows) {
  for (const Device device : devices()) {
    const Tensor x = Tensor::from(std::vector<float>{1, 3, 5, 1, 2, 2}, {3, 2}, device);
    const Tensor ones = Tensor::full({3, 2}, 1.0, DType::f32, device);
    const Tensor weight = Tensor::full({2}, 1.0, DType::f32, device),
                 bias = Tensor::zeros({2}, DType::f32, device);
    // Variances 1, 4, 0; eps 0 would divide by zero in the last row: 12 makes rstd (13, 16, 12)^-1/2.
    const auto dbias = gradient_of(bias, ones, [&](const Tensor& b) { return layernorm(x, weight, b, 12); });
    EXPECT_EQ(dbias.to_vector<float>(), (std::vector<float>{3, 3}));
    const auto dweight =
        gradient_of(weight, ones, [&](const Tensor& w) { return layernorm(x, w, bias, 12); });
    const float expected = float(-1 / std::sqrt(13.0) + 2 / 4.0);
    EXPECT_NEAR(dweight.to_vector<float>()[0], expected, 2 * epsilon(DType::f32));  // of terms below 1
    EXPECT_NEAR(dweight.to_vector<float>()[1], -expected, 2 * epsilon(DType::f32));
  }
}

TEST(Norm, NoRowsGiveZeroParameterGradients) {
  for (const Device device : devices()) {
    const Tensor x = Tensor::empty({0, 3}, DType::f32, device);
    const Tensor weight = Tensor::full({3}, 1.0, DType::f32, device);
    const Tensor dweight = gradient_of(weight, x, [&](const Tensor& w) { return rmsnorm(x, w); });
    EXPECT_EQ(dweight.to_vector<float>(), (std::vector<float>{0, 0, 0}));
  }
}

TEST(NormCuda, ParameterGradientsAtTheEndOfAPassHaveTheSameBits) {
  // Leaves with f32 buffers, as an optimizer makes them, wait for the end of the pass; a hook makes them be
  // finished at once. More norms than one launch takes, of several widths, and enough that some are finished
  // early.
  if (Device::cuda_count() == 0) GTEST_SKIP() << "needs a GPU";
  const Device gpu = Device::cuda(0);
  const auto run = [&](bool hooked) {
    Rng rng(3);
    std::vector<Tensor> leaves;
    int arrived = 0;
    const auto leaf = [&](int64_t width) {
      Tensor values = Tensor::empty({width}, DType::f32, Device::cpu());
      fill_normal(values, 0, 1, rng);
      Tensor made = values.to(DType::bf16).to(gpu);
      require_grad(made, DType::f32);
      set_grad_buffer(made, Tensor::full({width}, 77, DType::f32, gpu));
      if (hooked) on_grad(made, [&arrived](const Tensor&) { arrived += 1; });
      return leaves.emplace_back(made);
    };
    Tape tape;
    std::vector<Tensor> results, grads;
    for (const int64_t width : {8, 768, 4096, 12000}) {
      const Tensor values = Tensor::empty({600, width}, DType::f32, Device::cpu());
      fill_normal(values, 0, 1, rng);
      const Tensor x = values.to(DType::bf16).to(gpu);
      for (int layer = 0; layer < 30; ++layer) {
        const Tensor weight = leaf(width);
        results.push_back(layer % 2 ? rmsnorm(x, weight) : layernorm(x, weight, leaf(width)));
        grads.push_back(x);
      }
    }
    tape.backward(results, grads);
    std::vector<std::vector<float>> gradients;
    for (const Tensor& one : leaves) gradients.push_back(grad(one).to_vector<float>());
    EXPECT_EQ(arrived, hooked ? int(leaves.size()) : 0);
    return gradients;
  };
  const auto waited = run(false), at_once = run(true);
  ASSERT_EQ(waited.size(), at_once.size());
  for (size_t i = 0; i < waited.size(); ++i) EXPECT_EQ(waited[i], at_once[i]) << "leaf " << i;
}

TEST(Norm, ALargeMeanCostsNoDigits) {
  // The squares of 10000 leave no room in f32 for a variance of 1.25: the mean must be taken off first.
  for (const Device device : devices()) {
    for (const int64_t width : {4, 1500, 9000}) {
      std::vector<float> values(static_cast<size_t>(width)), shifted(static_cast<size_t>(width));
      for (size_t i = 0; i < values.size(); ++i) values[i] = float(i % 4), shifted[i] = 10000 + float(i % 4);
      const auto plain = layernorm(Tensor::from(values, {1, width}, device)).to_vector<float>();
      const auto moved = layernorm(Tensor::from(shifted, {1, width}, device)).to_vector<float>();
      // The mean itself is rounded at 10000: half an ulp is 2^-11 of a deviation of about 1, a little more
      // for the rounding of a long sum.
      for (size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(plain[i], moved[i], 4.0 / 2048);
    }
  }
}

TEST(Norm, EqualRowsGiveTheBias) {
  for (const Device device : devices()) {
    const Tensor x = Tensor::full({2, 8}, 3.0, DType::f32, device);
    const Tensor bias = Tensor::full({8}, 0.25, DType::f32, device);
    for (const float value : layernorm(x, {}, bias).to_vector<float>()) EXPECT_EQ(value, 0.25f);
    const Tensor zeros = Tensor::zeros({2, 8}, DType::f32, device);
    for (const float value : rmsnorm(zeros).to_vector<float>()) EXPECT_EQ(value, 0.0f);
  }
}

TEST(Norm, ARowOfEqualElementsGivesTheBiasExactly) {
  // The mean of equal elements is the element, so y is the bias and rstd 1 / sqrt(eps), in every kernel and
  // ragged width. An f32 sum rounds (4,096.1 times 1,365 needs 35 bits): its mean is off by an ulp or two,
  // 1e-3, which 1 / sqrt(eps) = 316 would make 0.3.
  for (const Device device : devices())
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
      for (const int64_t width :
           {1, 3, 7, 8, 200, 512, 700, 768, 1024, 1365, 1500, 2048, 4096, 4100, 8192, 9000, 20001})
        for (const double value : {0.1, -4096.1, 60001.0}) {
          const Tensor x = Tensor::full({5, width}, value, dtype, device);
          const Tensor bias = Tensor::full({width}, 0.25, dtype, device);
          const Tensor zeros = Tensor::zeros({5, width}, dtype, device);
          const auto expect = [&](const Tensor& y, const char* what) {
            const auto values = y.to_vector<float>();
            const auto wrong = std::ranges::find_if(values, [](float each) { return each != 0.25f; });
            EXPECT_EQ(wrong, values.end()) << what << " " << describe(x) << " of " << value << ": " << *wrong;
          };
          expect(layernorm(x, {}, bias), "layernorm");
          expect(add_layernorm(x, zeros, {}, bias).y, "add_layernorm");
          expect(add_layernorm(zeros, x, {}, bias).y, "add_layernorm of the residual");
          // xhat is 0, so dx = (dy - mean(dy)) / sqrt(eps), in powers of 2 exactly.
          const Tensor dy = Tensor::zeros({5, width}, dtype, device);
          dy.slice(1, 0, 1).fill(1);
          const auto dx = gradient_of(x, dy, [](const Tensor& in) {
                            return layernorm(in, {}, {}, 0x1p-16);
                          }).to_vector<float>();
          const double share = 1 / double(width);
          for (size_t i = 0; i < dx.size(); ++i)
            EXPECT_NEAR(dx[i], 256 * ((int64_t(i) % width == 0 ? 1 : 0) - share), 256 * epsilon(dtype))
                << describe(x) << " " << i;
        }
}

TEST(Norm, ANearlyEqualRowKeepsItsVariance) {
  // One element differs by one ulp of 4,096, 2^-11: the variance 2^-22 (1 - 1/n) / n is far below the error
  // of a mean that is off by an ulp, so the second sum alone could not give it.
  for (const Device device : devices())
    for (const int64_t width : {500, 512, 1024, 2048, 9000}) {
      std::vector<float> values(size_t(width), 4096.0f);
      values[3] = 4096.0f + 0x1p-11f;
      const double n = double(width);
      const auto y = layernorm(Tensor::from(values, {1, width}, device), {}, {}, 0).to_vector<float>();
      // The squares are about the mean or about its f32, 4,096: 1 / n of them, 2e-3 at most, which a root
      // halves.
      const double rstd = 1 / std::sqrt(0x1p-22 / n * (1 - 1 / n));
      EXPECT_NEAR((double(y[3]) - y[0]) / (0x1p-11 * rstd), 1, 2e-3) << device.name() << " " << width;
    }
}

TEST(Norm, ANaNStaysInItsRow) {
  for (const Device device : devices()) {
    for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
      const Tensor x = Tensor::full({3, 5}, 1.0, DType::f32, device);
      x.slice(1, 0, 1).copy_from(Tensor::full({3, 1}, 2.0, DType::f32, device));
      const Tensor element = x.slice(0, 1, 2).slice(1, 2, 3);
      element.fill(bad);
      for (const bool centred : {true, false}) {
        const auto y = (centred ? layernorm(x) : rmsnorm(x)).to_vector<float>();
        for (const size_t i : {0, 1, 2, 3, 4, 10, 11, 12, 13, 14}) EXPECT_TRUE(std::isfinite(y[i])) << i;
        EXPECT_TRUE(std::isnan(y[7]));
      }
    }
  }
}

TEST(Norm, TheGradientMayHaveAnyLayout) {
  for (const Device device : devices()) {
    const Tensor x = Tensor::from(std::vector<float>{1, 2, 3, 4, 5, 7, 6, 8, 9, 0, 1, 1}, {3, 4}, device);
    const Tensor weight = Tensor::from(std::vector<float>{1, -1, 2, 3}, {4}, device);
    const Tensor rows = Tensor::from(std::vector<float>{1, -2, 3, 0.5f}, {1, 4}, device).expand({3, 4});
    const auto of_x = [&](const Tensor& in) { return layernorm(in, weight); };
    const auto of_weight = [&](const Tensor& in) { return layernorm(x, in); };
    const auto dx = gradient_of(x, rows.clone(), of_x).to_vector<float>();
    const auto dweight = gradient_of(weight, rows.clone(), of_weight).to_vector<float>();
    for (const Tensor& dy : {rows, transposed_copy(rows)}) {
      EXPECT_EQ(gradient_of(x, dy, of_x).to_vector<float>(), dx);
      EXPECT_EQ(gradient_of(weight, dy, of_weight).to_vector<float>(), dweight);
    }
  }
}

TEST(Norm, ErrorsNameWhatIsWrong) {
  const Tensor x = Tensor::zeros({2, 3}, DType::f32, Device::cpu());
  const auto vector = [](int64_t size, DType dtype) { return Tensor::zeros({size}, dtype, Device::cpu()); };
  EXPECT_EQ(message_of([] { rmsnorm(Tensor()); }), "rmsnorm: x is undefined");
  EXPECT_EQ(message_of([] { layernorm(Tensor::zeros({}, DType::f32, Device::cpu())); }),
            "layernorm: x is f32[] on cpu, of rank 0; expected [..., C]");
  EXPECT_EQ(message_of([&] { layernorm(x, vector(2, DType::f32)); }),
            "layernorm: weight is f32[2] on cpu; expected [3], the last dimension of x [2, 3]");
  EXPECT_EQ(message_of([&] { layernorm(x, {}, x); }),
            "layernorm: bias is f32[2, 3] on cpu; expected [3], the last dimension of x [2, 3]");
  EXPECT_EQ(
      message_of([&] { rmsnorm(x, vector(3, DType::bf16)); }),
      "rmsnorm: weight is bf16[3] on cpu, but x is f32[2, 3] on cpu; convert one of them (ops::cast) or "
      "move it");
  EXPECT_EQ(message_of([&] { rmsnorm(x, {}, -1); }), "rmsnorm: eps is -1; expected 0 or more");
  EXPECT_EQ(message_of([] {
              layernorm(Tensor::zeros({2, 3}, DType::i64, Device::cpu()));
            }),
            "layernorm: dtype i64 is not supported; expected f64, f32, bf16 or f16");
}

/// Every combination of widths that the kernels tell apart, of 16-bit and 32-bit elements.
constexpr int64_t kWidths[] = {1, 5, 200, 512, 700, 1024, 1500, 4096, 4100, 9000};

TEST(Norm, AddNormIsAddAndNorm) {
  for (const Device device : devices()) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const int64_t width : kWidths) {
        const Shape shape{5, width};
        const Tensor x = normal_on(device, shape, dtype, 1), residual = normal_on(device, shape, dtype, 2),
                     weight = normal_on(device, {width}, dtype, 3),
                     bias = normal_on(device, {width}, dtype, 4);
        const Tensor sum = add(x, residual);
        const AddNorm centred = add_layernorm(x, residual, weight, bias),
                      plain = add_rmsnorm(x, residual, weight);
        expect_same(centred.sum, sum, "sum");
        expect_same(plain.sum, sum, "sum");
        expect_same(centred.y, layernorm(sum, weight, bias), "layernorm");
        expect_same(plain.y, rmsnorm(sum, weight), "rmsnorm");
      }
    }
  }
}

/// Gradients of x, residual, weight and bias of add_layernorm for those gradients of sum and y that are
/// defined.
std::vector<Tensor> add_norm_gradients(const Tensor& dsum, const Tensor& dy) {
  const Device device = dsum.defined() ? dsum.device() : dy.device();
  std::vector<Tensor> leaves{normal_on(device, {7, 12}, DType::f32, 1),
                             normal_on(device, {7, 12}, DType::f32, 2),
                             normal_on(device, {12}, DType::f32, 3), normal_on(device, {12}, DType::f32, 4)};
  for (Tensor& leaf : leaves) require_grad(leaf);
  Tape tape;
  const AddNorm both = add_layernorm(leaves[0], leaves[1], leaves[2], leaves[3]);
  std::vector<Tensor> results, grads;
  if (dsum.defined()) results.push_back(both.sum), grads.push_back(dsum);
  if (dy.defined()) results.push_back(both.y), grads.push_back(dy);
  tape.backward(results, grads);
  for (Tensor& leaf : leaves) leaf = grad(leaf);
  return leaves;
}

TEST(Norm, EitherGradientOfAddNormMayBeAbsent) {
  for (const Device device : devices()) {
    const Tensor dsum = normal_on(device, {7, 12}, DType::f32, 5),
                 dy = normal_on(device, {7, 12}, DType::f32, 6);
    const auto of_sum = add_norm_gradients(dsum, {}), of_y = add_norm_gradients({}, dy),
               of_both = add_norm_gradients(dsum, dy);
    expect_same(of_sum[0], dsum, "dx of sum alone");
    expect_same(of_sum[1], dsum, "dresidual of sum alone");
    EXPECT_FALSE(of_sum[2].defined());
    EXPECT_FALSE(of_sum[3].defined());
    for (const auto* gradients : {&of_y, &of_both})
      expect_same((*gradients)[0], (*gradients)[1], "dx, dresidual");
    for (const size_t parameter : {2, 3}) expect_same(of_both[parameter], of_y[parameter], "parameter");
    // f32, added where the kernel rounds once: at most an ulp of the largest next to adding afterwards.
    const auto sum = add(of_y[0], dsum).to_vector<float>(), once = of_both[0].to_vector<float>();
    for (size_t i = 0; i < sum.size(); ++i) EXPECT_NEAR(once[i], sum[i], 8 * epsilon(DType::f32)) << i;
  }
}

TEST(Norm, AnyAlignmentGivesTheSame) {
  for (const Device device : devices()) {
    for (const int64_t width : kWidths) {
      const Tensor wide = normal_on(device, {6, width + 1}, DType::bf16, 1);
      const Tensor dy = normal_on(device, {6, width}, DType::bf16, 2),
                   weight = normal_on(device, {width}, DType::bf16, 3);
      const Tensor off = wide.slice(1, 1, width + 1), whole = off.clone();  // two bytes off, and aligned
      // The sums have another order, and what is rounded to 8 bits may go either way.
      const auto close = [&](const Tensor& a, const Tensor& b, double step, const char* what) {
        const auto u = a.to_vector<double>(), v = b.to_vector<double>();
        for (size_t i = 0; i < u.size(); ++i)
          EXPECT_NEAR(u[i], v[i], step * std::max(1.0, std::abs(v[i]))) << what;
      };
      close(layernorm(off, weight, weight), layernorm(whole, weight, weight), epsilon(DType::bf16), "y");
      const auto of_x = [&](const Tensor& in) { return layernorm(in, weight); };
      close(gradient_of(off, dy, of_x), gradient_of(whole, dy, of_x), 2 * epsilon(DType::bf16), "dx");
      const auto slope = [&](const Tensor& x) {
        Tensor leaf = weight;
        require_grad(leaf, DType::f32);
        return gradient_of(leaf, dy, [&](const Tensor& w) { return layernorm(x, w); });
      };
      close(slope(off), slope(whole), 2 * epsilon(DType::bf16), "dweight");
    }
  }
}

TEST(Norm, ParameterGradientsGoIntoTheLeafsBuffer) {
  for (const Device device : devices()) {
    const Tensor x = normal_on(device, {9, 12}, DType::f32, 1),
                 dy = normal_on(device, {9, 12}, DType::f32, 2);
    Tensor weight = normal_on(device, {12}, DType::f32, 3), bias = normal_on(device, {12}, DType::f32, 4);
    const Tensor dweight = gradient_of(weight, dy, [&](const Tensor&w) { return layernorm(x, w, bias); }),
                 dbias = gradient_of(bias, dy, [&](const Tensor&b) { return layernorm(x, weight, b); });
    const Tensor arena = Tensor::full({24}, std::nan(""), DType::f32, device);
    const Tensor places[] = {arena.slice(0, 0, 12), arena.slice(0, 12, 24)};
    require_grad(weight), require_grad(bias);
    set_grad_buffer(weight, places[0]), set_grad_buffer(bias, places[1]);
    const auto pass = [&](const Tensor& w, const Tensor& b) {
      Tape tape;
      const std::vector<Tensor> results{layernorm(x, w, b)}, grads{dy};
      tape.backward(results, grads);
    };
    pass(weight, bias);
    expect_same(places[0], dweight, "dweight");
    expect_same(places[1], dbias, "dbias");
    pass(weight, bias);  // not stale now: added
    expect_same(places[0], scale(dweight, 2), "twice dweight");
    expect_same(places[1], scale(dbias, 2), "twice dbias");
    zero_grad(weight);
    const Tensor dboth =
        add(gradient_of(weight.detach(), dy, [&](const Tensor& w) { return layernorm(x, w, w.detach()); }),
            dbias);
    pass(weight, weight);
    expect_same(places[0], dboth, "one leaf as both");
  }
}

TEST(Norm, AddNormErrorsNameWhatIsWrong) {
  const Tensor x = Tensor::zeros({2, 3}, DType::f32, Device::cpu());
  EXPECT_EQ(message_of([&] { add_layernorm(x, Tensor()); }), "add_layernorm: residual is undefined");
  EXPECT_EQ(message_of([&] {
              add_rmsnorm(x, Tensor::zeros({1, 3}, DType::f32, Device::cpu()));
            }),
            "add_rmsnorm: residual is f32[1, 3] on cpu, but x is f32[2, 3] on cpu; they must agree");
  EXPECT_EQ(message_of([&] { add_rmsnorm(x, x.to(DType::bf16)); }),
            "add_rmsnorm: residual is bf16[2, 3] on cpu, but x is f32[2, 3] on cpu; they must agree");
  EXPECT_EQ(message_of([&] { add_layernorm(x, x, {}, x); }),
            "add_layernorm: bias is f32[2, 3] on cpu; expected [3], the last dimension of x [2, 3]");
}

TEST(Norm, LongSumsAreDoubleOnTheCpu) {
  // Added in f32, a million equal terms that are no powers of two are off by more than 1e-4.
  constexpr int64_t kLength = 1'000'000;
  const Tensor row = Tensor::full({1, kLength}, 0.1, DType::f32, Device::cpu());
  EXPECT_NEAR(rmsnorm(row, {}, 0).slice(1, 0, 1).item(), 1, 1e-6);  // a few ulp of f32
  const Tensor x = Tensor::full({kLength, 1}, 0.1, DType::f32, Device::cpu()),
               one = Tensor::full({1}, 1, DType::f32, Device::cpu());
  const Tensor dweight = gradient_of(one, x, [&](const Tensor& weight) { return rmsnorm(x, weight, 0); });
  EXPECT_NEAR(dweight.item() / (double(kLength) * double(0.1f)), 1, 1e-6);
  const Tensor dbias = gradient_of(one, x, [&](const Tensor& bias) { return layernorm(x, {}, bias); });
  EXPECT_NEAR(dbias.item() / (double(kLength) * double(0.1f)), 1, 1e-6);
}

}  // namespace
}  // namespace tessera::ops

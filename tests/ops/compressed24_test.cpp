#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "autograd/tape.h"
#include "ops/linear/linear_activation.h"
#include "ops/mlp/hidden_gradient24.h"
#include "ops/mlp/linear_activation24.h"
#include "ops/mlp/linear_activation24_kernels.h"
#include "ops/mlp/mlp_sparse24.h"
#include "ops/mlp/move_columns.h"
#include "ops/variant.h"
#include "tests/errors.h"
#include "tests/ops/expect.h"
#include "tests/ops/tensors.h"

/// hidden_gradient24 and linear_activation24 compared with their definitions, and on a GPU each variant with
/// the others to the bit.

namespace tessera::ops {
namespace {

/// Activations: relu of normal numbers, some two thirds of them 0.
Tensor activations(const Shape& shape, uint64_t seed, DType dtype) {
  const Tensor x = normal(shape, seed, DType::f64, -0.5);
  std::vector<double> values = x.to_vector<double>();
  for (double& value : values) value = std::max(value, 0.0);
  return Tensor::from(values, shape).to(dtype);
}

/// Bits, but for those of NaNs, whose sign and payload differ between CPUs and GPUs.
bool same_numbers(const Tensor& a, const Tensor& b) {
  const auto x = a.to(Device::cpu()).to_vector<double>(), y = b.to(Device::cpu()).to_vector<double>();
  return a.shape() == b.shape() && std::equal(x.begin(), x.end(), y.begin(), [](double l, double r) {
           return l == r ? std::signbit(l) == std::signbit(r) : std::isnan(l) && std::isnan(r);
         });
}
void expect_same_sparse24(const Sparse24& a, const Sparse24& b, const char* what) {
  EXPECT_TRUE(same_numbers(a.values, b.values)) << what;
  EXPECT_TRUE(same_numbers(a.metadata, b.metadata)) << what;
}

constexpr std::pair<int64_t, int64_t> kMatrixSizes[] = {{64, 64},   {1, 5}, {63, 130},
                                                        {200, 328}, {0, 4}, {4, 0}};

TEST(HiddenGradient24, IsTheGradientAtThePlacesOfEachDirection) {
  for (const auto& [tokens, features] : kMatrixSizes)
    for (const Activation kind : {Activation::relu, Activation::relu_squared}) {
      const Tensor da = normal({tokens, features}, 1);
      const Sparse24 kept = compress24(activations({tokens, features}, 2, DType::f64), Along24::features);
      const HiddenGradient24 made = hidden_gradient24(da, kept, kind);
      const Sparse24 by_tokens = compress24(decompress24(kept), Along24::tokens);
      expect_same_sparse24(made.act_by_tokens, by_tokens, "S(a) along tokens");
      EXPECT_EQ(made.dh.along, Along24::features);
      EXPECT_EQ(made.dh_by_tokens.along, Along24::tokens);
      for (const auto& [gradient, act] : {std::pair{made.dh, kept}, {made.dh_by_tokens, by_tokens}}) {
        const auto dh = decompress24(gradient).to_vector<double>(), a = decompress24(act).to_vector<double>(),
                   all = da.to_vector<double>();
        for (size_t i = 0; i < dh.size(); ++i) {
          const double slope = a[i] == 0 ? 0 : kind == Activation::relu ? 1 : 2 * std::sqrt(a[i]);
          EXPECT_EQ(dh[i], all[i] * slope) << i;
        }
      }
    }
}

TEST(HiddenGradient24, VariantsGiveTheSameBits) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const Device gpu = Device::cuda(0);
  for (const DType dtype : {DType::bf16, DType::f16})
    for (const auto& [tokens, features] : kMatrixSizes)
      for (const Activation kind : {Activation::relu, Activation::relu_squared}) {
        Tensor given = normal({tokens, features}, 3, DType::f64);
        if (given.count() > 2) {
          given.data<double>()[1] = std::numeric_limits<double>::infinity();
          given.data<double>()[2] = -0.0;
        }
        const Tensor da = given.to(dtype);
        const Sparse24 kept = compress24(activations({tokens, features}, 4, dtype), Along24::features);
        const HiddenGradient24 on_cpu = hidden_gradient24(da, kept, kind);
        for (const char* const variant : {"separate", "fused"}) {
          const ForceVariant force("hidden_gradient24", variant);
          const HiddenGradient24 made = hidden_gradient24(da.to(gpu), kept.to(gpu), kind);
          expect_same_sparse24(made.dh, on_cpu.dh, variant);
          expect_same_sparse24(made.act_by_tokens, on_cpu.act_by_tokens, variant);
          expect_same_sparse24(made.dh_by_tokens, on_cpu.dh_by_tokens, variant);
        }
      }
}

TEST(HiddenGradient24, SaysWhatIsWrong) {
  const Tensor a = activations({8, 8}, 1, DType::f32), da = normal({8, 8}, 2, DType::f32);
  const Sparse24 kept = compress24(a, Along24::features);
  EXPECT_EQ(message_of([&] { hidden_gradient24(da, compress24(a, Along24::tokens), Activation::relu); }),
            "hidden_gradient24: the activations lie along tokens; expected features");
  EXPECT_EQ(message_of([&] {
              hidden_gradient24(normal({8, 7}, 2, DType::f32), kept, Activation::relu);
            }),
            "hidden_gradient24: da is f32[8, 7] on cpu; expected f32 [8, 8] on cpu, as the activations");
  EXPECT_EQ(message_of([&] { hidden_gradient24(da, kept, Activation::gelu); }),
            "hidden_gradient24: the activation is gelu; expected relu or relu_squared");
}

/// Integers, so that every sum and square is exact and ties are common.
struct UpInputs {
  Tensor x, weight, bias, columns;

  UpInputs(int64_t tokens, int64_t in, int64_t hidden, DType dtype) {
    const auto integers = [&](const Shape& shape, uint64_t seed) {
      std::vector<double> values = normal(shape, seed).to_vector<double>();
      for (double& value : values) value = value > 0.8 ? 1 : value < -0.8 ? -1 : 0;
      return Tensor::from(values, shape).to(dtype);
    };
    x = integers({tokens, in}, 1), weight = integers({hidden, in}, 2), bias = integers({hidden}, 3);
    std::vector<int32_t> dense;
    for (int64_t i = 2; i < hidden; i += 11) dense.push_back(int32_t(i));
    columns = Tensor::from(dense, {int64_t(dense.size())});
  }
};

TEST(LinearActivation24, IsTheLayerItsColumnsAndWhatIsKeptOfTheOthers) {
  for (const Device device : devices())
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
      for (const auto& [tokens, in, hidden] : {std::tuple{70, 16, 131}, {129, 24, 64}, {300, 40, 456}})
        for (const bool splits : {false, true}) {
          const UpInputs given(tokens, in, hidden, dtype);
          const ActivatedLinear layer =
              linear_activation(given.x, given.weight, Activation::relu_squared, given.bias);
          const Tensor rest = layer.y.clone(),
                       dense = Tensor::empty({tokens, given.columns.count()}, dtype, Device::cpu());
          if (splits) take_columns(dense, rest, given.columns, true);
          const Sparse24 kept = compress24(rest, Along24::features);
          for (const char* const variant : {"separate", "epilogue"}) {
            if (device.is_cpu() && std::string(variant) == "epilogue") continue;  // the CPU has no variants
            if (device.is_cuda() && std::string(variant) == "epilogue" &&
                (dtype == DType::f32 || device.info().major != 9))
              continue;
            const ForceVariant force("linear_activation24", variant);
            const LinearActivation24 made =
                linear_activation24(given.x.to(device), given.weight.to(device), Activation::relu_squared,
                                    given.bias.to(device), splits ? given.columns.to(device) : Tensor());
            expect_same_sparse24(made.kept, kept, variant);
            validate_elements(made.kept.to(Device::cpu()), variant);
            EXPECT_TRUE(same_numbers(made.counts, layer.counts)) << variant;
            if (splits) {
              EXPECT_TRUE(same_numbers(made.dense, dense)) << variant;
            } else {
              EXPECT_FALSE(made.dense.defined());
            }
          }
        }
}

TEST(LinearActivation24, TheEpilogueNeedsAClusterOfTwoSms) {
  const DeviceInfo info{.name = "NVIDIA H200", .major = 9, .multiprocessors = 132};
  const Tensor x = normal({16, 64}, 1).to(DType::bf16), weight = normal({32, 64}, 2).to(DType::bf16);
  EXPECT_EQ(linear_activation24_epilogue_lacks(x, weight, Gpu(info, 2)).str(), "");
  EXPECT_EQ(linear_activation24_epilogue_lacks(x, weight, Gpu(info, 1)).str(),
            "two SMs, for clusters of two blocks");
}

TEST(LinearActivation24, SaysWhatIsWrong) {
  const Tensor x = normal({2, 3}, 1), weight = normal({4, 3}, 2);
  EXPECT_EQ(message_of([&] { linear_activation24(x, weight, Activation::silu); }),
            "linear_activation24: the activation is silu; expected relu or relu_squared");
  EXPECT_EQ(message_of([&] { linear_activation24(normal({3}, 1), weight, Activation::relu); }),
            "linear_activation24: x is f64[3] on cpu; expected a matrix [T, D]");
  EXPECT_EQ(message_of([&] {
              linear_activation24(x, weight, Activation::relu, {},
                                  Tensor::zeros({5}, DType::i32, x.device()));
            }),
            "linear_activation24: columns are i32[5] on cpu; expected at most 4 indices, i32 on cpu");
  const auto message = [&](std::vector<int32_t> columns) {
    const Tensor given = Tensor::from(columns, {int64_t(columns.size())});
    return message_of([&] { linear_activation24(x, weight, Activation::relu, {}, given); });
  };
  for (const int32_t outside : {4, -1, 2'000'000'000, -2'000'000'000})
    EXPECT_EQ(
        message({0, outside}),
        "linear_activation24: column " + std::to_string(outside) +
            " at position 1 of columns is outside the matrix; expected columns 0 to 3, each at most once");
  EXPECT_EQ(message({3, 1, 3}),
            "linear_activation24: column 3 at position 2 of columns is named twice; expected columns 0 to 3, "
            "each at most once");
  EXPECT_EQ(message({3, 1}), "");
}

/// Where the first layer's sums are exact, all of the network before its other GEMMs is too.
TEST(MlpSparse24, ItsVariantsAgree) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "skipped: no GPU";
  const Device gpu = Device::cuda(0);
  if (gpu.info().major != 9) GTEST_SKIP() << "skipped: no GPU of compute capability 9.0";
  const UpInputs given(300, 64, 456, DType::bf16);
  const Tensor down = normal({64, 456}, 5, DType::bf16).to(gpu),
               dy = normal({300, 64}, 6, DType::bf16).to(gpu);
  for (const Gemm24 form : {Gemm24::sparse, Gemm24::split}) {
    std::vector<Tensor> results[2];
    for (const bool fused : {false, true}) {
      const ForceVariant force("mlp_sparse24", fused ? "fused" : "composed");
      Tensor x = given.x.to(gpu), up = given.weight.to(gpu), second = down.clone();
      for (Tensor* const leaf : {&x, &up, &second}) require_grad(*leaf);
      Tape tape;
      const MlpSparse24Result result =
          mlp_sparse24(x, up, second, {.y = form, .dx = form, .dup = form, .ddown = form});
      const std::vector<Tensor> y{result.y}, grads{dy};
      tape.backward(y, grads);
      results[fused] = {result.y.detach(), result.counts, grad(x), grad(up), grad(second)};
    }
    for (size_t i = 0; i < results[0].size(); ++i)
      EXPECT_TRUE(same_numbers(results[0][i], results[1][i])) << name_of(form) << " " << i;
  }
}

}  // namespace
}  // namespace tessera::ops

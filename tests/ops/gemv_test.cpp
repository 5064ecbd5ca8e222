#include "ops/linear/gemv_kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ops/gemm/gemm.h"
#include "ops/linear/linear.h"
#include "ops/linear/linear_swiglu.h"
#include "tests/errors.h"
#include "tests/ops/expect.h"
#include "tests/ops/guarded.h"

/// The variant "gemv" at every edge. Everything is made of small integers, so that sums are exact in f32 and
/// the plain loops are the only right answer. Pads and neighbours hold NaN.

namespace tessera::ops {
namespace {

class GemvCuda : public GuardedCuda<9> {
 protected:
  /// On a 16-byte boundary, NaN all around.
  static Tensor framed(const Tensor& x, DType dtype) {
    const int64_t columns = x.size(-1);
    const Tensor frame = Tensor::full(x.shape().with(-1, (columns + 7) / 8 * 8 + 16),
                                      std::numeric_limits<double>::quiet_NaN(), dtype, gpu());
    Tensor y = frame.slice(-1, 8, 8 + columns);
    y.copy_from(x);
    return y;
  }
};

TEST_F(GemvCuda, EveryEdgeIsExact) {
  const ForceVariant force("linear", "gemv");
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const int64_t tokens : {1, 2, 3, 4, 5, 7, 8})
      for (const auto& [in, out] : {std::pair<int64_t, int64_t>{8, 1},
                                    {8, 7},
                                    {31, 9},
                                    {33, 16},
                                    {520, 17},
                                    {1023, 33},
                                    {1024, 31},
                                    {2056, 8},
                                    {4104, 129}}) {
        const Tensor x = small_numbers({tokens, in}, 1), w = small_numbers({out, in}, 2),
                     bias = small_numbers({out}, 3);
        const auto wanted = linear(x, w, bias).to(dtype).to_vector<float>();
        EXPECT_EQ(linear(framed(x, dtype), framed(w, dtype), bias.to(dtype).to(gpu())).to_vector<float>(),
                  wanted)
            << dtype << " " << tokens << " x " << in << " -> " << out;
      }
}

TEST_F(GemvCuda, ABiasMayHaveAnyStride) {
  const ForceVariant force("linear", "gemv");
  for (const int64_t out : {32, 33}) {
    const Tensor x = small_numbers({4, 65}, 1), w = small_numbers({out, 65}, 2);
    const Tensor matrix = small_numbers({out, 5}, 3), one = small_numbers({1}, 4),
                 twice = small_numbers({2 * out}, 5);
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      const auto there = [&](const Tensor& t) { return t.to(dtype).to(gpu()); };
      for (const auto& [bias, same] : {std::pair{there(matrix).select(1, 3), matrix.select(1, 3)},
                                       {there(twice).slice(0, 0, 2 * out, 2), twice.slice(0, 0, 2 * out, 2)},
                                       {there(one).expand({out}), one.expand({out})}})
        EXPECT_EQ(linear(framed(x, dtype), framed(w, dtype), bias).to_vector<float>(),
                  linear(x, w, same).to(dtype).to_vector<float>())
            << dtype << " " << describe(bias);
    }
  }
}

TEST_F(GemvCuda, GateAndUpAreTheirOwnHalves) {
  for (const DType dtype : {DType::bf16, DType::f16})
    for (const int64_t tokens : {1, 8})
      for (const auto& [in, width] : {std::pair<int64_t, int64_t>{5, 1}, {40, 8}, {1100, 13}, {264, 40}}) {
        const Tensor x = small_numbers({tokens, in}, 1), w = small_numbers({2 * width, in}, 2);
        const auto wanted = linear_swiglu(x, w).to_vector<float>();
        const ForceVariant force("linear_swiglu", "gemv");
        const auto ours = linear_swiglu(framed(x, dtype), framed(w, dtype)).to_vector<float>();
        for (size_t i = 0; i < wanted.size(); ++i)  // rounded once; beyond 65,504 f16 has infinity
          EXPECT_TRUE(dtype == DType::f16 && std::abs(wanted[i]) > 65504
                          ? std::isinf(ours[i]) && (ours[i] > 0) == (wanted[i] > 0)
                          : std::abs(ours[i] - wanted[i]) <=
                                std::abs(wanted[i]) * (dtype == DType::bf16 ? 0x1p-8 : 0x1p-11) + 1e-6)
              << ours[i] << " for " << wanted[i] << " in " << dtype << " " << tokens << " x " << in << " -> "
              << width << " element " << i;
      }
}

TEST_F(GemvCuda, RefusesWhatItCannotDo) {
  const ForceVariant force("linear", "gemv");
  const Tensor x = Tensor::zeros({9, 8}, DType::f32, gpu()), w = Tensor::zeros({4, 8}, DType::f32, gpu());
  EXPECT_EQ(message_of([&] { linear(x, w); }),
            "linear: variant gemv needs 1 ... 8 rows of x, not x f32[9, 8] on cuda:0 and weight f32[4, 8] on "
            "cuda:0");
}

}  // namespace
}  // namespace tessera::ops

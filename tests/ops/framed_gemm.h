#pragma once

#include <gtest/gtest.h>

#include <limits>

#include "ops/gemm/gemm_sm90_plan.h"
#include "runtime/has_cuda.h"
#include "tests/ops/guarded.h"

/// GEMMs for the tests of single kernels: operands and result lie in frames, and plain loops give the
/// expected result. Everything is made of small integers, so that sums are exact in f32.

namespace tessera::ops {

/// The kernels of variant "wgmma"; a build without CUDA has none, and skips.
class GemmKernelsCuda : public GuardedCuda<9> {
 protected:
  static void product(const Gemm& g, const GemmChoice& choice) {
    if constexpr (kCuda) {
      if (g.in == DType::bf16)
        gemm_sm90<bf16>(g, choice, gpu());
      else
        gemm_sm90<f16>(g, choice, gpu());
    }
  }
};

struct GemmExtents {
  int64_t m, n, k, batch = 1;
};

/// A copy on the GPU in a frame of `around`, its rows on 16-byte boundaries if `shift` is 0, else that many
/// elements after them, with pitches that are no whole packs.
inline Tensor framed(const Tensor& x, DType dtype, double around, Tensor& frame, int shift = 0) {
  const int64_t columns = x.size(-1);
  const Shape shape = x.shape().with(-1, (columns + 7) / 8 * 8 + 24 + shift);
  frame = Tensor::empty_packed(shape, dtype, Device::cuda(0));
  frame.fill(around);
  const Tensor y = frame.slice(-1, 8 + shift, 8 + shift + columns);
  y.copy_from(x);
  return y;
}

/// d = 2 a b + bias, or d += 2 a b. Operands' frames hold NaN, d's holds 77.
class FramedGemm {
 public:
  Gemm gemm;
  Tensor a, b;  // as they are stored, on the CPU

  FramedGemm(const GemmExtents& p, bool transpose_a, bool transpose_b, DType dtype, DType out,
             bool accumulate, int shift = 0)
      : a(small_numbers(transpose_a ? Shape{p.batch, p.k, p.m} : Shape{p.batch, p.m, p.k}, 1)),
        b(small_numbers(transpose_b ? Shape{p.batch, p.n, p.k} : Shape{p.batch, p.k, p.n}, 2)),
        d_(small_numbers({p.batch, p.m, p.n}, 3)),
        first_(8 + shift) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    const Tensor bias = small_numbers({p.n}, 4);
    Tensor frame;
    left_ = framed(a, dtype, nan, frame, shift), right_ = framed(b, dtype, nan, frame, shift);
    result_ = framed(d_, out, 77, frame_, shift), bias_ = bias.to(dtype).to(result_.device());
    if (!accumulate) result_.fill(nan);
    multiply(d_, transpose_a ? a.transpose(1, 2) : a, transpose_b ? b.transpose(1, 2) : b,
             {.alpha = 2, .accumulate = accumulate, .bias = accumulate ? Tensor() : bias});
    gemm = {.m = p.m, .n = p.n, .k = p.k, .batch = p.batch, .in = dtype, .out = out};
    gemm.transpose_a = transpose_a, gemm.transpose_b = transpose_b;
    gemm.a = left_.raw(), gemm.b = right_.raw(), gemm.d = result_.raw();
    gemm.lda = left_.layout().stride(1), gemm.ldb = right_.layout().stride(1);
    gemm.ldd = result_.layout().stride(1);
    gemm.stride_a = left_.layout().stride(0), gemm.stride_b = right_.layout().stride(0);
    gemm.stride_d = result_.layout().stride(0);
    gemm.alpha = 2, gemm.beta = accumulate ? 1 : 0;
    if (!accumulate) gemm.bias = bias_.raw();
  }

  /// Whether d is what the plain loops give, and its neighbours are untouched.
  testing::AssertionResult is_exact() const {
    const auto failure = [&] {
      return testing::AssertionFailure()
             << gemm.m << " x " << gemm.n << " x " << gemm.k << ", batch " << gemm.batch << ", transposed "
             << gemm.transpose_a << gemm.transpose_b << ", " << gemm.in << " to " << gemm.out << ", beta "
             << gemm.beta << ", first column " << first_ << ": ";
    };
    const auto got = result_.to_vector<double>(), want = d_.to(gemm.out).to_vector<double>();
    for (size_t i = 0; i < want.size(); ++i)
      if (got[i] != want[i]) return failure() << "element " << i << " is " << got[i] << ", not " << want[i];
    const auto around = frame_.to_vector<double>();
    const int64_t width = frame_.size(-1);
    for (int64_t i = 0; i < int64_t(around.size()); ++i)
      if ((i % width < first_ || i % width >= first_ + gemm.n) && around[size_t(i)] != 77)
        return failure() << "a neighbour of d was overwritten: " << i;
    return testing::AssertionSuccess();
  }

 private:
  Tensor d_, left_, right_, result_, bias_, frame_;
  int64_t first_;
};

}  // namespace tessera::ops

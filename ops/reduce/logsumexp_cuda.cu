#include "gpu/elementwise.cuh"
#include "ops/reduce/exponential.cuh"
#include "ops/reduce/logsumexp_kernels.h"
#include "ops/reduce/reduce_kernels.h"
#include "ops/reduce/reduce_pass.cuh"
#include "ops/reduce/sum_of.cuh"

/// Two reads of x, for its maximum and for the sum of its exponentials, which are not written; backward one
/// read and one write. Bound by memory.

namespace tessera::ops {
namespace {

/// scaled_exponential; own: what is subtracted.
template <class T>
struct Exponential {
  __device__ __forceinline__ float own(float largest) const { return isinf(largest) ? 0.0f : largest; }
  __device__ __forceinline__ float operator()(float own, float x) const { return exponential<T>(x - own); }
};
template <class T>
struct Logarithm {
  __device__ T operator()(T largest, float sum) const { return T(logarithm_of_sum(float(largest), sum)); }
};
template <class T>
struct Share {
  __device__ float operator()(T dy, float sum) const { return gradient_per_exponential(float(dy), sum); }
};
template <class T>
struct ShareOut {
  __device__ T operator()(float share, T x, T largest) const {
    return T(share * scaled_exponential(float(x), float(largest)));
  }
};

}  // namespace

void sum_exponentials_cuda(const Tensor& sum, const Tensor& x, const Tensor& largest) {
  dispatch_floating_cuda(x.dtype(), "logsumexp", [&]<class T>() {
    const Mapped<Exponential<T>, T> from{.x = x.data<T>(), .z = largest.data<T>()};
    reduce_pass(x.device(), plan_to(x.layout(), sum.layout(), &largest.layout()), from, sum.data<float>(),
                SumOf{}, Finish{});
  });
}

void logarithms_cuda(const Tensor& y, const Tensor& largest, const Tensor& sum) {
  dispatch_floating_cuda(y.dtype(), "logsumexp",
                         [&]<class T>() { gpu::elementwise<T, T, float>(y, Logarithm<T>{}, largest, sum); });
}

void shares_cuda(const Tensor& shares, const Tensor& dy, const Tensor& sum) {
  dispatch_floating_cuda(dy.dtype(), "logsumexp",
                         [&]<class T>() { gpu::elementwise<float, T, float>(shares, Share<T>{}, dy, sum); });
}

void share_out_cuda(const Tensor& dx, const Tensor& shares, const Tensor& x, const Tensor& largest) {
  dispatch_floating_cuda(dx.dtype(), "logsumexp", [&]<class T>() {
    gpu::elementwise<T, float, T, T>(dx, ShareOut<T>{}, shares, x, largest);
  });
}

}  // namespace tessera::ops

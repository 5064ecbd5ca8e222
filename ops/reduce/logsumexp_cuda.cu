#include "gpu/elementwise.cuh"
#include "ops/reduce/logsumexp_kernels.h"

/// Elementwise: a read of x and a write of its exponentials in f32, which ops/reduce then sums; bound by
/// memory. A kernel of its own would read x twice and write nothing: half of the bytes, for one more kernel
/// of every layout, length and cut.

namespace tessera::ops {
namespace {

template <class T>
struct Exponential {
  __device__ float operator()(T x, T largest) const { return scaled_exponential(float(x), float(largest)); }
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

void exponentials_cuda(const Tensor& e, const Tensor& x, const Tensor& largest) {
  dispatch_floating_cuda(x.dtype(), "logsumexp",
                         [&]<class T>() { gpu::elementwise<float, T, T>(e, Exponential<T>{}, x, largest); });
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

#include "gpu/pack.cuh"
#include "gpu/sum.cuh"
#include "ops/gmm_nll/gmm_nll_kernels.h"
#include "ops/gmm_nll/gmm_nll_math.h"

/// A thread per element. The 3 K parameters of an element are neighbours in memory but far from those of the
/// next thread, so a block first copies those of its 128 elements to shared memory in words of 16 bytes, and
/// the gradients take their place there and return the same way: each byte is moved once, coalesced. Three
/// exponentials a component forward and six backward (the sums are computed again rather than kept) against
/// 6 to 24 bytes: near the balance of memory and the special function units in bf16, bound by memory in f32.
/// More components than shared memory holds are read where they lie.
///
/// Sum and mean: one partial sum a block, then one block adds those, in double and in a fixed order.

namespace tessera::ops {
namespace {

using gpu::ceil_div;
using gpu::kPackOf;

constexpr int kBlock = 128;
constexpr int kFinish = 1024;
constexpr size_t kSharedLimit = 47 * 1024;  // a kernel may take 48 KiB without asking, block_sum takes some

template <class T>
struct Elements {
  const T *params, *y;
  int64_t count, width;  // width: 3 K parameters an element
  bool whole;            // params may be read in packs
};

/// Copies n elements between packed arrays of which one is in shared memory.
template <class T>
__device__ __forceinline__ void block_copy(T* to, const T* from, int64_t n, bool whole) {
  constexpr int kPack = kPackOf<T>;
  const int64_t packs = whole ? n / kPack : 0;
  for (int64_t p = threadIdx.x; p < packs; p += kBlock)
    gpu::store_pack<kPack>(to + p * kPack, gpu::load_pack<kPack>(from + p * kPack));
  for (int64_t i = packs * kPack + threadIdx.x; i < n; i += kBlock) to[i] = from[i];
}

/// How many elements this block has.
template <class T>
__device__ __forceinline__ int64_t block_elements(const Elements<T>& args, int64_t first) {
  const int64_t left = args.count - first;
  return left < kBlock ? left : int64_t(kBlock);
}

template <class T, bool kStaged>
__global__ void __launch_bounds__(kBlock) forward(Elements<T> args, float* losses, double* partial) {
  extern __shared__ uint4 shared[];
  const int64_t first = blockIdx.x * int64_t(kBlock), n = block_elements(args, first);
  const T* params = args.params + first * args.width;
  if constexpr (kStaged) {
    T* const staged = reinterpret_cast<T*>(shared);
    block_copy(staged, params, n * args.width, args.whole);
    __syncthreads();
    params = staged;
  }
  float loss = 0;
  if (threadIdx.x < n) {
    loss = mix<float>(params + threadIdx.x * args.width, args.width / 3, float(args.y[first + threadIdx.x]))
               .loss();
    if (losses) losses[first + threadIdx.x] = loss;
  }
  if (!partial) return;
  const double sum = gpu::block_sum(loss);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kFinish)
    finish(float* loss, const double* partial, int64_t blocks, double divisor) {
  double sum = 0;
  for (int64_t b = threadIdx.x; b < blocks; b += kFinish) sum += partial[b];
  sum = gpu::block_sum(sum);
  if (threadIdx.x == 0) *loss = float(sum / divisor);
}

template <class T, bool kStaged>
__global__ void __launch_bounds__(kBlock)
    backward(Elements<T> args, T* dparams, T* dy, const float* dloss, bool each, float share) {
  extern __shared__ uint4 shared[];
  const int64_t first = blockIdx.x * int64_t(kBlock), n = block_elements(args, first);
  const T* params = args.params + first * args.width;
  T* gradients = dparams + first * args.width;
  if constexpr (kStaged) {
    T* const staged = reinterpret_cast<T*>(shared);
    block_copy(staged, params, n * args.width, args.whole);
    __syncthreads();
    params = gradients = staged;
  }
  if (threadIdx.x < n) {
    const int64_t at = first + threadIdx.x, own = threadIdx.x * args.width;
    const float g = (each ? dloss[at] : *dloss) * share;
    const float slope =
        mix_backward<float>(gradients + own, params + own, args.width / 3, float(args.y[at]), g);
    if (dy) dy[at] = T(slope);
  }
  if constexpr (kStaged) {
    __syncthreads();
    block_copy(dparams + first * args.width, gradients, n * args.width, args.whole);
  }
}

template <class T>
Elements<T> elements(const Tensor& params, const Tensor& y) {
  return {params.data<T>(), y.data<T>(), y.count(), 3 * params.size(-2),
          gpu::packs(params.data<T>(), 0, kPackOf<T>)};
}

}  // namespace

void gmm_nll_forward_cuda(const Tensor& loss, const Tensor& params, const Tensor& y, Reduction reduction) {
  dispatch_floating_cuda(y.dtype(), "gmm_nll", [&]<class T>() {
    const Device device = y.device();
    const auto args = elements<T>(params, y);
    const int64_t blocks = ceil_div(args.count, kBlock);
    const bool each = reduction == Reduction::none;
    // The partial sums are doubles in memory counted in bytes: f64 is no dtype of a GPU's tensors.
    const Tensor scratch =
        each ? Tensor() : Tensor::empty_packed({blocks * int64_t(sizeof(double))}, DType::u8, device);
    double* const partial = each ? nullptr : static_cast<double*>(scratch.raw());
    float* const losses = each ? loss.data<float>() : nullptr;
    const size_t bytes = size_t(args.width) * kBlock * sizeof(T);
    const dim3 grid{unsigned(blocks)};
    if (bytes <= kSharedLimit) {
      gpu::launch(device, {grid, kBlock, bytes}, forward<T, true>, args, losses, partial);
    } else {
      gpu::launch(device, {grid, kBlock}, forward<T, false>, args, losses, partial);
    }
    if (!each)
      gpu::launch(device, {1, kFinish}, finish, loss.data<float>(), partial, blocks,
                  reduction == Reduction::mean ? double(args.count) : 1.0);
  });
}

void gmm_nll_backward_cuda(const Tensor& dparams, const Tensor& dy, const Tensor& dloss, const Tensor& params,
                           const Tensor& y, Reduction reduction) {
  dispatch_floating_cuda(y.dtype(), "gmm_nll", [&]<class T>() {
    const Device device = y.device();
    const auto args = elements<T>(params, y);
    // The gradients of the parameters are by-products of dy: without a taker they go to scratch.
    const Tensor to =
        dparams.defined() ? dparams : Tensor::empty_packed(params.shape(), params.dtype(), device);
    T* const dtarget = dy.defined() ? dy.data<T>() : nullptr;
    const bool each = reduction == Reduction::none;
    const float share = reduction == Reduction::mean ? 1.0f / float(args.count) : 1.0f;
    const size_t bytes = size_t(args.width) * kBlock * sizeof(T);
    const dim3 grid{unsigned(ceil_div(args.count, kBlock))};
    if (bytes <= kSharedLimit) {
      gpu::launch(device, {grid, kBlock, bytes}, backward<T, true>, args, to.data<T>(), dtarget,
                  dloss.data<float>(), each, share);
    } else {
      gpu::launch(device, {grid, kBlock}, backward<T, false>, args, to.data<T>(), dtarget,
                  dloss.data<float>(), each, share);
    }
  });
}

}  // namespace tessera::ops

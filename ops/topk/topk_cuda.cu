#include <algorithm>
#include <cub/device/device_segmented_radix_sort.cuh>

#include "gpu/dependent_launch.cuh"
#include "gpu/grid.cuh"
#include "ops/keep_largest/keep_largest_kernels.h"
#include "ops/topk/topk_kernels.h"

/// The k largest of each row. An element's key is the order of its value (score_key of ops/keep_largest) and,
/// below it, its index counted down: 64 bits, no two of a row equal, and of equal values the lowest index has
/// the largest key.
///
/// Few of a short row are found by a warp, which holds the row's scores in registers and takes the largest
/// one k times.
///
/// Of other rows, a block per row finds the k-th largest key by its bytes from the top (radix select, as
/// keep_largest does): each pass counts the elements that agree with the bytes so far by their next byte,
/// until all that agree are taken, mostly after two to four passes. Another pass collects the k keys in any
/// order. Up to 1,024 of them stay in shared memory, where the place of each is the number of larger ones;
/// more are sorted in device memory (CUB, one segment per row).
///
/// Bound by reads of x from L2, some five of them, and by the latency of a row's barriers.

namespace tessera::ops {
namespace {

constexpr int kThreads = 256, kBins = 256, kPasses = 8;
constexpr int64_t kMostInBlock = 1024;                              // keys of 8 bytes
constexpr int64_t kMostInWarp = 16, kMostOfWarp = 32 * gpu::kWarp;  // k, and elements of a row

template <class T>
__device__ __forceinline__ uint64_t key_of(const T* row, int64_t index) {
  return uint64_t(score_key(__float_as_uint(float(row[index])))) << 32 | uint32_t(~uint32_t(index));
}

__device__ __forceinline__ int64_t index_of(uint64_t key) {
  return int64_t(uint32_t(~uint32_t(key)));
}

/// A warp per row of up to kOwn elements per lane.
template <class T, int kOwn>
__global__ void __launch_bounds__(kThreads)
    warp_kernel(int64_t* indices, const T* x, int64_t rows, int length, int64_t stride, int k) {
  constexpr unsigned kAll = 0xFFFFFFFFu;
  gpu::wait_and_launch_dependents();
  const int lane = int(threadIdx.x) % gpu::kWarp;
  const int64_t row = int64_t(blockIdx.x) * (kThreads / gpu::kWarp) + threadIdx.x / gpu::kWarp;
  if (row >= rows) return;
  uint32_t scores[kOwn];  // of elements lane, lane + 32, ...; 0, below every score: none, or taken
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int at = i * gpu::kWarp + lane;
    scores[i] = at < length ? score_key(__float_as_uint(float(x[row * stride + at]))) : 0;
  }
  int64_t found = 0;  // by lane n: the index of the largest but n
  for (int n = 0; n < k; ++n) {
    uint32_t own = 0, at = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      if (scores[i] > own) own = scores[i], at = uint32_t(i);
    const uint32_t most = __reduce_max_sync(kAll, own);
    const uint32_t first = __reduce_min_sync(kAll, own == most ? at * gpu::kWarp + uint32_t(lane) : kAll);
    if (lane == n) found = first;
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      if (first == uint32_t(i * gpu::kWarp + lane)) scores[i] = 0;
  }
  if (lane < k) indices[row * k + lane] = found;
}

/// What is known of the smallest key that is taken.
struct Search {
  unsigned long long
      prefix;     // its bytes so far, then zeros: once done no key of the others is larger or equal
  uint32_t need;  // how many of those that agree are taken
  uint32_t done;
};

__device__ __forceinline__ bool agrees(uint64_t key, const Search& search, int pass) {
  return pass == 0 || (key ^ search.prefix) >> (64 - 8 * pass) == 0;
}

/// By the first warp: the byte of this pass. Lane 0 has the largest eight bins.
__device__ __forceinline__ void decide(Search& search, const uint32_t* bins, int pass) {
  constexpr int kOwn = kBins / gpu::kWarp;
  const int lane = int(threadIdx.x), top = kBins - 1 - lane * kOwn;
  const uint32_t need = search.need;
  uint32_t own = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) own += bins[top - i];
  uint32_t through = own;
  for (int step = 1; step < gpu::kWarp; step *= 2) {
    const uint32_t other = __shfl_up_sync(0xFFFFFFFFu, through, step);
    if (lane >= step) through += other;
  }
  __syncwarp();  // all lanes have read what one of them goes on to write
  uint32_t above = through - own;
  if (above < need && need <= through) {  // one lane
    int bin = top;
    while (above + bins[bin] < need) above += bins[bin--];
    search.prefix |= (unsigned long long)(bin) << (56 - 8 * pass);
    search.need = need - above;
    search.done = bins[bin] == need - above;
  }
}

/// A block per row. Keys go to `indices` in their order if they fit a block, else to `keys`, in any.
template <class T>
__global__ void __launch_bounds__(kThreads)
    select_kernel(int64_t* indices, uint64_t* keys, const T* x, int64_t length, int64_t stride, int64_t k) {
  __shared__ uint32_t bins[kBins];
  __shared__ Search search;
  __shared__ uint32_t taken;
  __shared__ uint64_t largest[kMostInBlock];
  gpu::wait_and_launch_dependents();
  const T* const row = x + int64_t(blockIdx.x) * stride;
  if (threadIdx.x == 0) search = {0, uint32_t(k), uint32_t(k == length)}, taken = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    for (int bin = int(threadIdx.x); bin < kBins; bin += kThreads) bins[bin] = 0;
    __syncthreads();
    if (search.done) break;
    for (int64_t i = threadIdx.x; i < length; i += kThreads) {
      const uint64_t key = key_of(row, i);
      if (agrees(key, search, pass)) atomicAdd(&bins[key >> (56 - 8 * pass) & 255], 1u);
    }
    __syncthreads();
    if (threadIdx.x < gpu::kWarp) decide(search, bins, pass);
    __syncthreads();
  }
  const uint64_t least = search.prefix;
  uint64_t* const to = keys ? keys + int64_t(blockIdx.x) * k : largest;
  for (int64_t i = threadIdx.x; i < length; i += kThreads) {
    const uint64_t key = key_of(row, i);
    if (key >= least) to[atomicAdd(&taken, 1u)] = key;
  }
  if (keys) return;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < k; i += kThreads) {
    const uint64_t own = largest[i];
    int larger = 0;
    for (int j = 0; j < int(k); ++j) larger += largest[j] > own;
    indices[int64_t(blockIdx.x) * k + larger] = index_of(own);
  }
}

__global__ void __launch_bounds__(kThreads) begin_kernel(int64_t* begins, int64_t rows, int64_t k) {
  gpu::wait_and_launch_dependents();
  for (int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x; row <= rows;
       row += int64_t(gridDim.x) * kThreads)
    begins[row] = row * k;
}

__global__ void __launch_bounds__(kThreads)
    index_kernel(int64_t* indices, const uint64_t* keys, int64_t count) {
  gpu::wait_and_launch_dependents();
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kThreads)
    indices[i] = index_of(keys[i]);
}

gpu::LaunchShape grid_for(Device device, int64_t threads) {
  const int64_t blocks =
      std::min<int64_t>(gpu::ceil_div(threads, kThreads), int64_t(device.multiprocessors()) * 32);
  return {gpu::grid_of(blocks), kThreads};
}

}  // namespace

void topk_cuda(const Tensor& indices, const Tensor& x) {
  const Device device = x.device();
  const int64_t rows = x.rows(), k = indices.size(-1), count = rows * k;
  const int64_t length = x.row_length();
  if (k <= kMostInWarp && length <= kMostOfWarp) {
    dispatch_floating_cuda(x.dtype(), "topk", [&]<class T>() {
      gpu::launch_dependent(device, {gpu::grid_of(gpu::ceil_div(rows, kThreads / gpu::kWarp)), kThreads},
                            length <= kMostOfWarp / 2 ? warp_kernel<T, 16> : warp_kernel<T, 32>,
                            indices.data<int64_t>(), x.data<T>(), rows, int(length), x.row_stride(), int(k));
    });
    return;
  }
  const bool in_block = k <= kMostInBlock;
  const auto scratch = [&](int64_t n, DType dtype) { return Tensor::empty_packed({n}, dtype, device); };
  const auto words = [](const Tensor& t) { return static_cast<uint64_t*>(t.raw()); };
  const Tensor keys = in_block ? Tensor() : scratch(count, DType::i64);
  dispatch_floating_cuda(x.dtype(), "topk", [&]<class T>() {
    gpu::launch_dependent(device, {gpu::grid_of(rows), kThreads}, select_kernel<T>, indices.data<int64_t>(),
                          in_block ? nullptr : words(keys), x.data<T>(), length, x.row_stride(), k);
  });
  if (in_block) return;
  const Tensor begins = scratch(rows + 1, DType::i64), sorted = scratch(count, DType::i64);
  const int64_t* const begin = begins.data<int64_t>();
  gpu::launch_dependent(device, grid_for(device, rows + 1), begin_kernel, begins.data<int64_t>(), rows, k);
  const auto sort = [&](void* temporary, size_t& bytes) {
    check(cub::DeviceSegmentedRadixSort::SortKeysDescending(
        temporary, bytes, words(keys), words(sorted), count, rows, begin, begin + 1, 0, 64, device.stream()));
  };
  size_t bytes = 0;
  sort(nullptr, bytes);
  const Tensor temporary = scratch(int64_t(std::max<size_t>(bytes, 1)), DType::u8);
  sort(temporary.raw(), bytes);
  gpu::launch_dependent(device, grid_for(device, count), index_kernel, indices.data<int64_t>(),
                        static_cast<const uint64_t*>(words(sorted)), count);
}

}  // namespace tessera::ops

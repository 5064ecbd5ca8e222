#include <algorithm>

#include "gpu/grid.cuh"
#include "gpu/launch.cuh"
#include "ops/keep_largest/keep_largest_kernels.h"

/// The score's key and the index make one number of 64 bits, so that no two elements are equal: the largest
/// number that is dropped is found by its bytes from the top (radix select), each pass counting the elements
/// that agree with the bytes so far by their next byte. Sums of integers have no order. The search ends when
/// all that agree are dropped, mostly after the four bytes of the key.
///
///   group   a thread per element counts the smaller ones of its group
///   row     a block per row, its bins in shared memory
///   matrix  a grid per pass and a block that decides the byte, states and bins in device memory
///
/// Bound by bytes: each pass reads the scores (from L2, where a row or a block of columns fits), one writes
/// the mask.

namespace tessera::ops {
namespace {

constexpr int kThreads = 256, kBins = 256, kPasses = 8;

__device__ __forceinline__ uint64_t ranked(const float* scores, int64_t index) {
  return uint64_t(score_key(__float_as_uint(scores[index]))) << 32 | uint32_t(index);
}

/// What is known of the largest number that is dropped.
struct Search {
  unsigned long long
      prefix;     // its bytes so far, then zeros; when done: itself, or a number with no other below it
  uint32_t need;  // how many of those that agree are dropped
  uint32_t done;
};

__device__ __forceinline__ bool agrees(uint64_t number, const Search& search, int pass) {
  return pass == 0 || (number ^ search.prefix) >> (64 - 8 * pass) == 0;
}

/// By one thread: the byte of this pass, from the counts of those that agree.
__device__ void decide(Search& search, const uint32_t* bins, int pass) {
  uint32_t below = 0;
  int bin = 0;
  while (below + bins[bin] < search.need) below += bins[bin++];
  const int shift = 56 - 8 * pass;
  search.prefix |= (unsigned long long)(bin) << shift;
  search.need -= below;
  if (bins[bin] == search.need) {
    search.prefix |= shift > 0 ? ~0ull >> (64 - shift) : 0;
    search.done = 1;
  }
}

__global__ void __launch_bounds__(kThreads)
    keep_in_rows(uint8_t* keep, const float* scores, int64_t columns, uint32_t zeros) {
  __shared__ uint32_t bins[kBins];
  __shared__ Search search;
  const float* const row = scores + blockIdx.x * columns;
  if (threadIdx.x == 0) search = {0, zeros, 0};
  for (int pass = 0; pass < kPasses; ++pass) {
    for (int bin = int(threadIdx.x); bin < kBins; bin += kThreads) bins[bin] = 0;
    __syncthreads();
    if (search.done) break;
    for (int64_t i = threadIdx.x; i < columns; i += kThreads) {
      const uint64_t number = ranked(row, i);
      if (agrees(number, search, pass)) atomicAdd(&bins[number >> (56 - 8 * pass) & 255], 1u);
    }
    __syncthreads();
    if (threadIdx.x == 0) decide(search, bins, pass);
    __syncthreads();
  }
  const uint64_t last = search.prefix;
  for (int64_t i = threadIdx.x; i < columns; i += kThreads)
    keep[blockIdx.x * columns + i] = ranked(row, i) > last;
}

__global__ void __launch_bounds__(kThreads)
    keep_in_groups(uint8_t* keep, const float* scores, int64_t count, int group, int zeros) {
  for (int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kThreads) {
    const int64_t first = i / group * group;
    const uint64_t own = ranked(scores, i);
    int smaller = 0;
    for (int j = 0; j < group; ++j) smaller += ranked(scores, first + j) < own;
    keep[i] = smaller >= zeros;
  }
}

__global__ void begin_search(Search* search, uint32_t* bins, uint32_t zeros) {
  for (int i = int(threadIdx.x); i < kPasses * kBins; i += int(blockDim.x)) bins[i] = 0;
  if (threadIdx.x == 0) *search = {0, zeros, 0};
}

__global__ void __launch_bounds__(kThreads)
    count_bytes(uint32_t* bins, const Search* state, const float* scores, int64_t count, int pass) {
  __shared__ uint32_t own[kBins];
  const Search search = *state;
  if (search.done) return;
  for (int bin = int(threadIdx.x); bin < kBins; bin += kThreads) own[bin] = 0;
  __syncthreads();
  for (int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kThreads) {
    const uint64_t number = ranked(scores, i);
    if (agrees(number, search, pass)) atomicAdd(&own[number >> (56 - 8 * pass) & 255], 1u);
  }
  __syncthreads();
  for (int bin = int(threadIdx.x); bin < kBins; bin += kThreads)
    if (own[bin] > 0) atomicAdd(&bins[pass * kBins + bin], own[bin]);
}

__global__ void decide_byte(Search* state, const uint32_t* bins, int pass) {
  if (!state->done) decide(*state, bins + pass * kBins, pass);
}

__global__ void __launch_bounds__(kThreads)
    keep_above(uint8_t* keep, const Search* state, const float* scores, int64_t count) {
  const uint64_t last = state->prefix;
  for (int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kThreads)
    keep[i] = ranked(scores, i) > last;
}

unsigned blocks_for(int64_t count) {
  constexpr int64_t kMost = 2048;  // some 16 per SM
  return unsigned(std::min(kMost, gpu::ceil_div(count, kThreads)));
}

void keep_in_matrix(const Tensor& keep, const Tensor& scores, int64_t zeros) {
  const Device device = scores.device();
  const int64_t count = scores.count();
  const Tensor memory = Tensor::empty_packed(
      {int64_t(sizeof(Search)) + kPasses * kBins * int64_t(sizeof(uint32_t))}, DType::u8, device);
  auto* const state = reinterpret_cast<Search*>(memory.data<uint8_t>());
  auto* const bins = reinterpret_cast<uint32_t*>(memory.data<uint8_t>() + sizeof(Search));
  const gpu::LaunchShape grid{.grid = blocks_for(count), .block = kThreads}, one{.grid = 1, .block = 1};
  gpu::launch(device, {.grid = 1, .block = kThreads}, begin_search, state, bins, uint32_t(zeros));
  for (int pass = 0; pass < kPasses; ++pass) {
    gpu::launch(device, grid, count_bytes, bins, state, scores.data<float>(), count, pass);
    gpu::launch(device, one, decide_byte, state, bins, pass);
  }
  gpu::launch(device, grid, keep_above, keep.data<uint8_t>(), state, scores.data<float>(), count);
}

}  // namespace

void keep_largest_cuda(const Tensor& keep, const Tensor& scores, const KeepLargest& how) {
  const Device device = scores.device();
  auto* const to = keep.data<uint8_t>();
  const float* const from = scores.data<float>();
  if (how.within == KeepWithin::matrix) {
    keep_in_matrix(keep, scores, how.zeros);
  } else if (how.within == KeepWithin::row) {
    gpu::launch(device, {.grid = gpu::grid_of(scores.size(0)), .block = kThreads}, keep_in_rows, to, from,
                scores.size(1), uint32_t(how.zeros));
  } else {
    gpu::launch(device, {.grid = blocks_for(scores.count()), .block = kThreads}, keep_in_groups, to, from,
                scores.count(), int(how.group), int(how.zeros));
  }
}

}  // namespace tessera::ops

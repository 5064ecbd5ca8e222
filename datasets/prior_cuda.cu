#include "datasets/matern_math.h"
#include "datasets/prior_kernels.h"
#include "gpu/launch.cuh"

/// Samplers of the priors. All are f64 and bound by latency at the sizes of training: log, sin, cos and exp
/// of a few values per point, one wave of blocks. What a task shares (weights) is recomputed by each block
/// that needs it: that costs less than a kernel before it.
///
///   linear    four lanes per point; each draws the features and the weights of its Philox blocks.
///   fourier   one thread per point, weights of the task in shared memory, harmonics by rotation.
///   matern    three kernels. rank_kernel counts for each point those before it (a comparison per pair
///             of points of a task: below 1/1000 of the attention that follows). increment_kernel draws what
///             the stochastic differential equation adds between neighbours. chain_kernel runs the recursion
///             z_r = A_r z_(r-1) + e_r in chunks, a thread each: from zero, then a scan over the chunks,
///             whose transition is A of the time that they span, then again from the true state.

namespace tessera::datasets {
namespace {

using namespace prior_math;

constexpr int kPointThreads = 128;
constexpr int kRankThreads = 64;  // small: one task of 11,000 points then still occupies all SMs
constexpr int kChainThreads = 256;

/// The task of a block and its position among the task's blocks.
struct TaskBlock {
  int64_t task, first;
};
__device__ TaskBlock task_block(int64_t points, int per_block) {
  const int64_t blocks = gpu::ceil_div(points, per_block);
  return {blockIdx.x / blocks, blockIdx.x % blocks * per_block};
}

__global__ void __launch_bounds__(kPointThreads) linear_kernel(PriorDraw draw) {
  const BatchView& out = draw.out;
  const LinearTask model{draw.stream, out.features, kLogNoiseMean, kLogNoiseDeviation};
  const int64_t point = (int64_t(blockIdx.x) * kPointThreads + threadIdx.x) / kLanes;
  const int lane = int(threadIdx.x % kLanes);
  const bool active = point < out.tasks * out.points();
  const int64_t task = point / out.points(), i = point - task * out.points();
  double sum = 0;
  if (active) {
    for (int64_t block = lane; block < model.blocks(); block += kLanes)
      sum += model.term(out.x(task, i), point, block, model.weights(task, block));
    if (lane == kLanes - 1) {
      double intercept, sigma;
      model.rest(task, intercept, sigma);
      sum += intercept + sigma * observation_noise(draw.stream.words(Purpose::point, point));
    }
  }
  for (int step = 1; step < kLanes; step *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  if (active && lane == 0) *out.y(task, i) = float(sum);
}

__global__ void __launch_bounds__(kPointThreads) fourier_kernel(PriorDraw draw) {
  extern __shared__ double weights[];
  const BatchView& out = draw.out;
  const auto [task, first] = task_block(out.points(), kPointThreads);
  for (int64_t block = threadIdx.x; block * 4 < 2 * draw.harmonics + 1; block += kPointThreads)
    fourier_weights(draw.stream, task, draw.amplitude, draw.harmonics, block, weights);
  __syncthreads();
  const int64_t i = first + threadIdx.x;
  if (i >= out.points()) return;
  const Uint4 random = draw.stream.words(Purpose::point, task * out.points() + i);
  const double x = position_of(random.word[0] >> 8);
  *out.x(task, i) = float(x);
  *out.y(task, i) = float(fourier_sum(weights, draw.harmonics, draw.frequency * x) +
                          draw.noise * observation_noise(random));
}

__global__ void __launch_bounds__(kRankThreads) rank_kernel(PriorDraw draw) {
  __shared__ uint32_t keys[kRankThreads];
  const BatchView& out = draw.out;
  const int64_t points = out.points();
  const auto [task, first] = task_block(points, kRankThreads);
  const int64_t i = first + threadIdx.x, base = task * points;
  const uint32_t own = position_key(draw.stream, base + i);
  int64_t rank = 0;
  for (int64_t tile = 0; tile < points; tile += kRankThreads) {
    __syncthreads();  // the last tile has been read
    // Keys have 24 bits; padding comes after all of them.
    keys[threadIdx.x] =
        tile + threadIdx.x < points ? position_key(draw.stream, base + tile + threadIdx.x) : 0xFFFFFFFFu;
    __syncthreads();
    // Equal keys are ordered by point: those of earlier tiles count, in the own tile those before.
    const uint32_t limit = own + (tile < first);
    int count = 0;
#pragma unroll 16
    for (int j = 0; j < kRankThreads; ++j) count += keys[j] < limit + (tile == first && j < int(threadIdx.x));
    rank += count;
  }
  if (i >= points) return;
  const double x = position_of(own);
  *out.x(task, i) = float(x);
  draw.order[base + rank] = i;
  draw.sorted_x[base + rank] = float(x);
}

/// The time since the point of the rank before, in units of 1 / lambda.
__device__ double gap_before(const PriorDraw& draw, int64_t base, int64_t rank) {
  if (rank == 0) return kMaternForever;
  return draw.rate * (double(draw.sorted_x[base + rank]) - double(draw.sorted_x[base + rank - 1]));
}

__global__ void __launch_bounds__(kPointThreads) increment_kernel(PriorDraw draw) {
  const int64_t points = draw.out.points();
  const auto [task, first] = task_block(points, kPointThreads);
  const int64_t rank = first + threadIdx.x, base = task * points;
  if (rank >= points) return;
  const Normals drive = normals(draw.stream, Purpose::process, base + draw.order[base + rank]);
  double increment[3];
  matern_increment(gap_before(draw, base, rank), drive.value, increment);
  double* const to = draw.increments + (base + rank) * 4;
  for (int c = 0; c < 3; ++c) to[c] = increment[c];
  to[3] = drive.value[3];
}

__global__ void __launch_bounds__(kChainThreads) chain_kernel(PriorDraw draw) {
  __shared__ double states[kChainThreads][3], spans[kChainThreads];
  const BatchView& out = draw.out;
  const int64_t points = out.points(), task = blockIdx.x, base = task * points;
  const int64_t chunk = gpu::ceil_div(points, kChainThreads);
  const int t = int(threadIdx.x);
  const int64_t first = min(t * chunk, points), last = min(first + chunk, points);

  // The chunk's end from a state of zero, and the time that the chunk spans.
  double state[3] = {}, span = 0;
  for (int64_t rank = first; rank < last; ++rank) {
    const double tau = gap_before(draw, base, rank);
    const double* const increment = draw.increments + (base + rank) * 4;
    MaternDecay(tau).apply(state);
    for (int c = 0; c < 3; ++c) state[c] += increment[c];
    span += tau;
  }

  // Inclusive scan over the chunks (Hillis, Steele): (A, e) after (A', e') is (A A', A e' + e).
  for (int distance = 1;; distance *= 2) {
    for (int c = 0; c < 3; ++c) states[t][c] = state[c];
    spans[t] = span;
    __syncthreads();
    if (distance >= kChainThreads) break;
    if (t >= distance) {
      double before[3];
      for (int c = 0; c < 3; ++c) before[c] = states[t - distance][c];
      MaternDecay(span).apply(before);
      for (int c = 0; c < 3; ++c) state[c] += before[c];
      span += spans[t - distance];
    }
    __syncthreads();
  }

  // Again from the state at the end of the chunk before.
  for (int c = 0; c < 3; ++c) state[c] = t > 0 ? states[t - 1][c] : 0.0;
  for (int64_t rank = first; rank < last; ++rank) {
    const double* const increment = draw.increments + (base + rank) * 4;
    MaternDecay(gap_before(draw, base, rank)).apply(state);
    for (int c = 0; c < 3; ++c) state[c] += increment[c];
    *out.y(task, draw.order[base + rank]) = float(draw.scale * state[0] + draw.noise * increment[3]);
  }
}

dim3 grid_of(PriorKind kind, int64_t blocks) {
  check(blocks <= 0x7FFFFFFF, "prior ", name_of(kind), ": ", blocks,
        " blocks of threads are more than a grid holds; choose a smaller batch");
  return dim3(unsigned(blocks));
}

}  // namespace

void draw_cuda(Device device, PriorKind kind, const PriorDraw& draw) {
  const int64_t tasks = draw.out.tasks, points = draw.out.points();
  const auto per_task = [&](int threads) {
    return gpu::LaunchShape{.grid = grid_of(kind, tasks * gpu::ceil_div(points, threads)),
                            .block = dim3(unsigned(threads))};
  };
  switch (kind) {
    case PriorKind::linear:
      gpu::launch(device,
                  {.grid = grid_of(kind, gpu::ceil_div(tasks * points * kLanes, kPointThreads)),
                   .block = dim3(kPointThreads)},
                  linear_kernel, draw);
      return;
    case PriorKind::rbf:
    case PriorKind::periodic: {
      gpu::LaunchShape shape = per_task(kPointThreads);
      shape.shared_bytes = size_t(2 * draw.harmonics + 1) * sizeof(double);
      gpu::launch(device, shape, fourier_kernel, draw);
      return;
    }
    case PriorKind::matern52:
      gpu::launch(device, per_task(kRankThreads), rank_kernel, draw);
      gpu::launch(device, per_task(kPointThreads), increment_kernel, draw);
      gpu::launch(device, {.grid = grid_of(kind, tasks), .block = dim3(kChainThreads)}, chain_kernel, draw);
      return;
  }
}

}  // namespace tessera::datasets

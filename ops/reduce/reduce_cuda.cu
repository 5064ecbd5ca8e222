#include <algorithm>
#include <type_traits>

#include "gpu/elementwise.cuh"
#include "gpu/grid.cuh"
#include "ops/reduce/reduce_kernels.h"

/// Reductions on a GPU. One read of x, next to nothing written: bound by memory.
///
/// A pass reduces one dimension, in one of two ways:
///   rows     The reduced dimension is the innermost in memory. 4 to 32 or 256 threads share a row, by
///            its length.
///   columns  A dimension that stays is innermost: threads of a block lie along it, up to 8 or 32 of
///            them (128 bytes, so that whole cache lines are read), the others side by side along the
///            reduced dimension; a tree in shared memory joins them.
/// Both read words of 16 bytes where x is aligned for it, one accumulator an element of the word, so sums are
/// short: many terms lose little in f32. If few blocks would work on long sums (a full reduction, the
/// gradient of a bias), the reduced dimension is cut into chunks; a second pass of the same kernels joins
/// their results, which lie in scratch memory. What cannot be merged to one dimension (all of a pitched
/// tensor) is reduced one dimension after the other. Cuts and orders are functions of the shape alone: no
/// atomics, every run gives the same bits.

namespace tessera::ops {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerProcessor = 4;  // 64 registers per thread
constexpr int64_t kTargetBlocks = 512;  // four blocks on each of about 128 processors, resident together
constexpr int64_t kRowChunk = 4096;     // elements; a multiple of every pack
constexpr int64_t kLineBytes = 128;     // of a cache line

/// From a sum to the output: sqrt(sum / count).
struct Finish {
  float count = 1;
  bool root = false;
};

/// How elements are combined. `Partial`: what a pass leaves for the next, which combines by `Rest`. Sums are
/// f64, as on the CPU: a long sum that cancels stays right, and an f64 addition an element is far below what
/// memory takes.
struct SumOf {
  using Acc = double;
  using Rest = SumOf;
  template <class T>
  using Partial = double;
  static __device__ double identity() { return 0; }
  static __device__ double combine(double a, double b) { return a + b; }
  template <class T>
  __device__ double lift(T x, int64_t, int64_t) const {
    return double(x);
  }
  template <class Out>
  static __device__ Out finish(double sum, Finish how) {
    const double mean = sum / how.count, value = how.root ? sqrt(mean) : mean;
    if constexpr (std::is_same_v<Out, double>)
      return value;  // to the next pass
    else
      return Out(float(value));
  }
};

struct SquaresOf : SumOf {
  template <class T>
  __device__ double lift(T x, int64_t, int64_t) const {
    return double(x) * double(x);
  }
};

struct MaxOf {
  using Acc = float;
  using Rest = MaxOf;
  template <class T>
  using Partial = T;  // a maximum is one of the elements: exact
  static __device__ float identity() { return -__builtin_huge_valf(); }
  static __device__ float combine(float a, float b) { return a != a ? a : (b > a || b != b ? b : a); }
  template <class T>
  __device__ float lift(T x, int64_t, int64_t) const {
    return float(x);
  }
  template <class Out>
  static __device__ Out finish(float value, Finish) {
    return Out(value);
  }
};

struct MinOf : MaxOf {
  using Rest = MinOf;
  static __device__ float identity() { return __builtin_huge_valf(); }
  static __device__ float combine(float a, float b) { return a != a ? a : (b < a || b != b ? b : a); }
};

/// The least index.
struct LeastOf {
  using Acc = int64_t;
  using Rest = LeastOf;
  template <class T>
  using Partial = int64_t;
  static __device__ int64_t identity() { return INT64_MAX; }
  static __device__ int64_t combine(int64_t a, int64_t b) { return a < b ? a : b; }
  __device__ int64_t lift(int64_t x, int64_t, int64_t) const { return x; }
  template <class Out>
  static __device__ Out finish(int64_t value, Finish) {
    return value;
  }
};

/// The first index at which x is the maximum, or the minimum, of its output.
template <class T>
struct FirstOf : LeastOf {
  const T* chosen = nullptr;  // by number of the output
  __device__ int64_t lift(T x, int64_t output, int64_t index) const {
    const float value = float(x), wanted = float(chosen[output]);
    return value == wanted || (value != value && wanted != wanted) ? index : identity();
  }
};

/// A pass: the plan has one reduced dimension. A unit of work is one chunk of one row or of one tile of
/// columns.
struct Pass {
  ReducePlan plan;
  int64_t chunks = 1, chunk_length = 0;  // of the reduced dimension
  int64_t chunk_y = 0;                   // from one chunk's results to the next
  bool packs = false;                    // rows: read by words
  int across = 1;                        // rows: threads per row; columns: threads along them
  int64_t columns = 1, tiles = 1;        // columns: how many lie side by side, in how many tiles
};

template <class T, class Out, class Op>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    rows_kernel(const Pass pass, const T* x, Out* y, const Op op, const Finish how) {
  using Acc = typename Op::Acc;
  constexpr int kPack = gpu::kPackOf<T>;
  __shared__ Acc scratch[kThreads / gpu::kWarp];
  gpu::wait_and_launch_dependents();
  const int lane = int(threadIdx.x) % pass.across, group = int(threadIdx.x) / pass.across;
  const int groups = kThreads / pass.across;
  const int64_t units = pass.plan.outputs * pass.chunks, stride = pass.plan.reduced_x[0];
  // Every thread makes the same number of rounds: shuffles and barriers need them all.
  for (int64_t first = int64_t(blockIdx.x) * groups; first < units; first += int64_t(gridDim.x) * groups) {
    const int64_t unit = first + group;
    const bool active = unit < units;
    int64_t x_offset = 0, y_offset = 0;
    Acc all = Op::identity();
    if (active) {
      const int64_t output = pass.chunks == 1 ? unit : unit / pass.chunks,
                    chunk = unit - output * pass.chunks;
      pass.plan.offsets(output, x_offset, y_offset);
      y_offset += chunk * pass.chunk_y;
      const int64_t begin = chunk * pass.chunk_length, left = pass.plan.length - begin;
      const int64_t n = left < pass.chunk_length ? left : pass.chunk_length;
      const T* const row = x + x_offset + begin * stride;
      int64_t done = 0;
      if (pass.packs) {
        Acc sums[kPack];
#pragma unroll
        for (int k = 0; k < kPack; ++k) sums[k] = Op::identity();
#pragma unroll 4
        for (int64_t i = int64_t(lane) * kPack; i + kPack <= n; i += int64_t(pass.across) * kPack) {
          const auto pack = gpu::load_pack<kPack>(row + i);
#pragma unroll
          for (int k = 0; k < kPack; ++k)
            sums[k] = Op::combine(sums[k], op.lift(pack.at[k], output, begin + i + k));
        }
#pragma unroll
        for (int step = kPack / 2; step > 0; step /= 2)
#pragma unroll
          for (int k = 0; k < step; ++k) sums[k] = Op::combine(sums[k], sums[k + step]);
        all = sums[0];
        done = n / kPack * kPack;
      }
#pragma unroll 4
      for (int64_t i = done + lane; i < n; i += pass.across)
        all = Op::combine(all, op.lift(row[i * stride], output, begin + i));
    }
    for (int step = (pass.across < gpu::kWarp ? pass.across : gpu::kWarp) / 2; step > 0; step /= 2)
      all = Op::combine(all, __shfl_xor_sync(0xFFFFFFFFu, all, step));
    if (pass.across > gpu::kWarp) {  // then one row a block
      if (threadIdx.x % gpu::kWarp == 0) scratch[threadIdx.x / gpu::kWarp] = all;
      __syncthreads();
      all = scratch[0];
      for (int warp = 1; warp < kThreads / gpu::kWarp; ++warp) all = Op::combine(all, scratch[warp]);
      __syncthreads();  // before the next round writes
    }
    if (active && lane == 0) y[y_offset] = Op::template finish<Out>(all, how);
  }
}

template <int kPack, class T, class Out, class Op>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    columns_kernel(const Pass pass, const T* x, Out* y, const Op op, const Finish how) {
  using Acc = typename Op::Acc;
  constexpr int kUnroll = sizeof(Acc) * kPack > 32 ? 2 : 4;  // loads in flight, as registers allow
  __shared__ Acc scratch[kPack][kThreads];  // [column of the pack][thread]: neighbours in different banks
  gpu::wait_and_launch_dependents();
  const ReducePlan& plan = pass.plan;
  const int across = pass.across, along = kThreads / across;
  const int column = int(threadIdx.x) % across, line = int(threadIdx.x) / across;
  const int64_t stride = plan.reduced_x[0];
  const int64_t units = plan.outputs / pass.columns * pass.chunks * pass.tiles;
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int64_t rest = unit / pass.tiles, outer = rest / pass.chunks, chunk = rest - outer * pass.chunks;
    const int64_t first = ((unit - rest * pass.tiles) * across + column) * kPack;
    const int64_t left = pass.columns - first;
    const int valid = left >= kPack ? kPack : left > 0 ? int(left) : 0;
    Acc sums[kPack];
#pragma unroll
    for (int k = 0; k < kPack; ++k) sums[k] = Op::identity();
    int64_t x_offset = 0, y_offset = 0;
    if (valid > 0) {
      const int64_t output = outer * pass.columns + first;
      plan.offsets(output, x_offset, y_offset);
      const int64_t begin = chunk * pass.chunk_length;
      const int64_t end = begin + pass.chunk_length < plan.length ? begin + pass.chunk_length : plan.length;
      const T* const top = x + x_offset;
      if (valid == kPack) {
#pragma unroll kUnroll
        for (int64_t i = begin + line; i < end; i += along) {
          const auto pack = gpu::load_pack<kPack>(top + i * stride);
#pragma unroll
          for (int k = 0; k < kPack; ++k) sums[k] = Op::combine(sums[k], op.lift(pack.at[k], output + k, i));
        }
      } else {  // the last pack of a width that is no multiple: columns beyond it are never read
        for (int64_t i = begin + line; i < end; i += along)
#pragma unroll
          for (int k = 0; k < kPack; ++k)
            if (k < valid) sums[k] = Op::combine(sums[k], op.lift(top[i * stride + k], output + k, i));
      }
    }
#pragma unroll
    for (int k = 0; k < kPack; ++k) scratch[k][threadIdx.x] = sums[k];
    __syncthreads();
    for (int step = along / 2; step > 0; step /= 2) {
      if (line < step) {
#pragma unroll
        for (int k = 0; k < kPack; ++k)
          scratch[k][threadIdx.x] =
              Op::combine(scratch[k][threadIdx.x], scratch[k][threadIdx.x + unsigned(step * across)]);
      }
      __syncthreads();
    }
    if (line == 0) {  // what it reads only it writes, so the next round needs no further barrier
      const int64_t column_y = plan.kept_y[plan.kept_rank - 1];
#pragma unroll
      for (int k = 0; k < kPack; ++k)
        if (k < valid)
          y[y_offset + chunk * pass.chunk_y + k * column_y] =
              Op::template finish<Out>(scratch[k][threadIdx.x], how);
    }
  }
}

/// True if every row or column start is a multiple of a pack.
template <class T>
bool aligned(const ReducePlan& plan, const T* x, int kept_dims, int64_t stride, int pack) {
  bool fits = reinterpret_cast<uintptr_t>(x) % (sizeof(T) * size_t(pack)) == 0 && stride % pack == 0;
  for (int dim = 0; dim < kept_dims; ++dim) fits = fits && plan.kept_x[dim] % pack == 0;
  return fits;
}

/// The least power of two that is at least n, at most `limit`.
int power_of_two(int64_t n, int limit) {
  int power = 1;
  while (power < n && power < limit) power *= 2;
  return power;
}

unsigned grid(Device device, int64_t blocks) {
  return unsigned(std::min<int64_t>(blocks, int64_t(device.multiprocessors()) * 32));
}

/// Cuts the reduced dimension into as many chunks as bring `blocks` to the target, each of at least `least`
/// elements.
void cut(Pass& pass, int64_t blocks, int64_t least, int64_t unit) {
  const int64_t length = pass.plan.length;
  const int64_t wanted = std::min(gpu::ceil_div(length, least), gpu::ceil_div(kTargetBlocks, blocks));
  pass.chunk_length = std::max<int64_t>(unit, gpu::ceil_div(gpu::ceil_div(length, wanted), unit) * unit);
  pass.chunks = gpu::ceil_div(length, pass.chunk_length);
}

template <class T, class Out, class Op>
void launch_rows(Device device, Pass& pass, const T* x, Out* y, const Op& op, Finish how) {
  constexpr int kPack = gpu::kPackOf<T>;
  pass.packs = pass.plan.reduced_x[0] == 1 && aligned(pass.plan, x, pass.plan.kept_rank, 0, kPack);
  const int64_t units = pass.plan.outputs * pass.chunks;
  gpu::launch_dependent(device, {dim3(grid(device, gpu::ceil_div(units, kThreads / pass.across))), kThreads},
                        rows_kernel<T, Out, Op>, pass, x, y, op, how);
}

template <int kPack, class T, class Out, class Op>
void launch_columns(Device device, const Pass& pass, const T* x, Out* y, const Op& op, Finish how) {
  const int64_t units = pass.plan.outputs / pass.columns * pass.chunks * pass.tiles;
  gpu::launch_dependent(device, {dim3(grid(device, units)), kThreads}, columns_kernel<kPack, T, Out, Op>,
                        pass, x, y, op, how);
}

/// Reduces the plan's one reduced dimension. `whole`: in one pass, as the second pass is.
template <class T, class Out, class Op>
void reduce_dim(Device device, const ReducePlan& plan, const T* x, Out* y, const Op& op, Finish how,
                bool whole = false) {
  constexpr int kPack = gpu::kPackOf<T>;
  const int last = plan.kept_rank - 1;
  const bool by_rows = plan.kept_rank == 0 || (plan.length > 1 && plan.reduced_x[0] < plan.kept_x[last]);
  Pass pass;
  pass.plan = plan;
  pass.chunk_length = plan.length;
  bool packs = false;
  if (by_rows) {
    const bool few = plan.outputs < 4 * kTargetBlocks;
    // About four packs per lane, so that there are loads in flight; a block for few long rows.
    pass.across = plan.length > (few ? 256 : kRowChunk)
                      ? kThreads
                      : std::max(4, power_of_two(gpu::ceil_div(plan.length, 4 * kPack), gpu::kWarp));
    if (!whole && plan.outputs < kTargetBlocks) cut(pass, plan.outputs, kRowChunk, kRowChunk);
  } else {
    packs = plan.kept_x[last] == 1 && plan.kept_sizes[last] >= kPack &&
            aligned(plan, x, last, plan.reduced_x[0], kPack);
    const int pack = packs ? kPack : 1;
    pass.columns = plan.kept_sizes[last];
    const int lanes = packs ? int(kLineBytes) / 16 : gpu::kWarp;
    pass.across = power_of_two(gpu::ceil_div(pass.columns, pack), lanes);
    pass.tiles = gpu::ceil_div(pass.columns, int64_t(pass.across) * pack);
    const int64_t blocks = plan.outputs / pass.columns * pass.tiles;
    if (!whole && blocks < kTargetBlocks) cut(pass, blocks, int64_t(kThreads / pass.across) * 4, 1);
  }
  const auto launch = [&]<class To>(To* to, Finish finish) {
    if (by_rows) return launch_rows(device, pass, x, to, op, finish);
    if (packs) return launch_columns<kPack>(device, pass, x, to, op, finish);
    launch_columns<1>(device, pass, x, to, op, finish);
  };
  if (pass.chunks == 1) return launch(y, how);

  using Partial = typename Op::template Partial<T>;
  const Tensor scratch = Tensor::empty_packed({pass.chunks * plan.outputs}, dtype_of<Partial>, device);
  pass.plan.pack_outputs();
  pass.chunk_y = plan.outputs;
  launch(scratch.data<Partial>(), Finish{});
  ReducePlan rest = plan;
  std::copy_n(pass.plan.kept_y, kMaxRank, rest.kept_x);
  rest.length = rest.reduced_sizes[0] = pass.chunks;
  rest.reduced_x[0] = plan.outputs;
  reduce_dim(device, rest, scratch.data<Partial>(), y, typename Op::Rest{}, how, true);
}

/// Reduces any plan: the innermost reduced dimension first, the others, merged by their results in scratch
/// memory, after it.
template <class T, class Out, class Op>
void reduce_all(Device device, const ReducePlan& plan, const T* x, Out* y, const Op& op, Finish how) {
  if (plan.reduced_rank == 1) return reduce_dim(device, plan, x, y, op, how);
  using Partial = typename Op::template Partial<T>;
  const int inner = plan.reduced_rank - 1;
  ReducePlan one;  // [other reduced dimensions, kept dimensions], the second part without gaps in scratch
  const int64_t others = plan.length / plan.reduced_sizes[inner];
  int64_t stride = others * plan.outputs;
  const auto keep = [&](int64_t size, int64_t from) {
    stride /= size;
    one.keep(size, from, stride);
  };
  for (int dim = 0; dim < inner; ++dim) keep(plan.reduced_sizes[dim], plan.reduced_x[dim]);
  for (int dim = 0; dim < plan.kept_rank; ++dim) keep(plan.kept_sizes[dim], plan.kept_x[dim]);
  one.reduce(plan.reduced_sizes[inner], plan.reduced_x[inner]);
  const Tensor scratch = Tensor::empty_packed({others * plan.outputs}, dtype_of<Partial>, device);
  reduce_dim(device, one, x, scratch.data<Partial>(), op, Finish{});

  ReducePlan rest = plan;
  rest.pack_outputs();
  std::copy_n(rest.kept_y, kMaxRank, rest.kept_x);
  std::copy_n(plan.kept_y, kMaxRank, rest.kept_y);
  rest.reduced_rank = 1;
  rest.length = rest.reduced_sizes[0] = others;
  rest.reduced_x[0] = plan.outputs;
  reduce_dim(device, rest, scratch.data<Partial>(), y, typename Op::Rest{}, how);
}

template <class T>
struct Spread {
  float count;
  __device__ T operator()(T dy) const { return T(float(dy) / count); }
};

template <class T>
struct L2Backward {
  __device__ T operator()(T dy, T x, T y) const {
    const float length = float(y);
    return length == 0 ? T(0.0f) : T(float(dy) * (float(x) / length));
  }
};

/// dx at the chosen element of each output; dx is 0 elsewhere already.
template <class T>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    scatter_kernel(const ReducePlan plan, T* dx, const T* dy, const int64_t* chosen) {
  gpu::wait_and_launch_dependents();
  const int64_t output = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (output >= plan.outputs) return;
  int64_t dx_offset, dy_offset;
  plan.offsets(output, dx_offset, dy_offset);
  dx[dx_offset + chosen[output] * plan.reduced_x[0]] = dy[dy_offset];
}

}  // namespace

void reduce_cuda(const Tensor& y, const Tensor& x, const ReducePlan& plan, ReduceKind kind) {
  const Device device = x.device();
  dispatch_floating_cuda(x.dtype(), name_of(kind), [&]<class T>() {
    const T* const from = x.data<T>();
    if (y.dtype() != x.dtype() && kind == ReduceKind::norm)
      return reduce_all(device, plan, from, y.data<float>(), SquaresOf{}, Finish{.root = true});
    if (y.dtype() != x.dtype()) return reduce_all(device, plan, from, y.data<float>(), SumOf{}, Finish{});
    T* const to = y.data<T>();
    switch (kind) {
      case ReduceKind::sum:
        return reduce_all(device, plan, from, to, SumOf{}, Finish{});
      case ReduceKind::mean:
        return reduce_all(device, plan, from, to, SumOf{}, Finish{.count = float(plan.length)});
      case ReduceKind::max:
        return reduce_all(device, plan, from, to, MaxOf{}, Finish{});
      case ReduceKind::min:
        return reduce_all(device, plan, from, to, MinOf{}, Finish{});
      case ReduceKind::norm:
        return reduce_all(device, plan, from, to, SquaresOf{}, Finish{.root = true});
    }
  });
}

void spread_cuda(const Tensor& dx, const Tensor& dy, int64_t count) {
  dispatch_floating_cuda(dx.dtype(), "sum",
                         [&]<class T>() { gpu::elementwise<T, T>(dx, Spread<T>{float(count)}, dy); });
}

void l2_backward_cuda(const Tensor& dx, const Tensor& dy, const Tensor& x, const Tensor& y) {
  dispatch_floating_cuda(dx.dtype(), "norm",
                         [&]<class T>() { gpu::elementwise<T, T, T, T>(dx, L2Backward<T>{}, dy, x, y); });
}

void find_first_cuda(const Tensor& index, const Tensor& x, const Tensor& y, int dim) {
  ReducePlan plan = plan_dim(x.layout(), dim, y.layout());
  if (plan.outputs == 0) return;
  plan.pack_outputs();
  dispatch_floating_cuda(x.dtype(), "argmax", [&]<class T>() {
    FirstOf<T> first;
    first.chosen = y.data<T>();
    reduce_dim(x.device(), plan, x.data<T>(), index.data<int64_t>(), first, Finish{});
  });
}

void max_backward_cuda(const Tensor& dx, const Tensor& dy, const Tensor& x, const Tensor& y, int dim) {
  dx.fill(0);
  const ReducePlan to = plan_dim(dx.layout(), dim, dy.layout());
  if (to.outputs == 0) return;
  const Tensor chosen = Tensor::empty_packed({to.outputs}, DType::i64, x.device());
  find_first_cuda(chosen, x, y, dim);
  dispatch_floating_cuda(dx.dtype(), "max", [&]<class T>() {
    gpu::launch_dependent(x.device(), {gpu::grid_of(gpu::ceil_div(to.outputs, kThreads)), kThreads},
                          scatter_kernel<T>, to, dx.data<T>(), dy.data<T>(), chosen.data<int64_t>());
  });
}

}  // namespace tessera::ops

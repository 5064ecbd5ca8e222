#pragma once

#include <algorithm>
#include <type_traits>

#include "gpu/dependent_launch.cuh"
#include "gpu/divide.cuh"
#include "gpu/elementwise.cuh"
#include "gpu/grid.cuh"
#include "ops/reduce/reduce_plan.h"
#include "tensor/tensor.h"

/// Reductions on a GPU. One read of x, next to nothing written: bound by memory.
///
/// A pass reduces one dimension or two, in one of two ways:
///   rows     A reduced dimension is the innermost in memory. 4 to 32 or 256 threads share an output, by its
///            number of elements.
///   columns  A dimension that stays is innermost: threads of a block lie along it and, where it is short,
///            along the next output's; the others side by side along what is reduced: as many as leave each
///            thread some elements, so that a few long rows are a thread's own. A tree in shared memory joins
///            them.
/// Both read words of 16 bytes where x is aligned for it, several before the first is used, also of the last
/// few. A thread has one accumulator an element of the word, so sums are short, or by rows one for all of
/// them where the operator joins neighbours. If few blocks would work on long sums (a full reduction, the
/// gradient of a bias), what is reduced is cut into chunks; a second pass of the same kernels joins their
/// results, which lie in scratch memory. More than two reduced dimensions that cannot be merged are reduced
/// one after the other. Cuts and orders are functions of the shape alone: no atomics, every run gives the
/// same bits.
///
/// Elements come from a source: Elements, those of x, or Mapped, a function of them, which may also write a
/// second function of them as they are read. How they are combined is an operator:
///   Acc, identity(), combine(a, b)   of the accumulators
///   kJoins<T>, join(all, few)        optional: all with a few neighbours of type T at once, which are f32
///                                    here; zeros stand for those past the end
///   kOrdered, add(all, x, index)     all with the element x, `index` in row-major order of what is reduced
///                                    (kOrdered: a thread has one accumulator per row, and calls come by
///                                    rising index)
///   Partial<T>, rest()               what a pass over elements of type T leaves for the next, and the
///                                    operator that joins it
///   store(y, at, output, all, how)   writes y[at], output number `output`; Out = Partial<T>: for the next
///                                    pass

namespace tessera::ops {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kFewBlocks = 264;            // two on each of about 132 SMs
constexpr int64_t kLeastSteps = 4 * kThreads;  // of a chunk of rows

/// From a sum to the output: the sum times share, or the root of that.
struct Finish {
  double share = 1;
  bool root = false;
};

/// What is reduced, as steps of a thread: elements, or packs of them along rows. Step s is column s %
/// per_row of row s / per_row.
struct Steps {
  int64_t count = 1, per_row = 1;
  bool several = false;  // rows
  gpu::Divider by_per_row;
  int64_t row_stride = 0, stride = 0;  // of x; from row to row, from step to step
  int64_t width = 1;                   // elements of a row

  __device__ __forceinline__ int64_t row_of(int64_t step) const {
    return several ? int64_t(by_per_row.divide(uint32_t(step))) : 0;
  }
};

/// A unit of work is one chunk of one output, or of one tile of columns.
struct Pass {
  ReducePlan plan;
  Steps steps;
  int64_t chunks = 1, chunk_length = 0;  // steps
  int64_t chunk_y = 0;                   // from one chunk's results to the next
  int across = 1;                        // rows: threads per output; columns: packs of a tile
  int64_t packs_per_row = 1, packs = 1;  // columns: of the innermost dimension; of all outputs
};

/// What is reduced: packs of what is read, by offset from x's first element, and `value`, element k of such a
/// pack. `own`: what an output has of its own, by its offset in the plan's z.
template <class T>
struct Elements {
  using Element = T;
  static constexpr int kOperands = 1;
  const T* x;
  template <int kPack>
  __device__ __forceinline__ gpu::PackedWords<T, kPack> load(int64_t at) const {
    return gpu::load_partial_pack<kPack>(x + at, kPack);
  }
  struct Own {};
  __device__ __forceinline__ Own own(int64_t) const { return {}; }
  template <int kPack>
  __device__ __forceinline__ T value(const gpu::PackedWords<T, kPack>& pack, int k, Own) const {
    return pack[k];
  }
  template <int kPack, class OwnOf>
  __device__ __forceinline__ void write(int64_t, const gpu::PackedWords<T, kPack>&, OwnOf) const {}
};

/// f(own, x, others...) in f32, not rounded: of the elements of tensors that lie as x does, and of
/// own = f.own(m), where m is the output's element of z (null: 1). `written`, if it is not null, lies as x
/// does, too, and takes f.written(own, x, others...), in whole packs.
template <class F, class T, int kOthers = 0>
struct Mapped {
  using Element = T;
  static constexpr int kOperands = 1 + kOthers;
  const T* x;
  const T* others[kOthers > 0 ? kOthers : 1];
  const T* z;
  F f;
  T* written = nullptr;
  template <int kPack>
  struct Packs {
    gpu::PackedWords<T, kPack> of[kOperands];
  };
  template <int kPack>
  __device__ __forceinline__ Packs<kPack> load(int64_t at) const {
    Packs<kPack> packs;
    packs.of[0] = gpu::load_partial_pack<kPack>(x + at, kPack);
#pragma unroll
    for (int n = 0; n < kOthers; ++n) packs.of[n + 1] = gpu::load_partial_pack<kPack>(others[n] + at, kPack);
    return packs;
  }
  using Own = float;
  __device__ __forceinline__ Own own(int64_t at) const {
    return f.own(z ? float(z[at]) : 1.0f);
  }
  template <int kPack>
  __device__ __forceinline__ float value(const Packs<kPack>& packs, int k, Own own) const {
    if constexpr (kOthers == 0)
      return f(own, float(packs.of[0][k]));
    else
      return f(own, float(packs.of[0][k]), float(packs.of[1][k]));
  }
  /// own_of(k): of element k.
  template <int kPack, class OwnOf>
  __device__ __forceinline__ void write(int64_t at, const Packs<kPack>& packs, OwnOf own_of) const {
    if constexpr (kOthers > 0) {
      if (!written) return;
      T results[kPack];
#pragma unroll
      for (int k = 0; k < kPack; ++k)
        results[k] = T(f.written(own_of(k), float(packs.of[0][k]), float(packs.of[1][k])));
      gpu::store_whole(written + at, gpu::packed<kPack>(results));
    }
  }
};

template <class Op, class T>
constexpr bool joins() {
  if constexpr (requires { Op::template kJoins<T>; }) return Op::template kJoins<T>;
  return false;
}

/// Blocks per SM, which leave a thread 80 or 64 registers.
template <class From, class Op>
inline constexpr int kBlocks = joins<Op, typename From::Element>() || From::kOperands > 1 ? 3 : 4;
template <class From, class Op>
inline constexpr int64_t kTargetBlocks = 128 * kBlocks<From, Op>;

template <class Acc>
__device__ __forceinline__ Acc from_lane(const Acc& value, int step) {
  return __shfl_xor_sync(0xFFFFFFFFu, value, step);
}

template <int kPack, class From, class Out, class Op>
__global__ void __launch_bounds__(kThreads, From::kOperands > 1 ? 3 : 4)
    rows_kernel(const __grid_constant__ Pass pass, const From from, Out* y, const Op op, const Finish how) {
  using Acc = typename Op::Acc;
  constexpr bool kJoins = joins<Op, typename From::Element>();
  constexpr int kBatch = 4 / From::kOperands, kSums = Op::kOrdered || kJoins ? 1 : kPack;
  __shared__ Acc scratch[kThreads / gpu::kWarp];
  gpu::wait_and_launch_dependents();
  const Steps& steps = pass.steps;
  const int lane = int(threadIdx.x) % pass.across, group = int(threadIdx.x) / pass.across;
  const int groups = kThreads / pass.across;
  const int64_t units = pass.plan.outputs * pass.chunks;
  // Every thread makes the same number of rounds: shuffles and barriers need them all.
  for (int64_t first = int64_t(blockIdx.x) * groups; first < units; first += int64_t(gridDim.x) * groups) {
    const int64_t unit = first + group;
    const bool active = unit < units;
    int64_t x_offset = 0, y_offset = 0, output = 0;
    Acc sums[kSums];
#pragma unroll
    for (int k = 0; k < kSums; ++k) sums[k] = Op::identity();
    if (active) {
      output = pass.chunks == 1 ? unit : ReducePlan::quotient(unit, pass.chunks);
      const int64_t chunk = unit - output * pass.chunks;
      pass.plan.offsets(output, x_offset, y_offset);
      y_offset += chunk * pass.chunk_y;
      const int64_t begin = chunk * pass.chunk_length,
                    end = begin + pass.chunk_length < steps.count ? begin + pass.chunk_length : steps.count;
      const auto own = from.own(pass.plan.z_offset(output));
      const auto offset_of = [&](int64_t step) {
        const int64_t row = steps.row_of(step);
        return x_offset + row * steps.row_stride + (step - row * steps.per_row) * steps.stride;
      };
      // A pack at the end of a row is read whole: it lies inside the storage.
      const auto load = [&](int64_t step) { return from.template load<kPack>(offset_of(step)); };
      const auto add = [&](int64_t step, const auto& pack) {
        from.write(offset_of(step), pack, [&](int) { return own; });
        const int64_t row = steps.row_of(step), column = (step - row * steps.per_row) * kPack;
        const int left = int(::min(steps.width - column, int64_t(kPack)));
        [[maybe_unused]] const int64_t index = row * steps.width + column;
        if constexpr (kJoins) {
          float few[kPack];
#pragma unroll
          for (int k = 0; k < kPack; ++k) few[k] = k < left ? float(from.value(pack, k, own)) : 0.0f;
          sums[0] = op.join(sums[0], few);
        } else if (left >= kPack) {
#pragma unroll
          for (int k = 0; k < kPack; ++k)
            sums[k % kSums] = op.add(sums[k % kSums], from.value(pack, k, own), index + k);
        } else {
#pragma unroll
          for (int k = 0; k < kPack - 1; ++k)
            if (k < left) sums[k % kSums] = op.add(sums[k % kSums], from.value(pack, k, own), index + k);
        }
      };
      // kBatch steps, or as many of them as there are: all are loaded before the first is added.
      const auto batch = [&](int64_t step, auto whole) {
        const auto is_there = [&](int n) { return whole || step + n * pass.across < end; };
        decltype(load(step)) packs[kBatch];
#pragma unroll
        for (int n = 0; n < kBatch; ++n)
          if (is_there(n)) packs[n] = load(step + n * pass.across);
#pragma unroll
        for (int n = 0; n < kBatch; ++n)
          if (is_there(n)) add(step + n * pass.across, packs[n]);
      };
      int64_t step = begin + lane;
      for (; step + (kBatch - 1) * pass.across < end; step += kBatch * pass.across)
        batch(step, std::true_type());
      if (step < end) batch(step, std::false_type());
    }
#pragma unroll
    for (int half = kSums / 2; half > 0; half /= 2)
#pragma unroll
      for (int k = 0; k < half; ++k) sums[k] = Op::combine(sums[k], sums[k + half]);
    Acc all = sums[0];
    for (int step = (pass.across < gpu::kWarp ? pass.across : gpu::kWarp) / 2; step > 0; step /= 2)
      all = Op::combine(all, from_lane(all, step));
    if (pass.across > gpu::kWarp) {  // then one output a block
      if (threadIdx.x % gpu::kWarp == 0) scratch[threadIdx.x / gpu::kWarp] = all;
      __syncthreads();
      all = scratch[0];
      for (int warp = 1; warp < kThreads / gpu::kWarp; ++warp) all = Op::combine(all, scratch[warp]);
      __syncthreads();  // before the next round writes
    }
    if (active && lane == 0) op.store(y, y_offset, output, all, how);
  }
}

template <int kPack, class From, class Out, class Op>
__global__ void __launch_bounds__(kThreads, (kBlocks<From, Op>))
    columns_kernel(const __grid_constant__ Pass pass, const From from, Out* y, const Op op,
                   const Finish how) {
  using Acc = typename Op::Acc;
  constexpr bool kJoins = joins<Op, typename From::Element>();
  // Loads in flight, as registers allow: four words, or as many as leave room for the sums.
  constexpr int kSumBytes = int(sizeof(Acc)) * kPack;
  constexpr int kWords = kJoins || kSumBytes <= 32 ? 4 : kSumBytes <= 64 ? 2 : 1;
  constexpr int kBatch = kWords < From::kOperands ? 1 : kWords / From::kOperands;
  __shared__ Acc scratch[kPack][kThreads];  // [column of the pack][thread]: neighbours in different banks
  gpu::wait_and_launch_dependents();
  const ReducePlan& plan = pass.plan;
  const Steps& steps = pass.steps;
  const int across = pass.across, along = kThreads / across;
  const int column = int(threadIdx.x) % across, line = int(threadIdx.x) / across;
  const int64_t tiles = (pass.packs + across - 1) / across, units = tiles * pass.chunks;
  const int64_t columns = plan.kept_sizes[plan.kept_rank - 1];
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int64_t chunk = pass.chunks == 1 ? 0 : ReducePlan::quotient(unit, tiles),
                  number = (unit - chunk * tiles) * across + column;
    const int64_t outer = ReducePlan::quotient(number, pass.packs_per_row),
                  first = (number - outer * pass.packs_per_row) * kPack;
    const int64_t output = outer * columns + first;
    const int left = number < pass.packs ? int(::min(columns - first, int64_t(kPack))) : 0;
    Acc sums[kPack];
#pragma unroll
    for (int k = 0; k < kPack; ++k) sums[k] = Op::identity();
    int64_t x_offset = 0, y_offset = 0;
    if (left > 0) {
      plan.offsets(output, x_offset, y_offset);
      y_offset += chunk * pass.chunk_y;
      const int64_t begin = chunk * pass.chunk_length,
                    end = begin + pass.chunk_length < steps.count ? begin + pass.chunk_length : steps.count;
      const auto offset_of = [&](int64_t step) {
        const int64_t row = steps.row_of(step);
        return x_offset + row * steps.row_stride + (step - row * steps.per_row) * steps.stride;
      };
      // A pack at the end of a row is read whole: it lies inside the storage, and what is past the end is not
      // stored.
      const auto load = [&](int64_t step) { return from.template load<kPack>(offset_of(step)); };
      typename From::Own own[kPack] = {};
      const int64_t z_offset = plan.z_offset(output), column_z = plan.kept_z[plan.kept_rank - 1];
#pragma unroll
      for (int k = 0; k < kPack; ++k)
        if (k < left) own[k] = from.own(z_offset + k * column_z);
      for (int64_t step = begin + line; step < end; step += kBatch * along) {
        const int ahead = int(::min(end - step, int64_t(kBatch) * along));
        decltype(load(step)) packs[kBatch];
#pragma unroll
        for (int n = 0; n < kBatch; ++n)
          if (n * along < ahead) packs[n] = load(step + n * along);
#pragma unroll
        for (int n = 0; n < kBatch; ++n)
          if (n * along < ahead)
            from.write(offset_of(step + n * along), packs[n], [&](int k) { return own[k]; });
        if constexpr (kJoins) {
#pragma unroll
          for (int k = 0; k < kPack; ++k) {
            float few[kBatch];
#pragma unroll
            for (int n = 0; n < kBatch; ++n)
              few[n] = n * along < ahead ? float(from.value(packs[n], k, own[k])) : 0.0f;
            sums[k] = op.join(sums[k], few);
          }
        } else {
#pragma unroll
          for (int n = 0; n < kBatch; ++n)
            if (n * along < ahead)
#pragma unroll
              for (int k = 0; k < kPack; ++k)
                sums[k] = op.add(sums[k], from.value(packs[n], k, own[k]), step + n * along);
        }
      }
    }
    if (along > 1) {
#pragma unroll
      for (int k = 0; k < kPack; ++k) scratch[k][threadIdx.x] = sums[k];
      __syncthreads();
      for (int half = along / 2; half > 0; half /= 2) {
        if (line < half) {
#pragma unroll
          for (int k = 0; k < kPack; ++k)
            scratch[k][threadIdx.x] =
                Op::combine(scratch[k][threadIdx.x], scratch[k][threadIdx.x + unsigned(half * across)]);
        }
        __syncthreads();
      }
#pragma unroll
      for (int k = 0; k < kPack; ++k) sums[k] = scratch[k][threadIdx.x];
    }
    if (line == 0 && left > 0) {
      const int64_t column_y = plan.kept_y[plan.kept_rank - 1];
#pragma unroll
      for (int k = 0; k < kPack; ++k)
        if (k < left) op.store(y, y_offset + k * column_y, output + k, sums[k], how);
    }
  }
}

/// Whether every row of the plan, of what is kept or reduced but in its innermost dimension, starts on a
/// pack.
template <class T>
bool aligned(const ReducePlan& plan, const T* x, int kept_dims, int reduced_dims, int pack) {
  bool fits = reinterpret_cast<uintptr_t>(x) % (sizeof(T) * size_t(pack)) == 0;
  for (int dim = 0; dim < kept_dims; ++dim) fits = fits && plan.kept_x[dim] % pack == 0;
  for (int dim = 0; dim < reduced_dims; ++dim) fits = fits && plan.reduced_x[dim] % pack == 0;
  return fits;
}

/// The least power of two that is at least n, from `least` to `most`.
inline int power_of_two(int64_t n, int least, int most) {
  int power = least;
  while (power < n && power < most) power *= 2;
  return power;
}

inline unsigned grid(Device device, int64_t blocks) {
  return unsigned(std::min<int64_t>(blocks, int64_t(device.multiprocessors()) * 32));
}

/// Cuts the steps so that `blocks` become about `target`, each chunk of at least `least` steps.
inline void cut(Pass& pass, int64_t blocks, int64_t target, int64_t least) {
  const int64_t steps = pass.steps.count;
  const int64_t wanted = std::min(gpu::ceil_div(steps, least), gpu::ceil_div(target, blocks));
  pass.chunk_length = gpu::ceil_div(steps, wanted);
  pass.chunks = gpu::ceil_div(steps, pass.chunk_length);
}

/// What the plan reduces, in steps of `pack` elements of its innermost dimension.
inline Steps steps_of(const ReducePlan& plan, int pack) {
  const int inner = plan.reduced_rank - 1;
  Steps steps{.width = plan.reduced_sizes[inner]};
  steps.per_row = gpu::ceil_div(steps.width, pack);
  steps.several = inner > 0;
  steps.count = plan.length / steps.width * steps.per_row;
  if (steps.several) {
    steps.by_per_row = gpu::Divider(uint32_t(steps.per_row));
    steps.row_stride = plan.reduced_x[0];
  }
  steps.stride = plan.reduced_x[inner] * pack;
  return steps;
}

/// Reduces the plan's one or two reduced dimensions. `alike`: all operands of the source are aligned as x is.
/// `whole`: without chunks, as the second pass is.
template <class From, class Out, class Op>
void reduce_pass(Device device, const ReducePlan& plan, const From& from, Out* y, const Op& op, Finish how,
                 bool alike = true, bool whole = false) {
  using T = typename From::Element;
  constexpr int kPack = std::min(gpu::kPackOf<T>, 8);  // accumulators of a thread
  const int last = plan.kept_rank - 1, inner = plan.reduced_rank - 1;
  const int64_t stride = plan.reduced_x[inner];
  const bool by_rows = plan.kept_rank == 0 || (plan.reduced_sizes[inner] > 1 && stride < plan.kept_x[last]);
  Pass pass;
  pass.plan = plan;
  const bool packs = alike && (by_rows ? stride == 1 && aligned(plan, from.x, plan.kept_rank, inner, kPack)
                                       : plan.kept_x[last] == 1 && plan.kept_sizes[last] >= kPack &&
                                             aligned(plan, from.x, last, inner + 1, kPack));
  const int pack = packs ? kPack : 1;
  pass.steps = steps_of(plan, by_rows ? pack : 1);
  const int64_t steps = pass.steps.count;
  pass.chunk_length = steps;
  int64_t blocks = 0;
  if (by_rows) {
    // About four steps per lane, so that there are loads in flight; a block for few long rows.
    const bool few = plan.outputs < 4 * kTargetBlocks<From, Op>;
    pass.across = steps > (few ? 128 : 512) ? kThreads : power_of_two(gpu::ceil_div(steps, 4), 4, gpu::kWarp);
    blocks = gpu::ceil_div(plan.outputs, kThreads / pass.across);
    if (!whole && blocks < kFewBlocks) cut(pass, blocks, kTargetBlocks<From, Op>, kLeastSteps);
    blocks = gpu::ceil_div(plan.outputs * pass.chunks, kThreads / pass.across);
  } else {
    pass.packs_per_row = gpu::ceil_div(plan.kept_sizes[last], pack);
    pass.packs = plan.outputs / plan.kept_sizes[last] * pass.packs_per_row;
    // Eight steps per thread, in at most 32 lines; twice as many where blocks are few.
    int along = power_of_two(gpu::ceil_div(steps, 8), 1, packs ? 32 : 8);
    const auto blocks_of = [&] { return gpu::ceil_div(pass.packs, kThreads / along); };
    if (packs && blocks_of() < kFewBlocks && steps >= 8 * 64) along = 64;
    pass.across = kThreads / along;
    blocks = blocks_of();
    if (!whole && blocks < kFewBlocks) cut(pass, blocks, kTargetBlocks<From, Op>, int64_t(along) * 8);
    blocks *= pass.chunks;
  }
  const auto launch = [&]<class To>(To* to, Finish finish) {
    const gpu::LaunchShape shape{dim3(grid(device, blocks)), kThreads};
    const auto run = [&](auto kernel) {
      gpu::launch_dependent(device, shape, kernel, pass, from, to, op, finish);
    };
    if (by_rows)
      packs ? run(rows_kernel<kPack, From, To, Op>) : run(rows_kernel<1, From, To, Op>);
    else
      packs ? run(columns_kernel<kPack, From, To, Op>) : run(columns_kernel<1, From, To, Op>);
  };
  if (pass.chunks == 1) return launch(y, how);

  using Partial = typename Op::template Partial<T>;
  const Tensor scratch =
      Tensor::empty_packed({pass.chunks * plan.outputs * int64_t(sizeof(Partial))}, DType::u8, device);
  Partial* const partial = static_cast<Partial*>(scratch.raw());
  pass.plan.pack_outputs();
  pass.chunk_y = plan.outputs;
  launch(partial, Finish{});
  ReducePlan rest = plan;
  std::copy_n(pass.plan.kept_y, kMaxRank, rest.kept_x);
  rest.reduced_rank = 1;
  rest.length = rest.reduced_sizes[0] = pass.chunks;
  rest.reduced_x[0] = plan.outputs;
  reduce_pass(device, rest, Elements<Partial>{partial}, y, op.rest(), how, true, true);
}

/// Reduces any plan: one that is no single pass by its innermost reduced dimension first, then the others,
/// merged by their results in scratch memory.
template <class T, class Out, class Op>
void reduce_all(Device device, const ReducePlan& plan, const T* x, Out* y, const Op& op, Finish how) {
  if (is_one_pass(plan)) return reduce_pass(device, plan, Elements<T>{x}, y, op, how);
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
  const Tensor scratch =
      Tensor::empty_packed({others * plan.outputs * int64_t(sizeof(Partial))}, DType::u8, device);
  Partial* const partial = static_cast<Partial*>(scratch.raw());
  reduce_pass(device, one, Elements<T>{x}, partial, op, Finish{});

  ReducePlan rest = plan;
  rest.pack_outputs();
  std::copy_n(rest.kept_y, kMaxRank, rest.kept_x);
  std::copy_n(plan.kept_y, kMaxRank, rest.kept_y);
  rest.reduced_rank = 1;
  rest.length = rest.reduced_sizes[0] = others;
  rest.reduced_x[0] = plan.outputs;
  reduce_pass(device, rest, Elements<Partial>{partial}, y, op.rest(), how);
}

}  // namespace
}  // namespace tessera::ops

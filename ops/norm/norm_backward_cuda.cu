#include "gpu/mma.cuh"
#include "gpu/partial_sums.cuh"
#include "ops/norm/norm_rows.cuh"

/// Norms, backward. Two reads and one write per element; three reads with the residual's gradient, two writes
/// where the residual was dropped: its mask (a byte per 16 bytes of elements) was written by forward. Warps
/// (or groups of 16 lanes, or blocks) loop over the rows with the stride of the grid, which is as large as
/// fits at once; rows too long for a block's registers have a block or a cluster each, which reads them
/// twice. A thread has the same columns in every row, so its share of dweight and dbias stays in registers
/// until the end; a block adds the shares of its warps in order and writes one row of partial sums, and a
/// second kernel adds those rows in a fixed order. The grid, and so the order, depends only on the problem
/// and the number of SMs.
///
/// With sums in registers few warps fit, so bytes in flight must not cost registers: each thread prefetches
/// its words of the next rows into shared memory (cp.async), one or two rows ahead.

namespace tessera::ops {
namespace {

using namespace norm_rows;

constexpr int kLongBlock = 256;

template <class T>
struct BackwardArgs {
  T *dx, *dx_again, *dresidual;     // null: not wanted; the second only without a mask, the third with one
  float *dweights, *dbiases;        // [blocks, partial_stride] partial sums; null: not wanted
  float* dresiduals;                // likewise of the dresidual that is written; null: not wanted
  const T *dy, *dsum, *x, *weight;  // dsum and weight may be null
  const float *mean, *rstd;         // mean: null in rmsnorm
  int64_t dx_stride, dresidual_stride, dy_stride, dsum_stride, x_stride, rows, width;
  float inverse;           // 1 / width
  int64_t partial_stride;  // whole packs of 16-bit numbers
  const uint8_t* mask;     // of a dropped residual, as forward kept it
  int64_t mask_stride;
  float drop_scale;

  __device__ __forceinline__ bool writes_rows() const { return dx || dresidual; }
};

/// A thread's share of one row, or of `width` columns of it from `base` on.
template <class T, bool kCentred, bool kResidual, bool kDrops, class Access, int kSteps>
struct BackwardShare {
  static constexpr int kPack = kPackOf<T>, kSums = kCentred ? 2 : 1;
  Words<T> x[kSteps], dy[kSteps], dsum[kResidual ? kSteps : 1];
  uint32_t keep_bits[kDrops ? kSteps : 1];  // see load_keep_mask
  float mean, rstd;

  __device__ __forceinline__ void load(const BackwardArgs<T>& args, int64_t row, int64_t base, int rank,
                                       int width) {
    Access::load(x, args.x + row * args.x_stride + base, rank, width);
    Access::load(dy, args.dy + row * args.dy_stride + base, rank, width);
    if constexpr (kResidual) Access::load(dsum, args.dsum + row * args.dsum_stride + base, rank, width);
    mean = kCentred ? args.mean[row] : 0.0f;
    rstd = args.rstd[row];
  }

  /// dy and xhat of words s.
  __device__ __forceinline__ void unpack(int s, float (&grad)[kPack], float (&xhat)[kPack]) const {
    gpu::unpack(grad, dy[s]);
    gpu::unpack(xhat, x[s]);
#pragma unroll
    for (int i = 0; i < kPack; ++i) xhat[i] = (xhat[i] - mean) * rstd;
  }

  /// sums += the sums of g xhat and, if it is wanted, of g; with `visit(i, dy, xhat)` for what else is
  /// summed.
  template <class Visit>
  __device__ __forceinline__ void add(int s, const Words<T>& weight, float (&sums)[kSums],
                                      Visit&& visit) const {
    float grad[kPack], xhat[kPack], scale[kPack];
    unpack(s, grad, xhat);
    gpu::unpack(scale, weight);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      // Never fused into what follows: g and its mean must cancel where they are equal.
      const float g = __fmul_rn(grad[i], scale[i]);
      visit(i, grad[i], xhat[i], g);
      sums[0] += g * xhat[i];
      if constexpr (kCentred) sums[1] += g;
    }
  }

  /// dx of words s in place of dy, and dresidual in place of x.
  __device__ __forceinline__ void slope(int s, const float (&g)[kPack], const float (&xhat)[kPack],
                                        float mean_g, float mean_gx, float drop_scale) {
    float slope[kPack], past[kPack] = {};
    if constexpr (kResidual) gpu::unpack(past, dsum[s]);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      slope[i] = rstd * (g[i] - mean_g - xhat[i] * mean_gx);
      if constexpr (kResidual) slope[i] += past[i];
    }
    dy[s] = gpu::round_to_words<T>(slope);
    if constexpr (kDrops) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) slope[i] *= keep_bits[s] >> i & 1u ? drop_scale : 0.0f;
      x[s] = gpu::round_to_words<T>(slope);
    }
  }

  /// Stores what slope() computed.
  __device__ __forceinline__ void store(const BackwardArgs<T>& args, int64_t row, int64_t base, int rank,
                                        int width) const {
    if (!kDrops || args.dx) Access::store(args.dx + row * args.dx_stride + base, dy, rank, width);
    if (!kDrops && args.dx_again) Access::store(args.dx_again + row * args.dx_stride + base, dy, rank, width);
    if (kDrops && args.dresidual)
      Access::store(args.dresidual + row * args.dresidual_stride + base, x, rank, width);
  }
};

/// A pack of partial sums: 16 bytes per store, also into what is past the last column.
template <int kPack>
__device__ __forceinline__ void store_sums(float* to, const float (&sum)[kPack]) {
#pragma unroll
  for (int i = 0; i < kPack; i += 4)
    *reinterpret_cast<float4*>(to + i) = make_float4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]);
}

/// Where add_warps keeps a column: neither the lanes' packs nor neighbouring columns share a bank.
__host__ __device__ constexpr int place_of(int column) {
  return column + column / kWarp;
}

/// to[column] = the sum over the block's groups of kThreads lanes of their shares of a row, through
/// `combined`.
template <class T, int kThreads, int kSteps, int kGroups>
__device__ void add_groups(const float (&share)[kSteps][kPackOf<T>], float* combined, float* to,
                           int64_t width) {
  constexpr int kPack = kPackOf<T>, kColumns = kSteps * kPack * kThreads, kPlaces = place_of(kColumns);
  const int group = int(threadIdx.x) / kThreads, rank = int(threadIdx.x) % kThreads;
  __syncthreads();  // threads may still use `combined`
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int i = 0; i < kPack; ++i)
      combined[group * kPlaces + place_of(column_of<T, kThreads>(s, rank) + i)] = share[s][i];
  __syncthreads();
  for (int column = int(threadIdx.x); column < width; column += kGroups * kThreads) {
    float sum = combined[place_of(column)];
#pragma unroll
    for (int g = 1; g < kGroups; ++g) sum += combined[g * kPlaces + place_of(column)];
    to[column] = sum;
  }
}

/// The same for threads that have a row each: all have the same columns.
template <int kPack, int kWarps>
__device__ void add_threads(const float (&share)[kPack], float* combined, float* to, int64_t width) {
  const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
  __syncthreads();  // threads may still use `combined`
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    const float sum = gpu::warp_reduce<gpu::Sum>(share[i]);
    if (lane == 0) combined[warp * kPack + i] = sum;
  }
  __syncthreads();
  if (int(threadIdx.x) >= width) return;
  float sum = combined[threadIdx.x];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) sum += combined[w * kPack + threadIdx.x];
  to[threadIdx.x] = sum;
}

/// How a kernel holds rows: kSteps words per thread, kThreads threads per row, blocks of kBlock threads of
/// which kBlocks share an SM, kStages rows in flight.
template <class T, int kThreads_, int kColumns, int kBlock_, int kBlocks_, int kStages_>
struct Resident {
  static constexpr int kThreads = kThreads_, kSteps = kColumns / kPackOf<T>, kBlock = kBlock_,
                       kBlocks = kBlocks_, kStages = kStages_;
};

/// The rows that a thread has in flight: its words of x, dy and dsum of kStages rows in shared memory. A
/// thread reads back only what it copied itself, so it waits for its own copies only.
template <class T, class Resident, int kOperands>
struct Ring {
  static constexpr int kSteps = Resident::kSteps, kBlock = Resident::kBlock;
  static constexpr size_t kBytes = size_t(Resident::kStages) * kOperands * kSteps * kBlock * sizeof(Words<T>);
  Words<T>* slots;

  __device__ __forceinline__ Words<T>* slot(int stage, int operand, int s) const {
    return slots + ((stage * kOperands + operand) * kSteps + s) * kBlock + threadIdx.x;
  }
  __device__ __forceinline__ void fetch(int stage, int operand, const T* row, int rank, int width) const {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int first = column_of<T, Resident::kThreads>(s, rank), inside = min(width - first, kPackOf<T>);
      if constexpr (Resident::kThreads > 1) {
        gpu::cp_async_zfill(gpu::shared_address(slot(stage, operand, s)), row + first,
                            max(inside, 0) * int(sizeof(T)));
      } else {
        *slot(stage, operand, s) = gpu::load_part(row + first, inside);
      }
    }
  }
  __device__ __forceinline__ void read(Words<T> (&share)[kSteps], int stage, int operand) const {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) share[s] = *slot(stage, operand, s);
  }
};

/// `kSums`: args.dresiduals is wanted.
template <class T, bool kCentred, bool kBias, bool kResidual, bool kDrops, bool kSums, class Resident>
__global__ void __launch_bounds__(Resident::kBlock, Resident::kBlocks) backward_rows(BackwardArgs<T> args) {
  constexpr int kPack = kPackOf<T>, kThreads = Resident::kThreads, kSteps = Resident::kSteps,
                kStages = Resident::kStages;
  using Rows = RowAccess<kThreads>;
  using Sums = RowReduce<kThreads, 2>;
  using Flight = Ring<T, Resident, kResidual ? 3 : 2>;
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ float scratch[Sums::kScratch];
  const Flight ring{reinterpret_cast<Words<T>*>(shared)};
  Sums add(scratch);
  gpu::wait_and_launch_dependents();
  const int rank = int(threadIdx.x) % kThreads, width = int(args.width);
  const int64_t step = row_step<kThreads>();
  // Neighbouring rows go to different blocks, so that the rows of the last round are spread over all SMs.
  int64_t row = kThreads > 1 && kThreads <= kWarp ? int64_t(threadIdx.x / kThreads) * gridDim.x + blockIdx.x
                                                  : first_row<kThreads>();
  const auto fetch = [&](int stage, int64_t from) {
    if (from < args.rows) {
      ring.fetch(stage, 0, args.x + from * args.x_stride, rank, width);
      ring.fetch(stage, 1, args.dy + from * args.dy_stride, rank, width);
      if constexpr (kResidual) ring.fetch(stage, 2, args.dsum + from * args.dsum_stride, rank, width);
    }
    gpu::cp_async_commit();
  };
#pragma unroll
  for (int n = 0; n + 1 < kStages; ++n) fetch(n, row + n * step);
  float mean = 0, rstd = 0;
  const auto load_statistics = [&](int64_t from) {
    if (from >= args.rows) return;
    if (kCentred) mean = args.mean[from];
    rstd = args.rstd[from];
  };
  load_statistics(row);
  uint32_t keep_bits[kDrops ? kSteps : 1] = {};  // of the next row
  const auto load_mask = [&](int64_t from) {
    if constexpr (kDrops)
      if (from < args.rows)
        load_keep_mask<T, kThreads>(keep_bits, args.mask, from, args.mask_stride, 0, rank, width);
  };
  load_mask(row);
  float dweight[kSteps][kPack] = {}, dbias[kBias ? kSteps : 1][kPack] = {},
        dresidual[kSums ? kSteps : 1][kPack] = {};
  Words<T> weight[kSteps];
  Rows::load_vector(weight, args.weight, 1.0f, rank, width);
  BackwardShare<T, kCentred, kResidual, kDrops, Rows, kSteps> share;
#pragma unroll 1
  for (int stage = 0; row < args.rows; row += step) {
    fetch(stage == 0 ? kStages - 1 : stage - 1, row + (kStages - 1) * step);
    gpu::cp_async_wait<kStages - 1>();
    ring.read(share.x, stage, 0);
    ring.read(share.dy, stage, 1);
    share.mean = mean;
    share.rstd = rstd;
    if constexpr (kDrops)
#pragma unroll
      for (int s = 0; s < kSteps; ++s) share.keep_bits[s] = keep_bits[s];
    load_statistics(row + step);
    load_mask(row + step);
    float sums[kCentred ? 2 : 1] = {}, g[kSteps][kPack], xhat[kSteps][kPack];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      gpu::keep_packed(weight[s]);
      share.add(s, weight[s], sums, [&](int i, float dy, float xh, float gg) {
        dweight[s][i] += dy * xh;
        if constexpr (kBias) dbias[s][i] += dy;
        g[s][i] = gg, xhat[s][i] = xh;
      });
    }
    if (kDrops ? args.writes_rows() : args.dx != nullptr) {
      add(sums);
      const float mean_gx = mean_of(sums[0], args.width, args.inverse),
                  mean_g = kCentred ? mean_of(sums[kCentred], args.width, args.inverse) : 0.0f;
      if constexpr (kResidual) ring.read(share.dsum, stage, 2);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) share.slope(s, g[s], xhat[s], mean_g, mean_gx, args.drop_scale);
      share.store(args, row, 0, rank, width);
      if constexpr (kSums) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          float stored[kPack];
          gpu::unpack(stored, share.x[s]);
#pragma unroll
          for (int i = 0; i < kPack; ++i) dresidual[s][i] += stored[i];
        }
      }
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  gpu::cp_async_wait<0>();
  const auto finish = [&](const float(&sum)[kSteps][kPack], float* to) {
    if (!to) return;
    to += blockIdx.x * args.partial_stride;
    if constexpr (kThreads == 1) {
      add_threads<kPack, Resident::kBlock / kWarp>(sum[0], reinterpret_cast<float*>(shared), to, args.width);
    } else if constexpr (kThreads <= kWarp) {
      add_groups<T, kThreads, kSteps, Resident::kBlock / kThreads>(sum, reinterpret_cast<float*>(shared), to,
                                                                   args.width);
    } else {
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
        if (const int first = column_of<T, kThreads>(s, rank); first < width) store_sums(to + first, sum[s]);
    }
  };
  finish(dweight, args.dweights);
  if constexpr (kBias) finish(dbias, args.dbiases);
  if constexpr (kSums) finish(dresidual, args.dresiduals);
}

/// dx of longer rows, a block or a cluster per row, read in pieces twice: for the sums and for dx.
template <class T, bool kCentred, bool kResidual, bool kDrops>
__global__ void __launch_bounds__(kLongBlock, 3) backward_long_rows(BackwardArgs<T> args) {
  constexpr int kPack = kPackOf<T>, kChunk = kLongBlock * kLongSteps * kPack;
  using Rows = RowAccess<kLongBlock>;
  using Long = LongRow<kLongBlock, kChunk>;
  __shared__ typename Long::Shared shared;
  gpu::wait_and_launch_dependents();
  Long long_row(shared, args.rows, args.width);
  const int rank = int(threadIdx.x);
  const int64_t row = long_row.row();
  BackwardShare<T, kCentred, kResidual, kDrops, Rows, kLongSteps> share;
  Words<T> weight[kLongSteps];
  const auto load = [&](int64_t base, int width) {
    share.load(args, row, base, rank, width);
    Rows::load_vector(weight, args.weight ? args.weight + base : nullptr, 1.0f, rank, width);
  };
  float sums[kCentred ? 2 : 1] = {};
  long_row.for_pieces([&](int64_t base, int width) {
    load(base, width);
#pragma unroll
    for (int s = 0; s < kLongSteps; ++s) share.add(s, weight[s], sums, [](int, float, float, float) {});
  });
  long_row.sum(sums);
  const float mean_gx = mean_of(sums[0], args.width, args.inverse),
              mean_g = kCentred ? mean_of(sums[kCentred], args.width, args.inverse) : 0.0f;
  long_row.for_pieces([&](int64_t base, int width) {
    load(base, width);
    if constexpr (kDrops)
      load_keep_mask<T, kLongBlock>(share.keep_bits, args.mask, row, args.mask_stride, base / kPack, rank,
                                    width);
#pragma unroll
    for (int s = 0; s < kLongSteps; ++s) {
      float g[kPack], xhat[kPack], unused[kCentred ? 2 : 1] = {};
      share.add(s, weight[s], unused, [&](int i, float, float xh, float gg) { g[i] = gg, xhat[i] = xh; });
      share.slope(s, g, xhat, mean_g, mean_gx, args.drop_scale);
    }
    share.store(args, row, base, rank, width);
  });
  long_row.close();
}

/// Partial sums of dweight and dbias of longer rows: a thread adds its pack of columns over a chunk of rows.
template <class T, bool kCentred>
__global__ void __launch_bounds__(kLongBlock)
    parameters_of_long_rows(BackwardArgs<T> args, int64_t rows_per_chunk) {
  constexpr int kPack = kPackOf<T>;
  using Rows = RowAccess<kLongBlock>;
  gpu::wait_and_launch_dependents();
  const int64_t base = blockIdx.x * int64_t(kLongBlock * kPack), chunk = blockIdx.y;
  const int rank = int(threadIdx.x), width = int(min(args.width - base, int64_t(kLongBlock * kPack)));
  float dweight[kPack] = {}, dbias[kPack] = {};
  const int64_t end = min(args.rows, (chunk + 1) * rows_per_chunk);
#pragma unroll 4
  for (int64_t row = chunk * rows_per_chunk; row < end; ++row) {
    BackwardShare<T, kCentred, false, false, Rows, 1> share;
    share.load(args, row, base, rank, width);
    float grad[kPack], xhat[kPack];
    share.unpack(0, grad, xhat);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      dweight[i] += grad[i] * xhat[i];
      dbias[i] += grad[i];
    }
  }
  if (rank * kPack >= width) return;
  const int64_t to = chunk * args.partial_stride + base + rank * kPack;
  if (args.dweights) store_sums(args.dweights + to, dweight);
  if (args.dbiases) store_sums(args.dbiases + to, dbias);
}

/// Calls `launch(args)`, which writes `partials` rows of partial sums, and adds those up.
template <class T, class Launch>
void with_partial_sums(const NormBackward& norm, BackwardArgs<T> args, int64_t partials, Launch&& launch) {
  const Device device = norm.x.device();
  const auto partial = [&](const Tensor& gradient) {
    return gradient.defined() ? Tensor::empty_packed(Shape{partials, args.partial_stride}, DType::f32, device)
                              : Tensor();
  };
  const Tensor dweights = partial(norm.dweight), dbiases = partial(norm.dbias);
  args.dweights = data_or_null<float>(dweights);
  args.dbiases = data_or_null<float>(dbiases);
  if (norm.dresidual_sums) {
    *norm.dresidual_sums = partial(norm.dresidual);
    args.dresiduals = norm.dresidual_sums->data<float>();
  }
  launch(args);
  if (norm.later) {
    if (norm.dweight.defined()) norm.later->add({dweights, norm.dweight});
    if (norm.dbias.defined()) norm.later->add({dbiases, norm.dbias});
    return;
  }
  const auto finish = [&]<class Out>() {
    gpu::add_partial_sums<Out>(device, {args.dweights, data_or_null<Out>(norm.dweight)},
                               {args.dbiases, data_or_null<Out>(norm.dbias)}, partials, args.width,
                               args.partial_stride);
  };
  const Tensor& either = norm.dweight.defined() ? norm.dweight : norm.dbias;
  either.defined() && either.dtype() == DType::f32 ? finish.template operator()<float>()
                                                   : finish.template operator()<T>();
}

template <class T, bool kCentred, bool kResidual, bool kDrops>
void launch_long(const NormBackward& norm, const BackwardArgs<T>& args) {
  const Device device = norm.x.device();
  if (args.dx || args.dresidual) {
    const int blocks = blocks_per_row(args.rows, args.width, kLongBlock * kLongSteps * kPackOf<T>);
    gpu::launch_dependent(device,
                          {.grid = grid_of(args.rows * blocks), .block = kLongBlock, .cluster = blocks},
                          backward_long_rows<T, kCentred, kResidual, kDrops>, args);
  }
  if (!norm.dweight.defined() && !norm.dbias.defined()) return;
  const int64_t tiles = ceil_div(args.width, kLongBlock * kPackOf<T>);
  const int64_t wanted = ceil_div(8 * int64_t(device.multiprocessors()), tiles);
  const int64_t per_chunk = std::max<int64_t>(4, ceil_div(args.rows, wanted));
  const int64_t chunks = ceil_div(args.rows, per_chunk);
  with_partial_sums(norm, args, chunks, [&](const BackwardArgs<T>& with) {
    gpu::launch_dependent(device, {grid_of(tiles, chunks), kLongBlock}, parameters_of_long_rows<T, kCentred>,
                          with, per_chunk);
  });
}

/// Whether kernels with lanes of a warp per row may sum dresidual: where a training step has use for it,
/// since each is compiled a second time.
template <class T>
constexpr bool may_sum_dresidual(bool centred, bool drops) {
  return sizeof(T) == 2 && centred && drops;
}

template <class T, bool kCentred, bool kBias, bool kResidual, bool kDrops>
void launch_backward(const NormBackward& norm, const BackwardArgs<T>& args) {
  const int64_t multiprocessors = norm.x.device().multiprocessors();
  const auto resident = [&]<class H>(H) {
    constexpr size_t kRing = Ring<T, H, (kResidual ? 3 : 2)>::kBytes;
    constexpr size_t kCombined = H::kThreads <= kWarp ? place_of(H::kSteps * kPackOf<T> * H::kThreads) *
                                                            (H::kBlock / H::kThreads) * sizeof(float)
                                                      : 0;
    int64_t blocks = std::min<int64_t>(ceil_div(args.rows, rows_at_once<H::kThreads>(H::kBlock)),
                                       multiprocessors * H::kBlocks);
    // A block's partial sums, written and read, are as many bytes as some three rows: at least four rows per
    // block as long as every SM has one.
    if (H::kThreads > kWarp) blocks = std::min(blocks, std::max(ceil_div(args.rows, 4), multiprocessors));
    with_partial_sums(norm, args, blocks, [&](const BackwardArgs<T>& with) {
      const gpu::LaunchShape shape{grid_of(blocks), H::kBlock, std::max(kRing, kCombined)};
      if constexpr (may_sum_dresidual<T>(kCentred, kDrops) && H::kThreads > 1 && H::kThreads <= kWarp) {
        if (with.dresiduals)
          return gpu::launch_dependent(norm.x.device(), shape,
                                       backward_rows<T, kCentred, kBias, kResidual, kDrops, true, H>, with);
      }
      gpu::launch_dependent(norm.x.device(), shape,
                            backward_rows<T, kCentred, kBias, kResidual, kDrops, false, H>, with);
    });
  };
  // f32 takes twice the registers and the shared memory, a residual half as much more of the latter.
  constexpr int kShare = sizeof(T) / 2;
  if (args.width < kPackOf<T>) {
    resident(Resident<T, 1, kPackOf<T>, 256, 2, 2>{});
  } else if (args.width <= 16 * kPackOf<T>) {
    resident(Resident < T, 16, kPackOf<T>, 256, kDrops ? 3 : 4, 3 > {});
  } else if (args.width <= kWarp * kPackOf<T>) {
    resident(Resident < T, kWarp, kPackOf<T>, 256, kDrops ? 3 : 4, 3 > {});
  } else if (args.width <= 512) {
    resident(Resident<T, kWarp, 16, 256, 2 / kShare, 3>{});
  } else if (args.width <= 768) {
    resident(Resident<T, kWarp, 24, 384 / kShare, 1, 2>{});
  } else if (args.width <= 1024) {
    resident(Resident<T, kWarp, 32, 256 / kShare, 1, 2>{});
  } else if (args.width <= 2048) {
    resident(Resident<T, 128, 16, 128, 4 / kShare, 3>{});
  } else if (args.width <= 4096) {
    using Wide = Resident<T, 256, 16, 256, 2 / kShare, 3>;
    resident(std::conditional_t<(kResidual || kShare == 2), Wide, Resident<T, 128, 32, 128, 3, 3>>{});
  } else if (args.width <= 8192 && !(kResidual && kShare == 2)) {
    resident(Resident<T, 512, 16, 512, 1, 2>{});
  } else {
    launch_long<T, kCentred, kResidual, kDrops>(norm, args);
  }
}

/// Many sums of any shapes, as a kernel parameter.
struct SumsTable {
  static constexpr int kMost = 96;  // 3.75 KiB of the 4 that parameters may take
  struct Entry {
    gpu::PartialSums<float> sum;
    int64_t stride, rows, width;
  } of[kMost];
};

/// Blocks with blockIdx.y = i compute sum i.
__global__ void __launch_bounds__(gpu::kWarp* gpu::kWarp)
    add_many_partial_sums(const __grid_constant__ SumsTable table) {
  gpu::wait_and_launch_dependents();
  const SumsTable::Entry& entry = table.of[blockIdx.y];
  if (blockIdx.x * gpu::columns_per_block(entry.rows) >= entry.width) return;
  gpu::add_columns(entry.sum, blockIdx.x, entry.rows, entry.width, entry.stride);
}

}  // namespace

void NormSums::add(Sum sum) {
  constexpr size_t kMostBytes = size_t(32) << 20;  // held until the end of the pass: what the L2 has room for
  bytes_ += sum.from.bytes();
  sums_.push_back(std::move(sum));
  if (bytes_ > kMostBytes) finish();
}

void NormSums::finish() {
  for (size_t begin = 0; begin < sums_.size(); begin += SumsTable::kMost) {
    const size_t count = std::min(sums_.size() - begin, size_t(SumsTable::kMost));
    SumsTable table{};
    int64_t blocks = 0;
    for (size_t i = 0; i < count; ++i) {
      const auto& [from, to] = sums_[begin + i];
      table.of[i] = {{from.data<float>(), to.data<float>()}, from.size(1), from.size(0), to.size(0)};
      blocks = std::max(blocks, ceil_div(to.size(0), gpu::columns_per_block(from.size(0))));
    }
    gpu::launch_dependent(sums_[begin].from.device(),
                          {gpu::grid_of(blocks, int64_t(count)), dim3(gpu::kWarp, gpu::kWarp)},
                          add_many_partial_sums, table);
  }
  sums_.clear();
  bytes_ = 0;
}

void norm_backward_cuda(const NormBackward& norm) {
  const bool centred = norm.mean.defined();
  dispatch_floating_cuda(norm.x.dtype(), centred ? "layernorm" : "rmsnorm", [&]<class T>() {
    if (norm.x.row_length() == 0) return;
    const Tensor x = gpu::pack_aligned_or_copy<T>(norm.x), dy = gpu::pack_aligned_or_copy<T>(norm.dy),
                 dsum = gpu::pack_aligned_or_copy<T>(norm.dsum),
                 weight = gpu::pack_aligned_or_copy<T>(norm.weight);
    const BackwardArgs<T> args{.dx = data_or_null<T>(norm.dx),
                               .dx_again = data_or_null<T>(norm.dx_again),
                               .dresidual = data_or_null<T>(norm.dresidual),
                               .dweights = nullptr,
                               .dbiases = nullptr,
                               .dresiduals = nullptr,
                               .dy = dy.data<T>(),
                               .dsum = data_or_null<T>(dsum),
                               .x = x.data<T>(),
                               .weight = data_or_null<T>(weight),
                               .mean = data_or_null<float>(norm.mean),
                               .rstd = norm.rstd.data<float>(),
                               .dx_stride = stride_or_0(norm.dx),
                               .dresidual_stride = stride_or_0(norm.dresidual),
                               .dy_stride = dy.row_stride(),
                               .dsum_stride = stride_or_0(dsum),
                               .x_stride = x.row_stride(),
                               .rows = norm.x.rows(),
                               .width = norm.x.row_length(),
                               .inverse = 1.0f / float(norm.x.row_length()),
                               .partial_stride = ceil_div(norm.x.row_length(), 8) * 8,
                               .mask = data_or_null<uint8_t>(norm.kept_mask),
                               .mask_stride = norm.kept_mask.defined() ? norm.kept_mask.size(1) : 0,
                               .drop_scale = norm.drop ? float(norm.drop->scale) : 0.0f};
    const auto launch = [&]<bool kCentred, bool kBias, bool kDrops>() {
      args.dsum ? launch_backward<T, kCentred, kBias, true, kDrops>(norm, args)
                : launch_backward<T, kCentred, kBias, false, kDrops>(norm, args);
    };
    // Under a mask layer norm has no kernel without dbias: it would save two sums of many instructions.
    if (norm.drop) {
      centred ? launch.template operator()<true, true, true>()
              : launch.template operator()<false, false, true>();
    } else if (!centred) {
      launch.template operator()<false, false, false>();
    } else if (norm.dbias.defined()) {
      launch.template operator()<true, true, false>();
    } else {
      launch.template operator()<true, false, false>();
    }
  });
}

}  // namespace tessera::ops

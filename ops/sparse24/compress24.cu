#include "ops/sparse24/compress24_tile.cuh"

/// Between x and its 2:4 matrix: per element of 16 bits 2 bytes of x and 1.125 bytes of each direction's
/// matrix, so memory bounds it: 4.3 TB/s on an H200 are 12.8 KB per tile (one direction) in some 670 clocks
/// of an SM. Variant "general" has every method and dtype and chooses one group at a time, in some 1,000
/// instructions per warp and tile; compress24_packed.cu is for naive choices and patterns in 16 bits.

namespace tessera::ops {

using namespace sparse24;

namespace {

/// What select needs of the call.
struct Choice24 {
  Method24 method;
  const float* scale;
  RandomStream stream;
};

enum class Mode24 : uint8_t { plain, drawn, like };

/// Chooses in this thread's groups of one direction and stores them; `masks`: what is not kept becomes 0 in
/// the tile, too, and what is kept its value. (first_m, first_k) of m x k: where the tile lies in A.
template <Along24 kAlong, Mode24 kMode, class T>
__device__ __forceinline__ void compress_direction(TileOfX<T>& tile, const Matrix24<T>& to,
                                                   const Choice24& choice, int64_t number, int64_t first_m,
                                                   int64_t first_k, int64_t m, int64_t k, bool masks) {
  const int thread = int(threadIdx.x), c = thread % 4, first_row = thread / 32 * 16 + thread % 32 / 4;
  const float scale = kMode == Mode24::plain && choice.scale ? *choice.scale : 1;
  const uint64_t offset = kMode == Mode24::drawn ? choice.stream.offset() : 0;
  const int64_t numbered = kAlong == Along24::features ? (k + 3) / 4 : m;
  uint32_t nibbles = 0;
  if constexpr (kMode == Mode24::like)
    nibbles = nibbles_of_word(uint32_t(to.metadata[number * kTileWords + thread]));
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    T values[8];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const int row = first_row + pair % 2 * 8, half = pair / 2, group = step * 8 + half * 4 + c,
                bit = (step * 2 + half) * 8 + pair % 2 * 4;
      T x[4];
      read_group<kAlong>(tile, row, group, x);
      Kept<T> kept;
      if constexpr (kMode == Mode24::like) {
        kept.at = Positions::of(nibbles >> bit);
        kept.values[0] = pick(x, kept.at.first), kept.values[1] = pick(x, kept.at.second);
      } else {
        if constexpr (kMode == Mode24::drawn) {
          const int64_t of_row = first_m + row, of_k = first_k + group * 4;
          kept = {{0, 1}, {T(0.0f), T(0.0f)}};  // of padding
          if (of_row < m && of_k < k)
            kept = select_drawn(x, draws_of(choice.stream.seed, offset, kAlong,
                                            group_number(kAlong, of_row, of_k / 4, numbered)));
        } else {
          kept = select_plain(choice.method, x, scale);
        }
        nibbles |= kept.at.nibble() << bit;
      }
      values[pair * 2] = kept.values[0], values[pair * 2 + 1] = kept.values[1];
      if (masks) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          x[i] = i == kept.at.first ? kept.values[0] : i == kept.at.second ? kept.values[1] : T(0.0f);
        write_group<kAlong>(tile, row, group, x);
      }
    }
    store_values(to.values + number * kTileValues + step * kStepValues + thread * 8, values);
  }
  if constexpr (kMode != Mode24::like)
    to.metadata[number * kTileWords + thread] = int32_t(word_of_nibbles(nibbles));
}

template <class T, Mode24 kMode>
__global__ void __launch_bounds__(kThreads)
    compress24_kernel(Rows24<const T> x, Matrix24<T> by_features, Matrix24<T> by_tokens, Choice24 choice) {
  __shared__ TileOfX<T> tile;
  const TileCoord coord(x.tokens, x.features);
  gpu::wait_and_launch_dependents();
  load_tile(tile, x, coord);
  __syncthreads();
  if (by_features.values)
    compress_direction<Along24::features, kMode>(tile, by_features, choice, coord.by_features, coord.token,
                                                 coord.feature, x.tokens, x.features,
                                                 by_tokens.values != nullptr);
  if (!by_tokens.values) return;
  if (by_features.values) __syncthreads();
  compress_direction<Along24::tokens, kMode>(tile, by_tokens, choice, coord.by_tokens, coord.feature,
                                             coord.token, x.features, x.tokens, false);
}

/// The elements of the matrix, or those of `from` at its places, to the tile.
template <Along24 kAlong, class T>
__device__ __forceinline__ void decompress_direction(TileOfX<T>& tile, const Matrix24<const T>& from,
                                                     const int32_t* metadata, int64_t number, bool masks) {
  const int thread = int(threadIdx.x), c = thread % 4, first_row = thread / 32 * 16 + thread % 32 / 4;
  const uint32_t nibbles = nibbles_of_word(uint32_t(metadata[number * kTileWords + thread]));
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    T values[8];
    if (!masks) load_values(values, from.values + number * kTileValues + step * kStepValues + thread * 8);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const int row = first_row + pair % 2 * 8, half = pair / 2, group = step * 8 + half * 4 + c;
      const Positions at = Positions::of(nibbles >> ((step * 2 + half) * 8 + pair % 2 * 4));
      T x[4];
      if (masks) read_group<kAlong>(tile, row, group, x);
      const T first = masks ? pick(x, at.first) : values[pair * 2],
              second = masks ? pick(x, at.second) : values[pair * 2 + 1];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = i == at.first ? first : i == at.second ? second : T(0.0f);
      write_group<kAlong>(tile, row, group, x);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    decompress24_kernel(Rows24<T> y, Rows24<const T> from, Matrix24<const T> x, const int32_t* metadata,
                        Along24 along) {
  __shared__ TileOfX<T> tile;
  const TileCoord coord(y.tokens, y.features);
  gpu::wait_and_launch_dependents();
  const bool masks = from.data != nullptr;
  if (masks) {
    load_tile(tile, from, coord);
    __syncthreads();
  }
  if (along == Along24::features)
    decompress_direction<Along24::features>(tile, x, metadata, coord.by_features, masks);
  else
    decompress_direction<Along24::tokens>(tile, x, metadata, coord.by_tokens, masks);
  __syncthreads();
  store_tile(tile, y, coord);
}

// ---- soft_scale ----

constexpr int kScaleThreads = 256, kMostScaleBlocks = 264;

template <class T>
struct ScaleArgs {
  const T* x;
  int64_t outer_stride, inner_stride;  // of groups' rows (A's), of the elements of a group
  int64_t rows, k, units, samples;     // of A; SoftScaleCall
  bool by_rows;                        // a unit is a row of A, else a group of all rows
};

/// Both sums of a block's share of the groups, one pair of f64 per block.
template <class T>
__global__ void __launch_bounds__(kScaleThreads) soft_scale_kernel(ScaleArgs<T> args, double* partial) {
  gpu::wait_and_launch_dependents();
  const int64_t across = args.by_rows ? (args.k + 3) / 4 : args.rows, all = args.samples * across;
  double product = 0, square = 0;
  for (int64_t i = int64_t(blockIdx.x) * kScaleThreads + threadIdx.x; i < all;
       i += int64_t(gridDim.x) * kScaleThreads) {
    const int64_t sample = i / across, other = i - sample * across,
                  unit = unit_of_sample(sample, args.units, args.samples);
    const int64_t row = args.by_rows ? unit : other, first = (args.by_rows ? other : unit) * 4;
    T x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      x[j] = first + j < args.k ? args.x[row * args.outer_stride + (first + j) * args.inner_stride] : T(0.0f);
    const Positions at = two_largest(x);
    const float threshold = third_largest(x, at);
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      const T kept = pick(x, slot ? at.second : at.first);
      const double s = soft_thresholded(kept, threshold);
      product += double(float(kept)) * s, square += s * s;
    }
  }
  __shared__ double sums[2][kScaleThreads];
  sums[0][threadIdx.x] = product, sums[1][threadIdx.x] = square;
  for (int width = kScaleThreads / 2; width > 0; width /= 2) {
    __syncthreads();
    if (int(threadIdx.x) < width)
      for (auto& sum : sums) sum[threadIdx.x] += sum[threadIdx.x + width];
  }
  if (threadIdx.x == 0) partial[2 * blockIdx.x] = sums[0][0], partial[2 * blockIdx.x + 1] = sums[1][0];
}

/// The blocks' sums in their order.
__global__ void __launch_bounds__(32)
    finish_scale_kernel(float* scale, const double* partial, int blocks, bool clamped) {
  gpu::wait_and_launch_dependents();
  if (threadIdx.x != 0) return;
  double product = 0, square = 0;
  for (int i = 0; i < blocks; ++i) product += partial[2 * i], square += partial[2 * i + 1];
  double result = square > 0 ? product / square : 1;
  if (clamped) result = min(max(result, 0.5), 2.0);
  *scale = float(result);
}

}  // namespace

void compress24_cuda(const Compress24Call& call) {
  const Tensor x = dense_rows(call.x);
  dispatch_floating_cuda(x.dtype(), "compress24", [&]<class T>() {
    const auto rows = rows_of<T, const T>(x);
    const Choice24 choice{call.selection.method,
                          call.selection.scale.defined() ? call.selection.scale.data<float>() : nullptr,
                          call.selection.stream};
    const auto run = [&](auto* kernel) {
      gpu::launch_dependent(x.device(), {tiles_of(x), kThreads}, kernel, rows, matrix_of<T>(call.by_features),
                            matrix_of<T>(call.by_tokens), choice);
    };
    if (call.pattern)
      run(compress24_kernel<T, Mode24::like>);
    else if (call.selection.method == Method24::mvue)
      run(compress24_kernel<T, Mode24::drawn>);
    else
      run(compress24_kernel<T, Mode24::plain>);
  });
}

void decompress24_cuda(const Tensor& y, const Sparse24& x, const Tensor& given) {
  const Tensor from = given.defined() ? dense_rows(given) : given;
  dispatch_floating_cuda(y.dtype(), "decompress24", [&]<class T>() {
    const Rows24<const T> source = from.defined() ? rows_of<T, const T>(from) : Rows24<const T>{};
    gpu::launch_dependent(y.device(), {tiles_of(y), kThreads}, decompress24_kernel<T>, rows_of<T, T>(y),
                          source, Matrix24<const T>{from.defined() ? nullptr : x.values.data<T>(), nullptr},
                          static_cast<const int32_t*>(x.metadata.data<int32_t>()), x.along);
  });
}

void soft_scale_cuda(const SoftScaleCall& call) {
  const Tensor& x = call.x;
  const bool rows = call.along == Along24::features;
  const int64_t groups = call.samples * (rows ? gpu::ceil_div(x.size(1), 4) : x.size(1));
  const int blocks = int(std::min<int64_t>(kMostScaleBlocks, gpu::ceil_div(groups, kScaleThreads)));
  const Tensor partial = Tensor::empty_packed({blocks * 2 * 2}, DType::f32, x.device());  // f64
  double* const sums = reinterpret_cast<double*>(partial.data<float>());
  dispatch_floating_cuda(x.dtype(), "soft_scale", [&]<class T>() {
    const ScaleArgs<T> args{x.data<T>(),
                            x.layout().stride(rows ? 0 : 1),
                            x.layout().stride(rows ? 1 : 0),
                            x.size(rows ? 0 : 1),
                            x.size(rows ? 1 : 0),
                            call.units,
                            call.samples,
                            rows};
    gpu::launch_dependent(x.device(), {dim3(unsigned(blocks)), kScaleThreads}, soft_scale_kernel<T>, args,
                          sums);
  });
  gpu::launch_dependent(x.device(), {dim3(1), 32}, finish_scale_kernel, call.scale.data<float>(),
                        static_cast<const double*>(sums), blocks, call.clamped);
}

}  // namespace tessera::ops

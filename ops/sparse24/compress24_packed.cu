#include "ops/sparse24/packed24.cuh"

/// Variant "packed" of compress24: methods naive and like, 16 bits. The bytes are those of
/// compress24.cu: 12.8 KB per tile and direction, some 670 clocks of an SM at 4.3 TB/s. A scheduler has one
/// warp of each block, so a tile must take it fewer instructions than that. Here two groups share their
/// instructions (packed24_math.h) and a group along tokens comes by ldmatrix.trans, not by four loads of 2
/// bytes: some 450 instructions per warp and tile, so memory binds. Predicted for [16384, 8192]: 115 us at 85
/// % of the copy bandwidth.

namespace tessera::ops {
namespace {

/// As compress_direction() of compress24.cu.
template <Along24 kAlong, bool kLike, class T>
__device__ __forceinline__ void compress_packed(TileOfX<T>& tile, const Matrix24<T>& to, int64_t number,
                                                bool masks) {
  const int thread = int(threadIdx.x);
  uint32_t nibbles = kLike ? transposed_nibbles(uint32_t(to.metadata[number * kTileWords + thread])) : 0;
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    TwoPairs pairs[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int index = step * 2 + half;
      const RowPair rows = read_groups<kAlong>(tile, index);
      if constexpr (kLike) {
        const uint32_t at = nibbles >> 4 * index;
        pairs[half] = {gather_pair(rows.low.x01, rows.low.x23, at),
                       gather_pair(rows.high.x01, rows.high.x23, at >> 16)};
      } else {
        const TwoGroups groups = rows.groups();
        const TwoChoices choices = choose_largest(groups);
        const uint32_t at = choices.nibbles();
        pairs[half] = choices.of(groups);
        nibbles |= at << 4 * index;
        if constexpr (kAlong == Along24::features) {
          if (masks) {
            const GroupWords low = scatter_pair(pairs[half].low, at, {0, 0}),
                             high = scatter_pair(pairs[half].high, at >> 16, {0, 0});
            *feature_group(tile, index, 0) = {low.x01, low.x23};
            *feature_group(tile, index, 1) = {high.x01, high.x23};
          }
        }
      }
    }
    *step_values(to.values, number, step) = {pairs[0].low, pairs[0].high, pairs[1].low, pairs[1].high};
  }
  if constexpr (!kLike) to.metadata[number * kTileWords + thread] = int32_t(transposed_nibbles(nibbles));
}

template <class T, bool kLike>
__global__ void __launch_bounds__(kThreads)
    compress24_packed_kernel(Rows24<const T> x, Matrix24<T> by_features, Matrix24<T> by_tokens) {
  __shared__ TileOfX<T> tile;
  const TileCoord coord(x.tokens, x.features);
  gpu::wait_and_launch_dependents();
  load_tile(tile, x, coord);
  __syncthreads();
  if (by_features.values)
    compress_packed<Along24::features, kLike>(tile, by_features, coord.by_features,
                                              by_tokens.values != nullptr);
  if (!by_tokens.values) return;
  if (by_features.values) __syncthreads();
  compress_packed<Along24::tokens, kLike>(tile, by_tokens, coord.by_tokens, false);
}

template <class T>
void run_packed(const Compress24Call& call, const Tensor& x) {
  const auto run = [&](auto* kernel) {
    gpu::launch_dependent(x.device(), {tiles_of(x), kThreads}, kernel, rows_of<T, const T>(x),
                          matrix_of<T>(call.by_features), matrix_of<T>(call.by_tokens));
  };
  if (call.pattern)
    run(compress24_packed_kernel<T, true>);
  else
    run(compress24_packed_kernel<T, false>);
}

}  // namespace

void compress24_packed_cuda(const Compress24Call& call) {
  const Tensor x = dense_rows(call.x);
  if (x.dtype() == DType::bf16)
    run_packed<bf16>(call, x);
  else
    run_packed<f16>(call, x);
}

}  // namespace tessera::ops

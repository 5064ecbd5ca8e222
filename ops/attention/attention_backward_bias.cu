#include "gpu/approx.cuh"
#include "ops/attention/attention_bias.cuh"
#include "ops/attention/attention_dropout.cuh"
#include "ops/attention/attention_tile.cuh"
#include "ops/attention/attention_tile_tf32.cuh"

/// The gradient of a bias summed over batches or heads, on tensor cores with mma.sync, in 16 bits and in
/// TF32: see attention_bias.cuh.
///
/// A block of 4 warps, 16 queries each, computes S = Q K^T and dP = dO V^T of 64 queries and 64 keys from
/// tiles in shared memory and adds dS = P (dP - delta) to a sum in registers, 32 per thread. In 16 bits the
/// bias, which all that is added up shares, stays in shared memory. Up to D = 64 in 16 bits the tiles are
/// double buffered, three blocks per SM; above, two blocks per SM hide each other's loads (one in TF32 above
/// D = 64). Bytes: four tiles per step, from L2 where blocks share them: at D = 64 32 KiB for 1 MFLOP, which
/// takes L2 (some 50 bytes per clock and SM) 650 clocks and mma.sync 510.

namespace tessera::ops {
namespace {

constexpr int kThreads = 128, kStep = 32;

/// Tiles of kBiasTile rows in 16 bits or, of f32, in TF32.
template <class T, int kD>
struct Tile {
  static constexpr int kElements = kBiasTile * kD;
  using Rows = RowOperand<kD, 1, false>;
  static __device__ __forceinline__ void load(T* tile, const T* from, int64_t stride, int rows, int dim) {
    load_tile<kD, kBiasTile, kThreads>(tile, from, stride, rows, dim);
  }
  static __device__ __forceinline__ void round(T*) {}
};
template <int kD>
struct Tile<float, kD> {
  static constexpr int kElements = kBiasTile * tf32::kPitch<kD>;
  using Rows = tf32::RowOperand<kD, 1, false>;
  static __device__ __forceinline__ void load(float* tile, const float* from, int64_t stride, int rows,
                                              int dim) {
    tf32::load_tile<kD, kBiasTile, kThreads>(tile, from, stride, rows, dim);
  }
  static __device__ __forceinline__ void round(float* tile) {
    tf32::round_tile<kD, kBiasTile, kThreads>(tile);
  }
};

template <class T, int kD, bool kDrops>
struct Config {
  static constexpr bool kHalf = sizeof(T) == 2;
  static constexpr int kStages = kHalf && kD <= 64 ? 2 : 1;
  static constexpr int kStageElements = 4 * Tile<T, kD>::kElements;  // q, dout, k and v
  static constexpr int kBlocks = (kHalf ? 2 : 1) + (kD <= 64);       // per SM
  static constexpr size_t kSharedBytes =
      (size_t(kStages) * kStageElements + (kHalf ? kBiasTile * kBiasPitch<kBiasTile> : 0)) * sizeof(T);
};

template <class T, int kD, bool kDrops>
__global__ void __launch_bounds__(kThreads, Config<T, kD, kDrops>::kBlocks)
    attention_backward_bias_kernel(AttentionArgs<T> args, BiasGradient<T> gradient) {
  using Config = Config<T, kD, kDrops>;
  using Tile = Tile<T, kD>;
  extern __shared__ __align__(1024) uint4 shared[];
  T* const stages = reinterpret_cast<T*>(shared);  // kStages x {q, dout, k, v} [kBiasTile, kD]
  [[maybe_unused]] T* const bias_tile = stages + Config::kStages * Config::kStageElements;
  const BiasTile tile = gradient.tile();
  const int lane = int(threadIdx.x) % 32, warp_row = int(threadIdx.x) / 32 * 16;
  const int first = tile.query_tile * kBiasTile, rows = min(args.queries - first, kBiasTile);
  const int key = tile.key_tile * kBiasTile, keys = args.keys - key;
  [[maybe_unused]] uint32_t stream = 0;
  if constexpr (kDrops) stream = args.drop.stream();

  const auto load = [&](int index) {
    const AttentionCoord coord = gradient.coord(args, tile, index);
    T* const q_tile = stages + index % Config::kStages * Config::kStageElements;
    Tile::load(q_tile, coord.q_row(args.q, coord.head, first), args.q.row, rows, args.dim);
    Tile::load(q_tile + Tile::kElements, coord.q_row(args.dout, coord.head, first), args.dout.row, rows,
               args.dim);
    Tile::load(q_tile + 2 * Tile::kElements, coord.k_row(args.k, coord.kv_head, key), args.k.row, keys,
               args.dim);
    Tile::load(q_tile + 3 * Tile::kElements, coord.k_row(args.v, coord.kv_head, key), args.v.row, keys,
               args.dim);
    gpu::cp_async_commit();
  };
  // The tile is masked for all batches and heads or for none.
  const AttentionCoord any = gradient.coord(args, tile, tile.begin);
  const int end = any.key_limit(args.causal, first + rows - 1) > key ? tile.end : tile.begin;
  if (tile.begin < end) {
    if constexpr (Config::kHalf)
      load_bias<kBiasTile, kBiasTile, kThreads>(bias_tile, args, any, any.head, first, key, int(threadIdx.x));
    load(tile.begin);
  }

  float sum[kBiasTile / kStep][kStep / 8][4] = {};  // [queries, keys]
  for (int index = tile.begin; index < end; ++index) {
    const AttentionCoord coord = gradient.coord(args, tile, index);
    T* const q_tile = stages + index % Config::kStages * Config::kStageElements;
    T* const k_tile = q_tile + 2 * Tile::kElements;
    float lse2[2], delta[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t at = coord.statistics_at(args, coord.head) + first + warp_row + half * 8 + lane / 4;
      lse2[half] = args.lse2[at];  // +inf past the last query: P = 0
      delta[half] = args.delta[at];
    }
    [[maybe_unused]] uint32_t word =
        0;  // keep bits of the warp's 16 queries and the keys: four 16 x 16 blocks
    if constexpr (kDrops)
      word = args.drop.word(stream, coord.drop_row(args, coord.head), uint32_t((first + warp_row) / 16),
                            uint32_t(key / 2 + lane));
    gpu::cp_async_wait<0>();
#pragma unroll
    for (int i = 0; i < 4; ++i) Tile::round(q_tile + i * Tile::kElements);
    __syncthreads();  // the tiles have landed, and no warp still reads the other stage
    if (Config::kStages > 1 && index + 1 < end) load(index + 1);
    const typename Tile::Rows q(q_tile, warp_row), dout(q_tile + Tile::kElements, warp_row);

#pragma unroll
    for (int step = 0; step < kBiasTile / kStep; ++step) {
      float s[1][kStep / 8][4] = {}, dp[1][kStep / 8][4] = {};
      gemm_abt(s, q, k_tile, step * kStep);
      gemm_abt(dp, dout, k_tile + Tile::kElements, step * kStep);
      if constexpr (Config::kHalf)
        add_bias<kBiasTile>(s, args, bias_tile + step * kStep, warp_row);
      else
        add_bias(s, args, coord, coord.head, first + warp_row, key + step * kStep);
      [[maybe_unused]] RowBits bits[kStep / 16];
      if constexpr (kDrops)
#pragma unroll
        for (int block = 0; block < kStep / 16; ++block) bits[block] = {word, (step * 2 + block) * 8, lane};
#pragma unroll
      for (int n = 0; n < kStep / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int query = first + warp_row + e / 2 * 8 + lane / 4;
          const int own_key = key + step * kStep + n * 8 + lane % 4 * 2 + e % 2;
          const float p = own_key >= coord.key_limit(args.causal, query)
                              ? 0.0f
                              : gpu::exp2_approx(fmaf(s[0][n][e], exponent_scale<true>(args), -lse2[e / 2]));
          if constexpr (kDrops) dp[0][n][e] = bits[n / 2].drop(dp[0][n][e], n % 2, e);
          sum[step][n][e] = fmaf(p, dp[0][n][e] - delta[e / 2], sum[step][n][e]);
        }
    }
    if (Config::kStages == 1 && index + 1 < end) {
      __syncthreads();  // no warp still reads the tiles
      load(index + 1);
    }
  }

  const float factor = kDrops ? args.drop.scale : 1.0f;
#pragma unroll
  for (int step = 0; step < kBiasTile / kStep; ++step)
#pragma unroll
    for (int n = 0; n < kStep / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        gradient.store(args, tile, first + warp_row + e / 2 * 8 + lane / 4,
                       key + step * kStep + n * 8 + lane % 4 * 2 + e % 2, sum[step][n][e] * factor);
}

template <class T>
void run(const Tensor& q, const Tensor& k, const AttentionArgs<T>& args, const AttentionProblem& problem) {
  sum_bias_gradient<T>(q, k, problem, [&](unsigned blocks, const BiasGradient<T>& gradient) {
    dispatch_wide_head_size(args.dim, args.drop, [&]<int kD, bool kDrops>() {
      gpu::launch(q.device(), {dim3(blocks), dim3(kThreads), Config<T, kD, kDrops>::kSharedBytes},
                  attention_backward_bias_kernel<T, kD, kDrops>, args, gradient);
    });
  });
}

}  // namespace

void attention_backward_bias_cuda(const Tensor& q, const Tensor& k, const AttentionArgs<bf16>& args,
                                  const AttentionProblem& problem) {
  run(q, k, args, problem);
}
void attention_backward_bias_cuda(const Tensor& q, const Tensor& k, const AttentionArgs<f16>& args,
                                  const AttentionProblem& problem) {
  run(q, k, args, problem);
}
void attention_backward_bias_tf32_cuda(const Tensor& q, const Tensor& k, const AttentionArgs<float>& args,
                                       const AttentionProblem& problem) {
  run(q, k, args, problem);
}

}  // namespace tessera::ops

#include "gpu/approx.cuh"
#include "ops/attention/attention_bias.cuh"
#include "ops/attention/attention_dropout.cuh"
#include "ops/attention/attention_tile.cuh"

/// The gradient of a bias in bf16 and f16, on tensor cores with mma.sync: see attention_bias.cuh.
///
/// A block of 4 warps, 16 queries each, computes S = Q K^T and dP = dO V^T of 64 queries and 64 keys from
/// tiles in shared memory and adds dS = P (dP - delta) to a sum in registers, 32 per thread. Tiles are not
/// double buffered: three blocks per SM (two above D = 64 and with dropout) hide each other's loads. Bytes:
/// four tiles per step, from L2 where blocks share them.

namespace tessera::ops {
namespace {

constexpr int kThreads = 128, kStep = 32;

template <class T, int kD, bool kDrops>
__global__ void __launch_bounds__(kThreads, kD > 64 || kDrops ? 2 : 3)
    attention_backward_bias_kernel(AttentionArgs<T> args, BiasGradient<T> gradient) {
  extern __shared__ __align__(1024) uint4 shared[];
  T* const q_tile = reinterpret_cast<T*>(shared);  // [kBiasTile, kD]
  T* const dout_tile = q_tile + kBiasTile * kD;    // [kBiasTile, kD]
  T* const k_tile = dout_tile + kBiasTile * kD;    // [kBiasTile, kD]
  T* const v_tile = k_tile + kBiasTile * kD;       // [kBiasTile, kD]
  const BiasTile tile = gradient.tile();
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, warp_row = warp * 16;
  const int key = tile.key_tile * kBiasTile, keys = args.keys - key;
  RowOperand<kD, 1, false> q(q_tile, warp_row), dout(dout_tile, warp_row);
  [[maybe_unused]] uint32_t stream = 0;
  if constexpr (kDrops) stream = args.drop.stream();

  float sum[kBiasTile / kStep][1][kStep / 8][4] = {};  // [queries, keys]
  for (int index = tile.begin; index < tile.end; ++index) {
    const AttentionCoord coord = gradient.coord(args, tile, index);
    const int first = coord.sequence.tile * kBiasTile, rows = min(args.queries - first, kBiasTile);
    if (coord.key_limit(args.causal, first + rows - 1) <= key) continue;  // fully masked
    __syncthreads();                                                      // no warp still reads the tiles
    load_tile<kD, kBiasTile, kThreads>(q_tile, coord.q_row(args.q, coord.head, first), args.q.row, rows,
                                       args.dim);
    load_tile<kD, kBiasTile, kThreads>(dout_tile, coord.q_row(args.dout, coord.head, first), args.dout.row,
                                       rows, args.dim);
    load_tile<kD, kBiasTile, kThreads>(k_tile, coord.k_row(args.k, coord.kv_head, key), args.k.row, keys,
                                       args.dim);
    load_tile<kD, kBiasTile, kThreads>(v_tile, coord.k_row(args.v, coord.kv_head, key), args.v.row, keys,
                                       args.dim);
    gpu::cp_async_commit();
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
    __syncthreads();
    q.load_fragments(), dout.load_fragments();

#pragma unroll
    for (int step = 0; step < kBiasTile / kStep; ++step) {
      float s[1][kStep / 8][4] = {}, dp[1][kStep / 8][4] = {};
      gemm_abt<T>(s, q, k_tile, step * kStep);
      gemm_abt<T>(dp, dout, v_tile, step * kStep);
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
                              : gpu::exp2_approx(s[0][n][e] - lse2[e / 2]);
          if constexpr (kDrops) dp[0][n][e] = bits[n / 2].drop(dp[0][n][e], n % 2, e);
          sum[step][0][n][e] = fmaf(p, dp[0][n][e] - delta[e / 2], sum[step][0][n][e]);
        }
    }
  }

  // Epilogue: store the tile, or the sums of its columns
  const float factor = kDrops ? args.drop.scale : 1.0f;
  float* const columns = reinterpret_cast<float*>(shared);  // [4 warps, kBiasTile]
  if (gradient.sums_rows()) __syncthreads();                // no warp still reads the tiles
#pragma unroll
  for (int step = 0; step < kBiasTile / kStep; ++step)
#pragma unroll
    for (int n = 0; n < kStep / 8; ++n)
#pragma unroll
      for (int parity = 0; parity < 2; ++parity) {
        const int column = step * kStep + n * 8 + lane % 4 * 2 + parity;
        const float low = sum[step][0][n][parity], high = sum[step][0][n][2 + parity];
        if (gradient.sums_rows()) {
          float total = low + high;
#pragma unroll
          for (int rows = 4; rows < 32; rows *= 2) total += __shfl_xor_sync(0xFFFFFFFFu, total, rows);
          if (lane < 4) columns[warp * kBiasTile + column] = total;
        } else if (column < keys) {
          const int query = tile.query_tile * kBiasTile + warp_row + lane / 4;
          if (query < gradient.queries) gradient.store(tile, query, key + column, low * factor);
          if (query + 8 < gradient.queries) gradient.store(tile, query + 8, key + column, high * factor);
        }
      }
  if (!gradient.sums_rows()) return;
  __syncthreads();
  if (const int column = int(threadIdx.x); column < min(keys, kBiasTile)) {
    float total = 0;
#pragma unroll
    for (int own = 0; own < kThreads / 32; ++own) total += columns[own * kBiasTile + column];
    gradient.store(tile, 0, key + column, total * factor);
  }
}

template <class T>
void run(const Tensor& q, const Tensor& k, const AttentionArgs<T>& args, const AttentionProblem& problem) {
  sum_bias_gradient<T>(q, k, problem, [&](unsigned blocks, const BiasGradient<T>& gradient) {
    const auto launch = [&]<int kD, bool kDrops>() {
      gpu::launch(q.device(), {dim3(blocks), dim3(kThreads), size_t(4 * kBiasTile) * kD * sizeof(T)},
                  attention_backward_bias_kernel<T, kD, kDrops>, args, gradient);
    };
    dispatch_wide_head_size(args.dim, args.drop, launch);
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

}  // namespace tessera::ops

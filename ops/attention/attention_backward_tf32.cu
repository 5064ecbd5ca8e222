#include "ops/attention/attention_scores.cuh"
#include "ops/attention/attention_tile_tf32.cuh"

/// Backward of f32 operands on tensor cores in TF32: the two kernels of attention_backward.cu (one owns keys
/// and walks the queries, one owns queries and walks the keys; seven GEMMs, no atomics, a fixed order of
/// summation), with mma.sync.m16n8k8. The statistics are those of attention_delta_kernel.
///
/// Each warp has 16 rows, a block 4 warps (8 above D = 64, where shared memory holds one block per SM); the
/// walked tiles have 64 rows, double buffered by cp.async up to D = 64, and steps are 32 columns. Q, K, V
/// and dO are rounded to TF32 in shared memory, P and dS in registers; everything else is f32. Bound by
/// shared memory: two words of 128 bytes per MMA of 2048 FLOPs.

namespace tessera::ops {
namespace {

constexpr int kWalked = 64;  // rows of a walked tile
constexpr int kStep = 32;    // rows of a walked tile per step
static_assert(kWalked == kAttentionPad);

template <int kD>
struct BackwardTile {
  static constexpr bool kWide = kD > 64;
  static constexpr int kWarps = kWide ? 8 : 4, kThreads = kWarps * 32, kOwned = kWarps * 16;
  static constexpr bool kInRegisters = !kWide;   // own rows in registers
  static constexpr int kStages = kWide ? 1 : 2;  // of the walked tiles
  static constexpr int kBlocks = kWide ? 1 : 2;  // per SM
  static constexpr int kWalkedFloats = kWalked * tf32::kPitch<kD>;
  static constexpr size_t kTileBytes =
      (size_t(2 * kOwned) * tf32::kPitch<kD> + size_t(2 * kStages) * kWalkedFloats) * sizeof(float);
  static constexpr size_t kStatisticsBytes = size_t(kStages) * 2 * kWalked * sizeof(float);
};

template <int kD, bool kDrops, bool kBias>
__global__ void __launch_bounds__(BackwardTile<kD>::kThreads, BackwardTile<kD>::kBlocks)
    attention_backward_keys_tf32_kernel(AttentionArgs<float> args) {
  using Tile = BackwardTile<kD>;
  constexpr int kOwned = Tile::kOwned, kThreads = Tile::kThreads, kStages = Tile::kStages;
  extern __shared__ float4 shared[];
  float* const k_tile = reinterpret_cast<float*>(shared);     // [kOwned, kD]
  float* const v_tile = k_tile + kOwned * tf32::kPitch<kD>;   // [kOwned, kD]
  float* const q_tiles = v_tile + kOwned * tf32::kPitch<kD>;  // kStages x [kWalked, kD]
  float* const dout_tiles = q_tiles + kStages * Tile::kWalkedFloats;
  float* const statistics = dout_tiles + kStages * Tile::kWalkedFloats;  // kStages x {lse2, delta} [kWalked]
  __shared__ AttentionCoord coord;
  if (!find_coord<false>(args, kOwned, coord)) return;
  const int first = coord.sequence.tile * kOwned;
  const int lane = int(threadIdx.x) % 32, warp_row = int(threadIdx.x) / 32 * 16;

  tf32::RowOperand<kD, 1, Tile::kInRegisters> k(k_tile, warp_row), v(v_tile, warp_row);
  // Earlier queries see none of the block's keys. The heads of the group are walked one after the other.
  const int begin = coord.first_query(args.causal, first) / kWalked * kWalked;
  const auto load_queries = [&](int h, int query, int stage) {
    const int rows = coord.sequence.queries - query;
    tf32::load_tile<kD, kWalked, kThreads>(q_tiles + stage * Tile::kWalkedFloats,
                                           coord.q_row(args.q, h, query), args.q.row, rows, args.dim);
    tf32::load_tile<kD, kWalked, kThreads>(dout_tiles + stage * Tile::kWalkedFloats,
                                           coord.q_row(args.dout, h, query), args.dout.row, rows, args.dim);
    // Threads 0-15 copy the tile's lse2, 16-31 its delta, 16 bytes each.
    constexpr int kChunks = kWalked / 4;
    if (const int chunk = int(threadIdx.x); chunk < 2 * kChunks)
      gpu::cp_async_16(gpu::shared_address(statistics + stage * 2 * kWalked + chunk * 4),
                       (chunk < kChunks ? args.lse2 : args.delta) + coord.statistics_at(args, h) + query +
                           chunk % kChunks * 4,
                       true);
    gpu::cp_async_commit();
  };
  int h = coord.head;
  if (begin < coord.sequence.queries) {
    const int rows = coord.sequence.keys - first;
    tf32::load_tile<kD, kOwned, kThreads>(k_tile, coord.k_row(args.k, coord.kv_head, first), args.k.row, rows,
                                          args.dim);
    tf32::load_tile<kD, kOwned, kThreads>(v_tile, coord.k_row(args.v, coord.kv_head, first), args.v.row, rows,
                                          args.dim);
    load_queries(h, begin, 0);
    gpu::cp_async_wait<0>();
    tf32::round_tile<kD, kOwned, kThreads>(k_tile);
    tf32::round_tile<kD, kOwned, kThreads>(v_tile);
    __syncthreads();
    k.load_fragments(), v.load_fragments();
  } else {
    h = INT_MAX;  // no query sees the keys
  }

  [[maybe_unused]] uint32_t stream = 0;
  if constexpr (kDrops) stream = args.drop.stream();
  [[maybe_unused]] float key_sum[2] = {};  // dS of the lane's keys, over the queries of head h
  float dk[1][kD / 8][4] = {}, dv[1][kD / 8][4] = {};
  for (int query = begin, stage = 0; h < coord.head + args.group; stage = (stage + 1) % kStages) {
    const bool last_of_head = query + kWalked >= coord.sequence.queries;
    const int next_h = h + last_of_head, next_query = last_of_head ? begin : query + kWalked;
    const bool more = next_h < coord.head + args.group;
    float* const q_tile = q_tiles + stage * Tile::kWalkedFloats;
    float* const dout_tile = dout_tiles + stage * Tile::kWalkedFloats;
    gpu::cp_async_wait<0>();
    tf32::round_tile<kD, kWalked, kThreads>(q_tile);
    tf32::round_tile<kD, kWalked, kThreads>(dout_tile);
    __syncthreads();  // the tile has landed, and no warp still reads the other stage
    if (kStages > 1 && more) load_queries(next_h, next_query, stage ^ 1);
    const float* const own_lse2 = statistics + stage * 2 * kWalked;
    [[maybe_unused]] uint32_t word =
        0;  // keep bits of the warp's 16 keys and the walked queries: four 16 x 16 blocks
    if constexpr (kDrops)
      word = args.drop.word(stream, coord.drop_row(args, h), uint32_t(query / 16 + lane / 8),
                            uint32_t((first + warp_row) / 2 + lane % 8));

#pragma unroll 1
    for (int step = 0; step < kWalked; step += kStep) {
      // S^T = K Q^T, dP^T = V dO^T: [keys, queries]
      float s[1][kStep / 8][4] = {}, dp[1][kStep / 8][4] = {};
      tf32::gemm_abt<kD>(s, k, q_tile, step);
      tf32::gemm_abt<kD>(dp, v, dout_tile, step);
      if constexpr (kBias) add_bias_transposed(s, args, coord, h, query + step, first + warp_row);
      if (query + step < coord.first_query(args.causal, first + kOwned - 1))
        mask_scores_transposed(s, coord, args.causal, query + step, first + warp_row);
      [[maybe_unused]] ColumnBits bits[kStep / 16];
      if constexpr (kDrops)
#pragma unroll
        for (int block = 0; block < kStep / 16; ++block) bits[block] = {word, (step / 16 + block) * 8, lane};
      to_dscores_transposed<kDrops, kBias>(s, dp, args, own_lse2 + step, own_lse2 + kWalked + step, bits);
      if constexpr (kBias)
        if (args.key_sums) add_key_sums(key_sum, dp[0]);
      // dV += P^T dO, dK += dS^T Q
      tf32::gemm_ab<kD>(dv, s, dout_tile, step);
      tf32::gemm_ab<kD>(dk, dp, q_tile, step);
    }
    if (kStages == 1 && more) {
      __syncthreads();  // no warp still reads the tile
      load_queries(next_h, next_query, 0);
    }
    if constexpr (kBias)
      if (args.key_sums && last_of_head)
        store_key_sums(key_sum, kDrops ? args.drop.scale : 1.0f, args, coord, h, first + warp_row);
    h = next_h;
    query = next_query;
  }
  if (kBias && !args.dk.data) return;

  float one[1][2], last[1][2];
  one[0][0] = one[0][1] = kDrops ? args.drop.scale : 1.0f;
  last[0][0] = last[0][1] = coord.grad_scale<kDrops>(args);
  const int rows = coord.sequence.keys - first;
  tf32::store_columns<kD>(dk, last, warp_row, coord.k_row(args.dk, coord.kv_head, first), args.dk.row, rows,
                          args.dim);
  tf32::store_columns<kD>(dv, one, warp_row, coord.k_row(args.dv, coord.kv_head, first), args.dv.row, rows,
                          args.dim);
}

template <int kD, bool kDrops, bool kBias>
__global__ void __launch_bounds__(BackwardTile<kD>::kThreads, BackwardTile<kD>::kBlocks)
    attention_backward_queries_tf32_kernel(AttentionArgs<float> args) {
  using Tile = BackwardTile<kD>;
  constexpr int kOwned = Tile::kOwned, kThreads = Tile::kThreads, kStages = Tile::kStages;
  extern __shared__ float4 shared[];
  float* const q_tile = reinterpret_cast<float*>(shared);        // [kOwned, kD]
  float* const dout_tile = q_tile + kOwned * tf32::kPitch<kD>;   // [kOwned, kD]
  float* const k_tiles = dout_tile + kOwned * tf32::kPitch<kD>;  // kStages x [kWalked, kD]
  float* const v_tiles = k_tiles + kStages * Tile::kWalkedFloats;
  __shared__ AttentionCoord coord;
  if (!find_coord<true>(args, kOwned, coord)) return;
  const int first = coord.sequence.tile * kOwned, rows = min(coord.sequence.queries - first, kOwned);
  const int lane = int(threadIdx.x) % 32, warp_row = int(threadIdx.x) / 32 * 16;

  tf32::RowOperand<kD, 1, Tile::kInRegisters> q(q_tile, warp_row), dout(dout_tile, warp_row);
  const auto load_keys = [&](int tile) {
    const int key = tile * kWalked, stage = tile % kStages * Tile::kWalkedFloats;
    tf32::load_tile<kD, kWalked, kThreads>(k_tiles + stage, coord.k_row(args.k, coord.kv_head, key),
                                           args.k.row, coord.sequence.keys - key, args.dim);
    tf32::load_tile<kD, kWalked, kThreads>(v_tiles + stage, coord.k_row(args.v, coord.kv_head, key),
                                           args.v.row, coord.sequence.keys - key, args.dim);
    gpu::cp_async_commit();
  };
  // Every query of the block sees the first `unmasked` keys; none sees key `end` or a later one.
  const int unmasked = coord.key_limit(args.causal, first),
            end = coord.key_limit(args.causal, first + rows - 1);
  const int key_tiles = int(gpu::ceil_div(end, kWalked));
  if (key_tiles > 0) {
    tf32::load_tile<kD, kOwned, kThreads>(q_tile, coord.q_row(args.q, coord.head, first), args.q.row, rows,
                                          args.dim);
    tf32::load_tile<kD, kOwned, kThreads>(dout_tile, coord.q_row(args.dout, coord.head, first), args.dout.row,
                                          rows, args.dim);
    load_keys(0);
    gpu::cp_async_wait<0>();
    tf32::round_tile<kD, kOwned, kThreads>(q_tile);
    tf32::round_tile<kD, kOwned, kThreads>(dout_tile);
    __syncthreads();
    q.load_fragments(), dout.load_fragments();
  }

  float dq[1][kD / 8][4] = {};
  float lse2[1][2], delta[1][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Statistics of rows beyond the sequence's padding belong to another; P of such rows is made 0.
    const int row = warp_row + half * 8 + lane / 4;
    const int64_t at = coord.statistics_at(args, coord.head) + first + row;
    lse2[0][half] = row < rows ? args.lse2[at] : INFINITY;
    delta[0][half] = row < rows ? args.delta[at] : 0.0f;
  }

  [[maybe_unused]] uint32_t stream = 0;
  if constexpr (kDrops) stream = args.drop.stream();
  for (int tile = 0; tile < key_tiles; ++tile) {
    float* const k_tile = k_tiles + tile % kStages * Tile::kWalkedFloats;
    float* const v_tile = v_tiles + tile % kStages * Tile::kWalkedFloats;
    gpu::cp_async_wait<0>();
    tf32::round_tile<kD, kWalked, kThreads>(k_tile);
    tf32::round_tile<kD, kWalked, kThreads>(v_tile);
    __syncthreads();  // the tile has landed, and no warp still reads the other stage
    if (kStages > 1 && tile + 1 < key_tiles) load_keys(tile + 1);
    [[maybe_unused]] uint32_t word =
        0;  // keep bits of the warp's 16 queries and the walked keys: four 16 x 16 blocks
    if constexpr (kDrops)
      word = args.drop.word(stream, coord.drop_row(args, coord.head), uint32_t((first + warp_row) / 16),
                            uint32_t(tile * kWalked / 2 + lane));

#pragma unroll 1
    for (int step = 0; step < kWalked; step += kStep) {
      // S = Q K^T, dP = dO V^T
      float s[1][kStep / 8][4] = {}, dp[1][kStep / 8][4] = {};
      tf32::gemm_abt<kD>(s, q, k_tile, step);
      tf32::gemm_abt<kD>(dp, dout, v_tile, step);
      if constexpr (kBias) add_bias(s, args, coord, coord.head, first + warp_row, tile * kWalked + step);
      if (tile * kWalked + step + kStep > unmasked)
        mask_scores(s, coord, args.causal, first + warp_row, tile * kWalked + step);
      [[maybe_unused]] RowBits bits[kStep / 16];
      if constexpr (kDrops)
#pragma unroll
        for (int block = 0; block < kStep / 16; ++block) bits[block] = {word, (step / 16 + block) * 8, lane};
      to_dscores<kDrops, kBias>(s, dp, args, lse2, delta, bits);
      if constexpr (kBias)
        if (args.dbias)
          store_dbias(dp[0], kDrops ? args.drop.scale : 1.0f, args, coord, first + warp_row,
                      tile * kWalked + step);
      // dQ += dS K
      tf32::gemm_ab<kD>(dq, dp, k_tile, step);
    }
    if (kStages == 1 && tile + 1 < key_tiles) {
      __syncthreads();  // no warp still reads the tile
      load_keys(tile + 1);
    }
  }
  if constexpr (kBias)
    if (args.dbias) clear_dbias(args, coord, first, rows, key_tiles * kWalked);
  if (kBias && !args.dq.data) return;

  float last[1][2];
  last[0][0] = last[0][1] = coord.grad_scale<kDrops>(args);
  tf32::store_columns<kD>(dq, last, warp_row, coord.q_row(args.dq, coord.head, first), args.dq.row, rows,
                          args.dim);
}

}  // namespace

void attention_backward_tf32_cuda(const Tensor& q, const Tensor& k, const AttentionArgs<float>& args) {
  dispatch_kernel(args, [&]<int kD, bool kDrops, bool kBias>() {
    using Tile = BackwardTile<kD>;
    if (args.dk.data || args.key_sums)
      launch_attention(k, args, Tile::kOwned, Tile::kThreads, Tile::kTileBytes + Tile::kStatisticsBytes,
                       attention_backward_keys_tf32_kernel<kD, kDrops, kBias>);
    if (args.dq.data || args.dbias)
      launch_attention(q, args, Tile::kOwned, Tile::kThreads, Tile::kTileBytes,
                       attention_backward_queries_tf32_kernel<kD, kDrops, kBias>);
  });
}

}  // namespace tessera::ops

#include "gpu/pack.cuh"
#include "ops/attention/attention_scores.cuh"
#include "ops/attention/attention_tile.cuh"
#include "ops/attention/attention_variants.h"

/// Backward on tensor cores, after FlashAttention-2 (Dao, arXiv:2307.08691, algorithm 2) but without its
/// atomic additions to dQ, so that every run gives the same bits. With P = exp(S - lse), dP = dO V^T, delta =
/// rowsum(O dO):
///   dS = P (dP - delta),  dV = P^T dO,  dK = scale dS^T Q,  dQ = scale dS K
///
/// Three kernels. The first computes delta and lse in base 2, rows padded so that later loads need no bounds.
/// The second owns a tile of keys and walks the queries: it computes S^T = K Q^T and dP^T = V dO^T, whose
/// accumulators are, once rounded, the left operands of dV += P^T dO and dK += dS^T Q, so P and dS never
/// leave registers. The third owns a tile of queries and walks the keys: S = Q K^T, dP = dO V^T, dQ += dS K.
/// That makes 7 GEMMs where one kernel with atomics needs 5: the price, at most 1.4x, of a fixed order of
/// summation and of a dQ that is written once.
///
/// Each warp has 16 rows and each block 4 warps; steps are 32 columns, so that accumulators (dK and dV: D
/// registers at 16 rows) and the two score tiles leave room for three or four blocks per SM. The walked tiles
/// have 64 rows; two are in shared memory, filled by cp.async. Bound by shared memory: a fragment of 256
/// bytes (2 clocks) per MMA of 4096 FLOPs, so at most 2048 FLOPs per clock and SM.

namespace tessera::ops {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32;
constexpr int kM = 1;                     // m16 MMAs per warp and step
constexpr int kOwned = kWarps * kM * 16;  // rows of a block's own tile
constexpr int kWalked = 64;               // rows of a walked tile
constexpr int kStep = 32;                 // rows of a walked tile per step
static_assert(kWalked == kAttentionPad && kOwned <= kAttentionPad);

template <int kD, bool kExtra>
struct BackwardTile {
  static constexpr bool kInRegisters = kD <= 64;  // own rows in registers
  static constexpr size_t kTileBytes = size_t(kOwned + 2 * kWalked) * 2 * kD * 2;
  static constexpr size_t kStatisticsBytes = 2 * 2 * kWalked * sizeof(float);
  // Of the kernel that owns keys, kStep queries x kOwned keys per step, and of the one that owns queries.
  static constexpr size_t kKeyBiasBytes = size_t(kWalked) * kBiasPitch<kOwned> * 2;
  static constexpr size_t kQueryBiasBytes = size_t(kWalked / kStep) * kOwned * kBiasPitch<kStep> * 2;
  // Blocks per SM; one less where dropout or a bias (kExtra) needs the registers.
  static constexpr int kKeyBlocks = kD > 64 || kExtra ? 2 : 3, kQueryBlocks = kD > 64 ? 2 : kExtra ? 3 : 4;
};

/// Computes delta and lse2: kLanes lanes per row, 16 bytes of the row each.
template <class T, int kLanes>
__global__ void __launch_bounds__(256) attention_delta_kernel(AttentionArgs<T> args) {
  constexpr int kPack = gpu::kPackOf<T>;
  const int64_t row = (blockIdx.x * int64_t(blockDim.x) + threadIdx.x) / kLanes;
  const int column = int(threadIdx.x) % kLanes * kPack;
  const int64_t head_row = row / args.padded_queries, i = row % args.padded_queries;
  // All rows of a block are in one tile slot.
  AttentionSequence sequence{0, 0, args.queries, 0, args.keys, int(i / kAttentionPad), true};
  if (args.seqlens.packed())
    sequence = args.seqlens.template find<true>(int(i / kAttentionPad), kAttentionPad);
  const int query = sequence.tile * kAttentionPad + int(i % kAttentionPad);
  const bool exists = sequence.has_tile && query < sequence.queries;
  float sum = 0;
  if (exists && column < args.dim) {
    const int64_t b = head_row / args.heads, h = head_row % args.heads;
    const auto o = gpu::load_pack<kPack>(args.o.at(b, h, sequence.q_first + query) + column);
    const auto dout = gpu::load_pack<kPack>(args.dout.at(b, h, sequence.q_first + query) + column);
#pragma unroll
    for (int e = 0; e < kPack; ++e) sum += float(o.at[e]) * float(dout.at[e]);
  }
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  if (column != 0) return;
  const float lse = exists ? args.lse[head_row * args.lse_stride + sequence.q_first + query] : -INFINITY;
  args.delta[row] = sum * args.drop.keep;
  args.lse2[row] = lse == -INFINITY ? INFINITY : lse * 1.44269504f;
}

template <class T, int kD, bool kDrops, bool kBias>
__global__ void __launch_bounds__(kThreads, BackwardTile<kD, kDrops || kBias>::kKeyBlocks)
    attention_backward_keys_kernel(AttentionArgs<T> args) {
  using Tile = BackwardTile<kD, kDrops || kBias>;
  extern __shared__ __align__(1024) uint4 shared[];
  T* const k_tile = reinterpret_cast<T*>(shared);    // [kOwned, kD]
  T* const v_tile = k_tile + kOwned * kD;            // [kOwned, kD]
  T* const q_tiles = v_tile + kOwned * kD;           // 2 x [kWalked, kD]
  T* const dout_tiles = q_tiles + 2 * kWalked * kD;  // 2 x [kWalked, kD]
  float* const statistics =
      reinterpret_cast<float*>(dout_tiles + 2 * kWalked * kD);  // 2 x {lse2, delta} [kWalked]
  [[maybe_unused]] T* const bias_tile = reinterpret_cast<T*>(statistics + 2 * 2 * kWalked);  // by steps
  __shared__ AttentionCoord coord;
  if (!find_coord<false>(args, kOwned, coord)) return;
  const int first = coord.sequence.tile * kOwned;
  const int lane = int(threadIdx.x) % 32, warp_row = int(threadIdx.x) / 32 * kM * 16;

  RowOperand<kD, kM, Tile::kInRegisters> k(k_tile, warp_row), v(v_tile, warp_row);
  // Earlier queries see none of the block's keys. The heads of the group are walked one after the other.
  const int begin = coord.first_query(args.causal, first) / kWalked * kWalked;
  const auto load_queries = [&](int h, int query, int stage) {
    const int rows = coord.sequence.queries - query;
    load_tile<kD, kWalked, kThreads>(q_tiles + stage * kWalked * kD, coord.q_row(args.q, h, query),
                                     args.q.row, rows, args.dim);
    load_tile<kD, kWalked, kThreads>(dout_tiles + stage * kWalked * kD, coord.q_row(args.dout, h, query),
                                     args.dout.row, rows, args.dim);
    // Threads 0-15 copy the tile's lse2, 16-31 its delta, 16 bytes each.
    constexpr int kChunks = kWalked / 4;
    if (const int chunk = int(threadIdx.x); chunk < 2 * kChunks)
      gpu::cp_async_16(gpu::shared_address(statistics + stage * 2 * kWalked + chunk * 4),
                       (chunk < kChunks ? args.lse2 : args.delta) + coord.statistics_at(args, h) + query +
                           chunk % kChunks * 4,
                       true);
    gpu::cp_async_commit();
  };
  [[maybe_unused]] const auto load_step_bias = [&](int h, int query, int step) {
    load_bias<kStep, kOwned, kThreads>(bias_tile + step * kBiasPitch<kOwned>, args, coord, h, query + step,
                                       first, gpu::reread_thread());
    gpu::cp_async_commit();
  };
  int h = coord.head;
  if (begin < coord.sequence.queries) {
    const int rows = coord.sequence.keys - first;
    load_tile<kD, kOwned, kThreads>(k_tile, coord.k_row(args.k, coord.kv_head, first), args.k.row, rows,
                                    args.dim);
    load_tile<kD, kOwned, kThreads>(v_tile, coord.k_row(args.v, coord.kv_head, first), args.v.row, rows,
                                    args.dim);
    load_queries(h, begin, 0);
    if constexpr (kBias)
      for (int step = 0; step < kWalked; step += kStep) load_step_bias(h, begin, step);
    gpu::cp_async_wait<0>();
    __syncthreads();
    k.load_fragments(), v.load_fragments();
  } else {
    h = INT_MAX;  // no query sees the keys
  }

  [[maybe_unused]] uint32_t stream = 0;
  if constexpr (kDrops) stream = args.drop.stream();
  [[maybe_unused]] float key_sum[2] = {};  // dS of the lane's keys, over the queries of head h
  float dk[kM][kD / 8][4] = {}, dv[kM][kD / 8][4] = {};
  for (int query = begin, stage = 0; h < coord.head + args.group; stage ^= 1) {
    gpu::cp_async_wait<0>();
    __syncthreads();  // the tile has landed, and no warp still reads the other stage
    const bool last_of_head = query + kWalked >= coord.sequence.queries;
    const int next_h = h + last_of_head, next_query = last_of_head ? begin : query + kWalked;
    if (next_h < coord.head + args.group) load_queries(next_h, next_query, stage ^ 1);
    const T* const q_tile = q_tiles + stage * kWalked * kD;
    const T* const dout_tile = dout_tiles + stage * kWalked * kD;
    const float* const own_lse2 = statistics + stage * 2 * kWalked;
    [[maybe_unused]] uint32_t word =
        0;  // keep bits of the warp's 16 keys and the walked queries: four 16 x 16 blocks
    if constexpr (kDrops)
      word = args.drop.word(stream, coord.drop_row(args, h), uint32_t(query / 16 + lane / 8),
                            uint32_t((first + warp_row) / 2 + lane % 8));

#pragma unroll 1
    for (int step = 0; step < kWalked; step += kStep) {
      float s[kM][kStep / 8][4] = {}, dp[kM][kStep / 8][4] = {};  // [keys, queries]
      gemm_abt<T>(s, k, q_tile, step);
      if constexpr (kBias) {
        add_bias_transposed<kOwned>(s, args, bias_tile + step * kBiasPitch<kOwned>, warp_row);
        __syncthreads();  // no warp still reads the step's bias
        if (next_h < coord.head + args.group) load_step_bias(next_h, next_query, step);
      }
      gemm_abt<T>(dp, v, dout_tile, step);
      if (query + step < coord.first_query(args.causal, first + kOwned - 1))
        mask_scores_transposed(s, coord, args.causal, query + step, first + warp_row);
      [[maybe_unused]] ColumnBits bits[kStep / 16];
      if constexpr (kDrops)
#pragma unroll
        for (int block = 0; block < kStep / 16; ++block) bits[block] = {word, (step / 16 + block) * 8, lane};
      to_dscores_transposed<kDrops, kBias>(s, dp, args, own_lse2 + step, own_lse2 + kWalked + step, bits);
      if constexpr (kBias)
        if (args.key_sums) add_key_sums(key_sum, dp[0]);
      uint32_t left[kM][kStep / 16][4];
      to_operand<T>(left, s);
      gemm_ab<T, kD>(dv, left, dout_tile, step);
      to_operand<T>(left, dp);
      gemm_ab<T, kD>(dk, left, q_tile, step);
    }
    if constexpr (kBias)
      if (args.key_sums && last_of_head)
        store_key_sums(key_sum, kDrops ? args.drop.scale : 1.0f, args, coord, h, first + warp_row);
    h = next_h;
    query = next_query;
  }
  if (kBias && !args.dk.data) return;

  float one[kM][2], last[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    one[m][0] = one[m][1] = kDrops ? args.drop.scale : 1.0f;
    last[m][0] = last[m][1] = coord.grad_scale<kDrops>(args);
  }
  const int rows = coord.sequence.keys - first;
  store_rows<kD>(dk, last, k_tile, warp_row, coord.k_row(args.dk, coord.kv_head, first), args.dk.row, rows,
                 args.dim);
  store_rows<kD>(dv, one, v_tile, warp_row, coord.k_row(args.dv, coord.kv_head, first), args.dv.row, rows,
                 args.dim);
}

template <class T, int kD, bool kDrops, bool kBias>
__global__ void __launch_bounds__(kThreads, BackwardTile<kD, kDrops || kBias>::kQueryBlocks)
    attention_backward_queries_kernel(AttentionArgs<T> args) {
  using Tile = BackwardTile<kD, kDrops || kBias>;
  extern __shared__ __align__(1024) uint4 shared[];
  T* const q_tile = reinterpret_cast<T*>(shared);  // [kOwned, kD]
  T* const dout_tile = q_tile + kOwned * kD;       // [kOwned, kD]
  T* const k_tiles = dout_tile + kOwned * kD;      // 2 x [kWalked, kD]
  T* const v_tiles = k_tiles + 2 * kWalked * kD;   // 2 x [kWalked, kD]
  [[maybe_unused]] T* const bias_tiles = v_tiles + 2 * kWalked * kD;
  __shared__ AttentionCoord coord;
  if (!find_coord<true>(args, kOwned, coord)) return;
  const int first = coord.sequence.tile * kOwned, rows = min(coord.sequence.queries - first, kOwned);
  const int lane = int(threadIdx.x) % 32, warp_row = int(threadIdx.x) / 32 * kM * 16;

  RowOperand<kD, kM, Tile::kInRegisters> q(q_tile, warp_row), dout(dout_tile, warp_row);
  const auto load_keys = [&](int tile) {
    const int key = tile * kWalked, stage = tile % 2 * kWalked * kD;
    load_tile<kD, kWalked, kThreads>(k_tiles + stage, coord.k_row(args.k, coord.kv_head, key), args.k.row,
                                     coord.sequence.keys - key, args.dim);
    load_tile<kD, kWalked, kThreads>(v_tiles + stage, coord.k_row(args.v, coord.kv_head, key), args.v.row,
                                     coord.sequence.keys - key, args.dim);
    gpu::cp_async_commit();
  };
  // The bias of a warp's scores in a step, [kM * 16, kStep]: only the warp reads what it copied.
  [[maybe_unused]] const auto own_bias = [&](int step) {
    return bias_tiles + (step / kStep * kOwned + warp_row) * kBiasPitch<kStep>;
  };
  [[maybe_unused]] const auto load_step_bias = [&](int tile, int step) {
    load_bias<kM * 16, kStep, 32>(own_bias(step), args, coord, coord.head, first + warp_row,
                                  tile * kWalked + step, gpu::reread_lane());
    gpu::cp_async_commit();
  };
  // Every query of the block sees the first `unmasked` keys; none sees key `end` or a later one.
  const int unmasked = coord.key_limit(args.causal, first),
            end = coord.key_limit(args.causal, first + rows - 1);
  const int key_tiles = int(gpu::ceil_div(end, kWalked));
  if (key_tiles > 0) {
    load_tile<kD, kOwned, kThreads>(q_tile, coord.q_row(args.q, coord.head, first), args.q.row, rows,
                                    args.dim);
    load_tile<kD, kOwned, kThreads>(dout_tile, coord.q_row(args.dout, coord.head, first), args.dout.row, rows,
                                    args.dim);
    load_keys(0);
    if constexpr (kBias)
      for (int step = 0; step < kWalked; step += kStep) load_step_bias(0, step);
    gpu::cp_async_wait<0>();
    __syncthreads();
    q.load_fragments(), dout.load_fragments();
  }

  float dq[kM][kD / 8][4] = {};
  float lse2[kM][2], delta[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int hh = 0; hh < 2; ++hh) {
      const int row = first + warp_row + m * 16 + hh * 8 + lane / 4;  // below padded_queries
      lse2[m][hh] = args.lse2[coord.statistics_at(args, coord.head) + row];
      delta[m][hh] = args.delta[coord.statistics_at(args, coord.head) + row];
    }

  [[maybe_unused]] uint32_t stream = 0;
  if constexpr (kDrops) stream = args.drop.stream();
  for (int tile = 0; tile < key_tiles; ++tile) {
    gpu::cp_async_wait<0>();
    __syncthreads();  // the tile has landed, and no warp still reads the other stage
    if (tile + 1 < key_tiles) load_keys(tile + 1);
    const T* const k_tile = k_tiles + tile % 2 * kWalked * kD;
    const T* const v_tile = v_tiles + tile % 2 * kWalked * kD;
    [[maybe_unused]] uint32_t word =
        0;  // keep bits of the warp's 16 queries and the walked keys: four 16 x 16 blocks
    if constexpr (kDrops)
      word = args.drop.word(stream, coord.drop_row(args, coord.head), uint32_t((first + warp_row) / 16),
                            uint32_t(tile * kWalked / 2 + lane));

#pragma unroll 1
    for (int step = 0; step < kWalked; step += kStep) {
      float s[kM][kStep / 8][4] = {}, dp[kM][kStep / 8][4] = {};  // [queries, keys]
      gemm_abt<T>(s, q, k_tile, step);
      if constexpr (kBias) {
        add_bias<kStep>(s, args, own_bias(step), 0);
        __syncwarp();  // no lane still reads the step's bias
        if (tile + 1 < key_tiles) load_step_bias(tile + 1, step);
      }
      gemm_abt<T>(dp, dout, v_tile, step);
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
      uint32_t left[kM][kStep / 16][4];
      to_operand<T>(left, dp);
      gemm_ab<T, kD>(dq, left, k_tile, step);
    }
  }
  if constexpr (kBias)
    if (args.dbias) clear_dbias(args, coord, first, rows, key_tiles * kWalked);
  if (kBias && !args.dq.data) return;

  float last[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) last[m][0] = last[m][1] = coord.grad_scale<kDrops>(args);
  store_rows<kD>(dq, last, q_tile, warp_row, coord.q_row(args.dq, coord.head, first), args.dq.row, rows,
                 args.dim);
}

/// delta and lse2 of every row, with lanes enough for the head in words of 16 bytes.
template <class T>
void launch_delta(const Tensor& q, const AttentionArgs<T>& args) {
  const int64_t rows = q.size(0) * q.size(2) * args.padded_queries;
  const auto launch = [&]<int kLanes>() {
    const int64_t blocks = gpu::ceil_div(rows * kLanes, 256);
    check(blocks <= int64_t{0x7FFFFFFF}, "attention: ", describe(q), " needs ", blocks,
          " blocks; expected at most 2^31 - 1 (split the batch)");
    gpu::launch(q.device(), {dim3(unsigned(blocks)), 256}, attention_delta_kernel<T, kLanes>, args);
  };
  const int words = args.dim / gpu::kPackOf<T>;  // 1 ... 32
  if (words <= 4) return launch.template operator()<4>();
  if (words <= 8) return launch.template operator()<8>();
  if (words <= 16) return launch.template operator()<16>();
  launch.template operator()<32>();
}

}  // namespace

void attention_backward_mma_cuda(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& dout,
                                 const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                                 const Tensor& lse, const AttentionProblem& problem) {
  if (q.count() == 0 && k.count() == 0) return;
  if (attention_has_few_queries(q, k, problem))
    return attention_backward_few_cuda(dq, dk, dv, dout, q, k, v, o, lse, problem);
  const Device device = q.device();
  dispatch_floating_cuda(q.dtype(), "attention", [&]<class T>() {
    AttentionArgs<T> args = attention_args<T>(lse, q, k, v, problem);
    args.o = const_head_rows<T>(o);
    args.dout = const_head_rows<T>(dout);
    args.padded_queries = args.seqlens.slots(q.size(1), kAttentionPad) * kAttentionPad;
    const int64_t rows = q.size(0) * q.size(2) * args.padded_queries;
    const Tensor statistics = Tensor::empty_packed({2, rows}, DType::f32, device);
    args.lse2 = statistics.data<float>();
    args.delta = args.lse2 + rows;
    if (dq.defined()) args.dq = head_rows<T>(dq);
    if (dk.defined()) {
      args.dk = head_rows<T>(dk);
      args.dv = head_rows<T>(dv);
    }
    Tensor key_sums;
    const bool dbias_wanted = problem.dbias.defined() && q.count() > 0 && k.count() > 0;
    const bool queries_broadcast = dbias_wanted && problem.dbias.size(2) == 1;
    if (queries_broadcast) {
      key_sums = Tensor::zeros({q.size(0), q.size(2), 1, k.size(1)}, DType::f32, device);
      args.key_sums = key_sums.data<float>();
      args.key_sums_row = key_sums.row_stride();
    } else if (dbias_wanted && problem.dbias.count() == q.size(0) * q.size(2) * q.size(1) * k.size(1) &&
               gpu::is_pack_aligned(problem.dbias.data<T>(), problem.dbias.row_stride(), gpu::kPackOf<T>)) {
      args.dbias = problem.dbias.data<T>();
      args.dbias_row = problem.dbias.row_stride();
    }
    launch_delta(q, args);
    if constexpr (std::is_same_v<T, float>) {
      (problem.math == F32Math::tf32 ? attention_backward_tf32_cuda : attention_backward_f32_cuda)(q, k,
                                                                                                   args);
    } else {
      dispatch_kernel(args, [&]<int kD, bool kDrops, bool kBias>() {
        using Tile = BackwardTile<kD, kDrops || kBias>;
        if (args.dk.data || args.key_sums)
          launch_attention(k, args, kOwned, kThreads,
                           Tile::kTileBytes + Tile::kStatisticsBytes + (kBias ? Tile::kKeyBiasBytes : 0),
                           attention_backward_keys_kernel<T, kD, kDrops, kBias>);
        if (args.dq.data || args.dbias)
          launch_attention(q, args, kOwned, kThreads, Tile::kTileBytes + (kBias ? Tile::kQueryBiasBytes : 0),
                           attention_backward_queries_kernel<T, kD, kDrops, kBias>);
      });
    }
    if (queries_broadcast) return write_dbias(problem, key_sums);
    if (!dbias_wanted || args.dbias) return;
    if constexpr (std::is_same_v<T, float>)
      (problem.math == F32Math::tf32 ? attention_backward_bias_tf32_cuda : attention_backward_bias_f32_cuda)(
          q, k, args, problem);
    else
      attention_backward_bias_cuda(q, k, args, problem);
  });
}

}  // namespace tessera::ops

#include "ops/attention/attention_scores.cuh"
#include "ops/attention/attention_tile.cuh"
#include "ops/attention/attention_variants.h"
#include "ops/decode_attention/decode_attention_kernels.h"

/// Forward on tensor cores: FlashAttention-2 (Dao, arXiv:2307.08691, algorithm 1) with mma.sync.
///
/// A block owns 128 queries of one head, each of its 4 warps 32 of them: every fragment of K and V that a
/// warp reads serves two m16 MMAs, which keeps shared memory (128 bytes per clock) off the critical path;
/// with 16 rows per warp it would be the bound. The block walks the keys in tiles of 64, double-buffered in
/// shared memory: while one is processed, cp.async loads the next, so there is one barrier per tile. S stays
/// in registers, the softmax is online and in base 2, and the probabilities, rounded to the dtype, are the
/// left operand of P V directly from the accumulators. Q stays in registers up to D = 64 and is read again
/// from shared memory above, where O needs the registers.
///
/// FLOPs: 4 Lq Lk D per head. Bytes: Q and O once, K and V once per query tile, from L2. Bound by the tensor
/// cores at mma.sync's rate, next by the instructions of the softmax (about 5 per score; at D = 64 a score is
/// 256 FLOPs). Masking costs only in tiles that a mask's edge or the end of the keys crosses.

namespace tessera::ops {
namespace {

/// kNarrow: dropout and a bias together need registers that 32 rows per warp leave no room for.
template <int kD, bool kNarrow>
struct ForwardTile {
  static constexpr int kWarps = 4, kThreads = kWarps * 32;
  static constexpr int kM = kNarrow ? 1 : 2;  // m16 MMAs per warp and step
  static constexpr int kRows = kWarps * kM * 16, kKeys = kD > 64 && !kNarrow ? 32 : 64;
  static constexpr bool kQInRegisters = kD <= 64;
  static constexpr size_t kSharedBytes = size_t(kRows + 2 * 2 * kKeys) * kD * 2;
  static constexpr size_t kBiasBytes = size_t(kRows) * kBiasPitch<kKeys> * 2;
};

template <class T, int kD, bool kDrops, bool kBias>
__global__ void __launch_bounds__(ForwardTile<kD, kDrops && kBias>::kThreads, 2)
    attention_forward_kernel(AttentionArgs<T> args) {
  using Tile = ForwardTile<kD, kDrops && kBias>;
  constexpr int kM = Tile::kM, kKeys = Tile::kKeys, kThreads = Tile::kThreads;
  extern __shared__ __align__(1024) uint4 shared[];
  T* const q_tile = reinterpret_cast<T*>(shared);  // [kRows, kD]
  T* const k_tiles = q_tile + Tile::kRows * kD;    // 2 x [kKeys, kD]
  T* const v_tiles = k_tiles + 2 * kKeys * kD;     // 2 x [kKeys, kD]
  __shared__ AttentionCoord coord;
  if (!find_coord<true>(args, Tile::kRows, coord)) return;
  const int first = coord.sequence.tile * Tile::kRows,
            rows = min(coord.sequence.queries - first, Tile::kRows);
  const int lane = int(threadIdx.x) % 32, warp_row = int(threadIdx.x) / 32 * kM * 16;

  RowOperand<kD, kM, Tile::kQInRegisters> q(q_tile, warp_row);
  const auto load_keys = [&](int tile) {
    const int key = tile * kKeys, stage = tile % 2 * kKeys * kD;
    load_tile<kD, kKeys, kThreads>(k_tiles + stage, coord.k_row(args.k, coord.kv_head, key), args.k.row,
                                   coord.sequence.keys - key, args.dim);
    load_tile<kD, kKeys, kThreads>(v_tiles + stage, coord.k_row(args.v, coord.kv_head, key), args.v.row,
                                   coord.sequence.keys - key, args.dim);
  };
  // The bias of a warp's scores [kM * 16, kKeys]: only the warp reads what it copied.
  [[maybe_unused]] T* const bias_tile = v_tiles + 2 * kKeys * kD + warp_row * kBiasPitch<kKeys>;
  [[maybe_unused]] const auto load_own_bias = [&](int tile) {
    load_bias<kM * 16, kKeys, 32>(bias_tile, args, coord, coord.head, first + warp_row, tile * kKeys,
                                  gpu::reread_lane());
  };
  // Every query of the block sees the first `unmasked` keys; none sees key `end` or a later one.
  const int unmasked = coord.key_limit(args.causal, first),
            end = coord.key_limit(args.causal, first + rows - 1);
  const int key_tiles = int(gpu::ceil_div(end, kKeys));
  if (key_tiles > 0) {
    load_tile<kD, Tile::kRows, kThreads>(q_tile, coord.q_row(args.q, coord.head, first), args.q.row, rows,
                                         args.dim);
    load_keys(0);
    if constexpr (kBias) load_own_bias(0);
    gpu::cp_async_commit();
    gpu::cp_async_wait<0>();
    __syncthreads();
    q.load_fragments();
  }

  float o[kM][kD / 8][4] = {};
  OnlineSoftmax<kM> softmax;

  [[maybe_unused]] uint32_t stream = 0;
  if constexpr (kDrops) stream = args.drop.stream();
  for (int tile = 0; tile < key_tiles; ++tile) {
    gpu::cp_async_wait<0>();
    __syncthreads();  // the tile has landed, and no warp still reads the other stage
    if (tile + 1 < key_tiles) {
      load_keys(tile + 1);
      gpu::cp_async_commit();
    }
    const int stage = tile % 2 * kKeys * kD;

    float s[kM][kKeys / 8][4] = {};
    gemm_abt<T>(s, q, k_tiles + stage, 0);
    if constexpr (kBias) {
      add_bias<kKeys>(s, args, bias_tile, 0);
      __syncwarp();  // no lane still reads the tile
      if (tile + 1 < key_tiles) load_own_bias(tile + 1);
      gpu::cp_async_commit();
    }
    if ((tile + 1) * kKeys > unmasked) mask_scores(s, coord, args.causal, first + warp_row, tile * kKeys);

    softmax.template add_tile<kBias>(s, o, args);
    uint32_t p[kM][kKeys / 16][4];
    to_operand<T>(p, s);
    if constexpr (kDrops) {
      // Dropout bits of four blocks of 16 x 16 at a time, one word per lane.
      constexpr int kBlocks = kKeys / 16;
#pragma unroll
      for (int four = 0; four < kM * kBlocks; four += 4) {
        const int own = four + lane / 8;
        const uint32_t word = args.drop.word(stream, coord.drop_row(args, coord.head),
                                             uint32_t((first + warp_row) / 16 + own / kBlocks),
                                             uint32_t((tile * kBlocks + own % kBlocks) * 8 + lane % 8));
#pragma unroll
        for (int block = 0; block < 4; ++block)
          RowBits(word, block * 8, gpu::reread_lane())
              .keep_doubled<T>(p[(four + block) / kBlocks][(four + block) % kBlocks]);
      }
    }
    gemm_ab<T, kD>(o, p, v_tiles + stage, 0);
  }

  float inverse[kM][2];
  softmax.template finish<kBias>(inverse, kDrops ? args.drop.scale / 2 : 1.0f, args, coord, first, warp_row,
                                 rows);
  store_rows<kD>(o, inverse, q_tile, warp_row, coord.q_row(args.out, coord.head, first), args.out.row, rows,
                 args.dim);
}

}  // namespace

void attention_forward_mma_cuda(const Tensor& o, const Tensor& lse, const Tensor& q, const Tensor& k,
                                const Tensor& v, const AttentionProblem& problem) {
  if (o.count() == 0) return;
  if (attention_is_many_short(q, k, problem)) return attention_forward_many_cuda(o, lse, q, k, v, problem);
  if (attention_is_decoding(q, k, problem))
    return decode_attention_mma_cuda({.o = o,
                                      .q = q,
                                      .keys = k,
                                      .values = v,
                                      .lengths = {},
                                      .scale = problem.scale,
                                      .causal = problem.causal,
                                      .lse = lse});
  dispatch_floating_cuda(q.dtype(), "attention", [&]<class T>() {
    AttentionArgs<T> args = attention_args<T>(lse, q, k, v, problem);
    args.out = head_rows<T>(o);
    if constexpr (std::is_same_v<T, float>) {
      (problem.math == F32Math::tf32 ? attention_forward_tf32_cuda : attention_forward_f32_cuda)(q, args);
    } else {
      dispatch_kernel(args, [&]<int kD, bool kDrops, bool kBias>() {
        using Tile = ForwardTile<kD, kDrops && kBias>;
        launch_attention(q, args, Tile::kRows, Tile::kThreads,
                         Tile::kSharedBytes + (kBias ? Tile::kBiasBytes : 0),
                         attention_forward_kernel<T, kD, kDrops, kBias>);
      });
    }
  });
}

}  // namespace tessera::ops

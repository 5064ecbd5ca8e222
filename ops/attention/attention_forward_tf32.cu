#include "ops/attention/attention_scores.cuh"
#include "ops/attention/attention_tile_tf32.cuh"

/// Forward of f32 operands on tensor cores in TF32: FlashAttention-2 (Dao, arXiv:2307.08691, algorithm 1)
/// with mma.sync.m16n8k8.
///
/// A warp owns 32 queries of one head, so that every fragment of K and V that it reads serves two m16 MMAs. A
/// block of 4 warps (8 above D = 64, where shared memory holds one block per SM) walks the keys in tiles of
/// 32, double buffered by cp.async: one barrier per tile. S and P stay in registers, as accumulators whose
/// layout is that of a left operand with k in another order (attention_tile_tf32.cuh). Q, K and V are
/// rounded to TF32 in shared memory, P in registers; the softmax is online, in base 2, in f32.
///
/// FLOPs: 4 Lq Lk D per head. Bound by mma.sync in TF32, half the rate of 16 bits; next by shared memory,
/// whose 128 bytes per clock are one fragment per two MMAs.

namespace tessera::ops {
namespace {

template <int kD>
struct ForwardTile {
  static constexpr int kWarps = kD > 64 ? 8 : 4, kThreads = kWarps * 32;
  static constexpr int kM = 2;  // m16 MMAs per warp and step
  static constexpr int kRows = kWarps * kM * 16, kKeys = 32;
  static constexpr bool kQInRegisters = kD <= 64;
  static constexpr int kBlocks = kD > 64 ? 1 : 2;  // per SM
  static constexpr size_t kSharedBytes = size_t(kRows + 2 * 2 * kKeys) * tf32::kPitch<kD> * sizeof(float);
};

template <int kD, bool kDrops, bool kBias>
__global__ void __launch_bounds__(ForwardTile<kD>::kThreads, ForwardTile<kD>::kBlocks)
    attention_forward_tf32_kernel(AttentionArgs<float> args) {
  using Tile = ForwardTile<kD>;
  constexpr int kM = Tile::kM, kKeys = Tile::kKeys, kThreads = Tile::kThreads;
  constexpr int kTileFloats = kKeys * tf32::kPitch<kD>;
  extern __shared__ float4 shared[];
  float* const q_tile = reinterpret_cast<float*>(shared);          // [kRows, kD]
  float* const k_tiles = q_tile + Tile::kRows * tf32::kPitch<kD>;  // 2 x [kKeys, kD]
  float* const v_tiles = k_tiles + 2 * kTileFloats;                // 2 x [kKeys, kD]
  __shared__ AttentionCoord coord;
  if (!find_coord<true>(args, Tile::kRows, coord)) return;
  const int first = coord.sequence.tile * Tile::kRows,
            rows = min(coord.sequence.queries - first, Tile::kRows);
  const int lane = int(threadIdx.x) % 32, warp_row = int(threadIdx.x) / 32 * kM * 16;

  tf32::RowOperand<kD, kM, Tile::kQInRegisters> q(q_tile, warp_row);
  const auto load_keys = [&](int tile) {
    const int key = tile * kKeys, stage = tile % 2 * kTileFloats;
    tf32::load_tile<kD, kKeys, kThreads>(k_tiles + stage, coord.k_row(args.k, coord.kv_head, key), args.k.row,
                                         coord.sequence.keys - key, args.dim);
    tf32::load_tile<kD, kKeys, kThreads>(v_tiles + stage, coord.k_row(args.v, coord.kv_head, key), args.v.row,
                                         coord.sequence.keys - key, args.dim);
    gpu::cp_async_commit();
  };
  // Every query of the block sees the first `unmasked` keys; none sees key `end` or a later one.
  const int unmasked = coord.key_limit(args.causal, first),
            end = coord.key_limit(args.causal, first + rows - 1);
  const int key_tiles = int(gpu::ceil_div(end, kKeys));
  if (key_tiles > 0) {
    tf32::load_tile<kD, Tile::kRows, kThreads>(q_tile, coord.q_row(args.q, coord.head, first), args.q.row,
                                               rows, args.dim);
    load_keys(0);
    gpu::cp_async_wait<0>();
    tf32::round_tile<kD, Tile::kRows, kThreads>(q_tile);
    __syncthreads();
    q.load_fragments();
  }

  float o[kM][kD / 8][4] = {};
  OnlineSoftmax<kM> softmax;

  [[maybe_unused]] uint32_t stream = 0;
  if constexpr (kDrops) stream = args.drop.stream();
  for (int tile = 0; tile < key_tiles; ++tile) {
    const int stage = tile % 2 * kTileFloats;
    gpu::cp_async_wait<0>();
    tf32::round_tile<kD, kKeys, kThreads>(k_tiles + stage);
    tf32::round_tile<kD, kKeys, kThreads>(v_tiles + stage);
    __syncthreads();  // the tile has landed, and no warp still reads the other stage
    if (tile + 1 < key_tiles) load_keys(tile + 1);

    // S = Q K^T
    float s[kM][kKeys / 8][4] = {};
    tf32::gemm_abt<kD>(s, q, k_tiles + stage, 0);
    if constexpr (kBias) add_bias(s, args, coord, coord.head, first + warp_row, tile * kKeys);
    if ((tile + 1) * kKeys > unmasked) mask_scores(s, coord, args.causal, first + warp_row, tile * kKeys);

    softmax.template add_tile<kBias>(s, o, args);
    if constexpr (kDrops) {
      // Four blocks of 16 x 16, a word for each lane.
      constexpr int kAcross = kKeys / 16;
      static_assert(kM * kAcross == 4);
      const int own = lane / 8;
      const uint32_t word = args.drop.word(stream, coord.drop_row(args, coord.head),
                                           uint32_t((first + warp_row) / 16 + own / kAcross),
                                           uint32_t((tile * kAcross + own % kAcross) * 8 + lane % 8));
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        const RowBits bits(word, block * 8, gpu::reread_lane());
#pragma unroll
        for (int eight = 0; eight < 2; ++eight)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float& p = s[block / kAcross][block % kAcross * 2 + eight][e];
            p = bits.drop(p, eight, e);
          }
      }
    }
    // O += P V
    tf32::gemm_ab<kD>(o, s, v_tiles + stage, 0);
  }

  // Epilogue: store O and LSE
  float inverse[kM][2];
  softmax.template finish<kBias>(inverse, kDrops ? args.drop.scale : 1.0f, args, coord, first, warp_row,
                                 rows);
  tf32::store_columns<kD>(o, inverse, warp_row, coord.q_row(args.out, coord.head, first), args.out.row, rows,
                          args.dim);
}

}  // namespace

void attention_forward_tf32_cuda(const Tensor& q, const AttentionArgs<float>& args) {
  dispatch_kernel(args, [&]<int kD, bool kDrops, bool kBias>() {
    using Tile = ForwardTile<kD>;
    launch_attention(q, args, Tile::kRows, Tile::kThreads, Tile::kSharedBytes,
                     attention_forward_tf32_kernel<kD, kDrops, kBias>);
  });
}

}  // namespace tessera::ops

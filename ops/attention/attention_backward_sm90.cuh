#pragma once

#include "gpu/approx.cuh"
#include "gpu/barrier.cuh"
#include "gpu/global.cuh"
#include "gpu/launch.cuh"
#include "gpu/mma.cuh"
#include "gpu/reread.cuh"
#include "gpu/tma.cuh"
#include "gpu/wgmma.cuh"
#include "ops/attention/attention_dropout.cuh"
#include "ops/attention/attention_sequences.cuh"
#include "ops/attention/attention_sm90.cuh"

/// The main kernel of attention backward for sm_90a: dK, dV, and dQ summed in f32
/// (docs/ops/attention_backward_sm90.md). Where dQ has a warpgroup of its own (head_dim up to 64), the block
/// of the last key tile that a query tile sees loads the sum instead of adding to it, and stores the final
/// dQ.

namespace tessera::ops::sm90 {

inline constexpr int kQueryTile = 64;                  // queries per step of a block
inline constexpr int kKeyTile = 128;                   // keys a block owns
inline constexpr int kDqTileFloats = 64 * kQueryTile;  // floats of dQ per reduce-add: 64 queries, 64 columns

/// Index of query i's statistics within its tile: the order in which the threads that hold an accumulator
/// read them, four at a time (thread c of a quad needs columns 8 j + 2 c and the next).
TESSERA_HD constexpr int statistics_place(int i) {
  return i / 16 * 16 + i % 8 / 2 * 4 + i / 8 % 2 * 2 + i % 2;
}

template <class T>
struct BackwardArgs {
  CuSeqlens seqlens;
  HeadRows<T> dk, dv;
  const float* statistics;     // [head rows, query slots, 2, kQueryTile]: -lse log2(e), -inf where P is 0;
                               // delta, times dropout's 1 - p
  float* dq_sum;               // [sums, head rows, query slots, kHead / 64, kDqTileFloats]
  int* dq_semaphores;          // [sums, head rows, query slots, kHead / 64]: key tiles that have added
  int* ticket;                 // blocks that have started
  int heads, kv_heads, group;  // group: query heads that read one key head
  int kv_rows, rounds;         // B * kv_heads, in that many groups; kv_rows * rounds < 2^31
  int chunks;                  // number of chunks into which the query tiles of a key tile are split
  float* partial;              // per chunk: [kv_rows, key slots, chunks, {dK, dV}, accumulators]
  int sums;                    // of dQ: key tile n adds to sum n % sums, after key tile n - sums
  int64_t units;               // per sum
  int key_slots, query_slots;  // tiles (packed sequences: tile slots) per head
  int queries, keys, dim;      // if lengths are fixed
  bool causal, wants_queries, wants_keys;
  bool stores_final_dq;  // the last key tile that a query tile sees stores the final dQ; head_dim up to 64
                         // only
  float scale2, scale;   // `scale`: the factor of dK and dQ
  AttentionDropout drop;
};

/// The first query tile that sees a key of that key tile.
TESSERA_HD int first_query_tile(bool causal, int queries, int keys, int key_tile) {
  const int query = key_tile * kKeyTile + queries - keys;
  return causal && query > 0 ? query / kQueryTile : 0;
}

/// Whether no key tile after this one is seen by the query tile.
TESSERA_HD bool is_last_key_tile(bool causal, int queries, int keys, int key_tile, int query_tile) {
  return (key_tile + 1) * kKeyTile >= keys ||
         first_query_tile(causal, queries, keys, key_tile + 1) > query_tile;
}

/// Work tile of a block: a key tile of a head, and the query tiles that it walks over, from the last one
/// down, each for all query heads that read the K/V head. So blocks with shorter walks (causal) keep step
/// with those that precede them in the order of dQ.
struct BackwardItem {
  int b, kv_head, key_tile, chunk;
  int first, count;                     // query tiles
  int q_first, queries, k_first, keys;  // of its sequence
  int slot, key_slot;                   // of the sequence's first query tile, of the key tile
  uint32_t stream;                      // dropout's random stream
  bool exists;

  __device__ int query_tile(int step) const { return first + count - 1 - step; }
  /// Index of a query tile of query head `member` of the group, in statistics and sums.
  template <class T>
  __device__ int64_t place(const BackwardArgs<T>& args, int member, int tile) const {
    return (int64_t(b) * args.heads + kv_head * args.group + member) * args.query_slots + slot + tile;
  }
};

/// Shared memory layout, offsets in bytes. Tiles are TMA boxes of 64 columns in 128-byte rows.
template <int kHead_, int kStages_, int kSums_, int kMainRegisters_, int kSumRegisters_, bool kDrops_ = false>
struct BackwardConfig {
  static constexpr bool kDrops = kDrops_;
  static constexpr int kHead = kHead_;      // 64 or 128
  static constexpr int kStages = kStages_;  // query tiles in shared memory
  static constexpr int kDqStages = kSums_;  // stages of dQ tiles to be added, one warp each
  static constexpr int kMainRegisters = kMainRegisters_, kDqRegisters = kSumRegisters_;
  static constexpr bool kKvInRegisters = kHead == 64;  // K and V as operands in registers
  static constexpr bool kDqWarpgroup = kHead == 64;    // dQ by a separate warpgroup
  // Exponentials overlap dP^T, dV overlaps dS: 16 registers more, which dQ's warpgroup frees by reading K^T
  // from shared memory. At D = 128 it gains nothing, and with dropout no registers are left.
  static constexpr bool kOverlapExp = kDqWarpgroup && !kDrops;
  static constexpr int kThreads = kDqWarpgroup ? 512 : 384;
  static constexpr int kBoxes = kHead / 64;
  static constexpr int kDsStages = 2;  // dS tiles
  static constexpr int kKeyBox = kKeyTile * 128, kQueryBox = kQueryTile * 128;
  static constexpr int kK = 0, kV = kK + kBoxes * kKeyBox, kQ = kV + kBoxes * kKeyBox,
                       kDout = kQ + kStages * kBoxes * kQueryBox, kDs = kDout + kStages * kBoxes * kQueryBox,
                       kDq = kDs + kDsStages * kKeyBox, kStatistics = kDq + kDqStages * kDqTileFloats * 4,
                       kBarriers = kStatistics + kStages * 2 * kQueryTile * 4;
  struct Barriers {
    gpu::Barrier keys;
    gpu::Ring<kStages> queries;
    gpu::Ring<kDsStages> ds;
    gpu::Ring<kDqStages> dq;
    gpu::Barrier sum[kDqStages];  // partial dQ of the preceding key tiles has been loaded
    BackwardItem item;
  };
  static constexpr size_t kSharedBytes = kBarriers + sizeof(Barriers);
  static_assert(kDqStages <= 3 && kDqStages % kBoxes == 0 && kBoxes <= kDsStages &&
                kSharedBytes <= 227 * 1024);
};

namespace detail {

using gpu::TileOrder;

/// One warp: decodes the block's work tile from its linear index. From the slowest to the fastest index:
///   chunk of the walk, last query tiles first: the preceding key tile, whose walk is at least as long, has
///     each query tile in this chunk or in an earlier one, so its block has started; and concurrent blocks
///     share Q and sums of dQ;
///   group of heads ("round"), all as equal as possible;
///   key tile, in the order of the sequences;
///   head within the group. So a block's neighbours work on other heads, and the next key tile of a head
///     starts later, when the sums of the one before it are in flight.
/// `index` is read from lane 0.
template <class T>
__device__ __forceinline__ BackwardItem backward_item(const BackwardArgs<T>& args, int index) {
  // Independent work while the atomic on the ticket is in flight.
  SequenceOrder order{};
  if (args.seqlens.packed()) order = args.seqlens.template order<false>(kKeyTile);
  index = __shfl_sync(0xFFFFFFFFu, index, 0);
  BackwardItem item;
  // Chunk of the walk.
  item.chunk = 0;
  if (args.chunks > 1) {
    item.chunk = index / (args.kv_rows * args.key_slots);
    index -= item.chunk * args.kv_rows * args.key_slots;
  }
  // Group of heads ("round"): K/V heads begin ... begin + size - 1.
  const int row = index / args.key_slots;
  const int round = ((row + 1) * args.rounds - 1) / args.kv_rows;
  const int begin = round * args.kv_rows / args.rounds,
            size = (round + 1) * args.kv_rows / args.rounds - begin;
  // Key tile (`slot`), and K/V head within the group.
  const int rest = index - begin * args.key_slots;
  const int kv_row = begin + rest % size, slot = rest / size;
  AttentionSequence sequence{0, 0, args.queries, 0, args.keys, slot, true};
  if (args.seqlens.packed()) sequence = args.seqlens.template find_in<false>(order, slot, kKeyTile);
  // Batch index and K/V head.
  item.b = kv_row / args.kv_heads;
  item.kv_head = kv_row % args.kv_heads;
  item.key_tile = sequence.tile;
  item.q_first = sequence.q_first;
  item.queries = sequence.queries;
  item.k_first = sequence.k_first;
  item.keys = sequence.keys;
  item.slot = sequence.q_first / kQueryTile + sequence.index;
  item.key_slot = args.seqlens.packed() ? item.k_first / kKeyTile + sequence.index + item.key_tile : slot;
  item.first = first_query_tile(args.causal, item.queries, item.keys, item.key_tile);
  item.count = max(0, int(gpu::ceil_div(item.queries, kQueryTile)) - item.first);
  if (args.chunks > 1) {
    const int after = item.count * item.chunk / args.chunks;  // query tiles in the preceding chunks
    const int count = item.count * (item.chunk + 1) / args.chunks - after;
    item.first += item.count - after - count;
    item.count = count;
  }
  item.exists = sequence.has_tile;
  return item;
}

/// Rounds 16 rows per warp of an accumulator, 64 x (8 kCount / 4), to the dtype and stores them into a box,
/// from row `row` on.
template <class T, int kCount>
__device__ __forceinline__ void store_accumulator(const float (&d)[kCount], float factor, uint32_t box,
                                                  int row) {
  const int lane = int(threadIdx.x) % 32;
#pragma unroll
  for (int k = 0; k < kCount / 8; ++k) {
    const uint32_t packed[4] = {gpu::pack_halves<T>(d[8 * k + 0] * factor, d[8 * k + 1] * factor),
                                gpu::pack_halves<T>(d[8 * k + 2] * factor, d[8 * k + 3] * factor),
                                gpu::pack_halves<T>(d[8 * k + 4] * factor, d[8 * k + 5] * factor),
                                gpu::pack_halves<T>(d[8 * k + 6] * factor, d[8 * k + 7] * factor)};
    gpu::stmatrix_x4(box + gpu::swizzled_offset(row + lane % 16, 2 * k + lane / 16), packed);
  }
}

/// Stores a 64 x 64 tile of dQ^T to shared memory, in accumulator order, for the warp that adds it (`stage`).
template <class Config>
__device__ __forceinline__ void stage_dq(char* shared, typename Config::Barriers& barriers, int lane,
                                         const float (&sum)[kQueryTile / 2], int stage) {
  float4* const to = reinterpret_cast<float4*>(shared + Config::kDq) + stage * kDqTileFloats / 4 +
                     gpu::reread_thread() % 128;
#pragma unroll
  for (int j = 0; j < kQueryTile / 8; ++j)
    to[j * 128] = make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]);
  gpu::fence_async_shared();
  __syncwarp();
  if (lane == 0) barriers.dq.full[stage].arrive();
}

/// Producer thread: issues the loads of K and V of the key tile once, then of Q, dO and the statistics of
/// each query tile.
template <class T, class Config>
__device__ __forceinline__ void load_tiles(const gpu::TensorMap& map_q, const gpu::TensorMap& map_k,
                                           const gpu::TensorMap& map_v, const gpu::TensorMap& map_dout,
                                           const BackwardArgs<T>& args, char* shared) {
  using namespace gpu;
  constexpr int kBoxes = Config::kBoxes, kStages = Config::kStages, kKeyBox = Config::kKeyBox,
                kQueryBox = Config::kQueryBox;
  auto& barriers = *reinterpret_cast<typename Config::Barriers*>(shared + Config::kBarriers);
  const BackwardItem& item = barriers.item;
  const int key = item.k_first + item.key_tile * kKeyTile, b = item.b;
  barriers.keys.arrive_expect(2 * kBoxes * kKeyBox);
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    tma_load(shared + Config::kK + box * kKeyBox, map_k, barriers.keys, box * 64, key, item.kv_head, b);
    tma_load(shared + Config::kV + box * kKeyBox, map_v, barriers.keys, box * 64, key, item.kv_head, b);
  }
  RingState<kStages> state;
  for (int step = 0; step < item.count; ++step) {
    const int tile = item.query_tile(step), query = item.q_first + tile * kQueryTile;
    for (int member = 0; member < args.group; ++member) {
      const int h = item.kv_head * args.group + member;
      Barrier& full = barriers.queries.full[state.stage];
      barriers.queries.empty[state.stage].wait(state.parity ^ 1);
      full.arrive_expect(2 * kBoxes * kQueryBox + 2 * kQueryTile * 4);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        const int at = (state.stage * kBoxes + box) * kQueryBox;
        tma_load(shared + Config::kQ + at, map_q, full, box * 64, query, h, b);
        tma_load(shared + Config::kDout + at, map_dout, full, box * 64, query, h, b);
      }
      bulk_load(shared + Config::kStatistics + state.stage * 2 * kQueryTile * 4,
                args.statistics + item.place(args, member, tile) * 2 * kQueryTile, 2 * kQueryTile * 4, full);
      state.advance();
    }
  }
}

/// One thread of a warp per stage of dQ: adds tiles of dQ^T to the f32 sum in the order of key tiles. Per
/// tile: waits until the semaphore says that all preceding key tiles of this sum have added (semaphore_value
/// of them); waits until the consumers have stored the tile (dq.full); the first key tile stores, later ones
/// reduce-add; releases the buffer when it has been read, and the semaphore when the addition is complete.
/// Where this key tile is the last that the query tile sees, it loads the sum instead, and stores the final
/// dQ that dQ's warpgroup rounds.
///
/// Spinning is safe: the block of the preceding key tile has a smaller ticket (backward_item), so it has
/// started, and it does not wait for this one. Semaphores only rise: should a replayed graph read cu_seqlens
/// that fall, sequences share semaphores and their sums are wrong, but no block waits for ever.
template <class T, class Config>
__device__ __forceinline__ void reduce_dq(const gpu::TensorMap& map_dq, const BackwardArgs<T>& args,
                                          char* shared, int unit) {
  using namespace gpu;
  constexpr int kBoxes = Config::kBoxes;
  auto& barriers = *reinterpret_cast<typename Config::Barriers*>(shared + Config::kBarriers);
  const BackwardItem& item = barriers.item;
  float* const from = reinterpret_cast<float*>(shared + Config::kDq) + unit * kDqTileFloats;
  uint32_t parity = 0;
  int semaphore_value = item.key_tile;
  int64_t first = unit % kBoxes;
  if (args.sums > 1) {
    semaphore_value /= args.sums;
    first += item.key_tile % args.sums * args.units;
  }
  int member = unit / kBoxes, step = 0;  // a tile is added for each query head of the group in turn
  for (int left = args.group * item.count - member; left > 0; left -= Config::kDqStages / kBoxes) {
    for (; member >= args.group; member -= args.group) ++step;
    const int tile = item.query_tile(step), h = item.kv_head * args.group + member;
    const int64_t at = first + item.place(args, member, tile) * kBoxes;
    member += Config::kDqStages / kBoxes;
    while (semaphore_value > 0 && gpu::load_acquire(args.dq_semaphores + at) < semaphore_value) {
    }
    if (Config::kDqWarpgroup && args.stores_final_dq &&
        is_last_key_tile(args.causal, item.queries, item.keys, item.key_tile, tile)) {
      // TMA-load the partial dQ; dQ's warpgroup adds its share and rounds; TMA-store the final dQ.
      if (semaphore_value > 0) {
        gpu::fence_async_global();
        barriers.sum[unit].arrive_expect(kDqTileFloats * 4);
        bulk_load(from, args.dq_sum + at * kDqTileFloats, kDqTileFloats * 4, barriers.sum[unit]);
      }
      barriers.dq.full[unit].wait(parity);
      parity ^= 1;
      tma_store(map_dq, from, 0, tile * kQueryTile, h, item.b);
      commit_stores();
      wait_stores_read<0>();
      barriers.dq.empty[unit].arrive();
      continue;
    }
    barriers.dq.full[unit].wait(parity);
    gpu::fence_async_global();
    parity ^= 1;
    if (semaphore_value == 0)
      bulk_store(args.dq_sum + at * kDqTileFloats, from, kDqTileFloats * 4);
    else
      bulk_reduce_add(args.dq_sum + at * kDqTileFloats, from, kDqTileFloats * 4);
    commit_stores();
    wait_stores_read<0>();
    barriers.dq.empty[unit].arrive();
    wait_stores<0>();
    gpu::red_max_release(args.dq_semaphores + at, semaphore_value + 1);
  }
  wait_stores<0>();
}

/// dQ's warpgroup, for head_dim up to 64: dQ^T = K^T dS^T of each query tile. Barriers, in order: waits for
/// dS (ds.full) and issues the MMAs; waits for a free buffer of dQ (dq.empty) while they run; releases dS
/// (ds.empty) when they are complete. Then one of two branches, each of which publishes the buffer (dq.full):
///   final dQ: waits until reduce_dq has loaded the sum of the preceding key tiles (`sum`), adds it, and
///     stores the rounded dQ;
///   partial dQ: stores the f32 tile, which reduce_dq adds.
template <class T, class Config>
__device__ __forceinline__ void mma_dq(const BackwardArgs<T>& args, char* shared, int warp, int lane) {
  using namespace gpu;
  constexpr TileOrder kMnMajor = TileOrder::mn_major;
  constexpr int kKeyBox = Config::kKeyBox;
  auto& barriers = *reinterpret_cast<typename Config::Barriers*>(shared + Config::kBarriers);
  const BackwardItem& item = barriers.item;
  RingState<Config::kDsStages> ds;
  RingState<Config::kDqStages> dq;
  const float last = item.keys == 1 ? 0.0f : args.scale;
  uint32_t sum_parity[Config::kDqStages] = {};
  int member = 0, tile = uniform(item.query_tile(0));
  barriers.keys.wait(0);
  const uint32_t keys = shared_address(shared + Config::kK);
  [[maybe_unused]] uint32_t k[kKeyTile / 16][4];
  if constexpr (!Config::kOverlapExp)
#pragma unroll
    for (int step = 0; step < kKeyTile / 16; ++step)
      ldmatrix_x4_trans(
          k[step], keys + swizzled_offset(step * 16 + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2));
  for (int left = uniform(item.count) * args.group; left > 0; --left) {
    barriers.ds.full[ds.stage].wait(ds.parity);
    float sum[kQueryTile / 2];
    const uint64_t right =
        tile_descriptor<kMnMajor>(shared_address(shared + Config::kDs) + ds.stage * kKeyBox);
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kKeyTile / 16; ++step)
      if constexpr (Config::kOverlapExp)
        wgmma<T, kMnMajor, kMnMajor>(sum, tile_descriptor<kMnMajor>(keys) + step * kDescriptorStep<kMnMajor>,
                                     right + step * kDescriptorStep<kMnMajor>, step > 0);
      else
        wgmma<T, kMnMajor>(sum, k[step], right + step * kDescriptorStep<kMnMajor>, step > 0);
    warpgroup_commit();
    if (args.wants_queries) barriers.dq.empty[dq.stage].wait(dq.parity ^ 1);
    warpgroup_wait<0>();
    warpgroup_fence_operand(sum);
    if (lane == 0) barriers.ds.empty[ds.stage].arrive();
    ds.advance();
    if (args.wants_queries) {
      if (args.stores_final_dq &&
          is_last_key_tile(args.causal, item.queries, item.keys, item.key_tile, tile)) {
        // Final dQ.
        char* const unit = shared + Config::kDq + dq.stage * kDqTileFloats * 4;
        if (item.key_tile > 0) {
          barriers.sum[dq.stage].wait(sum_parity[dq.stage]);
          sum_parity[dq.stage] ^= 1;
          const float4* const before = reinterpret_cast<const float4*>(unit) + threadIdx.x % 128;
#pragma unroll
          for (int j = 0; j < kQueryTile / 8; ++j) {
            const float4 x = before[j * 128];
            sum[4 * j] += x.x, sum[4 * j + 1] += x.y, sum[4 * j + 2] += x.z, sum[4 * j + 3] += x.w;
          }
          sync_named(3, 128);  // all threads have read the sum, which is overwritten next
        }
        // Store dQ^T transposed: (kQueryTile, 64).
#pragma unroll
        for (int j = 0; j < kQueryTile / 8; j += 2) {
          uint32_t packed[4];
#pragma unroll
          for (int e = 0; e < 4; ++e)
            packed[e] = pack_halves<T>(sum[4 * j + 2 * e] * last, sum[4 * j + 2 * e + 1] * last);
          stmatrix_x4_trans(shared_address(unit) +
                                swizzled_offset(8 * j + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2),
                            packed);
        }
        fence_async_shared();
        __syncwarp();
        if (lane == 0) barriers.dq.full[dq.stage].arrive();
      } else {
        // Partial dQ.
        stage_dq<Config>(shared, barriers, lane, sum, dq.stage);
      }
      dq.advance();
    }
    if (++member == args.group) {
      member = 0;
      --tile;
    }
  }
}

/// Epilogue of a chunk of a walk: stores the accumulators in f32, which another kernel adds up.
template <class T, class Config>
__device__ __forceinline__ void store_chunk(const BackwardArgs<T>& args, const BackwardItem& item,
                                            const float (&dk)[Config::kHead / 2],
                                            const float (&dv)[Config::kHead / 2]) {
  constexpr int kHead = Config::kHead;
  const int thread = gpu::reread_thread();
  const int64_t kv_row = int64_t(item.b) * args.kv_heads + item.kv_head;
  const int64_t place = (kv_row * args.key_slots + item.key_slot) * args.chunks + item.chunk;
  // The two warpgroups are threads 128 ... 383.
  float4* const to = reinterpret_cast<float4*>(args.partial) + place * (kKeyTile * kHead / 2) +
                     (thread / 128 - 1) * (64 * kHead / 4) + thread % 128;
#pragma unroll
  for (int j = 0; j < kHead / 8; ++j) {
    to[j * 128] = make_float4(dk[4 * j], dk[4 * j + 1], dk[4 * j + 2], dk[4 * j + 3]);
    to[kKeyTile * kHead / 4 + j * 128] = make_float4(dv[4 * j], dv[4 * j + 1], dv[4 * j + 2], dv[4 * j + 3]);
  }
}

/// Epilogue of a whole walk: stores dV through the shared memory of V, dK through that of dS, once dQ has
/// read it.
template <class T, class Config>
__device__ __forceinline__ void store_keys(const gpu::TensorMap& map_dk, const gpu::TensorMap& map_dv,
                                           const BackwardArgs<T>& args, char* shared, int half, int warp,
                                           int lane, gpu::RingState<Config::kDsStages> ds,
                                           const float (&dk)[Config::kHead / 2],
                                           float (&dv)[Config::kHead / 2]) {
  using namespace gpu;
  constexpr int kBoxes = Config::kBoxes, kKeyBox = Config::kKeyBox;
  auto& barriers = *reinterpret_cast<typename Config::Barriers*>(shared + Config::kBarriers);
  const BackwardItem& item = barriers.item;
  const int row = half * 64 + warp * 16;
  const int own_key = item.key_tile * kKeyTile + half * 64;
  const int left_keys = item.keys - own_key, k_row = item.k_first + own_key;
  const int b = item.b, h = item.kv_head;
  const float last = item.keys == 1 ? 0.0f : args.scale;
  if constexpr (Config::kDrops)
#pragma unroll
    for (float& element : dv) element *= args.drop.scale;
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    const uint32_t v_box = shared_address(shared + Config::kV) + box * kKeyBox;
    barriers.ds.empty[ds.stage].wait(ds.parity ^ 1);
    const uint32_t k_box = shared_address(shared + Config::kDs) + ds.stage * kKeyBox;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t at = swizzled_offset(row + lane % 16, 2 * j + lane / 16);
      uint32_t packed[4];
#pragma unroll
      for (int e = 0; e < 4; ++e)
        packed[e] = pack_halves<T>(dv[box * 32 + j * 8 + 2 * e], dv[box * 32 + j * 8 + 2 * e + 1]);
      stmatrix_x4(v_box + at, packed);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        packed[e] =
            pack_halves<T>(dk[box * 32 + j * 8 + 2 * e] * last, dk[box * 32 + j * 8 + 2 * e + 1] * last);
      stmatrix_x4(k_box + at, packed);
    }
    fence_async_shared();
    sync_named(1 + half, 128);
    char* const dv_rows = shared + Config::kV + box * kKeyBox + half * 64 * 128;
    char* const dk_rows = shared + Config::kDs + ds.stage * kKeyBox + half * 64 * 128;
    if (left_keys >= 64) {
      if (warp == 0 && elect_one()) {
        tma_store(map_dv, dv_rows, box * 64, k_row, h, b);
        tma_store(map_dk, dk_rows, box * 64, k_row, h, b);
        commit_stores();
      }
    } else {  // the rows that follow may belong to another sequence
      for (int index = warp * 32 + lane; index < left_keys * 8; index += 128) {
        const int row = index / 8, chunk = index % 8;
        if (box * 64 + chunk * 8 >= args.dim) continue;
        const uint32_t at = swizzled_offset(row, chunk);
        *reinterpret_cast<uint4*>(args.dv.at(b, h, k_row + row) + box * 64 + chunk * 8) =
            *reinterpret_cast<const uint4*>(dv_rows + at);
        *reinterpret_cast<uint4*>(args.dk.at(b, h, k_row + row) + box * 64 + chunk * 8) =
            *reinterpret_cast<const uint4*>(dk_rows + at);
      }
    }
    ds.advance();
  }
  wait_stores_read<0>();
}

/// Masks this thread's scores from key row `end` on, past the last key.
__device__ __forceinline__ void hide_keys(float (&s)[kQueryTile / 2], int end) {
#pragma unroll
  for (int i = 0; i < kQueryTile / 2; ++i)
    if (i / 2 % 2 * 8 >= end) s[i] = -INFINITY;
}
/// Causal mask. `hidden`: distance from the last key that this thread's first query sees to its first key.
__device__ __forceinline__ void hide_causal(float (&s)[kQueryTile / 2], int hidden) {
#pragma unroll
  for (int i = 0; i < kQueryTile / 2; ++i)
    if (hidden + i / 2 % 2 * 8 > i / 4 * 8 + i % 2) s[i] = -INFINITY;
}
/// S^T -> P^T = exp(scale S - lse), in place.
__device__ __forceinline__ void make_probabilities(float (&s)[kQueryTile / 2], const float* statistics,
                                                   float scale2, int lane) {
#pragma unroll
  for (int j = 0; j < kQueryTile / 8; j += 2) {
    const float4 lse = *reinterpret_cast<const float4*>(statistics + j * 8 + lane % 4 * 4);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float own = e / 4 == 0 ? (e % 2 ? lse.y : lse.x) : (e % 2 ? lse.w : lse.z);
      s[j * 4 + e] = gpu::exp2_approx(fmaf(s[j * 4 + e], scale2, own));
    }
  }
}
/// dS^T = P^T (dP^T - delta), rounded to 16 bits; P^T too, unless it is rounded already (kOverlapExp).
template <class T, class Config>
__device__ __forceinline__ void make_score_gradients(uint32_t (&p)[kQueryTile / 16][4],
                                                     uint32_t (&dscore)[kQueryTile / 16][4],
                                                     const float (&s)[kQueryTile / 2],
                                                     const float (&dp)[kQueryTile / 2], const float* deltas,
                                                     [[maybe_unused]] uint32_t word, int lane) {
  using gpu::pack_halves;
#pragma unroll
  for (int j = 0; j < kQueryTile / 8; j += 2) {
    const float4 delta = *reinterpret_cast<const float4*>(deltas + j * 8 + lane % 4 * 4);
    [[maybe_unused]] ColumnBits bits;
    if constexpr (Config::kDrops) bits = {word, j * 4, lane};
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      const int i = j * 4 + e;
      const float low = e / 4 == 0 ? delta.x : delta.z, high = e / 4 == 0 ? delta.y : delta.w;
      if constexpr (Config::kDrops) {
        const float first = bits.drop(s[i], e / 4, e % 4), second = bits.drop(s[i + 1], e / 4, e % 4 + 1);
        p[j / 2][e / 2] = pack_halves<T>(first, second);
        dscore[j / 2][e / 2] =
            pack_halves<T>(fmaf(first, dp[i], -s[i] * low), fmaf(second, dp[i + 1], -s[i + 1] * high));
        continue;
      }
      if constexpr (!Config::kOverlapExp) p[j / 2][e / 2] = pack_halves<T>(s[i], s[i + 1]);
      dscore[j / 2][e / 2] = pack_halves<T>(s[i] * (dp[i] - low), s[i + 1] * (dp[i + 1] - high));
    }
  }
}

/// The two dK/dV warpgroups, 64 keys each. Per query tile: S^T, dP^T, P^T, dS^T, dV += P^T dO, dK += dS^T Q
/// (and, without a warpgroup for dQ, half of dQ's columns).
///
/// Order per query tile: S issued; previous dV and dK waited for, and the previous query stage released; dP
/// issued; S waited for, masked, P = exp2; with kOverlapExp dV issued; dP waited for; dS computed, stored to
/// the dS stage and published; dV (without kOverlapExp), dQ (without kDqWarpgroup) and dK issued.
template <class T, class Config>
__device__ __forceinline__ void mma_dk_dv(const gpu::TensorMap& map_dk, const gpu::TensorMap& map_dv,
                                          const BackwardArgs<T>& args, char* shared, int half, int warp,
                                          int lane) {
  using namespace gpu;
  constexpr TileOrder kKMajor = TileOrder::k_major, kMnMajor = TileOrder::mn_major;
  constexpr int kHead = Config::kHead, kBoxes = Config::kBoxes, kStages = Config::kStages;
  constexpr int kKeyBox = Config::kKeyBox, kQueryBox = Config::kQueryBox;
  auto& barriers = *reinterpret_cast<typename Config::Barriers*>(shared + Config::kBarriers);
  const BackwardItem& item = barriers.item;
  const int row = half * 64 + warp * 16;
  const uint32_t own_k = shared_address(shared + Config::kK) + half * 64 * 128;
  const uint32_t own_v = shared_address(shared + Config::kV) + half * 64 * 128;
  RingState<kStages> state;
  RingState<Config::kDsStages> ds;
  [[maybe_unused]] RingState<Config::kDsStages> made;  // stage of dS that dQ reads
  [[maybe_unused]] RingState<Config::kDqStages / kBoxes> dq;
  barriers.keys.wait(0);
  [[maybe_unused]] uint32_t k[Config::kKvInRegisters ? 4 : 1][4], v[Config::kKvInRegisters ? 4 : 1][4];
  if constexpr (Config::kKvInRegisters) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint32_t at = swizzled_offset(warp * 16 + lane % 16, step * 2 + lane / 16);
      ldmatrix_x4(k[step], own_k + at);
      ldmatrix_x4(v[step], own_v + at);
    }
  }
  float dk[kHead / 2], dv[kHead / 2], s[kQueryTile / 2], dp[kQueryTile / 2];
#pragma unroll
  for (int i = 0; i < kHead / 2; ++i) dk[i] = dv[i] = 0;

  // S^T = K Q^T or dP^T = V dO^T: (64, kQueryTile), summed over head_dim.
  const auto gemm_abt = [&](float(&d)[kQueryTile / 2], const auto& held, uint32_t own, uint32_t tile) {
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kHead / 16; ++step) {
      const uint64_t right =
          tile_descriptor<kKMajor>(tile + step / 4 * kQueryBox) + step % 4 * kDescriptorStep<kKMajor>;
      if constexpr (Config::kKvInRegisters)
        wgmma<T, kKMajor>(d, held[step], right, step > 0);
      else
        wgmma<T, kKMajor, kKMajor>(
            d, tile_descriptor<kKMajor>(own + step / 4 * kKeyBox) + step % 4 * kDescriptorStep<kKMajor>,
            right, step > 0);
    }
    warpgroup_commit();
  };
  const auto tile_at = [&](int offset) {
    return shared_address(shared + offset) + state.stage * kBoxes * kQueryBox;
  };

  // Distance from the last key that query 0 sees to this warpgroup's first key.
  const int shift =
      uniform(item.key_tile) * kKeyTile + half * 64 - (uniform(item.keys) - uniform(item.queries));
  const bool partial = item.key_tile * kKeyTile + half * 64 + 63 >= item.keys;
  [[maybe_unused]] float sum[kQueryTile / 2];
  int query = uniform(item.query_tile(0)) * kQueryTile,
      member = 0;                     // member: index of the query head in the group
  [[maybe_unused]] uint32_t word[1];  // dropout's bits of the step
  bool started = false;
#pragma unroll 1
  for (int left = uniform(item.count) * args.group; left > 0; --left) {
    // S issued; previous dV and dK waited for, and their query stage released.
    barriers.queries.full[state.stage].wait(state.parity);
    gemm_abt(s, k, own_k, tile_at(Config::kQ));
    warpgroup_wait<1>();
    if (started && lane == 0)
      barriers.queries.empty[state.stage == 0 ? kStages - 1 : state.stage - 1].arrive();
    // dP issued.
    gemm_abt(dp, v, own_v, tile_at(Config::kDout));
    // The lane, read again where that saves a register.
    const int lane_now = Config::kDrops || Config::kOverlapExp ? reread_lane() : lane;
    if constexpr (Config::kDrops) {
      const uint32_t head_row = drop_head_row(uint32_t(item.b), args.queries, item.q_first, args.heads,
                                              uint32_t(item.kv_head * args.group + member));
      word[0] = args.drop.word(item.stream, head_row, uint32_t(query / 16 + lane_now / 8),
                               uint32_t((item.key_tile * kKeyTile + row) / 2 + lane_now % 8));
      warpgroup_fence_operand(word);
    }
    const float* const statistics =
        reinterpret_cast<const float*>(shared + Config::kStatistics) + state.stage * 2 * kQueryTile;
    // S waited for, masked, P = exp2.
    warpgroup_wait<1>();
    warpgroup_fence_operand(s);
    if (partial)  // mask keys past the last
      hide_keys(s, item.queries - shift - warp * 16 - lane_now / 4);
    if (args.causal && shift + 63 > query)
      hide_causal(s, shift + warp * 16 + lane_now / 4 - query - lane_now % 4 * 2);
    make_probabilities(s, statistics, args.scale2, lane_now);
    uint32_t p[kQueryTile / 16][4], dscore[kQueryTile / 16][4];
    const auto mma_dv = [&] {
      warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < kQueryTile / 16; ++j)
        wgmma<T, kMnMajor>(
            dv, p[j],
            tile_descriptor<kMnMajor>(tile_at(Config::kDout), kQueryBox) + j * kDescriptorStep<kMnMajor>);
    };
    Barrier& empty = barriers.ds.empty[ds.stage];
    if constexpr (Config::kOverlapExp) {
      // dV issued, dP waited for.
      // ptxas would move exponentials after the wait for dP, but not across a branch that depends on all of
      // them. They are never negative, so the branch is not taken; taking it would be harmless.
      uint32_t signs = 0;
#pragma unroll
      for (int i = 0; i < kQueryTile / 2; ++i) {
        signs |= __float_as_uint(s[i]);
        if (i % 2 == 0) p[i / 8][i / 2 % 4] = pack_halves<T>(s[i], s[i + 1]);
      }
      empty.wait(ds.parity ^ 1);
      if (int(signs) < 0) empty.wait(ds.parity ^ 1);
      mma_dv();
      warpgroup_commit();
      warpgroup_wait<1>();
    } else {
      warpgroup_wait<0>();  // dP
    }
    // dS computed, stored to the dS stage and published.
    warpgroup_fence_operand(dp);
    make_score_gradients<T, Config>(p, dscore, s, dp, statistics + kQueryTile, word[0], lane_now);
    if constexpr (!Config::kOverlapExp) empty.wait(ds.parity ^ 1);
#pragma unroll
    for (int j = 0; j < kQueryTile / 16; ++j)
      stmatrix_x4(shared_address(shared + Config::kDs) + ds.stage * kKeyBox +
                      swizzled_offset(row + lane_now % 16, 2 * j + lane_now / 16),
                  dscore[j]);
    fence_async_shared();
    __syncwarp();
    if (lane == 0) barriers.ds.full[ds.stage].arrive();
    ds.advance();
    // dV (unless issued above), dQ and dK issued.
    if constexpr (!Config::kOverlapExp) mma_dv();
    if constexpr (Config::kOverlapExp) warpgroup_arrive();
    if constexpr (!Config::kDqWarpgroup) {
      // dQ^T = K^T dS^T: each of the two warpgroups computes 64 of the head's columns.
      warpgroup_commit();
      barriers.ds.full[made.stage].wait(made.parity);
      const uint64_t left = tile_descriptor<kMnMajor>(shared_address(shared + Config::kK) + half * kKeyBox);
      const uint64_t right =
          tile_descriptor<kMnMajor>(shared_address(shared + Config::kDs) + made.stage * kKeyBox);
      warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < kKeyTile / 16; ++j)
        wgmma<T, kMnMajor, kMnMajor>(sum, left + j * kDescriptorStep<kMnMajor>,
                                     right + j * kDescriptorStep<kMnMajor>, j > 0);
      warpgroup_commit();
      warpgroup_arrive();
    }
#pragma unroll
    for (int j = 0; j < kQueryTile / 16; ++j)
      wgmma<T, kMnMajor>(
          dk, dscore[j],
          tile_descriptor<kMnMajor>(tile_at(Config::kQ), kQueryBox) + j * kDescriptorStep<kMnMajor>);
    warpgroup_commit();
    // dQ waited for and stored for reduce_dq.
    if constexpr (!Config::kDqWarpgroup) {
      warpgroup_wait<1>();
      warpgroup_fence_operand(sum);
      if (lane == 0) barriers.ds.empty[made.stage].arrive();
      made.advance();
      if (args.wants_queries) {
        const int unit = half + dq.stage * kBoxes;
        barriers.dq.empty[unit].wait(dq.parity ^ 1);
        stage_dq<Config>(shared, barriers, lane, sum, unit);
        dq.advance();
      }
    }
    state.advance();
    started = true;
    if (++member == args.group) {
      member = 0;
      query -= kQueryTile;
    }
  }
  warpgroup_wait<0>();
  warpgroup_fence_operand(dk);
  warpgroup_fence_operand(dv);
  if (!args.wants_keys) return;
  if (args.chunks > 1)
    store_chunk<T, Config>(args, item, dk, dv);
  else
    store_keys<T, Config>(map_dk, map_dv, args, shared, half, warp, lane, ds, dk, dv);
}

}  // namespace detail

template <class T, class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) attention_backward_wgmma_kernel(
    const __grid_constant__ gpu::TensorMap map_q, const __grid_constant__ gpu::TensorMap map_k,
    const __grid_constant__ gpu::TensorMap map_v, const __grid_constant__ gpu::TensorMap map_dout,
    const __grid_constant__ gpu::TensorMap map_dk, const __grid_constant__ gpu::TensorMap map_dv,
    const __grid_constant__ gpu::TensorMap map_dq, const __grid_constant__ BackwardArgs<T> args) {
  using namespace gpu;
  extern __shared__ __align__(1024) char shared[];
  auto& barriers = *reinterpret_cast<typename Config::Barriers*>(shared + Config::kBarriers);
  const int warpgroup = uniform(int(threadIdx.x) / 128);
  const int warp = uniform(int(threadIdx.x) / 32) % 4, lane = int(threadIdx.x) % 32;

  launch_dependents();
  if (threadIdx.x < 32) {
    if (lane == 0) {
      prefetch_map(map_q);
      prefetch_map(map_k);
      prefetch_map(map_v);
      prefetch_map(map_dout);
      barriers.keys.init(1);
      barriers.queries.init(1, 8);
      barriers.ds.init(8, Config::kDqWarpgroup ? 4 : 8);
      barriers.dq.init(4, 1);
      for (Barrier& sum : barriers.sum) sum.init(1);
      fence_barrier_init();
    }
    grid_dependency_wait();
    // Atomic ticket: every block that this one waits for has already started.
    int ticket = 0;
    if (lane == 0) ticket = atomicAdd(args.ticket, 1);
    BackwardItem item = detail::backward_item(args, ticket);
    if constexpr (Config::kDrops) item.stream = args.drop.stream();
    if (lane == 0) barriers.item = item;
  } else {
    grid_dependency_wait();
  }
  __syncthreads();
  const BackwardItem& item = barriers.item;
  if (!item.exists) return;

  if (warpgroup == 0) {
    warpgroup_reg_dealloc<24>();
    if (warp == 0) {
      if (elect_one()) detail::load_tiles<T, Config>(map_q, map_k, map_v, map_dout, args, shared);
    } else if (warp <= Config::kDqStages) {
      if (args.wants_queries && elect_one()) detail::reduce_dq<T, Config>(map_dq, args, shared, warp - 1);
    }
  } else if (Config::kDqWarpgroup && warpgroup == 3) {
    warpgroup_reg_dealloc<Config::kDqRegisters>();
    detail::mma_dq<T, Config>(args, shared, warp, lane);
  } else {
    warpgroup_reg_alloc<Config::kMainRegisters>();
    detail::mma_dk_dv<T, Config>(map_dk, map_dv, args, shared, warpgroup - 1, warp, lane);
  }
}

}  // namespace tessera::ops::sm90

#pragma once

#include "gpu/dependent_launch.cuh"
#include "gpu/reread.cuh"
#include "ops/attention/attention_dropout.cuh"
#include "ops/attention/attention_forward_shape.cuh"
#include "ops/attention/attention_sm90.cuh"

/// Forward for any number of keys, sm_90a: online softmax (Dao, FlashAttention-2, arXiv:2307.08691, algorithm
/// 1) on WGMMA, in the manner of FlashAttention-3 (Shah et al., arXiv:2407.08608, section 3).
///
/// A block owns a tile of queries of one head, 64 per consumer warpgroup, and walks over the KV blocks from
/// the last to the first. A producer warp issues TMA loads of Q, K and V into multistage pipelines; it runs
/// as far ahead as these allow, also into the next tile, since the grid is persistent (attention_schedule.h).
/// setmaxnreg moves registers from the producer to the consumers, which hold S, P and O of 64 rows; P is the
/// left operand of P V directly from the accumulators.
///
/// Two overlaps keep the tensor cores and the special-function unit (16 exponentials per clock; at D = 64 it
/// needs exactly as long as the MMAs) busy at the same time. Within a warpgroup, S of the next KV block and P
/// V of the last are issued together, and the softmax of that S runs during P V. Between warpgroups, one runs
/// MMAs while others compute exponentials; an order barrier lets them issue their MMAs one after the other.
///
/// For packed sequences, whose lengths the host does not know, the scheduler warp of each block takes tile
/// slots (attention_sequences.cuh) from an atomic counter, long tiles of a causal sequence first, a few heads
/// at a time so that their keys stay in L2. A tile that ends with its sequence reads the rows after it, masks
/// them, and writes none of them.
///
/// Dropout computes its words before the order barrier of the next S, while other warpgroups run MMAs, and
/// drops in P where it is rounded; sums and statistics are of all probabilities.
///
/// FLOPs: 4 Lq Lk D per head. Bytes: Q and O once, K and V once per tile, mostly from L2: at 192 x 128 and D
/// = 64, 32 KiB in about 2700 clocks. Bound by MMAs and exponentials, as far as they do not overlap.

namespace tessera::ops {

/// All lanes of the scheduler warp: the next tile of packed sequences; false if there is none. A ticket
/// covers a slot in `ticket_heads` heads; `left` of them follow after `work`. While left > 0, the next tile
/// is that of the next head of the current ticket; otherwise lane 0 takes a ticket (atomic), the warp decodes
/// its slot and first head, and skips slots without a tile. `work`, `left` and the result are the same in all
/// lanes; `order` has a sequence's share per lane.
template <class T>
__device__ __forceinline__ bool next_packed_tile(const ForwardSm90<T>& args, const SequenceOrder& order,
                                                 int rows, int key_rows, ForwardWork& work, int& left) {
  if (left > 0) {
    --left;
    work.head_row = ++work.h;
    return true;
  }
  const int slots = int(args.seqlens.slots(args.seqlens.q_rows, rows));
  for (;;) {
    int item = 0;
    if (threadIdx.x % 32 == 0) item = atomicAdd(args.ticket, 1);
    item = __shfl_sync(0xFFFFFFFFu, item, 0);
    // Group of heads ("round"), slot, first head; the slot is slower than the heads.
    const int round_items = int(gpu::ceil_div(args.heads_at_once, args.ticket_heads)) * slots;
    const int round = item / round_items, rest = item - round * round_items;
    const int size = min(args.heads_at_once, args.heads - round * args.heads_at_once);
    if (size <= 0) return false;
    const int tickets = int(gpu::ceil_div(size, args.ticket_heads)), slot = rest / tickets;
    if (slot >= slots) return false;  // past the end, in the last round
    const AttentionSequence sequence = args.seqlens.template find_in<true>(order, slot, rows);
    if (!sequence.has_tile) continue;
    const int first = rest % tickets * args.ticket_heads;
    left = min(args.ticket_heads, size - first) - 1;
    work.b = 0;
    work.h = work.head_row = round * args.heads_at_once + first;
    work.q_first = sequence.q_first;
    work.queries = sequence.queries;
    work.k_first = sequence.k_first;
    work.keys = sequence.keys;
    work.tile = args.causal ? (sequence.queries - 1) / rows - sequence.tile : sequence.tile;
    const int last = min((work.tile + 1) * rows, sequence.queries) - 1;
    work.begin = 0;
    work.end = int(gpu::ceil_div(work.key_limit(args.causal, last), key_rows));
    work.piece = -1;
    return true;
  }
}

/// Shared memory layout. Registers are scarce, so addresses are computed from one base.
template <class Shape>
struct ForwardShared {
  char* base;

  __device__ __forceinline__ typename Shape::Barriers& barriers() const {
    return *reinterpret_cast<typename Shape::Barriers*>(base + Shape::kBarrierOffset);
  }
  __device__ __forceinline__ ForwardWork* works() const {
    return reinterpret_cast<ForwardWork*>(base + Shape::kWorkOffset);
  }
  __device__ __forceinline__ uint32_t& dropout_stream() const {
    return *reinterpret_cast<uint32_t*>(base + Shape::kStreamOffset);
  }
  __device__ __forceinline__ char* q(int stage, int group) const {  // [64, kD]
    return base + Shape::kQOffset + (stage * Shape::kGroups + group) * Shape::kGroupBytes;
  }
  __device__ __forceinline__ char* k() const { return base + Shape::kKOffset; }  // kStages of [kKeys, kD]
  __device__ __forceinline__ char* v() const { return base + Shape::kVOffset; }  // likewise
  __device__ __forceinline__ char* o(int group, int warp) const {                // [16, kD] of [64, kD]
    return base + Shape::kOOffset + group * Shape::kGroupBytes + warp * 16 * 128;
  }
};

/// Scheduler warp: decodes the work tiles. Its divisions would cost the consumers a thousand clocks per tile.
template <class T, class Shape>
__device__ __forceinline__ void schedule_tiles(const ForwardSm90<T>& args, ForwardShared<Shape> shared) {
  auto& barriers = shared.barriers();
  gpu::RingState<Shape::kQStages> state;
  const auto publish = [&](const ForwardWork& work) {
    barriers.work.empty[state.stage].wait(state.parity ^ 1);
    shared.works()[state.stage] = work;
    barriers.work.full[state.stage].arrive();
    state.advance();
  };
  ForwardWork work;
  // Written only by the lane that publishes: its arrival on work.full orders the write before reads.
  const auto write_dropout_stream = [&] {
    if constexpr (Shape::kDrops) shared.dropout_stream() = args.drop.stream();
  };
  if (args.seqlens.packed()) {
    if (threadIdx.x % 32 == 0) write_dropout_stream();
    const SequenceOrder order = args.seqlens.template order<true>(Shape::kRows);
    uint32_t parity = 0;
    int left = 0;
    for (bool some = true; some; parity ^= 1) {
      some = next_packed_tile(args, order, Shape::kRows, Shape::kKeys, work, left);
      if (!some) work.tile = -1;
      if (threadIdx.x % 32 == 0) publish(work);
      __syncwarp();
      // Do not take a tile long before it is needed: other blocks could start on it.
      if (some) barriers.near_end.wait(parity);
    }
    return;
  }
  if (!gpu::elect_one()) return;
  write_dropout_stream();
  work.q_first = work.k_first = 0;
  work.queries = args.schedule.queries;
  work.keys = args.schedule.keys;
  for (int item = 0;; ++item) {
    const bool some = attention_work(args.schedule, gpu::reread_grid(), gpu::reread_block(), item, work);
    if (!some) work.tile = -1;
    work.b = work.head_row / args.heads;
    work.h = work.head_row % args.heads;
    publish(work);
    if (!some) return;
  }
}

/// Producer thread: issues the TMA loads of Q, K and V of the scheduled tiles.
template <class T, class Shape>
__device__ __forceinline__ void load_tiles(const gpu::TensorMap& q_map, const gpu::TensorMap& k_map,
                                           const gpu::TensorMap& v_map, const ForwardSm90<T>& args,
                                           ForwardShared<Shape> shared) {
  constexpr int kGroups = Shape::kGroups, kKeys = Shape::kKeys, kStages = Shape::kStages;
  auto& barriers = shared.barriers();
  gpu::RingState<kStages> k_place, v_place;
  gpu::RingState<Shape::kQStages> q_place;
  for (;;) {
    barriers.work.full[q_place.stage].wait(q_place.parity);
    const ForwardWork work = shared.works()[q_place.stage];
    barriers.work.empty[q_place.stage].arrive();
    if (work.tile < 0) return;
    const int kv_head = work.h / args.group;
    const auto load = [&](gpu::Ring<kStages>& ring, gpu::RingState<kStages>& state, char* tiles,
                          const gpu::TensorMap& map, int n) {
      ring.empty[state.stage].wait(state.parity ^ 1);
      ring.full[state.stage].arrive_expect(Shape::kTileBytes);
      HeadTile<T, kKeys, Shape::kD>::load(tiles + state.stage * Shape::kTileBytes, map,
                                          ring.full[state.stage], work.k_first + n * kKeys, kv_head, work.b);
      state.advance();
    };
    constexpr int kNear =
        2;  // remaining steps; two more are in the pipelines: together longer than scheduling takes
    if (work.end - work.begin <= kNear) barriers.near_end.arrive();
    // K runs one step ahead of V, as S does of P V.
    if (work.end > work.begin) load(barriers.k, k_place, shared.k(), k_map, work.end - 1);
    for (int group = 0; group < kGroups; ++group) {
      gpu::Barrier& full = barriers.q[group].full[q_place.stage];
      barriers.q[group].empty[q_place.stage].wait(q_place.parity ^ 1);
      full.arrive_expect(Shape::kGroupBytes);
      HeadTile<T, 64, Shape::kD>::load(shared.q(q_place.stage, group), q_map, full,
                                       work.q_first + work.tile * Shape::kRows + group * 64, work.h, work.b);
    }
    q_place.advance();
    for (int n = work.end - 2; n >= work.begin; --n) {
      if (n == work.begin + kNear - 1) barriers.near_end.arrive();
      load(barriers.k, k_place, shared.k(), k_map, n);
      load(barriers.v, v_place, shared.v(), v_map, n + 1);
    }
    if (work.end > work.begin) load(barriers.v, v_place, shared.v(), v_map, work.begin);
  }
}

/// The rows of a consumer warp: 16, of which this thread holds `row` and `row` + 8 of the block's tile.
struct ForwardRows {
  int first, row, warp;  // the block's tile starts at query `first`; `warp` counts the consumers
  int queries, q_row;    // queries of the sequence; memory row of the warp's first query
  int h, b;
  int64_t piece;    // index of the partial result; negative: the tile is not split
  int lane, place;  // `place`: the lane, read again where that saves a register

  __device__ __forceinline__ int own() const { return first + warp * 16; }  // the warp's first query
};

/// Epilogue of a split tile: stores O in fragment order and the statistics, which another kernel combines.
template <class T, class Shape>
__device__ __forceinline__ void store_split(const ForwardSm90<T>& args, const ForwardRows& rows,
                                            const OnlineSoftmax<Shape>& softmax, const float (&total)[2],
                                            const float (&o)[Shape::kD / 2]) {
  constexpr int kD = Shape::kD;
  float* const piece = args.partial + rows.piece * Shape::kSplitFloats;
  float4* const out = reinterpret_cast<float4*>(piece) + rows.warp * (kD / 8) * 32 + rows.place;
#pragma unroll
  for (int j = 0; j < kD / 8; ++j)
    out[j * 32] = make_float4(o[4 * j], o[4 * j + 1], o[4 * j + 2], o[4 * j + 3]);
  float* const statistics = piece + Shape::kRows * kD;
  if (rows.lane % 4 == 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      statistics[rows.row + 8 * half] = softmax.base[half];
      statistics[Shape::kRows + rows.row + 8 * half] = total[half];
    }
  }
}

/// Epilogue of a whole tile: stores O / sum, through the warp's rows of shared memory, and the log-sum-exp.
template <class T, class Shape>
__device__ __forceinline__ void store_rows(const gpu::TensorMap& o_map, const ForwardSm90<T>& args,
                                           const ForwardRows& rows, const OnlineSoftmax<Shape>& softmax,
                                           const float (&total)[2], const float (&o)[Shape::kD / 2],
                                           char* o_rows) {
  constexpr int kD = Shape::kD;
  using GroupTile = HeadTile<T, 64, kD>;
  const int lane = rows.lane;
  float inverse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    inverse[half] = total[half] == 0 ? 0.0f : 1 / total[half];
    if constexpr (Shape::kDrops) inverse[half] *= args.drop.scale / 2;
    if (lane % 4 == 0 && rows.first + rows.row + 8 * half < rows.queries)
      args.lse[(int64_t(rows.b) * args.heads + rows.h) * args.lse_stride + rows.q_row + lane / 4 + 8 * half] =
          total[half] == 0 ? -INFINITY : fmaf(softmax.base[half], 0.693147180559945f, logf(total[half]));
  }
  // Each warp stores its own rows; TMA has read what it stored last.
  if (lane == 0) gpu::wait_stores_read<0>();
  __syncwarp();
#pragma unroll
  for (int step = 0; step < kD / 16; ++step) {
    uint32_t values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      values[i] =
          gpu::pack_halves<T>(o[8 * step + 2 * i] * inverse[i % 2], o[8 * step + 2 * i + 1] * inverse[i % 2]);
    gpu::stmatrix_x4(gpu::shared_address(o_rows) + step / 4 * GroupTile::kBoxBytes +
                         gpu::swizzled_offset(rows.place % 16, step % 4 * 2 + rows.place / 16),
                     values);
  }
  gpu::fence_async_shared();
  __syncwarp();
  const int left = rows.queries - rows.own();
  if (left >= 16) {
    if (lane == 0) {
#pragma unroll
      for (int box = 0; box < kD / kBoxWidth; ++box)
        gpu::tma_store(o_map, o_rows + box * GroupTile::kBoxBytes, box * kBoxWidth, rows.q_row, rows.h,
                       rows.b);
      gpu::commit_stores();
    }
  } else {  // the rows that follow may belong to another sequence
#pragma unroll 1
    for (int index = gpu::reread_lane(); index < left * (kD / 8); index += 32) {
      const int i = index / (kD / 8), chunk = index % (kD / 8);
      if (chunk * 8 < args.dim)
        *reinterpret_cast<uint4*>(args.o.at(rows.b, rows.h, rows.q_row + i) + chunk * 8) =
            *reinterpret_cast<const uint4*>(o_rows + chunk / 8 * GroupTile::kBoxBytes +
                                            gpu::swizzled_offset(i, chunk % 8));
    }
    __syncwarp();
  }
}

/// Computes the dropout words of a warp's 16 queries, from `query` on, and a KV block.
template <class T, class Shape, int kWords>
__device__ __forceinline__ void draw_words(uint32_t (&words)[kWords], const ForwardSm90<T>& args,
                                           ForwardShared<Shape> shared, const ForwardWork& work, int query,
                                           int n, int lane) {
  const uint32_t stream = shared.dropout_stream(),
                 head_row = drop_head_row(uint32_t(work.b), args.schedule.queries, work.q_first, args.heads,
                                          uint32_t(work.h));
#pragma unroll
  for (int w = 0; w < kWords; ++w)
    words[w] = args.drop.word(stream, head_row, uint32_t(query / 16),
                              uint32_t(n * (Shape::kKeys / 2) + w * 32 + lane));
}

/// Masks the scores of keys that `query` and `query` + 8 of this thread do not see; `key` is the first key of
/// this thread in the block.
template <class Shape>
__device__ __forceinline__ void mask_scores(float (&s)[Shape::kKeys / 2], const ForwardWork& work,
                                            bool causal, int query, int key) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int seen = work.key_limit(causal, query + 8 * half) - key;
#pragma unroll
    for (int j = 0; j < Shape::kKeys / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (8 * j + e >= seen) s[4 * j + 2 * half + e] = -INFINITY;
  }
}

/// Rounds P to 16 bits, as the left operand of P V; drops (and doubles what is kept) by the bits in `words`.
template <class T, class Shape, int kWords>
__device__ __forceinline__ void round_probabilities(uint32_t (&p)[Shape::kKeys / 16][4],
                                                    const float (&s)[Shape::kKeys / 2],
                                                    const uint32_t (&words)[kWords], int lane) {
#pragma unroll
  for (int step = 0; step < Shape::kKeys / 16; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      p[step][i] = gpu::pack_halves<T>(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);
  if constexpr (Shape::kDrops)
#pragma unroll
    for (int step = 0; step < Shape::kKeys / 16; ++step)
      RowBits(words[step / 4], step % 4 * 8, lane).template keep_doubled<T>(p[step]);
}

/// Consumer warpgroup: O of 64 queries of each tile. Per KV block: S of the next block and P V of this one
/// are issued together; softmax of the next block runs during P V; the order barrier passes to the next
/// warpgroup after the issue.
template <class T, class Shape>
__device__ __forceinline__ void attend(const gpu::TensorMap& o_map, const ForwardSm90<T>& args,
                                       ForwardShared<Shape> shared, int warp) {
  using enum gpu::TileOrder;
  constexpr int kD = Shape::kD, kGroups = Shape::kGroups, kKeys = Shape::kKeys, kStages = Shape::kStages,
                kQStages = Shape::kQStages;
  using GroupTile = HeadTile<T, 64, kD>;
  using KeyTile = HeadTile<T, kKeys, kD>;
  auto& barriers = shared.barriers();
  ForwardWork* const works = shared.works();
  const int group = warp / 4 - 1, lane = int(threadIdx.x) % 32;
  const int own_barrier = 1 + group, next_barrier = 1 + (group + 1) % kGroups;
  char* const o_rows = shared.o(group, warp % 4);
  if (group == kGroups - 1) gpu::arrive_named(next_barrier, 256);

  PipelineState<kStages> block{0};  // of K and V
  for (PipelineState<kQStages> tile{0};; ++tile.count) {
    barriers.work.full[tile.stage()].wait(tile.parity());
    AttentionWork work = works[tile.stage()];
    work.tile = in_uniform_register(work.tile);
    work.begin = in_uniform_register(work.begin);
    work.end = in_uniform_register(work.end);
    if (work.tile < 0) break;
    const int first = work.tile * Shape::kRows;
    // None of this warpgroup's queries sees KV block `end` or a later one; all see the first `unmasked` keys.
    const int group_first = first + group * 64;
    const ForwardWork& own = works[tile.stage()];
    const int group_keys =
        group_first < own.queries ? own.key_limit(args.causal, min(group_first + 64, own.queries) - 1) : 0;
    const int end = min(work.end, int(gpu::ceil_div(group_keys, kKeys)));
    const int unmasked = own.key_limit(args.causal, group_first);
    const int row = group * 64 + warp % 4 * 16 + lane / 4;  // of the tile, and row + 8

    const auto wait_full = [&](gpu::Ring<kStages>& ring, PipelineState<kStages> at) {
      ring.full[at.stage()].wait(at.parity());
    };
    const auto release = [&](gpu::Ring<kStages>& ring, PipelineState<kStages> at) {
      if (lane == 0) ring.empty[at.stage()].arrive();
    };
    // Skip KV blocks that are fully masked for this warpgroup.
    for (int n = work.end; n > max(end, work.begin); --n) {
      {
        gpu::sync_named(own_barrier, 256);
        gpu::arrive_named(next_barrier, 256);
      }
      wait_full(barriers.k, block);
      release(barriers.k, block);
      wait_full(barriers.v, block);
      release(barriers.v, block);
      ++block.count;
    }

    float o[kD / 2];
    OnlineSoftmax<Shape> softmax;
    barriers.q[group].full[tile.stage()].wait(tile.parity());
    if (end > work.begin) {
      float s[kKeys / 2];
      uint32_t p[kKeys / 16][4];
      [[maybe_unused]] uint32_t words[Shape::kDrops ? kKeys / 64 : 1];
      const auto draw = [&](int n) {
        if constexpr (Shape::kDrops)
          draw_words<T, Shape>(words, args, shared, works[tile.stage()], group_first + warp % 4 * 16, n,
                               lane);
      };
      const auto issue_scores = [&] {
        // Compute the words before the wait for the order barrier. Otherwise ptxas sinks them to their use;
        // it cannot see that the value below is 0 for every head (D <= 128).
        int none = 0;
        if constexpr (Shape::kDrops) none = int(words[0] & words[kKeys / 64 - 1] & uint32_t(args.dim)) >> 8;
        gpu::sync_named(own_barrier + none, 256);
        const uint64_t a = gpu::tile_descriptor<k_major>(gpu::shared_address(shared.q(tile.stage(), group)));
        const uint64_t b = gpu::tile_descriptor<k_major>(gpu::shared_address(shared.k()) +
                                                         block.stage() * Shape::kTileBytes);
        gpu::warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < kD / 16; ++step)
          gpu::wgmma<T, k_major, k_major>(s, a + GroupTile::k_step_offset(step),
                                          b + KeyTile::k_step_offset(step), step > 0);
        gpu::warpgroup_commit();
      };
      const auto issue_values = [&](PipelineState<kStages> at) {
        wait_full(barriers.v, at);
        const uint64_t b = gpu::tile_descriptor<mn_major>(
            gpu::shared_address(shared.v()) + at.stage() * Shape::kTileBytes, KeyTile::kBoxBytes);
        gpu::warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < kKeys / 16; ++step)
          gpu::wgmma<T, mn_major>(o, p[step], b + step * gpu::kDescriptorStep<mn_major>);
        gpu::warpgroup_commit();
      };
      const auto mask = [&](int n) {
        mask_scores<Shape>(s, works[tile.stage()], args.causal, first + row, n * kKeys + lane % 4 * 2);
      };
      const auto convert = [&] { round_probabilities<T, Shape>(p, s, words, lane); };
      const auto finish_values = [&](PipelineState<kStages> at) {
        gpu::warpgroup_wait<0>();
        gpu::warpgroup_fence_operand(o);
#pragma unroll
        for (int step = 0; step < kKeys / 16; ++step) gpu::warpgroup_fence_operand(p[step]);
        release(barriers.v, at);
      };

      // Prologue: first S and its softmax.
      int n = end - 1;
      draw(n);
      wait_full(barriers.k, block);
      issue_scores();
      gpu::arrive_named(next_barrier, 256);
      gpu::warpgroup_wait<0>();
      gpu::warpgroup_fence_operand(s);
      release(barriers.k, block);
      if ((n + 1) * kKeys > unmasked) mask(n);
      softmax.apply(s, args.scale2);
      convert();
      if (n > work.begin) wait_full(barriers.k, block + 1);
#pragma unroll
      for (float& element : o) element = 0;

      // Main loop: S of block n, P V of block n + 1.
      const auto step = [&]<bool kMasked>() {
        ++block.count;
        draw(n);
        issue_scores();
        issue_values(block + -1);
        gpu::arrive_named(next_barrier, 256);
        gpu::warpgroup_wait<1>();
        gpu::warpgroup_fence_operand(s);
        release(barriers.k, block);
        if constexpr (kMasked) mask(n);
        softmax.apply(s, args.scale2);
        if (n > work.begin) wait_full(barriers.k, block + 1);
        finish_values(block + -1);
        if (softmax.needs_rescale) {
#pragma unroll
          for (int j = 0; j < kD / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) o[4 * j + e] *= softmax.rescale[e / 2];
        }
        convert();
      };
      // Partly masked blocks, then those that all queries of the warpgroup see.
      for (--n; n >= work.begin && (n + 1) * kKeys > unmasked; --n) step.template operator()<true>();
      for (; n >= work.begin; --n) step.template operator()<false>();
      // Last P V.
      issue_values(block);
      finish_values(block);
      ++block.count;
    } else {
#pragma unroll
      for (float& element : o) element = 0;
    }

    // Epilogue: divide O by the sums and store it, or store the partial result of a split tile.
    // `rows` is recomputed, instead of being kept in registers through the loop.
    const ForwardRows rows{.first = first,
                           .row = row,
                           .warp = warp - 4,
                           .queries = own.queries,
                           .q_row = own.q_first + first + group * 64 + warp % 4 * 16,
                           .h = own.h,
                           .b = own.b,
                           .piece = own.piece,
                           .lane = lane,
                           .place = Shape::kDrops ? gpu::reread_lane() : lane};
    __syncwarp();
    if (lane == 0) {
      barriers.work.empty[tile.stage()].arrive();
      barriers.q[group].empty[tile.stage()].arrive();
    }
    float total[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      total[half] = softmax.sum[half];
      total[half] += __shfl_xor_sync(0xFFFFFFFFu, total[half], 1);
      total[half] += __shfl_xor_sync(0xFFFFFFFFu, total[half], 2);
    }
    if (rows.piece < 0)
      store_rows<T, Shape>(o_map, args, rows, softmax, total, o, o_rows);
    else if (rows.own() < rows.queries)  // padding rows past the last sequence are never read
      store_split<T, Shape>(args, rows, softmax, total, o);
  }
  if (lane == 0) gpu::wait_stores_read<0>();
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    attention_forward_sm90_kernel(const __grid_constant__ gpu::TensorMap q_map,
                                  const __grid_constant__ gpu::TensorMap k_map,
                                  const __grid_constant__ gpu::TensorMap v_map,
                                  const __grid_constant__ gpu::TensorMap o_map,
                                  const __grid_constant__ ForwardSm90<T> args) {
  constexpr int kGroups = Shape::kGroups;
  extern __shared__ __align__(1024) char base[];
  const ForwardShared<Shape> shared{base};
  const int warp = in_uniform_register(int(threadIdx.x) / 32);
  if (threadIdx.x == 0) {
    gpu::prefetch_map(q_map);
    gpu::prefetch_map(k_map);
    gpu::prefetch_map(v_map);
    gpu::prefetch_map(o_map);
    auto& barriers = shared.barriers();
    barriers.k.init(1, kGroups * 4);
    barriers.v.init(1, kGroups * 4);
    for (auto& q : barriers.q) q.init(1, 4);
    barriers.work.init(1, 1 + kGroups * 4);
    barriers.near_end.init(1);
    gpu::fence_barrier_init();
  }
  __syncthreads();
  gpu::wait_and_launch_dependents();

  if (warp < 4) {
    gpu::warpgroup_reg_dealloc<Shape::kProducerRegisters>();
    if (warp == 1)
      schedule_tiles<T, Shape>(args, shared);
    else if (warp == 0 && gpu::elect_one())
      load_tiles<T, Shape>(q_map, k_map, v_map, args, shared);
  } else {
    gpu::warpgroup_reg_alloc<Shape::kConsumerRegisters>();
    attend<T, Shape>(o_map, args, shared, warp);
  }
}

}  // namespace tessera::ops

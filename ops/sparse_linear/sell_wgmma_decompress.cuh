#pragma once

#include <bit>

#include "gpu/global.cuh"
#include "ops/sparse_linear/sell_wgmma_args.cuh"

/// Decompression in multiply_tiles (sell_wgmma.cuh): what a warp of a team does.

namespace tessera::ops::sparse::tiles {

/// Chunks of a slice in a part of a weight.
struct Run {
  int weight, begin, end;
};

/// Chunks of a warp: where its lane finds them.
struct Share {
  const uint4* values;
  const uint32_t* gaps;
  int count;
};

/// Puts the elements of a chunk that lie in the pass into the tile, and returns the lane's place after it.
/// `place`: of the column before, relative to the pass; columns of earlier passes are negative. `run_shift`,
/// `run_step`: from a place to its run of columns, and what each run adds to it in memory.
__device__ __forceinline__ uint32_t put_chunk(const SellChunk& chunk, uint32_t place, uint32_t limit,
                                              uint32_t lane_tile, uint32_t run_shift, uint32_t run_step) {
  // Byte w: columns up to entries 2w and 2w + 1, each counted as its distance and itself; at most 128.
  const uint32_t even = (chunk.gaps & 0x0F0F0F0Fu) + 0x01010101u,
                 pairs = even + (chunk.gaps >> 4 & 0x0F0F0F0Fu) + 0x01010101u, before = pairs * 0x01010100u,
                 first = before + even, second = before + pairs;
  const uint32_t words[4] = {chunk.values.x, chunk.values.y, chunk.values.z, chunk.values.w};
  const auto put = [&](uint32_t at, uint32_t bits) {
    const uint32_t to = (at >> run_shift) * run_step + (lane_tile + at);
    asm volatile(
        "{\n\t.reg .pred p;\n\t"
        "setp.lt.u32 p, %0, %1;\n\t"
        "@p st.shared.u16 [%2], %3;\n\t}" ::"r"(at),
        "r"(limit), "r"(to), "h"(uint16_t(bits))
        : "memory");
  };
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    put(__dp4a(first, kColumn << w * 8, place), words[w]);
    put(__dp4a(second, kColumn << w * 8, place), words[w] >> 16);
  }
  return __dp4a(second, kColumn << 24, place);
}

/// Adds the distances of a chunk, times kColumn, to `sum`.
__device__ __forceinline__ uint32_t add_distances(uint32_t gaps, uint32_t sum) {
  return __dp4a((gaps & 0x0F0F0F0Fu) + (gaps >> 4 & 0x0F0F0F0Fu), kColumn * 0x01010101u, sum);
}

/// A warp's part of a team's tiles: a quarter of the chunks of one of the two slices.
template <class T, int kTokens>
class Decompression {
 public:
  __device__ __forceinline__ Decompression(const Args<T>& args, Memory<kTokens>& memory, int team)
      : args_(args),
        plan_(args.plan),
        memory_(memory),
        lane_(int(threadIdx.x) % kWarp),
        thread_(int(threadIdx.x) % kTeamThreads),
        team_(team),
        slice_(thread_ / kWarp % 2),
        quarter_(thread_ / kWarp / 2),
        tile_(gpu::shared_address(memory.tiles[team])),
        outer_(outer_bytes(args.plan)),
        lane_tile_(tile_ + uint32_t(lane_ / 4) * outer_ + uint32_t(lane_ % 4 * 4 + slice_ * 2)),
        run_shift_(uint32_t(kColumnShift + std::countr_zero(uint32_t(plan_.apart)))),
        run_step_(16 - uint32_t(plan_.apart) * kColumn) {}

  /// Parts that are one pass: after the last chunks of one come those of the next.
  __device__ __forceinline__ void whole_parts(Pass now, int count) {
    const uint32_t limit = uint32_t(args_.x.width) * kColumn;
    Run later{0, 0, 0};  // after `next`
    Share share = quarter_of(run_of(now)), next{nullptr, nullptr, 0};
    const auto look_ahead = [&](int i) {
      next = quarter_of(later);
      prefetch(next);
      later = {0, 0, 0};
      if (i + 2 < count) now.advance(plan_), later = run_of(now);
    };
    if (count > 1) now.advance(plan_), later = run_of(now);
    open(share);
    look_ahead(0);
    for (int i = 0; i < count; ++i) {
      const int parity = i & 1;
      cover(share, parity);
      begin_tile(parity);
      uint32_t place = place_after_others(0u - kColumn, parity);
      const uint4* values = share.values;
      const uint32_t* gaps = share.gaps;
      for (int left = share.count; left >= 0; left -= kAhead) {
        const bool is_last = left <= kAhead;
        values = is_last ? next.values : values + kAhead * kWarp;
        gaps = is_last ? next.gaps : gaps + kAhead * kWarp;
        const int after = is_last ? next.count : left - kAhead;
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          if (a < left) place = put(a, place, limit);
          load(a, values, gaps, after);
        }
        if (is_last) break;
      }
      load_gaps(next);
      end_tile();
      share = next;
      look_ahead(i + 1);
    }
  }

  /// Parts of several passes: where a quarter begins depends on the pass before.
  __device__ __forceinline__ void passes(Pass now, int count) {
    Run run = run_of(now);
    for (int i = 0; i < count; ++i) {
      const int pass = now.pass, parity = i & 1, before = pass * plan_.columns;
      int begin = 0;
      uint32_t place = 0u - kColumn;
      if (pass > 0) {
        int found = kQuarters - 1;
#pragma unroll
        for (int q = kQuarters - 2; q >= 0; --q)
          if (memory_.chunks[team_][slice_][q] >= 0) found = q;
        begin = memory_.chunks[team_][slice_][found], place = memory_.places[team_][slice_][found][lane_];
      }
      // Passes are about equally long; what is left of this one belongs to the last quarter.
      const int chunks = run.end - run.begin, left = plan_.passes - pass,
                part = (chunks - begin + left - 1) / left;
      int chunk = begin + part * quarter_ / kQuarters;
      const int end = quarter_ + 1 < kQuarters ? begin + part * (quarter_ + 1) / kQuarters : chunks;
      Share share = share_of(run, chunk, end);
      open(share);
      now.advance(plan_);
      if (i + 1 < count && now.pass == 0) {
        run = run_of(now);
        prefetch(quarter_of(run));
      }
      cover(share, parity);
      begin_tile(parity);
      place = place_after_others(place, parity);
      const uint32_t limit = uint32_t(min(plan_.columns, args_.x.width - before)) * kColumn;
      bool done = __all_sync(0xFFFFFFFFu, int(place + kColumn) >= int(limit));
      int continues = done ? chunk : -1;
      uint32_t kept = place;
      while (chunk < end && !done) {
        share.values += kAhead * kWarp, share.gaps += kAhead * kWarp, share.count -= kAhead;
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          if (chunk >= end || done) break;
          const uint32_t after = put(a, place, limit);
          load(a, share.values, share.gaps, share.count);
          // A lane past the limit has elements of the next pass in this chunk.
          if (continues < 0 && __any_sync(0xFFFFFFFFu, int(after) >= int(limit)))
            continues = chunk, kept = place;
          ++chunk;
          done = __all_sync(0xFFFFFFFFu, int(after + kColumn) >= int(limit));
          if (continues < 0 && done) continues = chunk, kept = after;
          place = after;
        }
      }
      if (continues < 0 && quarter_ + 1 == kQuarters) continues = end, kept = place;
      memory_.places[team_][slice_][quarter_][lane_] = kept - limit;
      if (lane_ == 0) memory_.chunks[team_][slice_][quarter_] = continues;
      end_tile();
      sync_team();  // where the next pass begins is known
    }
  }

 private:
  /// Offsets of the slice's chunks in a part, and the weight.
  __device__ __forceinline__ Run run_of(const Pass& of) const {
    const int window = of.tile / kTilesOfWindow,
              of_window = (of.tile % kTilesOfWindow * kTeams + team_) * 2 + slice_,
              w = weight_of_tile(args_.weights, args_.count, window);
    const SellWeight<T> weight = pick(args_.weights, w);
    const int64_t at = (int64_t(window - weight.first_tile) * args_.x.parts + of.part) * 8 + of_window;
    return {w, weight.offsets[at], weight.offsets[at + 1]};
  }
  /// Chunks `begin` to `end` of a run.
  __device__ __forceinline__ Share share_of(const Run& run, int begin, int end) const {
    const SellWeight<T> weight = pick(args_.weights, run.weight);
    const int64_t from = int64_t(run.begin + begin) * kWarp + lane_;
    return {weight.values + from, weight.gaps + from, end - begin};
  }
  __device__ __forceinline__ Share quarter_of(const Run& run) const {
    const int chunks = run.end - run.begin;
    return share_of(run, chunks * quarter_ / kQuarters, chunks * (quarter_ + 1) / kQuarters);
  }
  __device__ __forceinline__ void prefetch(const Share& share) const {
    if (lane_ > 0 || share.count == 0) return;
    gpu::bulk_prefetch_l2(share.values, uint32_t(share.count) * kWarp * uint32_t(sizeof(uint4)));
    gpu::bulk_prefetch_l2(share.gaps, uint32_t(share.count) * kWarp * uint32_t(sizeof(uint32_t)));
  }
  /// Chunk a of those at `values` and `gaps`, of which there are `left`.
  __device__ __forceinline__ void load(int a, const uint4* values, const uint32_t* gaps, int left) {
    ahead_[a].gaps = 0;
    if (a < left) ahead_[a].load(values + a * kWarp, gaps + a * kWarp);
  }
  __device__ __forceinline__ void load_gaps(const Share& share) {
#pragma unroll
    for (int g = 0; g < kGapsAhead; ++g) {
      gaps_ahead_[g] = 0;
      if (kAhead + g < share.count) gaps_ahead_[g] = share.gaps[(kAhead + g) * kWarp];
    }
  }
  __device__ __forceinline__ void open(const Share& share) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) load(a, share.values, share.gaps, share.count);
    load_gaps(share);
  }
  __device__ __forceinline__ uint32_t put(int a, uint32_t place, uint32_t limit) const {
    return put_chunk(ahead_[a], place, limit, lane_tile_, run_shift_, run_step_);
  }
  /// Says how many columns the warp's chunks cover, of which the first have been asked for.
  __device__ __forceinline__ void cover(const Share& share, int parity) {
    if (quarter_ + 1 == kQuarters) return;
    uint32_t sum = uint32_t(share.count) * uint32_t(sell_delta4::kEntries) * kColumn;
    for (int c = kAhead + kGapsAhead; c < share.count; ++c) sum = add_distances(share.gaps[c * kWarp], sum);
#pragma unroll
    for (int a = 0; a < kAhead; ++a) sum = add_distances(ahead_[a].gaps, sum);
#pragma unroll
    for (int g = 0; g < kGapsAhead; ++g) sum = add_distances(gaps_ahead_[g], sum);
    memory_.covered[parity][team_][slice_][quarter_][lane_] = sum;
  }
  __device__ __forceinline__ uint32_t place_after_others(uint32_t place, int parity) const {
#pragma unroll
    for (int q = 0; q + 1 < kQuarters; ++q)
      if (q < quarter_) place += memory_.covered[parity][team_][slice_][q][lane_];
    return place;
  }
  __device__ __forceinline__ void sync_team() const {
    gpu::sync_named(1 + team_, kTeamThreads);
  }
  /// Clears the tile; after it where quarters begin is known.
  __device__ __forceinline__ void begin_tile(int parity) {
    memory_.multiplied[team_].wait(uint32_t(parity) ^ 1);
#pragma unroll 4
    for (uint32_t i = uint32_t(thread_) * 16; i < 8 * outer_; i += kTeamThreads * 16)
      asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(tile_ + i), "r"(0) : "memory");
    sync_team();
  }
  __device__ __forceinline__ void end_tile() {
    gpu::fence_async_shared();
    __syncwarp();
    if (lane_ == 0) memory_.filled[team_].arrive();
  }

  const Args<T>& args_;
  const SellWgmmaPlan& plan_;
  Memory<kTokens>& memory_;
  const int lane_, thread_, team_, slice_, quarter_;
  const uint32_t tile_, outer_, lane_tile_, run_shift_, run_step_;
  SellChunk ahead_[kAhead];
  uint32_t gaps_ahead_[kGapsAhead];  // of the chunks after these
};

}  // namespace tessera::ops::sparse::tiles

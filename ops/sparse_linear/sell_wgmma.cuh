#pragma once

#include "gpu/tma.cuh"
#include "gpu/wgmma.cuh"
#include "ops/sparse_linear/sell_wgmma_args.cuh"

/// Up to kJointWeights sell_delta4 weights over the same x, with tensor cores: variant "sell_wgmma". Three
/// kernels: pack_inputs arranges x, multiply_tiles writes sums over some of the columns, add_splits adds them
/// and writes y.
///
/// A unit of work is two pairs of slices (128 rows) in a part of the columns. A block has consecutive units
/// for the same tokens, in the order of rows, columns; of rows that several blocks share each block writes a
/// sum of its own. Parts of more than 512 columns take several passes. Each pair has a tile in shared memory
/// and a team of 8 warps, which decompress it into the tile, a slice in four warps, a quarter of its chunks
/// each. Where a quarter begins follows from the distances of those before it, which their warps add up.
/// Another warpgroup multiplies the tiles by WGMMA with x, of which it has the next columns copied in the
/// meantime; the team fills its tile with zeros again. While the one is multiplied, the other one's team
/// decompresses.
///
/// A tile is A of WGMMA, with rows m next to each other (no swizzle): core matrices of 8 columns x 8 rows,
/// 16 bytes of rows per column. Row m = 2 lane + slice. Which column is which k is free as long as x agrees:
/// the 8 columns of a core matrix are `apart` columns from each other, a power of two. So the lanes of a
/// warp, which are within few columns of each other, are mostly at the same place in their core matrices; and
/// as core matrices of neighbouring rows begin 16 bytes later, these lanes write a bank each.
///
/// Lanes are not equally far after a chunk, so that the chunks around the limit of a pass are read in both
/// passes; each takes the elements of its columns.
///
/// Sums are f32 in a fixed order: k within a block's units, then blocks.

namespace tessera::ops::sparse {

namespace tiles {

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

/// Descriptor of a tile without swizzle ("Matrix descriptor format"): bytes from a core matrix to the next
/// one along m or n (`outer`) and along k (`along_k`).
__device__ __forceinline__ uint64_t plain_descriptor(uint32_t address, uint32_t outer, uint32_t along_k) {
  return uint64_t((address & 0x3FFFF) >> 4) | uint64_t(along_k >> 4) << 16 | uint64_t(outer >> 4) << 32;
}

}  // namespace tiles

template <class T, int kTokens>
__global__ void __launch_bounds__(tiles::kThreads, 1)
    multiply_tiles(const __grid_constant__ tiles::Args<T> args) {
  using namespace tiles;
  static_assert(sizeof(Memory<kTokens>) <= size_t(kMostShared));
  extern __shared__ __align__(128) char dynamic[];
  Memory<kTokens>& memory = *reinterpret_cast<Memory<kTokens>*>(dynamic);
  const SellWgmmaPlan& plan = args.plan;
  const int lane = int(threadIdx.x) % kWarp, team = int(threadIdx.x) / kTeamThreads,
            warp = int(threadIdx.x) % kTeamThreads / kWarp, thread = int(threadIdx.x) % kTeamThreads;
  const int token_tile = int(blockIdx.x) % plan.token_tiles, block = int(blockIdx.x) / plan.token_tiles;
  const int first = plan.first_unit(block), count = (plan.first_unit(block + 1) - first) * plan.passes;
  const uint32_t outer = uint32_t(plan.apart) * kColumn + kSkew;
  gpu::launch_dependents();
  if (threadIdx.x == 0) {
    for (gpu::Barrier& barrier : memory.arrived) barrier.init(1);
    for (int t = 0; t < kTeams; ++t)
      memory.filled[t].init(kTeamWarps), memory.multiplied[t].init(kMultiplyThreads / kWarp);
    gpu::fence_barrier_init();
  }
  __syncthreads();
  Pass now{first / plan.parts, first % plan.parts, 0};

  if (team == kTeams) {
    // ---- Multiplication ----

    gpu::warpgroup_reg_alloc<kMultiplyRegisters>();
    gpu::grid_dependency_wait();
    const int stages = plan.apart / kStageColumns;
    // Asks for the stages of x that there is room for: as many as kStages after those that have been used.
    Pass loading = now;
    int loading_stage = 0, loaded = 0;
    gpu::RingState<kStages<kTokens>> to;
    const auto load_stages = [&](int used) {
      if (thread != 0) return;
      for (; loaded < min(count * stages, used + kStages<kTokens>); ++loaded) {
        const int weight = weight_of_tile(args.weights, args.count, loading.tile / kTilesOfWindow);
        memory.arrived[to.stage].arrive_expect(kStageBytes<kTokens>);
        gpu::bulk_load(memory.x[to.stage],
                       args.packed_at(weight, token_tile, loading.part, loading.pass) +
                           loading_stage * kStageBytes<kTokens>,
                       kStageBytes<kTokens>, memory.arrived[to.stage]);
        to.advance();
        if (++loading_stage == stages) loading_stage = 0, loading.advance(plan);
      }
    };
    load_stages(0);
    const uint64_t b_first = plain_descriptor(gpu::shared_address(memory.x), 128, kTokens * 16);
    float sums[kTeams][kTokens / 2] = {};
    const auto multiply = [&](float(&to_sums)[kTokens / 2], int t, gpu::RingState<kStages<kTokens>>& from,
                              uint32_t parity) {
      memory.filled[t].wait(parity);
      uint64_t a = plain_descriptor(gpu::shared_address(memory.tiles[t]), outer, kColumn);
      for (int stage = 0; stage < stages; ++stage) {
        memory.arrived[from.stage].wait(from.parity);
        const uint64_t b = b_first + uint64_t(from.stage * (kStageBytes<kTokens> >> 4));
        gpu::warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < kStageSteps; ++step)
          gpu::wgmma<T, gpu::TileOrder::mn_major, gpu::TileOrder::k_major>(
              to_sums, a + uint64_t(step * 2 * (kColumn >> 4)), b + uint64_t(step * 2 * kTokens));
        gpu::warpgroup_commit();
        a += uint64_t(kStageSteps * 2 * (kColumn >> 4));
        from.advance();
      }
    };
    gpu::RingState<kStages<kTokens>> state;
    for (int i = 0; i < count; ++i) {
      const uint32_t parity = uint32_t(i) & 1;
      gpu::RingState<kStages<kTokens>> again = state;
      multiply(sums[0], 0, state, parity);
      multiply(sums[1], 1, again, parity);
      if (stages == kMostApart / kStageColumns)
        gpu::warpgroup_wait<kMostApart / kStageColumns>();
      else
        gpu::warpgroup_wait<0>();
      if (lane == 0) memory.multiplied[0].arrive();
      gpu::warpgroup_wait<0>();
      if (lane == 0) memory.multiplied[1].arrive();
      load_stages((i + 1) * stages);
      const bool has_next = i + 1 < count;
      if (!has_next || now.ends_rows(plan)) {
        const int of = now.tile * plan.token_tiles + token_tile,
                  split = block - plan.block_of(now.tile * plan.parts);
#pragma unroll
        for (int t = 0; t < kTeams; ++t) {
          gpu::warpgroup_fence_operand(sums[t]);
          float* const to =
              args.partial +
              ((int64_t(of) * plan.splits + split) * kRows + t * kPairRows + warp * 16 + lane / 4) * kTokens +
              lane % 4 * 2;
#pragma unroll
          for (int n = 0; n < kTokens / 8; ++n) {
            *reinterpret_cast<float2*>(to + n * 8) = {sums[t][4 * n], sums[t][4 * n + 1]};
            *reinterpret_cast<float2*>(to + 8 * kTokens + n * 8) = {sums[t][4 * n + 2], sums[t][4 * n + 3]};
          }
#pragma unroll
          for (float& sum : sums[t]) sum = 0;
        }
      }
      now.advance(plan);
    }
    return;
  }

  // ---- Decompression ----

  gpu::warpgroup_reg_dealloc<kTeamRegisters>();
  const int slice = warp % 2, quarter = warp / 2;
  const uint32_t tile = gpu::shared_address(memory.tiles[team]),
                 lane_tile = tile + uint32_t(lane / 4) * outer + uint32_t(lane % 4 * 4 + slice * 2),
                 run_shift = uint32_t(kColumnShift + 31 - __clz(plan.apart)),
                 run_step = 16 - uint32_t(plan.apart) * kColumn;
  // Offsets of the slice's chunks in a part, and the weight.
  const auto run_of = [&](const Pass& of) {
    const int window = of.tile / kTilesOfWindow,
              of_window = (of.tile % kTilesOfWindow * kTeams + team) * 2 + slice,
              w = weight_of_tile(args.weights, args.count, window);
    const SellWeight<T> weight = pick(args.weights, w);
    const int64_t at = (int64_t(window - weight.first_tile) * args.x.parts + of.part) * 8 + of_window;
    return Run{w, weight.offsets[at], weight.offsets[at + 1]};
  };
  // Chunks `begin` to `end` of a run.
  const auto share_of = [&](const Run& run, int begin, int end) {
    const SellWeight<T> weight = pick(args.weights, run.weight);
    const int64_t from = int64_t(run.begin + begin) * kWarp + lane;
    return Share{weight.values + from, weight.gaps + from, end - begin};
  };
  const auto quarter_of = [&](const Run& run) {
    const int chunks = run.end - run.begin;
    return share_of(run, chunks * quarter / kQuarters, chunks * (quarter + 1) / kQuarters);
  };
  const auto prefetch = [&](const Share& share) {
    if (lane > 0 || share.count == 0) return;
    gpu::bulk_prefetch_l2(share.values, uint32_t(share.count) * kWarp * uint32_t(sizeof(uint4)));
    gpu::bulk_prefetch_l2(share.gaps, uint32_t(share.count) * kWarp * uint32_t(sizeof(uint32_t)));
  };
  SellChunk ahead[kAhead];
  uint32_t gaps_ahead[kGapsAhead];  // of the chunks after these
  const auto load = [&](int a, const uint4* values, const uint32_t* gaps, int left) {
    ahead[a].gaps = 0;
    if (a < left) ahead[a].load(values + a * kWarp, gaps + a * kWarp);
  };
  const auto load_gaps = [&](const Share& share) {
#pragma unroll
    for (int g = 0; g < kGapsAhead; ++g) {
      gaps_ahead[g] = 0;
      if (kAhead + g < share.count) gaps_ahead[g] = share.gaps[(kAhead + g) * kWarp];
    }
  };
  // Says how many columns the warp's chunks cover, of which the first have been asked for.
  const auto cover = [&](const Share& share, int parity) {
    if (quarter + 1 == kQuarters) return;
    uint32_t sum = uint32_t(share.count) * uint32_t(sell_delta4::kEntries) * kColumn;
    for (int c = kAhead + kGapsAhead; c < share.count; ++c) sum = add_distances(share.gaps[c * kWarp], sum);
#pragma unroll
    for (int a = 0; a < kAhead; ++a) sum = add_distances(ahead[a].gaps, sum);
#pragma unroll
    for (int g = 0; g < kGapsAhead; ++g) sum = add_distances(gaps_ahead[g], sum);
    memory.covered[parity][team][slice][quarter][lane] = sum;
  };
  const auto place_after_others = [&](uint32_t place, int parity) {
#pragma unroll
    for (int q = 0; q + 1 < kQuarters; ++q)
      if (q < quarter) place += memory.covered[parity][team][slice][q][lane];
    return place;
  };
  const auto sync_team = [&] { gpu::sync_named(1 + team, kTeamThreads); };
  // Clears the tile; after it where quarters begin is known.
  const auto begin_tile = [&](int parity) {
    memory.multiplied[team].wait(uint32_t(parity) ^ 1);
#pragma unroll 4
    for (uint32_t i = uint32_t(thread) * 16; i < 8 * outer; i += kTeamThreads * 16)
      asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(tile + i), "r"(0) : "memory");
    sync_team();
  };
  const auto end_tile = [&] {
    gpu::fence_async_shared();
    __syncwarp();
    if (lane == 0) memory.filled[team].arrive();
  };

  if (!args.constant) gpu::grid_dependency_wait();
  if (plan.passes == 1) {
    const uint32_t limit = uint32_t(args.x.width) * kColumn;
    Run later{0, 0, 0};  // after `next`
    Share share = quarter_of(run_of(now)), next{nullptr, nullptr, 0};
    const auto look_ahead = [&](int i) {
      next = quarter_of(later);
      prefetch(next);
      later = {0, 0, 0};
      if (i + 2 < count) now.advance(plan), later = run_of(now);
    };
    if (count > 1) now.advance(plan), later = run_of(now);
#pragma unroll
    for (int a = 0; a < kAhead; ++a) load(a, share.values, share.gaps, share.count);
    load_gaps(share);
    look_ahead(0);
    for (int i = 0; i < count; ++i) {
      const int parity = i & 1;
      cover(share, parity);
      begin_tile(parity);
      uint32_t place = place_after_others(0u - kColumn, parity);
      const uint4* values = share.values;
      const uint32_t* gaps = share.gaps;
      for (int left = share.count; left >= 0; left -= kAhead) {
        // After the last chunks come those of the next part.
        const bool is_last = left <= kAhead;
        values = is_last ? next.values : values + kAhead * kWarp;
        gaps = is_last ? next.gaps : gaps + kAhead * kWarp;
        const int after = is_last ? next.count : left - kAhead;
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          if (a < left) place = put_chunk(ahead[a], place, limit, lane_tile, run_shift, run_step);
          load(a, values, gaps, after);
        }
        if (is_last) break;
      }
      load_gaps(next);
      end_tile();
      share = next;
      look_ahead(i + 1);
    }
  } else {
    // Where a quarter begins depends on the pass before.
    Run run = run_of(now);
    for (int i = 0; i < count; ++i) {
      const int pass = now.pass, parity = i & 1, before = pass * plan.columns;
      int begin = 0;
      uint32_t place = 0u - kColumn;
      if (pass > 0) {
        int found = kQuarters - 1;
#pragma unroll
        for (int q = kQuarters - 2; q >= 0; --q)
          if (memory.chunks[team][slice][q] >= 0) found = q;
        begin = memory.chunks[team][slice][found], place = memory.places[team][slice][found][lane];
      }
      // Passes are about equally long; what is left of this one belongs to the last quarter.
      const int chunks = run.end - run.begin, left = plan.passes - pass,
                part = (chunks - begin + left - 1) / left;
      int chunk = begin + part * quarter / kQuarters;
      const int end = quarter + 1 < kQuarters ? begin + part * (quarter + 1) / kQuarters : chunks;
      Share share = share_of(run, chunk, end);
#pragma unroll
      for (int a = 0; a < kAhead; ++a) load(a, share.values, share.gaps, share.count);
      load_gaps(share);
      now.advance(plan);
      if (i + 1 < count && now.pass == 0) {
        run = run_of(now);
        prefetch(quarter_of(run));
      }
      cover(share, parity);
      begin_tile(parity);
      place = place_after_others(place, parity);
      const uint32_t limit = uint32_t(min(plan.columns, args.x.width - before)) * kColumn;
      bool done = __all_sync(0xFFFFFFFFu, int(place + kColumn) >= int(limit));
      int continues = done ? chunk : -1;
      uint32_t kept = place;
      while (chunk < end && !done) {
        share.values += kAhead * kWarp, share.gaps += kAhead * kWarp, share.count -= kAhead;
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          if (chunk >= end || done) break;
          const uint32_t after = put_chunk(ahead[a], place, limit, lane_tile, run_shift, run_step);
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
      if (continues < 0 && quarter + 1 == kQuarters) continues = end, kept = place;
      memory.places[team][slice][quarter][lane] = kept - limit;
      if (lane == 0) memory.chunks[team][slice][quarter] = continues;
      end_tile();
      sync_team();  // where the next pass begins is known
    }
  }
  if (args.constant) gpu::grid_dependency_wait();
}

}  // namespace tessera::ops::sparse

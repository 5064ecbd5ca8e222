#pragma once

#include "gpu/dependent_launch.cuh"
#include "gpu/mma.cuh"
#include "ops/sparse_linear/joint.cuh"
#include "ops/sparse_linear/sell.cuh"

/// Up to kJointWeights sell_delta4 weights over the same x, with tensor cores: variant "sell_mma". Two
/// kernels: multiply_slices_mma writes sums over a part of the columns, add_teams adds them and writes y.
///
/// A window of 256 rows belongs to a team of up to 8 blocks, which have a part of the columns each, or every
/// eighth. Teams only divide work: no block waits for another. A block works on two pairs of slices at a
/// time, each in a tile of shared memory, each with a group of 8 warps, which
///   1. decompress the pair into the tile, a quarter of a slice's chunks per warp. Where a quarter begins
///      follows from the distances of those before it, which their warps add up first;
///   2. multiply the tile with x by mma.m16n8k16, each warp some of the columns;
///   3. add the warps' sums, which they exchange in the tile's memory, and fill the tile with zeros.
/// While one group decompresses, the other one multiplies; what a warp decompresses next is on its way into
/// registers in the meantime.
///
/// Layout of a tile: [512 columns][32 lanes][2 slices] of 16 bits, and 16 bytes more after every 64 columns.
/// A lane writes elements of its own row alone, so that each lane has a bank of its own, whatever its column
/// is, as long as the lanes of a warp are within 64 columns of each other. ldmatrix.trans makes A of it: its
/// 8 rows of 16 bytes are columns 64 apart, which the extra bytes put into different banks. Which columns
/// belong to which k is free, as long as x agrees.
///
/// A part of more than 512 columns takes several passes. Lanes are not equally far after a chunk, so that the
/// chunks around a limit are read in both passes: an element of the other pass goes to an unused
/// column past the tile.
///
/// x is kept in shared memory as B fragments, gated when it is loaded, as long as columns, tokens and gate
/// are the same. Sums are f32 in a fixed order: k within a warp, warps, passes and parts of a block, blocks.

namespace tessera::ops::sparse {

namespace mma {

constexpr int kGroups = 2, kGroupWarps = 8, kGroupThreads = kGroupWarps * kWarp,
              kThreads = kGroups * kGroupThreads;
constexpr int kQuarters = 4;  // of a slice's chunks
constexpr int kPassColumns = 512;
constexpr int kPairsOfGroup = 2;  // a window has 4 pairs of slices
constexpr uint32_t kColumnBytes = 2 * kWarp * 2, kPassBytes = kPassColumns * kColumnBytes;
/// Places count kColumnBytes per column. In memory 16 bytes more follow every 64 columns.
constexpr int kSkewShift = 13;
static_assert(64 * kColumnBytes == 1u << kSkewShift);
__host__ __device__ constexpr uint32_t skewed(uint32_t place) {
  return place + (place >> kSkewShift) * 16;
}
constexpr uint32_t kTileSpan = kPassBytes + 8 * kColumnBytes,  // the last columns: what belongs to none
    kTileBytes = skewed(kTileSpan) + 16, kTileStride = 9u << kSkewShift;
static_assert(kTileBytes <= kTileStride);
constexpr int kStepColumns = 32;  // of x and A: two steps of k

/// Floats between rows of sums: such that the rows of half a warp lie in different banks.
template <int kTokens>
constexpr int kSumPitch = kTokens == 8 ? 8 : kTokens + 8;

template <int kTokens>
struct Memory {
  uint4 x[kPassColumns / kStepColumns][kTokens / 8][kWarp];             // B of two steps of k
  alignas(16) float sums[kGroups][kPairsOfGroup][2 * kWarp * kTokens];  // of passes and parts so far
  uint32_t covered[8][kQuarters][kWarp];  // bytes of columns that a quarter of a slice covers
  uint32_t places[8][kQuarters][kWarp];   // where the next pass of a slice begins, if it lies in that quarter
  int chunks[8][kQuarters];               // its first chunk, or -1
  // The tiles, at a multiple of 64 columns, so that places may be absolute.
  alignas(16) char tiles[(1 << kSkewShift) + kTileStride + kTileBytes + skewed(kMostShared) - kMostShared];
};

template <class T>
struct Args {
  SellWeight<T> weights[kJointWeights];
  SellInputs<T> x;
  int count;  // weights
  int units;  // windows of all weights times tiles of tokens
  int token_tiles;
  int blocks;  // of a team
  int teams;
  float* partial;  // (unit, block of the team, tokens / 8, row of the window in sorted order, 8 tokens)
  bool constant;   // all weights
  bool has_packs;  // rows of x begin at multiples of 16 bytes
  bool has_gates;
};

/// What a warp decompresses: its quarter of a slice of a pair, in a pass.
struct Fill {
  int unit, part, pass, pair;
};

/// Chunks of a slice in a part of a weight.
struct Run {
  int weight, begin, chunks;
};

/// Puts the elements of a chunk into the tile and returns the lane's place after it. `place`: of the column
/// before, absolute and at most that of the tile's end; or, where elements of an earlier pass occur (kWide),
/// relative to `tile`: those are negative, and without a sign the largest, so that they go to `stray`, the
/// lane's place past the tile, like those of later passes.
template <bool kWide>
__device__ __forceinline__ uint32_t put_chunk(const SellChunk& chunk, uint32_t place, uint32_t stray,
                                              uint32_t tile) {
  // Byte w: columns up to entries 2w and 2w + 1, each counted as its distance and itself; at most 128.
  const uint32_t even = (chunk.gaps & 0x0F0F0F0Fu) + 0x01010101u,
                 pairs = even + (chunk.gaps >> 4 & 0x0F0F0F0Fu) + 0x01010101u, before = pairs * 0x01010100u,
                 first = before + even, second = before + pairs;
  const uint32_t words[4] = {chunk.values.x, chunk.values.y, chunk.values.z, chunk.values.w};
  const auto put = [&](uint32_t to, uint32_t bits) {
    if constexpr (kWide)
      to = skewed(min(to, stray)) + tile;
    else
      to = skewed(to);
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(uint16_t(bits)) : "memory");
  };
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    put(__dp4a(first, kColumnBytes << w * 8, place), words[w]);
    put(__dp4a(second, kColumnBytes << w * 8, place), words[w] >> 16);
  }
  return __dp4a(second, kColumnBytes << 24, place);
}

/// Adds the distances of a chunk to `sum`.
__device__ __forceinline__ uint32_t add_distances(uint32_t gaps, uint32_t sum) {
  return __dp4a((gaps & 0x0F0F0F0Fu) + (gaps >> 4 & 0x0F0F0F0Fu), 0x01010101u, sum);
}

/// Four inputs of a token from column j on, under the gate; zeros from `end` on.
template <class T>
__device__ __forceinline__ uint2 load_four(const Args<T>& args, const DeviceGate& gate, int token, int j,
                                           int end) {
  uint2 words{};
  if (token >= args.x.tokens || j >= end) return words;
  const T* const from = args.x.x + int64_t(token) * args.x.stride + j;
  if (args.has_packs && j + 4 <= end && gate.is_open) return *reinterpret_cast<const uint2*>(from);
  uint32_t word[2] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (j + i < end) {
      const T x = from[i];
      if (gate.counts(token, j + i, float(x))) word[i / 2] |= uint32_t(x.bits) << i % 2 * 16;
    }
  return {word[0], word[1]};
}

}  // namespace mma

template <class T, int kTokens>
__global__ void __launch_bounds__(mma::kThreads, 1)
    multiply_slices_mma(const __grid_constant__ mma::Args<T> args) {
  using namespace mma;
  // A warp has every kSplits-th step of the columns, and all tokens or half of them, kTiles times 8.
  constexpr int kHalves = kTokens == 32 ? 2 : 1, kSplits = kGroupWarps / kHalves,
                kTiles = kTokens / 8 / kHalves;
  // Chunks that a warp has loaded when it begins to decompress; those that were asked for before the MMAs,
  // as many as registers allow.
  constexpr int kAhead = kTokens == 32 ? 8 : 9, kEarly = kTokens == 8 ? 8 : 5;
  constexpr int kPairSums = 2 * kWarp * kTokens;
  using Partial = float[kSplits][2 * kWarp][kSumPitch<kTokens>];
  static_assert(sizeof(Partial) <= kTileBytes);
  static_assert(sizeof(Memory<kTokens>) <= kMostShared);
  extern __shared__ __align__(128) char dynamic[];
  Memory<kTokens>& memory = *reinterpret_cast<Memory<kTokens>*>(dynamic);
  gpu::launch_dependents();
  const int lane = int(threadIdx.x) % kWarp, group = int(threadIdx.x) / kGroupThreads,
            thread = int(threadIdx.x) % kGroupThreads, warp = thread / kWarp, g = lane / 4, t = lane % 4;
  // Units of work are windows times tiles of tokens.
  const int rank = int(blockIdx.x) % args.blocks, team = int(blockIdx.x) / args.blocks;
  const int passes = (args.x.width + kPassColumns - 1) / kPassColumns;
  // Where the tile's place 0 is, and what it is in memory.
  const uint32_t origin = (((gpu::shared_address(memory.tiles) - 1) >> kSkewShift) + 1 << kSkewShift) +
                          uint32_t(group) * kTileStride;
  const uint32_t tile = skewed(origin);
  char* const tile_memory = memory.tiles + (tile - gpu::shared_address(memory.tiles));

  // ---- Decompression ----

  const int of_pair = warp % 2, quarter = warp / 2;  // slice of the pair, and quarter of its chunks
  const auto slice_of = [&](int pair) { return 2 * (group + kGroups * pair) + of_pair; };
  const auto next = [&](Fill fill) {
    if (++fill.pair < kPairsOfGroup) return fill;
    fill.pair = 0;
    if (++fill.pass < passes) return fill;
    fill.pass = 0;
    if ((fill.part += args.blocks) < args.x.parts) return fill;
    fill.part = rank;
    fill.unit += args.teams;
    return fill;
  };
  const auto run_of = [&](const Fill& fill) {
    if (fill.unit >= args.units) return Run{0, 0, 0};
    const int window = fill.unit / args.token_tiles, w = weight_of_tile(args.weights, args.count, window);
    const SellWeight<T> weight = pick(args.weights, w);
    const int64_t index =
        (int64_t(window - weight.first_tile) * args.x.parts + fill.part) * 8 + slice_of(fill.pair);
    const int begin = weight.offsets[index];
    return Run{w, begin, weight.offsets[index + 1] - begin};
  };
  const auto prefetch = [&](const Fill& fill, const Run& run) {
    if (lane > 0 || quarter > 0 || fill.pass > 0 || run.chunks == 0) return;
    const SellWeight<T> weight = pick(args.weights, run.weight);
    const int64_t from = int64_t(run.begin) * kWarp;
    gpu::bulk_prefetch_l2(weight.values + from, uint32_t(run.chunks) * kWarp * uint32_t(sizeof(uint4)));
    gpu::bulk_prefetch_l2(weight.gaps + from, uint32_t(run.chunks) * kWarp * uint32_t(sizeof(uint32_t)));
  };
  SellChunk ahead[kAhead];
  int chunk = 0, end = 0;                                 // of this warp
  const uint32_t own = uint32_t(lane * 4 + of_pair * 2);  // of the lane in a column
  uint32_t place = 0;  // where the slice begins in the pass, relative to the tile
  const uint4* values = nullptr;
  const uint32_t* gaps = nullptr;
  const auto open = [&](const Fill& fill, const Run& run) {
    const int slice = slice_of(fill.pair);
    int begin = 0;
    place = own - kColumnBytes;
    if (fill.pass > 0) {
      int found = kQuarters - 1;
#pragma unroll
      for (int q = kQuarters - 2; q >= 0; --q)
        if (memory.chunks[slice][q] >= 0) found = q;
      begin = memory.chunks[slice][found], place = memory.places[slice][found][lane];
    }
    const int all = run.chunks - begin, share = (all + kQuarters - 1) / kQuarters;
    chunk = begin + min(all, quarter * share);
    end = begin + min(all, (quarter + 1) * share);
    const SellWeight<T> weight = pick(args.weights, run.weight);
    const int64_t from = int64_t(run.begin + chunk) * kWarp + lane;
    values = weight.values + from, gaps = weight.gaps + from;
#pragma unroll
    for (int a = 0; a < kEarly; ++a) {
      ahead[a].gaps = 0;
      if (chunk + a < end) ahead[a].load(values + a * kWarp, gaps + a * kWarp);
    }
  };
  const auto open_rest = [&] {
#pragma unroll
    for (int a = kEarly; a < kAhead; ++a) {
      ahead[a].gaps = 0;
      if (chunk + a < end) ahead[a].load(values + a * kWarp, gaps + a * kWarp);
    }
  };
  const auto reload = [&](int a) {
    if (chunk + kAhead + a < end) ahead[a].load(values + (kAhead + a) * kWarp, gaps + (kAhead + a) * kWarp);
  };
  const auto advance = [&] { chunk += kAhead, values += kAhead * kWarp, gaps += kAhead * kWarp; };
  const auto fill = [&]<bool kWide>(int pair) {
    const int slice = slice_of(pair);
    if (quarter + 1 < kQuarters) {
      // Where the next quarters begin.
      uint32_t sum = uint32_t(end - chunk) * uint32_t(sell_delta4::kEntries);
      for (int c = kAhead; chunk + c < end; ++c) sum = add_distances(gaps[c * kWarp], sum);
#pragma unroll
      for (int a = 0; a < kAhead; ++a) sum = add_distances(ahead[a].gaps, sum);
      memory.covered[slice][quarter][lane] = sum * kColumnBytes;
    }
    gpu::sync_named(1 + group, kGroupThreads);  // and the tile is zero
#pragma unroll
    for (int q = 0; q + 1 < kQuarters; ++q)
      if (q < quarter) place += memory.covered[slice][q][lane];
    if constexpr (!kWide) {
      const uint32_t last = origin + own + kPassBytes - kColumnBytes;
      place += origin;
      for (; chunk < end; advance()) {
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          if (chunk + a >= end) break;
          // What fills up a row may lie past the tile; no distance there is above 0.
          place = put_chunk<false>(ahead[a], min(place, last), 0, 0);
          reload(a);
        }
      }
    } else {
      constexpr int kLimit = int(kPassBytes), kDone = kLimit - int(kColumnBytes);
      bool done = __all_sync(0xFFFFFFFFu, int(place) >= kDone);
      int continues = done ? chunk : -1;
      uint32_t kept = place;
      for (; chunk < end && !done; advance()) {
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          if (chunk + a >= end || done) break;
          const uint32_t after = put_chunk<true>(ahead[a], place, kPassBytes + own, tile);
          reload(a);
          if (continues < 0 && __any_sync(0xFFFFFFFFu, int(after) >= kLimit)) {
            continues = chunk + a;
            kept = place;
          }
          place = after;
          done = __all_sync(0xFFFFFFFFu, int(place) >= kDone);
          if (done && continues < 0) {
            continues = chunk + a + 1;
            kept = place;
          }
        }
      }
      if (continues < 0 && quarter + 1 == kQuarters) continues = end, kept = place;
      memory.places[slice][quarter][lane] = kept - kPassBytes;
      if (lane == 0) memory.chunks[slice][quarter] = continues;
    }
  };

  // ---- Before x ----

  if (!args.constant) gpu::grid_dependency_wait();
  Fill after{.unit = team, .part = rank, .pass = 0, .pair = 0};  // what comes after the present one
  Run later = run_of(after);
  open(after, later);
  open_rest();
  after = next(after);
  later = run_of(after);
  for (uint32_t i = uint32_t(thread); i < kTileBytes / 16; i += kGroupThreads)
    reinterpret_cast<uint4*>(tile_memory)[i] = {};
  gpu::grid_dependency_wait();

  // ---- Units ----

  int x_pass = -1, x_token = -1, x_weight = -1;
  for (int unit = team; unit < args.units; unit += args.teams) {
    const int global_window = unit / args.token_tiles, first_token = unit % args.token_tiles * kTokens;
    const int w = weight_of_tile(args.weights, args.count, global_window);
    for (int part = rank; part < args.x.parts; part += args.blocks)
      for (int pass = 0; pass < passes; ++pass) {
        const bool is_first = part == rank && pass == 0,
                   is_last = part + args.blocks >= args.x.parts && pass + 1 == passes;
        const int first = part * args.x.width + pass * kPassColumns,
                  columns = min(kPassColumns, args.x.width - pass * kPassColumns),
                  steps = (columns + kStepColumns - 1) / kStepColumns, apart = steps * 4;
        if (const int key = part * passes + pass;
            key != x_pass || first_token != x_token || (w != x_weight && args.has_gates)) {
          const DeviceGate gate = pick(args.weights, w).gate;
          const int stop = min(first + columns, args.x.in), step = int(threadIdx.x) / kWarp;
          static_assert(kThreads / kWarp == kPassColumns / kStepColumns);
          uint2 loaded[kTokens / 8][2];
#pragma unroll
          for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const int column = (2 * t + i) * apart + 4 * step;
              loaded[n][i] = {};
              if (step < steps)
                loaded[n][i] = load_four(args, gate, first_token + 8 * n + g, first + column, stop);
            }
          if (x_pass < 0) prefetch(after, later);
          if (x_pass >= 0) __syncthreads();  // the one before is read
#pragma unroll
          for (int n = 0; n < kTokens / 8; ++n)
            memory.x[step][n][lane] = {__byte_perm(loaded[n][0].x, loaded[n][1].x, 0x5410),
                                       __byte_perm(loaded[n][0].x, loaded[n][1].x, 0x7632),
                                       __byte_perm(loaded[n][0].y, loaded[n][1].y, 0x5410),
                                       __byte_perm(loaded[n][0].y, loaded[n][1].y, 0x7632)};
          __syncthreads();
          x_pass = key, x_token = first_token, x_weight = w;
        }
#pragma unroll 1
        for (int pair = 0; pair < kPairsOfGroup; ++pair) {
          if (passes == 1)
            fill.template operator()<false>(pair);
          else
            fill.template operator()<true>(pair);
          gpu::sync_named(1 + group, kGroupThreads);
          open(after, later);
          after = next(after);
          later = run_of(after);
          prefetch(after, later);

          const int split = warp % kSplits, half = warp / kSplits;
          float acc[4][kTiles][4] = {};
          // Rows of the 8 x 8 matrices that the lane names: columns `apart` from each other.
          const int named = lane / 16 + lane % 8 * apart;
#pragma unroll 1
          for (int step = split; step < (half < kHalves ? steps : 0); step += kSplits) {
            uint4 x[kTiles];
#pragma unroll
            for (int n = 0; n < kTiles; ++n) x[n] = memory.x[step][half * kTiles + n][lane];
            const uint32_t from =
                tile + skewed(uint32_t(named + 4 * step) * kColumnBytes) + lane / 8 % 2 * 16;
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
              for (int m = 0; m < 4; ++m) {
                uint32_t a[4];
                gpu::ldmatrix_x4_trans(a, from + uint32_t(2 * h) * kColumnBytes + uint32_t(m) * 32);
#pragma unroll
                for (int n = 0; n < kTiles; ++n)
                  gpu::mma_m16n8k16<T>(acc[m][n], a, h ? x[n].z : x[n].x, h ? x[n].w : x[n].y);
              }
          }

          // The tile has been read: the sums of the warps are exchanged there.
          gpu::sync_named(1 + group, kGroupThreads);
          auto& partial = *reinterpret_cast<Partial*>(tile_memory);
#pragma unroll
          for (int m = 0; m < 4; ++m)
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
              for (int s = 0; s < 2; ++s)
                *reinterpret_cast<float2*>(
                    &partial[split][16 * m + 8 * s + g][8 * (half * kTiles + n) + 2 * t]) =
                    float2{acc[m][n][2 * s], acc[m][n][2 * s + 1]};
          open_rest();
          gpu::sync_named(1 + group, kGroupThreads);
          for (int i = thread * 4; i < kPairSums; i += kGroupThreads * 4) {
            // Row 2 l + s of the tile is that of lane l in slice s.
            const int row = i / kTokens, sorted = row % 2 * kWarp + row / 2;
            float4 total = *reinterpret_cast<const float4*>(&partial[0][i / kTokens][i % kTokens]);
#pragma unroll
            for (int other = 1; other < kSplits; ++other) {
              const float4 more = *reinterpret_cast<const float4*>(&partial[other][i / kTokens][i % kTokens]);
              total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
            }
            auto& sum = *reinterpret_cast<float4*>(&memory.sums[group][pair][i]);
            if (!is_first) {
              const float4 old = sum;
              total.x += old.x, total.y += old.y, total.z += old.z, total.w += old.w;
            }
            if (is_last)
              *reinterpret_cast<float4*>(
                  args.partial +
                  ((int64_t(unit) * args.blocks + rank) * (kTokens / 8) + i % kTokens / 8) * (kWindow * 8) +
                  ((group + kGroups * pair) * 2 * kWarp + sorted) * 8 + i % 8) = total;
            else
              sum = total;
          }
          gpu::sync_named(1 + group, kGroupThreads);
          const uint32_t used =
              max(skewed(uint32_t(steps * kStepColumns) * kColumnBytes), uint32_t(sizeof(Partial)));
#pragma unroll 4
          for (uint32_t i = uint32_t(thread) * 16; i < used; i += kGroupThreads * 16)
            asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(tile + i), "r"(0) : "memory");
        }
      }
  }
}

/// Adds the sums of a team's blocks, in their order. A block has a window and 8 of `tokens` tokens.
template <class T>
__global__ void __launch_bounds__(kWindow) add_teams(const __grid_constant__ mma::Args<T> args, int tokens) {
  __shared__ float sums[8][kWindow];
  const int unit = int(blockIdx.x), window = unit / args.token_tiles,
            first_token = unit % args.token_tiles * tokens + int(blockIdx.y) * 8, thread = int(threadIdx.x);
  const SellWeight<T> weight = pick(args.weights, weight_of_tile(args.weights, args.count, window));
  const int first_row = (window - weight.first_tile) * kWindow;
  gpu::wait_and_launch_dependents();
  const auto* const rows = reinterpret_cast<const uint8_t*>(weight.rows) + first_row;
  const int64_t of_block = int64_t(tokens) * kWindow;
  const float* const from =
      args.partial + int64_t(unit) * args.blocks * of_block + blockIdx.y * (kWindow * 8);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = half * kWindow + thread, row = rows[i / 2], token = i % 2 * 4;
    float4 parts[8];
#pragma unroll
    for (int block = 0; block < 8; ++block) {
      parts[block] = {};
      if (block < args.blocks)
        parts[block] = *reinterpret_cast<const float4*>(from + block * of_block + i * 4);
    }
#pragma unroll
    for (int block = 1; block < 8; ++block) {
      parts[0].x += parts[block].x, parts[0].y += parts[block].y;
      parts[0].z += parts[block].z, parts[0].w += parts[block].w;
    }
    sums[token][row] = parts[0].x, sums[token + 1][row] = parts[0].y;
    sums[token + 2][row] = parts[0].z, sums[token + 3][row] = parts[0].w;
  }
  __syncthreads();
  if (first_row + thread >= weight.to.out) return;
#pragma unroll
  for (int t = 0; t < 8; ++t)
    if (first_token + t < args.x.tokens)
      weight.to.store(first_token + t, first_row + thread, sums[t][thread]);
}

}  // namespace tessera::ops::sparse

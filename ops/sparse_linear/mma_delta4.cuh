#pragma once

#include "gpu/dependent_launch.cuh"
#include "gpu/mma.cuh"
#include "gpu/shared.cuh"
#include "ops/sparse_linear/joint.cuh"
#include "ops/sparse_linear/sell.cuh"

/// Up to kJointWeights mma_delta4 weights over the same x, with tensor cores: variant "mma". Two kernels:
/// multiply_streams writes sums over a part of the columns, add_parts adds them and writes y.
///
/// A unit of work is a strip of 16 rows in a part of the columns (sparse_weight.h), times a tile of tokens. A
/// warp decompresses the unit's two streams into a tile of its own in shared memory and multiplies it with x
/// by mma.m16n8k16. A lane writes what it will read itself as words of an A fragment, so there is neither an
/// exchange nor a barrier between warps: 12 of them, at different points of their units, fill each other's
/// gaps. What a warp decompresses next is on its way into registers meanwhile.
///
/// Layout of a tile: [4 kTiles words][32 lanes]. Position p of the first stream is the lower half of word p
/// of its lane, of the second stream the upper half: so words are pairs of k, whatever their columns, as
/// long as x agrees; each lane has a bank of its own; and an element's address follows from the sum of
/// distances by one dot product of bytes (dp4a). Entries past an odd number of tiles are zeros in the next
/// one, which is read and cleared with the others.
///
/// x of a part is kept in shared memory as words of B fragments, gated when it is loaded. Sums are f32 in a
/// fixed order: k within a part, parts. With few tokens memory is the limit, 2.5 bytes per stored element and
/// 10 % more, of whose rate half is reached (docs/ops/sparse_linear.md); with 32 shared memory: per 16 x 16
/// elements 4 wavefronts for words of A, 4 to make them 0 again, 8 for B, and one per entry of a lane.

namespace tessera::ops::sparse {

namespace streams {

constexpr int kWarps = kMmaWarps, kThreads = kWarps * kWarp;
constexpr int kTiles = int(mma_delta4::kMostTiles), kTileBytes = kTiles * 4 * kWarp * 4;
constexpr int kStrip = int(mma_delta4::kStripRows), kStripsOfWindow = int(mma_delta4::kStrips),
              kStreamsOfGroup = kStripsOfWindow * int(mma_delta4::kStreams);
constexpr int kChunkWords = kWarp;  // of 16 bytes of values; words of distances
/// Chunks that are requested together. Two such batches are in registers.
constexpr int kBatch = 5;
/// Units of a warp whose streams' chunks its lanes know at a time.
constexpr int kUnitsKnown = kWarp / int(mma_delta4::kStreams);
constexpr int kAtOnce = 4;  // tiles that are read before they are multiplied
/// Bytes between tokens of x: those of 4 lanes' words in a tile lie in other banks than the next token's.
constexpr int kXPitch = kTiles * kWarp + kWarp;

template <int kTokens>
constexpr size_t kSharedBytes = size_t(kWarps) * kTileBytes + size_t(kTokens) * kXPitch;

template <class T>
struct Args {
  SellWeight<T> weights[kJointWeights];  // `rows`: places of rows
  const T* x;
  int64_t x_stride;
  int tokens, in, parts;
  int count;   // weights
  int strips;  // of all weights
  int token_tiles;
  float* partial;  // (tokens / 8, part, strip, its row, 8 tokens)
  bool constant;   // all weights
  bool has_packs;  // rows of x begin at multiples of 16 bytes
  bool has_gates;
  uint32_t zero;  // 0, which the compiler does not know
};

/// Some chunks of a stream.
struct Batch {
  int count;
  bool begins, ends;  // the stream; the unit
  bool is_second;     // stream of the unit
};

/// Puts the elements of a chunk into the tile, from position `place` on, and returns the one after it.
/// Positions count 4 kWarp bytes.
__device__ __forceinline__ uint32_t put_chunk(const SellChunk& chunk, uint32_t place) {
  // Byte w of `first` and `second`: the distances up to entries 2w and 2w + 1. The entries themselves count
  // as positions, too: those are offsets of the stores.
  const uint32_t even = chunk.gaps & 0x0F0F0F0Fu, pairs = even + (chunk.gaps >> 4 & 0x0F0F0F0Fu),
                 first = pairs * 0x01010100u + even, second = pairs * 0x01010101u;
  const uint32_t words[4] = {chunk.values.x, chunk.values.y, chunk.values.z, chunk.values.w};
  const auto put = [](uint32_t to, uint32_t bits) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(uint16_t(bits)) : "memory");
  };
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    put(__dp4a(first, 4u * kWarp << w * 8, place) + uint32_t(2 * w) * 4 * kWarp, words[w]);
    put(__dp4a(second, 4u * kWarp << w * 8, place) + uint32_t(2 * w + 1) * 4 * kWarp, words[w] >> 16);
  }
  return __dp4a(second, 4u * kWarp << 24, place) + 8 * 4 * kWarp;
}

__device__ __forceinline__ uint32_t load_word(uint32_t from) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
  return word;
}
__device__ __forceinline__ void store_pair(float* to, float x, float y) {
  asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
}

/// Eight inputs of a token, from column j on: those that the gate leaves out, and those past the matrix or
/// the tokens, are 0.
template <class T>
__device__ __forceinline__ uint4 load_eight(const Args<T>& args, const DeviceGate& gate, int token, int j) {
  if (token >= args.tokens || j >= args.in) return {};
  const T* const from = args.x + int64_t(token) * args.x_stride + j;
  if (args.has_packs && j + 8 <= args.in && gate.is_open) return *reinterpret_cast<const uint4*>(from);
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (j + i < args.in) {
      const T x = from[i];
      if (gate.counts(token, j + i, float(x))) words[i / 2] |= uint32_t(x.bits) << i % 2 * 16;
    }
  return {words[0], words[1], words[2], words[3]};
}

/// x of a part to shared memory: per token and tile, words of the tile's 8 columns in the first half of the
/// part and the 8 in the second.
template <class T, int kTokens>
__device__ __forceinline__ void load_part(char* to, const Args<T>& args, const DeviceGate& gate,
                                          int first_token, int first_tile, int tiles) {
  const int padded = (tiles + kAtOnce - 1) / kAtOnce * kAtOnce;
  for (int i = int(threadIdx.x); i < kTokens * padded; i += kThreads) {
    const int token = i / padded, tile = i % padded, column = first_tile * 16 + tile * 8;
    uint4 low{}, high{};
    if (tile < tiles) {
      low = load_eight(args, gate, first_token + token, column);
      high = load_eight(args, gate, first_token + token, column + tiles * 8);
    }
    uint4* const words = reinterpret_cast<uint4*>(to + token * kXPitch + tile * kWarp);
    words[0] = {__byte_perm(low.x, high.x, 0x5410), __byte_perm(low.x, high.x, 0x7632),
                __byte_perm(low.y, high.y, 0x5410), __byte_perm(low.y, high.y, 0x7632)};
    words[1] = {__byte_perm(low.z, high.z, 0x5410), __byte_perm(low.z, high.z, 0x7632),
                __byte_perm(low.w, high.w, 0x5410), __byte_perm(low.w, high.w, 0x7632)};
  }
}

/// Multiplies the warp's tile with x, makes it 0 again, and adds to `sums`.
template <class T, int kTokenTiles, int kChains>
__device__ __forceinline__ void multiply_tile(float (&sums)[kChains][kTokenTiles][4], uint32_t tile,
                                              const char* x, int tiles, int lane) {
  uint32_t from = tile + uint32_t(lane) * 4, zeros = tile + uint32_t(lane) * 16;
  x += lane / 4 * kXPitch + lane % 4 * 8;
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < tiles; i += kAtOnce) {
    uint32_t a[kAtOnce][4];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
      for (int w = 0; w < 4; ++w) a[j][w] = load_word(from + uint32_t(4 * j + w) * 4 * kWarp);
    uint2 b[kAtOnce][kTokenTiles];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n)
        b[j][n] = *reinterpret_cast<const uint2*>(x + n * 8 * kXPitch + j * kWarp);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(zeros + uint32_t(j) * 16 * kWarp), "r"(0)
                   : "memory");
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      // Words: row g in columns 2t and 2t + 1, then row g + 8.
      const uint32_t fragment[4] = {a[j][0], a[j][2], a[j][1], a[j][3]};
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n)
        gpu::mma_m16n8k16<T>(sums[j % kChains][n], fragment, b[j][n].x, b[j][n].y);
    }
    from += kAtOnce * 16 * kWarp, zeros += kAtOnce * 16 * kWarp, x += kAtOnce * kWarp;
  }
  __syncwarp();
}

}  // namespace streams

template <class T, int kTokens>
__global__ void __launch_bounds__(streams::kThreads, 1)
    multiply_streams(const __grid_constant__ streams::Args<T> args) {
  using namespace streams;
  constexpr int kTokenTiles = kTokens / 8, kChains = kTokens == 8 ? 2 : 1;
  static_assert(kSharedBytes<kTokens> <= size_t(kMostShared));
  extern __shared__ __align__(128) char tiles_and_x[];
  char* const x = tiles_and_x + kWarps * kTileBytes;
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const uint32_t tile = gpu::shared_address(tiles_and_x) + uint32_t(warp) * kTileBytes;
  gpu::launch_dependents();
  for (int i = lane * 16; i < kTileBytes; i += kWarp * 16)
    *reinterpret_cast<uint4*>(tiles_and_x + warp * kTileBytes + i) = {};
  __syncwarp();
  if (!args.constant) gpu::grid_dependency_wait();
  bool has_waited = !args.constant;

  // A block has consecutive units, in the order of tiles of tokens, parts, strips. Those of a part it cuts
  // among its warps.
  const int64_t units = int64_t(args.token_tiles) * args.parts * args.strips;
  const int64_t end = units * (blockIdx.x + 1) / gridDim.x;
  for (int64_t unit = units * blockIdx.x / gridDim.x; unit < end;) {
    const int part_of_all = int(unit / args.strips), part = part_of_all % args.parts,
              token_tile = part_of_all / args.parts, first_strip = int(unit % args.strips);
    int last_strip = int(min(int64_t(args.strips), first_strip + end - unit)), weight = 0;
    if (args.has_gates) {
      weight = weight_of_tile(args.weights, args.count, first_strip / kStripsOfWindow);
      if (weight + 1 < args.count)
        last_strip = min(last_strip, pick(args.weights, weight + 1).first_tile * kStripsOfWindow);
    }
    const int first_tile = int(mma_delta4::first_tile(args.in, part)),
              tiles = int(mma_delta4::first_tile(args.in, part + 1)) - first_tile;
    const int strips = last_strip - first_strip, from = first_strip + strips * warp / kWarps,
              to = first_strip + strips * (warp + 1) / kWarps;
    bool has_x = false;
    // At least once, because all warps load x.
    for (int strip = from; strip < to || !has_x; strip += kUnitsKnown) {
      const int streams = 2 * max(0, min(kUnitsKnown, to - strip));
      // Lane l knows the chunks of stream l.
      int known_begin = 0, known_count = 0;
      if (lane < streams) {
        const int window = (strip + lane / 2) / kStripsOfWindow;
        const SellWeight<T> of = pick(args.weights, weight_of_tile(args.weights, args.count, window));
        const int64_t index = (int64_t(window - of.first_tile) * args.parts + part) * kStreamsOfGroup +
                              (strip + lane / 2) % kStripsOfWindow * 2 + lane % 2;
        known_begin = of.offsets[index];
        known_count = of.offsets[index + 1] - known_begin;
      }
      int stream = -1, left = 0;
      const uint4* values = nullptr;
      const uint32_t* gaps = nullptr;
      const auto next = [&] {
        Batch batch{};
        if (left == 0) {
          batch.begins = true;
          if (++stream < streams) {
            left = __shfl_sync(0xFFFFFFFFu, known_count, stream);
            const int64_t chunk = __shfl_sync(0xFFFFFFFFu, known_begin, stream);
            const SellWeight<T> of =
                pick(args.weights,
                     weight_of_tile(args.weights, args.count, (strip + stream / 2) / kStripsOfWindow));
            values = of.values + chunk * kChunkWords + lane;
            gaps = of.gaps + chunk * kChunkWords + lane;
          }
        }
        batch.count = left > 8 ? 5 : left > 5 ? 4 : left;
        left -= batch.count;
        batch.is_second = stream % 2 == 1;
        batch.ends = batch.is_second && left == 0;
        return batch;
      };
      const auto request = [&](SellChunk(&chunks)[kBatch], const Batch& batch) {
#pragma unroll
        for (int j = 0; j < kBatch; ++j)
          if (j < batch.count) chunks[j].load(values + j * kChunkWords, gaps + j * kChunkWords);
        values += batch.count * kChunkWords, gaps += batch.count * kChunkWords;
      };
      // Waits for a batch before the next one is requested. Both have the same scoreboards: a wait for the
      // first after the request would be one for both.
      const auto arrive = [&](const SellChunk(&chunks)[kBatch]) {
        uint32_t bits = 0;
#pragma unroll
        for (int j = 0; j < kBatch; ++j) bits |= chunks[j].values.x | chunks[j].gaps;
        values += bits & args.zero, gaps += bits & args.zero;
      };
      SellChunk chunks[2][kBatch];
      Batch batch[2] = {next(), {}};
      request(chunks[0], batch[0]);

      if (!has_x) {
        if (!has_waited)
          gpu::grid_dependency_wait();
        else
          __syncthreads();  // x of the part before has been read
        has_waited = has_x = true;
        load_part<T, kTokens>(x, args, pick(args.weights, weight).gate, token_tile * kTokens, first_tile,
                              tiles);
        __syncthreads();
      }

      float* sums_to =
          args.partial +
          ((int64_t(token_tile) * kTokenTiles * args.parts + part) * args.strips + strip) * (kStrip * 8) +
          lane / 4 * 8 + lane % 4 * 2;
      uint32_t place = 0;
      const auto use = [&](const SellChunk(&chunks)[kBatch], const Batch& batch) {
        if (batch.begins) place = tile + uint32_t(lane) * 4 + (batch.is_second ? 2 : 0);
#pragma unroll
        for (int j = 0; j < kBatch; ++j)
          if (j < batch.count) place = put_chunk(chunks[j], place);
        if (!batch.ends) return;
        float sums[kChains][kTokenTiles][4] = {};
        multiply_tile<T>(sums, tile, x, tiles, lane);
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) {
          float(&sum)[4] = sums[0][n];
          if constexpr (kChains == 2)
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[i] += sums[1][n][i];
          float* const at = sums_to + int64_t(n) * args.parts * args.strips * (kStrip * 8);
          store_pair(at, sum[0], sum[1]);
          store_pair(at + 8 * 8, sum[2], sum[3]);
        }
        sums_to += kStrip * 8;
      };
      while (stream < streams) {
        batch[1] = next();
        arrive(chunks[0]);
        request(chunks[1], batch[1]);
        use(chunks[0], batch[0]);
        if (stream >= streams) break;
        batch[0] = next();
        arrive(chunks[1]);
        request(chunks[0], batch[0]);
        use(chunks[1], batch[1]);
      }
    }
    unit += strips;
  }
  if (!has_waited) gpu::grid_dependency_wait();
}

constexpr int kAddRows = 32, kAddSplits = 8, kAddThreads = kAddRows * kAddSplits;

/// Adds the sums of the parts: those of parts s, s + 8, ... first, then the eight. A block has 32 rows of a
/// window and 8 tokens, and without SwiGLU few enough registers to wait next to one of the kernel before.
/// With kSwiglu the rows are gate's, and y is silu(gate) up.
template <class T, bool kSwiglu>
__global__ void __launch_bounds__(kAddThreads, kSwiglu ? 4 : 6)
    add_parts(const __grid_constant__ streams::Args<T> args) {
  using namespace streams;
  constexpr int kPartsAtOnce = 2, kOf = kSwiglu ? 2 : 1;
  __shared__ float sums[kOf][8][kAddRows];
  const int thread = int(threadIdx.x), split = thread % kAddSplits,
            window = int(blockIdx.x) / (kWindow / kAddRows),
            first = int(blockIdx.x) % (kWindow / kAddRows) * kAddRows, row = first + thread / kAddSplits;
  const int index = kSwiglu ? 0 : weight_of_tile(args.weights, args.count, window);
  const SellWeight<T> weight = pick(args.weights, index);
  const int of_weight = window - weight.first_tile;
  bool has_waited = false;
#pragma unroll
  for (int of = 0; of < kOf; ++of) {
    const int first_window = of == 0 ? weight.first_tile : args.weights[1].first_tile;
    const auto* const places =
        reinterpret_cast<const uint8_t*>(of == 0 ? weight.rows : args.weights[1].rows) +
        int64_t(of_weight) * args.parts * kWindow + row;
    const float* const from = args.partial + (int64_t(blockIdx.y) * args.parts * args.strips +
                                              (first_window + of_weight) * kStripsOfWindow) *
                                                 (kStrip * 8);
    int place[kPartsAtOnce] = {};
    const auto load_places = [&](int part) {
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i)
        if (part + i * kAddSplits < args.parts) place[i] = places[int64_t(part + i * kAddSplits) * kWindow];
    };
    if (args.constant) load_places(split);
    if (!has_waited) gpu::wait_and_launch_dependents();
    has_waited = true;
    if (!args.constant) load_places(split);
    float total[8] = {};
    for (int part = split; part < args.parts; part += kPartsAtOnce * kAddSplits) {
      float4 loaded[kPartsAtOnce][2];
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i) {
        loaded[i][0] = loaded[i][1] = {};
        if (part + i * kAddSplits >= args.parts) continue;
        const auto* const at = reinterpret_cast<const float4*>(
            from + int64_t(part + i * kAddSplits) * args.strips * (kStrip * 8) + place[i] * 8);
        loaded[i][0] = at[0], loaded[i][1] = at[1];
      }
      load_places(part + kPartsAtOnce * kAddSplits);
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i) {
        const float4 &a = loaded[i][0], &b = loaded[i][1];
        total[0] += a.x, total[1] += a.y, total[2] += a.z, total[3] += a.w;
        total[4] += b.x, total[5] += b.y, total[6] += b.z, total[7] += b.w;
      }
    }
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      total[t] += __shfl_xor_sync(0xFFFFFFFFu, total[t], 1);
      total[t] += __shfl_xor_sync(0xFFFFFFFFu, total[t], 2);
      total[t] += __shfl_xor_sync(0xFFFFFFFFu, total[t], 4);
      if (t == split) sums[of][t][thread / kAddSplits] = total[t];
    }
  }
  __syncthreads();
  for (int i = thread; i < 8 * kAddRows; i += kAddThreads) {
    const int token = int(blockIdx.y) * 8 + i / kAddRows, to_row = of_weight * kWindow + first + i % kAddRows;
    if (token >= args.tokens || to_row >= weight.to.out) continue;
    float sum = sums[0][i / kAddRows][i % kAddRows];
    if constexpr (kSwiglu) sum = swiglu_value(sum, sums[1][i / kAddRows][i % kAddRows]);
    weight.to.store(token, to_row, sum);
  }
}

}  // namespace tessera::ops::sparse

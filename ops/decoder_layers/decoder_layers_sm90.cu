#include "gpu/approx.cuh"
#include "gpu/barrier.cuh"
#include "gpu/global.cuh"
#include "gpu/launch.cuh"
#include "gpu/pack.cuh"
#include "gpu/reduce.cuh"
#include "gpu/tma.cuh"
#include "ops/decoder_layers/decoder_layers_kernels.h"
#include "ops/indices.h"
#include "ops/rope/rope_turn.cuh"
#include "ops/swiglu/swiglu_math.h"

/// All layers of a decoder for one token, in one persistent kernel.
///
/// A token of a 7B model reads 13 GB of weights once: 2 FLOP per 2 bytes, bound by memory bandwidth. One
/// kernel per GEMV loses 2 to 5 us at its ends (docs/ops/linear.md) and leaves the memory idle during the
/// small kernels between. Here every block (one per SM, co-resident) walks through the phases of all layers,
///   0 qkv = W_qkv rmsnorm(x)      1 attention over the cache, 4 blocks per key head and more
///   2 x += W_out attention        3 h = silu(W_gate n) (W_up n), n = rmsnorm(x)        4 x += W_down h
/// with a grid-wide barrier after each, and the weights never wait for a barrier: each warp streams its rows
/// through a ring of its own in shared memory (bulk copies by TMA, kStages of 4 KiB; 192 KiB per SM, which
/// last for 6 us), and its load cursor runs ahead of its compute cursor over phase and layer boundaries,
/// because which rows a warp multiplies is known from the start. A barrier and the reload of the small input
/// vector take 2 to 3 us, during which the ring fills.
///
/// GEMV: a warp has two rows at a time (gate and up of one hidden feature; else neighbours), 1,024 columns of
/// each per stage. The input vector lies in shared memory in 16 bits; a lane multiplies 8 neighbouring
/// elements per load in f32, and the 32 lanes are reduced once per row. Units of two rows are dealt out round
/// robin over all warps of the grid: the last round may leave warps without work, but their share of the
/// bandwidth goes to the others.
///
/// Attention: a unit is one key head, up to 4 of its query heads, and one split of the keys; a warp takes 12
/// (D = 128) or 24 (D = 64) keys at a time, which an L2 prefetch has asked for a phase earlier. With several
/// splits the block that finishes last adds the partial results in the order of the splits.
///
/// Sums have a fixed order given the number of SMs: results are bitwise reproducible on one GPU.
///
/// All blocks must be co-resident, or the spin-wait of the grid barrier deadlocks: the launch is cooperative,
/// which the driver refuses where it cannot be so.

namespace tessera::ops::decoder {
namespace {

using gpu::kPackOf;
using gpu::kWarp;
using gpu::Words;

constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kStages = 6;                                     // of each warp's ring
constexpr int kColumns = 1024;                                 // of both rows in a stage
constexpr int kPhases = 4;                                     // GEMVs of a layer: qkv, out, up, down
constexpr int kGroup = 4;                                      // query heads of one attention unit at most
constexpr int kStreamPacks = kMaxModelWidth / (kThreads * 4);  // float4 of the residual stream per thread
constexpr float kLog2e = 1.4426950408889634f;

template <class T>
struct Layer {
  const T *norm1, *norm2;
  const T* weight[kPhases];
  T *keys, *values;
};

template <class T>
struct Args {
  T* y;
  const T* x;
  const float* table;  // [P, rotary]
  Indices lengths;
  float* stream;            // [d]: x after the last residual addition
  float* qkv;               // [(H + 2 Hk) D]
  T* mixed;                 // [H D]: output of the attention
  T* hidden;                // [F]
  float* partial;           // [H, splits, D]: of the attention's splits, not yet divided by their sums
  float2* stats;            // [H, splits]: largest score in units of log 2, sum
  int* barrier;             // arrivals at the grid barrier since the launch
  int* done;                // [Hk * tiles]: splits that have written their partial result
  int64_t stride[kPhases];  // of the weights' rows
  int64_t key_stride[2];    // of tokens, heads
  int64_t table_stride;
  int rows[kPhases], columns[kPhases];  // units of two rows; length of a row
  int layers, d, heads, kv_heads, rotary, tiles, splits, limit;
  float eps, scale;  // scale: 1 / sqrt(D) times log2(e)
  Layer<T> layer[kMaxLayers];
};

/// Where a warp is in its sequence of weight tiles.
struct Cursor {
  int layer, phase, unit, column;
};

/// The first unit of the warp in this phase or the next one that has one; layer == layers at the end.
template <class T>
__device__ __forceinline__ void settle(const Args<T>& args, Cursor& at, int first_unit) {
  while (at.layer < args.layers && at.unit >= args.rows[at.phase]) {
    at.unit = first_unit;
    at.column = 0;
    if (++at.phase == kPhases) {
      at.phase = 0;
      ++at.layer;
    }
  }
}

/// A warp's ring of weight tiles: (2, kColumns) elements per stage.
template <class T>
struct WeightRing {
  T* tiles;  // of this warp
  gpu::Barrier* full;
  Cursor load;  // what is loaded next
  gpu::RingPlace<kStages> place;
  int warps, first_unit;  // of the grid; this one's index, which is also its first unit
  uint64_t policy;        // weights are read once: they leave L2 first, and the caches of keys stay

  /// Issues the loads of one tile into `stage`, whose last tile has been read by all lanes.
  __device__ __forceinline__ void issue(const Args<T>& args, int stage, int lane) {
    if (load.layer >= args.layers) return;
    const int columns = args.columns[load.phase];
    const int count = min(kColumns, columns - load.column);
    if (lane == 0) {
      const T* const weight = args.layer[load.layer].weight[load.phase];
      // Gate and up of one feature lie F rows apart; elsewhere the two rows are neighbours.
      const bool gated = load.phase == 2;
      const int64_t upper = gated ? load.unit : 2 * int64_t(load.unit);
      const int64_t lower = gated ? upper + args.rows[2] : upper + 1;
      const uint32_t bytes = uint32_t(count) * uint32_t(sizeof(T));
      T* const to = tiles + stage * (2 * kColumns);
      full[stage].arrive_expect(2 * bytes);
      gpu::load_bytes(to, weight + upper * args.stride[load.phase] + load.column, bytes, full[stage], policy);
      gpu::load_bytes(to + kColumns, weight + lower * args.stride[load.phase] + load.column, bytes,
                      full[stage], policy);
    }
    load.column += kColumns;
    if (load.column >= columns) {
      load.column = 0;
      load.unit += warps;
      settle(args, load, first_unit);
    }
  }

  /// Waits for the next tile, adds its products with `vector` to both sums, and refills its stage.
  __device__ __forceinline__ void multiply(const Args<T>& args, const T* vector, int count, int lane,
                                           float (&sum)[2][2]) {
    full[place.stage].wait(place.parity);
    const T* const tile = tiles + place.stage * (2 * kColumns);
#pragma unroll
    for (int step = 0; step < kColumns / (kWarp * kPackOf<T>); ++step) {
      const int k = (step * kWarp + lane) * kPackOf<T>;
      if (k >= count) continue;
      float x[kPackOf<T>], upper[kPackOf<T>], lower[kPackOf<T>];
      gpu::unpack(x, gpu::load_words(vector + k));
      gpu::unpack(upper, gpu::load_words(tile + k));
      gpu::unpack(lower, gpu::load_words(tile + kColumns + k));
#pragma unroll
      for (int i = 0; i < kPackOf<T>; ++i) {
        sum[0][i % 2] = fmaf(upper[i], x[i], sum[0][i % 2]);
        sum[1][i % 2] = fmaf(lower[i], x[i], sum[1][i % 2]);
      }
    }
    __syncwarp();
    issue(args, place.stage, lane);
    place.advance();
  }
};

/// Shared memory after the rings; the input vector of the phase's GEMV follows it.
struct Small {
  gpu::Barrier full[kWarps][kStages];
  float reduce[kWarp];
  int ticket;
};

/// What the attention has in place of the input vector of a GEMV.
template <int kDim>
struct AttentionShared {
  float q[kGroup][kDim];
  float top[kWarps][kGroup], sum[kWarps][kGroup];
  float values[kWarps][kGroup][kDim];
};

__device__ __forceinline__ void arrive_at_grid(int* barrier) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    gpu::add_acquire_release(barrier, 1);
  }
}
__device__ __forceinline__ void wait_for_grid(int* barrier, int arrivals) {
  if (threadIdx.x == 0)
    while (gpu::load_acquire(barrier) < arrivals) {
    }
  __syncthreads();
}

/// Elements of other blocks, past L1, where they would be stale.
template <class T>
__device__ __forceinline__ Words<T> load_fresh(const T* from) {
  const uint4 words = __ldcg(reinterpret_cast<const uint4*>(from));
  return {{words.x, words.y, words.z, words.w}};
}

/// vector = `count` elements that the previous phase wrote.
template <class T>
__device__ __forceinline__ void copy_vector(T* vector, const T* from, int count) {
  for (int k = int(threadIdx.x) * kPackOf<T>; k < count; k += kThreads * kPackOf<T>)
    gpu::store_words(vector + k, load_fresh(from + k));
  __syncthreads();
}

/// vector = rmsnorm(residual stream), rounded to T.
template <class T>
__device__ __forceinline__ void norm_vector(const Args<T>& args, const T* x, const T* weight, T* vector,
                                            float* scratch) {
  float4 stream[kStreamPacks];
  float squares = 0;
#pragma unroll
  for (int p = 0; p < kStreamPacks; ++p) {
    const int k = (p * kThreads + int(threadIdx.x)) * 4;
    if (k >= args.d) continue;
    if (x) {  // the first layer reads the kernel's input
      const gpu::Pack<T, 4> pack = gpu::load_pack<4>(x + k);
      stream[p] = {float(pack.at[0]), float(pack.at[1]), float(pack.at[2]), float(pack.at[3])};
    } else {
      stream[p] = __ldcg(reinterpret_cast<const float4*>(args.stream + k));
    }
    squares += stream[p].x * stream[p].x + stream[p].y * stream[p].y + stream[p].z * stream[p].z +
               stream[p].w * stream[p].w;
  }
  const float mean = gpu::block_reduce<gpu::Sum>(squares, scratch) / float(args.d);
  const float rstd = rsqrtf(mean + args.eps);
#pragma unroll
  for (int p = 0; p < kStreamPacks; ++p) {
    const int k = (p * kThreads + int(threadIdx.x)) * 4;
    if (k >= args.d) continue;
    const gpu::Pack<T, 4> gain = gpu::load_pack<4>(weight + k);
    gpu::Pack<T, 4> out;
    out.at[0] = T(stream[p].x * rstd * float(gain.at[0]));
    out.at[1] = T(stream[p].y * rstd * float(gain.at[1]));
    out.at[2] = T(stream[p].z * rstd * float(gain.at[2]));
    out.at[3] = T(stream[p].w * rstd * float(gain.at[3]));
    gpu::store_pack(vector + k, out);
  }
  __syncthreads();
}

/// The warp's rows of one GEMV. `store(unit, upper, lower)` runs in lane 0 with the sums of the two rows.
template <class T, class Store>
__device__ __forceinline__ void gemv(const Args<T>& args, WeightRing<T>& ring, int phase, const T* vector,
                                     int lane, Store&& store) {
  const int columns = args.columns[phase];
  for (int unit = ring.first_unit; unit < args.rows[phase]; unit += ring.warps) {
    float sum[2][2] = {};
    for (int column = 0; column < columns; column += kColumns)
      ring.multiply(args, vector + column, columns - column, lane, sum);
    const float upper = gpu::warp_reduce<gpu::Sum>(sum[0][0] + sum[0][1]);
    const float lower = gpu::warp_reduce<gpu::Sum>(sum[1][0] + sum[1][1]);
    if (lane == 0) store(unit, upper, lower);
  }
}

/// One GEMV whose result is added to the residual stream.
template <class T>
__device__ __forceinline__ void gemv_to_stream(const Args<T>& args, WeightRing<T>& ring, int phase,
                                               const T* vector, const T* x, T* y, int lane) {
  gemv(args, ring, phase, vector, lane, [&](int unit, float upper, float lower) {
    // No other thread writes these two elements: they were written by this one, or come from the input.
    float2* const at = reinterpret_cast<float2*>(args.stream) + unit;
    float2 sum = x ? float2{float(x[2 * unit]), float(x[2 * unit + 1])} : *at;
    sum.x += upper, sum.y += lower;
    *at = sum;
    if (y) y[2 * unit] = T(sum.x), y[2 * unit + 1] = T(sum.y);
  });
}

/// Element i of a rotated head, from its f32 projection.
template <class T>
__device__ __forceinline__ float rotated(const Args<T>& args, const float* head, int position, int i) {
  const int half = args.rotary / 2;
  if (i >= args.rotary) return __ldcg(head + i);
  const float* const row = args.table + position * args.table_stride;
  const int pair = i < half ? i : i - half;
  float a = __ldcg(head + pair), b = __ldcg(head + pair + half);
  turn(a, b, row[pair], row[half + pair]);
  return i < half ? a : b;
}

/// Softmax statistics and weighted values of one query over the keys that some lanes have seen.
template <int kElements>
struct Running {
  float top = gpu::Max::kIdentity, sum = 0, values[kElements] = {};

  __device__ __forceinline__ void add(const Running& other) {
    const float most = fmaxf(top, other.top), base = most == gpu::Max::kIdentity ? 0.0f : most;
    const float mine = gpu::exp2_approx(top - base), theirs = gpu::exp2_approx(other.top - base);
    sum = sum * mine + other.sum * theirs;
#pragma unroll
    for (int i = 0; i < kElements; ++i) values[i] = values[i] * mine + other.values[i] * theirs;
    top = most;
  }
};

/// The keys of one attention unit.
template <int kDim>
struct Keys {
  static constexpr int kLanes = kDim / 8;           // lanes that share a key, 8 elements each
  static constexpr int kPerLoad = kWarp / kLanes;   // keys of one load of the warp
  static constexpr int kLoads = 6;                  // loads of keys, and of values, in flight
  static constexpr int kBatch = kPerLoad * kLoads;  // keys of a warp at a time
  static constexpr int kTurn = kBatch * kWarps;     // of a block

  int kv, tile, split, length, begin, end, used;  // used: splits that have keys
  bool valid;                                     // the length is one that the cache can have

  template <class T>
  __device__ __forceinline__ Keys(const Args<T>& args, int unit) {
    kv = unit % args.kv_heads;
    tile = unit / args.kv_heads % args.tiles;
    split = unit / args.kv_heads / args.tiles;
    const int64_t given = args.lengths[0];
    valid = 1 <= given && given <= args.limit;
    length = valid ? int(given) : 0;
    const int even = (length + args.splits - 1) / args.splits;
    const int keys = max((even + kPerLoad - 1) / kPerLoad * kPerLoad, kTurn);
    used = (length + keys - 1) / keys;
    begin = min(split * keys, length), end = min(begin + keys, length);
  }
};

/// Asks for the keys and values of this block's unit in L2 while the projection before the attention runs.
template <class T, int kDim>
__device__ __forceinline__ void prefetch_keys(const Args<T>& args, const Layer<T>& layer) {
  constexpr int kMost = 1024;  // keys per unit: 132 x 1,024 x 2 x 256 bytes are more than L2 holds anyway
  if (int(blockIdx.x) >= args.kv_heads * args.tiles * args.splits) return;
  const Keys<kDim> unit(args, int(blockIdx.x));
  if (unit.tile != 0) return;
  const int end = min(unit.end, unit.begin + kMost);
  for (int j = unit.begin + int(threadIdx.x); j < end; j += kThreads) {
    const int64_t at = unit.kv * args.key_stride[1] + j * args.key_stride[0];
    gpu::prefetch_bytes(layer.keys + at, kDim * sizeof(T));
    gpu::prefetch_bytes(layer.values + at, kDim * sizeof(T));
  }
}

/// One unit: `tile` of the query heads of key head `kv`, split `split` of the keys.
template <class T, int kDim>
__device__ void attend(const Args<T>& args, const Layer<T>& layer, AttentionShared<kDim>& shared, int& ticket,
                       int unit) {
  using Unit = Keys<kDim>;
  constexpr int kLanes = Unit::kLanes, kPerLoad = Unit::kPerLoad, kLoads = Unit::kLoads,
                kBatch = Unit::kBatch, kTurn = Unit::kTurn;
  const Unit own(args, unit);
  const int kv = own.kv, tile = own.tile, split = own.split, used = own.used;
  const int group = args.heads / args.kv_heads, first_head = kv * group + tile * kGroup;
  const int heads = min(kGroup, group - tile * kGroup);
  if (!own.valid) {  // the contract: NaN, and nothing of the cache is touched
    for (int i = int(threadIdx.x); split == 0 && i < heads * kDim; i += kThreads)
      args.mixed[first_head * kDim + i] = T(__int_as_float(0x7FC00000));
    return;
  }
  if (split >= used) return;
  const int length = own.length, position = length - 1, begin = own.begin, end = own.end;

  // q, rotated and scaled; the new key and value go to the cache, and to every unit that reads them.
  for (int i = int(threadIdx.x); i < heads * kDim; i += kThreads)
    shared.q[i / kDim][i % kDim] =
        rotated(args, args.qkv + (first_head + i / kDim) * kDim, position, i % kDim) * args.scale;
  T* const keys = layer.keys + kv * args.key_stride[1];
  T* const values = layer.values + kv * args.key_stride[1];
  T* const new_key = reinterpret_cast<T*>(shared.values);  // until the warps write their results there
  T* const new_value = new_key + kDim;
  if (end == length)
    for (int i = int(threadIdx.x); i < kDim; i += kThreads) {
      const T key(rotated(args, args.qkv + (args.heads + kv) * kDim, position, i));
      const T value(__ldcg(args.qkv + (args.heads + args.kv_heads + kv) * kDim + i));
      new_key[i] = key, new_value[i] = value;
      if (tile == 0) {
        keys[position * args.key_stride[0] + i] = key;
        values[position * args.key_stride[0] + i] = value;
      }
    }
  __syncthreads();

  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const int part = lane % kLanes * 8, sub = lane / kLanes;
  Running<8> found[kGroup];
  Words<T> key[kLoads], value[kLoads];
  const auto load = [&](Words<T>(&to)[kLoads], const T* cache, const T* newest, int first) {
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int j = first + n * kPerLoad + sub;
      to[n] = {};
      if (j < end) to[n] = gpu::load_words((j == position ? newest : cache + j * args.key_stride[0]) + part);
    }
  };
  const int first = begin + warp * kBatch;
  load(key, keys, new_key, first);
  load(value, values, new_value, first);
  for (int j0 = first; j0 < end; j0 += kTurn) {
    // S = q K^T, (kGroup, kBatch), each score in all lanes that share the key
    float s[kGroup][kLoads];
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      float k[8];
      gpu::unpack(k, key[n]);
#pragma unroll
      for (int g = 0; g < kGroup; ++g) {
        if (g >= heads) continue;
        float dot = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) dot = fmaf(shared.q[g][part + i], k[i], dot);
        s[g][n] = gpu::warp_reduce<gpu::Sum, kLanes>(dot);
      }
    }
    load(key, keys, new_key, j0 + kTurn);
    // Online softmax: every group of lanes keeps its own statistics
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      if (g >= heads) continue;
      float top = found[g].top;
#pragma unroll
      for (int n = 0; n < kLoads; ++n) {
        if (j0 + n * kPerLoad + sub >= end) s[g][n] = gpu::Max::kIdentity;
        top = gpu::Max{}(top, s[g][n]);
      }
      const float base = top == gpu::Max::kIdentity ? 0.0f : top;
      const float shrink = gpu::exp2_approx(found[g].top - base);
      found[g].top = top;
      found[g].sum *= shrink;
#pragma unroll
      for (int i = 0; i < 8; ++i) found[g].values[i] *= shrink;
#pragma unroll
      for (int n = 0; n < kLoads; ++n) {
        s[g][n] = gpu::exp2_approx(s[g][n] - base);
        found[g].sum += s[g][n];
      }
    }
    // O += P V
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      float v[8];
      gpu::unpack(v, value[n]);
#pragma unroll
      for (int g = 0; g < kGroup; ++g) {
        if (g >= heads) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) found[g].values[i] = fmaf(s[g][n], v[i], found[g].values[i]);
      }
    }
    load(value, values, new_value, j0 + kTurn);
  }

  __syncthreads();  // the new key and value have been read
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
    if (g >= heads) continue;
#pragma unroll
    for (int step = kLanes; step < kWarp; step *= 2) {  // join the groups of lanes
      Running<8> other;
      other.top = __shfl_xor_sync(~0u, found[g].top, step);
      other.sum = __shfl_xor_sync(~0u, found[g].sum, step);
#pragma unroll
      for (int i = 0; i < 8; ++i) other.values[i] = __shfl_xor_sync(~0u, found[g].values[i], step);
      // In the order of the groups in both, so that all lanes have the same bits.
      if (lane & step) {
        other.add(found[g]);
        found[g] = other;
      } else {
        found[g].add(other);
      }
    }
    if (lane == 0) shared.top[warp][g] = found[g].top, shared.sum[warp][g] = found[g].sum;
    if (sub == 0)
#pragma unroll
      for (int i = 0; i < 8; ++i) shared.values[warp][g][part + i] = found[g].values[i];
  }
  __syncthreads();

  // Join the warps: an element of a head per thread.
  for (int at = int(threadIdx.x); at < heads * kDim; at += kThreads) {
    const int g = at / kDim, i = at % kDim;
    Running<1> all;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) all.add({shared.top[w][g], shared.sum[w][g], {shared.values[w][g][i]}});
    if (used == 1) {
      args.mixed[first_head * kDim + at] = T(all.sum == 0 ? 0.0f : all.values[0] / all.sum);
    } else {
      const int64_t to = int64_t(first_head + g) * args.splits + split;
      args.partial[to * kDim + i] = all.values[0];
      if (i == 0) args.stats[to] = {all.top, all.sum};
    }
  }
  if (used == 1) {
    __syncthreads();  // the next unit of this block writes the shared memory
    return;
  }

  // The block that finishes last joins the splits, in their order.
  __syncthreads();
  int* const done = args.done + kv * args.tiles + tile;
  if (threadIdx.x == 0) {
    __threadfence();
    ticket = gpu::add_acquire_release(done, 1);
  }
  __syncthreads();
  if (ticket != used - 1) return;
  if (threadIdx.x == 0) *done = 0;  // for the next layer, which starts after grid barriers
  for (int at = int(threadIdx.x); at < heads * kDim; at += kThreads) {
    const int64_t from = int64_t(first_head + at / kDim) * args.splits;
    Running<1> all;
    for (int other = 0; other < used; ++other) {
      const float2 stats = __ldcg(args.stats + from + other);
      all.add({stats.x, stats.y, {__ldcg(args.partial + (from + other) * kDim + at % kDim)}});
    }
    args.mixed[first_head * kDim + at] = T(all.sum == 0 ? 0.0f : all.values[0] / all.sum);
  }
}

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, 1) run_layers(const __grid_constant__ Args<T> args) {
  extern __shared__ __align__(128) char memory[];
  T* const rings = reinterpret_cast<T*>(memory);
  Small& small = *reinterpret_cast<Small*>(rings + kWarps * kStages * 2 * kColumns);
  T* const vector = reinterpret_cast<T*>(reinterpret_cast<char*>(&small) + (sizeof(Small) + 127) / 128 * 128);
  const int lane = int(threadIdx.x) % kWarp, warp = gpu::uniform(int(threadIdx.x) / kWarp);
  const int blocks = int(gridDim.x);

  if (threadIdx.x == 0) {
    for (int w = 0; w < kWarps; ++w)
      for (int stage = 0; stage < kStages; ++stage) small.full[w][stage].init(1);
    gpu::fence_barrier_init();
  }
  __syncthreads();
  WeightRing<T> ring{.tiles = rings + warp * (kStages * 2 * kColumns),
                     .full = small.full[warp],
                     .load = {0, 0, warp * blocks + int(blockIdx.x), 0},
                     .warps = kWarps * blocks,
                     .first_unit = warp * blocks + int(blockIdx.x),
                     .policy = gpu::evict_first()};
  settle(args, ring.load, ring.first_unit);
  for (int stage = 0; stage < kStages; ++stage) ring.issue(args, stage, lane);

  int arrivals = 0;
  const auto grid_barrier = [&] {
    arrive_at_grid(args.barrier);
    arrivals += blocks;
    wait_for_grid(args.barrier, arrivals);
  };
  for (int l = 0; l < args.layers; ++l) {
    const Layer<T>& layer = args.layer[l];
    const T* const x = l == 0 ? args.x : nullptr;
    prefetch_keys<T, kDim>(args, layer);
    norm_vector(args, x, layer.norm1, vector, small.reduce);
    gemv(args, ring, 0, vector, lane, [&](int unit, float upper, float lower) {
      reinterpret_cast<float2*>(args.qkv)[unit] = {upper, lower};
    });
    grid_barrier();

    for (int unit = int(blockIdx.x); unit < args.kv_heads * args.tiles * args.splits; unit += blocks)
      attend<T, kDim>(args, layer, *reinterpret_cast<AttentionShared<kDim>*>(vector), small.ticket, unit);
    grid_barrier();

    copy_vector(vector, args.mixed, args.columns[1]);
    gemv_to_stream(args, ring, 1, vector, x, static_cast<T*>(nullptr), lane);
    grid_barrier();

    norm_vector(args, static_cast<const T*>(nullptr), layer.norm2, vector, small.reduce);
    gemv(args, ring, 2, vector, lane,
         [&](int unit, float gate, float up) { args.hidden[unit] = T(swiglu_value(gate, up)); });
    grid_barrier();

    copy_vector(vector, args.hidden, args.columns[3]);
    gemv_to_stream(args, ring, 3, vector, static_cast<const T*>(nullptr),
                   l + 1 == args.layers ? args.y : nullptr, lane);
    if (l + 1 < args.layers) grid_barrier();
  }
}

template <class T, int kDim>
void launch(const Problem& p) {
  const Device device = p.x.device();
  const DecoderLayer& first = p.layers[0];
  const int blocks = device.multiprocessors();
  const int64_t d = p.x.size(1), mixed = first.out.size(1), hidden = first.down.size(1);
  const int64_t kv_heads = first.keys.size(2), heads = mixed / kDim, group = heads / kv_heads;
  const int64_t tiles = gpu::ceil_div(group, kGroup);
  const int64_t splits = std::max<int64_t>(1, blocks / (kv_heads * tiles));

  // One allocation for what phases hand over; the counters start at zero.
  const Tensor counters = Tensor::zeros({1 + kv_heads * tiles}, DType::i32, device);
  const int64_t parts = heads * splits;
  const Tensor scratch =
      Tensor::empty_packed(Shape{d + first.qkv.size(0) + parts * (kDim + 2)}, DType::f32, device);
  const Tensor vectors = Tensor::empty_packed(Shape{mixed + hidden}, p.x.dtype(), device);

  Args<T> args{.y = p.y.data<T>(),
               .x = p.x.data<T>(),
               .table = p.table.data<float>(),
               .lengths = Indices(p.lengths),
               .stream = scratch.data<float>(),
               .qkv = scratch.data<float>() + d,
               .mixed = vectors.data<T>(),
               .hidden = vectors.data<T>() + mixed,
               .partial = scratch.data<float>() + d + first.qkv.size(0),
               .barrier = counters.data<int32_t>(),
               .done = counters.data<int32_t>() + 1,
               .key_stride = {first.keys.layout().stride(1), first.keys.layout().stride(2)},
               .table_stride = p.table.row_stride(),
               .layers = int(p.layers.size()),
               .d = int(d),
               .heads = int(heads),
               .kv_heads = int(kv_heads),
               .rotary = int(p.table.size(1)),
               .tiles = int(tiles),
               .splits = int(splits),
               .limit = int(std::min(first.keys.size(1), p.table.size(0))),
               .eps = float(p.eps),
               .scale = kLog2e / std::sqrt(float(kDim))};
  args.stats = reinterpret_cast<float2*>(args.partial + parts * kDim);
  const Tensor* const weights[kPhases] = {&first.qkv, &first.out, &first.up, &first.down};
  for (int phase = 0; phase < kPhases; ++phase) {
    args.stride[phase] = weights[phase]->layout().stride(0);
    args.rows[phase] = int(weights[phase]->size(0) / 2);
    args.columns[phase] = int(weights[phase]->size(1));
  }
  for (size_t l = 0; l < p.layers.size(); ++l) {
    const DecoderLayer& from = p.layers[l];
    args.layer[l] = {
        .norm1 = from.norm1.data<T>(),
        .norm2 = from.norm2.data<T>(),
        .weight = {from.qkv.data<T>(), from.out.data<T>(), from.up.data<T>(), from.down.data<T>()},
        .keys = from.keys.data<T>(),
        .values = from.values.data<T>()};
  }
  const int64_t widest = std::max({d, mixed, hidden});
  const size_t shared_bytes = size_t(kWarps * kStages * 2 * kColumns) * sizeof(T) +
                              (sizeof(Small) + 127) / 128 * 128 +
                              std::max(size_t(widest) * sizeof(T), sizeof(AttentionShared<kDim>));
  gpu::launch(
      device,
      {.grid = dim3(unsigned(blocks)), .block = kThreads, .shared_bytes = shared_bytes, .cooperative = true},
      run_layers<T, kDim>, args);
}

}  // namespace

void decoder_layers_cuda(const Problem& p) {
  const auto run = [&]<class T>() {
    if (p.layers[0].keys.size(3) == 64) {
      launch<T, 64>(p);
    } else {
      launch<T, 128>(p);
    }
  };
  if (p.x.dtype() == DType::bf16) {
    run.operator()<bf16>();
  } else {
    run.operator()<f16>();
  }
}

}  // namespace tessera::ops::decoder

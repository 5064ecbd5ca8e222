#pragma once

#include "gpu/approx.cuh"
#include "gpu/barrier.cuh"
#include "gpu/row.cuh"
#include "ops/decode_attention/decode_attention_kernels.h"

/// Shared by the kernels of decode attention: how the keys of a sequence are split, and the partial result of
/// a piece.
///
/// A block has one key head of one sequence, one tile of the queries that read it, and one of `splits` pieces
/// of the keys, which its warps process in alternating batches of 16 keys. The grid follows from the
/// capacity; the length of a piece follows from the sequence's length, on the device, so that all blocks have
/// work whenever that is worthwhile. A block whose piece lies past the end exits at once. Blocks are numbered
/// with the key heads innermost: neighbours read neighbouring memory at the same time.
///
/// A warp has, for each query, the largest score (in units of log 2), the sum of 2^(score - largest) and the
/// weighted sum of the values; the block combines those of its warps, in order. With several pieces, blocks
/// store the same as partial results, which a second kernel combines in order; with one, the first kernel
/// writes o.

namespace tessera::ops::decode {

using gpu::kPackOf;
using gpu::kWarp;
using gpu::Words;

inline constexpr int kWarps = 4, kThreads = kWarps * kWarp;  // of a block of the first kernel
inline constexpr int kKeys = 16;                             // of a warp at a time
inline constexpr int kKeysPerStep = kWarps * kKeys;          // of a block; pieces are multiples of this
inline constexpr float kLog2e = 1.4426950408889634f;

template <class T>
struct Args {
  T* o;
  const T *q, *k, *v;
  float* sums;    // [query][split][dim]
  float2* stats;  // [query][split]: largest score, sum
  float* lse;     // [B * H, lse_stride], natural logarithm; or null
  int64_t lse_stride;
  const void* lengths;  // i32, or i64 if `wide`; null: the capacity
  bool wide, causal;
  int64_t o_stride[3], q_stride[3], k_stride[3], v_stride[3];  // of sequences, tokens, heads
  int more, batch, tokens, heads, kv_heads, group, dim, capacity;
  int queries, tiles, splits;  // queries that share a key head; tiles of them; pieces at most
  float scale;                 // times log2(e)
};

template <class T>
__device__ __forceinline__ int64_t length_of(const Args<T>& args, int b) {
  if (!args.lengths) return args.capacity;
  return args.more + (args.wide ? static_cast<const long long*>(args.lengths)[b]
                                : static_cast<const int*>(args.lengths)[b]);
}
/// The same for a guess ahead of gpu::grid_dependency_wait: the line stays out of L1, where it would be
/// stale.
template <class T>
__device__ __forceinline__ int64_t length_past_l1(const Args<T>& args, int b) {
  if (!args.lengths) return args.capacity;
  return args.more + (args.wide ? __ldcg(static_cast<const long long*>(args.lengths) + b)
                                : __ldcg(static_cast<const int*>(args.lengths) + b));
}

/// Keys of a sequence as its pieces divide them.
struct Pieces {
  int length, keys, used;  // tokens; keys of a piece; pieces that have some
  bool valid;

  template <class T>
  __device__ __forceinline__ Pieces(const Args<T>& args, int64_t given) {
    valid = !args.lengths || (args.tokens <= given && given <= args.capacity);
    length = valid ? int(given) : 0;
    const int even = (length + args.splits - 1) / args.splits;
    keys = max((even + kKeysPerStep - 1) / kKeysPerStep * kKeysPerStep, kKeysPerStep);
    used = (length + keys - 1) / keys;
  }
};

struct Unit {
  int kv_head, split, tile, b;

  template <class T>
  __device__ __forceinline__ Unit(const Args<T>& args, int unit) {
    const int piece = unit / args.kv_heads;
    kv_head = unit - piece * args.kv_heads;
    const int tile_of = piece / args.splits;
    split = piece - tile_of * args.splits;
    b = tile_of / args.tiles;
    tile = tile_of - b * args.tiles;
  }
};

/// Number of the query that is row `row` of those that share a key head.
template <class T>
__device__ __forceinline__ int64_t query_of(const Args<T>& args, const Unit& unit, int row) {
  const int token = row / args.group, head = unit.kv_head * args.group + row - token * args.group;
  return (int64_t(unit.b) * args.tokens + token) * args.heads + head;
}
/// Where its head starts.
template <class T>
__device__ __forceinline__ int64_t offset_of(const Args<T>& args, const int64_t (&stride)[3],
                                             const Unit& unit, int row) {
  const int token = row / args.group, head = unit.kv_head * args.group + row - token * args.group;
  return unit.b * stride[0] + token * stride[1] + head * stride[2];
}
/// Keys that it sees.
template <class T>
__device__ __forceinline__ int seen_by(const Args<T>& args, const Pieces& pieces, int row) {
  return args.causal ? pieces.length - args.tokens + 1 + row / args.group : pieces.length;
}

/// Where a query has its log-sum-exp, of the largest score in units of log 2 and the sum.
template <class T>
__device__ __forceinline__ void write_lse(const Args<T>& args, int64_t query, float top, float total) {
  if (!args.lse) return;
  const int head = int(query % args.heads), token = int(query / args.heads % args.tokens);
  const int64_t b = query / args.heads / args.tokens;
  args.lse[(b * args.heads + head) * args.lse_stride + token] =
      total == 0 ? -INFINITY : fmaf(top, 0.693147180559945f, logf(total));
}

/// What the warps of a block found: kTile queries, heads of up to kDim elements.
template <int kTile, int kDim>
struct Found {
  float top[kWarps][kTile], sum[kWarps][kTile];
  float4 values[kWarps][kTile][kDim / 4];

  /// Called by all threads when all have written their part: joins the warps, writes o or what the second
  /// kernel adds.
  template <class T>
  __device__ __forceinline__ void join(const Args<T>& args, const Unit& unit, const Pieces& pieces,
                                       int first_row, int rows) {
    __syncthreads();
    const int lanes = args.dim / 4;
    for (int at = int(threadIdx.x); at < rows * lanes; at += kThreads) {
      const int r = at / lanes, d = at - r * lanes;
      float most = top[0][r];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) most = fmaxf(most, top[w][r]);
      const float base = most == gpu::Max::kIdentity ? 0.0f : most;
      float4 all = {};
      float total = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float weight = gpu::exp2_approx(top[w][r] - base);
        const float4 part = values[w][r][d];
        total += weight * sum[w][r];
        all.x += weight * part.x, all.y += weight * part.y;
        all.z += weight * part.z, all.w += weight * part.w;
      }
      const int64_t query = query_of(args, unit, first_row + r);
      if (args.splits > 1 && pieces.used > 1) {
        const int64_t part = query * args.splits + unit.split;
        reinterpret_cast<float4*>(args.sums)[part * lanes + d] = all;
        if (d == 0) args.stats[part] = {most, total};
      } else {
        write(args.o + offset_of(args, args.o_stride, unit, first_row + r) + d * 4, all, total, pieces.valid);
        if (d == 0) write_lse(args, query, base, total);
      }
    }
  }

  template <class T>
  static __device__ __forceinline__ void write(T* o, const float4& sums, float total, bool valid) {
    const float inverse = !valid ? __int_as_float(0x7FC00000) : total == 0 ? 0.0f : 1 / total;
    gpu::Pack<T, 4> out;
    out.at[0] = T(sums.x * inverse), out.at[1] = T(sums.y * inverse);
    out.at[2] = T(sums.z * inverse), out.at[3] = T(sums.w * inverse);
    gpu::store_pack(o, out);
  }
};

template <class T>
struct Plan {
  Args<T> args;
  int64_t blocks;
  Tensor scratch;
};

/// The problem with queries in tiles of `tile`, cut into as many pieces as fill one wave of blocks,
/// `resident` of them per SM: a second wave of a few blocks would take as long as the first.
template <class T>
Plan<T> plan(const DecodeProblem& p, int tile, int resident) {
  Plan<T> plan{.args = {.o = p.o.data<T>(),
                        .q = p.q.data<T>(),
                        .k = p.keys.data<T>(),
                        .v = p.values.data<T>(),
                        .lengths = p.lengths.defined() ? p.lengths.raw() : nullptr,
                        .wide = p.lengths.defined() && p.lengths.dtype() == DType::i64,
                        .causal = p.causal,
                        .more = int(p.more),
                        .batch = int(p.q.size(0)),
                        .tokens = int(p.q.size(1)),
                        .heads = int(p.q.size(2)),
                        .kv_heads = int(p.keys.size(2)),
                        .dim = int(p.q.size(3)),
                        .capacity = int(p.keys.size(1)),
                        .scale = float(p.scale) * kLog2e}};
  Args<T>& args = plan.args;
  for (int dim = 0; dim < 3; ++dim) {
    args.o_stride[dim] = p.o.layout().stride(dim), args.q_stride[dim] = p.q.layout().stride(dim);
    args.k_stride[dim] = p.keys.layout().stride(dim), args.v_stride[dim] = p.values.layout().stride(dim);
  }
  if (p.lse.defined()) {
    args.lse = p.lse.data<float>();
    args.lse_stride = p.lse.row_stride();
  }
  args.group = args.heads / args.kv_heads;
  args.queries = args.group * args.tokens;
  args.tiles = int(gpu::ceil_div(args.queries, tile));
  const int64_t each = int64_t(args.batch) * args.kv_heads * args.tiles;
  const int64_t slots = int64_t(p.q.device().multiprocessors()) * resident;
  const int64_t most = std::max<int64_t>(gpu::ceil_div(args.capacity, kKeysPerStep), 1);
  args.splits = int(std::clamp<int64_t>(slots / each, 1, most));
  plan.blocks = each * args.splits;
  if (args.splits > 1) {
    const int64_t parts = int64_t(args.batch) * args.tokens * args.heads * args.splits;
    plan.scratch = Tensor::empty_packed(Shape{parts * (args.dim + 2)}, DType::f32, p.q.device());
    args.sums = plan.scratch.template data<float>();
    args.stats = reinterpret_cast<float2*>(args.sums + parts * args.dim);
  }
  return plan;
}

}  // namespace tessera::ops::decode

#include "gpu/global.cuh"
#include "gpu/mma.cuh"
#include "ops/decode_attention/decode_attention_device.cuh"

/// Variant "mma": bf16 and f16, heads of up to 128 elements, 8 or 16 queries per tile.
///
/// A warp streams its piece of keys and values, 16 at a time, from memory straight into the registers from
/// which mma.m16n8k16 takes them: no shared memory, no barrier. Every load is 16 bytes per lane, and both
/// products are laid out so that this is already a fragment. With g = lane / 4, t = lane % 4:
///   S = Q K^T (queries are rows): a lane loads the 8 elements from 32 c + 8 t on of key g. A fragment's four
///     elements of k may be any, if Q's are the same ones: words 0, 1 are one step of k, words 2, 3 the next.
///   O^T = V^T P^T (elements of a head are rows): S's accumulators, rounded, are P^T's fragment as they
///     are. A lane loads the 8 elements from 64 c + 8 g on of the four keys whose scores it holds, 2t, 2t +
///     1, 2t + 8, 2t + 9; a fragment's pairs are halves of two of those words, joined by one byte
///     permutation. Rows g and g + 8 of product w are the elements 8 g + 2 w and the next: what a lane has at
///     the end are 8 neighbours of each of its two queries.
/// Keys are loaded again as soon as S is made and values as soon as O is, so 4 to 8 KiB per warp are in
/// flight at any time; 12 warps per SM cover the latency of memory. Per 16 keys of 128 elements 16 loads and
/// 24 to 32 products of matrices, some 150 instructions for 8 KiB: bound by memory, at H / Hk queries per key
/// as at one.
///
/// Before griddepcontrol.wait, a warp prefetches the start of its piece into L2: it uses nothing of the cache
/// before the wait, so it does not matter if earlier kernels still write it.

namespace tessera::ops::decode {
namespace {

constexpr int kPrefetched = 128;  // keys of a piece, one a thread at most

/// Halves of two words: the low ones, or the high ones.
__device__ __forceinline__ uint32_t low_halves(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x5410);
}
__device__ __forceinline__ uint32_t high_halves(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x7632);
}

/// One key head of one sequence, from a lane's first element on.
template <class T>
struct Stream {
  const T* at;
  int64_t stride;  // of tokens
  int dim;         // elements from here to the end of the head

  /// The elements from `first` on of key j, 0 from `end` on and past the head.
  __device__ __forceinline__ Words<T> operator()(int j, int end, int first) const {
    Words<T> words;
    if (j < end && first < dim) words = gpu::load_no_allocate(at + j * stride + first);
    return words;
  }
};

/// Blocks that share an SM; registers allow no more.
template <int kDim, int kQueries>
constexpr int kResident = kDim <= 64 && kQueries == 8 ? 4
                          : kDim <= 64                ? 3
                                                      : 2;

template <class T, int kDim, int kQueries>
__global__ void __launch_bounds__(kThreads, (kResident<kDim, kQueries>)) attend_mma(Args<T> args) {
  constexpr int kKeyChunks = kDim / 32, kValueChunks = (kDim + 63) / 64, kHalves = kQueries / 8;
  __shared__ Found<kQueries, kDim> found;
  gpu::launch_dependents();
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp, g = lane / 4, t = lane % 4;
  const Unit unit(args, int(blockIdx.x));
  const T* const k_head = args.k + unit.b * args.k_stride[0] + unit.kv_head * args.k_stride[2];
  const T* const v_head = args.v + unit.b * args.v_stride[0] + unit.kv_head * args.v_stride[2];
  {
    const Pieces pieces(args, length_past_l1(args, unit.b));  // may be out of date: good enough for a guess
    const int begin = unit.split * pieces.keys,
              end = min(min(begin + pieces.keys, pieces.length), begin + kPrefetched);
    const int j = begin + int(threadIdx.x);
    if (j < end)
      for (int d = 0; d < args.dim; d += 64) {
        gpu::prefetch_l2(k_head + j * args.k_stride[1] + d);
        gpu::prefetch_l2(v_head + j * args.v_stride[1] + d);
      }
  }
  gpu::grid_dependency_wait();
  const Pieces pieces(args, length_of(args, unit.b));
  const int begin = unit.split * pieces.keys, end = min(begin + pieces.keys, pieces.length);
  if (begin >= end && (pieces.valid || args.splits > 1)) return;

  const Stream<T> keys_at{k_head + t * 8, args.k_stride[1], args.dim - t * 8},
      values_at{v_head + g * 8, args.v_stride[1], args.dim - g * 8};
  Words<T> keys[2][kKeyChunks], values[4][kValueChunks];
  const auto load_keys = [&](int j0) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int c = 0; c < kKeyChunks; ++c) keys[n][c] = keys_at(j0 + n * 8 + g, end, c * 32);
  };
  const auto load_values = [&](int j0) {
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int c = 0; c < kValueChunks; ++c)
        values[n][c] = values_at(j0 + 2 * t + n % 2 + n / 2 * 8, end, c * 64);
  };
  const int first = begin + warp * kKeys;
  load_keys(first);
  load_values(first);

  const int first_row = unit.tile * kQueries, rows = min(kQueries, args.queries - first_row);
  Words<T> q[kHalves][kKeyChunks];
  int seen[kHalves];
  float top[kHalves], sum[kHalves] = {}, o[kHalves][kValueChunks * 4][4] = {};
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    const int row = first_row + min(h * 8 + g, rows - 1);
    const T* const from = args.q + offset_of(args, args.q_stride, unit, row) + t * 8;
    seen[h] = min(seen_by(args, pieces, row), end);
    top[h] = gpu::Max::kIdentity;
#pragma unroll
    for (int c = 0; c < kKeyChunks; ++c)
      q[h][c] = c * 32 + t * 8 < args.dim ? gpu::load_words(from + c * 32) : Words<T>{};
  }
  const int seen_by_all = min(seen_by(args, pieces, first_row), end);

  for (int j0 = first; j0 < end; j0 += kKeysPerStep) {
    float s[2][4] = {};
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int c = 0; c < kKeyChunks; ++c)
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const uint32_t a[4] = {q[0][c].word[step * 2], kHalves > 1 ? q[kHalves - 1][c].word[step * 2] : 0,
                                 q[0][c].word[step * 2 + 1],
                                 kHalves > 1 ? q[kHalves - 1][c].word[step * 2 + 1] : 0};
          gpu::mma_m16n8k16<T>(s[n], a, keys[n][c].word[step * 2], keys[n][c].word[step * 2 + 1]);
        }
    load_keys(j0 + kKeysPerStep);
    if (j0 + kKeys > seen_by_all) {
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < kHalves * 2; ++i)
          if (j0 + n * 8 + 2 * t + i % 2 >= seen[i / 2]) s[n][i] = gpu::Max::kIdentity;
    }
    uint32_t p[kHalves][2];
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      float now =
          fmaxf(fmaxf(s[0][2 * h], s[0][2 * h + 1]), fmaxf(s[1][2 * h], s[1][2 * h + 1])) * args.scale;
      now = fmaxf(now, __shfl_xor_sync(~0u, now, 1));
      now = fmaxf(now, __shfl_xor_sync(~0u, now, 2));
      now = fmaxf(now, top[h]);
      const float base = now == gpu::Max::kIdentity ? 0.0f : now;
      if (__any_sync(~0u, now > top[h])) {
        const float rescale = gpu::exp2_approx(top[h] - base);
        sum[h] *= rescale;
        const float left = __shfl_sync(~0u, rescale, t * 8), right = __shfl_sync(~0u, rescale, t * 8 + 4);
#pragma unroll
        for (int w = 0; w < kValueChunks * 4; ++w)
#pragma unroll
          for (int i = 0; i < 4; ++i) o[h][w][i] *= i % 2 ? right : left;
      }
      top[h] = now;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float x = gpu::exp2_approx(s[n][2 * h] * args.scale - base),
                    y = gpu::exp2_approx(s[n][2 * h + 1] * args.scale - base);
        sum[h] += x + y;
        p[h][n] = gpu::pack_halves<T>(x, y);
      }
    }
#pragma unroll
    for (int c = 0; c < kValueChunks; ++c)
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t a[4] = {low_halves(values[0][c].word[w], values[1][c].word[w]),
                               high_halves(values[0][c].word[w], values[1][c].word[w]),
                               low_halves(values[2][c].word[w], values[3][c].word[w]),
                               high_halves(values[2][c].word[w], values[3][c].word[w])};
#pragma unroll
        for (int h = 0; h < kHalves; ++h) gpu::mma_m16n8k16<T>(o[h][c * 4 + w], a, p[h][0], p[h][1]);
      }
    load_values(j0 + kKeysPerStep);
  }

#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
    sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
    if (t == 0) {
      found.top[warp][h * 8 + g] = top[h];
      found.sum[warp][h * 8 + g] = sum[h];
    }
#pragma unroll
    for (int side = 0; side < 2; ++side)
#pragma unroll
      for (int c = 0; c < kValueChunks; ++c) {
        if (c * 64 + g * 8 >= kDim) continue;
        float4* const to = &found.values[warp][h * 8 + 2 * t + side][c * 16 + g * 2];
        const auto& from = o[h];
        to[0] = {from[c * 4][side], from[c * 4][side + 2], from[c * 4 + 1][side], from[c * 4 + 1][side + 2]};
        to[1] = {from[c * 4 + 2][side], from[c * 4 + 2][side + 2], from[c * 4 + 3][side],
                 from[c * 4 + 3][side + 2]};
      }
  }
  found.join(args, unit, pieces, first_row, rows);
}

template <class T, int kDim, int kQueries>
void run(const DecodeProblem& p) {
  const Device device = p.q.device();
  const Plan<T> cut = plan<T>(p, kQueries, kResident<kDim, kQueries>);
  gpu::launch(device, {.grid = dim3(unsigned(cut.blocks)), .block = kThreads, .overlaps = true},
              attend_mma<T, kDim, kQueries>, cut.args);
  join<T>(device, cut.args);
}

template <class T, int kQueries>
void run_any(const DecodeProblem& p) {
  const int64_t dim = p.q.size(3);
  if (dim <= 32) {
    run<T, 32, kQueries>(p);
  } else if (dim <= 64) {
    run<T, 64, kQueries>(p);
  } else if (dim <= 96) {
    run<T, 96, kQueries>(p);
  } else {
    run<T, 128, kQueries>(p);
  }
}

}  // namespace

template <class T>
void run_mma(const DecodeProblem& p) {
  if (p.q.size(1) * p.q.size(2) / p.keys.size(2) <= 8) {
    run_any<T, 8>(p);
  } else {
    run_any<T, 16>(p);
  }
}
template void run_mma<bf16>(const DecodeProblem&);
template void run_mma<f16>(const DecodeProblem&);

}  // namespace tessera::ops::decode

#pragma once

#include "gpu/divide.cuh"
#include "gpu/row.cuh"
#include "ops/embedding/embedding_kernels.h"
#include "ops/indices.h"

/// The pieces of embedding's backward pass; embedding_backward_cuda.cu says how they make one.

namespace tessera::ops::embedding_detail {

using gpu::ceil_div;
using gpu::kPackOf;
using gpu::kWarp;
using gpu::Words;

inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

/// T: of dy, Out: of dtable, whose rows `adds` adds to.
template <class T, class Out>
struct BackwardArgs {
  Out* dtable;
  const T* dy;
  int64_t to_stride, stride, rows, width, count;
  bool to_whole, whole, adds;  // rows of dtable, of dy start on 16 bytes
  bool clears_row_padding;     // dtable's rows may be cleared in whole packs
  uint32_t packs_per_row;      // of 16 bytes, of dtable
  gpu::Divider by_packs_per_row;
  int rows_of_warp;  // that a warp clears, up to 32
};

/// Positions of tokens sorted by their index, and the sorted indices ("keys"; `rows` stands for all that are
/// out of range). They are cut into chunks of `length` places.
struct Chunks {
  const uint32_t *keys, *positions;
  int count, length;

  /// Whether all of a whole chunk is one row's.
  __device__ __forceinline__ bool is_uniform(int chunk) const {
    const int first = chunk * length;
    return count - first >= length && keys[first] == keys[first + length - 1];
  }
  /// Whether the row of this place has the place before as well.
  __device__ __forceinline__ bool continues(int place) const {
    return place > 0 && place < count && keys[place] == keys[place - 1];
  }
  /// The first position after `begin` and before `end` with another row; `end` if there is none.
  __device__ __forceinline__ int next_row(int begin, int end) const {
    const uint32_t key = keys[begin];
    int low = begin + 1;
    while (low < end) {
      const int middle = (low + end) / 2;
      if (keys[middle] == key) {
        low = middle + 1;
      } else {
        end = middle;
      }
    }
    return low;
  }
};

/// What one chunk adds up: the segments (places of one row) that begin in it, to their ends after it, but
/// for a segment that fills whole chunks: of that each uniform chunk is one part, as are the places before
/// the first of them and, with the last of them, those after. Parts are put into memory of their own, one at
/// most a chunk, and added by the warp of the chunk in which the segment begins.
struct Range {
  int begin, end;
  bool part;  // the last segment is one

  __device__ __forceinline__ Range(const Chunks& chunks, int chunk) {
    begin = chunk * chunks.length;
    end = begin + min(chunks.length, chunks.count - begin);
    part = false;
    const bool uniform = chunks.is_uniform(chunk), continues = chunks.continues(begin);
    if (continues && !uniform) begin = chunks.next_row(begin, end);
    if (begin == end) return;
    part = uniform && continues;
    if (!chunks.continues(end)) return;
    if (chunks.is_uniform(chunk + 1)) {
      part = true;
    } else {
      end = chunks.next_row(end - 1, end + min(chunks.length, chunks.count - end));
    }
  }
};

/// Whether a segment of several parts begins in this chunk.
__device__ __forceinline__ bool begins_parts(const Chunks& chunks, int chunk) {
  const int begin = chunk * chunks.length;
  if (chunks.count - begin <= chunks.length) return false;
  if (!chunks.continues(begin + chunks.length) || !chunks.is_uniform(chunk + 1)) return false;
  return !(chunks.continues(begin) && chunks.is_uniform(chunk));
}

template <class T, class Out>
__device__ __forceinline__ Words<T> load_term(const BackwardArgs<T, Out>& args, uint32_t position,
                                              int64_t first) {
  const T* const from = args.dy + int64_t(position) * args.stride + first;
  // A whole pack at the row's end reads pads or neighbours inside the storage, which ends on 16 bytes.
  if (args.whole) return gpu::load_words(from);
  return gpu::load_part(from, int(min(args.width - first, int64_t(kPackOf<T>))));
}

/// dtable = (adds ? dtable : 0) + sum, of a pack of columns.
template <int kPack, class T, class Out>
__device__ __forceinline__ void put_sum(float (&sum)[kPack], const BackwardArgs<T, Out>& args, int64_t row,
                                        int64_t first) {
  Out* const to = args.dtable + row * args.to_stride;
  if (args.adds) {
    float old[kPack];
    gpu::load_row(old, to, first, args.width, args.to_whole, 0.0f);
#pragma unroll
    for (int i = 0; i < kPack; ++i) sum[i] += old[i];
  }
  gpu::store_row(to, first, args.width, args.to_whole, sum);
}

/// Adds up one chunk, of the pack of columns at `first`. True: `sum` is a part, which is not in dtable yet.
/// A loop over places that is not unrolled, since its code must be fetched by a short launch as well: kAhead
/// rows of dy are in flight in registers that move up by one each time.
template <int kAhead, class T, class Out>
__device__ __forceinline__ bool walk(const BackwardArgs<T, Out>& args, const Chunks& chunks, int chunk,
                                     int64_t first, float (&sum)[kPackOf<T>]) {
  constexpr int kPack = kPackOf<T>;
  const Range range(chunks, chunk);
  if (range.begin >= range.end || first >= args.width) return false;
  const auto inside = [&](int place) { return min(place, range.end - 1); };
  Words<T> terms[kAhead];
  uint32_t keys[kAhead], positions[kAhead];  // positions: of the kAhead places after those of the terms
#pragma unroll
  for (int n = 0; n < kAhead; ++n) {
    keys[n] = chunks.keys[inside(range.begin + n)];
    terms[n] = load_term(args, chunks.positions[inside(range.begin + n)], first);
  }
#pragma unroll
  for (int n = 0; n < kAhead; ++n) positions[n] = chunks.positions[inside(range.begin + kAhead + n)];
  uint32_t key = keys[0];
#pragma unroll
  for (int i = 0; i < kPack; ++i) sum[i] = 0;
#pragma unroll 1
  for (int place = range.begin; place < range.end; ++place) {
    const uint32_t own = keys[0];
    float values[kPack];
    gpu::unpack(values, terms[0]);
#pragma unroll
    for (int n = 0; n + 1 < kAhead; ++n) keys[n] = keys[n + 1], terms[n] = terms[n + 1];
    if (place + kAhead < range.end) {
      keys[kAhead - 1] = chunks.keys[place + kAhead];
      terms[kAhead - 1] = load_term(args, positions[0], first);
    }
#pragma unroll
    for (int n = 0; n + 1 < kAhead; ++n) positions[n] = positions[n + 1];
    positions[kAhead - 1] = chunks.positions[inside(place + 2 * kAhead)];
    if (own != key) {
      put_sum(sum, args, key, first);
      key = own;
#pragma unroll
      for (int i = 0; i < kPack; ++i) sum[i] = 0;
    }
    if (key >= args.rows) return false;  // these are after all others
#pragma unroll
    for (int i = 0; i < kPack; ++i) sum[i] += values[i];
  }
  if (range.part) return true;
  put_sum(sum, args, key, first);
  return false;
}

/// Clears rows base, base + 1, ... of dtable that are not in the mask, by a warp.
template <class T, class Out>
__device__ __forceinline__ void clear_rows(const BackwardArgs<T, Out>& args, int64_t base, int rows,
                                           unsigned touched) {
  constexpr int kPack = kPackOf<Out>;
  const uint32_t packs = uint32_t(rows) * args.packs_per_row;
  const bool words = args.to_whole && (args.clears_row_padding || args.width % kPack == 0);
  for (uint32_t pack = threadIdx.x % kWarp; pack < packs; pack += kWarp) {
    const uint32_t row = args.by_packs_per_row.divide(pack);
    if (touched >> row & 1) continue;
    Out* const to = args.dtable + (base + row) * args.to_stride;
    const int64_t first = int64_t(pack - row * args.packs_per_row) * kPack;
    if (words) {
      gpu::store_words(to + first, Words<Out>{});
    } else {
#pragma unroll 1
      for (int64_t i = first; i < min(args.width, first + kPack); ++i) to[i] = Out(0.0f);
    }
  }
}

}  // namespace tessera::ops::embedding_detail

#pragma once

#include "gpu/launch.cuh"
#include "ops/gemm/zero_rows_internal.h"
#include "ops/select/entries_below.cuh"

/// Zeros written by a warp while the other warps of its block compute, with ordinary stores of 16 bytes per
/// lane, four in flight. Bulk copies of a piece of shared memory that is zero wait in front of the operands'
/// loads, and take longer (docs/sparse_backward.md).

namespace tessera::ops {

/// Rows of a matrix. Where they lie one after the other they are one run of bytes.
struct ZeroRows {
  char* data;
  int64_t pitch, bytes;  // of a row; rows begin on 16-byte boundaries
  int64_t rows;

  /// Zeros in the rows first ... first + count - 1, by a warp.
  __device__ __forceinline__ void write(int64_t first, int count) const {
    const bool dense = pitch == bytes;
    const int64_t length = dense ? count * bytes : bytes, packed = length / 16 * 16;
    const int lane = int(threadIdx.x) % gpu::kWarp;
    for (int run = 0; run < (dense ? 1 : count); ++run) {
      char* const to = data + (first + run) * pitch;
      char *at = to + lane * 16, *const end = to + packed;
      constexpr int kStep = gpu::kWarp * 16;
#pragma unroll 1
      for (; at + 3 * kStep < end; at += 4 * kStep)
#pragma unroll
        for (int i = 0; i < 4; ++i) *reinterpret_cast<uint4*>(at + i * kStep) = uint4{0, 0, 0, 0};
#pragma unroll 1
      for (; at < end; at += kStep) *reinterpret_cast<uint4*>(at) = uint4{0, 0, 0, 0};
      if (packed + lane * 2 < length) *reinterpret_cast<uint16_t*>(end + lane * 2) = 0;
    }
  }

  /// Zeros in those of the rows first ... first + 31 that no entry of the ascending `indices` names, by a
  /// warp. It finds the first entry that could name one of them, and has all entries for them in one load.
  __device__ __forceinline__ void write_others(int64_t first, const int32_t* indices, int64_t entries) const {
    const int lane = int(threadIdx.x) % gpu::kWarp;
    uint32_t named = 0;
    if (entries > 0) {
      const int64_t entry = entries_below(indices, entries, first);
      named = __reduce_or_sync(0xFFFFFFFFu,
                               entry + lane < entries ? bit_of_row(indices[entry + lane], first) : 0);
    }
    for (uint32_t left = rows_to_fill(named, first, rows); left != 0;) {
      const RowRun run = first_run(left);
      write(first + run.begin, run.count);
      left = run.rest;
    }
  }
};

}  // namespace tessera::ops

#pragma once

#include "gpu/tma.cuh"
#include "ops/gemm/zero_rows_internal.h"
#include "ops/select/entries_below.cuh"

/// Zeros written by one warp of a block while others compute: bulk copies of a piece of shared memory that is
/// zero. Ordinary stores of a warp alone on its SM reach 6 bytes per clock, bulk copies what memory takes.

namespace tessera::ops {

/// Rows of a matrix. Where they lie one after the other they are one run of bytes.
struct ZeroRows {
  char* data;
  int64_t pitch, bytes;  // of a row; rows begin on 16-byte boundaries
  int64_t rows;
};

/// Of a warp. `zeros`: `size` bytes of shared memory from a 16-byte boundary on, a multiple of 16.
class ZeroWriter {
 public:
  __device__ __forceinline__ ZeroWriter(const ZeroRows& rows, char* zeros, int size)
      : rows_(rows), zeros_(zeros), size_(size), lane_(int(threadIdx.x) % gpu::kWarp) {
    for (int at = lane_ * 16; at < size; at += gpu::kWarp * 16)
      *reinterpret_cast<uint4*>(zeros + at) = uint4{0, 0, 0, 0};
    gpu::fence_async_shared();
    __syncwarp();
  }

  /// Zeros in those of the rows first ... first + 31 that no entry of the ascending `indices` names. It finds
  /// the first entry that could name one of them, and has all entries for them in one load.
  __device__ __forceinline__ void write_others(int64_t first, const int32_t* indices, int64_t entries) const {
    uint32_t named = 0;
    if (entries > 0) {
      const int64_t entry = entries_below(indices, entries, first);
      named = __reduce_or_sync(0xFFFFFFFFu,
                               entry + lane_ < entries ? bit_of_row(indices[entry + lane_], first) : 0);
    }
    for (uint32_t left = rows_to_fill(named, first, rows_.rows); left != 0;) {
      const RowRun run = first_run(left);
      write(rows_.data + (first + run.begin) * rows_.pitch, run.count);
      left = run.rest;
    }
  }

  /// Afterwards the shared memory may be used again.
  __device__ __forceinline__ void finish() const {
    gpu::commit_stores();
    gpu::wait_stores_read<0>();
    __syncwarp();
  }

 private:
  __device__ __forceinline__ void write(char* to, int count) const {
    const bool dense = rows_.pitch == rows_.bytes;
    const int64_t length = dense ? count * rows_.bytes : rows_.bytes, packed = length / 16 * 16;
    for (int run = 0; run < (dense ? 1 : count); ++run, to += rows_.pitch) {
      for (int64_t at = int64_t(lane_) * size_; at < packed; at += int64_t(gpu::kWarp) * size_)
        gpu::bulk_store(to + at, zeros_, uint32_t(min(packed - at, int64_t(size_))));
      if (packed + lane_ * 2 < length) *reinterpret_cast<uint16_t*>(to + packed + lane_ * 2) = 0;
    }
  }

  const ZeroRows& rows_;
  char* const zeros_;
  const int size_, lane_;
};

}  // namespace tessera::ops

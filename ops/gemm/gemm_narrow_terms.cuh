#pragma once

#include "gpu/mma.cuh"
#include "ops/gemm/gemm_narrow_split_k.cuh"

/// GEMMs of few terms: large d, k at most 32, 16-bit operands. Bound by writing d, 2 m n bytes (4 m n in f32)
/// next to 2 k (m + n) read, so every SM must have many stores in flight all the time.
///
/// A block keeps b's terms of a range of columns in shared memory, as the mma.m16n8k16 fragments that its
/// lanes need: 16 bytes per load, in order. Its warps walk over the rows independently, 16 at a time: a's
/// fragments directly from memory, four MMAs for 32 columns, and the stores. No warp waits for another.
///
/// The assignment of d's 32 columns to the MMAs' columns is free, since b's fragments are assembled here: a
/// lane gets neighbouring columns, so that it stores 16 bytes at once, and four lanes 64 bytes of a row, from
/// registers. Where rows do not start on 32-byte sectors, half of those 64 bytes are halves of sectors, and a
/// large d takes 1.4 times as long as through shared memory, 256 bytes of a row at a time; where they do,
/// shared memory is slower.

namespace tessera::ops {
namespace {

/// Where column `column` of 32 is computed: the MMA (of four), and the column of that MMA (of eight). A lane
/// has two columns of each MMA (gpu/mma.cuh); kPack of its eight are neighbours in d.
template <int kPack>
struct TermsColumn {
  int product, column;
  __device__ __forceinline__ explicit TermsColumn(int of_32)
      : product(of_32 / (4 * kPack) * (kPack / 2) + of_32 % kPack / 2),
        column(of_32 % (4 * kPack) / kPack * 2 + of_32 % 2) {}
};

/// Stores the terms of columns `first` ... first + range - 1 of g.right as fragments, zeros past its ends:
/// [32 columns][16 of k][half of the MMAs][lane][4 words].
template <int kPack, int kSteps, class T>
__device__ __forceinline__ void store_terms(const NarrowArgs<T>& g, int matrix, int first, int range,
                                            uint32_t* fragments) {
  constexpr int kPairs = kSteps * 8;  // of k
  const NarrowOperand<T>& b = g.right;
  const T* const from = b.data + matrix * b.stride;
  const int64_t along = b.k_major ? 1 : b.ld, across = b.k_major ? b.ld : 1;
#pragma unroll 4
  for (int i = int(threadIdx.x); i < kPairs * range; i += kNarrowThreads) {
    const int pair = b.k_major ? i % kPairs : i / range, in_range = b.k_major ? i / kPairs : i % range;
    const int k = pair * 2, column = first + in_range;
    uint32_t low = 0, high = 0;
    const T* const at = from + k * along + column * across;
    if (column < g.n && k < g.k) low = at[0].bits;
    if (column < g.n && k + 1 < g.k) high = at[along].bits;
    const TermsColumn<kPack> place(in_range % 32);
    const int lane = place.column * 4 + pair % 4, word = place.product * 2 + pair % 8 / 4;
    fragments[((in_range / 32 * kSteps + pair / 8) * 2 + word / 4) * 128 + lane * 4 + word % 4] =
        low | high << 16;
  }
}

/// Elements k and k + 1 of a row, zeros past the end.
template <class T>
__device__ __forceinline__ uint32_t load_terms(const NarrowArgs<T>& g, const T* row, int k, bool inside) {
  if (!inside || k >= g.k) return 0;
  const int64_t along = g.left.k_major ? 1 : g.left.ld;
  if (g.left.packs && g.left.k_major && k + 1 < g.k) return *reinterpret_cast<const uint32_t*>(row + k);
  const uint32_t low = row[k * along].bits;
  return k + 1 < g.k ? low | uint32_t(row[(k + 1) * along].bits) << 16 : low;
}

/// Shared memory of a block: fragments, biases, and 16 rows of 256 bytes for each warp.
constexpr size_t terms_bytes(int range, int steps, bool staged) {
  return size_t(range) * (size_t(steps) * 32 + sizeof(float)) + (staged ? kNarrowThreads / 32 * 16 * 256 : 0);
}

/// Swizzled index of pack `pack` of a row in a warp's staging buffer of 16 rows of 16 packs: the packs that
/// eight lanes access together are in different banks.
__device__ __forceinline__ int staged_pack(int row, int pack) {
  return row * 16 + (pack ^ (row & 1) * 4);
}

/// One block per (matrix, `rows` rows, `range` columns), the columns fastest; multiples of 128 and of 32.
template <class T, class Out, int kSteps, bool kStaged>
__global__ void __launch_bounds__(kNarrowThreads, kSteps == 1 ? 4 : 3)
    narrow_terms_kernel(const __grid_constant__ NarrowArgs<T> g, int rows, int range) {
  constexpr int kPack = gpu::kPackOf<Out>, kPasses = 8 / kPack, kWide = 16 * kPack;
  using Pack = gpu::Pack<Out, kPack>;
  extern __shared__ __align__(16) uint32_t fragments[];
  gpu::wait_and_launch_dependents();
  const NarrowTileCoord coord(g);
  const int first_column = coord.column_tile * range, columns = min(g.n - first_column, range);
  float* const bias = reinterpret_cast<float*>(fragments + range * kSteps * 8);
  store_terms<kPack, kSteps>(g, coord.matrix, first_column, range, fragments);
  if (g.bias)
    for (int i = int(threadIdx.x); i < range; i += kNarrowThreads)
      bias[i] = i < columns ? float(g.bias[coord.matrix * g.stride_bias + first_column + i]) : 0;
  __syncthreads();

  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const int end = min(g.m, (coord.row_tile + 1) * rows);
  Pack* const staged = reinterpret_cast<Pack*>(bias + range) + warp * 256;
  const T* const left = g.left.data + coord.matrix * g.left.stride;
  for (int first = coord.row_tile * rows + warp * 16; first < end; first += kNarrowThreads / 2) {
    const int row = first + lane / 4;
    uint32_t a[kSteps][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = row + i % 2 * 8;
        a[step][i] = load_terms(g, left + r * (g.left.k_major ? g.left.ld : 1),
                                step * 16 + i / 2 * 8 + lane % 4 * 2, r < g.m);
      }
    for (int wide = 0; wide < columns; wide += kWide) {
#pragma unroll 2
      for (int chunk = wide; chunk < min(columns, wide + kWide); chunk += 32) {
        float sums[4][4] = {};
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          const uint4* const from =
              reinterpret_cast<const uint4*>(fragments) + (chunk / 32 * kSteps + step) * 64 + lane;
          const uint4 low = from[0], high = from[32];
          gpu::mma_m16n8k16<T>(sums[0], a[step], low.x, low.y);
          gpu::mma_m16n8k16<T>(sums[1], a[step], low.z, low.w);
          gpu::mma_m16n8k16<T>(sums[2], a[step], high.x, high.y);
          gpu::mma_m16n8k16<T>(sums[3], a[step], high.z, high.w);
        }
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          const int column = chunk + (pass * 4 + lane % 4) * kPack;
#pragma unroll
          for (int down = 0; down < 2; ++down) {
            float values[kPack];
#pragma unroll
            for (int i = 0; i < kPack; ++i)
              values[i] = g.alpha * sums[pass * (kPack / 2) + i / 2][down * 2 + i % 2] +
                          (g.bias ? bias[column + i] : 0);
            const int r = row + down * 8;
            if (r < g.m) add_beta_c<Out>(g, coord.matrix, r, first_column + column, values);
            Pack pack;
#pragma unroll
            for (int i = 0; i < kPack; ++i) pack.at[i] = Out(values[i]);
            if constexpr (kStaged)
              staged[staged_pack(r - first, (column - wide) / kPack)] = pack;
            else if (r < g.m)
              write_rounded<kPack>(g, g.packs, coord.matrix, r, first_column + column, pack);
          }
        }
      }
      if constexpr (kStaged) {
        __syncwarp();
#pragma unroll
        for (int of_two = 0; of_two < 8; ++of_two) {
          const int r = of_two * 2 + lane / 16, column = wide + lane % 16 * kPack;
          if (first + r < g.m && column < columns)
            write_rounded<kPack>(g, g.packs, coord.matrix, first + r, first_column + column,
                                 staged[staged_pack(r, lane % 16)]);
        }
        __syncwarp();
      }
    }
  }
}

}  // namespace
}  // namespace tessera::ops

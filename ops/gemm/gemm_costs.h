#pragma once

#include <cstdint>

#include "ops/variant.h"

/// The constants of the cost models by which `multiply` and its relatives choose: one struct per model, one
/// instance of all of them per GPU model. Times are seconds unless a field says clocks. How they were fitted:
/// docs/ops/gemm_costs.md, gemm_narrow.md, linear.md.

namespace tessera::ops {

/// GEMMs in tiles (gemm_sm90.cuh), fitted to GEMMs with and without L2 flushed before. The first group is in
/// clocks of an SM and decides among tiles and splits; the second, in seconds, among variants.
struct WgmmaCosts {
  double clock;             // clocks per second
  double ends;              // clocks from the launch to the first MMA, and from the last to the end
  double clusters;          // clocks by which that is longer with clusters
  double bytes_per_clock;   // that an SM gets from L2
  double byte;              // clocks that each byte from L2 costs next to the MMAs, as power
  double stored_per_clock;  // bytes of D
  double epilogue;          // clocks that no other warpgroup's MMAs hide
  double threads;           // clocks per element of D that the threads store
  double part;              // clocks per split whose partial sums are waited for
  int64_t most_parts;       // beyond so many splits that grows no more
  double shared;        // factor of the clocks that shared memory takes for the operands at 128 bytes each
  double alone;         // factor of a ping-pong warpgroup's MMAs if the other has no tile
  double across_lines;  // factor of the bytes of a K-major operand whose rows lie across 128-byte lines
  double across_mn;     // the same of an MN-major operand, however short the GEMM

  double least;             // a small GEMM takes at least this and its bytes
  double round;             // a wave of tiles, next to the clocks above
  double bytes_per_second;  // memory
  double flops;             // per second, of GEMMs that take long
  double takes_long;        // GEMMs from here on care for lines of K-major operands
  double few;               // with so few rows or columns a tile is slower in splits or with an unaligned D
  double clearly;       // a GEMM across lines loses to cuBLASLt that takes less than this part of its time,
  double clearly_from;  // if it takes at least this long: shorter ones do not pay cuBLASLt's copies
};

/// Tiles fitted to the GEMM (gemm_sm90_fitted.cuh); in clocks up to `element`.
struct FittedCosts {
  double clock;             // clocks per second
  double ends;              // clocks from the launch to the first MMA, and from the last to the end
  double clusters;          // clocks by which that is longer with clusters
  double shared_64;         // factor of the clocks that shared memory takes at 128 bytes each: 64 columns
  double shared_128;        // the same for tiles of 128 columns
  double shared_192;        // the same for tiles of 192 columns
  double bytes_per_clock;   // that an SM gets from L2
  double across_lines;      // factor of the bytes of a K-major operand whose rows lie across 128-byte lines
  double across_mn;         // the same of an MN-major b
  double few_stages;        // factor of both where only four stages of k fit
  double epilogue;          // clocks per tile
  double element;           // clocks per element of a tile
  double least;             // a small GEMM takes at least this and its bytes
  double bytes_per_second;  // memory
  double clearly;           // factor of the time by which it must beat other tiles
};

/// Rows that are scattered by fitted tiles, with zeros next to them (gemm_scatter_internal.h).
struct ScatterCosts {
  double bytes_per_second;  // of zeros, by which the GEMM becomes slower
  double group;             // seconds for 32 rows of d per SM, of which the named ones are looked up
};

/// Skinny GEMMs (gemm_sm90_stream.cuh).
struct StreamCosts {
  double ends;             // start and end of the kernel
  double tile;             // the epilogue of a tile that is not the last
  double column;           // where d's columns are the tokens: the epilogue of a tile, per token,
  double column_ends;      // and what start and end take longer
  double exchange;         // a cluster's exchange of partial sums
  double step, wide_step;  // a block of 64 of k at least; with more than 32 tokens
  double memory;           // bytes per second of the weight
  double tokens_from_l2;   // bytes per second of x
  double across_lines;     // factor of a weight whose rows lie across 128-byte lines
  double small;            // bytes of a weight; smaller ones were not measured in this kernel
  int64_t few_tokens;      // up to so many, a weight whose k is not dense is 6 to 8 % faster in tiles

  // Next to tiles, whose model counts the launch and knows few such GEMMs.
  double launch;        // what a launch adds to the above
  int64_t wide_tokens;  // each token beyond so many
  double token;         // adds this
  double tiles_memory;  // bytes per second that tiles read at most
  double about;         // factor by which tiles must be faster
};

/// Narrow GEMMs by FMA (gemm_narrow.cuh), clocks. The clock is slower than the GPU's by what they miss.
struct NarrowCosts {
  double clock;            // clocks per second
  double ends;             // a launch and its end
  double block;            // a block
  double trip;             // a trip to memory
  double bytes_per_clock;  // of memory, to an SM
  double meet;             // splits that meet
  double terms;            // eight partial sums that are added up
};

/// Narrow GEMMs by tensor cores (gemm_narrow_mma.cuh), fitted to 1,447 GEMMs in all tiles.
struct NarrowMmaCosts {
  double ends;      // a launch and its ends
  double block;     // a block
  double stage;     // a stage of the pipeline
  double elements;  // by which that is longer one element at a time
  double meet;      // splits that meet
  double term;      // a partial sum that is added up
  double multiply;  // a multiply-add of a block's threads
  double memory;    // bytes per second of memory
  double sm;        // bytes per second to an SM
  double stores;    // elements' bytes per second from an SM
};

/// GEMMs of small k (gemm_narrow_terms.cuh).
struct NarrowTermsCosts {
  double ends;    // a launch and its ends
  double memory;  // bytes per second if D's rows start on sectors of 32 bytes
  double more;    // likewise, for k above 16
  double shared;  // bytes per second if they do not
  int64_t few_k;  // up to here the model of wgmma tiles is up to 2.7 times too low and is not compared with
};

/// cuBLASLt, next to the models above. About 30 % off for odd extents.
struct CublasCosts {
  double ends;              // a launch and its ends
  double odd;               // copies, zeros, or kernels that load element by element, for odd extents
  double few_and_odd;       // factor of the bytes of those with a side of a few,
  double few_gradient;      // and if they are weight gradients, from three on
  double few_terms;         // factor of the bytes where few terms make a large 16-bit D
  double flops;             // per second
  double bytes_per_second;  // memory
  double term;              // per k up to 4096, of a small D: a long k that is left to a few blocks
  double bias;              // a launch for a bias that it does not fuse
  double single;            // f32: a launch and its ends
  double single_bytes;      // f32: bytes per second
};

/// GEMMs that cuBLASLt takes as they are, next to tiles: which of them it is faster at, besides those whose k
/// tiles would split.
struct AlignedCosts {
  double factor;     // of the tiles' time that it takes for these; 0: not measured
  double gradients;  // weight gradients that tiles are expected to take less than so many seconds for,
  double others;     // and other GEMMs;
  int64_t few;       // of longer ones those with at most so many rows or columns,
  double long_k;     // and those whose k is at least this multiple of their columns
};

/// Up to 8 tokens times a weight of 16 bits: linear's GEMV next to GEMMs: docs/ops/linear.md.
struct FewTokensCosts {
  double gemv_bytes;     // a weight of so many bytes takes longer in the GEMV than as a GEMM,
  double longest;        // unless its rows are more than this multiple of their number;
  double cublas_factor;  // of the stream kernel's time that cuBLASLt takes then
};

/// When variant "narrow" is taken: its models and those of the others are about 10 % off.
struct NarrowMargins {
  double about;    // factor of the others' time that it may take,
  double clearly;  // and from `from` on, where a wrong choice costs more
  double from;
};

/// Extents rounded up for cuBLASLt (gemm_padding.h), 16 bits; TF32 counts half of the rates.
struct PaddingCosts {
  double bytes_per_second;  // copies
  double launch;            // a kernel of a few microseconds costs that whatever it moves
  double slow_flops;        // per second as the extents are,
  double slow_bytes;        // and bytes per second
  double fast_flops;        // per second with rounded extents
};

/// TF32 (gemm_tf32.h).
struct Tf32Costs {
  double along, across;  // FLOPs per second with B K-major and MN-major
  double copy_bytes;     // per second, of a weight that L2 holds
  double launch;
};

/// Sums of columns as a narrow GEMM with a row of ones, next to the kernel that adds them (linear_cuda.cu).
struct ColumnSumCosts {
  double two_launches;
  double bytes_per_second;
};

struct GemmCosts {
  WgmmaCosts wgmma;
  FittedCosts fitted;
  ScatterCosts scatter;
  StreamCosts stream;
  NarrowCosts narrow;
  NarrowMmaCosts narrow_mma;
  NarrowTermsCosts narrow_terms;
  CublasCosts cublas;
  AlignedCosts aligned;
  FewTokensCosts few_tokens;
  NarrowMargins margins;
  PaddingCosts padding;
  Tf32Costs tf32;
  ColumnSumCosts column_sums;
};

/// Those of a GPU model.
const GemmCosts& gemm_costs(GpuModel model);
inline const GemmCosts& gemm_costs(const Gpu& gpu) {
  return gemm_costs(gpu.model);
}

}  // namespace tessera::ops

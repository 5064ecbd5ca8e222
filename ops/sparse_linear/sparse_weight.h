#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "runtime/integers.h"
#include "tensor/tensor.h"

/// A weight matrix in a format that leaves zeros out, or lets a kernel leave inputs out: what sparse_linear
/// multiplies with in place of a dense weight.

namespace tessera::ops {

/// dense_columns  Every element, with the outputs of one input next to each other ([in, out]): an input that
///                a gate leaves out is a row that is not read.
/// tiled_cbc      Column-wise bitmap compression in tiles (SPDP, arXiv:2607.21985): the unit that is
///                compressed, and that a gate skips, is 256 rows of one column.
/// tca_bme        Tensor-core-aware bitmap encoding (SpInfer, EuroSys 2025): tiles of 64 x 64 in the order in
///                which mma.m16n8k16 takes its fragments.
/// sell_delta4    Sliced ELLPACK with sorted rows (SELL-C-sigma, Kreutzer et al., arXiv:1307.6209; C = 32,
///                sigma = 256), columns as distances of 4 bits (as MACKO, arXiv:2511.13061): a lane of a warp
///                has a row.
/// mma_delta4     Distances of 4 bits, too, for several tokens: a lane has those elements of 16 rows that it
///                holds of an A fragment of mma.m16n8k16, and so decompresses into memory of its own.
enum class SparseFormat : uint8_t { dense_columns, tiled_cbc, tca_bme, sell_delta4, mma_delta4 };

inline constexpr const char* kSparseFormats[] = {"dense-columns", "tiled-cbc", "tca-bme", "sell-delta4",
                                                 "mma-delta4"};
const char* name_of(SparseFormat format);  // "dense-columns", "tiled-cbc", "tca-bme", "sell-delta4", ...
SparseFormat parse_sparse_format(std::string_view name);  // throws, naming the choices
/// Whether elements are found by their distances, not by bitmaps.
constexpr bool has_distances(SparseFormat format) {
  return format == SparseFormat::sell_delta4 || format == SparseFormat::mma_delta4;
}
/// Whether its kernel reads the weights of inputs that a gate leaves out, too.
constexpr bool reads_all_inputs(SparseFormat format) {
  return format == SparseFormat::tca_bme || has_distances(format);
}

/// The tiles of the formats. A matrix [out, in] is cut into groups of kGroupRows x kGroupColumns, in
/// row-major order; at the lower and the right edge the elements outside the matrix have no bit.
namespace tca_bme {
/// A group is four medians of 16 rows, one below the other; a median is four tiles of 16 x 16, from left to
/// right; a tile has four bitmaps of 8 x 8: top left, bottom left, top right, bottom right. Bit 8 r + c of a
/// bitmap is element (r, c).
inline constexpr int64_t kGroupRows = 64, kGroupColumns = 64, kMedians = 4, kBitmaps = 64;
inline constexpr int64_t kMostStep = 64;  // SparseWeight::most is a multiple of it
}  // namespace tca_bme
namespace tiled_cbc {
/// A group is 64 column tiles; a column tile has four bitmaps of 64 rows each, bit r for row r.
inline constexpr int64_t kGroupRows = 256, kGroupColumns = 64, kBitmaps = 256, kBitmapsOfColumn = 4;
/// An entry of `info`: where the column's values start in the group, and, in the lower bits, their number.
inline constexpr int kCountBits = 9;
}  // namespace tiled_cbc
namespace sell_delta4 {
/// A window is kGroupRows rows. Sorted by their number of entries, the longest first and ties in order, they
/// are cut into slices of 32. A group is a window in one part of the columns (parts_of(in) parts of
/// width_of(in) columns, the last one shorter); in it a slice is a run of chunks: 8 entries of each of its
/// rows, row by row. An entry is a value and the number of columns (0 to 15) between it and the entry before
/// it in its row, or the part's first column. Where more columns lie between two elements, entries of value 0
/// and distance 15 do; a row that is shorter than the slice ends with entries of value 0 and distance 0.
inline constexpr int64_t kGroupRows = 256, kSliceRows = 32, kSlices = 8, kEntries = 8, kMostGap = 15;
inline constexpr int64_t kChunk = kSliceRows * kEntries, kMostParts = 8, kLeastWidth = 128, kMostWidth = 1408;
/// 1, 2, 4 or a multiple of 8, such that parts have some hundred columns.
constexpr int64_t parts_of(int64_t in) {
  int64_t parts = 1;
  while (parts < kMostParts && in / (2 * parts) >= kLeastWidth) parts *= 2;
  const int64_t most = parts * kMostWidth;
  return parts == kMostParts ? parts * ceil_div(in, most) : parts;
}
/// A multiple of 8.
constexpr int64_t width_of(int64_t in) {
  return round_up(ceil_div(in, parts_of(in)), 8);
}
}  // namespace sell_delta4
namespace mma_delta4 {
/// A window is kGroupRows rows. The columns are cut into tiles of 16, and the tiles into parts_of(in) parts
/// of nearly as many tiles, at most kMostTiles. A group is a window in a part: 16 strips of 16 of its rows,
/// which each part arranges in its own way, so that the streams of a strip are about equally long.
///
/// A strip has two streams of chunks, one for the first half of the part's columns, one for the second: 8
/// columns of each tile. A chunk has 8 entries of each of 32 lanes. Lane 4 g + t has the elements of rows g
/// and g + 8 of the strip in columns 2 t and 2 t + 1 of the tiles' 8: of tile i, row g's at positions 4 i and
/// 4 i + 1, row g + 8's at 4 i + 2 and 4 i + 3. An entry is a value and the number of positions (0 to 15)
/// between it and the entry before it in its lane, or the stream's first position. Every lane of a stream
/// has as many entries: where it has too few, or too large a distance, zeros are stored, of the matrix or, of
/// an odd number of tiles, at four positions past the last one.
inline constexpr int64_t kGroupRows = 256, kStripRows = 16, kStrips = 16, kStreams = 2, kLanes = 32;
inline constexpr int64_t kEntries = 8, kMostGap = 15, kChunk = kLanes * kEntries;
inline constexpr int64_t kTileColumns = 16, kMostTiles = 32, kTilePositions = 4;
constexpr int64_t tiles_of(int64_t in) {
  return ceil_div(in, kTileColumns);
}
constexpr int64_t parts_of(int64_t in) {
  return ceil_div(tiles_of(in), kMostTiles);
}
/// The first tile of a part, or, for parts_of(in), the number of tiles.
constexpr int64_t first_tile(int64_t in, int64_t part) {
  return part * tiles_of(in) / parts_of(in);
}
}  // namespace mma_delta4
inline constexpr int64_t kValuesOfGroup = 8;  // a group's values start at a multiple of so many: 16 bytes

/// Outputs or inputs of a matrix, at most: kernels count them, rounded up to whole tiles, in 32 bits.
inline constexpr int64_t kMostSparseSize = int64_t{1} << 30;

/// A compressed matrix [out, in]. An element is stored if its bits are not those of +0: the formats are
/// lossless, a -0 stays. Elements are f16, bf16 or f32 (on a GPU f16 or bf16).
///
/// values    tca_bme, tiled_cbc: of all groups, bitmap by bitmap, each group padded with zeros to 8;
///           dense_columns: [in, out]; with distances: [chunks * 256]. The other arrays are undefined for
///           dense_columns.
/// bitmaps   i64; tca_bme [groups * 64], tiled_cbc [groups * 256]; else undefined
/// gaps      i32 [chunks * 32]; with distances: those of a lane's 8 entries, the first in the lowest 4 bits;
///           else undefined
/// offsets   i32 [groups + 1]: where a group's values start; sell_delta4 [groups * 8 + 1]: where a slice's
///           chunks start; mma_delta4 [groups * 32 + 1]: where a stream's chunks start
/// info      i32; tca_bme [groups * 4]: where the values of a median start in its group; tiled_cbc [groups *
///           64]: where those of a column start in its group << 9 | how many there are; sell_delta4 [windows
///           * 64]: the rows in the window of its slices' lanes, 8 bits each, the first in the lowest;
///           mma_delta4 [groups * 64]: for each row of the window, its place among those of the strips
///
/// constant Whether no kernel in flight on the weight's GPU writes the arrays, and none will while others
/// read them. A kernel launched with programmatic dependent launch starts before the preceding kernels end,
/// and before griddepcontrol.wait it may read only memory that none of them writes
/// (gpu/dependent_launch.cuh). With `constant` it prefetches these arrays there: a generation step loads the
/// next layer's weights while the previous kernel ends. settle() sets it; compress() and to() call it when
/// they create arrays on a GPU. For a weight assembled by hand it is false, and the arrays are read after
/// the wait. Code that writes the arrays of a settled weight clears it first and calls settle() again before
/// the next call that reads them. In this library only loading a checkpoint into a model writes them in
/// place.
struct SparseWeight {
  SparseFormat format = SparseFormat::dense_columns;
  int64_t out = 0, in = 0;
  Tensor values, bitmaps, gaps, offsets, info;
  int64_t stored = 0;  // elements that are stored, without padding; dense_columns: all
  int64_t most = 0;    // tca_bme: the most values of a group, rounded up to a multiple of 64
  bool constant = false;

  void fields(auto&& visit) {
    visit("format", format), visit("out", out), visit("in", in), visit("values", values);
    visit("bitmaps", bitmaps), visit("gaps", gaps), visit("offsets", offsets), visit("info", info);
    visit("stored", stored), visit("most", most);
  }
  /// The same arrays in the same memory.
  bool operator==(const SparseWeight& other) const;

  DType dtype() const { return values.dtype(); }
  Device device() const { return values.device(); }
  int64_t group_rows() const;     // rows of groups, one below the other
  int64_t group_columns() const;  // groups of such a row
  int64_t groups() const { return group_rows() * group_columns(); }
  /// Bytes of all arrays, as a kernel that skips nothing reads them.
  uint64_t bytes() const;
  uint64_t dense_bytes() const { return uint64_t(out) * uint64_t(in) * size_of(dtype()); }
  /// Share of the elements that are not stored; 0 for an empty matrix.
  double sparsity() const;
  SparseWeight to(Device device) const;
  /// Waits until everything issued to this thread's stream is done, the writes of the arrays among it, and
  /// sets `constant`. Throws while a graph is being captured there.
  void settle();
};

/// Throws, beginning with `name`, unless there are 0 to kMostSparseSize outputs and inputs.
void check_sizes(std::string_view name, int64_t out, int64_t in);

/// Compresses weight [out, in] (f16, bf16 or f32; any layout and device). The arrays are made on the CPU and
/// copied to the weight's device. Throws for more than kMostSparseSize outputs or inputs, and if a group's
/// values would start past 2^31 - 1.
SparseWeight compress(const Tensor& weight, SparseFormat format, Site site = Site::here());

/// The matrix [out, in] on the CPU, bit for bit what was compressed. Of arrays that validate() has not seen,
/// and that do not fit together, undefined.
Tensor to_dense(const SparseWeight& weight, Site site = Site::here());

/// Throws, saying what does not fit, unless the arrays are what compress() could have made: dtypes and sizes,
/// offsets that ascend and agree with the bitmaps, no bit outside the matrix. Takes no memory to speak of.
/// `name` begins the message. Arrays on the CPU.
void validate(const SparseWeight& weight, const std::string& name);

/// SparseWeight::stored and most, as compress() sets them.
struct SparseCounts {
  int64_t stored = 0, most = 0;
};
/// Checks the arrays as validate() does, whatever `stored` and `most` say, and returns these counts.
SparseCounts validate_arrays(const SparseWeight& weight, const std::string& name);

/// f32 [in] on the CPU: the Euclidean norm of each column (WINA's c_j, arXiv:2505.19427), summed in f64 in
/// the order of the rows.
Tensor column_norms(const SparseWeight& weight, Site site = Site::here());

}  // namespace tessera::ops

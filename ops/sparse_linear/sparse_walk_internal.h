#pragma once

#include <algorithm>
#include <array>
#include <bit>

#include "ops/sparse_linear/sparse_weight.h"
#include "runtime/integers.h"

/// The order of the elements within a group, for the CPU: one walk serves compression, decompression and the
/// products.

namespace tessera::ops::sparse_internal {

/// Row and column, in their group, of bit 0 of a bitmap, and of bit `bit` relative to it.
struct TcaBme {
  static constexpr int64_t kRows = tca_bme::kGroupRows, kColumns = tca_bme::kGroupColumns,
                           kBitmaps = tca_bme::kBitmaps;
  static int64_t row_of(int64_t bitmap) { return bitmap / 16 * 16 + bitmap % 2 * 8; }
  static int64_t column_of(int64_t bitmap) { return bitmap / 4 % 4 * 16 + bitmap / 2 % 2 * 8; }
  static int64_t row_of_bit(int bit) { return bit / 8; }
  static int64_t column_of_bit(int bit) { return bit % 8; }
};
struct TiledCbc {
  static constexpr int64_t kRows = tiled_cbc::kGroupRows, kColumns = tiled_cbc::kGroupColumns,
                           kBitmaps = tiled_cbc::kBitmaps;
  static int64_t row_of(int64_t bitmap) { return bitmap % tiled_cbc::kBitmapsOfColumn * 64; }
  static int64_t column_of(int64_t bitmap) { return bitmap / tiled_cbc::kBitmapsOfColumn; }
  static int64_t row_of_bit(int bit) { return bit; }
  static int64_t column_of_bit(int) { return 0; }
};

/// Rows of slices: the columns of a group depend on the matrix.
struct SellDelta4 {
  static constexpr int64_t kRows = sell_delta4::kGroupRows;
};

/// The lanes of streams.
struct MmaDelta4 {
  static constexpr int64_t kRows = mma_delta4::kGroupRows;
};

/// f(order) with the order of the groups of a format with bitmaps.
template <class F>
decltype(auto) with_bitmaps(SparseFormat format, F&& f) {
  return format == SparseFormat::tca_bme ? f(TcaBme{}) : f(TiledCbc{});
}
/// f(order) with the order of the format's groups. Not for dense_columns.
template <class F>
decltype(auto) with_order(SparseFormat format, F&& f) {
  return format == SparseFormat::sell_delta4  ? f(SellDelta4{})
         : format == SparseFormat::mma_delta4 ? f(MmaDelta4{})
                                              : with_bitmaps(format, f);
}

/// Unsigned integers with the bits of an element of 2, 4 or 8 bytes.
template <size_t kBytes>
using BitsOf = std::conditional_t<kBytes == 2, uint16_t, std::conditional_t<kBytes == 4, uint32_t, uint64_t>>;

/// f.operator()<Bits>() for the element's size.
template <class F>
decltype(auto) with_bits(DType dtype, F&& f) {
  return size_of(dtype) == 2 ? f.template operator()<uint16_t>() : f.template operator()<uint32_t>();
}

/// visit(row, column, gap, value) for every entry of a group of sell_delta4; rows and columns of the matrix,
/// or, of what pads a row, past it.
template <class T, class Visit>
void for_each_entry(const SparseWeight& weight, int64_t group, Visit&& visit) {
  using namespace sell_delta4;
  const int64_t window = group / weight.group_columns(), row = window * kGroupRows,
                first = group % weight.group_columns() * width_of(weight.in);
  const T* const values = static_cast<const T*>(weight.values.raw());
  const uint32_t* const gaps = reinterpret_cast<const uint32_t*>(weight.gaps.data<int32_t>());
  const int32_t* const offsets = weight.offsets.data<int32_t>() + group * kSlices;
  const uint32_t* const rows = reinterpret_cast<const uint32_t*>(weight.info.data<int32_t>()) + window * 64;
  for (int64_t slot = 0; slot < kGroupRows; ++slot) {
    const int64_t slice = slot / kSliceRows, lane = slot % kSliceRows,
                  r = rows[slot / 4] >> slot % 4 * 8 & 0xFF;
    int64_t column = first;
    for (int64_t chunk = offsets[slice]; chunk < offsets[slice + 1]; ++chunk)
      for (int64_t e = 0; e < kEntries; ++e) {
        const int64_t gap = gaps[chunk * kSliceRows + lane] >> 4 * e & 15;
        visit(row + r, column + gap, gap, values[chunk * kChunk + lane * kEntries + e]);
        column += gap + 1;
      }
  }
}

/// The elements of a lane of a stream of mma_delta4, by position.
struct MmaStream {
  int64_t first_column, tiles;  // of the half of the part

  MmaStream(int64_t in, int64_t part, int64_t half) {
    const int64_t first = mma_delta4::first_tile(in, part);
    tiles = mma_delta4::first_tile(in, part + 1) - first;
    first_column = first * mma_delta4::kTileColumns + half * tiles * 8;
  }
  /// Rounded up to the entries of a chunk: the last ones may be past the stream's columns.
  int64_t positions() const { return round_up(tiles * mma_delta4::kTilePositions, mma_delta4::kEntries); }
  bool has(int64_t position) const { return position < tiles * mma_delta4::kTilePositions; }
  /// The row's place in its strip.
  static int64_t row_of(int64_t lane, int64_t position) { return lane / 4 + position / 2 % 2 * 8; }
  int64_t column_of(int64_t lane, int64_t position) const {
    return first_column + position / 4 * 8 + lane % 4 * 2 + position % 2;
  }
};

/// visit(lane, place, column, position, value) for every entry of a stream of mma_delta4 (0 to 31 of its
/// group): the row's place among those of the group's strips, the column of the matrix.
template <class T, class Visit>
void for_each_entry(const SparseWeight& weight, int64_t group, int64_t stream, Visit&& visit) {
  using namespace mma_delta4;
  const MmaStream order(weight.in, group % weight.group_columns(), stream % kStreams);
  const T* const values = static_cast<const T*>(weight.values.raw());
  const uint32_t* const gaps = reinterpret_cast<const uint32_t*>(weight.gaps.data<int32_t>());
  const int32_t* const chunks = weight.offsets.data<int32_t>() + group * (kStrips * kStreams) + stream;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    int64_t position = -1;
    for (int64_t chunk = chunks[0]; chunk < chunks[1]; ++chunk)
      for (int64_t e = 0; e < kEntries; ++e) {
        position += 1 + (gaps[chunk * kLanes + lane] >> 4 * e & 15);
        visit(lane, stream / kStreams * kStripRows + MmaStream::row_of(lane, position),
              order.column_of(lane, position), position, values[chunk * kChunk + lane * kEntries + e]);
      }
  }
}

/// The rows of a window by their places among those of the strips of a group of mma_delta4.
using MmaRows = std::array<int64_t, size_t(mma_delta4::kGroupRows)>;
inline MmaRows rows_by_place(const SparseWeight& weight, int64_t group) {
  MmaRows rows{};
  const auto* const places =
      reinterpret_cast<const uint8_t*>(weight.info.data<int32_t>()) + group * mma_delta4::kGroupRows;
  for (int64_t row = 0; row < mma_delta4::kGroupRows; ++row) rows[places[row]] = row;
  return rows;
}

/// visit(row, column, value) for every stored element of a group, with bitmaps in the order of the values;
/// rows and columns of the matrix. T has the size of an element.
template <class Order, class T, class Visit>
void for_each_stored(const SparseWeight& weight, int64_t group, Visit&& visit) {
  if constexpr (std::is_same_v<Order, SellDelta4>) {
    for_each_entry<T>(weight, group, [&](int64_t r, int64_t c, int64_t, T value) {
      if (std::bit_cast<BitsOf<sizeof(T)>>(value) != 0) visit(r, c, value);
    });
  } else if constexpr (std::is_same_v<Order, MmaDelta4>) {
    const MmaRows rows = rows_by_place(weight, group);
    const int64_t row = group / weight.group_columns() * Order::kRows;
    for (int64_t stream = 0; stream < mma_delta4::kStrips * mma_delta4::kStreams; ++stream)
      for_each_entry<T>(weight, group, stream, [&](int64_t, int64_t place, int64_t c, int64_t, T value) {
        if (std::bit_cast<BitsOf<sizeof(T)>>(value) != 0) visit(row + rows[size_t(place)], c, value);
      });
  } else {
    const int64_t row = group / weight.group_columns() * Order::kRows,
                  column = group % weight.group_columns() * Order::kColumns;
    const T* value = static_cast<const T*>(weight.values.raw()) + weight.offsets.data<int32_t>()[group];
    const int64_t* const bitmaps = weight.bitmaps.data<int64_t>() + group * Order::kBitmaps;
    for (int64_t b = 0; b < Order::kBitmaps; ++b)
      for (uint64_t left = uint64_t(bitmaps[b]); left != 0; left &= left - 1) {
        const int bit = std::countr_zero(left);
        visit(row + Order::row_of(b) + Order::row_of_bit(bit),
              column + Order::column_of(b) + Order::column_of_bit(bit), *value++);
      }
  }
}

}  // namespace tessera::ops::sparse_internal

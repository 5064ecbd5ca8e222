#pragma once

#include <algorithm>
#include <bit>

#include "ops/sparse_linear/sparse_weight.h"

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

/// f(order) with the order of the groups of a format with bitmaps.
template <class F>
decltype(auto) with_bitmaps(SparseFormat format, F&& f) {
  return format == SparseFormat::tca_bme ? f(TcaBme{}) : f(TiledCbc{});
}
/// f(order) with the order of the format's groups. Not for dense_columns.
template <class F>
decltype(auto) with_order(SparseFormat format, F&& f) {
  return format == SparseFormat::sell_delta4 ? f(SellDelta4{}) : with_bitmaps(format, f);
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

/// visit(row, column, value) for every stored element of a group, with bitmaps in the order of the values;
/// rows and columns of the matrix. T has the size of an element.
template <class Order, class T, class Visit>
void for_each_stored(const SparseWeight& weight, int64_t group, Visit&& visit) {
  if constexpr (std::is_same_v<Order, SellDelta4>) {
    for_each_entry<T>(weight, group, [&](int64_t r, int64_t c, int64_t, T value) {
      if (std::bit_cast<BitsOf<sizeof(T)>>(value) != 0) visit(r, c, value);
    });
    return;
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

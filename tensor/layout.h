#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <ostream>
#include <span>

#include "runtime/error.h"

namespace tessera {

inline constexpr int kMaxRank = 8;

/// Up to eight sizes, each at least 0. A value: no heap.
class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<int64_t> sizes)
      : Shape(std::span<const int64_t>(sizes.begin(), sizes.size())) {}
  /// Throws if there are more than kMaxRank sizes, one is negative, or the product overflows 63 bits.
  explicit Shape(std::span<const int64_t> sizes);

  int rank() const { return rank_; }
  /// Size of a dimension; negative counts from the end. Throws if there is no such dimension.
  int64_t operator[](int dim) const { return sizes_[size_t(resolve(dim))]; }
  int64_t count() const;  // product of all sizes; 1 for rank 0
  /// 0 <= dim < rank for -rank <= dim < rank; throws otherwise.
  int resolve(int dim) const {
    const int resolved = dim < 0 ? dim + rank_ : dim;
    if (resolved < 0 || resolved >= rank_) [[unlikely]]
      fail_resolve(dim);
    return resolved;
  }
  Shape with(int dim, int64_t size) const;      // one size replaced
  Shape without(int dim) const;                 // one dimension removed
  Shape inserted(int dim, int64_t size) const;  // a dimension added before `dim` (dim == rank: at the end)
  std::span<const int64_t> sizes() const { return {sizes_.data(), size_t(rank_)}; }
  const int64_t* begin() const { return sizes_.data(); }
  const int64_t* end() const { return sizes_.data() + rank_; }

  friend bool operator==(const Shape& a, const Shape& b);

 private:
  [[noreturn]] void fail_resolve(int dim) const;
  std::array<int64_t, kMaxRank> sizes_{};
  int rank_ = 0;
};

std::ostream& operator<<(std::ostream& out, const Shape& shape);  // "[2, 3]"

/// The shape two operands broadcast to (NumPy's rule: align at the end; sizes agree or one is 1). Throws,
/// naming `what`.
Shape broadcast(const Shape& a, const Shape& b, const char* what);

/// The shape of `count` elements with these sizes, of which one may be -1: what the others leave for it.
/// Throws, as reshape, if there is none.
Shape complete_shape(std::span<const int64_t> sizes, int64_t count);

/// Positions of a view's elements, in elements from the start of its storage. Strides may be 0 (expanded) but
/// not negative. "Rows" are along the last dimension; "pitched" rows start at a fixed distance that may
/// exceed their length.
struct Layout {
  Shape shape;
  std::array<int64_t, kMaxRank> strides{};
  int64_t offset = 0;

  friend bool operator==(const Layout&, const Layout&) = default;

  /// Dense row-major.
  static Layout packed(const Shape& shape);
  /// Row-major whose rows start every `pitch` elements (pitch >= the last size).
  static Layout pitched(const Shape& shape, int64_t pitch);

  int rank() const { return shape.rank(); }
  int64_t stride(int dim) const { return strides[size_t(shape.resolve(dim))]; }
  bool is_packed() const;
  /// True if elements share memory: a dimension of more than one has stride 0.
  bool is_expanded() const;
  /// True if the innermost stride is 1 (or the rows have at most one element) and the leading dimensions
  /// collapse to one, so that element (r, c) is at offset + r * row_stride() + c.
  bool has_rows() const;
  int64_t row_stride() const;  // of such a layout
  int64_t rows() const;        // product of all sizes but the last; 1 for rank 0 and 1
  int64_t row_length() const;  // the last size; 1 for rank 0
  /// Distance in elements from the first one to one past the last one that the view can reach; 0 if empty.
  int64_t extent() const;
};

}  // namespace tessera

#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "tensor/convert.h"

namespace tessera::ops {

/// Rows in the arithmetic type: read as they are where that is T, else by way of a buffer.
template <class T>
class WideRow {
 public:
  static constexpr bool kCopies = !std::is_same_v<T, Compute<T>>;

  explicit WideRow(int64_t length) : length_(length) {
    if (kCopies) buffer_.resize(size_t(length));
  }
  /// Valid until the next call; null for null.
  const Compute<T>* read(const T* row) {
    if constexpr (kCopies) {
      if (!row) return nullptr;
      widen(buffer_.data(), row, length_);
      return buffer_.data();
    } else {
      return row;
    }
  }
  /// Where to write the row; `written` rounds what was written.
  Compute<T>* write(T* row) {
    if constexpr (kCopies) {
      return row ? buffer_.data() : nullptr;
    } else {
      return row;
    }
  }
  void written(T* row) {
    if constexpr (kCopies) {
      if (row) narrow(row, buffer_.data(), length_);
    }
  }

 private:
  int64_t length_;
  std::vector<Compute<T>> buffer_;
};

}  // namespace tessera::ops

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "tensor/convert.h"
#include "tensor/elementwise.h"
#include "tensor/tensor.h"

namespace tessera::ops {

namespace elementwise_detail {

/// One run of elementwise_cpu. Flattened: the compiler would leave calls in the loops, such as that of erf in
/// gelu, which keep them from vectorising.
template <class T, class F, size_t... K>
[[gnu::flatten]] void run(const F& f, T* to, const std::array<const T*, sizeof...(K)>& from,
                          const std::array<int64_t, 1 + sizeof...(K)>& strides, int64_t n,
                          std::index_sequence<K...>) {
  using C = Compute<T>;
  if constexpr (std::is_same_v<T, C>) {
    if (((strides[K + 1] == 1) && ... && (strides[0] == 1))) {
      for (int64_t i = 0; i < n; ++i) to[i] = C(f(from[K][i]...));
      return;
    }
  }
  // Packed in the arithmetic type, so that f vectorises here too; what lies so in memory is not copied.
  constexpr int64_t kAtOnce = 512;
  C values[1 + sizeof...(K)][kAtOnce];
  const auto read = [](C* buffer, const T* at, int64_t length, int64_t stride) -> const C* {
    if constexpr (std::is_same_v<T, C>)
      if (stride == 1) return at;
    widen(buffer, at, length, stride);
    return buffer;
  };
  for (int64_t i = 0; i < n; i += kAtOnce) {
    const int64_t length = std::min(kAtOnce, n - i);
    const std::array<const C*, sizeof...(K)> at{
        read(values[K + 1], from[K] + i * strides[K + 1], length, strides[K + 1])...};
    C* y_at = values[0];
    if constexpr (std::is_same_v<T, C>)
      if (strides[0] == 1) y_at = to + i;
    for (int64_t j = 0; j < length; ++j) y_at[j] = C(f(at[K][j]...));
    if (y_at == values[0]) narrow(to + i * strides[0], values[0], length, strides[0]);
  }
}

/// A tile packed in the arithmetic type, which is read along its rows or, if it is transposed, along its
/// columns.
template <class T>
void read_tile(Compute<T>* tile, const T* from, int64_t n, int64_t stride, int64_t rows, int64_t across) {
  if (across != 1) {
    for (int64_t r = 0; r < rows; ++r) widen(tile + r * n, from + r * across, n, stride);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    Compute<T> column[kTileSide];
    widen(column, from + i * stride, rows);
    for (int64_t r = 0; r < rows; ++r) tile[r * n + i] = column[r];
  }
}

/// A tile of elementwise_cpu.
template <class T, class F, size_t... K>
[[gnu::flatten]] void run_tile(const F& f, T* to, const std::array<const T*, sizeof...(K)>& from,
                               const std::array<int64_t, 1 + sizeof...(K)>& strides, int64_t n,
                               const std::array<int64_t, 1 + sizeof...(K)>& across, int64_t rows,
                               std::index_sequence<K...>) {
  using C = Compute<T>;
  C values[1 + sizeof...(K)][kTileSide * kTileSide];
  (read_tile(values[K + 1], from[K], n, strides[K + 1], rows, across[K + 1]), ...);
  for (int64_t i = 0; i < n * rows; ++i) values[0][i] = C(f(values[K + 1][i]...));
  for (int64_t r = 0; r < rows; ++r) narrow(to + r * across[0], values[0] + r * n, n, strides[0]);
}

}  // namespace elementwise_detail

/// y = f(x...) element by element on the CPU. T is the element type of all operands, f works on Compute<T>.
/// Inputs broadcast to y's shape.
template <class T, class F, class... Inputs>
void elementwise_cpu(const Tensor& y, F&& f, const Inputs&... x) {
  constexpr size_t kInputs = sizeof...(Inputs);
  T* const out = y.data<T>();
  const std::array<const T*, kInputs> in{x.template data<T>()...};
  for_each_tile(make_loop(y.shape(), y, x...),
                [&](const auto& offsets, const auto& strides, int64_t n, const auto& across, int64_t rows) {
                  constexpr auto kEach = std::make_index_sequence<kInputs>{};
                  T* const to = out + offsets[0];
                  std::array<const T*, kInputs> from;
                  for (size_t k = 0; k < kInputs; ++k) from[k] = in[k] + offsets[k + 1];
                  if (rows == 1)
                    elementwise_detail::run(f, to, from, strides, n, kEach);
                  else
                    elementwise_detail::run_tile(f, to, from, strides, n, across, rows, kEach);
                });
}

}  // namespace tessera::ops

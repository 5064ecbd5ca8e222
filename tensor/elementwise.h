#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>

#include "runtime/parallel.h"
#include "tensor/convert.h"
#include "tensor/layout.h"
#include "tensor/tensor.h"

namespace tessera {

/// An iteration space over N operands with their strides: drops dimensions of size 1 and merges neighbours
/// that are contiguous in every operand, so packed tensors have one dimension and pitched ones two. The last
/// dimension is the innermost. Trivially copyable: a kernel argument.
template <int N>
struct StridedLoop {
  int rank = 0;       // 1 ... kMaxRank (a scalar has one dimension of size 1)
  int64_t count = 0;  // product of the sizes
  int64_t sizes[kMaxRank] = {};
  int64_t strides[N][kMaxRank] = {};  // in elements
};

/// The loop over `shape`, to which every operand's layout broadcasts (aligned at the end).
template <int N>
StridedLoop<N> make_loop(const Shape& shape, const std::array<const Layout*, N>& operands) {
  StridedLoop<N> loop;
  loop.count = shape.count();
  for (int dim = 0; dim < shape.rank(); ++dim) {
    const int64_t size = shape[dim];
    if (size == 1) continue;
    int64_t strides[N];
    for (int n = 0; n < N; ++n) {
      const Layout& layout = *operands[size_t(n)];
      const int own = dim - (shape.rank() - layout.rank());
      strides[n] = own < 0 || layout.shape[own] == 1 ? 0 : layout.strides[size_t(own)];
    }
    bool merges = loop.rank > 0;
    for (int n = 0; n < N && merges; ++n) merges = loop.strides[n][loop.rank - 1] == strides[n] * size;
    if (merges) {
      loop.sizes[loop.rank - 1] *= size;
    } else {
      loop.sizes[loop.rank++] = size;
    }
    for (int n = 0; n < N; ++n) loop.strides[n][loop.rank - 1] = strides[n];
  }
  if (loop.rank == 0) {
    loop.rank = 1;
    loop.sizes[0] = 1;
  }
  return loop;
}

template <class... Tensors>
StridedLoop<int(sizeof...(Tensors))> make_loop(const Shape& shape, const Tensors&... tensors) {
  return make_loop<int(sizeof...(Tensors))>(shape, {&tensors.layout()...});
}

/// Runs the loop on the CPU's threads: `run(offsets, strides, n)` handles n elements, at offsets[k] + i *
/// strides[k] in operand k. Pieces are disjoint and run in any order.
template <int N, class Run>
void for_each_run(const StridedLoop<N>& loop, Run&& run) {
  if (loop.count == 0) return;
  constexpr int64_t kGrain = 8192;  // elements per block: 2 us of additions, 8 us of exponentials
  const int inner = loop.rank - 1;
  const int64_t length = loop.sizes[inner], outer = loop.count / length;
  const int64_t pieces_per_row = (length + kGrain - 1) / kGrain;
  std::array<int64_t, N> strides;
  for (int n = 0; n < N; ++n) strides[size_t(n)] = loop.strides[n][inner];
  const int64_t rows_per_grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(length, 1));
  parallel_for(outer * pieces_per_row, rows_per_grain, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      int64_t row = piece / pieces_per_row;
      const int64_t first = piece % pieces_per_row * kGrain;
      std::array<int64_t, N> offsets{};
      for (int dim = inner - 1; dim >= 0; --dim) {
        const int64_t index = row % loop.sizes[dim];
        row /= loop.sizes[dim];
        for (int n = 0; n < N; ++n) offsets[size_t(n)] += index * loop.strides[n][dim];
      }
      for (int n = 0; n < N; ++n) offsets[size_t(n)] += first * strides[size_t(n)];
      run(offsets, strides, std::min(kGrain, length - first));
    }
  });
}

/// y = f(x...) element by element on the CPU. T is the element type of all operands, f works on Compute<T>.
/// Inputs broadcast to y's shape.
template <class T, class F, class... Inputs>
void elementwise_cpu(const Tensor& y, F&& f, const Inputs&... x) {
  using C = Compute<T>;
  constexpr int N = 1 + int(sizeof...(Inputs));
  const auto loop = make_loop(y.shape(), y, x...);
  T* const out = y.data<T>();
  const std::array<const T*, N - 1> in{x.template data<T>()...};
  for_each_run<N>(
      loop, [&](const std::array<int64_t, N>& offsets, const std::array<int64_t, N>& strides, int64_t n) {
        const auto row = [&]<size_t... K>(std::index_sequence<K...>) {
          T* const to = out + offsets[0];
          if constexpr (std::is_same_v<T, C>) {
            if (((strides[K + 1] == 1) && ... && (strides[0] == 1))) {
              for (int64_t i = 0; i < n; ++i) to[i] = C(f((in[K] + offsets[K + 1])[i]...));
              return;
            }
          }
          // Packed in the arithmetic type, so that f vectorises here too; what lies so in memory is not
          // copied.
          constexpr int64_t kAtOnce = 512;
          C values[N][kAtOnce];
          const auto read = [](C* buffer, const T* from, int64_t length, int64_t stride) -> const C* {
            if constexpr (std::is_same_v<T, C>)
              if (stride == 1) return from;
            widen(buffer, from, length, stride);
            return buffer;
          };
          for (int64_t i = 0; i < n; i += kAtOnce) {
            const int64_t length = std::min(kAtOnce, n - i);
            const std::array<const C*, N - 1> at{
                read(values[K + 1], in[K] + offsets[K + 1] + i * strides[K + 1], length, strides[K + 1])...};
            C* y_at = values[0];
            if constexpr (std::is_same_v<T, C>)
              if (strides[0] == 1) y_at = to + i;
            for (int64_t j = 0; j < length; ++j) y_at[j] = C(f(at[K][j]...));
            if (y_at == values[0]) narrow(to + i * strides[0], values[0], length, strides[0]);
          }
        };
        row(std::make_index_sequence<size_t(N - 1)>{});
      });
}

}  // namespace tessera

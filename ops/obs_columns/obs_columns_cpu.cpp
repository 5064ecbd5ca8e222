#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/obs_columns/obs_columns_kernels.h"
#include "runtime/parallel.h"

namespace tessera::ops {
namespace {

/// Marks the `zeros` columns of the group with the smallest (w / U_jj)^2.
template <class T>
void choose_group(uint8_t* keep, const T* w, const T* u, int64_t columns, int64_t first, int64_t group,
                  int64_t zeros) {
  std::fill(keep + first, keep + first + group, uint8_t{1});
  for (int64_t drop = 0; drop < zeros; ++drop) {
    int64_t least = -1;
    T smallest = 0;
    for (int64_t j = first; j < first + group; ++j) {
      const T value = column_score(w[j], u[j * columns + j]);
      if (keep[j] && (least < 0 || value < smallest)) least = j, smallest = value;
    }
    keep[least] = 0;
  }
}

template <class T>
void sweep_row(T* w, T* error, const T* u, uint8_t* keep, int64_t columns, const ObsColumns& how,
               int64_t row) {
  const bool rounds = how.grid.scale.defined();
  const T scale = rounds ? how.grid.scale.data<T>()[row] : T(1),
          zero = rounds ? how.grid.zero.data<T>()[row] : T(0), highest = T(how.grid.levels - 1);
  for (int64_t j = 0; j < columns; ++j) {
    if (!how.keep.defined() && j % how.group == 0) choose_group(keep, w, u, columns, j, how.group, how.zeros);
    T q = 0;
    if (keep[j]) q = rounds ? on_grid(std::nearbyint(w[j] / scale) + zero, scale, zero, highest) : w[j];
    const T* const factors = u + j * columns;
    const T e = (w[j] - q) / factors[j];
    w[j] = q;
    error[j] = e;
    for (int64_t k = j + 1; k < columns; ++k) w[k] -= e * factors[k];
  }
}

template <class T>
void sweep(const ObsBlock& result, const Tensor& factor, const ObsColumns& how) {
  const int64_t rows = result.weight.size(0), columns = result.weight.size(1);
  constexpr int64_t kGrain = 1 << 14;  // multiply-adds for a thread
  parallel_for(rows, std::max<int64_t>(1, kGrain / (columns * columns)), [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> chosen(static_cast<size_t>(columns));
    for (int64_t r = begin; r < end; ++r) {
      if (how.keep.defined()) std::copy_n(how.keep.data<uint8_t>() + r * columns, columns, chosen.begin());
      sweep_row(result.weight.data<T>() + r * columns, result.error.data<T>() + r * columns, factor.data<T>(),
                chosen.data(), columns, how, r);
    }
  });
}

}  // namespace

void obs_columns_cpu(const ObsBlock& result, const Tensor& factor, const ObsColumns& how) {
  if (result.weight.dtype() == DType::f64) return sweep<double>(result, factor, how);
  sweep<float>(result, factor, how);
}

}  // namespace tessera::ops

#include <algorithm>

#include "ops/activation/activation_math.h"
#include "ops/elementwise.h"
#include "ops/linear/activation_of_result.h"
#include "ops/linear/linear_activation_kernels.h"
#include "runtime/integers.h"
#include "runtime/parallel.h"

namespace tessera::ops {

void column_counts_cpu(const Tensor& counts, const Tensor& x) {
  constexpr int64_t kColumns = 64;  // a thread's unit
  const int64_t rows = x.size(0), columns = x.size(1), tiles = ceil_div(columns, kColumns);
  const int64_t down = x.layout().stride(0), across = x.layout().stride(1);
  int32_t* const out = counts.data<int32_t>();
  dispatch_floating(x.dtype(), "column_counts", [&]<class T>() {
    const T* const in = x.data<T>();
    const int64_t grain = std::max<int64_t>(1, 64 * 1024 / std::max<int64_t>(1, rows * kColumns));
    parallel_for(tiles, grain, [&](int64_t begin, int64_t end) {
      for (int64_t tile = begin; tile < end; ++tile) {
        const int64_t first = tile * kColumns, width = std::min(kColumns, columns - first);
        int32_t found[kColumns] = {};
        for (int64_t row = 0; row < rows; ++row)
          for (int64_t i = 0; i < width; ++i)
            found[i] += Compute<T>(in[row * down + (first + i) * across]) != 0;
        std::copy(found, found + width, out + first);
      }
    });
  });
}

void activation_gradient_of_result_cpu(const Tensor& dh, const Tensor& dy, const Tensor& y, Activation kind) {
  dispatch_floating(y.dtype(), name_of(kind), [&]<class T>() {
    dispatch_activation(kind, [&]<Activation kKind>() {
      elementwise_cpu<T>(
          dh, [](Compute<T> g, Compute<T> v) { return g * slope_of_result<kKind>(v); }, dy, y);
    });
  });
}

}  // namespace tessera::ops

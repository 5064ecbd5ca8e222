#include <algorithm>

#include "ops/linear/linear_kernels.h"
#include "runtime/integers.h"
#include "runtime/parallel.h"

namespace tessera::ops {

void column_sums_cpu(const Tensor& sums, const Tensor& x) {
  constexpr int64_t kColumns = 64, kRows = 256;  // a thread's unit; blocks of rows whose sums are added up
  const int64_t rows = x.size(0), groups = x.size(1), columns = x.size(2);
  const int64_t row = x.layout().stride(0), group = x.layout().stride(1);
  const int64_t tiles = ceil_div(columns, kColumns);
  dispatch_floating(x.dtype(), "column sums", [&]<class T>() {
    using C = Compute<T>;
    const T* const in = x.data<T>();
    C* const out = sums.data<C>();
    const int64_t grain = std::max<int64_t>(1, 64 * 1024 / (rows * kColumns));
    parallel_for(groups * tiles, grain, [&](int64_t begin, int64_t end) {
      for (int64_t tile = begin; tile < end; ++tile) {
        const int64_t g = tile / tiles, first = tile % tiles * kColumns;
        const int64_t width = std::min(kColumns, columns - first);
        C total[kColumns] = {};
        for (int64_t r0 = 0; r0 < rows; r0 += kRows) {
          C block[kColumns] = {};
          for (int64_t r = r0; r < std::min(rows, r0 + kRows); ++r) {
            const T* const from = in + r * row + g * group + first;
            for (int64_t c = 0; c < width; ++c) block[c] += C(from[c]);
          }
          for (int64_t c = 0; c < width; ++c) total[c] += block[c];
        }
        std::copy(total, total + width, out + g * columns + first);
      }
    });
  });
}

}  // namespace tessera::ops

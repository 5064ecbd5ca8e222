#include <algorithm>
#include <numeric>
#include <vector>

#include "ops/topk/topk_kernels.h"
#include "runtime/parallel.h"

namespace tessera::ops {

void topk_cpu(const Tensor& indices, const Tensor& x) {
  const int64_t length = x.row_length(), stride = x.row_stride(), k = indices.size(-1);
  constexpr int64_t kGrain = 4096;  // elements for a thread
  const auto run = [&]<class T>() {
    using Compared = std::conditional_t<std::is_integral_v<T>, T, Compute<T>>;
    const T* const from = x.data<T>();
    int64_t* const to = indices.data<int64_t>();
    parallel_for(x.rows(), std::max<int64_t>(1, kGrain / length), [&](int64_t begin, int64_t end) {
      std::vector<int64_t> order(static_cast<size_t>(length));
      for (int64_t line = begin; line < end; ++line) {
        const auto value = [row = from + line * stride](int64_t i) { return Compared(row[i]); };
        const auto comes_first = [&](int64_t i, int64_t j) {
          const auto a = value(i), b = value(j);
          const bool a_is_nan = a != a, b_is_nan = b != b;
          if (a_is_nan != b_is_nan) return a_is_nan;
          return a > b || (!(a < b) && i < j);
        };
        std::iota(order.begin(), order.end(), int64_t{0});
        if (k < length) std::nth_element(order.begin(), order.begin() + k, order.end(), comes_first);
        std::sort(order.begin(), order.begin() + k, comes_first);
        std::copy_n(order.begin(), k, to + line * k);
      }
    });
  };
  dispatch_among<double, float, bf16, f16, int64_t, int32_t>(x.dtype(), run, [] {});
}

}  // namespace tessera::ops

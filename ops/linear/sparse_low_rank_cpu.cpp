#include "ops/linear/sparse_low_rank_kernels.h"
#include "runtime/parallel.h"
#include "tensor/dtype.h"

namespace tessera::ops {
namespace {

constexpr int64_t kGrain = 1 << 14;

}  // namespace

void add_at_cpu(const Tensor& w, const Tensor& values, const Tensor& support) {
  const int64_t columns = w.size(1), stride = w.row_stride();
  const int32_t* const places = support.data<int32_t>();
  dispatch_floating(w.dtype(), "sparse_low_rank", [&]<class T>() {
    using C = Compute<T>;
    T* const to = w.data<T>();
    const T* const from = values.data<T>();
    parallel_for(values.count(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t place = places[i];
        check(place >= 0 && place < w.count(), "sparse_low_rank: support[", i, "] is ", place,
              "; the weight has elements 0 to ", w.count() - 1);
        T& element = to[place / columns * stride + place % columns];
        element = T(C(element) + C(from[i]));
      }
    });
  });
}

void take_at_cpu(const Tensor& to, const Tensor& panel, const Tensor& support, int64_t first) {
  const int64_t columns = panel.size(1), stride = panel.row_stride(), begin_place = first * columns,
                end_place = (first + panel.size(0)) * columns;
  const int32_t* const places = support.data<int32_t>();
  dispatch_floating(to.dtype(), "sparse_low_rank", [&]<class T>() {
    T* const taken = to.data<T>();
    const T* const from = panel.data<T>();
    parallel_for(to.count(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (places[i] < begin_place || places[i] >= end_place) continue;
        const int64_t place = places[i] - begin_place;
        taken[i] = from[place / columns * stride + place % columns];
      }
    });
  });
}

}  // namespace tessera::ops

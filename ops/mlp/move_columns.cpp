#include "ops/mlp/move_columns.h"
#include "runtime/has_cuda.h"

#include "runtime/parallel.h"

namespace tessera::ops {
namespace {

void move(const Tensor& x, const Tensor& part, const Tensor& indices, Move how) {
  if (part.count() == 0) return;
  if (x.device().is_cpu()) {
    move_columns_cpu(x, part, indices, how);
  } else if constexpr (kCuda) {
    move_columns_cuda(x, part, indices, how);
  }
}

}  // namespace

void take_columns(const Tensor& part, const Tensor& x, const Tensor& indices, bool clears) {
  move(x, part, indices, clears ? Move::take_and_clear : Move::take);
}

void add_columns(const Tensor& x, const Tensor& part, const Tensor& indices) {
  move(x, part, indices, Move::add);
}

void move_columns_cpu(const Tensor& x, const Tensor& part, const Tensor& indices, Move how) {
  const int64_t rows = part.size(0), columns = part.size(1);
  const int64_t x_down = x.layout().stride(0), x_across = x.layout().stride(1);
  const int64_t down = part.layout().stride(0), across = part.layout().stride(1);
  const int32_t* const index = indices.data<int32_t>();
  dispatch_floating(x.dtype(), "columns", [&]<class T>() {
    T* const all = x.data<T>();
    T* const own = part.data<T>();
    parallel_for(rows, std::max<int64_t>(1, 16384 / columns), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        for (int64_t i = 0; i < columns; ++i) {
          T& there = all[row * x_down + index[i] * x_across];
          T& here = own[row * down + i * across];
          if (how == Move::add) {
            there = T(Compute<T>(there) + Compute<T>(here));
          } else {
            here = there;
            if (how == Move::take_and_clear) there = T(0);
          }
        }
    });
  });
}

}  // namespace tessera::ops

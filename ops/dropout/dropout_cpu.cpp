#include "ops/dropout/dropout_kernels.h"
#include "tensor/elementwise.h"

namespace tessera::ops {

void dropout_cpu(const Tensor& y, const Tensor& x, const DropoutMask& mask) {
  const auto loop = make_loop(y.shape(), y, x);
  const int inner = loop.rank - 1;
  const int64_t width = loop.sizes[inner];
  dispatch_floating(x.dtype(), "dropout", [&]<class T>() {
    const auto scale = Compute<T>(mask.scale);
    T* const out = y.data<T>();
    const T* const in = x.data<T>();
    parallel_for(loop.count, 4096, [&](int64_t begin, int64_t end) {
      DropoutWalk walk(mask);
      for (int64_t place = begin; place < end;) {  // row by row
        int64_t row = place / width, at = 0, from = 0;
        const int64_t first = place % width, n = std::min(end - place, width - first);
        for (int dim = inner - 1; dim >= 0; --dim) {
          const int64_t index = row % loop.sizes[dim];
          row /= loop.sizes[dim];
          at += index * loop.strides[0][dim], from += index * loop.strides[1][dim];
        }
        for (int64_t i = first; i < first + n; ++i, ++place) {
          const auto value = Compute<T>(in[from + i * loop.strides[1][inner]]);
          out[at + i * loop.strides[0][inner]] = T(value * (walk.keeps(place) ? scale : Compute<T>(0)));
        }
      }
    });
  });
}

}  // namespace tessera::ops

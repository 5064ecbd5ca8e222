#include <algorithm>

#include "ops/dropout/dropout_kernels.h"
#include "tensor/elementwise.h"

namespace tessera::ops {

template <class C>
void dropout_factors(C* factors, const DropoutMask& mask, int64_t place, int64_t n) {
  constexpr int kBlocks = 16;  // side by side, so that the compiler vectorises
  const uint64_t seed = mask.stream.seed, offset = mask.stream.offset();
  const C scale = C(mask.scale);
  C drawn[4 * kBlocks];
  for (const int64_t end = place + n; place < end;) {
    const int64_t skipped = place % 4, taken = std::min(end - place, int64_t(4 * kBlocks) - skipped);
    const uint64_t first = uint64_t(place / 4);
    for (int i = 0; i < kBlocks; ++i) {
      const Uint4 words = philox(seed, offset, first + uint64_t(i));
      for (int w = 0; w < 4; ++w) drawn[4 * i + w] = mask.keeps(words.word[w]) ? scale : C(0);
    }
    std::copy_n(drawn + skipped, taken, factors);
    factors += taken, place += taken;
  }
}

template void dropout_factors(float*, const DropoutMask&, int64_t, int64_t);
template void dropout_factors(double*, const DropoutMask&, int64_t, int64_t);

void dropout_cpu(const Tensor& y, const Tensor& x, const DropoutMask& mask) {
  const auto loop = make_loop(y.shape(), y, x);
  const int inner = loop.rank - 1;
  const int64_t width = loop.sizes[inner], to_stride = loop.strides[0][inner],
                from_stride = loop.strides[1][inner];
  dispatch_floating(x.dtype(), "dropout", [&]<class T>() {
    using C = Compute<T>;
    T* const out = y.data<T>();
    const T* const in = x.data<T>();
    parallel_for(loop.count, 4096, [&](int64_t begin, int64_t end) {
      constexpr int64_t kAtOnce = 512;
      C values[kAtOnce], factors[kAtOnce];
      for (int64_t place = begin; place < end;) {  // row by row
        int64_t row = place / width, at = 0, from = 0;
        const int64_t first = place % width, n = std::min({end - place, width - first, kAtOnce});
        for (int dim = inner - 1; dim >= 0; --dim) {
          const int64_t index = row % loop.sizes[dim];
          row /= loop.sizes[dim];
          at += index * loop.strides[0][dim], from += index * loop.strides[1][dim];
        }
        widen(values, in + from + first * from_stride, n, from_stride);
        dropout_factors(factors, mask, place, n);
        for (int64_t i = 0; i < n; ++i) values[i] *= factors[i];
        narrow(out + at + first * to_stride, values, n, to_stride);
        place += n;
      }
    });
  });
}

}  // namespace tessera::ops

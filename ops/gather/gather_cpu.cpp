#include <array>
#include <vector>

#include "ops/gather/gather_kernels.h"
#include "ops/indices.h"
#include "tensor/elementwise.h"

namespace tessera::ops {
namespace {

/// The indices as 64-bit numbers; they have been checked.
std::vector<int64_t> read_indices(const Tensor& indices) {
  return indices.to_vector<int64_t>();
}

constexpr int64_t kGrain = 16384;  // elements below which a thread is not worth waking

/// `for_each_run` within one row, on this thread: a row that is one run costs no more than its elements.
template <int N, class Run>
void for_row(const StridedLoop<N>& loop, Run&& run) {
  if (loop.rank > 1) return for_each_run<N>(loop, run);
  std::array<int64_t, N> strides;
  for (int n = 0; n < N; ++n) strides[size_t(n)] = loop.strides[n][0];
  if (loop.count > 0) run(std::array<int64_t, N>{}, strides, loop.count);
}

}  // namespace

void gather_rows_cpu(const Tensor& y, const Tensor& x, const Tensor& indices) {
  const std::vector<int64_t> at = read_indices(indices);
  const Layout to = row_layout(y), from = row_layout(x);
  const auto loop = make_loop<2>(to.shape, {&to, &from});
  const int64_t y_stride = y.layout().stride(0), x_stride = x.layout().stride(0);
  dispatch_size(y.dtype(), [&]<class Word>() {
    auto* const out = static_cast<Word*>(y.raw());
    const auto* const in = static_cast<const Word*>(x.raw());
    parallel_for(int64_t(at.size()), std::max<int64_t>(1, kGrain / loop.count),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t n = begin; n < end; ++n)
                     for_row<2>(loop, [&](const auto& offsets, const auto& strides, int64_t count) {
                       Word* const target = out + n * y_stride + offsets[0];
                       const Word* const source = in + at[size_t(n)] * x_stride + offsets[1];
                       for (int64_t i = 0; i < count; ++i) target[i * strides[0]] = source[i * strides[1]];
                     });
                 });
  });
}

void scatter_rows_cpu(const Tensor& y, const Tensor& x, const Tensor& indices) {
  const int64_t rows = y.size(0);
  const Tensor packed = indices.packed();
  const IndexGroups groups(Indices(packed), packed.count(), rows);
  const Layout to = row_layout(y), from = row_layout(x), dense = Layout::packed(to.shape);
  const auto loop = make_loop<3>(to.shape, {&to, &from, &dense});
  const int64_t y_stride = y.layout().stride(0), x_stride = x.layout().stride(0);
  dispatch_floating(y.dtype(), "scatter_rows", [&]<class T>() {
    T* const out = y.data<T>();
    const T* const in = x.data<T>();
    parallel_for(rows, std::max<int64_t>(1, kGrain / loop.count), [&](int64_t begin, int64_t end) {
      std::vector<double> sum(size_t(loop.count));
      for (int64_t row = begin; row < end; ++row) {
        std::fill(sum.begin(), sum.end(), 0.0);
        for (int64_t k = groups.first[size_t(row)]; k < groups.first[size_t(row) + 1]; ++k)
          for_row<3>(loop, [&](const auto& offsets, const auto& strides, int64_t count) {
            const T* const source = in + groups.order[size_t(k)] * x_stride + offsets[1];
            double* const into = sum.data() + offsets[2];
            for (int64_t i = 0; i < count; ++i)
              into[i * strides[2]] += double(Compute<T>(source[i * strides[1]]));
          });
        for_row<3>(loop, [&](const auto& offsets, const auto& strides, int64_t count) {
          T* const target = out + row * y_stride + offsets[0];
          for (int64_t i = 0; i < count; ++i)
            target[i * strides[0]] = T(Compute<T>(sum[size_t(offsets[2] + i * strides[2])]));
        });
      }
    });
  });
}

}  // namespace tessera::ops

#include <algorithm>
#include <vector>

#include "ops/embedding/embedding_kernels.h"
#include "ops/indices.h"
#include "ops/wide_row.h"
#include "runtime/parallel.h"

namespace tessera::ops {
namespace {

constexpr int64_t kGrain = 16384;  // elements below which a thread is not worth waking

}  // namespace

void embedding_forward_cpu(const Tensor& y, const Tensor& table, const Tensor& indices, EmbeddingPart part) {
  dispatch_floating(table.dtype(), "embedding", [&]<class T>() {
    const Indices index(indices);
    const int64_t count = indices.count(), rows = table.size(0), width = table.size(1);
    const int64_t stride = table.row_stride(), to_stride = y.row_stride();
    for (int64_t i = 0; i < count; ++i)
      check(0 <= index[i] && index[i] < part.rows, "embedding: index ", index[i], " at position ", i,
            " of indices ", describe(indices), " is outside [0, ", part.rows, "), the rows of table ",
            describe(table));
    const T* const from = table.data<T>();
    T* const to = y.data<T>();
    parallel_for(count, std::max<int64_t>(1, kGrain / std::max<int64_t>(width, 1)),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t i = begin; i < end; ++i) {
                     const int64_t row = index[i] - part.first;
                     if (0 <= row && row < rows)
                       std::copy_n(from + row * stride, width, to + i * to_stride);
                     else
                       std::fill_n(to + i * to_stride, width, T(0));
                   }
                 });
  });
}

void embedding_backward_cpu(const Tensor& dtable, const Tensor& dy, const Tensor& indices, bool adds) {
  dispatch_floating(dy.dtype(), "embedding", [&]<class T>() {
    using C = Compute<T>;
    const Indices index(indices);
    const int64_t count = indices.count(), rows = dtable.size(0), width = dtable.size(1);
    const int64_t stride = dy.row_stride(), to_stride = dtable.row_stride();
    const T* const from = dy.data<T>();
    C* const to = dtable.data<C>();
    const IndexGroups groups(index, count, rows);
    parallel_for(rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(width, 1)),
                 [&](int64_t begin, int64_t end) {
                   std::vector<double> sum(static_cast<size_t>(width));
                   WideRow<T> terms(width);
                   for (int64_t row = begin; row < end; ++row) {
                     C* const own = to + row * to_stride;
                     for (int64_t c = 0; c < width; ++c) sum[size_t(c)] = adds ? double(own[c]) : 0.0;
                     for (int64_t k = groups.first[size_t(row)]; k < groups.first[size_t(row) + 1]; ++k) {
                       const C* const source = terms.read(from + groups.order[size_t(k)] * stride);
                       for (int64_t c = 0; c < width; ++c) sum[size_t(c)] += double(source[c]);
                     }
                     for (int64_t c = 0; c < width; ++c) own[c] = C(sum[size_t(c)]);
                   }
                 });
  });
}

}  // namespace tessera::ops

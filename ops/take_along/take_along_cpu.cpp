#include <algorithm>
#include <vector>

#include "ops/gather/gather_kernels.h"
#include "ops/indices.h"
#include "ops/reduce/reduce_plan.h"
#include "ops/take_along/take_along_kernels.h"
#include "runtime/parallel.h"

namespace tessera::ops {
namespace {

constexpr int64_t kGrain = 16384;  // elements below which a thread is not worth waking

}  // namespace

void take_along_cpu(const Tensor& y, const Tensor& x, const Tensor& indices, int dim) {
  // The lines along `dim` of y and x, and of y and the indices; both number them alike.
  Layout first = y.layout();
  first.shape = y.shape().with(dim, 1);
  const ReducePlan from = plan_dim(x.layout(), dim, first), named = plan_dim(indices.layout(), dim, first);
  const int64_t n = y.size(dim), y_stride = y.layout().stride(dim), x_stride = x.layout().stride(dim),
                index_stride = indices.layout().stride(dim);
  dispatch_size(y.dtype(), [&]<class Word>() {
    dispatch_index(indices.dtype(), "take_along", [&]<class Index>() {
      auto* const out = static_cast<Word*>(y.raw());
      const auto* const in = static_cast<const Word*>(x.raw());
      const Index* const at = indices.data<Index>();
      parallel_for(from.outputs, std::max<int64_t>(1, kGrain / n), [&](int64_t begin, int64_t end) {
        for (int64_t line = begin; line < end; ++line) {
          int64_t x_offset, y_offset, index_offset;
          named.offsets(line, index_offset, y_offset);
          from.offsets(line, x_offset, y_offset);
          for (int64_t i = 0; i < n; ++i)
            out[y_offset + i * y_stride] =
                in[x_offset + int64_t(at[index_offset + i * index_stride]) * x_stride];
        }
      });
    });
  });
}

void put_along_cpu(const Tensor& dx, const Tensor& dy, const Tensor& indices) {
  const int64_t length = dx.size(1), n = dy.size(1);
  dispatch_floating(dx.dtype(), "take_along", [&]<class T>() {
    T* const out = dx.data<T>();
    const T* const in = dy.data<T>();
    const Indices at(indices);
    parallel_for(dx.size(0), std::max<int64_t>(1, kGrain / (length + n)), [&](int64_t begin, int64_t end) {
      std::vector<double> sums(static_cast<size_t>(length));
      for (int64_t line = begin; line < end; ++line) {
        std::fill(sums.begin(), sums.end(), 0.0);
        for (int64_t i = line * n; i < (line + 1) * n; ++i) sums[size_t(at[i])] += double(Compute<T>(in[i]));
        for (int64_t r = 0; r < length; ++r) out[line * length + r] = T(Compute<T>(sums[size_t(r)]));
      }
    });
  });
}

void last_along_cpu(const Tensor& last, const Tensor& indices) {
  const int64_t length = last.size(1), n = indices.size(1);
  last.fill(-1);
  int64_t* const out = last.data<int64_t>();
  const Indices at(indices);
  parallel_for(last.size(0), std::max<int64_t>(1, kGrain / (length + n)), [&](int64_t begin, int64_t end) {
    for (int64_t line = begin; line < end; ++line)
      for (int64_t i = 0; i < n; ++i) out[line * length + at[line * n + i]] = i;
  });
}

void last_gradient_cpu(const Tensor& dsrc, const Tensor& dy, const Tensor& last, const Tensor& indices) {
  const int64_t length = last.size(1), n = indices.size(1);
  const int64_t* const of = last.data<int64_t>();
  const Indices at(indices);
  dispatch_size(dsrc.dtype(), [&]<class Word>() {
    auto* const out = static_cast<Word*>(dsrc.raw());
    const auto* const in = static_cast<const Word*>(dy.raw());
    parallel_for(last.size(0), std::max<int64_t>(1, kGrain / n), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * n; i < end * n; ++i) {
        const int64_t place = i / n * length + at[i];
        out[i] = of[place] == i % n ? in[place] : Word(0);
      }
    });
  });
}

void one_hot_cpu(const Tensor& y, const Tensor& indices) {
  y.fill(0);
  const Tensor packed = indices.packed();
  const Indices at(packed);
  Layout first = y.layout();
  first.shape = y.shape().with(-1, 1);
  const ReducePlan rows = plan_dim(y.layout(), -1, first);
  const int64_t stride = y.layout().stride(-1);
  dispatch_any(y.dtype(), [&]<class T>() {
    T* const out = y.data<T>();
    for (int64_t row = 0; row < rows.outputs; ++row) {
      int64_t from, offset;
      rows.offsets(row, from, offset);
      out[offset + at[row] * stride] = convert<T>(1.0);
    }
  });
}

}  // namespace tessera::ops

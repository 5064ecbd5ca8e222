#include <algorithm>
#include <cmath>

#include "optim/muon_kernels.h"
#include "runtime/integers.h"
#include "runtime/parallel.h"

namespace tessera::optim {
namespace {

template <class F>
void for_each_row(const Tensor& batch, F&& f) {
  const int64_t rows = batch.size(1), all = batch.size(0) * rows;
  parallel_for(all, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i / rows, i % rows);
  });
}

template <class T>
T* row_of(const Tensor& batch, int64_t matrix, int64_t row) {
  return static_cast<T*>(batch.raw()) + matrix * batch.layout().stride(0) + row * batch.layout().stride(1);
}

template <class C, class T>
void normalize(const Tensor& x, const Tensor& d, double* partials) {
  const int64_t matrices = d.size(0), rows = d.size(1), columns = d.size(2), at_once = rows_per_part(columns),
                parts = normalize_parts(d);
  parallel_for(matrices * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t matrix = i / parts, first = i % parts * at_once;
      double sum = 0;
      for (int64_t row = first; row < std::min(rows, first + at_once); ++row) {
        const C* const from = row_of<C>(d, matrix, row);
        for (int64_t k = 0; k < columns; ++k) sum += double(from[k]) * double(from[k]);
      }
      partials[i] = sum;
    }
  });
  for_each_row(d, [&](int64_t matrix, int64_t row) {
    double sum = 0;
    for (int64_t part = 0; part < parts; ++part) sum += partials[matrix * parts + part];
    const double inverse = sum > 0 ? 1 / std::sqrt(sum) : 0;
    const C* const from = row_of<C>(d, matrix, row);
    T* const to = row_of<T>(x, matrix, row);
    for (int64_t k = 0; k < columns; ++k) to[k] = T(Compute<T>(double(from[k]) * inverse));
  });
}

}  // namespace

int64_t normalize_parts(const Tensor& d) {
  const int64_t at_once = rows_per_part(d.size(2));
  return ceil_div(d.size(1), at_once);
}

void normalize_cpu(const Tensor& x, const Tensor& d, const Tensor& partials) {
  dispatch_floating(x.dtype(), "muon", [&]<class T>() {
    d.dtype() == DType::f64 ? normalize<double, T>(x, d, partials.data<double>())
                            : normalize<float, T>(x, d, partials.data<double>());
  });
}

void begin_polynomial_cpu(const Tensor& p, const Tensor& gram, double a, double b) {
  dispatch_floating(p.dtype(), "muon", [&]<class T>() {
    using C = Compute<T>;
    for_each_row(p, [&](int64_t matrix, int64_t row) {
      const T* const from = row_of<T>(gram, matrix, row);
      T* const to = row_of<T>(p, matrix, row);
      for (int64_t k = 0; k < p.size(2); ++k) to[k] = T(C(b) * C(from[k]) + (k == row ? C(a) : C(0)));
    });
  });
}

}  // namespace tessera::optim

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/norm/norm_kernels.h"
#include "runtime/parallel.h"

namespace tessera::ops {
namespace {

constexpr int64_t kGrain = 4096;  // elements per block: about 10 us

int64_t grain_of(int64_t inner) {
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(inner, 1));
}

const char* name_of(bool centred) {
  return centred ? "layernorm" : "rmsnorm";
}

/// Values under a dropout mask, by their row-major place. Not called where there is none.
template <class C>
class UnderMask {
 public:
  explicit UnderMask(const DropoutMask* mask)
      : walk_(mask ? *mask : DropoutMask{}), scale_(mask ? C(mask->scale) : C(1)) {}
  C operator()(C value, int64_t place) { return value * (walk_.keeps(place) ? scale_ : C(0)); }

 private:
  DropoutWalk walk_;
  C scale_;
};

/// dweight and dbias: columns are shared out to the threads, the rows of each added in order. At least
/// kColumns at a time: fewer would use only a part of each cache line.
template <class T>
void parameter_gradients(const NormBackward& norm) {
  using C = Compute<T>;
  const int64_t rows = norm.x.rows(), width = norm.x.row_length();
  const int64_t x_stride = norm.x.row_stride(), dy_stride = norm.dy.row_stride();
  const T *const x = norm.x.data<T>(), *const dy = norm.dy.data<T>();
  const C* const mean = norm.mean.defined() ? norm.mean.data<C>() : nullptr;
  const C* const rstd = norm.rstd.data<C>();
  C* const dweight = norm.dweight.defined() ? norm.dweight.data<C>() : nullptr;
  C* const dbias = norm.dbias.defined() ? norm.dbias.data<C>() : nullptr;
  constexpr int64_t kColumns = 32;
  parallel_for(width, std::max(kColumns, grain_of(rows)), [&](int64_t begin, int64_t end) {
    std::vector<double> weight_sums(size_t(end - begin), 0.0), bias_sums(size_t(end - begin), 0.0);
    for (int64_t row = 0; row < rows; ++row) {
      const T *const values = x + row * x_stride, *const grads = dy + row * dy_stride;
      const C centre = mean ? mean[row] : C(0), scale = rstd[row];
      if (dweight)
        for (int64_t c = begin; c < end; ++c)
          weight_sums[size_t(c - begin)] += double(C(grads[c]) * ((C(values[c]) - centre) * scale));
      if (dbias)
        for (int64_t c = begin; c < end; ++c) bias_sums[size_t(c - begin)] += double(C(grads[c]));
    }
    for (int64_t c = begin; c < end; ++c) {
      if (dweight) dweight[c] = C(weight_sums[size_t(c - begin)]);
      if (dbias) dbias[c] = C(bias_sums[size_t(c - begin)]);
    }
  });
}

}  // namespace

void norm_forward_cpu(const NormForward& norm) {
  const bool centred = norm.mean.defined();
  dispatch_floating(norm.x.dtype(), name_of(centred), [&]<class T>() {
    using C = Compute<T>;
    const int64_t width = norm.x.row_length(), x_stride = norm.x.row_stride(), y_stride = norm.y.row_stride();
    const T* const x = norm.x.data<T>();
    const T* const residual = norm.residual.defined() ? norm.residual.data<T>() : nullptr;
    T* const y = norm.y.data<T>();
    const T* const weight = norm.weight.defined() ? norm.weight.data<T>() : nullptr;
    const T* const bias = norm.bias.defined() ? norm.bias.data<T>() : nullptr;
    C* const means = centred ? norm.mean.data<C>() : nullptr;
    C* const rstds = norm.rstd.data<C>();
    parallel_for(norm.x.rows(), grain_of(width), [&](int64_t begin, int64_t end) {
      UnderMask<C> dropped(norm.drop);
      for (int64_t row = begin; row < end; ++row) {
        const T* from = x + row * x_stride;
        T* const to = y + row * y_stride;
        if (residual) {
          const T* const other = residual + row * norm.residual.row_stride();
          T* const both = norm.sum.data<T>() + row * norm.sum.row_stride();
          for (int64_t c = 0; c < width; ++c)
            both[c] = T(C(from[c]) + (norm.drop ? dropped(C(other[c]), row * width + c) : C(other[c])));
          from = both;
        }
        C mean = 0;
        double sum = 0, squares = 0;
        if (centred) {
          // Counted from the first element: a long sum of large, nearly equal numbers would lose their
          // difference.
          const C origin = width > 0 ? C(from[0]) : C(0);
          for (int64_t c = 0; c < width; ++c) sum += double(C(from[c])) - double(origin);
          mean = C(double(origin) + sum / double(width));
          means[row] = mean;
        }
        for (int64_t c = 0; c < width; ++c) squares += double((C(from[c]) - mean) * (C(from[c]) - mean));
        const C rstd = 1 / std::sqrt(C(squares) / C(width) + C(norm.eps));
        rstds[row] = rstd;
        for (int64_t c = 0; c < width; ++c) {
          const C scaled = (C(from[c]) - mean) * rstd * (weight ? C(weight[c]) : C(1));
          to[c] = T(bias ? scaled + C(bias[c]) : scaled);
        }
      }
    });
  });
}

void norm_backward_cpu(const NormBackward& norm) {
  const bool centred = norm.mean.defined();
  dispatch_floating(norm.x.dtype(), name_of(centred), [&]<class T>() {
    using C = Compute<T>;
    if (norm.dweight.defined() || norm.dbias.defined()) parameter_gradients<T>(norm);
    if (!norm.dx.defined() && !norm.dresidual.defined()) return;
    const int64_t width = norm.x.row_length(), x_stride = norm.x.row_stride(),
                  dy_stride = norm.dy.row_stride();
    const T *const x = norm.x.data<T>(), *const dy = norm.dy.data<T>();
    const T* const dsum = norm.dsum.defined() ? norm.dsum.data<T>() : nullptr;
    const auto row_of = [](const Tensor& gradient, int64_t row) {
      return gradient.defined() ? gradient.data<T>() + row * gradient.row_stride() : nullptr;
    };
    const T* const weight = norm.weight.defined() ? norm.weight.data<T>() : nullptr;
    const C* const means = centred ? norm.mean.data<C>() : nullptr;
    const C* const rstds = norm.rstd.data<C>();
    parallel_for(norm.x.rows(), grain_of(width), [&](int64_t begin, int64_t end) {
      std::vector<C> g(size_t(width), C(0));  // rounded once: g and its mean must cancel where they are equal
      UnderMask<C> dropped(norm.drop);
      for (int64_t row = begin; row < end; ++row) {
        const T *const values = x + row * x_stride, *const grads = dy + row * dy_stride;
        T *const to = row_of(norm.dx, row), *const to_residual = row_of(norm.dresidual, row);
        const C mean = centred ? means[row] : C(0), rstd = rstds[row];
        const auto xhat = [&](int64_t c) { return (C(values[c]) - mean) * rstd; };
        double sum_g = 0, sum_gx = 0;
        for (int64_t c = 0; c < width; ++c) {
          g[size_t(c)] = C(grads[c]) * (weight ? C(weight[c]) : C(1));
          sum_g += double(g[size_t(c)]);
          sum_gx += double(g[size_t(c)] * xhat(c));
        }
        const C mean_g = centred ? C(sum_g / double(width)) : C(0), mean_gx = C(sum_gx / double(width));
        const T* const past = dsum ? dsum + row * norm.dsum.row_stride() : nullptr;
        for (int64_t c = 0; c < width; ++c) {
          const C slope = rstd * (g[size_t(c)] - mean_g - xhat(c) * mean_gx);
          const C whole = past ? C(past[c]) + slope : slope;
          if (to) to[c] = T(whole);
          if (to_residual) to_residual[c] = T(dropped(whole, row * width + c));
        }
      }
    });
  });
}

}  // namespace tessera::ops

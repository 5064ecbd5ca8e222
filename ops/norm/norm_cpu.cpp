#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/lane_sum_internal.h"
#include "ops/norm/norm_kernels.h"
#include "runtime/parallel.h"
#include "tensor/convert.h"

namespace tessera::ops {
namespace {

constexpr int64_t kGrain = 4096;  // elements per block: about 10 us

int64_t grain_of(int64_t inner) {
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(inner, 1));
}

const char* name_of(bool centred) {
  return centred ? "layernorm" : "rmsnorm";
}

/// A row of a dropout mask's factors; without a mask none.
template <class C>
class MaskRow {
 public:
  MaskRow(const DropoutMask* mask, int64_t width) : mask_(mask), factors_(size_t(mask ? width : 0)) {}
  const C* of(int64_t row) {
    if (!mask_) return nullptr;
    dropout_factors(factors_.data(), *mask_, row * int64_t(factors_.size()), int64_t(factors_.size()));
    return factors_.data();
  }

 private:
  const DropoutMask* mask_;
  std::vector<C> factors_;
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
    const int64_t columns = end - begin;
    std::vector<double> weight_sums(size_t(columns), 0.0), bias_sums(size_t(columns), 0.0);
    WideRow<T> x_row(columns), dy_row(columns);
    for (int64_t row = 0; row < rows; ++row) {
      const C* const grads = dy_row.read(dy + row * dy_stride + begin);
      const C centre = mean ? mean[row] : C(0), scale = rstd[row];
      if (dweight) {
        const C* const values = x_row.read(x + row * x_stride + begin);
        for (int64_t c = 0; c < columns; ++c)
          weight_sums[size_t(c)] += double(grads[c] * ((values[c] - centre) * scale));
      }
      if (dbias)
        for (int64_t c = 0; c < columns; ++c) bias_sums[size_t(c)] += double(grads[c]);
    }
    for (int64_t c = 0; c < columns; ++c) {
      if (dweight) dweight[begin + c] = C(weight_sums[size_t(c)]);
      if (dbias) dbias[begin + c] = C(bias_sums[size_t(c)]);
    }
  });
}

}  // namespace

void norm_forward_cpu(const NormForward& norm) {
  const bool centred = norm.centred;
  dispatch_floating(norm.x.dtype(), name_of(centred), [&]<class T>() {
    using C = Compute<T>;
    const int64_t width = norm.x.row_length(), x_stride = norm.x.row_stride(), y_stride = norm.y.row_stride();
    const T* const x = norm.x.data<T>();
    const T* const residual = norm.residual.defined() ? norm.residual.data<T>() : nullptr;
    T* const y = norm.y.data<T>();
    WideRow<T> weight_row(width), bias_row(width);
    const C* const weight = weight_row.read(norm.weight.defined() ? norm.weight.data<T>() : nullptr);
    const C* const bias = bias_row.read(norm.bias.defined() ? norm.bias.data<T>() : nullptr);
    C* const means = centred ? norm.mean.data<C>() : nullptr;
    C* const rstds = norm.rstd.data<C>();
    parallel_for(norm.x.rows(), grain_of(width), [&](int64_t begin, int64_t end) {
      MaskRow<C> mask(norm.drop, width);
      WideRow<T> x_row(width), other_row(width), y_row(width);
      for (int64_t row = begin; row < end; ++row) {
        const C* from = x_row.read(x + row * x_stride);
        if (residual) {
          const C* const other = other_row.read(residual + row * norm.residual.row_stride());
          T* const both = norm.sum.data<T>() + row * norm.sum.row_stride();
          C* const sum = y_row.write(both);
          const C* const factors = mask.of(row);
          for (int64_t c = 0; c < width; ++c) sum[c] = from[c] + (factors ? other[c] * factors[c] : other[c]);
          y_row.written(both);
          from = x_row.read(both);  // rounded
        }
        T* const y_to = y + row * y_stride;
        C* const to = y_row.write(y_to);
        C mean = 0;
        if (centred) {
          // Counted from the first element: a long sum of large, nearly equal numbers would lose their
          // difference.
          const C origin = width > 0 ? from[0] : C(0);
          const double sum =
              lane_sum<double>(width, [=](int64_t c) { return double(from[c]) - double(origin); });
          mean = C(double(origin) + sum / double(width));
          means[row] = mean;
        }
        const double squares =
            lane_sum<double>(width, [=](int64_t c) { return double((from[c] - mean) * (from[c] - mean)); });
        const C rstd = 1 / std::sqrt(C(squares) / C(width) + C(norm.eps));
        rstds[row] = rstd;
        for (int64_t c = 0; c < width; ++c) {
          const C scaled = (from[c] - mean) * rstd * (weight ? weight[c] : C(1));
          to[c] = bias ? scaled + bias[c] : scaled;
        }
        y_row.written(y_to);
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
    WideRow<T> weight_row(width);
    const C* const weight = weight_row.read(norm.weight.defined() ? norm.weight.data<T>() : nullptr);
    const C* const means = centred ? norm.mean.data<C>() : nullptr;
    const C* const rstds = norm.rstd.data<C>();
    parallel_for(norm.x.rows(), grain_of(width), [&](int64_t begin, int64_t end) {
      WideRow<T> x_row(width), dy_row(width), past_row(width), dx_row(width), dresidual_row(width);
      std::vector<C> g(size_t(width), C(0));  // rounded once: g and its mean must cancel where they are equal
      MaskRow<C> mask(norm.drop, width);
      for (int64_t row = begin; row < end; ++row) {
        const C* const values = x_row.read(x + row * x_stride);
        const C* const grads = dy_row.read(dy + row * dy_stride);
        const C mean = centred ? means[row] : C(0), rstd = rstds[row];
        const auto xhat = [&](int64_t c) { return (values[c] - mean) * rstd; };
        for (int64_t c = 0; c < width; ++c) g[size_t(c)] = grads[c] * (weight ? weight[c] : C(1));
        const double sum_g =
            centred ? lane_sum<double>(width, [&](int64_t c) { return double(g[size_t(c)]); }) : 0.0;
        const double sum_gx =
            lane_sum<double>(width, [&](int64_t c) { return double(g[size_t(c)] * xhat(c)); });
        const C mean_g = centred ? C(sum_g / double(width)) : C(0), mean_gx = C(sum_gx / double(width));
        const C* const past = past_row.read(dsum ? dsum + row * norm.dsum.row_stride() : nullptr);
        T *const dx = row_of(norm.dx, row), *const dresidual = row_of(norm.dresidual, row);
        C *const to = dx_row.write(dx), *const to_residual = dresidual_row.write(dresidual);
        const C* const factors = to_residual ? mask.of(row) : nullptr;
        for (int64_t c = 0; c < width; ++c) {
          const C slope = rstd * (g[size_t(c)] - mean_g - xhat(c) * mean_gx);
          const C whole = past ? past[c] + slope : slope;
          if (to) to[c] = whole;
          if (to_residual) to_residual[c] = factors ? whole * factors[c] : whole;
        }
        dx_row.written(dx), dresidual_row.written(dresidual);
      }
    });
  });
}

}  // namespace tessera::ops

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/lane_sum_internal.h"
#include "ops/norm/norm_kernels.h"
#include "ops/wide_row.h"
#include "runtime/integers.h"
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

/// dweight and dbias: f64 sums over blocks of rows, which are added in their order. The blocks follow from
/// the shape alone.
class ParameterSums {
 public:
  static constexpr int64_t kMostBlocks = 64, kFewestRows = 4;  // of a block: its sums are written once

  explicit ParameterSums(const NormBackward& norm)
      : width_(norm.x.row_length()),
        rows_(std::max({kFewestRows, grain_of(width_), ceil_div(norm.x.rows(), kMostBlocks)})),
        blocks_(ceil_div(norm.x.rows(), rows_)),
        weight_(norm.dweight.defined() ? scratch() : Tensor()),
        bias_(norm.dbias.defined() ? scratch() : Tensor()) {}
  int64_t blocks() const { return blocks_; }
  int64_t rows_per_block() const { return rows_; }
  /// Of a block; null if the gradient is not wanted.
  double* weight(int64_t block) const { return row_of(weight_, block); }
  double* bias(int64_t block) const { return row_of(bias_, block); }
  template <class C>
  void write(const NormBackward& norm) const {
    write<C>(norm.dweight, weight_), write<C>(norm.dbias, bias_);
  }

 private:
  /// Of the caching allocator: fresh pages from the system would take as long as the sums.
  Tensor scratch() const { return Tensor::zeros({blocks_, width_}, DType::f64, Device::cpu()); }
  static double* row_of(const Tensor& sums, int64_t block) {
    return sums.defined() ? sums.data<double>() + block * sums.row_stride() : nullptr;
  }
  template <class C>
  void write(const Tensor& gradient, const Tensor& sums) const {
    if (!gradient.defined()) return;
    C* const to = gradient.data<C>();
    parallel_for(width_, 1024, [&](int64_t begin, int64_t end) {
      constexpr int64_t kAtOnce = 128;
      for (int64_t first = begin; first < end; first += kAtOnce) {
        const int64_t some = std::min(kAtOnce, end - first);
        double total[kAtOnce] = {};
        for (int64_t block = 0; block < blocks_; ++block) {
          const double* const from = row_of(sums, block) + first;
          for (int64_t c = 0; c < some; ++c) total[c] += from[c];
        }
        for (int64_t c = 0; c < some; ++c) to[first + c] = C(total[c]);
      }
    });
  }

  int64_t width_, rows_, blocks_;
  Tensor weight_, bias_;
};

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
    const bool writes_rows = norm.dx.defined() || norm.dresidual.defined();
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
    ParameterSums sums(norm);
    parallel_for(sums.blocks(), 1, [&](int64_t begin, int64_t end) {
      WideRow<T> x_row(width), dy_row(width), past_row(width), dx_row(width), dresidual_row(width);
      std::vector<C> g(size_t(width), C(0));  // rounded once: g and its mean must cancel where they are equal
      MaskRow<C> mask(norm.drop, width);
      const auto add_row = [&](int64_t row, double* weight_sums, double* bias_sums) {
        const C* const values = x_row.read(x + row * x_stride);
        const C* const grads = dy_row.read(dy + row * dy_stride);
        const C mean = centred ? means[row] : C(0), rstd = rstds[row];
        const auto xhat = [&](int64_t c) { return (values[c] - mean) * rstd; };
        for (int64_t c = 0; weight_sums && c < width; ++c) weight_sums[c] += double(grads[c] * xhat(c));
        for (int64_t c = 0; bias_sums && c < width; ++c) bias_sums[c] += double(grads[c]);
        if (!writes_rows) return;
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
        C* const whole = to ? to : to_residual;  // loops without branches, which vectorise
        for (int64_t c = 0; c < width; ++c) whole[c] = rstd * (g[size_t(c)] - mean_g - xhat(c) * mean_gx);
        for (int64_t c = 0; past && c < width; ++c) whole[c] += past[c];
        if (to && to_residual) std::copy_n(to, width, to_residual);
        for (int64_t c = 0; factors && c < width; ++c) to_residual[c] *= factors[c];
        dx_row.written(dx), dresidual_row.written(dresidual);
      };
      for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * sums.rows_per_block(),
                      last = std::min(first + sums.rows_per_block(), norm.x.rows());
        for (int64_t row = first; row < last; ++row) add_row(row, sums.weight(block), sums.bias(block));
      }
    });
    sums.write<C>(norm);
  });
}

}  // namespace tessera::ops

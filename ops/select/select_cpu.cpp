#include <algorithm>

#include "ops/gather/gather_kernels.h"
#include "ops/select/select_kernels.h"
#include "tensor/elementwise.h"

/// The definition: the bar is found bit by bit, each time from all rows.

namespace tessera::ops {
namespace {

int64_t count_of(const Tensor& count, int64_t most) {
  return count.defined() ? std::clamp<int64_t>(count.data<int32_t>()[0], 0, most) : most;
}

std::vector<uint32_t> row_values(const SelectCall& call, int64_t rows) {
  std::vector<uint32_t> values(static_cast<size_t>(rows));
  if (call.mode == SelectMode::random) {
    const RandomKeys keys{call.stream.seed, call.stream.offset()};
    for (int64_t quad = 0; quad * 4 < rows; ++quad) {
      const Uint4 four = keys.of_four(uint64_t(quad));
      for (int64_t i = quad * 4; i < std::min(rows, quad * 4 + 4); ++i) values[size_t(i)] = four.word[i % 4];
    }
    return values;
  }
  const float* const norms = call.norms.data<float>();
  if (call.mode != SelectMode::importance) {
    for (int64_t i = 0; i < rows; ++i) values[size_t(i)] = norm_rank(norms[i]);
    return values;
  }
  uint32_t largest = 0;
  for (int64_t i = 0; i < rows; ++i) largest = std::max(largest, norm_exponent(norms[i]));
  for (int64_t i = 0; i < rows; ++i) values[size_t(i)] = norm_weight(norms[i], largest);
  return values;
}

/// The rows with values from `t` on, and the sum of the values below.
struct Split {
  uint32_t above = 0;
  uint64_t below = 0;
};
Split split_at(const std::vector<uint32_t>& values, uint64_t t) {
  Split split;
  for (const uint32_t value : values) {
    if (value >= t) {
      ++split.above;
    } else {
      split.below += value;
    }
  }
  return split;
}

Cut find_cut(const SelectCall& call, const std::vector<uint32_t>& values, uint32_t k) {
  if (call.mode == SelectMode::threshold) {
    Cut cut;
    cut.bar = norm_rank(call.threshold) - 1;
    cut.limit = uint32_t(values.size());
    return cut;
  }
  const bool weighted = call.mode == SelectMode::importance;
  uint32_t bar = 0;
  for (int bit = 31; bit >= 0; --bit) {
    const uint32_t tried = bar | uint32_t{1} << bit;
    const Split split = split_at(values, tried);
    if (reaches(weighted, tried, k, split.above, split.below)) bar = tried;
  }
  bar = std::min(bar, highest_bar(weighted));
  const Split split = split_at(values, uint64_t(bar) + 1);
  return cut_at(weighted, bar, k, split.above, split.below, uint32_t(values.size()), call.stream.seed,
                call.stream.offset());
}

/// y = x, times *scale unless that is null, for two rows that the loop describes.
template <class T>
void copy_row(const StridedLoop<2>& loop, T* y, const T* x, const float* scale) {
  using C = Compute<T>;
  for_each_run<2>(loop, [&](const auto& offsets, const auto& strides, int64_t count) {
    T* const to = y + offsets[0];
    const T* const from = x + offsets[1];
    for (int64_t i = 0; i < count; ++i)
      to[i * strides[0]] = scale ? T(C(from[i * strides[1]]) * C(*scale)) : from[i * strides[1]];
  });
}

constexpr int64_t kGrain = 16384;  // elements below which a thread is not worth waking

/// Entry n of the selection is row n of y and row indices[n] of x, or the reverse.
void move_rows(const char* name, const Tensor& y, const Tensor& x, const Tensor& indices,
               const Tensor& scales, bool gathers) {
  const Layout to = row_layout(y), from = row_layout(x);
  const auto loop = make_loop<2>(to.shape, {&to, &from});
  const int64_t y_stride = y.layout().stride(0), x_stride = x.layout().stride(0);
  const int64_t rows = (gathers ? x : y).size(0);
  const int32_t* const at = indices.data<int32_t>();
  const float* const scale = scales.defined() ? scales.data<float>() : nullptr;
  y.fill(0);
  dispatch_floating(y.dtype(), name, [&]<class T>() {
    T* const out = y.data<T>();
    const T* const in = x.data<T>();
    parallel_for(indices.count(), std::max<int64_t>(1, kGrain / loop.count), [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        if (at[n] < 0 || at[n] >= rows) continue;
        const int64_t y_row = gathers ? n : at[n], x_row = gathers ? at[n] : n;
        copy_row(loop, out + y_row * y_stride, in + x_row * x_stride, scale ? scale + n : nullptr);
      }
    });
  });
}

}  // namespace

void select_cpu(const SelectCall& call) {
  const Selection& result = call.result;
  const int64_t rows = count_of(call.counts.rows, result.rows);
  const int64_t share = rows_of_units(uint32_t(rows), units_of_share(call.counts.share));
  const int64_t k = std::min(count_of(call.counts.n, call.n), share);
  int32_t* const indices = result.indices.data<int32_t>();
  float* const scales = result.scales.data<float>();
  int64_t count = 0;
  const auto take = [&](int64_t row, float scale) {
    indices[count] = int32_t(row);
    scales[count++] = scale;
  };
  if (call.mode == SelectMode::first) {
    for (int64_t i = 0; i < k; ++i) take(i, 1);
  } else {
    const std::vector<uint32_t> values = row_values(call, rows);
    const Cut cut = find_cut(call, values, uint32_t(k));
    const float certain =
        call.mode == SelectMode::random && k > 0 ? random_scale(uint32_t(rows), uint32_t(k)) : 1.0f;
    uint64_t place = 0;
    for (int64_t i = 0; i < rows && count < int64_t(cut.limit); ++i) {
      const RowTerm term = cut.term(values[size_t(i)]);
      if (term.chosen) {
        take(i, certain);
      } else if (cut.points_before(place + term.drawable) > cut.points_before(place)) {
        take(i, cut.weighted ? cut.drawn_scale(term.drawable) : certain);
      }
      place += term.drawable;
    }
  }
  *result.count.data<int32_t>() = int32_t(count);
  while (count < result.capacity()) take(result.rows, 0);
}

void gather_selected_cpu(const Tensor& y, const Tensor& x, const Tensor& indices, const Tensor& scales) {
  move_rows("gather_selected", y, x, indices, scales, true);
}

void scatter_selected_cpu(const Tensor& y, const Tensor& x, const Tensor& indices, const Tensor& scales) {
  move_rows("scatter_selected", y, x, indices, scales, false);
}

void add_selected_cpu(const Tensor& y, const Tensor& x, const Tensor& indices) {
  const int64_t rows = y.size(0), width = y.size(1);
  const int64_t y_stride = y.layout().stride(0), x_stride = x.layout().stride(0);
  const int32_t* const at = indices.data<int32_t>();
  dispatch_floating(y.dtype(), "add_selected", [&]<class T>() {
    using C = Compute<T>;
    T* const out = y.data<T>();
    const C* const in = x.data<C>();
    parallel_for(indices.count(), std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width)),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t n = begin; n < end; ++n) {
                     if (at[n] < 0 || at[n] >= rows) continue;
                     T* const to = out + at[n] * y_stride;
                     for (int64_t c = 0; c < width; ++c) to[c] = T(C(to[c]) + in[n * x_stride + c]);
                   }
                 });
  });
}

}  // namespace tessera::ops

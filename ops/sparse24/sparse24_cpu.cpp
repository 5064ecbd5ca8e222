#include <algorithm>

#include "ops/sparse24/sparse24_kernels.h"
#include "ops/sparse24/sparse24_math.h"
#include "runtime/integers.h"
#include "runtime/parallel.h"

namespace tessera::ops {

using namespace sparse24;

namespace {

/// A, m x k, in place in x: the distances of its rows and of its elements along k.
template <class T>
struct Operand {
  T* data;
  int64_t m, k, row_stride, k_stride;

  Operand(const Tensor& x, Along24 along) : data(x.data<T>()) {
    const bool rows = along == Along24::features;
    m = x.size(rows ? 0 : 1), k = x.size(rows ? 1 : 0);
    row_stride = x.layout().stride(rows ? 0 : 1), k_stride = x.layout().stride(rows ? 1 : 0);
  }
  T* at(int64_t row, int64_t k_index) const {
    return row < m && k_index < k ? data + row * row_stride + k_index * k_stride : nullptr;
  }
};

/// Calls visit(tile, row in it, group in it, row of A, first k of the group) for all of `x`, padding too.
template <class Visit>
void for_each_group(const Sparse24& x, Visit&& visit) {
  const int64_t k_tiles = x.values.size(1);
  parallel_for(x.values.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin * k_tiles; tile < end * k_tiles; ++tile)
      for (int row = 0; row < kTileRows; ++row)
        for (int group = 0; group < kTileGroups; ++group)
          visit(tile, row, group, tile / k_tiles * kTileRows + row, tile % k_tiles * kTileDepth + group * 4);
  });
}

void write_nibble(const Sparse24& x, int64_t tile, int row, int group, uint32_t nibble) {
  int32_t& word = x.metadata.data<int32_t>()[word_index(tile, row, group)];
  const int bit = word_bit(row, group);
  word = int32_t((uint32_t(word) & ~(0xFu << bit)) | nibble << bit);
}
Positions read_positions(const Sparse24& x, int64_t tile, int row, int group) {
  const uint32_t word = uint32_t(x.metadata.data<int32_t>()[word_index(tile, row, group)]);
  return Positions::of(word >> word_bit(row, group));
}

template <class T>
void read_group(const Operand<T>& from, int64_t m, int64_t k, T (&x)[4]) {
  for (int i = 0; i < 4; ++i) {
    const T* const element = from.at(m, k + i);
    x[i] = element ? *element : T(0.0f);
  }
}

template <class T>
void compress_one(const Sparse24& to, const Tensor& x, const Selection24& selection) {
  const Operand<T> from(x, to.along);
  const float scale = selection.scale.defined() ? selection.scale.data<float>()[0] : 1;
  const uint64_t seed = selection.stream.seed, offset = selection.stream.offset();
  const int64_t numbered = to.along == Along24::features ? ceil_div(to.features, 4) : to.features;
  for_each_group(to, [&](int64_t tile, int row, int group, int64_t m, int64_t k) {
    T elements[4];
    read_group(from, m, k, elements);
    Kept<T> kept{{0, 1}, {T(0.0f), T(0.0f)}};  // of padding
    if (m < from.m && k < from.k) {
      if (selection.method == Method24::mvue)
        kept = select_drawn(elements,
                            draws_of(seed, offset, to.along, group_number(to.along, m, k / 4, numbered)));
      else
        kept = select_plain(selection.method, elements, scale);
    }
    T* const values = to.values.data<T>() + value_index(tile, row, group);
    values[0] = kept.values[0], values[1] = kept.values[1];
    write_nibble(to, tile, row, group, kept.at.nibble());
  });
}

template <class T>
void gather_one(const Sparse24& to, const Tensor& x) {
  const Operand<T> from(x, to.along);
  for_each_group(to, [&](int64_t tile, int row, int group, int64_t m, int64_t k) {
    T elements[4];
    read_group(from, m, k, elements);
    const Positions at = read_positions(to, tile, row, group);
    T* const values = to.values.data<T>() + value_index(tile, row, group);
    values[0] = elements[at.first], values[1] = elements[at.second];
  });
}

}  // namespace

void compress24_cpu(const Compress24Call& call) {
  dispatch_floating(call.x.dtype(), "compress24", [&]<class T>() {
    if (call.pattern) {
      gather_one<T>(call.pattern->along == Along24::features ? call.by_features : call.by_tokens, call.x);
      return;
    }
    Tensor x = call.x;
    if (call.by_features.defined()) {
      compress_one<T>(call.by_features, x, call.selection);
      if (!call.by_tokens.defined()) return;
      x = Tensor::empty_like(call.x);
      decompress24_cpu(x, call.by_features, {});
    }
    compress_one<T>(call.by_tokens, x, call.selection);
  });
}

void decompress24_cpu(const Tensor& y, const Sparse24& x, const Tensor& given) {
  dispatch_floating(y.dtype(), "decompress24", [&]<class T>() {
    const Operand<T> to(y, x.along), from(given.defined() ? given : y, x.along);
    for_each_group(x, [&](int64_t tile, int row, int group, int64_t m, int64_t k) {
      const Positions at = read_positions(x, tile, row, group);
      const T* const values = x.values.data<T>() + value_index(tile, row, group);
      for (int i = 0; i < 4; ++i) {
        T* const element = to.at(m, k + i);
        if (!element) continue;
        const bool kept = i == at.first || i == at.second;
        if (!kept)
          *element = T(0.0f);
        else if (given.defined())
          *element = *from.at(m, k + i);
        else
          *element = values[i == at.second];
      }
    });
  });
}

void soft_scale_cpu(const SoftScaleCall& call) {
  dispatch_floating(call.x.dtype(), "soft_scale", [&]<class T>() {
    const Operand<T> from(call.x, call.along);
    const bool rows = call.along == Along24::features;
    // In the order of the units, then of the groups across.
    const int64_t across = rows ? ceil_div(from.k, 4) : from.m;
    double product = 0, square = 0;
    for (int64_t sample = 0; sample < call.samples; ++sample) {
      const int64_t unit = unit_of_sample(sample, call.units, call.samples);
      for (int64_t other = 0; other < across; ++other) {
        T x[4];
        read_group(from, rows ? unit : other, (rows ? other : unit) * 4, x);
        const Positions at = two_largest(x);
        const Compute<T> threshold = third_largest(x, at);
        for (const int i : {at.first, at.second}) {
          const double s = soft_thresholded(x[i], threshold);
          product += double(x[i]) * s, square += s * s;
        }
      }
    }
    const double scale = square > 0 ? product / square : 1;
    call.scale.data<float>()[0] = float(call.clamped ? std::clamp(scale, 0.5, 2.0) : scale);
  });
}

}  // namespace tessera::ops

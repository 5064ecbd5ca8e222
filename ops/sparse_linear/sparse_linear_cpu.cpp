#include <array>
#include <cmath>
#include <span>

#include "ops/sparse_linear/sparse_linear_kernels.h"
#include "ops/sparse_linear/sparse_walk_internal.h"
#include "runtime/parallel.h"

namespace tessera::ops {
namespace {

using namespace sparse_internal;

/// Outputs that are computed together, a multiple of every format's rows of a group.
constexpr int64_t kStrip = 256;
/// Tokens whose sums are kept at a time.
constexpr int64_t kTokens = 64;

/// columns[j * kStrip + r] = element (first + r, j) of the weight; rows past the end are 0.
template <class C, class T>
void load_strip(std::vector<C>& columns, const SparseWeight& weight, int64_t first) {
  const int64_t rows = std::min(kStrip, weight.out - first);
  if (weight.format == SparseFormat::dense_columns) {
    const int64_t stride = weight.values.layout().stride(0);
    for (int64_t j = 0; j < weight.in; ++j)
      for (int64_t r = 0; r < rows; ++r)
        columns[size_t(j * kStrip + r)] = C(weight.values.data<T>()[j * stride + first + r]);
    return;
  }
  std::fill(columns.begin(), columns.end(), C(0));
  with_order(weight.format, [&](auto order) {
    using Order = decltype(order);
    const int64_t begin = first / Order::kRows, end = (first + rows + Order::kRows - 1) / Order::kRows;
    for (int64_t g = begin * weight.group_columns(); g < end * weight.group_columns(); ++g)
      for_each_stored<Order, T>(weight, g, [&](int64_t r, int64_t j, T value) {
        columns[size_t(j * kStrip + r - first)] = C(value);
      });
  });
}

/// sums[r] += columns[j * kStrip + r] * x[j * stride] for the inputs j of a list, in its order. Several
/// inputs at once, because a sum that is loaded and stored for each of them takes longer than the
/// multiplication.
template <class X, class C>
void add_inputs(C* __restrict sums, const C* __restrict columns, const X* x, int64_t stride,
                std::span<const int32_t> inputs) {
  constexpr size_t kTogether = 8;
  size_t i = 0;
  for (; i + kTogether <= inputs.size(); i += kTogether) {
    std::array<const C*, kTogether> column;
    std::array<C, kTogether> value;
    for (size_t k = 0; k < kTogether; ++k) {
      column[k] = columns + int64_t(inputs[i + k]) * kStrip;
      value[k] = C(x[inputs[i + k] * stride]);
    }
    for (int64_t r = 0; r < kStrip; ++r) {
      C sum = sums[r];
      for (size_t k = 0; k < kTogether; ++k) sum = std::fma(column[k][r], value[k], sum);
      sums[r] = sum;
    }
  }
  for (; i < inputs.size(); ++i) {
    const C* const column = columns + int64_t(inputs[i]) * kStrip;
    const C value = C(x[inputs[i] * stride]);
    for (int64_t r = 0; r < kStrip; ++r) sums[r] = std::fma(column[r], value, sums[r]);
  }
}

/// One strip of outputs of some tokens. The order of a sum is that of the inputs: a fused multiply-add with a
/// zero changes nothing, so all formats give the same bits. Columns that fit into the cache next to the sums
/// are multiplied with all the tokens before the next ones are read.
template <class X, class C>
void multiply_strip(const SparsePartCall& call, const std::vector<C>& columns, int64_t first,
                    const std::vector<std::vector<int32_t>>& inputs, int64_t begin, int64_t end) {
  constexpr int64_t kColumns = 128;  // of f32: 128 KiB
  const int64_t rows = std::min(kStrip, call.weight.out - first);
  const auto &to = call.y.layout(), &from = call.x.layout();
  std::vector<C> all_sums(size_t((end - begin) * kStrip), C(0));
  std::vector<size_t> done(size_t(end - begin), 0);  // inputs of each token
  for (int64_t past = kColumns; past < call.weight.in + kColumns; past += kColumns)
    for (int64_t t = begin; t < end; ++t) {
      const std::vector<int32_t>& list = inputs[size_t(t)];
      size_t& from_input = done[size_t(t - begin)];
      size_t to_input = from_input;
      while (to_input < list.size() && list[to_input] < past) ++to_input;
      add_inputs(all_sums.data() + (t - begin) * kStrip, columns.data(),
                 call.x.data<X>() + t * from.stride(0), from.stride(1),
                 std::span(list).subspan(from_input, to_input - from_input));
      from_input = to_input;
    }
  for (int64_t t = begin; t < end; ++t) {
    const C* const sums = all_sums.data() + (t - begin) * kStrip;
    for (int64_t r = 0; r < rows; ++r) {
      C sum = sums[r];
      if (call.bias.defined()) sum += C(call.bias.data<X>()[(first + r) * call.bias.layout().stride(0)]);
      if (call.residual.defined()) {
        const auto& other = call.residual.layout();
        sum += C(call.residual.data<X>()[t * other.stride(0) + (first + r) * other.stride(1)]);
      }
      call.y.data<X>()[t * to.stride(0) + (first + r) * to.stride(1)] = convert<X>(sum);
    }
  }
}

void multiply_part(const SparsePartCall& call) {
  const auto inputs = counting_inputs(call.x, call.gate);
  dispatch_floating(call.x.dtype(), "sparse_linear", [&]<class X>() {
    using C = Compute<X>;
    dispatch_floating(call.weight.dtype(), "sparse_linear", [&]<class T>() {
      parallel_for((call.weight.out + kStrip - 1) / kStrip, 1, [&](int64_t begin, int64_t end) {
        std::vector<C> columns(size_t(call.weight.in * kStrip), C(0));
        for (int64_t strip = begin; strip < end; ++strip) {
          load_strip<C, T>(columns, call.weight, strip * kStrip);
          for (int64_t t = 0; t < call.x.size(0); t += kTokens)
            multiply_strip<X, C>(call, columns, strip * kStrip, inputs, t,
                                 std::min(t + kTokens, call.x.size(0)));
        }
      });
    });
  });
}

}  // namespace

void sparse_linear_cpu(const SparseCall& call) {
  for_each_part(call, multiply_part);
}

}  // namespace tessera::ops

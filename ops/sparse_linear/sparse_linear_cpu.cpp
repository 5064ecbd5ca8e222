#include <cmath>

#include "ops/sparse_linear/sparse_linear_kernels.h"
#include "ops/sparse_linear/sparse_walk_internal.h"
#include "runtime/parallel.h"

namespace tessera::ops {
namespace {

using namespace sparse_internal;

/// Outputs that are computed together, a multiple of every format's rows of a group.
constexpr int64_t kStrip = 256;

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

/// One strip of outputs of all tokens. The order of a sum is that of the inputs: a fused multiply-add with a
/// zero changes nothing, so all formats give the same bits.
template <class X, class C>
void multiply_strip(const SparsePartCall& call, const std::vector<C>& columns, int64_t first,
                    const std::vector<std::vector<int32_t>>& inputs) {
  const int64_t rows = std::min(kStrip, call.weight.out - first);
  const auto &to = call.y.layout(), &from = call.x.layout();
  std::vector<C> sums(size_t(kStrip), C(0));
  for (int64_t t = 0; t < call.x.size(0); ++t) {
    std::fill(sums.begin(), sums.end(), C(0));
    for (const int32_t j : inputs[size_t(t)]) {
      const C x = C(call.x.data<X>()[t * from.stride(0) + j * from.stride(1)]);
      const C* const column = columns.data() + int64_t(j) * kStrip;
      for (int64_t r = 0; r < kStrip; ++r) sums[size_t(r)] = std::fma(column[r], x, sums[size_t(r)]);
    }
    for (int64_t r = 0; r < rows; ++r) {
      C sum = sums[size_t(r)];
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
          multiply_strip<X, C>(call, columns, strip * kStrip, inputs);
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

#include <algorithm>
#include <array>
#include <cmath>

#include "ops/sparse_linear/sparse_linear_kernels.h"
#include "ops/sparse_linear/sparse_walk_internal.h"
#include "runtime/integers.h"
#include "runtime/parallel.h"

namespace tessera::ops {
namespace {

using namespace sparse_internal;

/// Outputs whose columns are loaded together, a multiple of every format's rows of a group and of kWide
/// panels.
constexpr int64_t kStrip = 256;
/// Outputs of a panel: a vector register of f32, two of f64.
constexpr int64_t kPanel = 8;
/// Sums that are kept in registers: of so many tokens and one panel, or of one token and so many panels.
constexpr int64_t kWide = 8;

/// Element (first + p * kPanel + r, j) of the weight is columns[(p * in + j) * kPanel + r]; rows past the end
/// are 0.
template <class C, class T>
void load_strip(std::vector<C>& columns, const SparseWeight& weight, int64_t first) {
  const int64_t rows = std::min(kStrip, weight.out - first), in = weight.in;
  if (rows < kStrip || weight.format != SparseFormat::dense_columns)
    std::fill(columns.begin(), columns.end(), C(0));
  if (weight.format == SparseFormat::dense_columns) {
    const int64_t stride = weight.values.layout().stride(0);
    const T* const values = weight.values.data<T>() + first;
    for (int64_t row = 0; row < rows; row += kPanel) {
      C* const panel = columns.data() + row * in;
      const int64_t count = std::min(kPanel, rows - row);
      for (int64_t j = 0; j < in; ++j)
        for (int64_t r = 0; r < count; ++r) panel[j * kPanel + r] = C(values[j * stride + row + r]);
    }
    return;
  }
  with_order(weight.format, [&](auto order) {
    using Order = decltype(order);
    const int64_t begin = first / Order::kRows, end = ceil_div(first + rows, Order::kRows);
    for (int64_t g = begin * weight.group_columns(); g < end * weight.group_columns(); ++g)
      for_each_stored<Order, T>(weight, g, [&](int64_t row, int64_t j, T value) {
        const int64_t r = row - first;
        columns[size_t((r / kPanel * in + j) * kPanel + r % kPanel)] = C(value);
      });
  });
}

/// Tokens that are multiplied together, kWide or one: the inputs that pass the gate of any of them, in their
/// order, and x at each of those, token by token; 0 where the token's own gate leaves the input out.
template <class C>
struct Group {
  int64_t first, tokens;
  std::vector<int32_t> inputs = {};
  std::vector<C> x = {};
};

template <class X, class C>
void gather(Group<C>& group, const Tensor& x, const std::vector<std::vector<int32_t>>& passing) {
  const auto& layout = x.layout();
  std::vector<C> all(size_t(x.size(1) * group.tokens), C(0));
  std::vector<bool> passes(size_t(x.size(1)), false);
  for (int64_t t = 0; t < group.tokens; ++t) {
    const X* const row = x.data<X>() + (group.first + t) * layout.stride(0);
    for (const int32_t j : passing[size_t(group.first + t)]) {
      all[size_t(j * group.tokens + t)] = C(row[j * layout.stride(1)]);
      passes[size_t(j)] = true;
    }
  }
  for (int64_t j = 0; j < x.size(1); ++j) {
    if (!passes[size_t(j)]) continue;
    group.inputs.push_back(int32_t(j));
    const auto of_input = all.begin() + j * group.tokens;
    group.x.insert(group.x.end(), of_input, of_input + group.tokens);
  }
}

/// As many groups of kWide tokens as there are, then the rest, token by token.
template <class X, class C>
std::vector<Group<C>> groups_of(const Tensor& x, const Gate& gate) {
  const auto passing = counting_inputs(x, gate);
  std::vector<Group<C>> groups;
  for (int64_t t = 0; t < x.size(0); t += groups.back().tokens)
    groups.push_back({t, t + kWide <= x.size(0) ? kWide : 1});
  parallel_for(int64_t(groups.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) gather<X, C>(groups[size_t(g)], x, passing);
  });
  return groups;
}

/// Sums of kTokens tokens and kPanels panels that lie `stride` apart, in registers: loops that are unrolled
/// are what makes the compiler keep them there.
template <int64_t kTokens, int64_t kPanels, class C>
void add_inputs(C* sums, const C* panels, int64_t stride, const Group<C>& group) {
  std::array<std::array<C, kPanel>, size_t(kTokens * kPanels)> kept{};
  for (size_t i = 0; i < group.inputs.size(); ++i) {
    const C* const columns = panels + group.inputs[i] * kPanel;
#pragma GCC unroll 8
    for (int64_t s = 0; s < kTokens * kPanels; ++s) {
      const C* const column = columns + s / kTokens * stride;
      const C value = group.x[i * size_t(kTokens) + size_t(s % kTokens)];
#pragma GCC unroll 8
      for (size_t r = 0; r < size_t(kPanel); ++r)
        kept[size_t(s)][r] = std::fma(column[r], value, kept[size_t(s)][r]);
    }
  }
  for (const auto& one : kept) sums = std::copy(one.begin(), one.end(), sums);
}

/// y = sums + bias + residual of one token and the outputs of a panel from `first` on.
template <class X, class C>
void store(const SparsePartCall& call, int64_t t, int64_t first, const C* sums) {
  const auto& to = call.y.layout();
  const int64_t rows = std::min(kPanel, call.weight.out - first);
  X* const y = call.y.data<X>() + t * to.stride(0) + first * to.stride(1);
  std::array<C, size_t(kPanel)> sum;
  for (int64_t r = 0; r < rows; ++r) sum[size_t(r)] = sums[r];
  if (call.bias.defined()) {
    const int64_t stride = call.bias.layout().stride(0);
    const X* const bias = call.bias.data<X>() + first * stride;
    for (int64_t r = 0; r < rows; ++r) sum[size_t(r)] += C(bias[r * stride]);
  }
  if (call.residual.defined()) {
    const auto& layout = call.residual.layout();
    const X* const other = call.residual.data<X>() + t * layout.stride(0) + first * layout.stride(1);
    for (int64_t r = 0; r < rows; ++r) sum[size_t(r)] += C(other[r * layout.stride(1)]);
  }
  for (int64_t r = 0; r < rows; ++r) y[r * to.stride(1)] = convert<X>(sum[size_t(r)]);
}

/// One strip of outputs. The order of a sum is that of the inputs: a fused multiply-add with a zero changes
/// nothing (weights are finite), so all formats and groups give the same bits. A panel is multiplied with all
/// groups while it is in the cache.
template <class X, class C>
void multiply_strip(const SparsePartCall& call, const std::vector<C>& columns, int64_t first,
                    const std::vector<Group<C>>& groups) {
  const int64_t in = call.weight.in, rows = std::min(kStrip, call.weight.out - first);
  const auto rest = std::ranges::find(groups, 1, &Group<C>::tokens);
  std::array<C, size_t(kWide * kPanel)> sums;
  for (int64_t row = 0; row < rows; row += kPanel)
    for (auto group = groups.begin(); group != rest; ++group) {
      add_inputs<kWide, 1>(sums.data(), columns.data() + row * in, 0, *group);
      for (int64_t t = 0; t < kWide; ++t)
        store<X>(call, group->first + t, first + row, sums.data() + t * kPanel);
    }
  for (int64_t row = 0; row < rows; row += kWide * kPanel)
    for (auto group = rest; group != groups.end(); ++group) {
      add_inputs<1, kWide>(sums.data(), columns.data() + row * in, in * kPanel, *group);
      for (int64_t r = 0; r < std::min(kWide * kPanel, rows - row); r += kPanel)
        store<X>(call, group->first, first + row + r, sums.data() + r);
    }
}

void multiply_part(const SparsePartCall& call) {
  dispatch_floating(call.x.dtype(), "sparse_linear", [&]<class X>() {
    using C = Compute<X>;
    const std::vector<Group<C>> groups = groups_of<X, C>(call.x, call.gate);
    dispatch_floating(call.weight.dtype(), "sparse_linear", [&]<class T>() {
      parallel_for(ceil_div(call.weight.out, kStrip), 1, [&](int64_t begin, int64_t end) {
        std::vector<C> columns(size_t(call.weight.in * kStrip), C(0));
        for (int64_t strip = begin; strip < end; ++strip) {
          load_strip<C, T>(columns, call.weight, strip * kStrip);
          multiply_strip<X>(call, columns, strip * kStrip, groups);
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

#include "tensor/elementwise.h"

#include <gtest/gtest.h>

#include <array>
#include <utility>
#include <vector>

namespace tessera {
namespace {

/// A view of [rows, columns] elements of a wider tensor, transposed or not. The tensor holds 0, 1, 2, ...
Tensor matrix(int64_t rows, int64_t columns, bool transposed) {
  const Shape shape = transposed ? Shape{columns, rows + 3} : Shape{rows, columns + 3};
  std::vector<double> values(size_t(shape.count()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = double(i);
  const Tensor whole = Tensor::from(values, shape);
  return transposed ? whole.slice(1, 0, rows).transpose(0, 1) : whole.slice(1, 0, columns);
}

/// Where the element with that row-major index of the tensor, expanded to `shape`, lies.
double& element(const Tensor& tensor, const Shape& shape, int64_t index) {
  const Layout layout = tensor.expand(shape).layout();
  double* at = tensor.data<double>();
  for (int dim = shape.rank() - 1; dim >= 0; index /= shape[dim--])
    at += index % shape[dim] * layout.stride(dim);
  return *at;
}

TEST(ForEachRun, VisitsEveryElementOnceInAnyLayout) {
  const auto add_to = [](const Tensor& y, const Tensor& a, const Tensor& b) {  // y += a + 1e6 b
    std::vector<double> expected;
    for (int64_t i = 0; i < y.count(); ++i)
      expected.push_back(element(y, y.shape(), i) + element(a, y.shape(), i) +
                         1e6 * element(b, y.shape(), i));
    for_each_run(make_loop(y.shape(), y, a, b), [&](const auto& at, const auto& strides, int64_t n) {
      for (int64_t i = 0; i < n; ++i)
        y.data<double>()[at[0] + i * strides[0]] +=
            a.data<double>()[at[1] + i * strides[1]] + 1e6 * b.data<double>()[at[2] + i * strides[2]];
    });
    for (int64_t i = 0; i < y.count(); ++i) ASSERT_EQ(element(y, y.shape(), i), expected[size_t(i)]);
  };
  const std::pair<int64_t, int64_t> sizes[] = {{1, 1},   {1, 40},   {5, 129},  {33, 16},
                                               {33, 40}, {70, 129}, {300, 33}, {2, 9000}};
  for (const auto& [rows, columns] : sizes)
    for (const bool y_transposed : {false, true})
      for (const bool a_transposed : {false, true}) {
        const Tensor y = matrix(rows, columns, y_transposed), a = matrix(rows, columns, a_transposed);
        add_to(y, a, matrix(rows, columns, true));
        add_to(y, a, matrix(1, columns, false));
        add_to(y, matrix(rows, 1, false), a);
        const Tensor deep = Tensor::zeros({2, columns, rows}, DType::f64, Device::cpu());
        add_to(deep.transpose(1, 2), a, matrix(rows, columns, false));
        add_to(Tensor::zeros({rows, 2, columns}, DType::f64, Device::cpu()).transpose(0, 1), a, a);
      }
}

// Else each element of a large transposed matrix is a cache line of its own, which is gone when the next
// element of it is needed.
TEST(ForEachRun, WalksATransposedMatrixAlongItsRows) {
  const OneThread one;
  for (const bool to_transposed : {false, true}) {
    const Tensor y = matrix(64, 128, to_transposed), x = matrix(64, 128, !to_transposed);
    std::vector<std::array<int64_t, 2>> starts;
    for_each_run(make_loop(y.shape(), y, x), [&](const auto& at, const auto& strides, int64_t n) {
      EXPECT_EQ(strides[0], 1) << "y is written along its rows";
      EXPECT_LE(n, 32);
      starts.push_back(at);
    });
    ASSERT_GE(starts.size(), 2u);
    EXPECT_EQ(starts[1][1] - starts[0][1], 1) << "the next element of x in memory is the next one to be read";
  }
}

}  // namespace
}  // namespace tessera

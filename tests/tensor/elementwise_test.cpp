#include "tensor/elementwise.h"

#include <gtest/gtest.h>

#include <array>
#include <utility>
#include <vector>

#include "ops/elementwise.h"

namespace tessera {
namespace {

/// A view of [rows, columns] elements of a wider tensor, transposed or not. The tensor holds 0, 1, 2, ..., of
/// `most` numbers.
Tensor matrix(int64_t rows, int64_t columns, bool transposed, DType dtype = DType::f64,
              size_t most = 1 << 30) {
  const Shape shape = transposed ? Shape{columns, rows + 3} : Shape{rows, columns + 3};
  std::vector<double> values(size_t(shape.count()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = double(i % most);
  const Tensor whole = Tensor::from(values, shape).to(dtype);
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

TEST(ElementwiseCpu, ComputesEveryElementInAnyLayoutAndLeavesTheOthers) {
  const auto check = [](DType dtype, int64_t rows, int64_t columns, const Tensor& y, const Tensor& a,
                        const Tensor& b) {
    dispatch_floating(dtype, "test", [&]<class T>() {
      ops::elementwise_cpu<T>(
          y, [](Compute<T> u, Compute<T> v) { return u + 2 * v; }, a, b);
    });
    const auto got = y.to_vector<double>(), first = a.expand({rows, columns}).to_vector<double>(),
               second = b.expand({rows, columns}).to_vector<double>();
    for (size_t i = 0; i < got.size(); ++i)
      ASSERT_EQ(got[i], first[i] + 2 * second[i]) << dtype << " " << rows << " x " << columns << ", " << i;
  };
  const std::pair<int64_t, int64_t> sizes[] = {{1, 40},   {31, 33},  {32, 32}, {33, 65},
                                               {70, 129}, {300, 33}, {2, 900}};
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16})
    for (const auto& [rows, columns] : sizes)
      for (const int turned : {0, 1, 2, 3, 4, 5, 6, 7}) {
        const auto operand = [&](int bit, size_t most) {
          return matrix(rows, columns, (turned & bit) != 0, dtype, most);
        };
        // Sums up to 250 are exact in every dtype.
        check(dtype, rows, columns, operand(1, 1), operand(2, 83), operand(4, 84));
        check(dtype, rows, columns, operand(1, 1), matrix(1, columns, false, dtype, 83), operand(4, 84));
        check(dtype, rows, columns, operand(1, 1), operand(2, 83), matrix(rows, 1, false, dtype, 84));
        // What is next to a result in memory stays: y is a view of zeros.
        const Tensor around = Tensor::zeros({columns + 2, rows + 2}, dtype, Device::cpu());
        const Tensor inside = around.slice(0, 1, columns + 1).slice(1, 1, rows + 1).transpose(0, 1);
        check(dtype, rows, columns, inside, operand(2, 83), operand(4, 84));
        double outside = 0, within = 0;
        for (const double value : around.to_vector<double>()) outside += value;
        for (const double value : inside.to_vector<double>()) within += value;
        ASSERT_EQ(outside, within);
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

#include "tensor/layout.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "tensor/tensor.h"
#include "tests/errors.h"

/// Layouts against a brute-force map: where each element of a view lies, in row-major order.

namespace tessera {
namespace {

std::vector<int64_t> offsets(const Layout& layout) {
  std::vector<int64_t> map;
  for (int64_t index = 0; index < layout.shape.count(); ++index) {
    int64_t rest = index, offset = layout.offset;
    for (int dim = layout.rank() - 1; dim >= 0; --dim) {
      offset += rest % layout.shape[dim] * layout.stride(dim);
      rest /= layout.shape[dim];
    }
    map.push_back(offset);
  }
  return map;
}

/// Whether strides exist with which `shape` visits exactly these offsets: each stride is fixed by one
/// element.
bool strides_exist(const std::vector<int64_t>& map, const Shape& shape) {
  if (map.empty()) return true;
  Layout candidate = Layout::packed(shape);
  const Layout packed = candidate;
  candidate.offset = map[0];
  for (int dim = 0; dim < shape.rank(); ++dim)
    candidate.strides[size_t(dim)] = shape[dim] > 1 ? map[size_t(packed.stride(dim))] - map[0] : 0;
  return offsets(candidate) == map;
}

class RandomViews {
 public:
  explicit RandomViews(uint64_t seed) : random_(seed) {}

  int64_t pick(int64_t low, int64_t high) {  // inclusive
    return low + int64_t(random_() % uint64_t(high - low + 1));
  }

  /// A view of a fresh tensor after a few random view functions.
  Tensor next() {
    const int rank = int(pick(0, 4));
    std::vector<int64_t> sizes;
    for (int dim = 0; dim < rank; ++dim)
      sizes.push_back(pick(0, 9) == 0 ? 0 : pick(0, 3) == 0 ? 1 : pick(1, 6));
    Tensor view = pick(0, 1) ? Tensor::empty(Shape(sizes), DType::i64, Device::cpu())
                             : Tensor::empty_packed(Shape(sizes), DType::i64, Device::cpu());
    for (int64_t steps = pick(0, 4); steps > 0; --steps) {
      const int64_t what = pick(0, 4);
      if (what == 0 && view.rank() < 6) {
        std::vector<int64_t> wide(view.shape().begin(), view.shape().end());
        for (int64_t& size : wide)
          if (size == 1 && pick(0, 1)) size = pick(0, 3);
        if (pick(0, 1)) wide.insert(wide.begin(), pick(1, 3));
        view = view.expand(Shape(wide));
      }
      if (view.rank() == 0) continue;
      const int dim = int(pick(0, view.rank() - 1));
      if (what == 1) {
        const int64_t begin = pick(0, view.size(dim)), end = pick(begin, view.size(dim));
        view = view.slice(dim, begin, end, pick(1, 3));
      } else if (what == 2) {
        view = view.transpose(dim, int(pick(0, view.rank() - 1)));
      } else if (what == 3 && view.size(dim) > 0) {
        view = view.select(dim, pick(0, view.size(dim) - 1));
      } else if (what == 4 && view.size(dim) > 0) {
        const int64_t at = pick(0, view.size(dim) - 1);
        view = view.slice(dim, at, at + 1);
      }
    }
    return view;
  }

  /// A random shape of that many elements, with dimensions of size 1 strewn in.
  Shape shape_of(int64_t count) {
    std::vector<int64_t> sizes;
    if (count == 0) {
      for (int64_t dims = pick(0, 3); dims > 0; --dims) sizes.push_back(pick(0, 3));
      sizes.push_back(0);
    }
    while (count > 1 && sizes.size() < 5) {
      std::vector<int64_t> divisors;
      for (int64_t d = 2; d <= count; ++d)
        if (count % d == 0) divisors.push_back(d);
      const int64_t size = divisors[size_t(pick(0, int64_t(divisors.size()) - 1))];
      sizes.push_back(size);
      count /= size;
    }
    if (count > 1) sizes.push_back(count);
    for (int64_t ones = pick(0, 2); ones > 0; --ones)
      sizes.insert(sizes.begin() + pick(0, int64_t(sizes.size())), 1);
    return Shape(sizes);
  }

 private:
  std::mt19937_64 random_;
};

TEST(Layout, RandomViewsAgreeWithTheElementMap) {
  RandomViews views(3);
  int with_rows = 0, packed = 0;
  for (int round = 0; round < 5000; ++round) {
    const Layout layout = views.next().layout();
    const auto map = offsets(layout);
    std::ostringstream what;
    what << layout.shape << " strides";
    for (int dim = 0; dim < layout.rank(); ++dim) what << " " << layout.stride(dim);
    SCOPED_TRACE(what.str());

    int64_t extent = 0;
    for (const int64_t offset : map) extent = std::max(extent, offset - map[0] + 1);
    ASSERT_EQ(layout.extent(), extent);
    bool dense = true;
    for (size_t i = 0; i < map.size(); ++i) dense = dense && map[i] == map[0] + int64_t(i);
    ASSERT_EQ(layout.is_packed(), dense);
    ASSERT_EQ(layout.is_expanded(), std::set(map.begin(), map.end()).size() < map.size());

    ASSERT_EQ(layout.rows() * layout.row_length(), layout.shape.count());
    const Shape two{layout.rows(), layout.row_length()};
    bool rows = true;  // is there a row stride at all?
    const int64_t stride = layout.rows() > 1 && !map.empty() ? map[size_t(layout.row_length())] - map[0] : 0;
    for (size_t i = 0; i < map.size(); ++i)
      rows = rows && map[i] == map[0] + int64_t(i) / two[1] * stride + int64_t(i) % two[1];
    ASSERT_EQ(layout.has_rows(), rows);
    if (rows && layout.rows() > 1 && !map.empty()) {
      ASSERT_EQ(layout.row_stride(), stride);
    }
    with_rows += rows, packed += dense;
  }
  // The generator makes views of every kind.
  for (const int seen : {with_rows, packed}) EXPECT_TRUE(200 < seen && seen < 4800) << seen;
}

TEST(Layout, ReshapeIsAViewExactlyWhereStridesExist) {
  RandomViews views(4);
  int possible = 0, impossible = 0;
  for (int round = 0; round < 20000; ++round) {
    const Tensor view = views.next();
    const Shape shape = views.shape_of(view.count());
    const auto map = offsets(view.layout());
    SCOPED_TRACE(testing::Message() << view.shape() << " to " << shape);
    const bool expected = strides_exist(map, shape);
    ASSERT_EQ(view.can_reshape(shape), expected);
    if (expected) {
      const Tensor reshaped = view.reshape(shape);
      ASSERT_EQ(reshaped.shape(), shape);
      ASSERT_EQ(offsets(reshaped.layout()), map);
    } else {
      ASSERT_THROW(view.reshape(shape), Error);
    }
    (expected ? possible : impossible) += 1;
  }
  EXPECT_GT(possible, 1000);
  EXPECT_GT(impossible, 1000);
}

TEST(Layout, ViewFunctionsPermuteTheElementMap) {
  RandomViews views(5);
  for (int round = 0; round < 5000; ++round) {
    const Tensor view = views.next();
    if (view.rank() < 2) continue;
    const auto map = offsets(view.layout());
    const int a = int(views.pick(0, view.rank() - 1)), b = int(views.pick(0, view.rank() - 1));
    const Tensor turned = view.transpose(a, b - view.rank());
    const auto turned_map = offsets(turned.layout());
    // Element by element: indices exchanged.
    const Layout to = Layout::packed(turned.shape());
    for (int64_t index = 0; index < view.count(); ++index) {
      int64_t rest = index, place = 0;
      for (int dim = view.rank() - 1; dim >= 0; --dim) {
        const int moved = dim == a ? b : dim == b ? a : dim;
        place += rest % view.size(dim) * to.stride(moved);
        rest /= view.size(dim);
      }
      ASSERT_EQ(turned_map[size_t(place)], map[size_t(index)]);
    }
  }
}

TEST(Shape, RefusesNegativeTooManyAndOverflow) {
  expect_error([] { Shape{2, -1}; }, {"shape: size -1 is negative", "Tensor::reshape_with infers one"});
  EXPECT_THROW((Shape{1, 1, 1, 1, 1, 1, 1, 1, 1}), Error);
  const int64_t half = int64_t{1} << 32;
  EXPECT_THROW((Shape{half, half}), Error);
  EXPECT_THROW((Shape{0, half, half}), Error) << "a zero does not excuse the rest";
  EXPECT_NO_THROW((Shape{half, half / 2 - 1}));
  EXPECT_EQ((Shape{}).count(), 1);
  EXPECT_EQ((Shape{3, 0}).count(), 0);
  EXPECT_THROW((Shape{2, 3})[2], Error);
  EXPECT_THROW((Shape{2, 3})[-3], Error);
  EXPECT_EQ((Shape{2, 3})[-1], 3);
  EXPECT_EQ((Shape{2, 3}).inserted(2, 4), (Shape{2, 3, 4}));
  EXPECT_EQ((Shape{2, 3}).inserted(0, 4), (Shape{4, 2, 3}));
  EXPECT_THROW((Shape{2}).inserted(2, 1), Error);
  EXPECT_EQ((Shape{2, 3, 4}).without(-2), (Shape{2, 4}));
}

TEST(Shape, Broadcasts) {
  EXPECT_EQ(broadcast({3, 1}, {4}, "test"), (Shape{3, 4}));
  EXPECT_EQ(broadcast({}, {2, 2}, "test"), (Shape{2, 2}));
  EXPECT_EQ(broadcast({1}, {0}, "test"), (Shape{0}));
  try {
    broadcast({2, 3}, {4, 3}, "add");
    FAIL() << "expected an error";
  } catch (const Error& error) {
    const std::string what = error.what();
    for (const char* part : {"add", "[2, 3]", "[4, 3]", "2 against 4", "dimension -2"})
      EXPECT_NE(what.find(part), std::string::npos) << part << " in: " << what;
  }
}

}  // namespace
}  // namespace tessera

#include "tensor/layout.h"

#include <algorithm>

namespace tessera {

Shape::Shape(std::span<const int64_t> sizes) {
  check(sizes.size() <= size_t(kMaxRank), "shape of rank ", sizes.size(), ": at most ", kMaxRank,
        " dimensions");
  rank_ = int(sizes.size());
  std::copy(sizes.begin(), sizes.end(), sizes_.begin());
  int64_t count = 1;
  for (const int64_t size : sizes) {
    check(size >= 0, "shape: size ", size,
          " is negative; expected 0 or more. No size is inferred from the others: compute it, such as "
          "x.count() / 2 (off the tape Tensor::reshape_with infers one that is -1)");
    // Zero sizes do not excuse the others: [0, 2^62, 2^62] is refused like [1, 2^62, 2^62].
    check(!__builtin_mul_overflow(count, std::max<int64_t>(size, 1), &count),
          "shape: the number of elements overflows");
  }
}

int64_t Shape::count() const {
  int64_t count = 1;
  for (int dim = 0; dim < rank_; ++dim) count *= sizes_[size_t(dim)];
  return count;
}

void Shape::fail_resolve(int dim) const {
  fail_at(Site::here(), "dimension ", dim, " is outside the shape ", *this, " of rank ", rank_);
}

Shape Shape::with(int dim, int64_t size) const {
  std::array<int64_t, kMaxRank> sizes = sizes_;
  sizes[size_t(resolve(dim))] = size;
  return Shape(std::span<const int64_t>(sizes.data(), size_t(rank_)));
}

Shape Shape::without(int dim) const {
  Shape shape = *this;
  const int resolved = resolve(dim);
  for (int d = resolved; d + 1 < rank_; ++d) shape.sizes_[size_t(d)] = sizes_[size_t(d + 1)];
  shape.rank_ -= 1;
  return shape;
}

Shape Shape::inserted(int dim, int64_t size) const {
  check(rank_ < kMaxRank, "shape ", *this, ": no room for another dimension");
  check(dim >= 0 && dim <= rank_, "dimension ", dim, " cannot be inserted into a shape of rank ", rank_);
  std::array<int64_t, kMaxRank> sizes = sizes_;
  for (int d = rank_; d > dim; --d) sizes[size_t(d)] = sizes[size_t(d - 1)];
  sizes[size_t(dim)] = size;
  return Shape(std::span<const int64_t>(sizes.data(), size_t(rank_ + 1)));
}

bool operator==(const Shape& a, const Shape& b) {
  return std::ranges::equal(a.sizes(), b.sizes());
}

std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  out << '[';
  for (int dim = 0; dim < shape.rank(); ++dim) out << (dim ? ", " : "") << shape[dim];
  return out << ']';
}

Shape complete_shape(std::span<const int64_t> sizes, int64_t count) {
  const bool open = std::ranges::count(sizes, -1) > 0;
  check(std::ranges::count(sizes, -1) <= 1, "reshape: more than one size is -1");
  if (!open) return Shape(sizes);
  std::array<int64_t, kMaxRank> known{};
  check(sizes.size() <= known.size(), "reshape: ", sizes.size(), " sizes; expected at most ", kMaxRank);
  std::ranges::replace_copy(sizes, known.begin(), -1, 1);
  const std::span<int64_t> all(known.data(), sizes.size());
  const Shape others(all);
  check(others.count() > 0 && count % others.count() == 0, "reshape: ", count,
        " elements do not divide by the ", others.count(), " of the other sizes");
  return others.with(int(std::ranges::find(sizes, -1) - sizes.begin()), count / others.count());
}

Shape broadcast(const Shape& a, const Shape& b, const char* what) {
  const int rank = std::max(a.rank(), b.rank());
  std::array<int64_t, kMaxRank> sizes{};
  for (int dim = 0; dim < rank; ++dim) {
    const int64_t left = dim < rank - a.rank() ? 1 : a[dim - (rank - a.rank())];
    const int64_t right = dim < rank - b.rank() ? 1 : b[dim - (rank - b.rank())];
    check(left == right || left == 1 || right == 1, what, ": shapes ", a, " and ", b,
          " do not broadcast: ", left, " against ", right, " in dimension ", dim - rank);
    sizes[size_t(dim)] = left == 1 ? right : left;
  }
  return Shape(std::span<const int64_t>(sizes.data(), size_t(rank)));
}

Layout Layout::packed(const Shape& shape) {
  return pitched(shape, shape.rank() ? shape[-1] : 1);
}

Layout Layout::pitched(const Shape& shape, int64_t pitch) {
  Layout layout;
  layout.shape = shape;
  int64_t stride = 1;
  for (int dim = shape.rank() - 1; dim >= 0; --dim) {
    layout.strides[size_t(dim)] = stride;
    stride *= dim == shape.rank() - 1 ? pitch : shape[dim];
  }
  return layout;
}

bool Layout::is_packed() const {
  int64_t expected = 1;
  for (int dim = rank() - 1; dim >= 0; --dim) {
    if (shape[dim] != 1 && strides[size_t(dim)] != expected) return shape.count() == 0;
    expected *= shape[dim];
  }
  return true;
}

bool Layout::is_expanded() const {
  if (shape.count() == 0) return false;
  for (int dim = 0; dim < rank(); ++dim)
    if (shape[dim] > 1 && strides[size_t(dim)] == 0) return true;
  return false;
}

bool Layout::has_rows() const {
  if (rank() == 0 || shape.count() == 0) return true;
  if (shape[-1] > 1 && strides[size_t(rank() - 1)] != 1) return false;
  int64_t expected = -1;  // stride of the next dimension outwards; unknown until one of size > 1 was met
  for (int dim = rank() - 2; dim >= 0; --dim) {
    if (shape[dim] == 1) continue;
    if (expected >= 0 && strides[size_t(dim)] != expected) return false;
    expected = strides[size_t(dim)] * shape[dim];
  }
  return true;
}

int64_t Layout::row_stride() const {
  for (int dim = rank() - 2; dim >= 0; --dim)
    if (shape[dim] != 1) return strides[size_t(dim)];
  return row_length();
}

int64_t Layout::rows() const {
  int64_t rows = 1;
  for (int dim = 0; dim + 1 < rank(); ++dim) rows *= shape[dim];
  return rows;
}

int64_t Layout::row_length() const {
  return rank() ? shape[-1] : 1;
}

int64_t Layout::extent() const {
  if (shape.count() == 0) return 0;
  int64_t last = 0;
  for (int dim = 0; dim < rank(); ++dim) last += (shape[dim] - 1) * strides[size_t(dim)];
  return last + 1;
}

}  // namespace tessera

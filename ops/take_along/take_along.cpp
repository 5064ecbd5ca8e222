#include "ops/take_along/take_along.h"

#include <algorithm>
#include <vector>

#include "autograd/tape.h"
#include "ops/gather/gather.h"
#include "ops/indices.h"
#include "ops/take_along/take_along_kernels.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {
namespace {

/// Dimensions in the order in which `dim` is the last one, and the way back.
struct Turned {
  std::vector<int> there, back;
  Turned(int rank, int dim) : back(size_t(rank)) {
    for (int d = 0; d < rank; ++d)
      if (d != dim) there.push_back(d);
    there.push_back(dim);
    for (int d = 0; d < rank; ++d) back[size_t(there[size_t(d)])] = d;
  }
};

void check_indices(const char* name, const Tensor& indices) {
  check(indices.defined(), name, ": indices is undefined");
  check(indices.dtype() == DType::i64 || indices.dtype() == DType::i32, name, ": indices is ",
        describe(indices), "; expected i64 or i32");
}

/// Where element `number` of that shape lies: "[1, 0, 2]".
std::string position(const Shape& shape, int64_t number) {
  std::vector<int64_t> at(size_t(shape.rank()));
  for (int d = shape.rank() - 1; d >= 0; --d) at[size_t(d)] = number % shape[d], number /= shape[d];
  MessageStream text;
  text << Shape(at);
  return text.str();
}

/// On the CPU alone: see the contract. `what`: what the indices are of.
template <class What>
void check_range(const char* name, const Tensor& indices, int64_t high, const What& what) {
  if (!indices.device().is_cpu()) return;
  const Tensor packed = indices.packed();
  const Indices at(packed);
  for (int64_t n = 0; n < packed.count(); ++n)
    check(0 <= at[n] && at[n] < high, name, ": index ", at[n], " at ", position(indices.shape(), n),
          " is outside the ", high, " ", what);
}

Tensor taken(const Tensor& x, const Tensor& indices, int dim) {
  Tensor y = Tensor::empty(indices.shape(), x.dtype(), x.device());
  if (y.count() == 0) return y;
  if (x.device().is_cpu()) {
    take_along_cpu(y, x, indices, dim);
  } else if constexpr (kCuda) {
    take_along_cuda(y, x, indices, dim);
  }
  return y;
}

/// dx [L, R] from dy and indices [L, N].
Tensor put(const Tensor& dy, const Tensor& indices, int64_t lines, int64_t length) {
  Tensor dx = Tensor::empty_packed({lines, length}, dy.dtype(), dy.device());
  if (dx.count() == 0) return dx;
  if (dx.device().is_cpu()) {
    put_along_cpu(dx, dy, indices);
  } else if constexpr (kCuda) {
    if (put_along_compares(indices.size(1))) {
      put_along_cuda(dx, dy, indices);
    } else {
      const Tensor numbers = Tensor::empty_packed({indices.count()}, DType::i64, dx.device());
      number_in_lines_cuda(numbers, indices, length);
      dx = scatter_rows(dy.reshape({dy.count(), 1}), numbers, lines * length).reshape({lines, length});
    }
  }
  return dx;
}

}  // namespace

Tensor take_along(const Tensor& x, const Tensor& indices, int dim, Site site) {
  const CallScope call(site);
  check(x.defined(), "take_along: x is undefined");
  check_indices("take_along", indices);
  check(dim >= -x.rank() && dim < x.rank(), "take_along: dimension ", dim, " is outside ", describe(x));
  const int d = x.shape().resolve(dim);
  check(indices.rank() == x.rank() && indices.shape().with(d, 0) == x.shape().with(d, 0),
        "take_along: indices is ", describe(indices), " and x is ", describe(x),
        "; expected equal sizes in every dimension but ", d);
  check(indices.device() == x.device(), "take_along: x is ", describe(x), ", indices is ", describe(indices),
        "; both must be on one device");
  check_range("take_along", indices, x.size(d), "elements of that dimension of x");
  Tensor y = taken(x.detach(), indices, d);
  if (Tape* const tape = Tape::recording(x))
    tape->record("take_along", {&x, &indices}, {&y},
                 [shape = x.shape(), indices = Saved(indices), d](Backward& b) {
                   const Turned turned(shape.rank(), d);
                   const Tensor dy = b.grad().permute(turned.there), at = indices.get().permute(turned.there);
                   const int64_t lines = shape.without(d).count(), length = shape[d], n = at.size(-1);
                   std::vector<int64_t> sizes;
                   for (const int dim : turned.there) sizes.push_back(shape[dim]);
                   const Tensor dx =
                       put(dy.packed().reshape({lines, n}), at.packed().reshape({lines, n}), lines, length);
                   b.give(0, dx.reshape(Shape(sizes)).permute(turned.back));
                 });
  return y;
}

Tensor one_hot(const Tensor& indices, int64_t classes, DType dtype, Site site) {
  const CallScope call(site);
  check_indices("one_hot", indices);
  check(classes >= 0, "one_hot: ", classes, " classes; expected 0 or more");
  check_range("one_hot", indices, classes, "classes");
  Tensor y = Tensor::empty(indices.shape().inserted(indices.rank(), classes), dtype, indices.device());
  if (y.count() == 0) return y;
  if (y.device().is_cpu()) {
    one_hot_cpu(y, indices);
  } else if constexpr (kCuda) {
    one_hot_cuda(y, indices);
  }
  return y;
}

}  // namespace tessera::ops

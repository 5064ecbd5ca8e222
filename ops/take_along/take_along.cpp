#include "ops/take_along/take_along.h"

#include <algorithm>
#include <vector>

#include "autograd/tape.h"
#include "ops/gather/gather.h"
#include "ops/indices.h"
#include "ops/pointwise/pointwise.h"
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
  for (int64_t n = 0; n < packed.count(); ++n) {
    if (0 <= at[n] && at[n] < high) continue;
    check(false, name, ": index ", at[n], " at ", position(indices.shape(), n), " is outside the ", high, " ",
          what);
  }
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

/// Tensors as lines along one dimension, [lines, elements], packed, and the way back.
struct Lined {
  Lined(const Shape& shape, int dim) : dim(dim), shape(shape), turned(shape.rank(), dim) {}
  int64_t lines() const { return shape.without(dim).count(); }
  Tensor there(const Tensor& x) const {
    return x.permute(turned.there).packed().reshape({lines(), x.size(dim)});
  }
  Tensor back(const Tensor& x) const {
    std::vector<int64_t> sizes;
    for (const int d : turned.there) sizes.push_back(d == dim ? x.size(1) : shape[d]);
    return x.reshape(Shape(sizes)).permute(turned.back);
  }

  int dim;
  Shape shape;
  Turned turned;
};

/// The sums of src by the indices, `size` of them along dimension `dim`.
Tensor summed(const Tensor& src, const Tensor& indices, int64_t size, int dim) {
  const Lined lined(src.shape(), dim);
  return lined.back(put(lined.there(src), lined.there(indices), lined.lines(), size));
}

/// dy where an element of src is what scatter() wrote last; see last_gradient_cpu.
Tensor source_gradient(const Lined& lined, const Tensor& dy, const Tensor& last, const Tensor& indices) {
  const Tensor at = lined.there(indices), lines = lined.there(dy),
               dsrc = Tensor::empty_packed(at.shape(), dy.dtype(), dy.device());
  if (dy.device().is_cpu()) {
    last_gradient_cpu(dsrc, lines, last, at);
  } else if constexpr (kCuda) {
    last_gradient_cuda(dsrc, lines, last, at);
  }
  return lined.back(dsrc);
}

/// Returns the dimension, not negative.
int check_pair(const char* name, const Tensor& src, const Tensor& indices, int dim) {
  check(src.defined(), name, ": src is undefined");
  check_indices(name, indices);
  check(dim >= -src.rank() && dim < src.rank(), name, ": dimension ", dim, " is outside ", describe(src));
  check(indices.shape() == src.shape() && indices.device() == src.device(), name, ": src is ", describe(src),
        ", indices is ", describe(indices), "; expected one shape and one device");
  return src.shape().resolve(dim);
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
                 [size = x.size(d), indices = Saved(indices), d](Backward& b) {
                   b.give(0, summed(b.grad(), indices.get(), size, d));
                 });
  return y;
}

Tensor scatter_add(const Tensor& src, const Tensor& indices, int64_t size, int dim, Site site) {
  const CallScope call(site);
  const int d = check_pair("scatter_add", src, indices, dim);
  check(is_floating(src.dtype()) && src.dtype() != DType::f8e4m3, "scatter_add: src is ", describe(src),
        "; expected f64, f32, bf16 or f16");
  check(size >= 0, "scatter_add: size is ", size, "; expected 0 or more");
  check_range("scatter_add", indices, size, "elements of that dimension of y");
  Tensor y = summed(src.detach(), indices, size, d);
  if (Tape* const tape = Tape::recording(src))
    tape->record("scatter_add", {&src, &indices}, {&y}, [indices = Saved(indices), d](Backward& b) {
      b.give(0, taken(b.grad(), indices.get(), d));
    });
  return y;
}

Tensor scatter(const Tensor& x, const Tensor& indices, const Tensor& src, int dim, Site site) {
  const CallScope call(site);
  check(x.defined(), "scatter: x is undefined");
  const int d = check_pair("scatter", src, indices, dim);
  check(x.rank() == src.rank() && x.shape().with(d, 0) == src.shape().with(d, 0) &&
            x.dtype() == src.dtype() && x.device() == src.device(),
        "scatter: x is ", describe(x), " and src is ", describe(src),
        "; expected one dtype, one device and equal sizes in every dimension but ", d);
  check_range("scatter", indices, x.size(d), "elements of that dimension of x");
  if (x.count() == 0 || src.count() == 0)  // x, on the tape
    return where(Tensor::full({}, 1, DType::boolean, x.device()), x,
                 Tensor::zeros({}, x.dtype(), x.device()));
  const Lined lined(x.shape(), d);
  const Tensor last = Tensor::empty_packed({lined.lines(), x.size(d)}, DType::i64, x.device());
  if (x.device().is_cpu()) {
    last_along_cpu(last, lined.there(indices));
  } else if constexpr (kCuda) {
    last_along_cuda(last, lined.there(indices));
  }
  // The place in src that an element comes from; -1: from x.
  const Tensor from = lined.back(last), written = greater_equal(from, 0);
  Tensor y = where(written, taken(src.detach(), clamp(from, 0, double(src.size(d) - 1)), d), x.detach());
  if (Tape* const tape = Tape::recording(x, src))
    tape->record(
        "scatter", {&x, &indices, &src}, {&y},
        [indices = Saved(indices), last = Saved(last), written = Saved(written), lined](Backward& b) {
          const Tensor dy = b.grad();
          if (b.needs(0)) b.give(0, where(written.get(), Tensor::zeros({}, dy.dtype(), dy.device()), dy));
          if (b.needs(2)) b.give(2, source_gradient(lined, dy, last.get(), indices.get()));
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

#include "ops/shape/shape.h"

#include "ops/reduce/reduce.h"

namespace tessera::ops {
namespace {

/// A view of x with that shape, or a copy.
Tensor reshaped(const Tensor& x, const Shape& shape) {
  if (x.can_reshape(shape)) return x.reshape(shape);
  Tensor y = Tensor::empty(shape, x.dtype(), x.device());
  if (!y.can_reshape(x.shape())) return x.packed().reshape(shape);
  y.reshape(x.shape()).copy_from(x);
  return y;
}

int resolved(const char* op, const Tensor& x, int dim) {
  check(dim >= -x.rank() && dim < x.rank(), op, ": dimension ", dim, " is outside ", describe(x));
  return x.shape().resolve(dim);
}

}  // namespace

Tensor concat(const std::vector<Tensor>& parts, int dim, Site site) {
  check(!parts.empty(), "concat: no parts; give at least one tensor");
  const Tensor& first = parts[0];
  check(first.defined(), "concat: part 0 is undefined");
  const int d = resolved("concat", first, dim);
  int64_t total = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    check(parts[i].defined(), "concat: part ", i, " is undefined");
    check(parts[i].dtype() == first.dtype() && parts[i].device() == first.device(), "concat: part ", i,
          " is ", describe(parts[i]), ", but part 0 is ", describe(first), "; parts share dtype and device");
    check(parts[i].rank() == first.rank() && parts[i].shape().with(d, 0) == first.shape().with(d, 0),
          "concat: part ", i, " is ", describe(parts[i]), ", but part 0 is ", describe(first),
          "; parts agree in every dimension but ", d);
    check(!__builtin_add_overflow(total, parts[i].size(d), &total), "concat: dimension ", d, " overflows");
  }
  Tensor y = Tensor::empty(first.shape().with(d, total), first.dtype(), first.device());
  std::vector<int64_t> starts{0};
  for (const Tensor& part : parts) {
    const int64_t begin = starts.back();
    starts.push_back(begin + part.size(d));
    y.slice(d, begin, starts.back()).copy_from(part.detach());
  }
  if (Tape* tape = Tape::recording_any(parts)) {
    std::vector<const Tensor*> inputs;
    for (const Tensor& part : parts) inputs.push_back(&part);
    Tensor* const output = &y;
    tape->record("concat", site, inputs, std::span(&output, 1), [starts = std::move(starts), d](Backward& b) {
      const Tensor dy = b.grad();
      for (size_t i = 0; i + 1 < starts.size(); ++i)
        if (b.needs(int(i))) b.accumulate(int(i), dy.slice(d, starts[i], starts[i + 1]));
    });
  }
  return y;
}

Tensor slice(const Tensor& x, int dim, int64_t begin, int64_t end, int64_t step, Site site) {
  check(x.defined(), "slice: x is undefined");
  const int d = resolved("slice", x, dim);
  Tensor y = x.detach().slice(d, begin, end, step);
  if (Tape* tape = Tape::recording(x))
    tape->record("slice", site, {&x}, {&y}, [=, shape = x.shape()](Backward& b) {
      b.accumulate_view(
          0, shape, [&](const Tensor& dx) { return dx.slice(d, begin, end, step); }, b.grad());
    });
  if (y.grad_state() && x.grad_state() && step == 1) {
    GradState& state = *y.grad_state();
    state.source = x.grad_state();
    state.dim = d, state.begin = begin < 0 ? begin + x.size(d) : begin, state.end = state.begin + y.size(d);
  }
  return y;
}

std::vector<Tensor> split(const Tensor& x, int dim, const std::vector<int64_t>& sizes, Site site) {
  check(x.defined(), "split: x is undefined");
  const int d = resolved("split", x, dim);
  std::vector<Tensor> parts;
  std::vector<int64_t> starts{0};
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int64_t first = starts.back();
    check(sizes[i] >= 0 && sizes[i] <= x.size(d) - first, "split: part ", i, " of size ", sizes[i],
          " does not fit dimension ", d, " of ", describe(x), " from ", first, " on");
    starts.push_back(first + sizes[i]);
    parts.push_back(x.detach().slice(d, first, first + sizes[i]));
  }
  check(starts.back() == x.size(d), "split: the sizes add up to ", starts.back(), ", dimension ", d, " of ",
        describe(x), " has ", x.size(d));
  Tape* const tape = Tape::recording(x);
  if (!tape) return parts;
  const auto whole =
      std::make_shared<WholeGrad>(WholeGrad{x.shape(), x.dtype(), x.device(), {}, x.layout().strides});
  const Tensor* const input = &x;
  std::vector<Tensor*> outputs;
  for (Tensor& part : parts) outputs.push_back(&part);
  tape->record("split", site, std::span(&input, 1), outputs, [whole, starts, d](Backward& b) {
    for (size_t i = 0; i + 1 < starts.size(); ++i) {
      const Tensor place = whole->part(d, starts[i], starts[i + 1]);
      if (!b.has_grad(int(i))) {
        place.fill(0);
      } else if (const Tensor dy = b.take_grad(int(i)); dy.raw() != place.raw()) {
        place.copy_from(dy);
      }
    }
    const Tensor dx = std::exchange(whole->grad, Tensor());
    b.accumulate(0, dx);
  });
  for (size_t i = 0; i < parts.size(); ++i) {
    GradState& state = *parts[i].grad_state();
    state.whole = whole, state.dim = d, state.begin = starts[i], state.end = starts[i + 1];
  }
  return parts;
}

Tensor transpose(const Tensor& x, int a, int b, Site site) {
  check(x.defined(), "transpose: x is undefined");
  a = resolved("transpose", x, a), b = resolved("transpose", x, b);
  Tensor y = x.detach().transpose(a, b);
  if (Tape* tape = Tape::recording(x))
    tape->record("transpose", site, {&x}, {&y},
                 [a, b](Backward& back) { back.accumulate(0, back.grad().transpose(a, b)); });
  return y;
}

Tensor reshape(const Tensor& x, const Shape& shape, Site site) {
  check(x.defined(), "reshape: x is undefined");
  check(shape.count() == x.count(), "reshape: ", describe(x), " has ", x.count(), " elements, ", shape,
        " has ", shape.count());
  Tensor y = reshaped(x.detach(), shape);
  if (Tape* tape = Tape::recording(x))
    tape->record("reshape", site, {&x}, {&y},
                 [shape = x.shape()](Backward& b) { b.accumulate(0, reshaped(b.grad(), shape)); });
  return y;
}

Tensor expand(const Tensor& x, const Shape& shape, Site site) {
  check(x.defined(), "expand: x is undefined");
  Tensor y = x.detach().expand(shape);
  if (Tape* tape = Tape::recording(x))
    tape->record("expand", site, {&x}, {&y},
                 [shape = x.shape()](Backward& b) { b.accumulate(0, sum_to(b.grad(), shape)); });
  return y;
}

}  // namespace tessera::ops

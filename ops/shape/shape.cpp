#include "ops/shape/shape.h"

#include <algorithm>
#include <numeric>

#include "autograd/tape.h"
#include "ops/reduce/reduce.h"

namespace tessera::ops {
namespace {

int resolved(const char* op, const Tensor& x, int dim) {
  check(dim >= -x.rank() && dim < x.rank(), op, ": dimension ", dim, " is outside ", describe(x));
  return x.shape().resolve(dim);
}

void record_view(const char* name, const Tensor& x, Tensor& y, const View& view) {
  if (Tape* const tape = Tape::recording(x))
    tape->record_views(name, x, std::span(&y, 1), std::span(&view, 1));
}

}  // namespace

Tensor concat(const std::vector<Tensor>& parts, int dim, Site site) {
  const CallScope call(site);
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
    tape->record("concat", inputs, std::span(&output, 1), [starts = std::move(starts), d](Backward& b) {
      const Tensor dy = b.grad();
      for (size_t i = 0; i + 1 < starts.size(); ++i)
        if (b.needs(int(i))) b.accumulate(int(i), dy.slice(d, starts[i], starts[i + 1]));
    });
  }
  return y;
}

Tensor stack(const std::vector<Tensor>& parts, int dim, Site site) {
  const CallScope call(site);
  check(!parts.empty(), "stack: no parts; give at least one tensor");
  std::vector<Tensor> rows;
  for (const Tensor& part : parts) {
    check(part.defined() && part.shape() == parts[0].shape(), "stack: part ", rows.size(), " is ",
          describe(part), ", but part 0 is ", describe(parts[0]), "; parts have one shape");
    rows.push_back(unsqueeze(part, dim));
  }
  return concat(rows, dim);
}

Tensor slice(const Tensor& x, int dim, int64_t begin, int64_t end, int64_t step, Site site) {
  const CallScope call(site);
  check(x.defined(), "slice: x is undefined");
  const int d = resolved("slice", x, dim);
  Tensor y = x.detach().slice(d, begin, end, step);
  const int64_t first = begin < 0 ? begin + x.size(d) : begin, last = end < 0 ? end + x.size(d) : end;
  record_view("slice", x, y, View::slice(d, first, last, step));
  return y;
}

std::vector<Tensor> split(const Tensor& x, int dim, const std::vector<int64_t>& sizes, Site site) {
  const CallScope call(site);
  check(x.defined(), "split: x is undefined");
  const int d = resolved("split", x, dim);
  std::vector<Tensor> parts;
  std::vector<View> views;
  int64_t first = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    check(sizes[i] >= 0 && sizes[i] <= x.size(d) - first, "split: part ", i, " of size ", sizes[i],
          " does not fit dimension ", d, " of ", describe(x), " from ", first, " on");
    parts.push_back(x.detach().slice(d, first, first + sizes[i]));
    views.push_back(View::slice(d, first, first + sizes[i]));
    first += sizes[i];
  }
  check(first == x.size(d), "split: the sizes add up to ", first, ", dimension ", d, " of ", describe(x),
        " has ", x.size(d));
  if (Tape* const tape = Tape::recording(x)) tape->record_views("split", x, parts, views);
  return parts;
}

Tensor select(const Tensor& x, int dim, int64_t index, Site site) {
  const CallScope call(site);
  check(x.defined(), "select: x is undefined");
  const int d = resolved("select", x, dim);
  const int64_t at = index < 0 ? index + x.size(d) : index;
  check(0 <= at && at < x.size(d), "select: index ", index, " is outside dimension ", d, " of ", describe(x));
  return reshape(slice(x, d, at, at + 1), x.shape().without(d));
}

Tensor transpose(const Tensor& x, int a, int b, Site site) {
  const CallScope call(site);
  check(x.defined(), "transpose: x is undefined");
  a = resolved("transpose", x, a), b = resolved("transpose", x, b);
  Tensor y = x.detach().transpose(a, b);
  record_view("transpose", x, y, View::transpose(a, b));
  return y;
}

Tensor permute(const Tensor& x, const std::vector<int>& order, Site site) {
  const CallScope call(site);
  check(x.defined(), "permute: x is undefined");
  x.detach().permute(order);  // checks the order
  // By exchanges, which are views on the tape; none at all is the reshape.
  std::vector<int> now(order.size());
  std::iota(now.begin(), now.end(), 0);
  Tensor y = reshape(x, x.shape());
  for (int to = 0; to < x.rank(); ++to) {
    const int from = int(std::ranges::find(now, x.shape().resolve(order[size_t(to)])) - now.begin());
    if (from == to) continue;
    y = transpose(y, from, to);
    std::swap(now[size_t(from)], now[size_t(to)]);
  }
  return y;
}

Tensor unsqueeze(const Tensor& x, int dim, Site site) {
  const CallScope call(site);
  check(x.defined(), "unsqueeze: x is undefined");
  check(dim >= -x.rank() - 1 && dim <= x.rank(), "unsqueeze: dimension ", dim, " is outside ", describe(x));
  return reshape(x, x.shape().inserted(dim < 0 ? dim + x.rank() + 1 : dim, 1));
}

Tensor squeeze(const Tensor& x, int dim, Site site) {
  const CallScope call(site);
  check(x.defined(), "squeeze: x is undefined");
  const int d = resolved("squeeze", x, dim);
  check(x.size(d) == 1, "squeeze: dimension ", d, " of ", describe(x), " has not size 1");
  return reshape(x, x.shape().without(d));
}

Tensor reshape(const Tensor& x, std::initializer_list<int64_t> sizes, Site site) {
  const CallScope call(site);
  check(x.defined(), "reshape: x is undefined");
  return reshape(x, complete_shape(std::span(sizes.begin(), sizes.size()), x.count()));
}

Tensor reshape(const Tensor& x, const Shape& shape, Site site) {
  const CallScope call(site);
  check(x.defined(), "reshape: x is undefined");
  check(shape.count() == x.count(), "reshape: ", describe(x), " has ", x.count(), " elements, ", shape,
        " has ", shape.count());
  Tensor y = x.detach().reshaped(shape);
  if (y.shares_storage(x)) {
    record_view("reshape", x, y, View::reshape(shape));
  } else if (Tape* const tape = Tape::recording(x)) {
    tape->record("reshape", {&x}, {&y},
                 [shape = x.shape()](Backward& b) { b.accumulate(0, b.grad().reshaped(shape)); });
  }
  return y;
}

Tensor expand(const Tensor& x, const Shape& shape, Site site) {
  const CallScope call(site);
  check(x.defined(), "expand: x is undefined");
  Tensor y = x.detach().expand(shape);
  if (Tape* tape = Tape::recording(x))
    tape->record("expand", {&x}, {&y}, [shape = x.shape()](Backward& b) {
      if (b.grad().shape() == shape) return b.pass(0, {0});
      b.give(0, sum_to(b.grad(), shape));
    });
  return y;
}

}  // namespace tessera::ops

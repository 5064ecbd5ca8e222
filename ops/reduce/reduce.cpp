#include "ops/reduce/reduce.h"

#include <limits>

#include "autograd/tape.h"
#include "ops/reduce/reduce_kernels.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {

const char* name_of(ReduceKind kind) {
  constexpr const char* kNames[] = {"sum", "mean", "max", "norm"};
  return kNames[size_t(kind)];
}

namespace {

constexpr int kAll = -100;  // as the attribute "dim" says it

/// dy or y of the whole reduction, broadcastable to x.
Tensor with_dim(const Tensor& y, const Shape& x, int dim) {
  return dim == kAll || y.rank() == x.rank() ? y : y.reshape(x.with(dim, 1));
}

void max_backward(Backward& b, const Tensor& x, const Tensor& y, int dim) {
  // Over all elements, "first" is in row-major order: as one packed row.
  const bool all = dim == kAll;
  const Tensor from = all ? x.packed().reshape({x.count()}) : x;
  Tensor dx = all ? Tensor::empty_packed(x.shape(), x.dtype(), x.device()) : Tensor::empty_like(x);
  const Tensor to = all ? dx.reshape({x.count()}) : dx;
  if (x.device().is_cpu()) {
    max_backward_cpu(to, b.grad(), from, y.packed(), all ? 0 : dim);
  } else if constexpr (kCuda) {
    max_backward_cuda(to, b.grad(), from, y.packed(), all ? 0 : dim);
  }
  b.give(0, std::move(dx));
}

Tensor reduce(const Tensor& x, ReduceKind kind, int dim, bool keep, Site site) {
  const CallScope call(site);
  const char* const name = name_of(kind);
  check(x.defined(), name, ": x is undefined");
  check(dim != kAll || !keep, name, ": keep is of one dimension, and all of ", describe(x),
        " are reduced; say which");
  if (dim != kAll) {
    check(dim >= -x.rank() && dim < x.rank(), name, ": dimension ", dim, " is outside ", describe(x));
    dim = x.shape().resolve(dim);
  }
  const Shape shape = dim == kAll ? Shape() : keep ? x.shape().with(dim, 1) : x.shape().without(dim);
  const int64_t length = dim == kAll ? x.count() : x.size(dim);
  check(kind != ReduceKind::max || length > 0, name, ": ", describe(x),
        " has no element to choose from; reduce over a dimension that is not empty");
  Tensor y = Tensor::empty(shape, x.dtype(), x.device());
  if (length == 0) {
    y.fill(kind == ReduceKind::mean ? std::numeric_limits<double>::quiet_NaN() : 0.0);
  } else if (y.count() > 0) {
    const ReducePlan plan =
        dim == kAll ? plan_to(x.layout(), y.layout()) : plan_dim(x.layout(), dim, y.layout());
    if (x.device().is_cpu()) {
      reduce_cpu(y, x, plan, kind);
    } else if constexpr (kCuda) {
      reduce_cuda(y, x, plan, kind);
    }
  }
  Tape* const tape = Tape::recording(x);
  if (!tape) return y;
  if (kind == ReduceKind::sum || kind == ReduceKind::mean) {
    const int64_t divisor = kind == ReduceKind::mean ? length : 1;
    tape->record(name, {&x}, {&y}, [shape = x.shape(), dim, divisor](Backward& b) {
      const Tensor dy = with_dim(b.grad(), shape, dim);
      Tensor dx = Tensor::empty(shape, dy.dtype(), dy.device());
      if (dx.device().is_cpu()) {
        spread_cpu(dx, dy, divisor);
      } else if constexpr (kCuda) {
        spread_cuda(dx, dy, divisor);
      }
      b.give(0, std::move(dx));
    });
  } else {
    tape->record(name, {&x}, {&y}, [kept = Saved(x), result = Saved(y), dim, kind](Backward& b) {
      const Tensor &x = kept.get(), &y = result.get();
      if (kind == ReduceKind::max) return max_backward(b, x, y, dim);
      const Tensor dy = with_dim(b.grad(), x.shape(), dim), whole = with_dim(y, x.shape(), dim);
      Tensor dx = Tensor::empty_like(x);
      if (dx.device().is_cpu()) {
        l2_backward_cpu(dx, dy, x, whole);
      } else if constexpr (kCuda) {
        l2_backward_cuda(dx, dy, x, whole);
      }
      b.give(0, std::move(dx));
    });
  }
  return y;
}

}  // namespace

Tensor sum(const Tensor& x, Site site) {
  return reduce(x, ReduceKind::sum, kAll, false, site);
}
Tensor sum(const Tensor& x, int dim, bool keep, Site site) {
  return reduce(x, ReduceKind::sum, dim, keep, site);
}
Tensor mean(const Tensor& x, Site site) {
  return reduce(x, ReduceKind::mean, kAll, false, site);
}
Tensor mean(const Tensor& x, int dim, bool keep, Site site) {
  return reduce(x, ReduceKind::mean, dim, keep, site);
}
Tensor max(const Tensor& x, Site site) {
  return reduce(x, ReduceKind::max, kAll, false, site);
}
Tensor max(const Tensor& x, int dim, bool keep, Site site) {
  return reduce(x, ReduceKind::max, dim, keep, site);
}
Tensor norm(const Tensor& x, Site site) {
  return reduce(x, ReduceKind::norm, kAll, false, site);
}
Tensor norm(const Tensor& x, int dim, bool keep, Site site) {
  return reduce(x, ReduceKind::norm, dim, keep, site);
}

Tensor sum_to(const Tensor& x, const Shape& shape, DType dtype) {
  if (shape == x.shape() && dtype == x.dtype()) return x;
  check(broadcast(shape, x.shape(), "sum_to") == x.shape(), "sum_to: ", shape, " does not broadcast to ",
        describe(x));
  check(dtype == x.dtype() || (dtype == DType::f32 && x.dtype() != DType::f64), "sum_to: ", describe(x),
        " to dtype ", dtype, "; expected ", x.dtype(), " or f32");
  Tensor y = Tensor::empty(shape, dtype, x.device());
  const ReducePlan plan = plan_to(x.layout(), y.layout());
  if (plan.length == 0) {
    y.fill(0);
  } else if (plan.outputs > 0) {
    if (x.device().is_cpu()) {
      reduce_cpu(y, x, plan, ReduceKind::sum);
    } else if constexpr (kCuda) {
      reduce_cuda(y, x, plan, ReduceKind::sum);
    }
  }
  return y;
}

}  // namespace tessera::ops

#include "ops/reduce/reduce.h"

#include <limits>

#include "autograd/tape.h"
#include "ops/op.h"
#include "ops/reduce/reduce_kernels.h"

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

std::vector<OpSpec> reduce_specs() {
  struct Family {
    ReduceKind kind;
    const char* formula;
    double forward_flops, backward_flops, backward_reads;  // an element
  };
  const Family families[] = {{ReduceKind::sum, "y = sum of x", 1, 0, 0},
                             {ReduceKind::mean, "y = sum of x / n", 1, 0, 0},
                             {ReduceKind::max, "y = largest x", 1, 1, 1},
                             {ReduceKind::norm, "y = sqrt(sum of x^2)", 2, 2, 1}};
  std::vector<OpSpec> specs;
  for (const auto& [kind, formula, forward_flops, backward_flops, backward_reads] : families) {
    const Attrs all{{"dim", int64_t{kAll}}}, first{{"dim", int64_t{0}}}, middle{{"dim", int64_t{1}}},
        last{{"dim", int64_t{-1}}}, first_keep{{"dim", int64_t{0}}, {"keep", true}},
        last_keep{{"dim", int64_t{2}}, {"keep", true}};
    std::vector<Case> cases;
    for (const Attrs& attrs : {all, first, middle, last, first_keep, last_keep}) {
      for (const Placement placement : {Placement::pitched, Placement::strided, Placement::transposed}) {
        cases.push_back({.dims = {{"A", 3}, {"B", 5}, {"C", 9}}, .attrs = attrs, .placement = placement});
        cases.push_back({.dims = {{"A", 2}, {"B", 5}, {"C", 13}}, .attrs = attrs, .placement = placement});
        cases.push_back({.dims = {{"A", 3}, {"B", 33}, {"C", 129}},
                         .attrs = attrs,
                         .placement = placement,
                         .gradcheck = false});
      }
      cases.push_back({.dims = {{"A", 1}, {"B", 1}, {"C", 1}}, .attrs = attrs});
      cases.push_back({.dims = {{"A", 1}, {"B", 1031}, {"C", 1}}, .attrs = attrs, .gradcheck = false});
      cases.push_back({.dims = {{"A", 1500}, {"B", 1}, {"C", 8}}, .attrs = attrs, .gradcheck = false});
    }
    // Long enough to be cut into chunks, by columns and by rows.
    for (const Attrs& attrs : {all, first})
      cases.push_back({.dims = {{"A", 1031}, {"B", 1}, {"C", 33}}, .attrs = attrs, .gradcheck = false});
    for (const Attrs& attrs : {all, last})
      cases.push_back({.dims = {{"A", 1}, {"B", 2}, {"C", 8209}}, .attrs = attrs, .gradcheck = false});
    cases.push_back({.dims = {{"A", 0}, {"B", 3}, {"C", 5}}, .attrs = middle});
    cases.push_back({.dims = {{"A", 3}, {"B", 4}, {"C", 0}}, .attrs = first});
    if (kind != ReduceKind::max) {
      cases.push_back({.dims = {{"A", 2}, {"B", 0}, {"C", 5}}, .attrs = middle});
      cases.push_back({.dims = {{"A", 2}, {"B", 5}, {"C", 0}}, .attrs = last});
      cases.push_back({.dims = {{"A", 0}, {"B", 0}, {"C", 0}}, .attrs = all});
    }
    // Sums of positive numbers are well conditioned, so that the computed tolerance measures the kernel and
    // not cancellation (tests/ops/reduce_test.cpp adds numbers of both signs exactly); small ones stay in
    // f16's range. The length of a short vector near 0 bends too much for central differences.
    const bool adds = kind == ReduceKind::sum || kind == ReduceKind::mean, bends = kind == ReduceKind::norm;
    const Fill fill = adds ? Fill::positive : bends ? Fill::away_from_0 : Fill::normal;
    const double scale = adds ? 0.25 : bends ? 4.0 : 1.0;
    specs.push_back({
        .name = name_of(kind),
        .summary = formula,
        .inputs = {{"x", "[...]"}},
        .attrs = {{"dim", int64_t{kAll}, "dimension to reduce; -100: all elements"},
                  {"keep", false, "keep that dimension with size 1"}},
        .outputs = {{"y", "x without dim"}},
        .run =
            [kind = kind](const std::vector<Tensor>& in, const Attrs& attrs) {
              return std::vector{
                  reduce(in[0], kind, attrs.dimension("dim"), attrs.flag("keep"), Site::here())};
            },
        .problem =
            [=, forward_flops = forward_flops, backward_flops = backward_flops,
             backward_reads = backward_reads](const Dims& d, const Attrs& attrs) {
              const Shape shape{d.at("A"), d.at("B"), d.at("C")};
              const int dim = attrs.dimension("dim");
              const double n = double(shape.count());
              const double outputs = dim == kAll ? 1 : double(shape.without(dim).count());
              return Problem{.inputs = {{.shape = shape, .fill = fill, .scale = scale}},
                             .forward_flops = forward_flops * n,
                             .backward_flops = backward_flops * n,
                             .forward_elements = n + outputs,
                             .backward_elements = (1 + backward_reads) * n + (1 + backward_reads) * outputs};
            },
        .cases = std::move(cases),
        .benches = {{.dims = {{"A", 36096}, {"B", 1}, {"C", 512}}, .attrs = all},
                    {.dims = {{"A", 36096}, {"B", 1}, {"C", 512}}, .attrs = first},
                    {.dims = {{"A", 36096}, {"B", 1}, {"C", 512}}, .attrs = last},
                    {.dims = {{"A", 36096}, {"B", 1}, {"C", 1365}}, .attrs = all}},
        .sweep =
            [](Draw& draw) {
              return Case{.dims = {{"A", draw.size(1, 100000)}, {"B", 1}, {"C", draw.size(1, 100000)}},
                          .attrs = {{"dim", draw.pick({kAll, 0, -1})}}};
            },
    });
  }
  return specs;
}

}  // namespace tessera::ops

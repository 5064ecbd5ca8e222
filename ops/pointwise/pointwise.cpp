#include "ops/pointwise/pointwise.h"

#include "autograd/tape.h"
#include "ops/pointwise/pointwise_kernels.h"
#include "ops/reduce/reduce.h"
#include "ops/reduce/reduce_kernels.h"
#include "ops/sum_dtype.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {

const char* name_of(Binary kind) {
  constexpr const char* kNames[] = {"add", "sub", "mul", "div", "maximum", "minimum"};
  return kNames[size_t(kind)];
}
const char* name_of(Comparison kind) {
  constexpr const char* kNames[] = {"less", "less_equal", "greater", "greater_equal", "equal"};
  return kNames[size_t(kind)];
}
const char* name_of(Unary kind) {
  constexpr const char* kNames[] = {"exp",    "log",        "tanh", "sigmoid", "sqrt",     "abs",
                                    "square", "rsqrt",      "sin",  "cos",     "softplus", "scale",
                                    "shift",  "reciprocal", "pow",  "clamp"};
  return kNames[size_t(kind)];
}

namespace {

void run_binary(const Tensor& y, const Tensor& a, const Tensor& b, Binary kind) {
  if (y.device().is_cpu()) {
    binary_cpu(y, a, b, kind);
  } else if constexpr (kCuda) {
    binary_cuda(y, a, b, kind);
  }
}

void run_operand_gradient(const Tensor& d, const Tensor& dy, const Tensor& mine, const Tensor& other,
                          Binary kind) {
  if (d.device().is_cpu()) {
    operand_gradient_cpu(d, dy, mine, other, kind);
  } else if constexpr (kCuda) {
    operand_gradient_cuda(d, dy, mine, other, kind);
  }
}

Tensor run_unary(const Tensor& x, Unary kind, Numbers<double> numbers = {}) {
  Tensor y = Tensor::empty_like(x);
  if (x.device().is_cpu()) {
    unary_cpu(y, x, kind, numbers);
  } else if constexpr (kCuda) {
    unary_cuda(y, x, kind, numbers);
  }
  return y;
}

Tensor scaled(const Tensor& x, double factor) {
  return run_unary(x, Unary::scale, {factor});
}

Tensor run_where(const Shape& shape, const Tensor& mask, const Tensor& a, const Tensor& b) {
  Tensor y = Tensor::empty(shape, a.dtype(), a.device());
  if (y.device().is_cpu()) {
    where_cpu(y, mask, a, b);
  } else if constexpr (kCuda) {
    where_cuda(y, mask, a, b);
  }
  return y;
}

/// dy for an operand of that shape: summed where the operand was broadcast.
Tensor gradient_of(const Shape& shape, const Tensor& dy) {
  return shape == dy.shape() ? dy : sum_to(dy, shape, sum_dtype(dy.dtype()));
}

/// The same for a gradient that `write(d)` makes at dy's shape: in dy's dtype if it is final, unrounded if it
/// is summed.
template <class Write>
Tensor gradient_of(const Shape& shape, const Tensor& dy, Write&& write) {
  const bool whole = shape == dy.shape();
  Tensor d = Tensor::empty(dy.shape(), whole ? dy.dtype() : sum_dtype(dy.dtype()), dy.device());
  write(d);
  return whole ? d : sum_to(d, shape);
}

/// dy times `other`, for an operand of that shape.
Tensor product_gradient(const Shape& shape, const Tensor& dy, const Tensor& other) {
  if constexpr (kCuda) {
    if (dy.device().is_cuda() && shape != dy.shape() && other.shape() == dy.shape()) {
      const Tensor sums = Tensor::empty(shape, DType::f32, dy.device());
      if (sum_products_cuda(sums, dy, other)) return sums;
    }
  }
  return gradient_of(shape, dy, [&](const Tensor& d) { run_binary(d, dy, other, Binary::mul); });
}

void record_sum(Tape& tape, Tensor& y, const Tensor& a, const Tensor& b, Binary kind) {
  const double sign = kind == Binary::sub ? -1 : 1;
  tape.record(name_of(kind), {&a, &b}, {&y},
              [a_shape = a.shape(), b_shape = b.shape(), sign](Backward& back) {
                const Tensor dy = back.grad();
                const bool to_a = a_shape == dy.shape(), to_b = b_shape == dy.shape() && sign > 0;
                if (to_a && to_b) return back.pass(0, {0, 1});
                Tensor da, db;
                if (!to_a && back.needs(0)) da = gradient_of(a_shape, dy);
                if (!to_b && back.needs(1)) db = gradient_of(b_shape, dy);
                if (db.defined() && sign < 0) db = scaled(db, sign);
                to_a ? back.pass(0, {0}) : back.give(0, std::move(da));
                to_b ? back.pass(0, {1}) : back.give(1, std::move(db));
              });
}

void record_product(Tape& tape, Tensor& y, const Tensor& a, const Tensor& b, Binary kind) {
  const bool to_a = requires_grad(a), to_b = requires_grad(b);
  tape.record(name_of(kind), {&a, &b}, {&y},
              [a_shape = a.shape(), b_shape = b.shape(), a = Saved(to_b ? a : Tensor()),
               b = Saved(to_a || kind == Binary::div ? b : Tensor()), kind](Backward& back) {
                const Tensor dy = back.grad();
                if (back.needs(0))
                  back.give(0, kind == Binary::mul ? product_gradient(a_shape, dy, b.get())
                                                   : gradient_of(a_shape, dy, [&](const Tensor& da) {
                                                       run_binary(da, dy, b.get(), Binary::div);
                                                     }));
                if (back.needs(1))
                  back.give(1, kind == Binary::mul ? product_gradient(b_shape, dy, a.get())
                                                   : gradient_of(b_shape, dy, [&](const Tensor& db) {
                                                       run_operand_gradient(db, dy, b.get(), a.get(), kind);
                                                     }));
              });
}

void record_choice(Tape& tape, Tensor& y, const Tensor& a, const Tensor& b, Binary kind) {
  tape.record(name_of(kind), {&a, &b}, {&y}, [a = Saved(a), b = Saved(b), kind](Backward& back) {
    const Tensor dy = back.grad();
    for (const int input : {0, 1}) {
      if (!back.needs(input)) continue;
      const Tensor &mine = input == 0 ? a.get() : b.get(), &other = input == 0 ? b.get() : a.get();
      back.give(input, gradient_of(mine.shape(), dy,
                                   [&](const Tensor& d) { run_operand_gradient(d, dy, mine, other, kind); }));
    }
  });
}

Shape shape_of_pair(const Tensor& a, const Tensor& b, const char* name) {
  check(a.defined() && b.defined(), name, ": ", a.defined() ? "b" : "a", " is undefined");
  check(a.device() == b.device(), name, ": a ", describe(a), " and b ", describe(b),
        " are on different devices; move one with to(device)");
  check(a.dtype() == b.dtype(), name, ": a ", describe(a), " and b ", describe(b),
        " have different dtypes; convert one with ops::cast");
  return a.shape() == b.shape() ? a.shape() : broadcast(a.shape(), b.shape(), name);
}

Tensor binary(const Tensor& a, const Tensor& b, Binary kind, Site site) {
  const CallScope call(site);
  Tensor y = Tensor::empty(shape_of_pair(a, b, name_of(kind)), a.dtype(), a.device());
  run_binary(y, a, b, kind);
  if (Tape* tape = Tape::recording(a, b)) {
    if (kind == Binary::add || kind == Binary::sub) {
      record_sum(*tape, y, a, b, kind);
    } else if (kind == Binary::mul || kind == Binary::div) {
      record_product(*tape, y, a, b, kind);
    } else {
      record_choice(*tape, y, a, b, kind);
    }
  }
  return y;
}

Tensor comparison(const Tensor& a, const Tensor& b, Comparison kind, Site site) {
  const CallScope call(site);
  Tensor y = Tensor::empty(shape_of_pair(a, b, name_of(kind)), DType::boolean, a.device());
  if (y.device().is_cpu()) {
    compare_cpu(y, a, b, kind);
  } else if constexpr (kCuda) {
    compare_cuda(y, a, b, kind);
  }
  return y;
}

Tensor unary(const Tensor& x, Unary kind, Site site, Numbers<double> numbers = {}) {
  const CallScope call(site);
  const char* const name = name_of(kind);
  check(x.defined(), name, ": x is undefined");
  Tensor y = run_unary(x, kind, numbers);
  if (Tape* tape = Tape::recording(x)) {
    tape->record(name, {&x}, {&y}, [kept = Saved(keeps_result(kind) ? y : x), kind, numbers](Backward& b) {
      const Tensor dy = b.grad();
      Tensor dx = Tensor::empty_like(kept.get());
      if (dx.device().is_cpu()) {
        unary_backward_cpu(dx, dy, kept.get(), kind, numbers);
      } else if constexpr (kCuda) {
        unary_backward_cuda(dx, dy, kept.get(), kind, numbers);
      }
      b.give(0, std::move(dx));
    });
  }
  return y;
}

/// factor x, whose backward needs nothing else.
Tensor multiple(const char* name, const Tensor& x, double factor, Site site) {
  const CallScope call(site);
  check(x.defined(), name, ": x is undefined");
  Tensor y = scaled(x, factor);
  if (Tape* tape = Tape::recording(x))
    tape->record(name, {&x}, {&y}, [factor](Backward& b) { b.give(0, scaled(b.grad(), factor)); });
  return y;
}

}  // namespace

Tensor add(const Tensor& a, const Tensor& b, Site site) {
  return binary(a, b, Binary::add, site);
}
Tensor sub(const Tensor& a, const Tensor& b, Site site) {
  return binary(a, b, Binary::sub, site);
}
Tensor mul(const Tensor& a, const Tensor& b, Site site) {
  return binary(a, b, Binary::mul, site);
}
Tensor div(const Tensor& a, const Tensor& b, Site site) {
  return binary(a, b, Binary::div, site);
}
Tensor maximum(const Tensor& a, const Tensor& b, Site site) {
  return binary(a, b, Binary::maximum, site);
}
Tensor minimum(const Tensor& a, const Tensor& b, Site site) {
  return binary(a, b, Binary::minimum, site);
}

Tensor less(const Tensor& a, const Tensor& b, Site site) {
  return comparison(a, b, Comparison::less, site);
}
Tensor less_equal(const Tensor& a, const Tensor& b, Site site) {
  return comparison(a, b, Comparison::less_equal, site);
}
Tensor greater(const Tensor& a, const Tensor& b, Site site) {
  return comparison(a, b, Comparison::greater, site);
}
Tensor greater_equal(const Tensor& a, const Tensor& b, Site site) {
  return comparison(a, b, Comparison::greater_equal, site);
}
Tensor equal(const Tensor& a, const Tensor& b, Site site) {
  return comparison(a, b, Comparison::equal, site);
}

Tensor where(const Tensor& mask, const Tensor& a, const Tensor& b, Site site) {
  const CallScope call(site);
  const Shape pair = shape_of_pair(a, b, "where");
  check(mask.defined(), "where: the mask is undefined");
  check(mask.dtype() == DType::boolean && mask.device() == a.device(), "where: the mask is ", describe(mask),
        "; expected bool on ", a.device().name());
  Tensor y = run_where(broadcast(mask.shape(), pair, "where"), mask, a, b);
  if (Tape* tape = Tape::recording(a, b))
    tape->record("where", {&a, &b}, {&y},
                 [a_shape = a.shape(), b_shape = b.shape(), mask = Saved(mask)](Backward& back) {
                   const Tensor dy = back.grad(), zero = Tensor::zeros({}, dy.dtype(), dy.device());
                   const auto part = [&](const Tensor& a, const Tensor& b) {
                     return run_where(dy.shape(), mask.get(), a, b);
                   };
                   if (back.needs(0)) back.give(0, gradient_of(a_shape, part(dy, zero)));
                   if (back.needs(1)) back.give(1, gradient_of(b_shape, part(zero, dy)));
                 });
  return y;
}

Tensor scale(const Tensor& x, double factor, Site site) {
  return multiple("scale", x, factor, site);
}
Tensor neg(const Tensor& x, Site site) {
  return multiple("neg", x, -1, site);
}
Tensor shift(const Tensor& x, double offset, Site site) {
  const CallScope call(site);
  check(x.defined(), "shift: x is undefined");
  Tensor y = run_unary(x, Unary::shift, {offset});
  if (Tape* tape = Tape::recording(x)) tape->record("shift", {&x}, {&y}, [](Backward& b) { b.pass(0, {0}); });
  return y;
}
Tensor reciprocal(const Tensor& x, double dividend, Site site) {
  return unary(x, Unary::reciprocal, site, {dividend});
}
Tensor pow(const Tensor& x, double exponent, Site site) {
  if (exponent == 2 && x.defined()) return unary(x, Unary::square, site);
  return unary(x, Unary::pow, site, {exponent});
}
Tensor clamp(const Tensor& x, double low, double high, Site site) {
  const CallScope call(site);
  check(low <= high, "clamp: low is ", low, " and high is ", high, "; expected low <= high");
  return unary(x, Unary::clamp, site, {low, high});
}

Tensor exp(const Tensor& x, Site site) {
  return unary(x, Unary::exp, site);
}
Tensor log(const Tensor& x, Site site) {
  return unary(x, Unary::log, site);
}
Tensor tanh(const Tensor& x, Site site) {
  return unary(x, Unary::tanh, site);
}
Tensor sigmoid(const Tensor& x, Site site) {
  return unary(x, Unary::sigmoid, site);
}
Tensor sqrt(const Tensor& x, Site site) {
  return unary(x, Unary::sqrt, site);
}
Tensor abs(const Tensor& x, Site site) {
  return unary(x, Unary::abs, site);
}
Tensor square(const Tensor& x, Site site) {
  return unary(x, Unary::square, site);
}
Tensor rsqrt(const Tensor& x, Site site) {
  return unary(x, Unary::rsqrt, site);
}
Tensor sin(const Tensor& x, Site site) {
  return unary(x, Unary::sin, site);
}
Tensor cos(const Tensor& x, Site site) {
  return unary(x, Unary::cos, site);
}
Tensor softplus(const Tensor& x, Site site) {
  return unary(x, Unary::softplus, site);
}

}  // namespace tessera::ops

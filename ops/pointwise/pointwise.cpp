#include "ops/pointwise/pointwise.h"

#include "autograd/tape.h"
#include "ops/pointwise/pointwise_kernels.h"
#include "ops/reduce/reduce.h"
#include "ops/sum_dtype.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {

const char* name_of(Binary kind) {
  constexpr const char* kNames[] = {"add", "sub", "mul", "div"};
  return kNames[size_t(kind)];
}
const char* name_of(Unary kind) {
  constexpr const char* kNames[] = {"exp", "log", "tanh", "sigmoid", "sqrt"};
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

void run_divisor_gradient(const Tensor& db, const Tensor& dy, const Tensor& a, const Tensor& b) {
  if (db.device().is_cpu()) {
    divisor_gradient_cpu(db, dy, a, b);
  } else if constexpr (kCuda) {
    divisor_gradient_cuda(db, dy, a, b);
  }
}

Tensor scaled(const Tensor& x, double factor) {
  Tensor y = Tensor::empty_like(x);
  if (x.device().is_cpu()) {
    scale_cpu(y, x, factor);
  } else if constexpr (kCuda) {
    scale_cuda(y, x, factor);
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
                if (back.needs(0))  // of a product dy b, of a quotient dy / b
                  back.give(0, gradient_of(a_shape, dy,
                                           [&](const Tensor& da) { run_binary(da, dy, b.get(), kind); }));
                if (back.needs(1))
                  back.give(1, gradient_of(b_shape, dy, [&](const Tensor& db) {
                              if (kind == Binary::div) {
                                run_divisor_gradient(db, dy, a.get(), b.get());
                              } else {
                                run_binary(db, dy, a.get(), Binary::mul);
                              }
                            }));
              });
}

Tensor binary(const Tensor& a, const Tensor& b, Binary kind, Site site) {
  const CallScope call(site);
  const char* const name = name_of(kind);
  check(a.defined() && b.defined(), name, ": ", a.defined() ? "b" : "a", " is undefined");
  check(a.device() == b.device(), name, ": a ", describe(a), " and b ", describe(b),
        " are on different devices; move one with to(device)");
  check(a.dtype() == b.dtype(), name, ": a ", describe(a), " and b ", describe(b),
        " have different dtypes; convert one with ops::cast");
  Tensor y = Tensor::empty(a.shape() == b.shape() ? a.shape() : broadcast(a.shape(), b.shape(), name),
                           a.dtype(), a.device());
  run_binary(y, a, b, kind);
  if (Tape* tape = Tape::recording(a, b)) {
    if (kind == Binary::add || kind == Binary::sub) {
      record_sum(*tape, y, a, b, kind);
    } else {
      record_product(*tape, y, a, b, kind);
    }
  }
  return y;
}

Tensor unary(const Tensor& x, Unary kind, Site site) {
  const CallScope call(site);
  const char* const name = name_of(kind);
  check(x.defined(), name, ": x is undefined");
  Tensor y = Tensor::empty_like(x);
  if (x.device().is_cpu()) {
    unary_cpu(y, x, kind);
  } else if constexpr (kCuda) {
    unary_cuda(y, x, kind);
  }
  if (Tape* tape = Tape::recording(x)) {
    tape->record(name, {&x}, {&y}, [kept = Saved(kind == Unary::log ? x : y), kind](Backward& b) {
      const Tensor dy = b.grad();
      Tensor dx = Tensor::empty_like(kept.get());
      if (dx.device().is_cpu()) {
        unary_backward_cpu(dx, dy, kept.get(), kind);
      } else if constexpr (kCuda) {
        unary_backward_cuda(dx, dy, kept.get(), kind);
      }
      b.give(0, std::move(dx));
    });
  }
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

Tensor scale(const Tensor& x, double factor, Site site) {
  const CallScope call(site);
  check(x.defined(), "scale: x is undefined");
  Tensor y = scaled(x, factor);
  if (Tape* tape = Tape::recording(x))
    tape->record("scale", {&x}, {&y}, [factor](Backward& b) { b.give(0, scaled(b.grad(), factor)); });
  return y;
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

}  // namespace tessera::ops

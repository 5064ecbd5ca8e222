#include "ops/pointwise/pointwise.h"

#include <cmath>
#include <limits>

#include "autograd/tape.h"
#include "ops/indices.h"
#include "ops/pointwise/pointwise_kernels.h"
#include "ops/reduce/reduce.h"
#include "ops/reduce/reduce_kernels.h"
#include "ops/sum_dtype.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {

const char* name_of(Binary kind) {
  constexpr const char* kNames[] = {"add",     "sub",     "mul",       "div",
                                    "maximum", "minimum", "floor_div", "remainder"};
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

/// Whether x holds whole numbers that arithmetic takes.
bool is_integer(const Tensor& x) {
  return x.dtype() == DType::i64 || x.dtype() == DType::i32;
}

void run_binary(const Tensor& y, const Tensor& a, const Tensor& b, Binary kind) {
  const bool whole = is_integer(a) || a.dtype() == DType::boolean;
  if (y.device().is_cpu()) {
    whole ? integer_binary_cpu(y, a, b, kind) : binary_cpu(y, a, b, kind);
  } else if constexpr (kCuda) {
    whole ? integer_binary_cuda(y, a, b, kind) : binary_cuda(y, a, b, kind);
  }
}

/// Throws if numbers of that dtype have no such result, or more than one.
void check_operands(DType dtype, Binary kind) {
  check(dtype != DType::u8, name_of(kind), ": dtype u8 is not supported, as results would wrap at 256; ",
        "ops::cast(x, DType::i32) makes numbers");
  const bool chooses = kind == Binary::maximum || kind == Binary::minimum;
  check(dtype != DType::boolean || chooses, name_of(kind),
        ": dtype bool is not supported; ops::maximum is or, ops::minimum is and, ops::equal compares, and "
        "ops::cast makes numbers");
  check((dtype != DType::i64 && dtype != DType::i32) || kind != Binary::div, name_of(kind), ": dtype ", dtype,
        " is not supported: a quotient of whole numbers is none; convert them with ops::cast, or round it "
        "down with ops::floor_div");
}

/// The number as one of x's dtype, which is i64 or i32.
int64_t whole_number(const char* name, const Tensor& x, double number) {
  constexpr double kEnd = 9223372036854775808.0;  // 2^63
  const bool narrow = x.dtype() == DType::i32;
  const double least = narrow ? -2147483648.0 : -kEnd, end = narrow ? 2147483648.0 : kEnd;
  check(number >= least && number < end && std::trunc(number) == number, name, ": x is ", describe(x),
        " and ", number, " is no number of that dtype; convert x with ops::cast");
  return int64_t(number);
}

void run_operand_gradient(const Tensor& d, const Tensor& dy, const Tensor& mine, const Tensor& other,
                          Binary kind) {
  if (d.device().is_cpu()) {
    operand_gradient_cpu(d, dy, mine, other, kind);
  } else if constexpr (kCuda) {
    operand_gradient_cuda(d, dy, mine, other, kind);
  }
}

/// The functions whose results of whole numbers are whole.
bool of_integers(Unary kind) {
  return kind == Unary::scale || kind == Unary::shift || kind == Unary::abs || kind == Unary::square ||
         kind == Unary::clamp;
}

Tensor run_unary(const Tensor& x, Unary kind, Numbers<double> numbers, const char* name) {
  const bool whole_numbers = is_integer(x) && of_integers(kind);
  check(whole_numbers || (is_floating(x.dtype()) && x.dtype() != DType::f8e4m3), name, ": dtype ", x.dtype(),
        " is not supported; expected f64, f32, bf16", of_integers(kind) ? ", f16, i64 or i32" : " or f16",
        "; convert x with ops::cast");
  Tensor y = Tensor::empty_like(x);
  if (whole_numbers) {
    const Numbers<int64_t> whole{whole_number(name, x, numbers.a), whole_number(name, x, numbers.b)};
    if (x.device().is_cpu()) {
      integer_unary_cpu(y, x, kind, whole);
    } else if constexpr (kCuda) {
      integer_unary_cuda(y, x, kind, whole);
    }
  } else if (x.device().is_cpu()) {
    unary_cpu(y, x, kind, numbers);
  } else if constexpr (kCuda) {
    unary_cuda(y, x, kind, numbers);
  }
  return y;
}

Tensor scaled(const Tensor& x, double factor, const char* name = "scale") {
  return run_unary(x, Unary::scale, {factor}, name);
}

Tensor run_where(const Shape& shape, const Tensor& mask, const Tensor& a, const Tensor& b) {
  Tensor y = Tensor::empty(shape, a.dtype(), a.device());
  if (y.device().is_cpu()) {
    where_cpu(y, mask, a, b);
  } else if constexpr (kCuda) {
    is_floating(y.dtype()) ? where_cuda(y, mask, a, b) : integer_where_cuda(y, mask, a, b);
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

/// The gradient of an operand of that shape: of a product (`mine` may be undefined), of a quotient's divisor,
/// or of a maximum or minimum.
Tensor operand_gradient(const Shape& shape, const Tensor& dy, const Tensor& mine, const Tensor& other,
                        Binary kind) {
  const bool product = kind == Binary::mul;
  if constexpr (kCuda) {
    if (dy.device().is_cuda() && shape != dy.shape() && other.shape() == dy.shape()) {
      const Tensor sums = Tensor::empty(shape, DType::f32, dy.device());
      if (summed_gradient_cuda(sums, dy, product ? Tensor() : mine, other, kind)) return sums;
    }
  }
  return gradient_of(shape, dy, [&](const Tensor& d) {
    product ? run_binary(d, dy, other, kind) : run_operand_gradient(d, dy, mine, other, kind);
  });
}

/// Gives both gradients if `write(da, db)`, on a GPU, makes both in one pass; the operands have those shapes.
template <class Write>
bool give_both(Backward& back, const Shape& a, const Shape& b, Write&& write) {
  const Tensor dy = back.grad();
  if (!dy.device().is_cuda() || a != dy.shape() || b != dy.shape() || !back.needs(0) || !back.needs(1))
    return false;
  Tensor da = Tensor::empty_like(dy), db = Tensor::empty_like(dy);
  if (!write(da, db)) return false;
  back.give(0, std::move(da));
  back.give(1, std::move(db));
  return true;
}

/// The same where one operand broadcasts, but not a dividend: its gradient is summed as the other's is
/// written.
bool give_summed(Backward& back, const Tensor& a, const Tensor& b, Binary kind) {
  const Tensor dy = back.grad();
  const bool to_b = a.shape() == dy.shape();
  const Tensor &mine = to_b ? b : a, &other = to_b ? a : b;
  if (!dy.device().is_cuda() || mine.shape() == dy.shape() || other.shape() != dy.shape() || !back.needs(0) ||
      !back.needs(1) || (kind == Binary::div && !to_b))
    return false;
  Tensor sums = Tensor::empty(mine.shape(), DType::f32, dy.device()), whole = Tensor::empty_like(dy);
  if constexpr (kCuda) {
    if (!summed_gradient_cuda(sums, dy, mine, other, kind, whole)) return false;
  }
  back.give(0, std::move(to_b ? whole : sums));
  back.give(1, std::move(to_b ? sums : whole));
  return true;
}

bool give_both(Backward& back, const Tensor& a, const Tensor& b, Binary kind) {
  if (!a.defined() || !b.defined()) return false;
  return give_both(back, a.shape(), b.shape(),
                   [&](const Tensor& da, const Tensor& db) {
                     if constexpr (kCuda) return both_gradients_cuda(da, db, back.grad(), a, b, kind);
                     return false;
                   }) ||
         give_summed(back, a, b, kind);
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
                if (give_both(back, a.get(), b.get(), kind)) return;
                if (back.needs(0))
                  back.give(0, kind == Binary::mul ? operand_gradient(a_shape, dy, a.get(), b.get(), kind)
                                                   : gradient_of(a_shape, dy, [&](const Tensor& da) {
                                                       run_binary(da, dy, b.get(), Binary::div);
                                                     }));
                if (back.needs(1)) back.give(1, operand_gradient(b_shape, dy, b.get(), a.get(), kind));
              });
}

void record_choice(Tape& tape, Tensor& y, const Tensor& a, const Tensor& b, Binary kind) {
  tape.record(name_of(kind), {&a, &b}, {&y}, [a = Saved(a), b = Saved(b), kind](Backward& back) {
    if (give_both(back, a.get(), b.get(), kind)) return;
    const Tensor dy = back.grad();
    for (const int input : {0, 1}) {
      if (!back.needs(input)) continue;
      const Tensor &mine = input == 0 ? a.get() : b.get(), &other = input == 0 ? b.get() : a.get();
      back.give(input, operand_gradient(mine.shape(), dy, mine, other, kind));
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
  const Shape shape = shape_of_pair(a, b, name_of(kind));
  check_operands(a.dtype(), kind);
  Tensor y = Tensor::empty(shape, a.dtype(), a.device());
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

Tensor division(const Tensor& a, const Tensor& b, Binary kind, Site site) {
  const CallScope call(site);
  const char* const name = name_of(kind);
  const Shape shape = shape_of_pair(a, b, name);
  check(is_integer(a), name, ": dtype ", a.dtype(), " is not supported; expected i64 or i32");
  if (b.device().is_cpu()) {
    const Tensor packed = b.packed();
    const Indices divisors(packed);
    for (int64_t i = 0; i < packed.count(); ++i)
      check(divisors[i] != 0, name, ": division by 0: element ", i, " of b ", describe(b));
  }
  Tensor y = Tensor::empty(shape, a.dtype(), a.device());
  run_binary(y, a, b, kind);
  return y;
}

/// The number as a tensor of x's dtype.
Tensor divisor_of(const Tensor& x, double number, Binary kind) {
  check(x.defined(), name_of(kind), ": x is undefined");
  if (is_integer(x)) whole_number(name_of(kind), x, number);
  return Tensor::full({}, number, x.dtype(), x.device());
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

Tensor comparison(const Tensor& x, double number, Comparison kind, Site site) {
  const CallScope call(site);
  const char* const name = name_of(kind);
  check(x.defined(), name, ": x is undefined");
  if (is_integer(x)) whole_number(name, x, number);
  check(x.dtype() != DType::boolean || number == 0 || number == 1, name, ": x is ", describe(x), " and ",
        number, " is no bool; expected 0 or 1");
  return comparison(x.detach(), Tensor::full({}, number, x.dtype(), x.device()), kind, site);
}

Tensor unary(const Tensor& x, Unary kind, Site site, Numbers<double> numbers = {}) {
  const CallScope call(site);
  const char* const name = name_of(kind);
  check(x.defined(), name, ": x is undefined");
  Tensor y = run_unary(x, kind, numbers, name);
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
  Tensor y = scaled(x, factor, name);
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

Tensor floor_div(const Tensor& a, const Tensor& b, Site site) {
  return division(a, b, Binary::floor_div, site);
}
Tensor floor_div(const Tensor& x, double number, Site site) {
  return division(x, divisor_of(x, number, Binary::floor_div), Binary::floor_div, site);
}
Tensor remainder(const Tensor& a, const Tensor& b, Site site) {
  return division(a, b, Binary::remainder, site);
}
Tensor remainder(const Tensor& x, double number, Site site) {
  return division(x, divisor_of(x, number, Binary::remainder), Binary::remainder, site);
}

Tensor less(const Tensor& a, const Tensor& b, Site site) {
  return comparison(a, b, Comparison::less, site);
}
Tensor less(const Tensor& x, double number, Site site) {
  return comparison(x, number, Comparison::less, site);
}
Tensor less_equal(const Tensor& a, const Tensor& b, Site site) {
  return comparison(a, b, Comparison::less_equal, site);
}
Tensor less_equal(const Tensor& x, double number, Site site) {
  return comparison(x, number, Comparison::less_equal, site);
}
Tensor greater(const Tensor& a, const Tensor& b, Site site) {
  return comparison(a, b, Comparison::greater, site);
}
Tensor greater(const Tensor& x, double number, Site site) {
  return comparison(x, number, Comparison::greater, site);
}
Tensor greater_equal(const Tensor& a, const Tensor& b, Site site) {
  return comparison(a, b, Comparison::greater_equal, site);
}
Tensor greater_equal(const Tensor& x, double number, Site site) {
  return comparison(x, number, Comparison::greater_equal, site);
}
Tensor equal(const Tensor& a, const Tensor& b, Site site) {
  return comparison(a, b, Comparison::equal, site);
}
Tensor equal(const Tensor& x, double number, Site site) {
  return comparison(x, number, Comparison::equal, site);
}

Tensor where(const Tensor& mask, const Tensor& a, const Tensor& b, Site site) {
  const CallScope call(site);
  const Shape pair = shape_of_pair(a, b, "where");
  check(a.dtype() != DType::f8e4m3, "where: dtype ", a.dtype(), " is not supported; convert with ops::cast");
  check(mask.defined(), "where: the mask is undefined");
  check(mask.dtype() == DType::boolean && mask.device() == a.device(), "where: the mask is ", describe(mask),
        "; expected bool on ", a.device().name());
  Tensor y = run_where(broadcast(mask.shape(), pair, "where"), mask, a, b);
  if (Tape* tape = Tape::recording(a, b))
    tape->record(
        "where", {&a, &b}, {&y},
        [a_shape = a.shape(), b_shape = b.shape(), mask = Saved(mask)](Backward& back) {
          const Tensor dy = back.grad();
          if (give_both(back, a_shape, b_shape, [&](const Tensor& da, const Tensor& db) {
                if constexpr (kCuda) return both_gradients_cuda(da, db, dy, mask.get());
                return false;
              }))
            return;
          const auto gradient = [&](const Shape& shape, bool first) {
            // Sums are chosen where the mask repeats as the operand does.
            const bool sums = shape != dy.shape() && broadcast(mask.get().shape(), shape, "where") == shape;
            const Tensor from = sums ? gradient_of(shape, dy) : dy,
                         zero = Tensor::zeros({}, from.dtype(), dy.device());
            const Tensor part = run_where(from.shape(), mask.get(), first ? from : zero, first ? zero : from);
            return sums ? part : gradient_of(shape, part);
          };
          if (back.needs(0)) back.give(0, gradient(a_shape, true));
          if (back.needs(1)) back.give(1, gradient(b_shape, false));
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
  Tensor y = run_unary(x, Unary::shift, {offset}, "shift");
  if (Tape* tape = Tape::recording(x)) tape->record("shift", {&x}, {&y}, [](Backward& b) { b.pass(0, {0}); });
  return y;
}
Tensor reciprocal(const Tensor& x, double dividend, Site site) {
  return unary(x, Unary::reciprocal, site, {dividend});
}
Tensor pow(const Tensor& x, double exponent, Site site) {
  if (exponent == 2 && x.defined() && is_floating(x.dtype())) return unary(x, Unary::square, site);
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

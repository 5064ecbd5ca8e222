#include "ops/pointwise/pointwise.h"

#include "autograd/tape.h"
#include "ops/op.h"
#include "ops/pointwise/pointwise_kernels.h"
#include "ops/reduce/reduce.h"

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

DType sum_dtype(DType dtype) {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
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

namespace {

OpSpec binary_spec(Binary kind, const char* formula) {
  // a [A, B, C]; b [BA, BB, BC], or [BB, BC] where BA is absent
  const auto problem = [kind](const Dims& d, const Attrs&) {
    const Shape a{d.at("A"), d.at("B"), d.at("C")};
    const Shape b =
        d.contains("BA") ? Shape{d.at("BA"), d.at("BB"), d.at("BC")} : Shape{d.at("BB"), d.at("BC")};
    const double n = double(broadcast(a, b, "problem").count()), in = double(a.count() + b.count());
    const bool product = kind == Binary::mul || kind == Binary::div;
    return Problem{.inputs = {{.shape = a},
                              {.shape = b,
                               .fill = kind == Binary::div ? Fill::away_from_0 : Fill::normal,
                               .scale = kind == Binary::div ? 2.0 : 1.0}},
                   .forward_flops = n,
                   .backward_flops = kind == Binary::div ? 4 * n
                                     : product           ? 2 * n
                                                         : 0,
                   .forward_elements = in + n,
                   .backward_elements = n + (product ? 2 : 1) * in};
  };
  const auto same = [](int64_t a, int64_t b, int64_t c) {
    return Dims{{"A", a}, {"B", b}, {"C", c}, {"BA", a}, {"BB", b}, {"BC", c}};
  };
  const Dims rows{{"A", 3}, {"B", 5}, {"C", 7}, {"BB", 1}, {"BC", 7}};
  const Dims both{{"A", 3}, {"B", 1}, {"C", 5}, {"BA", 1}, {"BB", 7}, {"BC", 1}};
  return {
      .name = name_of(kind),
      .summary = formula,
      .inputs = {{"a", "[...]"}, {"b", "[...], broadcasts against a"}},
      .attrs = {},
      .outputs = {{"y", "a and b broadcast"}},
      .run = [kind](const std::vector<Tensor>& in,
                    const Attrs&) { return std::vector{binary(in[0], in[1], kind, Site::here())}; },
      .problem = problem,
      .cases = {{.dims = same(3, 5, 7)},
                {.dims = same(1, 1, 1)},
                {.dims = same(2, 0, 5)},
                {.dims = same(1, 3, 129), .placement = Placement::strided},
                {.dims = same(2, 11, 13), .placement = Placement::transposed},
                {.dims = rows},
                {.dims = rows, .placement = Placement::strided},
                {.dims = rows, .placement = Placement::transposed},
                {.dims = both},
                {.dims = both, .placement = Placement::strided},
                {.dims = both, .placement = Placement::transposed},
                {.dims = {{"A", 2}, {"B", 7}, {"C", 5}, {"BB", 7}, {"BC", 1}}},
                {.dims = {{"A", 1}, {"B", 1}, {"C", 1}, {"BA", 3}, {"BB", 5}, {"BC", 7}}},
                {.dims = {{"A", 4}, {"B", 1}, {"C", 0}, {"BB", 3}, {"BC", 1}}},
                {.dims = same(1, 67, 1365), .gradcheck = false},
                {.dims = {{"A", 2}, {"B", 67}, {"C", 1365}, {"BB", 1}, {"BC", 1365}}, .gradcheck = false},
                {.dims = {{"A", 5}, {"B", 130}, {"C", 72}, {"BB", 130}, {"BC", 1}}, .gradcheck = false}},
      .benches = {{.dims = same(1, 36096, 512)},
                  {.dims = same(1, 36096, 1365)},
                  {.dims = {{"A", 1}, {"B", 36096}, {"C", 512}, {"BB", 1}, {"BC", 512}}}},
      .sweep =
          [same](Draw& draw) {
            const int64_t rows = draw.size(1, 300000), columns = draw.size(1, 20000);
            if (draw.chance(0.6)) return Case{.dims = same(1, rows, columns)};
            return Case{.dims = {{"A", 1}, {"B", rows}, {"C", columns}, {"BB", 1}, {"BC", columns}}};
          },
  };
}

std::vector<Case> unary_cases(const Attrs& attrs = {}) {
  return {{.dims = {{"R", 7}, {"C", 13}}, .attrs = attrs},
          {.dims = {{"R", 1}, {"C", 1}}, .attrs = attrs},
          {.dims = {{"R", 0}, {"C", 5}}, .attrs = attrs},
          {.dims = {{"R", 5}, {"C", 0}}, .attrs = attrs},
          {.dims = {{"R", 3}, {"C", 129}}, .attrs = attrs, .placement = Placement::strided},
          {.dims = {{"R", 17}, {"C", 11}}, .attrs = attrs, .placement = Placement::transposed},
          {.dims = {{"R", 67}, {"C", 1365}}, .attrs = attrs, .gradcheck = false}};
}

Problem unary_problem(const Dims& d, Fill fill, double backward_reads) {
  const double n = double(d.at("R")) * double(d.at("C"));
  return {.inputs = {{.shape = {d.at("R"), d.at("C")}, .fill = fill}},
          .forward_flops = n,
          .backward_flops = n,
          .forward_elements = 2 * n,
          .backward_elements = (1 + backward_reads) * n};
}

OpSpec unary_spec(Unary kind, const char* formula) {
  const bool positive = kind == Unary::log || kind == Unary::sqrt;
  return {
      .name = name_of(kind),
      .summary = formula,
      .inputs = {{"x", "[...]"}},
      .attrs = {},
      .outputs = {{"y", "as x"}},
      .run = [kind](const std::vector<Tensor>& in,
                    const Attrs&) { return std::vector{unary(in[0], kind, Site::here())}; },
      .problem = [positive](
                     const Dims& d,
                     const Attrs&) { return unary_problem(d, positive ? Fill::positive : Fill::normal, 2); },
      .cases = unary_cases(),
      .benches = {{.dims = {{"R", 36096}, {"C", 512}}}},
      .sweep =
          [](Draw& draw) {
            return Case{.dims = {{"R", draw.size(1, 300000)}, {"C", draw.size(1, 20000)}}};
          },
  };
}

OpSpec tanh_spec() {
  OpSpec spec = unary_spec(Unary::tanh, "y = tanh x");
  spec.cpu_extra_ulp = 6;
  spec.cpu_extra_reason =
      "backward takes 1 - y^2 from the rounded y: half an ulp of y is y^2 / (1 - y^2) ulp of it, 5.2 at x = "
      "1.6";
  return spec;
}

OpSpec scale_spec() {
  std::vector<Case> cases = unary_cases({{"factor", -1.75}});
  cases.push_back({.dims = {{"R", 3}, {"C", 5}}, .attrs = {{"factor", 0.0}}});
  return {
      .name = "scale",
      .summary = "y = factor x",
      .inputs = {{"x", "[...]"}},
      .attrs = {{"factor", 1.0, "what every element is multiplied by"}},
      .outputs = {{"y", "as x"}},
      .run = [](const std::vector<Tensor>& in,
                const Attrs& attrs) { return std::vector{scale(in[0], attrs.number("factor"))}; },
      .problem = [](const Dims& d, const Attrs&) { return unary_problem(d, Fill::normal, 1); },
      .cases = std::move(cases),
      .benches = {{.dims = {{"R", 36096}, {"C", 512}}, .attrs = {{"factor", 0.125}}}},
  };
}

}  // namespace

std::vector<OpSpec> pointwise_specs() {
  return {binary_spec(Binary::add, "y = a + b"),
          binary_spec(Binary::sub, "y = a - b"),
          binary_spec(Binary::mul, "y = a b"),
          binary_spec(Binary::div, "y = a / b"),
          scale_spec(),
          unary_spec(Unary::exp, "y = e^x"),
          unary_spec(Unary::log, "y = ln x"),
          tanh_spec(),
          unary_spec(Unary::sigmoid, "y = 1 / (1 + e^-x)"),
          unary_spec(Unary::sqrt, "y = x^(1/2)")};
}

}  // namespace tessera::ops

#include "ops/op.h"
#include "ops/pointwise/pointwise_kernels.h"

namespace tessera::ops {
namespace {

using BinaryOp = Tensor (*)(const Tensor&, const Tensor&, Site);
using UnaryOp = Tensor (*)(const Tensor&, Site);

OpSpec binary_spec(Binary kind, BinaryOp run, const char* formula) {
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
      .run = [run](const std::vector<Tensor>& in,
                   const Attrs&) { return std::vector{run(in[0], in[1], Site::here())}; },
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
                {.dims = {{"A", 1}, {"B", 3}, {"C", 1365}, {"BB", 3}, {"BC", 1}}, .gradcheck = false},
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

OpSpec unary_spec(Unary kind, UnaryOp run, const char* formula) {
  const bool positive = kind == Unary::log || kind == Unary::sqrt;
  return {
      .name = name_of(kind),
      .summary = formula,
      .inputs = {{"x", "[...]"}},
      .attrs = {},
      .outputs = {{"y", "as x"}},
      .run = [run](const std::vector<Tensor>& in,
                   const Attrs&) { return std::vector{run(in[0], Site::here())}; },
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
  OpSpec spec = unary_spec(Unary::tanh, tanh, "y = tanh x");
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
  return {binary_spec(Binary::add, add, "y = a + b"),
          binary_spec(Binary::sub, sub, "y = a - b"),
          binary_spec(Binary::mul, mul, "y = a b"),
          binary_spec(Binary::div, div, "y = a / b"),
          scale_spec(),
          unary_spec(Unary::exp, exp, "y = e^x"),
          unary_spec(Unary::log, log, "y = ln x"),
          tanh_spec(),
          unary_spec(Unary::sigmoid, sigmoid, "y = 1 / (1 + e^-x)"),
          unary_spec(Unary::sqrt, sqrt, "y = x^(1/2)")};
}

}  // namespace tessera::ops

#include <tuple>

#include "ops/op.h"
#include "ops/pointwise/pointwise_kernels.h"

namespace tessera::ops {
namespace {

using BinaryOp = Tensor (*)(const Tensor&, const Tensor&, Site);
using UnaryOp = Tensor (*)(const Tensor&, Site);

/// What the operators of two broadcast operands share: dims, cases and benchmarks. a is [A, B, C]; b is [BA,
/// BB, BC], or [BB, BC] where BA is absent.
OpSpec pair_spec() {
  const auto same = [](int64_t a, int64_t b, int64_t c) {
    return Dims{{"A", a}, {"B", b}, {"C", c}, {"BA", a}, {"BB", b}, {"BC", c}};
  };
  const Dims rows{{"A", 3}, {"B", 5}, {"C", 7}, {"BB", 1}, {"BC", 7}};
  const Dims both{{"A", 3}, {"B", 1}, {"C", 5}, {"BA", 1}, {"BB", 7}, {"BC", 1}};
  return {
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
                {.dims = {{"A", 5}, {"B", 130}, {"C", 72}, {"BB", 130}, {"BC", 1}}, .gradcheck = false},
                // Gradients of b that are summed in chunks, by columns and by rows.
                {.dims = {{"A", 3}, {"B", 700}, {"C", 40}, {"BA", 3}, {"BB", 1}, {"BC", 40}},
                 .gradcheck = false},
                {.dims = {{"A", 2}, {"B", 1}, {"C", 12000}, {"BA", 1}, {"BB", 1}, {"BC", 1}},
                 .gradcheck = false}},
      .benches = {{.dims = same(1, 36096, 512)},
                  {.dims = same(1, 36096, 1365)},
                  {.dims = {{"A", 1}, {"B", 36096}, {"C", 512}, {"BB", 1}, {"BC", 512}}}},
      .sweep =
          [same](Draw& draw) {
            const int64_t rows = draw.size(1, 300000), columns = draw.size(1, 20000);
            if (draw.chance(0.4)) return Case{.dims = same(1, rows, columns)};
            if (draw.chance(0.3))
              return Case{.dims = {{"A", 1}, {"B", rows}, {"C", columns}, {"BB", 1}, {"BC", columns}}};
            // Each dimension whole in both, or of size 1 in one of them.
            Dims dims;
            for (const auto [a, b] : {std::pair{"A", "BA"}, {"B", "BB"}, {"C", "BC"}}) {
              dims[a] = dims[b] = draw.size(1, 1000);
              if (draw.chance(0.4)) dims[draw.chance(0.7) ? b : a] = 1;
            }
            return Case{.dims = dims};
          },
  };
}

struct Pair {
  Shape a, b;
  double outputs, inputs;  // elements

  explicit Pair(const Dims& d) : a{d.at("A"), d.at("B"), d.at("C")} {
    b = d.contains("BA") ? Shape{d.at("BA"), d.at("BB"), d.at("BC")} : Shape{d.at("BB"), d.at("BC")};
    outputs = double(broadcast(a, b, "problem").count()), inputs = double(a.count() + b.count());
  }
};

/// An operator of two numbers. `b_fill`, `b_scale`: the divisor stays away from 0, and the two of a maximum
/// stay apart, where a kink would be.
struct BinaryRow {
  Binary kind;
  BinaryOp run;
  const char* formula;
  Fill b_fill = Fill::normal;
  double b_scale = 1;
  double backward_flops = 0;  // an element
  bool keeps_inputs = false;
};

OpSpec binary_spec(const BinaryRow& row) {
  OpSpec spec = pair_spec();
  spec.name = name_of(row.kind);
  spec.summary = row.formula;
  spec.inputs = {{"a", "[...]"}, {"b", "[...], broadcasts against a"}};
  spec.outputs = {{"y", "a and b broadcast"}};
  spec.run = [run = row.run](const std::vector<Tensor>& in, const Attrs&) {
    return std::vector{run(in[0], in[1], Site::here())};
  };
  spec.problem = [row](const Dims& d, const Attrs&) {
    const Pair p(d);
    return Problem{.inputs = {{.shape = p.a}, {.shape = p.b, .fill = row.b_fill, .scale = row.b_scale}},
                   .forward_flops = p.outputs,
                   .backward_flops = row.backward_flops * p.outputs,
                   .forward_elements = p.inputs + p.outputs,
                   .backward_elements = p.outputs + (row.keeps_inputs ? 2 : 1) * p.inputs};
  };
  return spec;
}

OpSpec comparison_spec(Comparison kind, BinaryOp run, const char* formula) {
  OpSpec spec = pair_spec();
  spec.name = name_of(kind);
  spec.summary = formula;
  spec.inputs = {{.name = "a", .shape = "[...]", .differentiable = false},
                 {.name = "b", .shape = "[...], broadcasts against a", .differentiable = false}};
  spec.outputs = {{"y", "a and b broadcast", false, {DType::boolean}}};
  spec.run = [run](const std::vector<Tensor>& in, const Attrs&) {
    return std::vector{run(in[0], in[1], Site::here())};
  };
  spec.problem = [](const Dims& d, const Attrs&) {
    const Pair p(d);  // of few values, so that some are equal
    return Problem{.inputs = {{.shape = p.a, .fill = Fill::index, .high = 5},
                              {.shape = p.b, .fill = Fill::index, .high = 5}},
                   .forward_flops = p.outputs,
                   .forward_elements = p.inputs,
                   .forward_bytes = p.outputs};
  };
  for (Case& c : spec.cases) c.gradcheck = false;
  return spec;
}

/// floor_div and remainder, of whole numbers: divisors are listed, since none may be 0.
OpSpec division_spec(Binary kind, BinaryOp run, const char* formula) {
  OpSpec spec = pair_spec();
  spec.name = name_of(kind);
  spec.summary = formula;
  spec.inputs = {{.name = "a", .shape = "[...]", .differentiable = false, .dtypes = index_dtypes()},
                 {.name = "b",
                  .shape = "[...], broadcasts against a",
                  .differentiable = false,
                  .dtypes = index_dtypes()}};
  spec.outputs = {{"y", "a and b broadcast", false, {DType::i64, DType::i32}}};
  spec.cpu_dtypes = spec.cuda_dtypes = {DType::i64};
  spec.run = [run](const std::vector<Tensor>& in, const Attrs&) {
    return std::vector{run(in[0], in[1], Site::here())};
  };
  spec.problem = [name = spec.name](const Dims& d, const Attrs&) {
    const Pair p(d);
    check_listed(name.c_str(), p.inputs);
    InputCase a{.shape = p.a, .fill = Fill::index}, b{.shape = p.b, .fill = Fill::index};
    for (int64_t i = 0; i < p.a.count(); ++i) a.values.push_back(i * 7919 % 2001 - 1000);
    for (int64_t i = 0; i < p.b.count(); ++i) b.values.push_back(2 * (i * 31 % 19) - 19);  // odd
    return Problem{.inputs = {a, b}, .forward_flops = p.outputs, .forward_bytes = 8 * (p.inputs + p.outputs)};
  };
  for (Case& c : spec.cases) c.gradcheck = false;
  spec.benches = {}, spec.sweep = {};
  return spec;
}

/// The mask has b's shape.
OpSpec where_spec() {
  OpSpec spec = pair_spec();
  spec.name = "where";
  spec.summary = "y = mask ? a : b";
  spec.inputs = {{.name = "mask", .shape = "[...]", .dtypes = {DType::boolean}},
                 {"a", "[...]"},
                 {"b", "[...]; the three broadcast"}};
  spec.outputs = {{"y", "mask, a and b broadcast"}};
  spec.run = [](const std::vector<Tensor>& in, const Attrs&) {
    return std::vector{where(in[0], in[1], in[2])};
  };
  spec.problem = [](const Dims& d, const Attrs&) {
    const Pair p(d);
    const double mask = double(p.b.count());
    return Problem{.inputs = {{.shape = p.b, .fill = Fill::index, .high = 2}, {.shape = p.a}, {.shape = p.b}},
                   .forward_elements = p.inputs + p.outputs,
                   .backward_elements = p.outputs + p.inputs,
                   .forward_bytes = mask,
                   .backward_bytes = mask};
  };
  return spec;
}

std::vector<Case> unary_cases(const std::vector<Attrs>& attrs) {
  std::vector<Case> cases;
  for (const Attrs& a : attrs)
    cases.insert(cases.end(),
                 {{.dims = {{"R", 7}, {"C", 13}}, .attrs = a},
                  {.dims = {{"R", 1}, {"C", 1}}, .attrs = a},
                  {.dims = {{"R", 0}, {"C", 5}}, .attrs = a},
                  {.dims = {{"R", 5}, {"C", 0}}, .attrs = a},
                  {.dims = {{"R", 3}, {"C", 129}}, .attrs = a, .placement = Placement::strided},
                  {.dims = {{"R", 17}, {"C", 11}}, .attrs = a, .placement = Placement::transposed},
                  {.dims = {{"R", 67}, {"C", 1365}}, .attrs = a, .gradcheck = false}});
  return cases;
}

/// An operator of one number, and of those in its attributes.
struct UnaryRow {
  const char* name;
  const char* formula;
  std::function<Tensor(const Tensor&, const Attrs&)> run;
  Fill fill = Fill::normal;
  double scale = 1;
  double backward_reads = 2;  // an element: dy, and x or y
  std::vector<AttrSpec> attrs = {};
  std::vector<Attrs> values = {Attrs{}};  // of the cases; the benchmarks take the first
  double cpu_extra_ulp = 0;
  const char* cpu_extra_reason = "";
};

OpSpec unary_spec(const UnaryRow& row) {
  return {
      .name = row.name,
      .summary = row.formula,
      .inputs = {{"x", "[...]"}},
      .attrs = row.attrs,
      .outputs = {{"y", "as x"}},
      .run = [run = row.run](const std::vector<Tensor>& in,
                             const Attrs& attrs) { return std::vector{run(in[0], attrs)}; },
      .problem =
          [fill = row.fill, scale = row.scale, reads = row.backward_reads](const Dims& d, const Attrs&) {
            const double n = double(d.at("R")) * double(d.at("C"));
            return Problem{.inputs = {{.shape = {d.at("R"), d.at("C")}, .fill = fill, .scale = scale}},
                           .forward_flops = n,
                           .backward_flops = n,
                           .forward_elements = 2 * n,
                           .backward_elements = (1 + reads) * n};
          },
      .cases = unary_cases(row.values),
      .benches = {{.dims = {{"R", 36096}, {"C", 512}}, .attrs = row.values.front()}},
      .sweep =
          [values = row.values](Draw& draw) {
            const Dims dims{{"R", draw.size(1, 300000)}, {"C", draw.size(1, 20000)}};
            return Case{.dims = dims, .attrs = values[size_t(draw.below(int64_t(values.size())))]};
          },
      .cpu_extra_ulp = row.cpu_extra_ulp,
      .cpu_extra_reason = row.cpu_extra_reason,
  };
}

/// A function without attributes.
std::function<Tensor(const Tensor&, const Attrs&)> plain(UnaryOp run) {
  return [run](const Tensor& x, const Attrs&) { return run(x, Site::here()); };
}
/// One with a number of that name.
std::function<Tensor(const Tensor&, const Attrs&)> with(Tensor (*run)(const Tensor&, double, Site),
                                                        const char* name) {
  return
      [run, name](const Tensor& x, const Attrs& attrs) { return run(x, attrs.number(name), Site::here()); };
}

}  // namespace

std::vector<OpSpec> pointwise_specs() {
  const Fill away = Fill::away_from_0, positive = Fill::positive;
  const BinaryRow pairs[] = {
      {Binary::add, add, "y = a + b"},
      {Binary::sub, sub, "y = a - b"},
      {Binary::mul, mul, "y = a b", Fill::normal, 1, 2, true},
      {Binary::div, div, "y = a / b", away, 2, 4, true},
      {Binary::maximum, maximum, "y = the larger of a and b", away, 20, 2, true},
      {Binary::minimum, minimum, "y = the smaller of a and b", away, 20, 2, true},
  };
  const std::tuple<Comparison, BinaryOp, const char*> comparisons[] = {
      {Comparison::less, less, "y = a < b"},       {Comparison::less_equal, less_equal, "y = a <= b"},
      {Comparison::greater, greater, "y = a > b"}, {Comparison::greater_equal, greater_equal, "y = a >= b"},
      {Comparison::equal, equal, "y = a == b"},
  };
  // The bounds of clamp are kinks: with one at 0 and one far out, both of its sides are met.
  const UnaryRow functions[] = {
      {.name = "scale",
       .formula = "y = factor x",
       .run = with(scale, "factor"),
       .backward_reads = 1,
       .attrs = {{"factor", 1.0, "what every element is multiplied by"}},
       .values = {{{"factor", -1.75}}, {{"factor", 0.0}}}},
      {.name = "shift",
       .formula = "y = x + offset",
       .run = with(shift, "offset"),
       .backward_reads = 1,
       .attrs = {{"offset", 0.0, "what is added to every element"}},
       .values = {{{"offset", -1.75}}}},
      {.name = "reciprocal",
       .formula = "y = dividend / x",
       .run = with(reciprocal, "dividend"),
       .fill = away,
       .scale = 2,
       .attrs = {{"dividend", 1.0, "what is divided by every element"}},
       .values = {{{"dividend", 1.0}}, {{"dividend", -2.5}}}},
      {.name = "neg", .formula = "y = -x", .run = plain(neg), .backward_reads = 1},
      {.name = "abs", .formula = "y = |x|", .run = plain(abs), .fill = away},
      {.name = "square", .formula = "y = x^2", .run = plain(square)},
      {.name = "pow",
       .formula = "y = x^exponent",
       .run = with(pow, "exponent"),
       .fill = positive,
       .attrs = {{"exponent", 2.0, "power to which every element is raised"}},
       .values = {{{"exponent", 2.5}}, {{"exponent", -0.5}}, {{"exponent", 0.0}}, {{"exponent", 3.0}}}},
      {.name = "exp", .formula = "y = e^x", .run = plain(exp)},
      {.name = "log", .formula = "y = ln x", .run = plain(log), .fill = positive},
      {.name = "sqrt", .formula = "y = x^(1/2)", .run = plain(sqrt), .fill = positive},
      {.name = "rsqrt", .formula = "y = x^(-1/2)", .run = plain(rsqrt), .fill = positive},
      {.name = "sin", .formula = "y = sin x", .run = plain(sin)},
      {.name = "cos", .formula = "y = cos x", .run = plain(cos)},
      {.name = "tanh",
       .formula = "y = tanh x",
       .run = plain(tanh),
       .cpu_extra_ulp = 6,
       .cpu_extra_reason =
           "backward takes 1 - y^2 from the rounded y: half an ulp of y is y^2 / (1 - y^2) ulp of it, 5.2 at "
           "x = 1.6"},
      {.name = "sigmoid", .formula = "y = 1 / (1 + e^-x)", .run = plain(sigmoid)},
      {.name = "softplus", .formula = "y = ln(1 + e^x)", .run = plain(softplus)},
      {.name = "clamp",
       .formula = "y = x, within [low, high]",
       .run = [](const Tensor& x,
                 const Attrs& attrs) { return clamp(x, attrs.number("low"), attrs.number("high")); },
       .fill = away,
       .attrs = {{"low", 0.0, "least result"}, {"high", 1.0, "largest result"}},
       .values = {{{"low", 0.0}, {"high", 9.0}}, {{"low", -9.0}, {"high", 0.0}}}},
  };
  std::vector<OpSpec> specs;
  for (const BinaryRow& row : pairs) specs.push_back(binary_spec(row));
  for (const UnaryRow& row : functions) specs.push_back(unary_spec(row));
  for (const auto& [kind, run, formula] : comparisons) specs.push_back(comparison_spec(kind, run, formula));
  specs.push_back(division_spec(Binary::floor_div, floor_div, "y = a / b, rounded down"));
  specs.push_back(division_spec(Binary::remainder, remainder, "y = a - b floor(a / b)"));
  specs.push_back(where_spec());
  return specs;
}

}  // namespace tessera::ops

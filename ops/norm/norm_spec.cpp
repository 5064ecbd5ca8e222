#include "ops/norm/norm.h"
#include "ops/op.h"

namespace tessera::ops {
namespace {

/// Which of the `parameters` optional inputs are there is the dimension "P": 0 none, 1 weight, 2 both, 3 bias
/// alone. With "vector", x is [C] and R is 1.
Problem norm_problem(const Dims& d, int parameters, bool adds, bool drops = false) {
  const bool is_vector = is_set(d, "vector");
  const int64_t rows = is_vector ? 1 : d.at("R"), width = d.at("C"),
                given = d.contains("P") ? d.at("P") : parameters;
  const bool weight = given == 1 || given == 2, bias = given >= 2 && parameters == 2;
  const double n = double(rows) * double(width);
  const Shape shape = is_vector ? Shape{width} : Shape{rows, width};
  Problem problem{.inputs = {{.shape = shape}},
                  // Mean, square, scale, weight and bias; backward two dot products, dx and two sums.
                  .forward_flops = (3 + 2 * parameters + adds + drops) * n,
                  .backward_flops = (7 + 2 * double(given) + adds + drops) * n,
                  .forward_elements = (adds ? 4 : 2) * n + double(given) * double(width),
                  .backward_elements = (3 + adds + drops) * n + 2 * double(given) * double(width)};
  if (adds) problem.inputs.push_back({.shape = shape});
  problem.inputs.push_back({.shape = {width}, .fill = weight ? Fill::normal : Fill::absent});
  if (parameters == 2)
    problem.inputs.push_back({.shape = {width}, .fill = bias ? Fill::normal : Fill::absent});
  return problem;
}

std::vector<Case> norm_cases(int parameters) {
  std::vector<Case> list{
      {.dims = {{"R", 7}, {"C", 13}}},
      {.dims = {{"R", 5}, {"C", 8}, {"P", 0}}},
      {.dims = {{"R", 5}, {"C", 7}, {"P", 1}}, .attrs = {{"eps", 0.1}}},
      // One column: dx is what cancellation leaves, in proportion to eps, so eps is large here.
      {.dims = {{"R", 3}, {"C", 1}}, .attrs = {{"eps", 0.5}}},
      {.dims = {{"R", 1}, {"C", 3}}, .attrs = {{"eps", 0.5}}},
      {.dims = {{"R", 0}, {"C", 5}}},
      {.dims = {{"R", 5}, {"C", 0}}},
      {.dims = {{"R", 9}, {"C", 33}}, .placement = Placement::strided},
      {.dims = {{"R", 17}, {"C", 11}}, .placement = Placement::transposed},
      // The ends of the kernels' rows: a warp's registers in their sizes, a block's, and rows longer than
      // both; and more rows than the backward pass has warps.
      {.dims = {{"R", 67}, {"C", 512}}, .gradcheck = false},
      {.dims = {{"R", 67}, {"C", 513}}, .placement = Placement::strided, .gradcheck = false},
      {.dims = {{"R", 19}, {"C", 768}}, .gradcheck = false},
      {.dims = {{"R", 9}, {"C", 1021}}, .gradcheck = false},
      {.dims = {{"R", 9}, {"C", 1025}}, .gradcheck = false},
      {.dims = {{"R", 300}, {"C", 4096}}, .gradcheck = false},
      {.dims = {{"R", 140}, {"C", 5003}}, .gradcheck = false},
      {.dims = {{"R", 3}, {"C", 8195}}, .gradcheck = false},
      {.dims = {{"R", 5}, {"C", 9001}}, .placement = Placement::strided, .gradcheck = false},
      {.dims = {{"R", 3}, {"C", 40000}}, .gradcheck = false},
      {.dims = {{"R", 4099}, {"C", 67}}, .gradcheck = false}};
  // Rows that lanes of a warp share, in their sizes, in f32 and in 16 bits; the last warp has few of them.
  for (const int64_t width : {32, 33, 64, 65, 128, 129, 256, 257})
    list.push_back({.dims = {{"R", 61}, {"C", width}}, .gradcheck = false});
  if (parameters == 2) list.push_back({.dims = {{"R", 6}, {"C", 9}, {"P", 3}}});
  list.push_back(
      {.dims = {{"R", 1}, {"C", 6}, {"vector", 1}}, .attrs = {{"eps", 0.5}}});  // x has the parameters' shape
  return list;
}

/// Of the norms that do not add: rows enough for two per warp, the last one alone, of one word per lane and
/// of two.
std::vector<Case> with_many_rows(std::vector<Case> list) {
  for (const int64_t width : {131, 263})
    list.push_back({.dims = {{"R", 16897}, {"C", width}}, .gradcheck = false});
  return list;
}

std::vector<Case> norm_benches() {
  return {{.dims = {{"R", 65536}, {"C", 768}}},
          {.dims = {{"R", 32768}, {"C", 4096}}},
          {.dims = {{"R", 11000}, {"C", 512}}},
          {.dims = {{"R", 36096}, {"C", 512}}},
          {.dims = {{"R", 205000}, {"C", 512}}}};
}

/// And, for the norms that add, each of the cases once more under a mask, a few chances in turn.
std::vector<Case> with_dropout(std::vector<Case> list) {
  const double chances[] = {0.1, 0.5, 0.25};
  const size_t plain = list.size();
  for (size_t i = 0; i < plain; ++i) {
    Case dropped = list[i];
    dropped.attrs.set("dropout", chances[i % 3]);
    dropped.attrs.set("dropout_seed", int64_t(i));
    list.push_back(dropped);
  }
  return list;
}

std::vector<Case> with_dropout_benches() {
  std::vector<Case> list = norm_benches();
  for (const int64_t rows : {4096, 8192})
    list.push_back({.dims = {{"R", rows}, {"C", 768}}, .attrs = {{"dropout", 0.1}}});
  return list;
}

/// Not the narrowest rows: in them dx is what cancellation leaves, which no dtype of 16 bits resolves.
Case norm_sweep(Draw& draw) {
  return {.dims = {{"R", draw.size(1, 300000)}, {"C", draw.size(8, 20000)}}};
}

}  // namespace

std::vector<OpSpec> norm_specs() {
  const InputSpec x{"x", "[..., C]"}, residual{"residual", "as x"}, weight{"weight", "[C]", true},
      bias{"bias", "[C]", true};
  const OutputSpec sum{"sum", "as x"}, y{"y", "as x"};
  const AttrSpec to_variance{"eps", 1e-5, "added to the variance"},
      to_square{"eps", 1e-6, "added to the mean square"};
  const AttrSpec chance{"dropout", 0.0, "chance of an element of residual to be dropped, in [0, 1)"},
      dropout_seed{"dropout_seed", int64_t{0}, "of the random numbers of dropout"};
  const auto both = [](const Attrs& attrs, auto&& run) {
    SeededRng random(attrs.integer("dropout_seed"));
    const AddNorm results = run(ResidualDropout{attrs.number("dropout"), random.rng()});
    return std::vector{results.sum, results.y};
  };
  return {
      {
          .name = "layernorm",
          .summary = "y = (x - mean) / sqrt(var + eps) weight + bias over the last dimension",
          .inputs = {x, weight, bias},
          .attrs = {to_variance},
          .outputs = {y},
          .run =
              [](const std::vector<Tensor>& in, const Attrs& attrs) {
                return std::vector{layernorm(in[0], in[1], in[2], attrs.number("eps"))};
              },
          .problem = [](const Dims& d, const Attrs&) { return norm_problem(d, 2, false); },
          .cases = with_many_rows(norm_cases(2)),
          .benches = norm_benches(),
          .sweep = norm_sweep,
      },
      {
          .name = "rmsnorm",
          .summary = "y = x / sqrt(mean(x^2) + eps) weight over the last dimension",
          .inputs = {x, weight},
          .attrs = {to_square},
          .outputs = {y},
          .run = [](const std::vector<Tensor>& in,
                    const Attrs& attrs) { return std::vector{rmsnorm(in[0], in[1], attrs.number("eps"))}; },
          .problem = [](const Dims& d, const Attrs&) { return norm_problem(d, 1, false); },
          .cases = with_many_rows(norm_cases(1)),
          .benches = norm_benches(),
          .sweep = norm_sweep,
      },
      {
          .name = "add_layernorm",
          .summary = "sum = x + dropout(residual), y = layernorm(sum)",
          .inputs = {x, residual, weight, bias},
          .attrs = {to_variance, chance, dropout_seed},
          .outputs = {sum, y},
          .run =
              [both](const std::vector<Tensor>& in, const Attrs& attrs) {
                return both(attrs, [&](const ResidualDropout& dropout) {
                  return add_layernorm(in[0], in[1], in[2], in[3], attrs.number("eps"), dropout);
                });
              },
          .seed = "dropout_seed",
          .problem = [](const Dims& d,
                        const Attrs& attrs) { return norm_problem(d, 2, true, attrs.number("dropout") > 0); },
          .cases = with_dropout(norm_cases(2)),
          .benches = with_dropout_benches(),
          .sweep = norm_sweep,
      },
      {
          .name = "add_rmsnorm",
          .summary = "sum = x + dropout(residual), y = rmsnorm(sum)",
          .inputs = {x, residual, weight},
          .attrs = {to_square, chance, dropout_seed},
          .outputs = {sum, y},
          .run =
              [both](const std::vector<Tensor>& in, const Attrs& attrs) {
                return both(attrs, [&](const ResidualDropout& dropout) {
                  return add_rmsnorm(in[0], in[1], in[2], attrs.number("eps"), dropout);
                });
              },
          .seed = "dropout_seed",
          .problem = [](const Dims& d,
                        const Attrs& attrs) { return norm_problem(d, 1, true, attrs.number("dropout") > 0); },
          .cases = with_dropout(norm_cases(1)),
          .benches = with_dropout_benches(),
          .sweep = norm_sweep,
      }};
}

}  // namespace tessera::ops

#include "ops/norm/norm.h"

#include "ops/norm/norm_kernels.h"
#include "ops/op.h"
#include "ops/reduction.h"

namespace tessera::ops {
namespace {

void check_parameter(const char* name, const char* what, const Tensor& parameter, const Tensor& x) {
  if (!parameter.defined()) return;
  check(parameter.rank() == 1 && parameter.size(0) == x.size(-1), name, ": ", what, " is ",
        describe(parameter), "; expected [", x.size(-1), "], the last dimension of x ", x.shape());
  check(parameter.dtype() == x.dtype() && parameter.device() == x.device(), name, ": ", what, " is ",
        describe(parameter), ", but x is ", describe(x), "; convert one of them (ops::cast) or move it");
}

Tensor rows_of(const Tensor& tensor) {
  return tensor.defined() ? tensor.with_rows() : tensor;
}

Tensor apply(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, bool centred, Site site) {
  const char* const name = centred ? "layernorm" : "rmsnorm";
  check(x.defined(), name, ": x is undefined");
  check(x.rank() > 0, name, ": x is ", describe(x), ", of rank 0; expected [..., C]");
  check(eps >= 0, name, ": eps is ", eps, "; expected 0 or more");
  check_parameter(name, "weight", weight, x);
  check_parameter(name, "bias", bias, x);
  Tensor y = Tensor::empty_like(x);
  const Tensor rstd = Tensor::empty({x.rows()}, sum_dtype(x.dtype()), x.device());
  const Tensor mean = centred ? Tensor::empty_like(rstd) : Tensor();
  {
    const Tensor from = x.with_rows(), scale = rows_of(weight), shift = rows_of(bias);
    const NormForward norm{y, mean, rstd, from, scale, shift, eps};
    if (x.device().is_cpu()) {
      norm_forward_cpu(norm);
    } else if constexpr (kCuda) {
      norm_forward_cuda(norm);
    }
  }
  if (Tape* tape = Tape::recording(x, weight, bias)) {
    tape->record(
        name, site, {&x, &weight, &bias}, {&y},
        [x = Saved(x), weight = Saved(weight), mean = Saved(mean), rstd = Saved(rstd)](Backward& b) {
          const Tensor from = x.get().with_rows(), scale = rows_of(weight.get()), dy = b.grad().with_rows();
          const auto parameter = [&](int input) {
            return b.needs(input) ? Tensor::empty({from.size(-1)}, sum_dtype(from.dtype()), from.device())
                                  : Tensor();
          };
          const Tensor dx = b.needs(0) ? Tensor::empty_like(from) : Tensor(), dweight = parameter(1),
                       dbias = parameter(2);
          const NormBackward norm{dx, dweight, dbias, dy, from, scale, mean.get(), rstd.get()};
          if (from.device().is_cpu()) {
            norm_backward_cpu(norm);
          } else if constexpr (kCuda) {
            norm_backward_cuda(norm);
          }
          b.accumulate(0, dx);
          b.accumulate(1, dweight);
          b.accumulate(2, dbias);
        });
  }
  return y;
}

/// Which of the `parameters` optional inputs are there is the dimension "P": 0 none, 1 weight, 2 both, 3 bias
/// alone.
Problem problem(const Dims& d, int parameters) {
  const int64_t rows = d.at("R"), width = d.at("C"), given = d.contains("P") ? d.at("P") : parameters;
  const bool weight = given == 1 || given == 2, bias = given >= 2 && parameters == 2;
  const double n = double(rows) * double(width);
  Problem problem{.inputs = {{.shape = {rows, width}}},
                  // Mean, square, scale, weight and bias; backward two dot products, dx and two sums.
                  .forward_flops = (3 + 2 * parameters) * n,
                  .backward_flops = (7 + 2 * double(given)) * n,
                  .forward_elements = 2 * n + double(given) * double(width),
                  .backward_elements = 3 * n + 2 * double(given) * double(width)};
  problem.inputs.push_back({.shape = {width}, .fill = weight ? Fill::normal : Fill::absent});
  if (parameters == 2)
    problem.inputs.push_back({.shape = {width}, .fill = bias ? Fill::normal : Fill::absent});
  return problem;
}

std::vector<Case> cases(int parameters) {
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
      {.dims = {{"R", 3}, {"C", 8195}}, .gradcheck = false},
      {.dims = {{"R", 4099}, {"C", 67}}, .gradcheck = false}};
  if (parameters == 2) list.push_back({.dims = {{"R", 6}, {"C", 9}, {"P", 3}}});
  return list;
}

std::vector<Case> benches() {
  return {{.dims = {{"R", 65536}, {"C", 768}}},
          {.dims = {{"R", 32768}, {"C", 4096}}},
          {.dims = {{"R", 36096}, {"C", 512}}},
          {.dims = {{"R", 205000}, {"C", 512}}}};
}

/// Not the narrowest rows: in them dx is what cancellation leaves, which no dtype of 16 bits resolves.
Case sweep(Draw& draw) {
  return {.dims = {{"R", draw.size(1, 300000)}, {"C", draw.size(8, 20000)}}};
}

}  // namespace

Tensor layernorm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, Site site) {
  return apply(x, weight, bias, eps, true, site);
}

Tensor rmsnorm(const Tensor& x, const Tensor& weight, double eps, Site site) {
  return apply(x, weight, {}, eps, false, site);
}

std::vector<OpSpec> norm_specs() {
  const InputSpec x{"x", "[..., C]"}, weight{"weight", "[C]", true}, bias{"bias", "[C]", true};
  return {
      {
          .name = "layernorm",
          .summary = "y = (x - mean) / sqrt(var + eps) weight + bias over the last dimension",
          .inputs = {x, weight, bias},
          .attrs = {{"eps", 1e-5, "added to the variance"}},
          .outputs = {{"y", "as x"}},
          .run =
              [](const std::vector<Tensor>& in, const Attrs& attrs) {
                return std::vector{layernorm(in[0], in[1], in[2], attrs.number("eps"))};
              },
          .problem = [](const Dims& d, const Attrs&) { return problem(d, 2); },
          .cases = cases(2),
          .benches = benches(),
          .sweep = sweep,
      },
      {
          .name = "rmsnorm",
          .summary = "y = x / sqrt(mean(x^2) + eps) weight over the last dimension",
          .inputs = {x, weight},
          .attrs = {{"eps", 1e-6, "added to the mean square"}},
          .outputs = {{"y", "as x"}},
          .run = [](const std::vector<Tensor>& in,
                    const Attrs& attrs) { return std::vector{rmsnorm(in[0], in[1], attrs.number("eps"))}; },
          .problem = [](const Dims& d, const Attrs&) { return problem(d, 1); },
          .cases = cases(1),
          .benches = benches(),
          .sweep = sweep,
      }};
}

}  // namespace tessera::ops

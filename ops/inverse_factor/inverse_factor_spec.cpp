#include "ops/inverse_factor/inverse_factor.h"
#include "ops/matmul/matmul.h"
#include "ops/op.h"

namespace tessera::ops {
namespace {

Case sized(int64_t n, int64_t rows, Placement placement = Placement::pitched) {
  return {.dims = {{"N", n}, {"T", rows}}, .placement = placement};
}

OpSpec inverse_factor_spec() {
  return {
      .name = "inverse_factor",
      .summary = "upper triangular U with (A + diag(shift))^-1 = U^T U",
      .inputs = {{.name = "x", .shape = "[T, N]", .optional = true, .differentiable = false},
                 {.name = "a", .shape = "[N, N]", .differentiable = false, .from = {"x"}},
                 {.name = "shift", .shape = "[N]", .differentiable = false}},
      .outputs = {{"u", "[N, N]", false}},
      .cpu_dtypes = {DType::f64, DType::f32},
      .cuda_dtypes = {DType::f32},
      .run =
          [](const std::vector<Tensor>& in, const Attrs&) {
            const auto u = inverse_factor(in[1], in[2]);
            check(u.has_value(),
                  "inverse_factor: a + diag(shift) is not positive definite; give a larger shift");
            return std::vector{*u};
          },
      .derive = [](const std::vector<Tensor>& in,
                   const Attrs&) { return std::vector{matmul(in[0], in[0], true)}; },
      .problem =
          [](const Dims& d, const Attrs&) {
            const double n = double(d.at("N"));
            return Problem{.inputs = {{.shape = {d.at("T"), d.at("N")}},
                                      {.shape = {d.at("N"), d.at("N")}},
                                      {.shape = {d.at("N")}, .fill = Fill::positive}},
                           .forward_flops = 2 * n * n * n / 3,
                           .forward_elements = 2 * n * n};
          },
      .cases = {sized(1, 1), sized(2, 5), sized(17, 40), sized(33, 7), sized(64, 100), sized(129, 300),
                sized(31, 50, Placement::strided), sized(31, 50, Placement::transposed)},
      .benches = {sized(768, 1024), sized(4096, 4096), sized(11008, 1024)},
      .captures = false,
  };
}

}  // namespace

std::vector<OpSpec> inverse_factor_specs() {
  return {inverse_factor_spec()};
}

}  // namespace tessera::ops

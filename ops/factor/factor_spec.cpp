#include "ops/factor/factor.h"
#include "ops/op.h"

namespace tessera::ops {
namespace {

Case of(int64_t m, int64_t n, Placement placement = Placement::pitched) {
  return {.dims = {{"M", m}, {"N", n}}, .placement = placement};
}

std::vector<Case> shapes() {
  return {of(1, 1),
          of(1, 7),
          of(7, 1),
          of(5, 3),
          of(3, 5),
          of(17, 17),
          of(64, 33),
          of(33, 64),
          of(31, 50, Placement::strided),
          of(50, 31, Placement::transposed)};
}

Problem factor_problem(const Dims& d, double flops_per_element) {
  const double m = double(d.at("M")), n = double(d.at("N")), k = std::min(m, n);
  return {.inputs = {{.shape = {d.at("M"), d.at("N")}}},
          .forward_flops = flops_per_element * m * n * k,
          .forward_elements = m * n + k * (m + n)};
}

OpSpec qr_spec() {
  return {.name = "qr",
          .summary = "a = q r, orthonormal columns and an upper triangle with a diagonal >= 0",
          .inputs = {{.name = "a", .shape = "[M, N]", .differentiable = false}},
          .outputs = {{"q", "[M, K]", false}, {"r", "[K, N]", false}},
          .cpu_dtypes = {DType::f64, DType::f32},
          .cuda_dtypes = {DType::f32},
          .run =
              [](const std::vector<Tensor>& in, const Attrs&) {
                const QrFactors made = qr(in[0]);
                return std::vector{made.q, made.r};
              },
          .problem = [](const Dims& d, const Attrs&) { return factor_problem(d, 4); },
          .cases = shapes(),
          .benches = {of(4096, 128), of(4096, 1024)},
          .captures = false};
}

OpSpec svd_spec() {
  return {.name = "svd",
          .summary = "a = u diag(s) vt, the thin singular value decomposition",
          .inputs = {{.name = "a", .shape = "[M, N]", .differentiable = false}},
          .outputs = {{"u", "[M, K]", false}, {"s", "[K]", false}, {"vt", "[K, N]", false}},
          .cpu_dtypes = {DType::f64, DType::f32},
          .cuda_dtypes = {DType::f32},
          .run =
              [](const std::vector<Tensor>& in, const Attrs&) {
                const SvdFactors made = svd(in[0]);
                return std::vector{made.u, made.s, made.vt};
              },
          .problem = [](const Dims& d, const Attrs&) { return factor_problem(d, 14); },
          .cases = shapes(),
          .benches = {of(512, 512), of(1376, 512)},
          .captures = false};
}

}  // namespace

std::vector<OpSpec> factor_specs() {
  return {qr_spec(), svd_spec()};
}

}  // namespace tessera::ops

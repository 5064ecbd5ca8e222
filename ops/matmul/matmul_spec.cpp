#include <algorithm>

#include "ops/gemm/gemm.h"
#include "ops/matmul/matmul.h"
#include "ops/op.h"

namespace tessera::ops {

namespace {

Dims matmul_dims(int64_t a, int64_t b, int64_t m, int64_t n, int64_t k) {
  return {{"A", a}, {"B", b}, {"M", m}, {"N", n}, {"K", k}};
}

std::vector<Case> matmul_cases() {
  std::vector<Case> all;
  for (const bool ta : {false, true})
    for (const bool tb : {false, true}) {
      const Attrs attrs{{"transpose_a", ta}, {"transpose_b", tb}};
      all.push_back({.dims = matmul_dims(0, 0, 5, 7, 3), .attrs = attrs});
      all.push_back({.dims = matmul_dims(3, 3, 2, 5, 4), .attrs = attrs});
      all.push_back({.dims = matmul_dims(2, 2, 5, 3, 4), .attrs = attrs, .placement = Placement::strided});
      all.push_back({.dims = matmul_dims(0, 0, 4, 5, 3), .attrs = attrs, .placement = Placement::transposed});
      all.push_back({.dims = matmul_dims(3, 0, 4, 2, 5), .attrs = attrs});
      all.push_back({.dims = matmul_dims(0, 3, 4, 2, 5), .attrs = attrs});
      all.push_back({.dims = matmul_dims(3, 3, 33, 65, 129), .attrs = attrs, .gradcheck = false});
    }
  const std::vector<Case> more = {
      {.dims = matmul_dims(0, 0, 1, 1, 1)},
      {.dims = matmul_dims(0, 0, 1, 6, 5)},
      {.dims = matmul_dims(0, 0, 6, 1, 5)},
      {.dims = matmul_dims(0, 0, 4, 3, 1)},
      {.dims = matmul_dims(4, 4, 1, 3, 5)},
      {.dims = matmul_dims(4, 0, 1, 3, 5)},
      {.dims = matmul_dims(4, 4, 1, 1, 1)},
      {.dims = matmul_dims(1, 3, 2, 3, 4)},
      {.dims = matmul_dims(3, 1, 2, 3, 4)},
      {.dims = matmul_dims(0, 0, 0, 3, 2)},
      {.dims = matmul_dims(0, 0, 3, 0, 2)},
      {.dims = matmul_dims(0, 0, 3, 2, 0)},
      {.dims = matmul_dims(2, 0, 3, 2, 0)},
      {.dims = matmul_dims(3, 0, 4, 5, 2), .placement = Placement::strided},
      {.dims = matmul_dims(0, 0, 3, 41, 1792),
       .attrs = {{"transpose_a", true}},
       .gradcheck = false},  // narrow
      {.dims = matmul_dims(0, 0, 1501, 16, 7), .gradcheck = false},
      {.dims = matmul_dims(5, 5, 2, 350, 301), .attrs = {{"transpose_b", true}}, .gradcheck = false},
      {.dims = matmul_dims(0, 0, 600, 200, 3), .gradcheck = false},
      {.dims = matmul_dims(0, 0, 127, 129, 513), .gradcheck = false},
      {.dims = matmul_dims(0, 0, 257, 1365, 64), .placement = Placement::strided, .gradcheck = false},
      {.dims = matmul_dims(8, 0, 63, 31, 255), .placement = Placement::transposed, .gradcheck = false}};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

}  // namespace

std::vector<OpSpec> matmul_specs() {
  OpSpec spec;
  spec.name = "matmul";
  spec.summary = "y = a b, of matrices or batches of them";
  spec.inputs = {{"a", "[..., M, K]"}, {"b", "[..., K, N]"}};
  spec.attrs = {{"transpose_a", false, "a is stored [..., K, M]"},
                {"transpose_b", false, "b is stored [..., N, K]"}};
  spec.outputs = {{"y", "[..., M, N]"}};
  spec.honours_f32_math = true;
  spec.tolerance_factor_f32 = 8;
  spec.variants = gemm_variants();
  spec.variant_dtypes = {{}, {}, {DType::bf16, DType::f16}};
  spec.tolerance_reason = "as linear: one long f32 chain on the GPU, blocks on the CPU";
  spec.run = [](const std::vector<Tensor>& in, const Attrs& attrs) {
    return std::vector{matmul(in[0], in[1], attrs.flag("transpose_a"), attrs.flag("transpose_b"))};
  };
  // A and B: the batch of each; 0 for a single matrix.
  spec.problem = [](const Dims& d, const Attrs& attrs) {
    const int64_t of_a = d.at("A"), of_b = d.at("B"), m = d.at("M"), n = d.at("N"), k = d.at("K");
    const auto shape = [](int64_t batch, int64_t rows, int64_t columns, bool transposed) {
      if (transposed) std::swap(rows, columns);
      return batch ? Shape{batch, rows, columns} : Shape{rows, columns};
    };
    const double batch = double(std::max<int64_t>({of_a, of_b, 1}));
    const double a = double(std::max<int64_t>(of_a, 1)) * double(m) * double(k);
    const double b = double(std::max<int64_t>(of_b, 1)) * double(k) * double(n);
    const double y = batch * double(m) * double(n), products = 2 * y * double(k);
    return Problem{.inputs = {{.shape = shape(of_a, m, k, attrs.flag("transpose_a"))},
                              {.shape = shape(of_b, k, n, attrs.flag("transpose_b"))}},
                   .forward_flops = products,
                   .backward_flops = 2 * products,
                   .forward_elements = a + b + y,
                   .backward_elements = 2 * (a + b) + y};
  };
  spec.cases = matmul_cases();
  spec.benches = {{.dims = matmul_dims(0, 0, 4096, 4096, 4096)},
                  {.dims = matmul_dims(0, 0, 8192, 8192, 8192)},
                  {.dims = matmul_dims(64, 64, 512, 512, 512)}};
  spec.sweep = [](Draw& draw) {
    const int64_t batch = draw.chance(0.3) ? draw.size(1, 64) : 0;
    const int64_t most = batch ? 2048 : 16384;
    return Case{.dims = matmul_dims(batch, batch, draw.size(1, most), draw.size(1, most), draw.size(1, most)),
                .attrs = {{"transpose_a", draw.chance(0.5)}, {"transpose_b", draw.chance(0.5)}}};
  };
  return {std::move(spec)};
}

}  // namespace tessera::ops

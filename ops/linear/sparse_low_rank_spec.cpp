#include <algorithm>

#include "ops/gemm/gemm.h"
#include "ops/linear/sparse_low_rank.h"
#include "ops/op.h"

namespace tessera::ops {
namespace {

/// Parts of equal size, the last one with what is left.
std::vector<int64_t> rows_of(int64_t out, int64_t parts) {
  check(parts >= 1 && parts <= out, "sparse_low_rank_linear: ", parts, " parts of ", out, " rows");
  std::vector<int64_t> rows(size_t(parts), out / parts);
  rows.back() += out % parts;
  return rows;
}

/// `step`: every so many elements of the weight is stored.
Case of(int64_t tokens, int64_t in, int64_t out, int64_t rank, int64_t parts, int64_t step, bool bias = true,
        Placement placement = Placement::pitched) {
  return {.dims = {{"T", tokens}, {"in", in}, {"out", out}, {"R", rank}, {"step", step}, {"bias", bias}},
          .attrs = {{"parts", parts}, {"scale", 0.5}},
          .placement = placement,
          .gradcheck = tokens * in * out < 4096};
}

Problem sparse_low_rank_problem(const Dims& d, const Attrs& attrs) {
  const int64_t tokens = d.at("T"), in = d.at("in"), out = d.at("out"), rank = d.at("R"),
                parts = attrs.integer("parts");
  const int64_t step = d.at("step");
  check(step >= 1, "sparse_low_rank_linear: step is 0; expected 1 or more");
  check_listed("sparse_low_rank_linear", double(in) * double(out) / double(step));
  std::vector<int64_t> places;
  for (int64_t place = step - 1; place < in * out; place += step) places.push_back(place);
  const int64_t stored = int64_t(places.size());
  const bool bias = d.at("bias") != 0;
  const double t = double(tokens), i = double(in), o = double(out), r = double(rank), p = double(parts);
  return {.inputs = {{.shape = {tokens, in}},
                     {.shape = {parts * rank, in}},
                     {.shape = {out, rank}},
                     {.shape = {stored}},
                     {.shape = {stored}, .fill = Fill::index, .high = in * out, .values = std::move(places)},
                     {.shape = {out}, .fill = bias ? Fill::normal : Fill::absent},
                     {.shape = {tokens, out}, .fill = bias ? Fill::normal : Fill::absent}},
          .forward_flops = 2 * i * o * (t + r),
          .backward_flops = 2 * i * o * (2 * t + r) + 4 * t * r * (p * i + o),
          .forward_elements = t * (i + o) + i * o,
          .backward_elements = 2 * t * (i + o) + 2 * i * o};
}

}  // namespace

std::vector<OpSpec> sparse_low_rank_specs() {
  OpSpec spec{.name = "sparse_low_rank_linear",
              .summary = "y = x W^T + bias + residual with W = scale b a + S",
              .inputs = {{"x", "[..., in]"},
                         {"a", "[parts R, in]"},
                         {"b", "[out, R]"},
                         {"values", "[n]"},
                         {.name = "support", .shape = "[n]", .differentiable = false, .dtypes = {DType::i32}},
                         {"bias", "[out]", true},
                         {"residual", "[..., out]", true}},
              .attrs = {{"parts", int64_t{1}, "row ranges of W with factors of their own"},
                        {"scale", 1.0, "factor of the product"}},
              .outputs = {{"y", "[..., out]"}}};
  spec.run = [](const std::vector<Tensor>& in, const Attrs& attrs) {
    const SparseLowRank w{
        in[1], in[2], in[3], in[4], rows_of(in[2].size(0), attrs.integer("parts")), attrs.number("scale")};
    return std::vector{sparse_low_rank_linear(in[0], w, in[5], in[6])};
  };
  spec.problem = sparse_low_rank_problem;
  spec.cases = {of(7, 5, 3, 2, 1, 3),
                of(7, 5, 6, 2, 3, 2, false),
                of(1, 1, 1, 1, 1, 1),
                of(0, 4, 5, 2, 2, 3),
                of(5, 4, 7, 3, 2, 100),
                of(6, 9, 5, 1, 2, 4, true, Placement::strided),
                of(6, 5, 7, 2, 1, 1, false, Placement::transposed),
                of(130, 65, 33, 7, 3, 17),
                of(64, 72, 136, 16, 2, 31, false)};
  spec.benches = {of(4096, 512, 1376, 128, 1, 33, false), of(16384, 4096, 4096, 1024, 1, 33, false)};
  spec.honours_f32_math = true;
  spec.tolerance_factor = 4;
  spec.tolerance_factor_f32 = 8;
  spec.tolerance_reason =
      "W is rounded twice, and the products with the low rank once more before the long sums";
  spec.cpu_extra_ulp = 4;
  spec.cpu_extra_reason = "W and the inner products are rounded to 16 bits before the sums of backward";
  return {std::move(spec)};
}

}  // namespace tessera::ops

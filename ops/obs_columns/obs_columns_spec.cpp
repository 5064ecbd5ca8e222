#include "ops/inverse_factor/inverse_factor.h"
#include "ops/matmul/matmul.h"
#include "ops/obs_columns/obs_columns.h"
#include "ops/op.h"

namespace tessera::ops {
namespace {

/// keep: with a given mask; levels > 0: with a grid; else groups choose.
Case of(int64_t rows, int64_t columns, int64_t zeros, int64_t group, int64_t levels = 0,
        Placement placement = Placement::pitched) {
  return {.dims = {{"R", rows}, {"C", columns}},
          .attrs = {{"zeros", zeros}, {"group", group}, {"levels", levels}},
          .placement = placement};
}

/// A factor as pruning has it: of rows that are no multiple of the columns, with a diagonal added.
Tensor factor_of(const Tensor& x) {
  check(x.rank() == 2, "obs_columns: x is ", describe(x), "; expected [T, C]");
  const int64_t n = x.size(1);
  const auto factor = inverse_factor(matmul(x, x, true), Tensor::full({n}, double(n), x.dtype(), x.device()));
  check(factor.has_value(), "obs_columns: x^T x + C is not positive definite, as of an x that is not finite");
  return *factor;
}

Problem obs_columns_problem(const Dims& d, const Attrs& attrs) {
  const int64_t rows = d.at("R"), columns = d.at("C");
  const bool given = attrs.integer("group") == 0, rounds = attrs.integer("levels") > 0;
  const auto optional = [](bool is, InputCase input) {
    if (!is) input.fill = Fill::absent;
    return input;
  };
  const double n = double(rows) * double(columns);
  return {.inputs = {{.shape = {rows, columns}},
                     {.shape = {columns + 3, columns}},
                     {.shape = {columns, columns}},
                     optional(given, {.shape = {rows, columns}, .fill = Fill::index, .high = 2}),
                     optional(rounds, {.shape = {rows}, .fill = Fill::positive}),
                     optional(rounds, {.shape = {rows}, .fill = Fill::positive})},
          .forward_flops = n * double(columns),
          .forward_elements = 3 * n + double(columns) * double(columns),
          .forward_bytes = given ? n : 0};
}

OpSpec obs_columns_spec() {
  OpSpec op{
      .name = "obs_columns",
      .summary = "drops weights column by column, errors passed on by U",
      .inputs = {{.name = "weight", .shape = "[R, C]", .differentiable = false},
                 {.name = "x", .shape = "[T, C]", .optional = true, .differentiable = false},
                 {.name = "factor", .shape = "[C, C]", .differentiable = false, .from = {"x"}},
                 {.name = "keep",
                  .shape = "[R, C]",
                  .optional = true,
                  .differentiable = false,
                  .dtypes = {DType::u8}},
                 {.name = "scale", .shape = "[R]", .optional = true, .differentiable = false},
                 {.name = "zero", .shape = "[R]", .optional = true, .differentiable = false}},
      .attrs = {{"zeros", int64_t{0}, "weights dropped of each group, without keep"},
                {"group", int64_t{0}, "consecutive columns of a group; divides C"},
                {"levels", int64_t{0}, "levels of the grid of scale and zero"}},
      .outputs = {{"pruned", "[R, C]", false}, {"error", "[R, C]", false}},
      .cpu_dtypes = {DType::f64, DType::f32},
      .cuda_dtypes = {DType::f32},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            check(!in[3].defined() || (attrs.integer("zeros") == 0 && attrs.integer("group") == 0),
                  "obs_columns: zeros and group have no effect next to keep; leave them out, or leave keep "
                  "out");
            const ObsBlock done = obs_columns(in[0], in[2],
                                              {.keep = in[3],
                                               .zeros = attrs.integer("zeros"),
                                               .group = attrs.integer("group"),
                                               .grid = {in[4], in[5], attrs.integer("levels")}});
            return std::vector{done.weight, done.error};
          },
      .derive = [](const std::vector<Tensor>& in, const Attrs&) { return std::vector{factor_of(in[1])}; },
      .problem = obs_columns_problem,
      .benches = {of(4096, 128, 0, 0), of(4096, 128, 2, 4), of(11008, 128, 0, 0), of(4096, 128, 0, 0, 16)},
      .tolerance_factor_f32 = 4,
      .tolerance_reason = "each column's rounding is carried on by all later ones",
  };
  for (const auto& [rows, columns] :
       {std::pair<int64_t, int64_t>{1, 1}, {5, 3}, {7, 31}, {33, 33}, {9, 128}, {3, 130}, {2, 256}})
    op.cases.push_back(of(rows, columns, 0, 0));
  for (const auto& [zeros, group] : {std::pair<int64_t, int64_t>{1, 2}, {2, 4}, {4, 8}, {5, 6}, {20, 40}})
    op.cases.push_back(of(11, group * 3, zeros, group));
  op.cases.push_back(of(6, 128, 2, 4));
  op.cases.push_back(of(5, 24, 0, 0, 16));
  op.cases.push_back(of(5, 24, 2, 4, 8));
  op.cases.push_back(of(7, 36, 0, 0, 0, Placement::strided));
  op.cases.push_back(of(7, 36, 2, 4, 0, Placement::transposed));
  op.cases.push_back(of(0, 4, 0, 0));
  return op;
}

}  // namespace

std::vector<OpSpec> obs_columns_specs() {
  return {obs_columns_spec()};
}

}  // namespace tessera::ops

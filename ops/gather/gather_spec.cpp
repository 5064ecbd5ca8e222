#include "ops/gather/gather.h"
#include "ops/op.h"

namespace tessera::ops {
namespace {

/// N indices, R rows, each of A x B elements (A left out: B).
Shape gathered_shape(const Dims& d, int64_t rows) {
  return d.contains("A") ? Shape{rows, d.at("A"), d.at("B")} : Shape{rows, d.at("B")};
}

std::vector<Case> row_cases() {
  return {{.dims = {{"N", 7}, {"R", 5}, {"B", 3}}},
          {.dims = {{"N", 11}, {"R", 2}, {"B", 13}}},
          {.dims = {{"N", 3}, {"R", 17}, {"B", 1}}},
          {.dims = {{"N", 1}, {"R", 1}, {"B", 1}}},
          {.dims = {{"N", 0}, {"R", 4}, {"B", 5}}},
          {.dims = {{"N", 4}, {"R", 3}, {"B", 0}}},
          {.dims = {{"N", 5}, {"R", 4}, {"A", 3}, {"B", 5}}},
          {.dims = {{"N", 6}, {"R", 4}, {"A", 2}, {"B", 11}}, .placement = Placement::strided},
          {.dims = {{"N", 6}, {"R", 5}, {"B", 9}}, .placement = Placement::strided},
          {.dims = {{"N", 6}, {"R", 5}, {"B", 9}}, .placement = Placement::transposed},
          {.dims = {{"N", 31}, {"R", 1}, {"B", 2}}},
          {.dims = {{"N", 32}, {"R", 1}, {"B", 2}}},
          {.dims = {{"N", 33}, {"R", 1}, {"B", 2}}},
          {.dims = {{"N", 65}, {"R", 3}, {"B", 1}}},
          // A GPU scatters up to 256 rows in another way than more.
          {.dims = {{"N", 256}, {"R", 40}, {"B", 70}}, .gradcheck = false},
          {.dims = {{"N", 257}, {"R", 129}, {"B", 65}}, .gradcheck = false},
          {.dims = {{"N", 290}, {"R", 1}, {"B", 2}}, .gradcheck = false},
          {.dims = {{"N", 300}, {"R", 4}, {"A", 2}, {"B", 11}},
           .placement = Placement::strided,
           .gradcheck = false},
          {.dims = {{"N", 261}, {"R", 7}, {"B", 9}}, .placement = Placement::transposed, .gradcheck = false},
          {.dims = {{"N", 1025}, {"R", 7}, {"B", 1365}}, .gradcheck = false}};
}

std::vector<Case> row_benches() {
  return {{.dims = {{"N", 36096}, {"R", 36096}, {"B", 512}}},
          {.dims = {{"N", 36096}, {"R", 1000}, {"B", 512}}}};
}

}  // namespace

std::vector<OpSpec> gather_specs() {
  OpSpec gather{
      .name = "gather_rows",
      .summary = "y[n] = x[indices[n]]",
      .inputs = {{"x", "[R, ...]"},
                 {.name = "indices", .shape = "[N]", .differentiable = false, .dtypes = index_dtypes()}},
      .outputs = {{"y", "[N, ...]"}},
      .run = [](const std::vector<Tensor>& in,
                const Attrs&) { return std::vector{gather_rows(in[0], in[1])}; },
      .problem =
          [](const Dims& d, const Attrs&) {
            const Shape x = gathered_shape(d, d.at("R"));
            const double row = double(gathered_shape(d, 1).count()), n = double(d.at("N")) * row;
            return Problem{
                .inputs = {{.shape = x}, {.shape = {d.at("N")}, .fill = Fill::index, .high = d.at("R")}},
                .backward_flops = n,
                .forward_elements = 2 * n,
                .backward_elements = n + double(x.count())};
          },
      .cases = row_cases(),
      .benches = row_benches(),
      .sweep =
          [](Draw& draw) {
            return Case{.dims = {{"N", draw.size(1, 200000)},
                                 {"R", draw.size(1, 200000)},
                                 {"B", draw.size(1, 4096)}}};
          },
  };
  OpSpec scatter{
      .name = "scatter_rows",
      .summary = "y[r] = sum of x[n] over the n with indices[n] == r",
      .inputs = {{"x", "[N, ...]"},
                 {.name = "indices", .shape = "[N]", .differentiable = false, .dtypes = index_dtypes()}},
      .attrs = {{"rows", int64_t{1}, "rows of y"}},
      .outputs = {{"y", "[rows, ...]"}},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            return std::vector{scatter_rows(in[0], in[1], attrs.integer("rows"))};
          },
      .problem =
          [](const Dims& d, const Attrs& attrs) {
            const int64_t rows = attrs.integer("rows");
            const double row = double(gathered_shape(d, 1).count()), n = double(d.at("N")) * row;
            return Problem{.inputs = {{.shape = gathered_shape(d, d.at("N"))},
                                      {.shape = {d.at("N")}, .fill = Fill::index, .high = rows}},
                           .forward_flops = n,
                           .forward_elements = n + double(rows) * row,
                           .backward_elements = 2 * n};
          },
      .cases = row_cases(),
      .benches = row_benches(),
      .sweep =
          [](Draw& draw) {
            return Case{.dims = {{"N", draw.size(1, 200000)}, {"B", draw.size(1, 4096)}},
                        .attrs = {{"rows", draw.size(1, 200000)}}};
          },
  };
  for (auto* list : {&scatter.cases, &scatter.benches})
    for (Case& c : *list) {
      c.attrs.set("rows", c.dims.at("R"));
      c.dims.erase("R");
    }
  return {gather, scatter};
}

}  // namespace tessera::ops

#include "ops/gather/gather.h"

#include "autograd/tape.h"
#include "ops/gather/gather_kernels.h"
#include "ops/op.h"

namespace tessera::ops {
namespace {

void check_operands(const char* name, const Tensor& x, const Tensor& indices) {
  check(x.defined() && indices.defined(), name, ": ", x.defined() ? "indices" : "x", " is undefined");
  check(x.rank() >= 1, name, ": x is ", describe(x), "; expected at least one dimension");
  check(indices.rank() == 1 && (indices.dtype() == DType::i64 || indices.dtype() == DType::i32), name,
        ": indices is ", describe(indices), "; expected i64 or i32 of rank 1");
  check(indices.device() == x.device(), name, ": x is ", describe(x), ", indices is ", describe(indices),
        "; both must be on one device");
}

/// On the CPU alone: see the contract.
void check_range(const char* name, const Tensor& indices, int64_t rows) {
  if (!indices.device().is_cpu()) return;
  dispatch_index(indices.dtype(), name, [&]<class I>() {
    const I* const at = indices.data<I>();
    const int64_t stride = indices.layout().stride(0);
    for (int64_t n = 0; n < indices.count(); ++n)
      check(0 <= at[n * stride] && at[n * stride] < rows, name, ": index ", at[n * stride], " at position ",
            n, " is outside the ", rows, " rows");
  });
}

Tensor gathered(const Tensor& x, const Tensor& indices, OutOfRange rule) {
  Tensor y = Tensor::empty(x.shape().with(0, indices.count()), x.dtype(), x.device());
  if (y.count() == 0) return y;
  if (x.device().is_cpu()) {
    gather_rows_cpu(y, x, indices);
  } else if constexpr (kCuda) {
    gather_rows_cuda(y, x, indices, rule);
  }
  return y;
}

Tensor scattered(const Tensor& x, const Tensor& indices, int64_t rows) {
  Tensor y = Tensor::empty(x.shape().with(0, rows), x.dtype(), x.device());
  if (y.count() == 0) return y;
  if (x.device().is_cpu()) {
    scatter_rows_cpu(y, x, indices);
  } else if constexpr (kCuda) {
    scatter_rows_cuda(y, x, indices);
  }
  return y;
}

}  // namespace

Tensor gather_rows(const Tensor& x, const Tensor& indices, Site site) {
  const CallScope call(site);
  check_operands("gather_rows", x, indices);
  check_range("gather_rows", indices, x.size(0));
  Tensor y = gathered(x.detach(), indices, OutOfRange::ones);
  if (Tape* tape = Tape::recording(x))
    tape->record("gather_rows", {&x, &indices}, {&y},
                 [rows = x.size(0), indices = Saved(indices)](Backward& b) {
                   b.give(0, scattered(b.grad(), indices.get(), rows));
                 });
  return y;
}

Tensor scatter_rows(const Tensor& x, const Tensor& indices, int64_t rows, Site site) {
  const CallScope call(site);
  check_operands("scatter_rows", x, indices);
  check(x.size(0) == indices.count(), "scatter_rows: x ", describe(x), " has ", x.size(0), " rows, indices ",
        describe(indices), " has ", indices.count(), "; expected one index a row");
  check(rows >= 0, "scatter_rows: ", rows, " rows; expected 0 or more");
  check(is_floating(x.dtype()) && x.dtype() != DType::f8e4m3, "scatter_rows: dtype ", x.dtype(),
        " is not supported on device ", x.device().name(), "; expected f64, f32, bf16 or f16");
  check_range("scatter_rows", indices, rows);
  Tensor y = scattered(x.detach(), indices, rows);
  if (Tape* tape = Tape::recording(x))
    tape->record("scatter_rows", {&x, &indices}, {&y}, [indices = Saved(indices)](Backward& b) {
      b.give(0, gathered(b.grad(), indices.get(), OutOfRange::zeros));
    });
  return y;
}

namespace {

/// N indices, R rows, each of A x B elements (A left out: B).
Shape with_rows(const Dims& d, int64_t rows) {
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
            const Shape x = with_rows(d, d.at("R"));
            const double row = double(with_rows(d, 1).count()), n = double(d.at("N")) * row;
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
            const double row = double(with_rows(d, 1).count()), n = double(d.at("N")) * row;
            return Problem{.inputs = {{.shape = with_rows(d, d.at("N"))},
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

#include "ops/rope/rope.h"

#include "autograd/tape.h"
#include "ops/op.h"
#include "ops/reduction.h"
#include "ops/rope/rope_kernels.h"
#include "ops/rope/rope_table.h"

namespace tessera::ops {
namespace {

void check_arguments(const Tensor& x, const Tensor& table, const Tensor& positions, int64_t offset) {
  check(x.defined() && table.defined(), "rope: ", x.defined() ? "table" : "x", " is undefined");
  check(x.rank() == 4, "rope: x is ", describe(x), "; expected [B, T, H, D]");
  check(table.rank() == 2 && table.size(1) % 2 == 0 && table.size(1) <= x.size(3), "rope: table is ",
        describe(table), "; expected [P, R] with R even and at most ", x.size(3),
        ", the size of a head of x ", x.shape());
  check(table.dtype() == sum_dtype(x.dtype()) && table.device() == x.device(), "rope: table is ",
        describe(table), "; expected ", sum_dtype(x.dtype()), " on the device of x, which is ", describe(x));
  if (positions.defined()) {
    const bool fits =
        positions.shape() == Shape{x.size(1)} || positions.shape() == Shape{x.size(0), x.size(1)};
    check(fits && (positions.dtype() == DType::i64 || positions.dtype() == DType::i32), "rope: positions is ",
          describe(positions), "; expected i64 or i32 [", x.size(1), "] or [", x.size(0), ", ", x.size(1),
          "]");
    check(positions.device() == x.device(), "rope: positions is ", describe(positions), ", but x is ",
          describe(x));
  } else {
    check(offset >= 0 && offset <= table.size(0) - x.size(1), "rope: ", x.size(1), " tokens from position ",
          offset, " do not fit table ", describe(table), " of ", table.size(0), " positions");
  }
}

Tensor with_heads(const Tensor& x) {
  return x.layout().stride(3) == 1 || x.size(3) == 1 ? x : x.clone();
}

/// Writes all of y, whose heads' elements are adjacent.
void rotate(const Tensor& y, const Tensor& x, const Tensor& table, const Tensor& positions, int64_t offset,
            bool inverse) {
  const RopeProblem problem{.y = y,
                            .x = with_heads(x),
                            .table = table.with_rows(),
                            .positions = positions.defined() ? positions.packed() : Tensor(),
                            .offset = offset,
                            .inverse = inverse};
  if (x.device().is_cpu()) {
    rope_cpu(problem);
  } else if constexpr (kCuda) {
    rope_cuda(problem);
  }
}

Tensor apply(const Tensor& x, const Tensor& table, const Tensor& positions, int64_t offset, Site site) {
  const CallScope call(site);
  check_arguments(x, table, positions, offset);
  Tensor y = Tensor::empty(x.shape(), x.dtype(), x.device());
  rotate(y, x.detach(), table.detach(), positions, offset, false);
  if (Tape* tape = Tape::recording(x)) {
    tape->record("rope", {&x, &table, &positions}, {&y},
                 [table = Saved(table), positions = Saved(positions), offset](Backward& b) {
                   const Tensor dy = b.grad();
                   GradTarget dx = b.target(0);
                   if (!dx.part || dx.grad.dtype() != dy.dtype() || dx.grad.layout().stride(3) != 1)
                     dx = {Tensor::empty(dy.shape(), dy.dtype(), dy.device())};
                   rotate(dx.grad, dy, table.get(), positions.get(), offset, true);
                   b.written(0, dx);
                 });
  }
  return y;
}

Problem problem(const Dims& d, const Attrs& attrs) {
  const int64_t batch = d.at("B"), tokens = d.at("T"), heads = d.at("H"), width = d.at("D");
  const double n = double(batch) * double(tokens) * double(heads) * double(width);
  const double table = double(tokens) * double(d.at("R"));
  const bool given = attrs.flag("positions");
  return {.inputs = {{.shape = {batch, tokens, heads, width}},
                     {.shape = {d.at("P"), d.at("R")}},
                     given ? InputCase{.shape = {batch, tokens}, .fill = Fill::index, .high = d.at("P")}
                           : InputCase{.fill = Fill::absent}},
          .forward_flops = 3 * n,
          .backward_flops = 3 * n,
          .forward_elements = 2 * n + table,
          .backward_elements = 2 * n + table};
}

}  // namespace

Tensor rope(const Tensor& x, const Tensor& table, int64_t offset, Site site) {
  return apply(x, table, {}, offset, site);
}

Tensor rope(const Tensor& x, const Tensor& table, const Tensor& positions, Site site) {
  const CallScope call(site);
  check(positions.defined(), "rope: positions is undefined");
  return apply(x, table, positions, 0, site);
}

std::vector<OpSpec> rope_specs() {
  return {{
      .name = "rope",
      .summary = "y = x turned by the angles of its position: [x1 c - x2 s, x2 c + x1 s]",
      .inputs = {{"x", "[B, T, H, D]"},
                 {"table", "[P, R]: R/2 cosines, R/2 sines", false, false},
                 {"positions", "[T] or [B, T]", true, false, index_dtypes()}},
      .attrs = {{"offset", int64_t{0}, "position of the first token, without positions"},
                {"positions", false, "of cases and benchmarks: positions are given"}},
      .outputs = {{"y", "[B, T, H, D]"}},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            const int64_t offset = attrs.integer("offset");
            check(in[2].defined() || !attrs.flag("positions"),
                  "rope: positions=true, but there is no input \"positions\"");
            check(!in[2].defined() || offset == 0, "rope: offset ", offset,
                  " with positions, which already say where the tokens are");
            // One declaration has one dtype: the table comes in x's and becomes the one that rope wants.
            const Tensor table = in[1].detach().to(sum_dtype(in[0].dtype()));
            return std::vector{apply(in[0], table, in[2], offset, Site::here())};
          },
      .problem = problem,
      .cases = {{.dims = {{"B", 2}, {"T", 3}, {"H", 2}, {"D", 6}, {"R", 6}, {"P", 3}}},
                {.dims = {{"B", 1}, {"T", 1}, {"H", 1}, {"D", 2}, {"R", 2}, {"P", 1}}},
                {.dims = {{"B", 2}, {"T", 0}, {"H", 2}, {"D", 4}, {"R", 4}, {"P", 0}}},
                {.dims = {{"B", 2}, {"T", 3}, {"H", 2}, {"D", 5}, {"R", 0}, {"P", 4}}},
                // Half of each head turned; from a later position.
                {.dims = {{"B", 1}, {"T", 4}, {"H", 3}, {"D", 16}, {"R", 8}, {"P", 11}},
                 .attrs = {{"offset", int64_t{7}}}},
                {.dims = {{"B", 3}, {"T", 5}, {"H", 2}, {"D", 8}, {"R", 8}, {"P", 9}},
                 .attrs = {{"positions", true}}},
                {.dims = {{"B", 2}, {"T", 4}, {"H", 3}, {"D", 16}, {"R", 16}, {"P", 7}},
                 .placement = Placement::strided},
                {.dims = {{"B", 2}, {"T", 4}, {"H", 3}, {"D", 16}, {"R", 16}, {"P", 7}},
                 .placement = Placement::transposed},
                {.dims = {{"B", 2}, {"T", 4}, {"H", 3}, {"D", 16}, {"R", 12}, {"P", 7}},
                 .attrs = {{"positions", true}},
                 .placement = Placement::strided},
                {.dims = {{"B", 2}, {"T", 67}, {"H", 5}, {"D", 128}, {"R", 128}, {"P", 100}},
                 .attrs = {{"offset", int64_t{33}}},
                 .gradcheck = false},
                {.dims = {{"B", 3}, {"T", 129}, {"H", 7}, {"D", 64}, {"R", 64}, {"P", 129}},
                 .attrs = {{"positions", true}},
                 .gradcheck = false}},
      .benches = {{.dims = {{"B", 1}, {"T", 4096}, {"H", 64}, {"D", 128}, {"R", 128}, {"P", 4096}}}},
  }};
}

}  // namespace tessera::ops

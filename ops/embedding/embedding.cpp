#include "ops/embedding/embedding.h"

#include <algorithm>
#include <limits>

#include "autograd/tape.h"
#include "ops/embedding/embedding_kernels.h"
#include "ops/op.h"
#include "ops/reduction.h"

namespace tessera::ops {
namespace {

void check_arguments(const Tensor& table, const Tensor& indices) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // rows are sorted as 32-bit numbers
  check(table.defined() && indices.defined(), "embedding: ", table.defined() ? "indices" : "table",
        " is undefined");
  check(table.rank() == 2, "embedding: table is ", describe(table), "; expected [V, C]");
  check(indices.dtype() == DType::i64 || indices.dtype() == DType::i32, "embedding: indices is ",
        describe(indices), "; expected i64 or i32");
  check(indices.device() == table.device(), "embedding: indices is ", describe(indices), ", but table is ",
        describe(table), "; move one of them with to(device)");
  check(table.size(0) < kMost && indices.count() < kMost, "embedding: table is ", describe(table),
        " and indices is ", describe(indices), "; expected fewer than ", kMost, " rows of each");
}

Problem problem(const Dims& d, const Attrs&) {
  const int64_t rows = d.at("V"), width = d.at("C"), count = d.at("T");
  const double n = double(count) * double(width);
  return {.inputs = {{.shape = {rows, width}}, {.shape = {count}, .fill = Fill::index, .high = rows}},
          .backward_flops = n,
          .forward_elements = 2 * n,
          .backward_elements = n + double(rows) * double(width)};
}

/// The gradient of a table of so many rows, of so many indices.
struct Indexed {
  int64_t count, rows;
};

std::string describe_problem(const Indexed& problem) {
  return text_of(problem.count, " indices into ", problem.rows, " rows");
}

/// How the gradient of a table is summed, in the order of EmbeddingWay.
constexpr Variant<Indexed, void()> kVariants[] = {
    {"one launch",
     [](const Indexed& problem, const Gpu&) -> Reason {
       return problem.count <= kEmbeddingFew ? Reason() : "at most 256 indices";
     },
     is_preferred<Indexed>, nullptr},
    {"count",
     [](const Indexed& problem, const Gpu&) -> Reason {
       const bool counts = problem.count <= kEmbeddingCounted &&
                           (problem.rows + 1) * std::max<int64_t>(problem.count, 1) <= int64_t{1} << 32;
       return counts ? Reason() : "at most 8192 indices and 2^32 pairs of an index and a row";
     },
     is_preferred<Indexed>, nullptr},
    {"sort", lacks_nothing<Indexed>, is_otherwise<Indexed>, nullptr}};

}  // namespace

EmbeddingWay embedding_way(int64_t count, int64_t rows, const Gpu& gpu) {
  return EmbeddingWay(choose_index("embedding", kVariants, Indexed{count, rows}, gpu));
}

Tensor embedding(const Tensor& table, const Tensor& indices, Site site) {
  const CallScope call(site);
  check_arguments(table, indices);
  Tensor y =
      Tensor::empty(indices.shape().inserted(indices.rank(), table.size(1)), table.dtype(), table.device());
  {
    const Tensor from = table.with_rows(), packed = indices.packed();
    if (table.device().is_cpu()) {
      embedding_forward_cpu(y, from, packed);
    } else if constexpr (kCuda) {
      embedding_forward_cuda(y, from, packed);
    }
  }
  if (Tape* tape = Tape::recording(table)) {
    tape->record("embedding", {&table, &indices}, {&y},
                 [indices = Saved(indices), rows = table.size(0)](Backward& b) {
                   const Tensor dy = b.grad().with_rows(), packed = indices.get().packed();
                   const DType wide = sum_dtype(dy.dtype());
                   const auto writable = [&](DType dtype) {
                     return dtype == wide || (dtype == dy.dtype() && dy.device().is_cuda());
                   };
                   GradTarget target = b.target(0);
                   if (target.grad.defined() && (!writable(target.grad.dtype()) || !target.grad.has_rows()))
                     target = {};
                   if (!target.grad.defined())
                     target = {Tensor::empty({rows, dy.size(-1)},
                                             writable(b.grad_dtype(0)) ? b.grad_dtype(0) : wide, dy.device()),
                               false};
                   if (dy.device().is_cpu()) {
                     embedding_backward_cpu(target.grad, dy, packed, target.accumulate);
                   } else if constexpr (kCuda) {
                     embedding_backward_cuda(target.grad, dy, packed, target.accumulate);
                   }
                   b.written(0, target);
                 });
  }
  return y;
}

std::vector<OpSpec> embedding_specs() {
  return {{
      .name = "embedding",
      .summary = "y[i] = table[indices[i]]",
      .inputs = {{"table", "[V, C]"}, {"indices", "[...]", false, false, index_dtypes()}},
      .attrs = {},
      .outputs = {{"y", "[..., C]"}},
      .run = [](const std::vector<Tensor>& in, const Attrs&) { return std::vector{embedding(in[0], in[1])}; },
      .problem = problem,
      .cases =
          {{.dims = {{"V", 7}, {"C", 5}, {"T", 11}}},
           {.dims = {{"V", 1}, {"C", 1}, {"T", 3}}},
           {.dims = {{"V", 13}, {"C", 8}, {"T", 1}}},
           {.dims = {{"V", 5}, {"C", 3}, {"T", 0}}},
           {.dims = {{"V", 5}, {"C", 0}, {"T", 4}}},
           {.dims = {{"V", 0}, {"C", 3}, {"T", 0}}},
           {.dims = {{"V", 9}, {"C", 6}, {"T", 17}}, .placement = Placement::strided},
           {.dims = {{"V", 9}, {"C", 6}, {"T", 17}}, .placement = Placement::transposed},
           // Rows named by few and by many indices; a warp's columns and one more; tables of few rows
           // with segments of many chunks, and of many rows with few indices; rows on lines of memory.
           {.dims = {{"V", 257}, {"C", 129}, {"T", 600}}, .gradcheck = false},
           {.dims = {{"V", 3}, {"C", 257}, {"T", 1000}}, .gradcheck = false},
           {.dims = {{"V", 10007}, {"C", 12}, {"T", 3001}}, .gradcheck = false},
           {.dims = {{"V", 1}, {"C", 42}, {"T", 200}}, .gradcheck = false},
           {.dims = {{"V", 3}, {"C", 300}, {"T", 256}}, .gradcheck = false},
           {.dims = {{"V", 5}, {"C", 5}, {"T", 9001}}, .gradcheck = false},
           {.dims = {{"V", 1}, {"C", 33}, {"T", 4097}}, .gradcheck = false},
           {.dims = {{"V", 700}, {"C", 40}, {"T", 8192}}, .gradcheck = false},  // the most that are counted
           {.dims = {{"V", 3}, {"C", 33}, {"T", 8193}}, .gradcheck = false},
           {.dims = {{"V", 40}, {"C", 17}, {"T", 5000}}, .placement = Placement::strided, .gradcheck = false},
           {.dims = {{"V", 2}, {"C", 3}, {"T", 140001}}, .gradcheck = false},
           {.dims = {{"V", 20011}, {"C", 7}, {"T", 2}}, .gradcheck = false},
           {.dims = {{"V", 300}, {"C", 1201}, {"T", 19}}, .gradcheck = false},
           {.dims = {{"V", 3001}, {"C", 348}, {"T", 700}}, .gradcheck = false}},
      .benches = {{.dims = {{"V", 50257}, {"C", 768}, {"T", 65536}}},
                  {.dims = {{"V", 1000}, {"C", 64}, {"T", 512}}}},
      .sweep =
          [](Draw& draw) {
            return Case{.dims = {{"V", draw.size(1, 150000)},
                                 {"C", draw.size(1, 4096)},
                                 {"T", draw.size(1, 200000)}}};
          },
      .variants = names_of(kVariants),  // of backward
  }};
}

}  // namespace tessera::ops

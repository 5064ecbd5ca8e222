#include "ops/embedding/embedding.h"

#include <algorithm>
#include <limits>

#include "autograd/tape.h"
#include "ops/embedding/embedding_kernels.h"
#include "ops/reduction.h"
#include "runtime/has_cuda.h"

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

std::vector<std::string> embedding_variants() {
  return names_of(kVariants);
}

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

}  // namespace tessera::ops

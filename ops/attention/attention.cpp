#include "ops/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "autograd/tape.h"
#include "ops/attention/attention_kernels.h"
#include "ops/attention/head_padding.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {
namespace {

/// Uninitialised, of x's shape but for heads of `dim` elements and dtype, the first three dimensions in the
/// order in which x has them in memory. The two innermost ones form one row, so that heads merge into rows
/// whatever `dim` is.
Tensor empty_in_order_of(const Tensor& x, int64_t dim) {
  int order[3] = {0, 1, 2};
  std::stable_sort(order, order + 3,
                   [&](int a, int b) { return x.layout().stride(a) > x.layout().stride(b); });
  const Tensor rows =
      Tensor::empty({x.size(order[0]), x.size(order[1]), x.size(order[2]) * dim}, x.dtype(), x.device());
  Layout layout = rows.layout();
  layout.shape = {x.size(0), x.size(1), x.size(2), dim};
  layout.strides[size_t(order[0])] = rows.layout().stride(0);
  layout.strides[size_t(order[1])] = rows.layout().stride(1);
  layout.strides[size_t(order[2])] = dim;
  layout.strides[3] = 1;
  return Tensor::view_of(rows.storage(), layout, x.dtype());
}

/// Whether the kernels can read x in place: heads adjacent, on CUDA in 16-byte words, on the CPU as matrices
/// that BLAS takes.
bool readable(const Tensor& x) {
  const Layout& layout = x.layout();
  if (x.size(3) > 1 && layout.stride(3) != 1) return false;
  if (x.device().is_cpu())
    return layout.stride(1) >= x.size(3) && layout.stride(1) <= std::numeric_limits<int32_t>::max();
  const int64_t pack = 16 / int64_t(size_of(x.dtype()));
  for (int dim = 0; dim < 3; ++dim)
    if (x.size(dim) > 1 && layout.stride(dim) % pack != 0) return false;
  return reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0;
}

/// x as the kernels read it, its heads padded to `dim` elements.
Tensor as_heads(const Tensor& x, int64_t dim) {
  if (x.size(3) == dim && readable(x)) return x.detach();
  const Tensor copy = empty_in_order_of(x, dim);
  copy_padded(copy, x);
  return copy;
}

/// [N, H, D] as the one batch [1, N, H, D] and back.
Tensor as_batch(const Tensor& x) {
  const Layout& rows = x.layout();
  Layout layout = rows;
  layout.shape = {1, x.size(0), x.size(1), x.size(2)};
  layout.strides[0] = 1;  // at least that of any other dimension, as it is the outermost in memory
  for (size_t dim = 0; dim < 3; ++dim) {
    layout.strides[dim + 1] = rows.strides[dim];
    layout.strides[0] =
        std::max(layout.strides[0], rows.strides[dim] * std::max<int64_t>(1, rows.shape[int(dim)]));
  }
  return Tensor::view_of(x.storage(), layout, x.dtype());
}
Tensor without_batch(const Tensor& x) {
  return x.select(0, 0);
}

/// Where a gradient is written: `target` is the input's, `rows` what the kernels write: the same memory, or
/// rows of padded heads that are copied there.
struct GradBuffer {
  GradTarget target;
  Tensor rows;
};

/// The place in a whole that waits for this part's gradient, if the kernels can write there, else new memory.
/// `like` has the shape of the kernels' operand, heads of `dim` elements the input.
GradBuffer grad_buffer_of(Backward& b, int input, const Tensor& like, int64_t dim, bool packed) {
  const bool padded = like.size(3) != dim;
  GradTarget target;
  if (b.needs(input)) {
    target = b.target(input);
    if (target.part && target.grad.dtype() == like.dtype()) {
      if (padded) return {target, empty_in_order_of(like, like.size(3))};
      const Tensor rows = packed ? as_batch(target.grad) : target.grad;
      if (readable(rows)) return {target, rows};
    }
  }
  const Tensor exact = empty_in_order_of(like, dim);
  return {{packed ? without_batch(exact) : exact, false},
          padded ? empty_in_order_of(like, like.size(3)) : exact};
}

/// Hands the gradient over.
void write(Backward& b, int input, GradBuffer& buffer, int64_t dim, bool packed) {
  if (buffer.rows.size(3) != dim) {
    const Tensor heads = buffer.rows.slice(3, 0, dim);
    buffer.target.grad.copy_from(packed ? without_batch(heads) : heads);
  }
  buffer.rows = Tensor();  // or a leaf would copy a gradient that has two handles
  b.written(input, buffer.target);
}

/// q, k and v [B, L, H, D].
void check_operands(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options) {
  check(k.shape() == v.shape(), "attention: k is ", describe(k), " but v is ", describe(v),
        "; expected one shape");
  check(q.size(0) == k.size(0) && q.size(3) == k.size(3), "attention: q is ", describe(q),
        " but k and v are ", describe(k),
        "; B and D must agree (only the lengths and the numbers of heads may differ)");
  check(k.size(2) == 0 ? q.size(2) == 0 : q.size(2) % k.size(2) == 0, "attention: q has ", q.size(2),
        " heads, k and v ", k.size(2), "; expected a multiple of theirs");
  check(q.dtype() == k.dtype() && q.dtype() == v.dtype(), "attention: q is ", q.dtype(), ", k ", k.dtype(),
        ", v ", v.dtype(), "; expected one dtype (see cast)");
  check(q.device() == k.device() && q.device() == v.device(), "attention: q is on ", q.device().name(),
        ", k on ", k.device().name(), ", v on ", v.device().name(), "; expected one device");
  check(std::isfinite(options.scale) && options.scale >= 0, "attention: scale is ", options.scale,
        "; expected a positive number, or 0 for 1 / sqrt(D)");
  applied_dropout(options.dropout);
  check(options.dropout == 0 || options.rng, "attention: dropout needs a source of random numbers (rng)");
  const int64_t dim = q.size(3);
  const DType dtype = q.dtype();
  if (q.device().is_cpu()) {
    check(dtype == DType::f64 || dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16,
          "attention: dtype ", dtype, " is not supported on device cpu; expected f64, f32, bf16 or f16");
    check(dim >= 1 && dim <= 256, "attention: head size ", dim,
          " is not supported on device cpu; expected 1 ... 256");
  } else {
    check(dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16, "attention: dtype ", dtype,
          " is not supported on device ", q.device().name(), "; expected f32, bf16 or f16",
          dtype == DType::f64 ? " (f64 runs on the CPU, as the oracle)" : "");
    check(dim >= 1 && dim <= 128, "attention: head size ", dim, " is not supported on device ",
          q.device().name(), "; expected 1 ... 128");
    const int64_t longest = std::numeric_limits<int32_t>::max() / 2;
    check(q.size(1) <= longest && k.size(1) <= longest, "attention: lengths ", q.size(1), " and ", k.size(1),
          " are not supported on device ", q.device().name(), "; expected at most ", longest);
  }
}

void check_cu_seqlens(const char* name, const Tensor& starts, const Tensor& q) {
  check(starts.dtype() == DType::i32 || starts.dtype() == DType::i64, "attention: ", name, " is ",
        describe(starts), "; expected i32 or i64");
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  check(starts.rank() == 1 && starts.size(0) >= 1 && starts.size(0) <= kMost, "attention: ", name, " is ",
        describe(starts), "; expected [S + 1], the first row of each sequence and the end of the last, S < ",
        kMost);
  check(starts.layout().is_packed(), "attention: ", name, " is a view with gaps; expected packed elements");
  check(starts.device() == q.device(), "attention: ", name, " is on ", starts.device().name(), ", q on ",
        q.device().name(), "; expected one device");
}

/// The operands [B, L, H, D], or with starts [1, N, H, D]. `given` is what was called with, for the tape.
AttentionResult record_attention(const Tensor (&given)[3], const Tensor& q, const Tensor& k, const Tensor& v,
                                 AttentionProblem problem) {
  check_operands(q, k, v, problem);
  if (problem.scale == 0) problem.scale = 1 / std::sqrt(double(q.size(3)));
  if (q.dtype() == DType::f32) problem.math = f32_math();
  if (problem.dropout > 0) problem.drop = {problem.dropout, problem.rng->reserve(q.device())};
  problem.rng.reset();  // the tape needs the stream alone
  const DType statistics = q.dtype() == DType::f64 ? DType::f64 : DType::f32;
  const int64_t dim = q.size(3), padded = padded_head_dim(dim, q.device());
  const Tensor q_rows = as_heads(q, padded), k_rows = as_heads(k, padded), v_rows = as_heads(v, padded);
  const Tensor o_rows = empty_in_order_of(q, padded);
  const Tensor lse = Tensor::empty({q.size(0), q.size(2), q.size(1)}, statistics, q.device());
  if (k.size(2) == 0) {
    // no heads, nothing to compute
  } else if (q.device().is_cpu()) {
    attention_forward_cpu(o_rows, lse, q_rows, k_rows, v_rows, problem);
  } else if constexpr (kCuda) {
    attention_forward_cuda(o_rows, lse, q_rows, k_rows, v_rows, problem);
  }
  const bool packed = problem.packed();
  Tensor o = o_rows;
  if (padded != dim) {
    o = empty_in_order_of(q, dim);
    o.copy_from(o_rows.slice(3, 0, dim));
  }
  AttentionResult result{packed ? without_batch(o) : o, packed ? without_batch(lse) : lse};
  if (Tape* tape = Tape::recording(given[0], given[1], given[2])) {
    tape->record(
        "attention", {&given[0], &given[1], &given[2]}, {&result.o},
        [q = Saved(q_rows), k = Saved(k_rows), v = Saved(v_rows), o = Saved(o_rows), lse = Saved(lse),
         cu_seqlens_q = Saved(problem.cu_seqlens_q), cu_seqlens_k = Saved(problem.cu_seqlens_k),
         options = AttentionOptions(problem), drop = problem.drop, math = problem.math, dim,
         padded](Backward& b) {
          const AttentionProblem problem{options, cu_seqlens_q.get(), cu_seqlens_k.get(), drop, math};
          const bool packed = problem.packed();
          const Tensor dout = as_heads(packed ? as_batch(b.grad()) : b.grad(), padded);
          const bool keys_wanted = b.needs(1) || b.needs(2);
          GradBuffer dq = b.needs(0) ? grad_buffer_of(b, 0, q.get(), dim, packed) : GradBuffer{};
          GradBuffer dk = keys_wanted ? grad_buffer_of(b, 1, k.get(), dim, packed) : GradBuffer{};
          GradBuffer dv = keys_wanted ? grad_buffer_of(b, 2, v.get(), dim, packed) : GradBuffer{};
          if (k.get().size(2) == 0) {
            // no heads, nothing to compute
          } else if (dout.device().is_cpu()) {
            attention_backward_cpu(dq.rows, dk.rows, dv.rows, dout, q.get(), k.get(), v.get(), o.get(),
                                   lse.get(), problem);
          } else if constexpr (kCuda) {
            attention_backward_cuda(dq.rows, dk.rows, dv.rows, dout, q.get(), k.get(), v.get(), o.get(),
                                    lse.get(), problem);
          }
          if (b.needs(0)) write(b, 0, dq, dim, packed);
          if (b.needs(1)) write(b, 1, dk, dim, packed);
          if (b.needs(2)) write(b, 2, dv, dim, packed);
        });
  }
  return result;
}

}  // namespace

double applied_dropout(double p) {
  check(p >= 0 && p < 1, "attention: dropout is ", p, "; expected 0 <= p < 1");
  const uint32_t threshold = AttentionDropout::threshold(p);
  check(p == 0 || threshold > 0, "attention: dropout ", p,
        " would be rounded to 0 (it is applied in steps of 1/256); expected 0, or at least 1/512 = 0.001953");
  return threshold / 256.0;
}

AttentionResult attention_with_lse(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const AttentionOptions& options, Site site) {
  const CallScope call(site);
  check(q.defined() && k.defined() && v.defined(), "attention: q, k or v is undefined");
  check(q.rank() == 4 && k.rank() == 4 && v.rank() == 4, "attention: q is ", describe(q), ", k ", describe(k),
        ", v ", describe(v), "; expected [B, Lq, H, D], [B, Lk, Hk, D] and [B, Lk, Hk, D]");
  return record_attention({q, k, v}, q, k, v, {options, {}, {}});
}

AttentionResult attention_with_lse(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const AttentionSequences& sequences, const AttentionOptions& options,
                                   Site site) {
  const CallScope call(site);
  check(q.defined() && k.defined() && v.defined() && sequences.cu_seqlens_q.defined(),
        "attention: q, k, v or cu_seqlens_q is undefined");
  check(q.rank() == 3 && k.rank() == 3 && v.rank() == 3, "attention: q is ", describe(q), ", k ", describe(k),
        ", v ", describe(v), "; expected [N, H, D], [M, Hk, D] and [M, Hk, D] of sequences");
  const Tensor& cu_seqlens_q = sequences.cu_seqlens_q;
  const Tensor& cu_seqlens_k = sequences.cu_seqlens_k.defined() ? sequences.cu_seqlens_k : cu_seqlens_q;
  check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q);
  check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q);
  check(cu_seqlens_q.size(0) == cu_seqlens_k.size(0) && cu_seqlens_q.dtype() == cu_seqlens_k.dtype(),
        "attention: cu_seqlens_q is ", describe(cu_seqlens_q), " but cu_seqlens_k ", describe(cu_seqlens_k),
        "; expected as many sequences, in one dtype");
  check(sequences.cu_seqlens_k.defined() || q.size(0) == k.size(0), "attention: q is ", describe(q),
        " but k and v are ", describe(k), "; without cu_seqlens_k they have as many rows");
  return record_attention({q, k, v}, as_batch(q), as_batch(k), as_batch(v),
                          {options, cu_seqlens_q.detach(), cu_seqlens_k.detach()});
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options,
                 Site site) {
  return attention_with_lse(q, k, v, options, site).o;
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionSequences& sequences,
                 const AttentionOptions& options, Site site) {
  return attention_with_lse(q, k, v, sequences, options, site).o;
}

}  // namespace tessera::ops

#include "ops/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "autograd/tape.h"
#include "ops/attention/attention_kernels.h"
#include "ops/attention/head_padding.h"
#include "ops/pointwise/pointwise.h"
#include "runtime/has_cuda.h"
#include "runtime/integers.h"

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

/// The bias with four dimensions, leading ones added. Throws unless each of them is that of `scores` or 1.
Tensor with_four_dims(const Tensor& bias, const Shape& scores) {
  const auto fits = [&] {
    if (bias.rank() > 4) return false;
    for (int dim = 1; dim <= bias.rank(); ++dim)
      if (bias.size(-dim) != 1 && bias.size(-dim) != scores[-dim]) return false;
    return true;
  };
  check(fits(), "attention: bias is ", describe(bias), "; expected one that broadcasts to ", scores,
        " (B, H, Lq, Lk)");
  Layout layout = bias.layout();
  layout.shape = {1, 1, 1, 1};
  layout.strides = {};
  for (int dim = 1; dim <= bias.rank(); ++dim) {
    layout.shape = layout.shape.with(4 - dim, bias.size(-dim));
    layout.strides[size_t(4 - dim)] = bias.layout().stride(bias.rank() - dim);
  }
  return Tensor::view_of(bias.storage(), layout, bias.dtype());
}

/// A bias of four dimensions as the kernels read it (AttentionProblem::bias). On CUDA they read pairs of keys
/// and copy packs of 16 bytes: rows have whole pairs then and start on 16 bytes, and a row of one key for all
/// is a pack of it.
Tensor as_scores(const Tensor& bias, const Shape& scores) {
  const bool packs = bias.device().is_cuda(), one = bias.size(3) == 1 && scores[3] != 1;
  const int64_t pack = 16 / size_of(bias.dtype());
  const auto readable_in_place = [&] {
    if (one) return !packs;
    if (bias.size(3) > 1 && bias.layout().stride(3) != 1) return false;
    if (!packs) return true;
    for (int dim = 0; dim < 3; ++dim)
      if (bias.size(dim) > 1 && bias.layout().stride(dim) % pack != 0) return false;
    return bias.size(3) % 2 == 0 && reinterpret_cast<uintptr_t>(bias.raw()) % 16 == 0;
  };
  Tensor rows = bias;
  if (!readable_in_place()) {
    const int64_t width = one ? pack : packs ? round_up(bias.size(3), pack) : bias.size(3);
    rows = Tensor::empty(bias.shape().with(-1, width), bias.dtype(), bias.device());
    (one ? rows : rows.slice(3, 0, bias.size(3))).copy_from(bias);
  }
  Layout layout = rows.layout();
  for (int dim = 0; dim < 4; ++dim)
    if (bias.size(dim) == 1) layout.strides[size_t(dim)] = 0;
  layout.shape = scores;
  return Tensor::view_of(rows.storage(), layout, rows.dtype());
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
  if (const Tensor& bias = options.bias; bias.defined())
    check(bias.dtype() == q.dtype() && bias.device() == q.device(), "attention: bias is ", describe(bias),
          "; expected ", q.dtype(), " on ", q.device().name(), ", as q (",
          bias.dtype() == DType::boolean ? "mask_bias makes one of a mask)" : "see cast)");
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

/// The operands [B, L, H, D], or with starts [1, N, H, D]. `given` is what was called with, for the tape: q,
/// k, v and the bias.
AttentionResult record_attention(const Tensor (&given)[4], const Tensor& q, const Tensor& k, const Tensor& v,
                                 AttentionProblem problem) {
  check_operands(q, k, v, problem);
  if (problem.scale == 0) problem.scale = 1 / std::sqrt(double(q.size(3)));
  if (q.dtype() == DType::f32) problem.math = f32_math();
  if (problem.dropout > 0) problem.drop = {problem.dropout, problem.rng->reserve(q.device())};
  problem.rng.reset();  // the tape needs the stream alone
  Shape bias_shape;
  if (given[3].defined()) {
    const Shape scores{q.size(0), q.size(2), q.size(1), k.size(1)};
    const Tensor four = with_four_dims(given[3], scores);
    bias_shape = four.shape();
    problem.bias = as_scores(four, scores);
  }
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
  if (Tape* tape = Tape::recording(given[0], given[1], given[2], given[3])) {
    tape->record(
        "attention", {&given[0], &given[1], &given[2], &given[3]}, {&result.o},
        [q = Saved(q_rows), k = Saved(k_rows), v = Saved(v_rows), o = Saved(o_rows), lse = Saved(lse),
         cu_seqlens_q = Saved(problem.cu_seqlens_q), cu_seqlens_k = Saved(problem.cu_seqlens_k),
         bias = Saved(problem.bias), bias_shape, options = AttentionOptions(problem), drop = problem.drop,
         math = problem.math, given_shape = given[3].shape(), dim, padded](Backward& b) {
          AttentionProblem problem{options, cu_seqlens_q.get(), cu_seqlens_k.get(), drop, math};
          problem.bias = bias.get();
          // One value for all keys of a query changes no probability.
          const bool dbias_wanted = b.needs(3) && bias_shape[3] > 1;
          if (dbias_wanted)
            problem.dbias = Tensor::empty(bias_shape, problem.bias.dtype(), problem.bias.device());
          const bool packed = problem.packed();
          const Tensor dout = as_heads(packed ? as_batch(b.grad()) : b.grad(), padded);
          const bool keys_wanted = b.needs(1) || b.needs(2);
          GradBuffer dq = b.needs(0) ? grad_buffer_of(b, 0, q.get(), dim, packed) : GradBuffer{};
          GradBuffer dk = keys_wanted ? grad_buffer_of(b, 1, k.get(), dim, packed) : GradBuffer{};
          GradBuffer dv = keys_wanted ? grad_buffer_of(b, 2, v.get(), dim, packed) : GradBuffer{};
          if (k.get().size(2) == 0) {
            if (dbias_wanted) problem.dbias.fill(0);
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
          if (b.needs(3))
            b.give(3, dbias_wanted ? problem.dbias.reshape(given_shape)
                                   : Tensor::zeros(given_shape, b.grad_dtype(3), dout.device()));
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
  return record_attention({q, k, v, options.bias}, q, k, v, {options, {}, {}});
}

AttentionResult attention_with_lse(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const AttentionSequences& sequences, const AttentionOptions& options,
                                   Site site) {
  const CallScope call(site);
  check(q.defined() && k.defined() && v.defined() && sequences.cu_seqlens_q.defined(),
        "attention: q, k, v or cu_seqlens_q is undefined");
  check(q.rank() == 3 && k.rank() == 3 && v.rank() == 3, "attention: q is ", describe(q), ", k ", describe(k),
        ", v ", describe(v), "; expected [N, H, D], [M, Hk, D] and [M, Hk, D] of sequences");
  check(!options.bias.defined(),
        "attention: a bias cannot be combined with packed sequences; pad them to one length "
        "([B, L, H, D]) and hide the padding keys by the bias (mask_bias)");
  const Tensor& cu_seqlens_q = sequences.cu_seqlens_q;
  const Tensor& cu_seqlens_k = sequences.cu_seqlens_k.defined() ? sequences.cu_seqlens_k : cu_seqlens_q;
  check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q);
  check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q);
  check(cu_seqlens_q.size(0) == cu_seqlens_k.size(0) && cu_seqlens_q.dtype() == cu_seqlens_k.dtype(),
        "attention: cu_seqlens_q is ", describe(cu_seqlens_q), " but cu_seqlens_k ", describe(cu_seqlens_k),
        "; expected as many sequences, in one dtype");
  check(sequences.cu_seqlens_k.defined() || q.size(0) == k.size(0), "attention: q is ", describe(q),
        " but k and v are ", describe(k), "; without cu_seqlens_k they have as many rows");
  return record_attention({q, k, v, {}}, as_batch(q), as_batch(k), as_batch(v),
                          {options, cu_seqlens_q.detach(), cu_seqlens_k.detach()});
}

Tensor mask_bias(const Tensor& mask, DType dtype, Site site) {
  const CallScope call(site);
  check(mask.defined() && mask.dtype() == DType::boolean, "mask_bias: the mask is ",
        mask.defined() ? name_of(mask.dtype()) : "undefined",
        "; expected bool (ops::equal and ops::less make one)");
  check(is_floating(dtype) && dtype != DType::f8e4m3, "mask_bias: dtype ", dtype,
        "; expected that of the queries");
  const Shape one{};
  return where(mask, Tensor::zeros(one, dtype, mask.device()),
               Tensor::full(one, -std::numeric_limits<double>::infinity(), dtype, mask.device()));
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

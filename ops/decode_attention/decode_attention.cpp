#include "ops/decode_attention/decode_attention.h"

#include <cmath>
#include <limits>

#include "autograd/tape.h"
#include "ops/attention/head_padding.h"
#include "ops/decode_attention/decode_attention_kernels.h"
#include "ops/variant.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {
namespace {

constexpr int64_t kMostTokens = 16, kMostDim = 256;

/// Whether the kernels read x in place: heads of adjacent elements, on CUDA in packs of 16 bytes.
bool readable(const Tensor& x) {
  const Layout& layout = x.layout();
  if (x.size(3) > 1 && layout.stride(3) != 1) return false;
  if (x.device().is_cpu() || x.count() == 0) return true;
  const int64_t pack = 16 / int64_t(size_of(x.dtype()));
  for (int dim = 0; dim < 3; ++dim)
    if (x.size(dim) > 1 && layout.stride(dim) % pack != 0) return false;
  return reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0;
}

/// x as the kernels read it, its heads padded to `dim` elements.
Tensor as_heads(const Tensor& x, int64_t dim) {
  if (x.size(3) == dim) return readable(x) ? x.detach() : x.detach().clone();
  const Tensor copy = Tensor::empty({x.size(0), x.size(1), x.size(2), dim}, x.dtype(), x.device());
  copy_padded(copy, x);
  return copy;
}

void check_lengths(const char* op, const Tensor& lengths, const Tensor& first) {
  check(lengths.defined() && (lengths.dtype() == DType::i32 || lengths.dtype() == DType::i64) &&
            lengths.shape() == Shape{first.size(0)},
        op, ": lengths is ", describe(lengths), "; expected i32 or i64 [", first.size(0), "]");
  check(lengths.device() == first.device(), op, ": lengths is ", describe(lengths), ", but the tokens are ",
        describe(first));
}

void check_operands(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& lengths,
                    const DecodeAttentionOptions& options) {
  const char* const op = "decode_attention";
  check(q.defined() && keys.defined() && values.defined() && lengths.defined(), op,
        ": q, keys, values or lengths is undefined");
  check(q.rank() == 4 && keys.rank() == 4 && values.rank() == 4, op, ": q is ", describe(q), ", keys ",
        describe(keys), ", values ", describe(values),
        "; expected [B, n, H, D], [B, capacity, Hk, C] and [B, capacity, Hk, C]");
  check(keys.shape() == values.shape(), op, ": keys is ", describe(keys), " but values is ", describe(values),
        "; expected one shape [B, capacity, Hk, C]");
  check(q.size(0) == keys.size(0) && q.size(3) <= keys.size(3), op, ": q is ", describe(q), " but keys is ",
        describe(keys), "; B must agree, and the heads of keys must not be shorter than those of q");
  check(keys.size(2) >= 1 && q.size(2) % keys.size(2) == 0, op, ": ", q.size(2),
        " query heads are not a multiple of ", keys.size(2), " key heads");
  check(q.size(1) >= 1 && q.size(1) <= kMostTokens, op, ": ", q.size(1), " new tokens; expected 1 ... ",
        kMostTokens, " (attention takes more)");
  check(q.dtype() == keys.dtype() && q.dtype() == values.dtype(), op, ": q is ", q.dtype(), ", keys ",
        keys.dtype(), ", values ", values.dtype(), "; expected one dtype");
  check(q.device() == keys.device() && q.device() == values.device(), op, ": q is on ", q.device().name(),
        ", keys on ", keys.device().name(), ", values on ", values.device().name(), "; expected one device");
  check(std::isfinite(options.scale) && options.scale >= 0, op, ": scale is ", options.scale,
        "; expected a positive number, or 0 for 1 / sqrt(D)");
  check_lengths(op, lengths, q);
  const DType dtype = q.dtype();
  const int64_t dim = keys.size(3);
  const bool cpu = q.device().is_cpu();
  check(dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16 || (cpu && dtype == DType::f64),
        op, ": dtype ", dtype, " is not supported on device ", q.device().name(), "; expected ",
        cpu ? "f64, " : "", "f32, bf16 or f16");
  check(q.size(3) >= 1 && dim <= kMostDim, op, ": heads of ", q.size(3), " elements over a cache of ", dim,
        " are not supported; expected 1 ... ", kMostDim);
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 64;
  check(keys.size(1) <= kMost && q.size(0) * q.size(1) * q.size(2) <= kMost, op, ": q ", q.shape(),
        " and keys ", keys.shape(), " are too large; at most ", kMost,
        " tokens of capacity and as many queries");
  check(!Tape::recording(q, keys, values), op, ": has no gradient; run it without a tape, or use attention");
}

/// A call on CUDA. `dim`: elements of a head as the kernels see it.
struct Call {
  const Tensor& q;
  int64_t dim;
};

std::string describe_problem(const Call& call) {
  return text_of("q ", describe(call.q));
}

constexpr Variant<Call, void(const DecodeProblem&)> kVariants[] = {
    {"mma",
     [](const Call& call, const Gpu&) -> Reason {
       return call.q.dtype() != DType::f32 && call.dim <= kMmaDim
                  ? Reason()
                  : "bf16 or f16 and a head_dim of at most 128";
     },
     is_preferred<Call>,
     [](const DecodeProblem& problem) {
       if constexpr (kCuda) decode_attention_mma_cuda(problem);
     }},
    {"fma", lacks_nothing<Call>, is_otherwise<Call>, [](const DecodeProblem& problem) {
       if constexpr (kCuda) decode_attention_fma_cuda(problem);
     }}};

}  // namespace

std::vector<std::string> decode_attention_variants() {
  return names_of(kVariants);
}

Tensor decode_attention_past(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& lengths,
                             int64_t more, const DecodeAttentionOptions& options) {
  check_operands(q, keys, values, lengths, options);
  const bool cpu = q.device().is_cpu();
  const int64_t dim = q.size(3), padded = cpu ? dim : padded_head_dim(keys.size(3), q.device());
  const auto rows_of_heads = [&](int64_t elements) {
    return Tensor::empty({q.size(0), q.size(1), q.size(2) * elements}, q.dtype(), q.device())
        .reshape({q.size(0), q.size(1), q.size(2), elements});
  };
  const Tensor o = rows_of_heads(padded);
  const Call call{q, padded};
  const auto* const variant = cpu ? nullptr : &choose("decode_attention", kVariants, call, Gpu(q.device()));
  if (o.count() == 0) return rows_of_heads(dim);
  const int64_t of_cache = cpu ? keys.size(3) : padded;  // the CPU reads the first `dim` of them
  const DecodeProblem problem{.o = o,
                              .q = as_heads(q, padded),
                              .keys = as_heads(keys, of_cache),
                              .values = as_heads(values, of_cache),
                              .lengths = lengths.packed(),
                              .more = more,
                              .scale = options.scale == 0 ? 1 / std::sqrt(double(dim)) : options.scale};
  if (variant)
    variant->launch(problem);
  else
    decode_attention_cpu(problem);
  if (padded == dim) return o;
  const Tensor exact = rows_of_heads(dim);
  exact.copy_from(o.slice(3, 0, dim));
  return exact;
}

void append_past(Tensor& cache, const Tensor& x, const Tensor& lengths, int64_t more) {
  const char* const op = "append_to_cache";
  check(cache.defined() && x.defined() && lengths.defined(), op, ": cache, x or lengths is undefined");
  check(cache.rank() == 4 && x.rank() == 4 && cache.size(0) == x.size(0) && cache.size(2) == x.size(2) &&
            cache.size(3) == x.size(3) && x.size(1) >= 1,
        op, ": cache is ", describe(cache), " and x ", describe(x),
        "; expected [B, capacity, Hk, D] and [B, n, Hk, D], n >= 1");
  check(cache.dtype() == x.dtype() && cache.device() == x.device(), op, ": cache is ", describe(cache),
        ", but x is ", describe(x));
  check(!cache.layout().is_expanded(), op, ": cache ", describe(cache), " is expanded");
  check_lengths(op, lengths, x);
  check(!Tape::recording(cache, x), op, ": has no gradient; run it without a tape");
  if (x.count() == 0) return;
  const AppendProblem problem{cache.detach(), x.detach(), lengths.packed(), more};
  if (x.device().is_cpu()) {
    append_to_cache_cpu(problem);
  } else if constexpr (kCuda) {
    append_to_cache_cuda(problem);
  }
  cache.bump_version();
}

std::string_view decode_attention_variant(const Tensor& q, int64_t dim, const Gpu& gpu) {
  return choose("decode_attention", kVariants, Call{q, dim}, gpu).name;
}

Tensor decode_attention(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& lengths,
                        const DecodeAttentionOptions& options, Site site) {
  const CallScope call(site);
  return decode_attention_past(q, keys, values, lengths, 0, options);
}

void append_to_cache(Tensor& cache, const Tensor& x, const Tensor& lengths, Site site) {
  const CallScope call(site);
  append_past(cache, x, lengths, 0);
}

}  // namespace tessera::ops

#include "ops/decode_attention/decode_attention.h"

#include <cmath>
#include <limits>

#include "autograd/tape.h"
#include "ops/attention/head_padding.h"
#include "ops/decode_attention/decode_attention_kernels.h"
#include "ops/op.h"
#include "ops/variant.h"

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

Tensor attend(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& lengths, int64_t more,
              const DecodeAttentionOptions& options) {
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

void append(Tensor& cache, const Tensor& x, const Tensor& lengths, int64_t more) {
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

Case decode_case(int64_t batch, int64_t tokens, int64_t capacity, int64_t heads, int64_t kv_heads,
                 int64_t dim, bool full, Placement placement = Placement::pitched) {
  return {
      .dims =
          {{"B", batch}, {"n", tokens}, {"capacity", capacity}, {"H", heads}, {"Hk", kv_heads}, {"D", dim}},
      .attrs = {{"full", full}},
      .placement = placement};
}

OpSpec decode_spec() {
  OpSpec spec;
  spec.name = "decode_attention";
  spec.summary = "o = softmax(scale q keys^T) values for the newest n tokens, over a cache with lengths";
  spec.inputs = {{"q", "[B, n, H, D]", false, false},
                 {"keys", "[B, capacity, Hk, C], C >= D", false, false},
                 {"values", "[B, capacity, Hk, C]", false, false},
                 {"past", "[B]: tokens before the new ones", false, false, index_dtypes()}};
  spec.attrs = {{"scale", 0.0, "factor of the scores; 0: 1 / sqrt(D)"},
                {"full", false, "of cases and benchmarks: every sequence fills the cache, past is 0"}};
  spec.outputs = {{"o", "[B, n, H, D]", false}};
  spec.variants = names_of(kVariants);
  spec.variant_dtypes = {{DType::bf16, DType::f16}, {}};
  spec.run = [](const std::vector<Tensor>& in, const Attrs& attrs) {
    const int64_t more = attrs.flag("full") ? in[1].size(1) : in[0].size(1);
    return std::vector{attend(in[0], in[1], in[2], in[3], more, {.scale = attrs.number("scale")})};
  };
  spec.problem = [](const Dims& d, const Attrs& attrs) {
    const int64_t batch = d.at("B"), tokens = d.at("n"), capacity = d.at("capacity");
    const Shape cache{batch, capacity, d.at("Hk"), d.contains("C") ? d.at("C") : d.at("D")};
    const int64_t high = attrs.flag("full") ? 1 : capacity - tokens + 1;
    const double rows = double(batch * tokens) * double(d.at("H") * d.at("D"));
    return Problem{.inputs = {{.shape = {batch, tokens, d.at("H"), d.at("D")}},
                              {.shape = cache},
                              {.shape = cache},
                              {.shape = {batch}, .fill = Fill::index, .high = high}},
                   .forward_flops = 4 * rows * double(capacity),
                   .forward_elements = 2 * rows + 2 * double(cache.count())};
  };
  spec.cases = {decode_case(1, 1, 1, 1, 1, 8, true),
                decode_case(2, 1, 7, 2, 1, 16, false),
                decode_case(0, 1, 7, 2, 1, 16, false),
                decode_case(1, 3, 3, 2, 2, 8, true),
                decode_case(3, 2, 33, 4, 2, 24, false),
                decode_case(2, 5, 70, 6, 2, 40, false, Placement::strided),
                decode_case(2, 4, 50, 4, 4, 32, false, Placement::transposed),
                decode_case(5, 1, 300, 8, 2, 64, false),
                decode_case(1, 16, 200, 8, 1, 128, false),
                decode_case(2, 7, 129, 15, 3, 72, false),
                decode_case(2, 2, 65, 2, 1, 256, false),
                decode_case(1, 1, 700, 4, 4, 128, true),
                decode_case(1, 1, 1100, 16, 4, 128, false),
                decode_case(40, 1, 120, 16, 8, 96, false)};
  spec.cases[1].attrs.set("scale", 0.3);
  // Heads that are not whole packs of 8 elements, in a cache of their own size and in one that has room.
  for (const int64_t dim : {1, 20, 36, 100, 250})
    spec.cases.push_back(decode_case(2, 3, 70, 4, 2, dim, false));
  spec.cases.push_back(decode_case(1, 1, 700, 6, 6, 36, true));
  spec.cases.push_back(decode_case(2, 2, 50, 4, 2, 36, false, Placement::strided));
  for (const auto& [dim, of_cache] : {std::pair<int64_t, int64_t>{36, 40}, {20, 32}, {16, 24}, {5, 7}}) {
    spec.cases.push_back(decode_case(2, 2, 65, 4, 2, dim, false));
    spec.cases.back().dims["C"] = of_cache;
  }
  for (Case& c : spec.cases) c.gradcheck = c.dims.at("capacity") <= 70;  // small ones, for the sanitizers
  for (const int64_t capacity : {512, 4096, 32768})
    spec.benches.push_back(decode_case(1, 1, capacity, 32, 32, 128, true));
  spec.benches.push_back(decode_case(8, 1, 4096, 32, 32, 128, true));
  for (const int64_t capacity : {512, 4096, 32768})
    spec.benches.push_back(decode_case(1, 1, capacity, 32, 8, 128, true));
  spec.benches.push_back(decode_case(8, 1, 4096, 32, 8, 128, true));
  spec.benches.push_back(decode_case(1, 4, 4096, 32, 8, 128, true));
  spec.sweep = [](Draw& draw) {
    const int64_t tokens = draw.chance(0.5) ? 1 : draw.size(1, 16), kv_heads = draw.size(1, 32);
    return decode_case(draw.size(1, 64), tokens, draw.size(tokens, 65536),
                       kv_heads * draw.pick({1, 1, 2, 4, 8}), kv_heads, 8 * draw.size(1, 32),
                       draw.chance(0.5));
  };
  spec.tolerance_factor = 3;
  spec.tolerance_reason =
      "bf16 and f16 round P; the kernels' P is relative to the largest score of a piece of the keys, not of "
      "all, "
      "so it rounds elsewhere than the reference's";
  return spec;
}

OpSpec append_spec() {
  OpSpec spec;
  spec.name = "append_to_cache";
  spec.summary = "y = cache with x in the rows before a length on the device (the operator writes in place)";
  spec.inputs = {{"cache", "[B, capacity, Hk, D]", false, false},
                 {"x", "[B, n, Hk, D]", false, false},
                 {"past", "[B]: tokens before the new ones", false, false, index_dtypes()}};
  spec.outputs = {{"y", "[B, capacity, Hk, D]", false}};
  spec.run = [](const std::vector<Tensor>& in, const Attrs&) {
    Tensor cache = in[0].detach().clone();
    append(cache, in[1], in[2], in[1].size(1));
    return std::vector{cache};
  };
  spec.problem = [](const Dims& d, const Attrs&) {
    const int64_t batch = d.at("B"), tokens = d.at("n"), capacity = d.at("capacity");
    const Shape cache{batch, capacity, d.at("Hk"), d.at("D")}, x{batch, tokens, d.at("Hk"), d.at("D")};
    return Problem{.inputs = {{.shape = cache},
                              {.shape = x},
                              {.shape = {batch}, .fill = Fill::index, .high = capacity - tokens + 1}},
                   .forward_elements = 2 * double(x.count() + cache.count())};
  };
  const auto dims = [](int64_t batch, int64_t tokens, int64_t capacity, int64_t heads, int64_t dim) {
    return Dims{{"B", batch}, {"n", tokens}, {"capacity", capacity}, {"Hk", heads}, {"D", dim}};
  };
  spec.cases = {{.dims = dims(1, 1, 1, 1, 1)},
                {.dims = dims(3, 2, 9, 2, 8)},
                {.dims = dims(0, 2, 9, 2, 8)},
                {.dims = dims(2, 3, 3, 4, 16)},
                {.dims = dims(2, 3, 11, 2, 5)},
                {.dims = dims(2, 3, 11, 2, 8), .placement = Placement::strided},
                {.dims = dims(3, 2, 5, 3, 8), .placement = Placement::transposed},
                {.dims = dims(4, 40, 100, 8, 128)}};
  spec.benches = {{.dims = dims(1, 1, 4096, 32, 128)}};
  return spec;
}

}  // namespace

std::string_view decode_attention_variant(const Tensor& q, int64_t dim, const Gpu& gpu) {
  return choose("decode_attention", kVariants, Call{q, dim}, gpu).name;
}

Tensor decode_attention(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& lengths,
                        const DecodeAttentionOptions& options) {
  return attend(q, keys, values, lengths, 0, options);
}

void append_to_cache(Tensor& cache, const Tensor& x, const Tensor& lengths) {
  append(cache, x, lengths, 0);
}

OpSpec rope_to_cache_spec();  // rope_to_cache.cpp

std::vector<OpSpec> decode_attention_specs() {
  return {decode_spec(), append_spec(), rope_to_cache_spec()};
}

}  // namespace tessera::ops

#include "ops/decode_attention/rope_to_cache.h"

#include "autograd/tape.h"
#include "ops/decode_attention/decode_attention_kernels.h"
#include "ops/gemm/gemm.h"
#include "ops/rope/rope.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {
namespace {

void check_operands(const Tensor& qkv, const Tensor& table, const Tensor& lengths, const Tensor& keys,
                    const Tensor& values) {
  const char* const op = "rope_to_cache";
  check(qkv.defined() && table.defined() && lengths.defined() && keys.defined() && values.defined(), op,
        ": qkv, table, lengths, keys or values is undefined");
  check(keys.rank() == 4 && keys.shape() == values.shape(), op, ": keys is ", describe(keys), " and values ",
        describe(values), "; expected one shape [B, capacity, Hk, D]");
  check(qkv.rank() == 4 && qkv.size(0) == keys.size(0) && qkv.size(3) == keys.size(3) && qkv.size(1) >= 1 &&
            qkv.size(2) > 2 * keys.size(2),
        op, ": qkv is ", describe(qkv), " and keys ", describe(keys),
        "; expected [B, n, H + 2 Hk, D] and [B, ", "capacity, Hk, D], n >= 1");
  check(table.rank() == 2 && table.size(1) % 2 == 0 && table.size(1) <= qkv.size(3) &&
            table.dtype() == sum_dtype(qkv.dtype()),
        op, ": table is ", describe(table), "; expected ", sum_dtype(qkv.dtype()),
        " [P, R] with R even and at most ", qkv.size(3));
  check((lengths.dtype() == DType::i32 || lengths.dtype() == DType::i64) &&
            lengths.shape() == Shape{qkv.size(0)},
        op, ": lengths is ", describe(lengths), "; expected i32 or i64 [", qkv.size(0), "]");
  for (const Tensor* x : {&keys, &values}) {
    check(x->dtype() == qkv.dtype(), op, ": qkv is ", describe(qkv), ", but a cache ", describe(*x));
    check(!x->layout().is_expanded() && (x->size(3) == 1 || x->layout().stride(3) == 1), op, ": the cache ",
          describe(*x), " has heads whose elements are not adjacent");
  }
  for (const Tensor* x : {&table, &lengths, &keys, &values})
    check(x->device() == qkv.device(), op, ": qkv is on ", qkv.device().name(), ", another operand on ",
          x->device().name());
  check(!Tape::recording(qkv, keys, values), op, ": has no gradient; run it without a tape");
}

void on_cpu(const RopeToCache& p) {
  const int64_t batch = p.qkv.size(0), tokens = p.qkv.size(1), heads = p.q.size(2), kv_heads = p.keys.size(2);
  const int64_t room = std::min(p.keys.size(1), p.table.size(0));
  std::vector<int64_t> positions;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t past = Indices(p.lengths)[b] + p.more - tokens;
    check(past >= 0 && past <= room - tokens, "rope_to_cache: ", tokens, " new tokens after ", past,
          " of sequence ", b, " do not fit the capacity of ", p.keys.size(1), " and the ", p.table.size(0),
          " positions of the table");
    for (int64_t t = 0; t < tokens; ++t) positions.push_back(past + t);
  }
  const Tensor at = Tensor::from(positions, {batch, tokens});
  const auto part = [&](int64_t begin, int64_t count) { return p.qkv.slice(2, begin, begin + count); };
  const Tensor k = rope(part(heads, kv_heads), p.table, at);
  append_to_cache_cpu({p.keys, k, p.lengths, p.more});
  append_to_cache_cpu({p.values, part(heads + kv_heads, kv_heads), p.lengths, p.more});
  p.q.copy_from(rope(part(0, heads), p.table, at));
}

}  // namespace

Tensor rope_to_cache_past(const Tensor& qkv, const Tensor& table, const Tensor& lengths, int64_t more,
                          Tensor& keys, Tensor& values) {
  check_operands(qkv, table, lengths, keys, values);
  const int64_t heads = qkv.size(2) - 2 * keys.size(2);
  const Tensor q = Tensor::empty({qkv.size(0), qkv.size(1), heads * qkv.size(3)}, qkv.dtype(), qkv.device())
                       .reshape({qkv.size(0), qkv.size(1), heads, qkv.size(3)});
  if (q.count() == 0) return q;
  const bool adjacent = qkv.size(3) == 1 || qkv.layout().stride(3) == 1;
  const RopeToCache problem{.q = q,
                            .qkv = adjacent ? qkv.detach() : qkv.detach().clone(),
                            .table = table.detach().with_rows(),
                            .lengths = lengths.packed(),
                            .keys = keys.detach(),
                            .values = values.detach(),
                            .more = more};
  if (q.device().is_cpu()) {
    on_cpu(problem);
  } else if constexpr (kCuda) {
    rope_to_cache_cuda(problem);
  }
  keys.bump_version();
  values.bump_version();
  return q;
}

Tensor rope_to_cache(const Tensor& qkv, const Tensor& table, const Tensor& lengths, Tensor& keys,
                     Tensor& values, Site site) {
  const CallScope call(site);
  return rope_to_cache_past(qkv, table, lengths, 0, keys, values);
}

}  // namespace tessera::ops

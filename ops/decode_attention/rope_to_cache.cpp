#include "ops/decode_attention/rope_to_cache.h"

#include "autograd/tape.h"
#include "ops/decode_attention/decode_attention_kernels.h"
#include "ops/gemm/gemm.h"
#include "ops/op.h"
#include "ops/rope/rope.h"

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

Tensor run(const Tensor& qkv, const Tensor& table, const Tensor& lengths, int64_t more, Tensor& keys,
           Tensor& values) {
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

}  // namespace

Tensor rope_to_cache(const Tensor& qkv, const Tensor& table, const Tensor& lengths, Tensor& keys,
                     Tensor& values) {
  return run(qkv, table, lengths, 0, keys, values);
}

OpSpec rope_to_cache_spec() {
  OpSpec spec;
  spec.name = "rope_to_cache";
  spec.summary = "q turned; k turned and v in the rows of the caches before a length on the device";
  spec.inputs = {{"qkv", "[B, n, H + 2 Hk, D]", false, false},
                 {"table", "[P, R]: R/2 cosines, R/2 sines", false, false},
                 {"past", "[B]: tokens before the new ones", false, false, index_dtypes()},
                 {"keys", "[B, capacity, Hk, D]", false, false},
                 {"values", "[B, capacity, Hk, D]", false, false}};
  spec.outputs = {{"q", "[B, n, H, D]", false},
                  {"keys", "[B, capacity, Hk, D]", false},
                  {"values", "[B, capacity, Hk, D]", false}};
  spec.run = [](const std::vector<Tensor>& in, const Attrs&) {
    Tensor keys = in[3].detach().clone(), values = in[4].detach().clone();
    const Tensor q =
        run(in[0], in[1].detach().to(sum_dtype(in[0].dtype())), in[2], in[0].size(1), keys, values);
    return std::vector{q, keys, values};
  };
  spec.problem = [](const Dims& d, const Attrs&) {
    const int64_t batch = d.at("B"), tokens = d.at("n"), capacity = d.at("capacity"), kv = d.at("Hk");
    const Shape cache{batch, capacity, kv, d.at("D")};
    const Shape qkv{batch, tokens, d.at("H") + 2 * kv, d.at("D")};
    return Problem{.inputs = {{.shape = qkv},
                              {.shape = {capacity, d.at("R")}},
                              {.shape = {batch}, .fill = Fill::index, .high = capacity - tokens + 1},
                              {.shape = cache},
                              {.shape = cache}},
                   .forward_flops = 3 * double(qkv.count()),
                   .forward_elements = 2 * double(qkv.count()) + 4 * double(cache.count())};
  };
  const auto dims = [](int64_t batch, int64_t tokens, int64_t capacity, int64_t heads, int64_t kv,
                       int64_t dim, int64_t rotary) {
    return Dims{{"B", batch}, {"n", tokens}, {"capacity", capacity}, {"H", heads},
                {"Hk", kv},   {"D", dim},    {"R", rotary}};
  };
  spec.cases = {{.dims = dims(1, 1, 1, 1, 1, 2, 2)},
                {.dims = dims(2, 3, 9, 4, 2, 6, 6)},
                {.dims = dims(2, 2, 7, 2, 1, 16, 16)},
                {.dims = dims(1, 2, 5, 3, 3, 32, 16)},
                {.dims = dims(0, 2, 5, 3, 3, 32, 16)},
                {.dims = dims(2, 2, 7, 3, 1, 9, 4)},
                {.dims = dims(2, 2, 7, 2, 1, 16, 16), .placement = Placement::strided},
                {.dims = dims(2, 2, 7, 2, 1, 16, 12), .placement = Placement::transposed},
                {.dims = dims(3, 8, 50, 8, 2, 128, 128)}};
  spec.benches = {{.dims = dims(1, 1, 4096, 32, 32, 128, 128)}};
  return spec;
}

}  // namespace tessera::ops

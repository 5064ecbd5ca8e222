#include <utility>

#include "ops/decode_attention/decode_attention_kernels.h"
#include "ops/op.h"
#include "ops/sum_dtype.h"

namespace tessera::ops {
namespace {

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
  spec.variants = decode_attention_variants();
  spec.variant_dtypes = {{DType::bf16, DType::f16}, {}};
  spec.run = [](const std::vector<Tensor>& in, const Attrs& attrs) {
    const int64_t more = attrs.flag("full") ? in[1].size(1) : in[0].size(1);
    return std::vector{
        decode_attention_past(in[0], in[1], in[2], in[3], more, {.scale = attrs.number("scale")})};
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
    append_past(cache, in[1], in[2], in[1].size(1));
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
    const Tensor q = rope_to_cache_past(in[0], in[1].detach().to(sum_dtype(in[0].dtype())), in[2],
                                        in[0].size(1), keys, values);
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

}  // namespace

std::vector<OpSpec> decode_attention_specs() {
  return {decode_spec(), append_spec(), rope_to_cache_spec()};
}

}  // namespace tessera::ops

#include "ops/decoder_layers/decoder_layers.h"

#include <algorithm>
#include <type_traits>

#include "autograd/tape.h"
#include "ops/decode_attention/decode_attention.h"
#include "ops/decode_attention/rope_to_cache.h"
#include "ops/decoder_layers/decoder_layers_kernels.h"
#include "ops/decoder_layers/sell_decoder_plan.h"
#include "ops/gemm/gemm.h"
#include "ops/linear/linear.h"
#include "ops/linear/linear_swiglu.h"
#include "ops/norm/norm.h"
#include "ops/pointwise/pointwise.h"
#include "ops/sparse_linear/sparse_linear.h"
#include "ops/variant.h"
#include "runtime/has_cuda.h"

namespace tessera::ops {
namespace {

constexpr const char* kOp = "decoder_layers";

void check_shape(const char* name, const Tensor& tensor, const Tensor& x, const Shape& expected) {
  check(tensor.defined() && tensor.shape() == expected && tensor.dtype() == x.dtype() &&
            tensor.device() == x.device(),
        kOp, ": ", name, " is ", describe(tensor), "; expected ", x.dtype(), " ", expected, " on ",
        x.device().name());
}

// ---- What differs between dense and compressed weights: sizes, checks, multiplication ----

int64_t rows_of(const Tensor& weight) {
  return weight.size(0);
}
int64_t columns_of(const Tensor& weight) {
  return weight.size(1);
}
std::string describe_weight(const Tensor& weight) {
  return text_of(describe(weight));
}
bool is_matrix(const Tensor& weight) {
  return weight.defined() && weight.rank() == 2;
}
void check_weight(const char* name, const Tensor& weight, const Tensor& x, int64_t rows, int64_t columns) {
  check_shape(name, weight, x, {rows, columns});
  check(!Tape::recording(weight), kOp, ": has no gradient; run it without a tape");
}
Tensor multiply(const Tensor& x, const Tensor& weight, const Tensor& bias = {}) {
  return linear(x, weight, bias);
}
Tensor multiply_gated(const Tensor& x, const Tensor& weight) {
  return linear_swiglu(x, weight);
}

using Parts = std::vector<SparseWeight>;

int64_t rows_of(const Parts& parts) {
  int64_t rows = 0;
  for (const SparseWeight& part : parts) rows += part.out;
  return rows;
}
int64_t columns_of(const Parts& parts) {
  return parts[0].in;
}
std::string describe_weight(const Parts& parts) {
  if (parts.empty()) return "without parts";
  return text_of("compressed [", rows_of(parts), ", ", parts[0].in, "] in ", parts.size(), " parts");
}
bool is_matrix(const Parts& parts) {
  return !parts.empty();
}
void check_weight(const char* name, const Parts& parts, const Tensor& x, int64_t rows, int64_t columns) {
  check(!parts.empty() && rows_of(parts) == rows, kOp, ": ", name, " is ", describe_weight(parts),
        "; expected [", rows, ", ", columns, "]");
  for (const SparseWeight& part : parts)
    check(part.in == columns && part.values.defined() && part.dtype() == x.dtype() &&
              part.device() == x.device(),
          kOp, ": a part of ", name, " is ", name_of(part.format), " [", part.out, ", ", part.in,
          "] with values ", describe(part.values), "; expected ", x.dtype(), " with ", columns,
          " columns on ", x.device().name());
}
std::vector<SparsePart> ungated(const Parts& parts) {
  std::vector<SparsePart> all;
  for (const SparseWeight& part : parts) all.push_back({part});
  return all;
}
Tensor multiply(const Tensor& x, const Parts& parts, const Tensor& bias = {}) {
  return sparse_linear(x, ungated(parts), bias);
}
Tensor multiply_gated(const Tensor& x, const Parts& parts) {
  return sparse_linear_swiglu(x, {parts[0]}, {parts[1]});
}

template <class Weight>
void check_operands(const Tensor& x, std::span<const DecoderLayerOf<Weight>> layers, const Tensor& table,
                    const Tensor& lengths) {
  check(x.defined() && x.rank() == 2 && x.size(0) == 1 && x.size(1) > 0 && is_floating(x.dtype()), kOp,
        ": x is ", describe(x), "; expected one token [1, d] of one feature or more");
  check(!layers.empty(), kOp, ": there are no layers");
  const int64_t d = x.size(1);
  const DecoderLayerOf<Weight>& front = layers[0];
  const Tensor& first = front.keys;
  check(first.defined() && first.rank() == 4 && first.size(0) == 1, kOp, ": keys is ", describe(first),
        "; expected [1, capacity, Hk, D]");
  const int64_t kv_heads = first.size(2), head_dim = first.size(3);
  check(is_matrix(front.out) && is_matrix(front.down) && columns_of(front.down) > 0, kOp, ": out is ",
        describe_weight(front.out), " and down ", describe_weight(front.down),
        "; expected [d, H D] and [d, F] of one column or more");
  const int64_t mixed = columns_of(front.out), hidden = columns_of(front.down);
  check(kv_heads >= 1 && head_dim >= 1 && mixed % head_dim == 0 && mixed / head_dim % kv_heads == 0 &&
            mixed > 0,
        kOp, ": out is ", describe_weight(front.out), " and keys ", describe(first),
        "; the columns of out must be a multiple of Hk D");
  for (const DecoderLayerOf<Weight>& layer : layers) {
    check_shape("norm1", layer.norm1, x, {d});
    check_weight("qkv", layer.qkv, x, mixed + 2 * kv_heads * head_dim, d);
    if (layer.qkv_bias.defined()) check_shape("qkv_bias", layer.qkv_bias, x, {rows_of(layer.qkv)});
    check(layer.q_norm.defined() == layer.k_norm.defined(), kOp, ": q_norm is ", describe(layer.q_norm),
          " and k_norm ", describe(layer.k_norm), "; expected both, or neither");
    for (const auto& [name, norm] : {std::pair{"q_norm", &layer.q_norm}, {"k_norm", &layer.k_norm}})
      if (norm->defined()) check_shape(name, *norm, x, {head_dim});
    check_weight("out", layer.out, x, d, mixed);
    check_shape("norm2", layer.norm2, x, {d});
    check_weight("up", layer.up, x, 2 * hidden, d);
    if constexpr (std::is_same_v<Weight, Parts>)
      check(layer.up.size() == 2 && layer.up[0].out == layer.up[1].out, kOp, ": up is ",
            describe_weight(layer.up), "; expected two parts of ", hidden, " rows, gate and up");
    check_weight("down", layer.down, x, d, hidden);
    check_shape("keys", layer.keys, x, first.shape());
    check_shape("values", layer.values, x, first.shape());
    check(!Tape::recording(x, layer.norm1, layer.norm2, layer.qkv_bias, layer.q_norm, layer.k_norm), kOp,
          ": has no gradient; run it without a tape");
  }
  check(table.defined() && table.rank() == 2 && table.size(1) % 2 == 0 && table.size(1) <= head_dim &&
            table.dtype() == sum_dtype(x.dtype()) && table.device() == x.device(),
        kOp, ": table is ", describe(table), "; expected ", sum_dtype(x.dtype()),
        " [P, R] with R even and at most ", head_dim);
  check(lengths.defined() && (lengths.dtype() == DType::i32 || lengths.dtype() == DType::i64) &&
            lengths.shape() == Shape{1} && lengths.device() == x.device(),
        kOp, ": lengths is ", describe(lengths), "; expected i32 or i64 [1] on ", x.device().name());
}

bool in_packs(const Tensor& rows) {
  const int64_t pack = 16 / int64_t(size_of(rows.dtype()));
  return rows.layout().stride(rows.rank() - 1) == 1 && reinterpret_cast<uintptr_t>(rows.raw()) % 16 == 0 &&
         rows.size(-1) % pack == 0 && (rows.rank() == 1 || rows.layout().stride(0) % pack == 0);
}

/// A checked call.
template <class Layer>
struct Call {
  const Tensor& x;
  std::span<const Layer> layers;
  const Tensor &table, &lengths;
  double eps;
};

template <class Layer>
std::string describe_problem(const Call<Layer>& call) {
  return text_of(describe(call.x), " and keys ", describe(call.layers[0].keys));
}

/// The layers one operator after the other, with `lengths` already those after the new token.
template <class Layer>
Tensor run_composed(const Call<Layer>& call) {
  const int64_t head_dim = call.layers[0].keys.size(3);
  Tensor sum = call.x, branch;
  const auto normed = [&](const Tensor& weight) {
    if (!branch.defined()) return rmsnorm(sum, weight, call.eps);
    const AddNorm both = add_rmsnorm(sum, branch, weight, call.eps);
    sum = both.sum;
    return both.y;
  };
  for (const Layer& layer : call.layers) {
    Tensor keys = layer.keys, values = layer.values;
    const Tensor heads = multiply(normed(layer.norm1), layer.qkv, layer.qkv_bias)
                             .reshape({1, 1, rows_of(layer.qkv) / head_dim, head_dim});
    if (layer.q_norm.defined()) {
      const int64_t queries = columns_of(layer.out) / head_dim, kv_heads = keys.size(2);
      const auto normalise = [&](int64_t begin, int64_t count, const Tensor& norm) {
        Tensor own = heads.slice(2, begin, begin + count);
        own.copy_from(rmsnorm(own, norm, call.eps));
      };
      normalise(0, queries, layer.q_norm), normalise(queries, kv_heads, layer.k_norm);
    }
    const Tensor q = rope_to_cache(heads, call.table, call.lengths, keys, values);
    const Tensor mixed = decode_attention(q, keys, values, call.lengths);
    branch = multiply(mixed.reshape({1, columns_of(layer.out)}), layer.out);
    branch = multiply(multiply_gated(normed(layer.norm2), layer.up), layer.down);
  }
  return add(sum, branch);
}

template <class Layer>
Tensor run_persistent(const Call<Layer>& call) {
  const Tensor y = Tensor::empty(call.x.shape(), call.x.dtype(), call.x.device());
  if constexpr (kCuda)
    decoder::decoder_layers_cuda(
        decoder::Problem<Layer>{.y = y,
                                .x = in_packs(call.x) ? call.x.detach() : call.x.detach().clone(),
                                .layers = call.layers,
                                .table = call.table.detach().with_rows(),
                                .lengths = call.lengths.packed(),
                                .eps = call.eps});
  for (const Layer& layer : call.layers) {
    Tensor keys = layer.keys, values = layer.values;
    keys.bump_version();
    values.bump_version();
  }
  return y;
}

template <class Layer>
constexpr Variant<Call<Layer>, Tensor(const Call<Layer>&)> kVariants[] = {
    {"persistent",
     [](const Call<Layer>& call, const Gpu&) -> Reason { return persistent_lacks(call.layers, call.table); },
     is_preferred<Call<Layer>>, run_persistent<Layer>},
    {"composed", lacks_nothing<Call<Layer>>, is_otherwise<Call<Layer>>, run_composed<Layer>}};

template <class Weight>
Tensor run(const Tensor& x, std::span<const DecoderLayerOf<Weight>> layers, const Tensor& table,
           const Tensor& lengths, double eps) {
  check_operands(x, layers, table, lengths);
  const Call<DecoderLayerOf<Weight>> call{x, layers, table, lengths, eps};
  if (x.device().is_cpu()) return run_composed(call);
  return choose(kOp, kVariants<DecoderLayerOf<Weight>>, call, Gpu(x.device())).launch(call);
}

// ---- What the persistent kernels need ----

/// Of everything but the weights.
template <class Layer>
std::string parts_lack(std::span<const Layer> layers, const Tensor& table, int64_t most_layers) {
  const Layer& first = layers[0];
  const Tensor& norm = first.norm1;
  if (!norm.device().is_cuda() || norm.device().info().major < 9) return "a GPU of compute capability 9.0";
  if (norm.dtype() != DType::bf16 && norm.dtype() != DType::f16) return "bf16 or f16";
  if (int64_t(layers.size()) > most_layers) return text_of("at most ", most_layers, " layers");
  const int64_t d = norm.size(0), head_dim = first.keys.size(3);
  if (head_dim != 64 && head_dim != 128) return "a head_dim of 64 or 128";
  if (table.size(1) % 8 != 0) return "rotary dimensions in multiples of 8";
  if (d > decoder::kMaxModelWidth || d % 8 != 0) return "d in multiples of 8, at most 8192";
  if (first.keys.size(1) > (int64_t{1} << 24)) return "a capacity of at most 2^24";
  for (const Layer& layer : layers) {
    const Tensor* const vectors[] = {&layer.norm1, &layer.norm2, &layer.qkv_bias, &layer.q_norm,
                                     &layer.k_norm};
    if (std::ranges::any_of(vectors, [](const Tensor* v) { return v->defined() && !in_packs(*v); }))
      return "weights whose rows are multiples of 16 bytes and lie on 16-byte boundaries";
    for (const Tensor* cache : {&layer.keys, &layer.values}) {
      const Layout &a = cache->layout(), &b = first.keys.layout();
      if (a.stride(3) != 1 || a.stride(1) % 8 != 0 || a.stride(2) % 8 != 0 ||
          reinterpret_cast<uintptr_t>(cache->raw()) % 16 != 0)
        return "caches whose heads lie on 16-byte boundaries";
      if (a.stride(1) != b.stride(1) || a.stride(2) != b.stride(2)) return "layers of one memory layout";
    }
  }
  return {};
}

}  // namespace

Tensor decoder_layers(const Tensor& x, std::span<const DecoderLayer> layers, const Tensor& table,
                      const Tensor& lengths, double eps, Site site) {
  const CallScope call(site);
  return run(x, layers, table, lengths, eps);
}

Tensor decoder_layers(const Tensor& x, std::span<const SparseDecoderLayer> layers, const Tensor& table,
                      const Tensor& lengths, double eps, Site site) {
  const CallScope call(site);
  return run(x, layers, table, lengths, eps);
}

std::vector<std::string> decoder::variants() {
  return names_of(kVariants<DecoderLayer>);
}

std::string persistent_lacks(std::span<const DecoderLayer> layers, const Tensor& table) {
  if (std::string lacks = parts_lack(layers, table, decoder::kMaxDenseLayers); !lacks.empty()) return lacks;
  const DecoderLayer& first = layers[0];
  if (std::max(first.out.size(1), first.down.size(1)) > decoder::kMaxWidth)
    return text_of("at most ", decoder::kMaxWidth, " columns in every weight");
  for (const DecoderLayer& layer : layers)
    for (const auto weight :
         {&DecoderLayer::qkv, &DecoderLayer::out, &DecoderLayer::up, &DecoderLayer::down}) {
      if (!in_packs(layer.*weight))
        return "weights whose rows are multiples of 16 bytes and lie on 16-byte boundaries";
      const Layout &a = (layer.*weight).layout(), &b = (first.*weight).layout();
      if (a.stride(0) != b.stride(0) || a.stride(1) != b.stride(1)) return "layers of one memory layout";
    }
  return {};
}

std::string persistent_lacks(std::span<const SparseDecoderLayer> layers, const Tensor& table) {
  if (std::string lacks = parts_lack(layers, table, decoder::kMaxSellLayers); !lacks.empty()) return lacks;
  const SparseDecoderLayer& first = layers[0];
  for (const SparseDecoderLayer& layer : layers)
    for (const auto weight : {&SparseDecoderLayer::qkv, &SparseDecoderLayer::out, &SparseDecoderLayer::up,
                              &SparseDecoderLayer::down}) {
      const Parts &parts = layer.*weight, &those = first.*weight;
      for (const SparseWeight& part : parts)
        if (part.format != SparseFormat::sell_delta4)
          return text_of("weights in sell-delta4, not in ", name_of(part.format));
      if (!std::ranges::equal(parts, those, {}, &SparseWeight::out, &SparseWeight::out))
        return "layers whose parts have the same rows";
    }
  if (first.qkv.size() > 3 || first.out.size() > 1 || first.down.size() > 1)
    return "at most three parts of qkv, and one of out and down";
  if (columns_of(first.down) % 8 != 0) return "F in multiples of 8";
  if (decoder::plan_sell_decoder(first, first.norm1.device().multiprocessors()).stages <
      decoder::kLeastSellStages)
    return "input vectors that leave room for weights in shared memory";
  return {};
}

}  // namespace tessera::ops

#include "ops/decoder_layers/decoder_layers.h"

#include <algorithm>

#include "autograd/tape.h"
#include "ops/decode_attention/decode_attention.h"
#include "ops/decode_attention/rope_to_cache.h"
#include "ops/decoder_layers/decoder_layers_kernels.h"
#include "ops/gemm/gemm.h"
#include "ops/linear/linear.h"
#include "ops/linear/linear_swiglu.h"
#include "ops/norm/norm.h"
#include "ops/pointwise/pointwise.h"
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

void check_operands(const Tensor& x, std::span<const DecoderLayer> layers, const Tensor& table,
                    const Tensor& lengths) {
  check(x.defined() && x.rank() == 2 && x.size(0) == 1 && is_floating(x.dtype()), kOp, ": x is ", describe(x),
        "; expected one token [1, d]");
  check(!layers.empty(), kOp, ": there are no layers");
  const int64_t d = x.size(1);
  const Tensor& first = layers[0].keys;
  check(first.defined() && first.rank() == 4 && first.size(0) == 1, kOp, ": keys is ", describe(first),
        "; expected [1, capacity, Hk, D]");
  const int64_t kv_heads = first.size(2), head_dim = first.size(3);
  check(layers[0].out.defined() && layers[0].out.rank() == 2 && layers[0].down.defined() &&
            layers[0].down.rank() == 2,
        kOp, ": out is ", describe(layers[0].out), " and down ", describe(layers[0].down),
        "; expected [d, H D] and [d, F]");
  const int64_t mixed = layers[0].out.size(1), hidden = layers[0].down.size(1);
  check(kv_heads >= 1 && head_dim >= 1 && mixed % head_dim == 0 && mixed / head_dim % kv_heads == 0 &&
            mixed > 0,
        kOp, ": out is ", describe(layers[0].out), " and keys ", describe(first),
        "; the columns of out must be a multiple of Hk D");
  for (const DecoderLayer& layer : layers) {
    check_shape("norm1", layer.norm1, x, {d});
    check_shape("qkv", layer.qkv, x, {mixed + 2 * kv_heads * head_dim, d});
    check_shape("out", layer.out, x, {d, mixed});
    check_shape("norm2", layer.norm2, x, {d});
    check_shape("up", layer.up, x, {2 * hidden, d});
    check_shape("down", layer.down, x, {d, hidden});
    check_shape("keys", layer.keys, x, first.shape());
    check_shape("values", layer.values, x, first.shape());
    check(!Tape::recording(x, layer.norm1, layer.qkv, layer.out, layer.norm2, layer.up, layer.down), kOp,
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

/// The layers one operator after the other, with `lengths` already those after the new token.
Tensor composed(const Tensor& x, std::span<const DecoderLayer> layers, const Tensor& table,
                const Tensor& lengths, double eps) {
  const int64_t head_dim = layers[0].keys.size(3);
  Tensor sum = x, branch;
  const auto normed = [&](const Tensor& weight) {
    if (!branch.defined()) return rmsnorm(sum, weight, eps);
    const AddNorm both = add_rmsnorm(sum, branch, weight, eps);
    sum = both.sum;
    return both.y;
  };
  for (const DecoderLayer& layer : layers) {
    Tensor keys = layer.keys, values = layer.values;
    const Tensor heads =
        linear(normed(layer.norm1), layer.qkv).reshape({1, 1, layer.qkv.size(0) / head_dim, head_dim});
    const Tensor q = rope_to_cache(heads, table, lengths, keys, values);
    const Tensor mixed = decode_attention(q, keys, values, lengths);
    branch = linear(mixed.reshape({1, layer.out.size(1)}), layer.out);
    branch = linear(linear_swiglu(normed(layer.norm2), layer.up), layer.down);
  }
  return add(sum, branch);
}

/// A checked call.
struct Call {
  const Tensor& x;
  std::span<const DecoderLayer> layers;
  const Tensor &table, &lengths;
  double eps;
};

std::string describe_problem(const Call& call) {
  return text_of(describe(call.x), " and keys ", describe(call.layers[0].keys));
}

Tensor run_persistent(const Call& call) {
  const Tensor y = Tensor::empty(call.x.shape(), call.x.dtype(), call.x.device());
  if constexpr (kCuda)
    decoder::decoder_layers_cuda({.y = y,
                                  .x = in_packs(call.x) ? call.x.detach() : call.x.detach().clone(),
                                  .layers = call.layers,
                                  .table = call.table.detach().with_rows(),
                                  .lengths = call.lengths.packed(),
                                  .eps = call.eps});
  for (const DecoderLayer& layer : call.layers) {
    Tensor keys = layer.keys, values = layer.values;
    keys.bump_version();
    values.bump_version();
  }
  return y;
}

Tensor run_composed(const Call& call) {
  return composed(call.x, call.layers, call.table, call.lengths, call.eps);
}

constexpr Variant<Call, Tensor(const Call&)> kVariants[] = {
    {"persistent",
     [](const Call& call, const Gpu&) -> Reason { return persistent_lacks(call.layers, call.table); },
     is_preferred<Call>, run_persistent},
    {"composed", lacks_nothing<Call>, is_otherwise<Call>, run_composed}};

}  // namespace

Tensor decoder_layers(const Tensor& x, std::span<const DecoderLayer> layers, const Tensor& table,
                      const Tensor& lengths, double eps) {
  check_operands(x, layers, table, lengths);
  const Call call{x, layers, table, lengths, eps};
  if (x.device().is_cpu()) return run_composed(call);
  return choose(kOp, kVariants, call, Gpu(x.device())).launch(call);
}

std::vector<std::string> decoder::variants() {
  return names_of(kVariants);
}

std::string persistent_lacks(std::span<const DecoderLayer> layers, const Tensor& table) {
  const Tensor& norm = layers[0].norm1;
  if (!norm.device().is_cuda() || norm.device().info().major < 9) return "a GPU of compute capability 9.0";
  if (norm.dtype() != DType::bf16 && norm.dtype() != DType::f16) return "bf16 or f16";
  if (int64_t(layers.size()) > decoder::kMaxLayers) return "at most 256 layers";
  const DecoderLayer& first = layers[0];
  const int64_t d = norm.size(0), head_dim = first.keys.size(3);
  if (head_dim != 64 && head_dim != 128) return "a head_dim of 64 or 128";
  if (table.size(1) % 8 != 0) return "rotary dimensions in multiples of 8";
  if (d > decoder::kMaxModelWidth || d % 8 != 0) return "d in multiples of 8, at most 8192";
  if (std::max(first.out.size(1), first.down.size(1)) > decoder::kMaxWidth)
    return "at most 16384 columns in every weight";
  if (first.keys.size(1) > (int64_t{1} << 24)) return "a capacity of at most 2^24";
  for (const DecoderLayer& layer : layers) {
    for (const Tensor* weight : {&layer.norm1, &layer.qkv, &layer.out, &layer.norm2, &layer.up, &layer.down})
      if (!in_packs(*weight))
        return "weights whose rows are multiples of 16 bytes and lie on 16-byte boundaries";
    for (const Tensor* cache : {&layer.keys, &layer.values})
      if (cache->layout().stride(3) != 1 || cache->layout().stride(1) % 8 != 0 ||
          cache->layout().stride(2) % 8 != 0 || reinterpret_cast<uintptr_t>(cache->raw()) % 16 != 0)
        return "caches whose heads lie on 16-byte boundaries";
    const auto same_rows = [&](const Tensor DecoderLayer::*tensor) {
      const Layout &a = (layer.*tensor).layout(), &b = (first.*tensor).layout();
      return std::equal(a.strides.begin(), a.strides.begin() + a.shape.rank(), b.strides.begin());
    };
    const auto same_cache = [&](const Tensor& cache) {
      const Layout &a = cache.layout(), &b = first.keys.layout();
      return a.stride(1) == b.stride(1) && a.stride(2) == b.stride(2);
    };
    if (!same_rows(&DecoderLayer::qkv) || !same_rows(&DecoderLayer::out) || !same_rows(&DecoderLayer::up) ||
        !same_rows(&DecoderLayer::down) || !same_cache(layer.keys) || !same_cache(layer.values))
      return "layers of one memory layout";
  }
  return {};
}

}  // namespace tessera::ops

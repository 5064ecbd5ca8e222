#include "gpu/barrier.cuh"
#include "gpu/row.cuh"
#include "ops/decode_attention/decode_attention_kernels.h"
#include "ops/rope/rope_rotate.cuh"

/// A thread rotates one pack of 16 bytes of the first half of a head's rotary dimensions and its partner of
/// the second half, or copies a pack of the other dimensions; values are copied as well. A few thousand
/// elements in all: what counts is one launch in place of four (q, k, and the two caches), and that it
/// overlaps the GEMM before and the attention after it. Heads that are not aligned for packs are processed
/// pair by pair.

namespace tessera::ops {
namespace {

using gpu::ceil_div;
using gpu::kPackOf;
using gpu::load_row;
using gpu::store_row;

constexpr int kBlock = 128;

template <class T>
struct Args {
  T *q, *keys, *values;
  const T* qkv;
  const float* table;
  Indices lengths;
  int64_t q_stride[3], qkv_stride[3], key_stride[3], value_stride[3];
  int64_t more, tokens, heads, kv_heads, width, half, rotary, limit, pitch;
  int64_t pairs, work, count;  // of a head: packs of a half; and with those of the rest; of all heads
};

template <class T, int kPack>
__global__ void __launch_bounds__(kBlock) rotate_and_append(Args<T> args) {
  gpu::launch_dependents();
  gpu::grid_dependency_wait();
  const int64_t at = blockIdx.x * int64_t(kBlock) + threadIdx.x;
  if (at >= args.count) return;
  const int64_t all = args.heads + 2 * args.kv_heads;
  const int64_t number = at / args.work, piece = at - number * args.work;
  const int64_t token = number / all, h = number - token * all;
  const int64_t b = token / args.tokens, t = token - b * args.tokens;
  const int64_t length = args.lengths[b] + args.more, position = length - args.tokens + t;
  const bool valid = args.tokens <= length && length <= args.limit;
  const bool is_query = h < args.heads, is_value = h >= args.heads + args.kv_heads;
  if (!valid && !is_query) return;
  const T* const in = args.qkv + b * args.qkv_stride[0] + t * args.qkv_stride[1] + h * args.qkv_stride[2];
  const auto address = [&](T* data, const int64_t(&stride)[3], int64_t row, int64_t head) {
    return data + b * stride[0] + row * stride[1] + head * stride[2];
  };
  T* const out = is_query ? address(args.q, args.q_stride, t, h)
                 : is_value
                     ? address(args.values, args.value_stride, position, h - args.heads - args.kv_heads)
                     : address(args.keys, args.key_stride, position, h - args.heads);
  constexpr bool kWhole = kPack > 1;
  const float nan = __int_as_float(0x7FC00000);
  float first[kPack], second[kPack];
  if (piece >= args.pairs) {
    const int64_t begin = args.rotary + (piece - args.pairs) * kPack;
    load_row(first, in, begin, args.width, kWhole, 0.0f);
#pragma unroll
    for (int k = 0; k < kPack; ++k) first[k] = valid ? first[k] : nan;
    return store_row(out, begin, args.width, kWhole, first);
  }
  const int64_t begin = piece * kPack;
  load_row(first, in, begin, args.half, kWhole, 0.0f);
  load_row(second, in + args.half, begin, args.half, kWhole, 0.0f);
  if (!is_value) {
    const float* const row = args.table + (valid ? position : 0) * args.pitch + begin;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const float cosine = valid ? row[k] : nan, sine = row[args.half + k];
      rotate_pair(first[k], second[k], cosine, sine);
    }
  }
  store_row(out, begin, args.half, kWhole, first);
  store_row(out + args.half, begin, args.half, kWhole, second);
}

}  // namespace

void rope_to_cache_cuda(const RopeToCache& p) {
  dispatch_floating_cuda(p.q.dtype(), "rope_to_cache", [&]<class T>() {
    const int64_t rotary = p.table.size(1), half = rotary / 2, width = p.q.size(3);
    bool whole = true;
    for (const Tensor* x : {&p.q, &p.qkv, &p.keys, &p.values})
      whole = whole && heads_in_packs<T>(*x, half, rotary);
    const int64_t pack = whole ? kPackOf<T> : 1;
    Args<T> args{.q = p.q.data<T>(),
                 .keys = p.keys.data<T>(),
                 .values = p.values.data<T>(),
                 .qkv = p.qkv.data<T>(),
                 .table = p.table.data<float>(),
                 .lengths = Indices(p.lengths),
                 .more = p.more,
                 .tokens = p.q.size(1),
                 .heads = p.q.size(2),
                 .kv_heads = p.keys.size(2),
                 .width = width,
                 .half = half,
                 .rotary = rotary,
                 .limit = std::min(p.keys.size(1), p.table.size(0)),
                 .pitch = p.table.row_stride(),
                 .pairs = half / pack,
                 .work = half / pack + (width - rotary) / pack};
    for (int dim = 0; dim < 3; ++dim) {
      args.q_stride[dim] = p.q.layout().stride(dim), args.qkv_stride[dim] = p.qkv.layout().stride(dim);
      args.key_stride[dim] = p.keys.layout().stride(dim),
      args.value_stride[dim] = p.values.layout().stride(dim);
    }
    args.count = p.qkv.size(0) * args.tokens * p.qkv.size(2) * args.work;
    const gpu::LaunchShape shape{
        .grid = dim3(unsigned(ceil_div(args.count, kBlock))), .block = kBlock, .overlaps = true};
    if (whole)
      gpu::launch(p.q.device(), shape, rotate_and_append<T, kPackOf<T>>, args);
    else
      gpu::launch(p.q.device(), shape, rotate_and_append<T, 1>, args);
  });
}

}  // namespace tessera::ops

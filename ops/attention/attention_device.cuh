#pragma once

#include "gpu/launch.cuh"
#include "ops/attention/attention_kernels.h"

/// What every attention kernel on a GPU is given. Lengths fit in 31 bits (checked by the operator); offsets
/// into tensors are 64-bit.

namespace tessera::ops {

template <class T>
struct AttentionArgs {
  HeadRows<const T> q, k, v, o, dout;  // o and dout only in backward
  HeadRows<T> out, dq, dk, dv;
  float* lse;          // [B * H, lse_stride], natural logarithm
  int64_t lse_stride;  // elements
  float* lse2;         // backward: lse * log2(e), or +inf where a query sees nothing or is none: P is then 0
  float* delta;        // backward: rowsum(o dout); both [B * H, padded_queries]
  int64_t padded_queries;  // queries rounded up to kAttentionPad
  int heads, queries, keys, dim;
  bool causal;
  float scale;           // of the scores
  float scale2;          // scale * log2(e): P = 2^(scale2 q.k - lse2)
  float gradient_scale;  // of dq and dk

  /// A row of the statistics, as offset.
  __device__ int64_t statistics_row(int head_row) const { return head_row * padded_queries; }
  /// Keys that query i sees, for i up to a tile past the last query.
  __device__ int key_limit(int i) const { return causal ? max(0, min(keys, i + 1 + keys - queries)) : keys; }
  /// Whether `causal` hides key j from query i. Without it, and beyond either length, nothing is hidden here.
  __device__ bool key_hidden(int i, int j) const { return causal && i + keys - queries < j; }
  /// The first query that sees key j.
  __device__ int first_query(int j) const { return causal ? max(0, j + queries - keys) : 0; }
};

/// Rows of the backward statistics are padded to the largest query tile of any kernel.
inline constexpr int kAttentionPad = 64;

/// The block's problem: tiles of one (batch, head) are neighbours in the grid, so that they share its keys
/// (or queries) in L2.
struct AttentionBlock {
  int head_row;  // b * heads + h
  int b, h;
  int tile;

  /// The block's index is read by a volatile instruction, so that the compiler computes these again when a
  /// kernel asks again after its loop, instead of keeping four registers through it.
  __device__ AttentionBlock(int heads, int tiles) {
    unsigned index;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
    head_row = int(index / unsigned(tiles));
    tile = int(index % unsigned(tiles));
    b = head_row / heads;
    h = head_row % heads;
  }
};

/// Launches one block a tile of every head. The grid's x alone is used: y and z end at 65535.
template <class T, class Kernel>
void launch_attention(const Tensor& q, const AttentionArgs<T>& args, int64_t length, int tile_rows,
                      int threads, size_t shared_bytes, Kernel kernel) {
  const int64_t tiles = gpu::ceil_div(length, tile_rows), blocks = tiles * q.size(0) * q.size(2);
  check(blocks <= int64_t{0x7FFFFFFF}, "attention: ", describe(q), " needs ", blocks,
        " blocks; expected at most 2^31 - 1 (split the batch)");
  gpu::launch(q.device(), {dim3(unsigned(blocks)), dim3(unsigned(threads)), shared_bytes}, kernel, args);
}

template <class T>
AttentionArgs<T> attention_args(const Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                                const AttentionOptions& options) {
  constexpr double kLog2E = 1.44269504088896340736;
  AttentionArgs<T> args{};
  args.q = const_head_rows<T>(q);
  args.k = const_head_rows<T>(k);
  args.v = const_head_rows<T>(v);
  args.lse = lse.data<float>();
  args.lse_stride = lse.row_stride();
  args.heads = int(q.size(2));
  args.queries = int(q.size(1));
  args.keys = int(k.size(1));
  args.dim = int(q.size(3));
  args.causal = options.causal;
  args.scale = float(options.scale);
  args.scale2 = float(options.scale * kLog2E);
  args.gradient_scale = float(gradient_scale(options.scale, k.size(1)));
  return args;
}

/// Calls `f.template operator()<kD>()` with the padded head size.
template <class F>
void dispatch_head_size(int64_t dim, F&& f) {
  if (dim <= 32) return f.template operator()<32>();
  if (dim <= 64) return f.template operator()<64>();
  if (dim <= 96) return f.template operator()<96>();
  f.template operator()<128>();
}

// f32 in plain arithmetic (attention_f32.cu); 16-bit backward (attention_backward.cu).
void attention_forward_f32_cuda(const Tensor& q, const AttentionArgs<float>& args);
void attention_backward_f32_cuda(const Tensor& q, const AttentionArgs<float>& args);

}  // namespace tessera::ops

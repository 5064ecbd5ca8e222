#pragma once

#include "gpu/launch.cuh"
#include "ops/attention/attention_sequences.cuh"

/// Kernel arguments and block coordinates of the attention variants mma and f32. Lengths fit in 31 bits
/// (checked by the operator); offsets into tensors are 64-bit.

namespace tessera::ops {

template <class T>
struct AttentionArgs {
  HeadRows<const T> q, k, v, o, dout;  // o and dout only in backward
  HeadRows<T> out, dq, dk, dv;
  CuSeqlens seqlens;
  float* lse;          // [B * H, lse_stride], natural logarithm
  int64_t lse_stride;  // elements
  float* lse2;   // backward: lse * log2(e); +inf (so P = 0) for padding rows and queries that see no key
  float* delta;  // backward: rowsum(o dout), times dropout's 1 - p; both [B * H, padded_queries]
  int64_t padded_queries;      // tiles of kAttentionPad queries, or slots of them, times kAttentionPad
  int heads, kv_heads, group;  // group: query heads that read one key head
  int queries, keys, dim;      // of fixed lengths
  bool causal;
  float scale;   // of the scores, and of dq and dk
  float scale2;  // scale * log2(e): P = 2^(scale2 q.k - lse2)
  AttentionDropout drop;
  BiasRows<T> bias;
  T* dbias;  // backward: where the kernel that owns queries stores the gradient of the bias, or null
  int64_t dbias_row;
  float* key_sums;  // backward: where the kernel that owns keys stores dS summed over the queries, or null:
                    // [B, H, keys], with rows of key_sums_row elements
  int64_t key_sums_row;
};

/// Rows of the backward statistics are padded to the largest query tile of any kernel.
inline constexpr int kAttentionPad = 64;

/// The coordinates of a block: head, tile, and sequence. In shared memory, where kernels read them again
/// instead of keeping them in registers. Tiles of one head are neighbours in the grid, so they share its keys
/// (or queries) in L2.
struct AttentionCoord {
  int b, head, kv_head;  // the query head, or the first of those that read the key head
  AttentionSequence sequence;

  /// Keys that query i sees, for i up to a tile past the last query.
  __device__ int key_limit(bool causal, int i) const {
    return causal ? max(0, min(sequence.keys, i + 1 + sequence.keys - sequence.queries)) : sequence.keys;
  }
  /// Whether the causal mask hides key j from query i. Does not check i and j against the lengths.
  __device__ bool is_masked(bool causal, int i, int j) const {
    return causal && i + sequence.keys - sequence.queries < j;
  }
  /// The first query that sees key j.
  __device__ int first_query(bool causal, int j) const {
    return causal ? max(0, j + sequence.queries - sequence.keys) : 0;
  }
  /// Rows of the sequence, in the block's head or in another.
  template <class T>
  __device__ T* q_row(const HeadRows<T>& x, int h, int i) const {
    return x.at(b, h, int64_t(sequence.q_first) + i);
  }
  template <class T>
  __device__ T* k_row(const HeadRows<T>& x, int h, int j) const {
    return x.at(b, h, int64_t(sequence.k_first) + j);
  }
  template <class T>
  __device__ int64_t lse_at(const AttentionArgs<T>& args, int i) const {
    return (int64_t(b) * args.heads + head) * args.lse_stride + sequence.q_first + i;
  }
  /// The statistics of the sequence's first query in query head h.
  template <class T>
  __device__ int64_t statistics_at(const AttentionArgs<T>& args, int h) const {
    const int slot = args.seqlens.packed() ? sequence.q_first / kAttentionPad + sequence.index : 0;
    return (int64_t(b) * args.heads + h) * args.padded_queries + slot * kAttentionPad;
  }
  /// The factor of dq and dk: see gradient_scale.
  template <bool kDrops, class T>
  __device__ float grad_scale(const AttentionArgs<T>& args) const {
    return sequence.keys == 1 ? 0.0f : (kDrops ? args.scale * args.drop.scale : args.scale);
  }
  /// Row of the first query of query head h, for dropout. (For packed sequences b is 0.)
  template <class T>
  __device__ uint32_t drop_row(const AttentionArgs<T>& args, int h) const {
    return drop_head_row(uint32_t(b), args.queries, sequence.q_first, args.heads, uint32_t(h));
  }
};

/// All threads of a block: decodes its coordinates, for tiles of `tile_rows` queries (kQueries) or keys;
/// under a causal mask the longest tiles first. Returns false if the block has no tile.
template <bool kQueries, class T>
__device__ __forceinline__ bool find_coord(const AttentionArgs<T>& args, int tile_rows,
                                           AttentionCoord& coord) {
  if (threadIdx.x < 32) {
    const int heads = kQueries ? args.heads : args.kv_heads;
    const int length = kQueries ? (args.seqlens.packed() ? args.seqlens.q_rows : args.queries)
                                : (args.seqlens.packed() ? args.seqlens.k_rows : args.keys);
    const unsigned slots = unsigned(args.seqlens.slots(length, tile_rows));
    const int head_row = int(blockIdx.x / slots), slot = int(blockIdx.x % slots);
    AttentionSequence sequence;
    if (args.seqlens.packed()) {
      sequence = args.seqlens.template find_in<kQueries>(args.seqlens.template order<kQueries>(tile_rows),
                                                         slot, tile_rows);
    } else {
      sequence = {0, 0, args.queries, 0, args.keys, slot, true};
    }
    if (kQueries && args.causal) sequence.tile = (sequence.queries - 1) / tile_rows - sequence.tile;
    const int head = head_row % heads;
    if (threadIdx.x == 0)
      coord = {head_row / heads, kQueries ? head : head * args.group, kQueries ? head / args.group : head,
               sequence};
  }
  __syncthreads();
  return coord.sequence.has_tile;
}

/// Launches one block per tile, or tile slot, of every head of x [B, L, H, D]. The grid is one-dimensional,
/// since y and z are limited to 65535.
template <class T, class Kernel>
void launch_attention(const Tensor& x, const AttentionArgs<T>& args, int tile_rows, int threads,
                      size_t shared_bytes, Kernel kernel) {
  const int64_t blocks = args.seqlens.slots(x.size(1), tile_rows) * x.size(0) * x.size(2);
  check(blocks <= int64_t{0x7FFFFFFF}, "attention: ", describe(x), " needs ", blocks,
        " blocks; expected at most 2^31 - 1 (split the batch)");
  gpu::launch(x.device(), {dim3(unsigned(blocks)), dim3(unsigned(threads)), shared_bytes}, kernel, args);
}

template <class T>
AttentionArgs<T> attention_args(const Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                                const AttentionProblem& problem) {
  constexpr double kLog2E = 1.44269504088896340736;
  AttentionArgs<T> args{};
  args.q = const_head_rows<T>(q);
  args.k = const_head_rows<T>(k);
  args.v = const_head_rows<T>(v);
  args.seqlens = cu_seqlens(problem, q, k);
  args.lse = lse.data<float>();
  args.lse_stride = lse.row_stride();
  args.heads = int(q.size(2));
  args.kv_heads = int(k.size(2));
  args.group = args.heads / args.kv_heads;
  args.queries = int(q.size(1));
  args.keys = int(k.size(1));
  args.dim = int(q.size(3));
  args.causal = problem.causal;
  args.scale = float(problem.scale);
  args.scale2 = float(problem.scale * kLog2E);
  args.drop = problem.drop;
  args.bias = bias_rows<T>(problem.bias);
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

/// Calls `f.template operator()<kD, kDrops>()` with head sizes padded to 64 or 128.
template <class F>
void dispatch_wide_head_size(int64_t dim, const AttentionDropout& drop, F&& f) {
  const auto sized = [&]<bool kDrops>() {
    if (dim <= 64) return f.template operator()<64, kDrops>();
    f.template operator()<128, kDrops>();
  };
  if (drop.drops()) return sized.template operator()<true>();
  sized.template operator()<false>();
}

/// Calls `f.template operator()<kD, kDrops>()`. With dropout head sizes are padded to 64 or 128.
template <class F>
void dispatch_head_size(int64_t dim, const AttentionDropout& drop, F&& f) {
  if (!drop.drops()) return dispatch_head_size(dim, [&]<int kD>() { f.template operator()<kD, false>(); });
  if (dim <= 64) return f.template operator()<64, true>();
  f.template operator()<128, true>();
}

/// Calls `f.template operator()<kD, kDrops, kBias>()`. With a bias, too, head sizes are padded to 64 or 128.
template <class T, class F>
void dispatch_kernel(const AttentionArgs<T>& args, F&& f) {
  if (args.bias.data)
    return dispatch_wide_head_size(args.dim, args.drop,
                                   [&]<int kD, bool kDrops>() { f.template operator()<kD, kDrops, true>(); });
  dispatch_head_size(args.dim, args.drop,
                     [&]<int kD, bool kDrops>() { f.template operator()<kD, kDrops, false>(); });
}

// f32 in plain arithmetic (attention_f32.cu) and in TF32.
void attention_forward_f32_cuda(const Tensor& q, const AttentionArgs<float>& args);
void attention_backward_f32_cuda(const Tensor& q, const Tensor& k, const AttentionArgs<float>& args);
void attention_forward_tf32_cuda(const Tensor& q, const AttentionArgs<float>& args);
void attention_backward_tf32_cuda(const Tensor& q, const Tensor& k, const AttentionArgs<float>& args);

// The gradient of a bias that broadcasts over batches or heads, but not over queries: problem.dbias. Reads
// the statistics of backward.
void attention_backward_bias_cuda(const Tensor& q, const Tensor& k, const AttentionArgs<bf16>& args,
                                  const AttentionProblem& problem);
void attention_backward_bias_cuda(const Tensor& q, const Tensor& k, const AttentionArgs<f16>& args,
                                  const AttentionProblem& problem);
void attention_backward_bias_tf32_cuda(const Tensor& q, const Tensor& k, const AttentionArgs<float>& args,
                                       const AttentionProblem& problem);
void attention_backward_bias_f32_cuda(const Tensor& q, const Tensor& k, const AttentionArgs<float>& args,
                                      const AttentionProblem& problem);

}  // namespace tessera::ops

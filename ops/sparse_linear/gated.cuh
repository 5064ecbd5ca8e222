#pragma once

#include "gpu/barrier.cuh"
#include "gpu/global.cuh"
#include "gpu/row.cuh"
#include "ops/sparse_linear/gate_math.h"
#include "ops/sparse_linear/sparse_linear_kernels.h"

/// What the kernels of compressed weights share: the gate, and the sum over the blocks of a cluster.

namespace tessera::ops::sparse {

using gpu::kWarp;

/// A gate on the device: inputs count by their bit, by their value, or all of them.
struct DeviceGate {
  const uint32_t* bits = nullptr;  // [T, words]; null: by value
  const float* scales = nullptr;   // null: 1
  float threshold = 0;
  int words = 0;
  bool is_open = true;  // all count

  __device__ __forceinline__ bool counts(int token, int j, float x) const {
    if (is_open) return true;
    if (bits) return bits[int64_t(token) * words + j / 32] >> (j % 32) & 1;
    return passes(gate_value(x, scales ? scales[j] : 1.0f), threshold);
  }
};

/// `bits` keeps the memory of the gate's bits.
inline DeviceGate device_gate(const Gate& gate, const Tensor& x, Tensor& bits) {
  DeviceGate made;
  if (gate.kind == Gate::Kind::none) return made;
  made.is_open = false;
  if (gate.kind == Gate::Kind::top_k) {
    bits = gate_bits_cuda(x, gate);
    made.bits = reinterpret_cast<const uint32_t*>(bits.data<int32_t>());
    made.words = int(bits.size(1));
    return made;
  }
  made.scales = gate.scales.defined() ? gate.scales.data<float>() : nullptr;
  made.threshold = float(gate.threshold);
  return made;
}

/// An operand whose last dimension is dense.
inline Tensor dense_rows(const Tensor& x) {
  return x.defined() && x.size(1) > 1 && x.layout().stride(1) != 1 ? x.clone() : x;
}

/// Where results go: y[t, row] = sum + bias[row] + residual[t, row], rounded once.
template <class T>
struct Output {
  T* y;
  const T *bias, *residual;  // or null
  int64_t y_stride, residual_stride;
  int out;

  __device__ __forceinline__ void store(int token, int row, float sum) const {
    if (bias) sum += float(bias[row]);
    if (residual) sum += float(residual[token * residual_stride + row]);
    y[token * y_stride + row] = T(sum);
  }
};

template <class T>
Output<T> output_of(const SparsePartCall& call, const Tensor& residual) {
  return {.y = call.y.data<T>(),
          .bias = call.bias.defined() ? call.bias.data<T>() : nullptr,
          .residual = residual.defined() ? residual.data<T>() : nullptr,
          .y_stride = call.y.layout().stride(0),
          .residual_stride = residual.defined() ? residual.layout().stride(0) : 0,
          .out = int(call.weight.out)};
}

/// What the blocks of a cluster hold at this address of their shared memory, added in the order of the
/// blocks.
__device__ __forceinline__ float add_blocks(const float* from, int blocks) {
  const uint32_t at = gpu::shared_address(from);
  float sum = gpu::load_cluster(gpu::cluster_address(at, 0));
  for (int other = 1; other < blocks; ++other)
    sum += gpu::load_cluster(gpu::cluster_address(at, uint32_t(other)));
  return sum;
}

/// Calls visit(index) for `count` elements of shared memory, each in one block of the cluster, when all
/// blocks have written theirs; no block ends before. All threads of the cluster.
template <class Visit>
__device__ __forceinline__ void visit_in_cluster(int count, int blocks, Visit&& visit) {
  gpu::cluster_sync();  // all sums are written
  const int rank = int(gpu::cluster_rank()), share = (count + blocks - 1) / blocks,
            end = min(count, (rank + 1) * share);
  for (int i = rank * share + int(threadIdx.x); i < end; i += int(blockDim.x)) visit(i);
  gpu::cluster_sync();  // no block ends while another reads its sums
}

/// Adds what the blocks of a cluster hold in `sums`, at the same place in each, in the order of the blocks,
/// and calls store(index, sum) for all `count` elements, each in one block. All threads of the cluster.
template <class Store>
__device__ __forceinline__ void reduce_cluster(const float* sums, int count, int blocks, Store&& store) {
  visit_in_cluster(count, blocks, [&](int i) { store(i, add_blocks(sums + i, blocks)); });
}

/// Blocks that share the sums of one tile of outputs, a power of two up to 8: so many that `tiles` of them
/// give each SM `per_sm` blocks, but each has `least` of the `steps` along the inputs.
inline int cluster_blocks(int64_t tiles, int64_t steps, int64_t least, int per_sm, Device device) {
  const int64_t wanted = int64_t(per_sm) * Gpu(device).multiprocessors;
  int blocks = 1;
  while (blocks < 8 && tiles * blocks < wanted && steps / (2 * blocks) >= least) blocks *= 2;
  return blocks;
}

}  // namespace tessera::ops::sparse

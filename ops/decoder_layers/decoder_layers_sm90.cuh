#pragma once

#include "gpu/launch.cuh"
#include "gpu/reduce.cuh"
#include "ops/decoder_layers/decoder_attention.cuh"

/// All layers of a decoder for one token, in one persistent kernel.
///
/// A token of a 7B model reads 13 GB of weights once: 2 FLOP per 2 bytes, bound by memory bandwidth. One
/// kernel per GEMV loses 2 to 5 us at its ends (docs/ops/linear.md) and leaves the memory idle during the
/// small kernels between. Here every block (one per SM, co-resident) walks through the phases of all layers,
///   0 qkv = W_qkv rmsnorm(x)      1 attention over the cache, 4 blocks per key head and more
///   2 x += W_out attention        3 h = silu(W_gate n) (W_up n), n = rmsnorm(x)        4 x += W_down h
/// with a grid-wide barrier after each, while loads continue across the barriers: each warp streams the
/// weights and the cached keys and values that it reads through its own pipeline in shared memory
/// (decoder_ring.cuh: stages of 4 KiB, weights by TMA, keys and values by cp.async; up to 192 KiB per SM,
/// enough for 6 us), whose load cursor runs ahead across phase and layer boundaries. A barrier and the reload
/// of the small input vector take 2 to 3 us, during which the pipeline fills.
///
/// GEMV: decoder_dense.cuh, decoder_sell.cuh.
///
/// Attention (decoder_attention.cuh): a unit is one key head, up to 4 of its query heads, and one split of
/// the keys. With several splits the block that finishes last adds the partial results in the order of the
/// splits.
///
/// Sums have a fixed order given the number of SMs: results are bitwise reproducible on one GPU.
///
/// All blocks must be co-resident, or the spin-wait of the grid barrier deadlocks: the launch is cooperative,
/// which the driver refuses where it cannot be so.

namespace tessera::ops::decoder {
namespace {

constexpr int kStreamPacks = kMaxModelWidth / (kThreads * 4);  // float4 of the residual stream per thread
constexpr float kLog2e = 1.4426950408889634f;

/// Shared memory after the rings; the input vector of the phase's GEMV follows it, then what Weights needs.
struct Small {
  gpu::Barrier full[kWarps][kMostStages];
  float reduce[kWarp];
  float angles[128];  // of the new token's position: cosines, then sines
  int ticket;
};
constexpr size_t kSmallBytes = (sizeof(Small) + 127) / 128 * 128;

__device__ __forceinline__ void grid_barrier_arrive(int* barrier) {
  __syncthreads();
  if (threadIdx.x == 0) {
    gpu::red_add_release(barrier, 1);
  }
}
__device__ __forceinline__ void grid_barrier_wait(int* barrier, int arrivals) {
  if (threadIdx.x == 0)
    while (gpu::load_acquire(barrier) < arrivals) {
    }
  __syncthreads();
}

/// vector = rmsnorm(residual stream), rounded to T.
template <class Weights, class T = typename Weights::T>
__device__ __forceinline__ void norm_vector(const Args<Weights>& args, const T* x, const T* weight, T* vector,
                                            float* scratch) {
  float4 stream[kStreamPacks];
  gpu::Pack<T, 4>
      gains[kStreamPacks];  // with the stream: one after the other they would wait for memory twice
  float squares = 0;
#pragma unroll
  for (int p = 0; p < kStreamPacks; ++p) {
    const int k = (p * kThreads + int(threadIdx.x)) * 4;
    if (k >= args.d) continue;
    gains[p] = gpu::load_pack<4>(weight + k);
    if (x) {  // the first layer reads the kernel's input
      const gpu::Pack<T, 4> pack = gpu::load_pack<4>(x + k);
      stream[p] = {float(pack.at[0]), float(pack.at[1]), float(pack.at[2]), float(pack.at[3])};
    } else {
      stream[p] = __ldcg(reinterpret_cast<const float4*>(args.stream + k));
    }
    squares += stream[p].x * stream[p].x + stream[p].y * stream[p].y + stream[p].z * stream[p].z +
               stream[p].w * stream[p].w;
  }
  const float mean = gpu::block_reduce<gpu::Sum>(squares, scratch) / float(args.d);
  const float rstd = rsqrtf(mean + args.eps);
#pragma unroll
  for (int p = 0; p < kStreamPacks; ++p) {
    const int k = (p * kThreads + int(threadIdx.x)) * 4;
    if (k >= args.d) continue;
    const gpu::Pack<T, 4>& gain = gains[p];
    gpu::Pack<T, 4> out;
    out.at[0] = T(stream[p].x * rstd * float(gain.at[0]));
    out.at[1] = T(stream[p].y * rstd * float(gain.at[1]));
    out.at[2] = T(stream[p].z * rstd * float(gain.at[2]));
    out.at[3] = T(stream[p].w * rstd * float(gain.at[3]));
    gpu::store_pack(vector + k, out);
  }
}

template <class Weights, int kDim>
__global__ void __launch_bounds__(kThreads, 1) run_layers(const __grid_constant__ Args<Weights> args) {
  using T = typename Weights::T;
  extern __shared__ __align__(128) char memory[];
  const uint32_t ring_bytes = uint32_t(args.stages) * Weights::kStageBytes;
  Small& small = *reinterpret_cast<Small*>(memory + kWarps * ring_bytes);
  T* const vector = reinterpret_cast<T*>(reinterpret_cast<char*>(&small) + kSmallBytes);
  const int lane = int(threadIdx.x) % kWarp, warp = gpu::uniform(int(threadIdx.x) / kWarp);
  const int blocks = int(gridDim.x);

  if (threadIdx.x == 0) {
    for (int w = 0; w < kWarps; ++w)
      for (int stage = 0; stage < args.stages; ++stage) small.full[w][stage].init(1);
    gpu::fence_barrier_init();
  }
  __syncthreads();
  Ring<Weights, kDim> ring(args, memory + uint32_t(warp) * ring_bytes, small.full[warp], warp, lane);
  const int64_t position = args.lengths[0] - 1;
  if (0 <= position && position < args.limit)
    for (int i = int(threadIdx.x); i < args.rotary; i += kThreads)
      small.angles[i] = args.table[position * args.table_stride + i];

  int arrivals = 0;
  const auto grid_barrier = [&] {
    grid_barrier_arrive(args.barrier);
    arrivals += blocks;
    grid_barrier_wait(args.barrier, arrivals);
  };
  // One loop over the phases of all layers, so the code of the GEMV exists once and stays in the instruction
  // cache.
#pragma unroll 1
  for (int l = 0, phase = kQkv; l < args.layers;) {
    const Layer<Weights>& layer = args.layer[l];
    if (phase == kKeys) {
      for (int unit = int(blockIdx.x); unit < args.units(); unit += blocks)
        attend<Weights, kDim>(args, layer, ring, *reinterpret_cast<AttentionShared<T, kDim>*>(vector),
                              small.angles, small.ticket, unit);
    } else {
      if (phase == kQkv || phase == kUp)
        norm_vector(args, l == 0 && phase == kQkv ? args.x : nullptr,
                    phase == kQkv ? layer.norm1 : layer.norm2, vector, small.reduce);
      else
        Weights::load_vector(args, phase, vector);
      Weights::pad_vector(args, phase, vector);
      __syncthreads();
      Weights::multiply(args, ring, l, phase, vector, reinterpret_cast<char*>(vector) + args.vector_bytes,
                        warp, lane);
    }
    if (++phase == kPhases) phase = kQkv, ++l;
    if (l < args.layers) grid_barrier();
  }
}

/// Memory of what phases pass on. It lives until the launch is issued.
struct Scratch {
  Tensor counters, floats, vectors;
};

/// Everything but the weights and the shared memory. `inputs`: of the output projection and of the last GEMV;
/// `rows`: of the first. `floats`: how many more f32 the weights need; they are the last ones of the scratch
/// memory.
template <class Weights, class Problem>
Args<Weights> args_of(const Problem& p, std::pair<int64_t, int64_t> inputs, int64_t rows, Scratch& scratch,
                      int64_t floats = 0) {
  using T = typename Weights::T;
  const Device device = p.x.device();
  const auto& first = p.layers[0];
  const auto [mixed, hidden] = inputs;
  const int64_t d = p.x.size(1), head_dim = first.keys.size(3), kv_heads = first.keys.size(2),
                heads = mixed / head_dim, tiles = gpu::ceil_div(heads / kv_heads, kGroup),
                splits = std::max<int64_t>(1, device.multiprocessors() / (kv_heads * tiles)),
                parts = heads * splits;
  scratch = {.counters = Tensor::zeros({1 + kv_heads * tiles}, DType::i32, device),
             .floats = Tensor::empty_packed(Shape{(d + rows + parts * (head_dim + 2) + 3) / 4 * 4 + floats},
                                            DType::f32, device),
             .vectors = Tensor::empty_packed(Shape{mixed + hidden}, p.x.dtype(), device)};
  float* const stream = scratch.floats.data<float>();
  float* const partial = stream + d + rows;
  Args<Weights> args{{.y = p.y.template data<T>(),
                      .x = p.x.template data<T>(),
                      .table = p.table.template data<float>(),
                      .lengths = Indices(p.lengths),
                      .stream = stream,
                      .qkv = stream + d,
                      .mixed = scratch.vectors.data<T>(),
                      .hidden = scratch.vectors.data<T>() + mixed,
                      .partial = partial,
                      .stats = reinterpret_cast<float2*>(partial + parts * head_dim),
                      .barrier = scratch.counters.data<int32_t>(),
                      .done = scratch.counters.data<int32_t>() + 1,
                      .key_stride = {first.keys.layout().stride(1), first.keys.layout().stride(2)},
                      .table_stride = p.table.row_stride(),
                      .columns = {int(d), 0, int(mixed), int(d), int(hidden)},
                      .layers = int(p.layers.size()),
                      .d = int(d),
                      .heads = int(heads),
                      .kv_heads = int(kv_heads),
                      .rotary = int(p.table.size(1)),
                      .tiles = int(tiles),
                      .splits = int(splits),
                      .limit = int(std::min(first.keys.size(1), p.table.size(0))),
                      .stages = kMostStages,
                      .vector_bytes = 0,
                      .eps = float(p.eps),
                      .scale = kLog2e / std::sqrt(float(head_dim))},
                     {},
                     {}};
  for (size_t l = 0; l < p.layers.size(); ++l) {
    const auto& from = p.layers[l];
    Layer<Weights>& layer = args.layer[l];
    const auto data_or_null = [](const Tensor& tensor) {
      return tensor.defined() ? tensor.template data<T>() : nullptr;
    };
    layer.norm1 = from.norm1.template data<T>(), layer.norm2 = from.norm2.template data<T>();
    layer.qkv_bias = data_or_null(from.qkv_bias);
    layer.q_norm = data_or_null(from.q_norm), layer.k_norm = data_or_null(from.k_norm);
    layer.keys = from.keys.template data<T>(), layer.values = from.values.template data<T>();
  }
  return args;
}

/// Calls run<T, kDim>() for the dtype and head_dim of the problem.
template <class Problem, class Run>
void with_dtype_and_dim(const Problem& p, Run&& run) {
  const auto of_dim = [&]<class T>() {
    if (p.layers[0].keys.size(3) == 64)
      run.template operator()<T, 64>();
    else
      run.template operator()<T, 128>();
  };
  if (p.x.dtype() == DType::bf16)
    of_dim.template operator()<bf16>();
  else
    of_dim.template operator()<f16>();
}

/// Shared memory for the input vector of a GEMV, or for the attention.
template <class Weights, int kDim>
size_t vector_area(size_t vector_bytes) {
  return (std::max(vector_bytes, sizeof(AttentionShared<typename Weights::T, kDim>)) + 127) / 128 * 128;
}
template <class Weights, int kDim>
size_t shared_bytes(int stages, size_t vector_bytes) {
  return size_t(kWarps) * size_t(stages) * Weights::kStageBytes + kSmallBytes +
         vector_area<Weights, kDim>(vector_bytes);
}

/// `extra`: bytes of shared memory after the input vector.
template <class Weights, int kDim>
void launch(Device device, Args<Weights>& args, size_t vector_bytes, size_t extra) {
  args.vector_bytes = int(vector_area<Weights, kDim>(vector_bytes));
  gpu::launch(device,
              {.grid = dim3(unsigned(device.multiprocessors())),
               .block = kThreads,
               .shared_bytes = shared_bytes<Weights, kDim>(args.stages, vector_bytes) + extra,
               .cooperative = true},
              run_layers<Weights, kDim>, args);
}

}  // namespace
}  // namespace tessera::ops::decoder

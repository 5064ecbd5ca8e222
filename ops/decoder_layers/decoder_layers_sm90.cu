#include "gpu/launch.cuh"
#include "gpu/mma.cuh"
#include "ops/decoder_layers/decoder_attention.cuh"
#include "ops/swiglu/swiglu_math.h"

/// All layers of a decoder for one token, in one persistent kernel.
///
/// A token of a 7B model reads 13 GB of weights once: 2 FLOP per 2 bytes, bound by memory bandwidth. One
/// kernel per GEMV loses 2 to 5 us at its ends (docs/ops/linear.md) and leaves the memory idle during the
/// small kernels between. Here every block (one per SM, co-resident) walks through the phases of all layers,
///   0 qkv = W_qkv rmsnorm(x)      1 attention over the cache, 4 blocks per key head and more
///   2 x += W_out attention        3 h = silu(W_gate n) (W_up n), n = rmsnorm(x)        4 x += W_down h
/// with a grid-wide barrier after each, while loads continue across the barriers: each warp streams the
/// weights and the cached keys and values that it reads through its own pipeline in shared memory
/// (decoder_ring.cuh: kStages of 4 KiB, weights by TMA, keys and values by cp.async; 192 KiB per SM, enough
/// for 6 us), whose load cursor runs ahead across phase and layer boundaries. A barrier and the reload of the
/// small input vector take 2 to 3 us, during which the pipeline fills.
///
/// GEMV: a warp has two rows at a time (gate and up of one hidden feature; else neighbours), 1,024 columns of
/// each per stage. The input vector is in shared memory in 16 bits. A lane's 16 bytes of the two rows and of
/// the vector are operands of an MMA whose diagonal elements are the sums, in f32; the 32 lanes are reduced
/// once per row. Units of two rows are assigned round-robin to all warps of the grid: the last round may
/// leave warps without work, but their share of the bandwidth goes to the others.
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

/// Shared memory after the rings; the input vector of the phase's GEMV follows it.
struct Small {
  gpu::Barrier full[kWarps][kStages];
  float reduce[kWarp];
  float angles[128];  // of the new token's position: cosines, then sines
  int ticket;
};

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

/// Loads of elements that other blocks wrote, bypassing L1, which may hold stale copies.
template <class T>
__device__ __forceinline__ Words<T> load_fresh(const T* from) {
  const uint4 words = __ldcg(reinterpret_cast<const uint4*>(from));
  return {{words.x, words.y, words.z, words.w}};
}

/// vector = `count` elements that the previous phase wrote.
template <class T>
__device__ __forceinline__ void copy_vector(T* vector, const T* from, int count) {
  for (int k = int(threadIdx.x) * kPackOf<T>; k < count; k += kThreads * kPackOf<T>)
    gpu::store_words(vector + k, load_fresh(from + k));
  __syncthreads();
}

/// vector = rmsnorm(residual stream), rounded to T.
template <class T>
__device__ __forceinline__ void norm_vector(const Args<T>& args, const T* x, const T* weight, T* vector,
                                            float* scratch) {
  float4 stream[kStreamPacks];
  float squares = 0;
#pragma unroll
  for (int p = 0; p < kStreamPacks; ++p) {
    const int k = (p * kThreads + int(threadIdx.x)) * 4;
    if (k >= args.d) continue;
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
    const gpu::Pack<T, 4> gain = gpu::load_pack<4>(weight + k);
    gpu::Pack<T, 4> out;
    out.at[0] = T(stream[p].x * rstd * float(gain.at[0]));
    out.at[1] = T(stream[p].y * rstd * float(gain.at[1]));
    out.at[2] = T(stream[p].z * rstd * float(gain.at[2]));
    out.at[3] = T(stream[p].w * rstd * float(gain.at[3]));
    gpu::store_pack(vector + k, out);
  }
  __syncthreads();
}

/// Adds the products of one tile with `vector` to the sums of its two rows. Every lane has 8 neighbouring
/// elements of each: with g = lane / 4 these are row g (upper), row g + 8 (lower) and column g (the vector)
/// of mma.m16n8k16, in which the order of k is free, so that elements (g, g) and (g + 8, g) of the
/// accumulators are the sums of the four lanes of g. The other elements are not used.
template <class T>
__device__ __forceinline__ void multiply_tile(const T* tile, const T* vector, int count, int lane,
                                              float (&sum)[4]) {
#pragma unroll
  for (int step = 0; step < kColumns / (kWarp * kPackOf<T>); ++step) {
    if (step * kWarp * kPackOf<T> >= count) break;
    const int k = (step * kWarp + lane) * kPackOf<T>;
    Words<T> x = {}, upper = {}, lower = {};
    if (k < count) {
      x = gpu::load_words(vector + k);
      upper = gpu::load_words(tile + k), lower = gpu::load_words(tile + kColumns + k);
    }
#pragma unroll
    for (int half = 0; half < 4; half += 2) {
      const uint32_t rows[4] = {upper.word[half], lower.word[half], upper.word[half + 1],
                                lower.word[half + 1]};
      gpu::mma_m16n8k16<T>(sum, rows, x.word[half], x.word[half + 1]);
    }
  }
}

/// Computes the warp's rows of the phase's GEMV and stores the sums: q, k and v as f32; silu(gate) up as a
/// hidden feature; the others are added to the residual stream and, in the last layer, also written as y.
template <class T, int kDim>
__device__ __forceinline__ void gemv(const Args<T>& args, Ring<T, kDim>& ring, int layer, int phase,
                                     const T* vector, int lane) {
  const int columns = args.columns[phase];
  const bool diagonal = lane % 4 == lane / 8, odd = lane / 4 % 2;  // has elements (g, g), in which of two
  for (int unit = ring.first_unit(); unit < args.rows[phase]; unit += ring.step()) {
    float sum[4] = {};
    for (int column = 0; column < columns; column += kColumns) {
      multiply_tile(ring.wait(), vector + column, columns - column, lane, sum);
      ring.refill(args);
    }
    const float upper = gpu::warp_reduce<gpu::Sum>(diagonal ? (odd ? sum[1] : sum[0]) : 0);
    const float lower = gpu::warp_reduce<gpu::Sum>(diagonal ? (odd ? sum[3] : sum[2]) : 0);
    if (lane != 0) continue;
    if (phase == kQkv) {
      reinterpret_cast<float2*>(args.qkv)[unit] = {upper, lower};
    } else if (phase == kUp) {
      args.hidden[unit] = T(swiglu_value(upper, lower));
    } else {
      // No other thread writes these two elements: they were written by this one, or come from the input.
      float2* const at = reinterpret_cast<float2*>(args.stream) + unit;
      float2 total = *at;
      if (layer == 0 && phase == kOut) total = {float(args.x[2 * unit]), float(args.x[2 * unit + 1])};
      total.x += upper, total.y += lower;
      *at = total;
      if (layer + 1 == args.layers && phase == kDown)
        args.y[2 * unit] = T(total.x), args.y[2 * unit + 1] = T(total.y);
    }
  }
}

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, 1) run_layers(const __grid_constant__ Args<T> args) {
  extern __shared__ __align__(128) char memory[];
  T* const rings = reinterpret_cast<T*>(memory);
  Small& small = *reinterpret_cast<Small*>(rings + kWarps * kStages * 2 * kColumns);
  T* const vector = reinterpret_cast<T*>(reinterpret_cast<char*>(&small) + (sizeof(Small) + 127) / 128 * 128);
  const int lane = int(threadIdx.x) % kWarp, warp = gpu::uniform(int(threadIdx.x) / kWarp);
  const int blocks = int(gridDim.x);

  if (threadIdx.x == 0) {
    for (int w = 0; w < kWarps; ++w)
      for (int stage = 0; stage < kStages; ++stage) small.full[w][stage].init(1);
    gpu::fence_barrier_init();
  }
  __syncthreads();
  Ring<T, kDim> ring(args, rings + warp * (kStages * 2 * kColumns), small.full[warp], warp, lane);
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
    const Layer<T>& layer = args.layer[l];
    if (phase == kKeys) {
      for (int unit = int(blockIdx.x); unit < args.units(); unit += blocks)
        attend(args, layer, ring, *reinterpret_cast<AttentionShared<T, kDim>*>(vector), small.angles,
               small.ticket, unit);
    } else {
      if (phase == kQkv || phase == kUp)
        norm_vector(args, l == 0 && phase == kQkv ? args.x : nullptr,
                    phase == kQkv ? layer.norm1 : layer.norm2, vector, small.reduce);
      else
        copy_vector(vector, phase == kOut ? args.mixed : args.hidden, args.columns[phase]);
      gemv(args, ring, l, phase, vector, lane);
    }
    if (++phase == kPhases) phase = kQkv, ++l;
    if (l < args.layers) grid_barrier();
  }
}

template <class T, int kDim>
void launch(const Problem& p) {
  const Device device = p.x.device();
  const DecoderLayer& first = p.layers[0];
  const int blocks = device.multiprocessors();
  const int64_t d = p.x.size(1), mixed = first.out.size(1), hidden = first.down.size(1);
  const int64_t kv_heads = first.keys.size(2), heads = mixed / kDim, group = heads / kv_heads;
  const int64_t tiles = gpu::ceil_div(group, kGroup);
  const int64_t splits = std::max<int64_t>(1, blocks / (kv_heads * tiles));

  // One allocation for everything that phases pass on; the counters start at zero.
  const Tensor counters = Tensor::zeros({1 + kv_heads * tiles}, DType::i32, device);
  const int64_t parts = heads * splits;
  const Tensor scratch =
      Tensor::empty_packed(Shape{d + first.qkv.size(0) + parts * (kDim + 2)}, DType::f32, device);
  const Tensor vectors = Tensor::empty_packed(Shape{mixed + hidden}, p.x.dtype(), device);

  Args<T> args{.y = p.y.data<T>(),
               .x = p.x.data<T>(),
               .table = p.table.data<float>(),
               .lengths = Indices(p.lengths),
               .stream = scratch.data<float>(),
               .qkv = scratch.data<float>() + d,
               .mixed = vectors.data<T>(),
               .hidden = vectors.data<T>() + mixed,
               .partial = scratch.data<float>() + d + first.qkv.size(0),
               .barrier = counters.data<int32_t>(),
               .done = counters.data<int32_t>() + 1,
               .key_stride = {first.keys.layout().stride(1), first.keys.layout().stride(2)},
               .table_stride = p.table.row_stride(),
               .layers = int(p.layers.size()),
               .d = int(d),
               .heads = int(heads),
               .kv_heads = int(kv_heads),
               .rotary = int(p.table.size(1)),
               .tiles = int(tiles),
               .splits = int(splits),
               .limit = int(std::min(first.keys.size(1), p.table.size(0))),
               .eps = float(p.eps),
               .scale = kLog2e / std::sqrt(float(kDim))};
  args.stats = reinterpret_cast<float2*>(args.partial + parts * kDim);
  const Tensor* const weights[kPhases] = {&first.qkv, nullptr, &first.out, &first.up, &first.down};
  for (int phase = 0; phase < kPhases; ++phase) {
    if (!weights[phase]) continue;
    args.stride[phase] = weights[phase]->layout().stride(0);
    args.rows[phase] = int(weights[phase]->size(0) / 2);
    args.columns[phase] = int(weights[phase]->size(1));
  }
  for (size_t l = 0; l < p.layers.size(); ++l) {
    const DecoderLayer& from = p.layers[l];
    args.layer[l] = {
        .norm1 = from.norm1.data<T>(),
        .norm2 = from.norm2.data<T>(),
        .weight = {from.qkv.data<T>(), nullptr, from.out.data<T>(), from.up.data<T>(), from.down.data<T>()},
        .keys = from.keys.data<T>(),
        .values = from.values.data<T>()};
  }
  const int64_t widest = std::max({d, mixed, hidden});
  const size_t shared_bytes = size_t(kWarps * kStages * 2 * kColumns) * sizeof(T) +
                              (sizeof(Small) + 127) / 128 * 128 +
                              std::max(size_t(widest) * sizeof(T), sizeof(AttentionShared<T, kDim>));
  gpu::launch(
      device,
      {.grid = dim3(unsigned(blocks)), .block = kThreads, .shared_bytes = shared_bytes, .cooperative = true},
      run_layers<T, kDim>, args);
}

}  // namespace

void decoder_layers_cuda(const Problem& p) {
  const auto run = [&]<class T>() {
    if (p.layers[0].keys.size(3) == 64) {
      launch<T, 64>(p);
    } else {
      launch<T, 128>(p);
    }
  };
  if (p.x.dtype() == DType::bf16) {
    run.operator()<bf16>();
  } else {
    run.operator()<f16>();
  }
}

}  // namespace tessera::ops::decoder

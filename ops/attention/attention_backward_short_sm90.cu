#include <algorithm>

#include "gpu/approx.cuh"
#include "gpu/mma.cuh"
#include "gpu/pack.cuh"
#include "ops/attention/attention_backward_sm90.cuh"
#include "ops/attention/attention_variants.h"

/// Backward with few keys (up to 64, head_dim up to 64): a block has all keys of a head and walks over its
/// queries, so dQ is final after one tile, and nothing is added in global memory. Bound by bytes: Q, O and dO
/// are read once, dQ is written once; delta and lse in base 2 are computed on the way.
///
/// Two warpgroups: one issues the MMAs (as in attention_backward_sm90.cuh, dQ^T = K^T dS^T included); of the
/// other, one warp issues the loads and two compute the statistics, one thread per query. Two blocks share an
/// SM, so that one computes while the other waits. With too few heads for that, several blocks share a head
/// and store their dK and dV in f32, which a last kernel adds in a fixed order; so do the blocks of the query
/// heads that read one K/V head.

namespace tessera::ops {
namespace {

using namespace sm90;

constexpr int kStages = 3;
constexpr int kBox = 64 * 128;  // bytes of 64 rows
constexpr int kK = 0, kV = kBox, kQ = 2 * kBox, kDout = kQ + kStages * kBox, kO = kDout + kStages * kBox,
              kDs = kO + kStages * kBox, kDq = kDs + kBox, kStatistics = kDq + kBox,
              kBarriers = kStatistics + kStages * 2 * kQueryTile * 4;
struct Barriers {
  gpu::Barrier keys;
  gpu::Ring<kStages> queries;
  gpu::Barrier statistics[kStages];
};
constexpr size_t kSharedBytes = kBarriers + sizeof(Barriers);
static_assert(2 * (kSharedBytes + 1024) <= 228 * 1024);

struct ShortArgs {
  const float* lse;
  int64_t lse_stride;
  float* partial;  // [head rows, splits, 2, 64 x 64] in the order of the accumulators, if group * splits > 1
  int heads, group, splits, query_tiles, queries, keys;  // group: query heads that read one key head
  bool causal, wants_queries, wants_keys;
  float scale2, gradient_scale;
};

/// The query tiles of a block: about query_tiles / splits consecutive tiles of one head.
struct ShortRun {
  int head_row, b, h, begin, end;

  __device__ __forceinline__ explicit ShortRun(const ShortArgs& args) {
    head_row = int(blockIdx.x) / args.splits;
    const int split = int(blockIdx.x) % args.splits;
    b = head_row / args.heads, h = head_row % args.heads;
    begin = int(int64_t(args.query_tiles) * split / args.splits);
    end = int(int64_t(args.query_tiles) * (split + 1) / args.splits);
  }
};

/// Producer thread: loads K and V once, then Q, dO and O of each query tile.
__device__ __forceinline__ void load_tiles(const gpu::TensorMap& map_q, const gpu::TensorMap& map_k,
                                           const gpu::TensorMap& map_v, const gpu::TensorMap& map_o,
                                           const gpu::TensorMap& map_dout, const ShortArgs& args,
                                           const ShortRun& run, char* shared) {
  using namespace gpu;
  Barriers& barriers = *reinterpret_cast<Barriers*>(shared + kBarriers);
  const int b = run.b, h = run.h;
  RingState<kStages> state;
  barriers.keys.arrive_expect(2 * kBox);
  tma_load(shared + kK, map_k, barriers.keys, 0, 0, h / args.group, b);
  tma_load(shared + kV, map_v, barriers.keys, 0, 0, h / args.group, b);
  for (int tile = run.begin; tile < run.end; ++tile) {
    barriers.queries.empty[state.stage].wait(state.parity ^ 1);
    Barrier& full = barriers.queries.full[state.stage];
    full.arrive_expect(3 * kBox);
    tma_load(shared + kQ + state.stage * kBox, map_q, full, 0, tile * kQueryTile, h, b);
    tma_load(shared + kDout + state.stage * kBox, map_dout, full, 0, tile * kQueryTile, h, b);
    tma_load(shared + kO + state.stage * kBox, map_o, full, 0, tile * kQueryTile, h, b);
    state.advance();
  }
}

/// Statistics warps (two): compute lse and delta = dO . O of each row, for the MMA warpgroup.
template <class T>
__device__ __forceinline__ void make_statistics(const ShortArgs& args, const ShortRun& run, int row, int lane,
                                                char* shared) {
  using namespace gpu;
  Barriers& barriers = *reinterpret_cast<Barriers*>(shared + kBarriers);
  RingState<kStages> state;
  const float* const lse = args.lse + run.head_row * args.lse_stride;
  const auto load = [&](int tile) {
    const int i = tile * kQueryTile + row;
    return tile < run.end && i < args.queries ? lse[i] : -INFINITY;
  };
  float own = load(run.begin);
  for (int tile = run.begin; tile < run.end; ++tile) {
    const float next = load(tile + 1);
    barriers.queries.full[state.stage].wait(state.parity);
    float sum = 0;
#pragma unroll
    for (int chunk = 0; chunk < 8; ++chunk) {
      const uint32_t at = state.stage * kBox + swizzled_offset(row, chunk);
      const auto o = *reinterpret_cast<const Pack<T, 8>*>(shared + kO + at);
      const auto dout = *reinterpret_cast<const Pack<T, 8>*>(shared + kDout + at);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum += float(o.at[e]) * float(dout.at[e]);
    }
    // The MMA warpgroup releases this stage's previous statistics together with its tile.
    float* const to =
        reinterpret_cast<float*>(shared + kStatistics) + state.stage * 2 * kQueryTile + statistics_place(row);
    to[0] = own == -INFINITY ? -INFINITY : own * -1.44269504f;
    to[kQueryTile] = sum;
    barriers.statistics[state.stage].arrive();
    __syncwarp();
    if (lane == 0) barriers.queries.empty[state.stage].arrive();
    own = next;
    state.advance();
  }
}

/// Epilogue: stores dK and dV through the buffers of K and V, which are no longer read, or, where other
/// blocks share the keys, the accumulators in f32.
template <class T>
__device__ __forceinline__ void store_keys(const gpu::TensorMap& map_dk, const gpu::TensorMap& map_dv,
                                           const ShortArgs& args, const ShortRun& run, int own_row, int lane,
                                           char* shared, const float (&dk)[32], const float (&dv)[32]) {
  using namespace gpu;
  const int b = run.b, h = run.h;
  if (args.group * args.splits == 1) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t packed[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) packed[e] = pack_halves<T>(dv[j * 8 + 2 * e], dv[j * 8 + 2 * e + 1]);
      stmatrix_x4(shared_address(shared + kV) + swizzled_offset(own_row, 2 * j + lane / 16), packed);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        packed[e] = pack_halves<T>(dk[j * 8 + 2 * e] * args.gradient_scale,
                                   dk[j * 8 + 2 * e + 1] * args.gradient_scale);
      stmatrix_x4(shared_address(shared + kK) + swizzled_offset(own_row, 2 * j + lane / 16), packed);
    }
    fence_async_shared();
    sync_named(1, 128);
    if (threadIdx.x == 0) {
      tma_store(map_dv, shared + kV, 0, 0, h, b);
      tma_store(map_dk, shared + kK, 0, 0, h, b);
      commit_stores();
    }
  } else {
    float4* const to = reinterpret_cast<float4*>(args.partial) + blockIdx.x * int64_t(2 * 1024) + threadIdx.x;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      to[j * 128] = make_float4(dk[4 * j], dk[4 * j + 1], dk[4 * j + 2], dk[4 * j + 3]);
      to[1024 + j * 128] = make_float4(dv[4 * j], dv[4 * j + 1], dv[4 * j + 2], dv[4 * j + 3]);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(256, 2) attention_backward_short_kernel(
    const __grid_constant__ gpu::TensorMap map_q, const __grid_constant__ gpu::TensorMap map_k,
    const __grid_constant__ gpu::TensorMap map_v, const __grid_constant__ gpu::TensorMap map_o,
    const __grid_constant__ gpu::TensorMap map_dout, const __grid_constant__ gpu::TensorMap map_dq,
    const __grid_constant__ gpu::TensorMap map_dk, const __grid_constant__ gpu::TensorMap map_dv,
    const __grid_constant__ ShortArgs args) {
  using namespace gpu;
  constexpr TileOrder kKMajor = TileOrder::k_major, kMnMajor = TileOrder::mn_major;
  extern __shared__ __align__(1024) char shared[];
  Barriers& barriers = *reinterpret_cast<Barriers*>(shared + kBarriers);
  const int warpgroup = uniform(int(threadIdx.x) / 128);
  const int warp = uniform(int(threadIdx.x) / 32) % 4, lane = int(threadIdx.x) % 32;
  const ShortRun run(args);

  if (threadIdx.x == 0) {
    barriers.keys.init(1);
    barriers.queries.init(1, 6);
    for (auto& barrier : barriers.statistics) barrier.init(64);
    fence_barrier_init();
  }
  __syncthreads();
  grid_dependency_wait();

  if (warpgroup == 1) {
    warpgroup_reg_dealloc<40>();
    if (warp == 0) {
      if (elect_one()) load_tiles(map_q, map_k, map_v, map_o, map_dout, args, run, shared);
    } else if (warp <= 2) {
      make_statistics<T>(args, run, (warp - 1) * 32 + lane, lane, shared);
    }
    return;
  }

  warpgroup_reg_alloc<208>();
  RingState<kStages> state;
  barriers.keys.wait(0);
  uint32_t k[4][4];  // K^T
#pragma unroll
  for (int step = 0; step < 4; ++step)
    ldmatrix_x4_trans(k[step],
                      shared_address(shared + kK) +
                          swizzled_offset(step * 16 + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2));
  float dk[32], dv[32], s[32], dp[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) dk[i] = dv[i] = 0;
  const int own_row = warp * 16 + lane % 16;
#pragma unroll 1
  for (int tile = run.begin; tile < run.end; ++tile) {
    const uint32_t q_tile = shared_address(shared + kQ) + state.stage * kBox;
    const uint32_t dout_tile = shared_address(shared + kDout) + state.stage * kBox;
    const float* const statistics =
        reinterpret_cast<const float*>(shared + kStatistics) + state.stage * 2 * kQueryTile;
    barriers.queries.full[state.stage].wait(state.parity);
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      wgmma<T, kKMajor, kKMajor>(
          s, tile_descriptor<kKMajor>(shared_address(shared + kK)) + step * kDescriptorStep<kKMajor>,
          tile_descriptor<kKMajor>(q_tile) + step * kDescriptorStep<kKMajor>, step > 0);
    warpgroup_commit();
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      wgmma<T, kKMajor, kKMajor>(
          dp, tile_descriptor<kKMajor>(shared_address(shared + kV)) + step * kDescriptorStep<kKMajor>,
          tile_descriptor<kKMajor>(dout_tile) + step * kDescriptorStep<kKMajor>, step > 0);
    warpgroup_commit();
    barriers.statistics[state.stage].wait(state.parity);
    warpgroup_wait<1>();
    warpgroup_fence_operand(s);
    const int query = tile * kQueryTile,
              shift = args.queries - args.keys;  // the last key that query i sees is i - shift
    if (args.keys < 64 || (args.causal && 63 + shift > query)) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int key = warp * 16 + lane / 4 + i / 2 % 2 * 8,
                  column = query + i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (key >= args.keys || (args.causal && key + shift > column)) s[i] = -INFINITY;
      }
    }
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const float4 lse = *reinterpret_cast<const float4*>(statistics + j * 8 + lane % 4 * 4);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float own = e / 4 == 0 ? (e % 2 ? lse.y : lse.x) : (e % 2 ? lse.w : lse.z);
        s[j * 4 + e] = exp2_approx(fmaf(s[j * 4 + e], args.scale2, own));
      }
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(dp);
    uint32_t p[4][4], ds[4][4];
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const float4 delta = *reinterpret_cast<const float4*>(statistics + kQueryTile + j * 8 + lane % 4 * 4);
#pragma unroll
      for (int e = 0; e < 8; e += 2) {
        const int i = j * 4 + e;
        const float low = e / 4 == 0 ? delta.x : delta.z, high = e / 4 == 0 ? delta.y : delta.w;
        p[j / 2][e / 2] = pack_halves<T>(s[i], s[i + 1]);
        ds[j / 2][e / 2] = pack_halves<T>(s[i] * (dp[i] - low), s[i + 1] * (dp[i + 1] - high));
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
      stmatrix_x4(shared_address(shared + kDs) + swizzled_offset(own_row, 2 * j + lane / 16), ds[j]);
    fence_async_shared();
    if (threadIdx.x == 0) wait_stores_read<0>();  // TMA has read the last tile's dQ
    sync_named(1, 128);
    float dq[32];
    warpgroup_arrive();
#pragma unroll
    for (int j = 0; j < 4; ++j)
      wgmma<T, kMnMajor>(
          dq, k[j], tile_descriptor<kMnMajor>(shared_address(shared + kDs)) + j * kDescriptorStep<kMnMajor>,
          j > 0);
    warpgroup_commit();
    warpgroup_arrive();
#pragma unroll
    for (int j = 0; j < 4; ++j)
      wgmma<T, kMnMajor>(dv, p[j], tile_descriptor<kMnMajor>(dout_tile) + j * kDescriptorStep<kMnMajor>);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      wgmma<T, kMnMajor>(dk, ds[j], tile_descriptor<kMnMajor>(q_tile) + j * kDescriptorStep<kMnMajor>);
    warpgroup_commit();
    warpgroup_wait<1>();
    warpgroup_fence_operand(dq);
    if (args.wants_queries) {
      // The accumulator is dQ^T: rows are columns of the head.
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        uint32_t packed[4];
#pragma unroll
        for (int e = 0; e < 4; ++e)
          packed[e] = pack_halves<T>(dq[4 * j + 2 * e] * args.gradient_scale,
                                     dq[4 * j + 2 * e + 1] * args.gradient_scale);
        stmatrix_x4_trans(shared_address(shared + kDq) +
                              swizzled_offset((j + lane / 16) * 8 + lane % 8, warp * 2 + lane / 8 % 2),
                          packed);
      }
      fence_async_shared();
    }
    warpgroup_wait<0>();
    if (lane == 0) barriers.queries.empty[state.stage].arrive();
    state.advance();
    sync_named(1, 128);  // dQ is in shared memory, and all warps have read dS
    if (args.wants_queries && threadIdx.x == 0) {
      tma_store(map_dq, shared + kDq, 0, query, run.h, run.b);
      commit_stores();
    }
  }
  warpgroup_fence_operand(dk);
  warpgroup_fence_operand(dv);
  if (args.wants_keys) store_keys<T>(map_dk, map_dv, args, run, own_row, lane, shared, dk, dv);
  if (threadIdx.x == 0) wait_stores<0>();
}

/// Adds the partial dK and dV of a key head's `splits` blocks in order; each thread four accumulators.
template <class T>
__global__ void __launch_bounds__(256)
    attention_backward_short_finish_kernel(const float* partial, HeadRows<T> dk, HeadRows<T> dv, int heads,
                                           int splits, int keys, int dim, float gradient_scale) {
  gpu::grid_dependency_wait();
  const int head_row = int(blockIdx.x) / 8, place = int(blockIdx.x) % 8 * 256 + int(threadIdx.x);
  const float4* from = reinterpret_cast<const float4*>(partial) + head_row * int64_t(splits) * 2048 + place;
  float4 sum = make_float4(0, 0, 0, 0);
  for (int split = 0; split < splits; ++split) {
    const float4 value = from[split * int64_t{2048}];
    sum.x += value.x, sum.y += value.y, sum.z += value.z, sum.w += value.w;
  }
  const bool is_dv = place >= 1024;
  const int thread = place % 128, j = place / 128 % 8;
  const int key = thread / 32 * 16 + thread % 32 / 4, column = j * 8 + thread % 4 * 2;
  const HeadRows<T>& out = is_dv ? dv : dk;
  const float factor = is_dv ? 1 : gradient_scale;
  if (column >= dim) return;
  if (key < keys)
    gpu::store_pack<2>(out.at(head_row / heads, head_row % heads, key) + column,
                       gpu::Pack<T, 2>{T(sum.x * factor), T(sum.y * factor)});
  if (key + 8 < keys)
    gpu::store_pack<2>(out.at(head_row / heads, head_row % heads, key + 8) + column,
                       gpu::Pack<T, 2>{T(sum.z * factor), T(sum.w * factor)});
}

template <class T>
void backward_short(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& dout, const Tensor& q,
                    const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                    const AttentionProblem& problem) {
  const Device device = q.device();
  const int64_t head_rows = q.size(0) * q.size(2), query_tiles = gpu::ceil_div(q.size(1), kQueryTile);
  const int64_t splits =
      std::min(query_tiles, std::max<int64_t>(1, 2 * device.multiprocessors() / head_rows));
  ShortArgs args{};
  args.lse = lse.data<float>();
  args.lse_stride = lse.row_stride();
  args.heads = int(q.size(2));
  args.group = args.heads / int(k.size(2));
  args.splits = int(splits);
  args.query_tiles = int(query_tiles);
  args.queries = int(q.size(1));
  args.keys = int(k.size(1));
  args.causal = problem.causal;
  args.wants_queries = dq.defined();
  args.wants_keys = dk.defined();
  args.scale2 = float(problem.scale * 1.44269504088896340736);
  args.gradient_scale = float(gradient_scale(problem.scale, k.size(1)));
  const bool adds = args.group * splits > 1 && dk.defined();
  const Tensor partial =
      Tensor::empty_packed({adds ? head_rows * splits : 1, 2 * 64 * 64}, DType::f32, device);
  args.partial = partial.data<float>();
  gpu::launch(device, {dim3(unsigned(head_rows * splits)), dim3(256), kSharedBytes, 1, true},
              attention_backward_short_kernel<T>, head_map<T>(q, 64), head_map<T>(k, 64), head_map<T>(v, 64),
              head_map<T>(o, 64), head_map<T>(dout, 64), head_map<T>(dq.defined() ? dq : q, 64),
              head_map<T>(dk.defined() ? dk : k, 64), head_map<T>(dv.defined() ? dv : v, 64), args);
  if (adds)
    gpu::launch(device, {dim3(unsigned(k.size(0) * k.size(2) * 8)), dim3(256), 0, 1, true},
                attention_backward_short_finish_kernel<T>, args.partial, ops::head_rows<T>(dk),
                ops::head_rows<T>(dv), int(k.size(2)), args.group * args.splits, args.keys, int(q.size(3)),
                args.gradient_scale);
}

}  // namespace

void attention_backward_short_sm90(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& dout,
                                   const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                                   const Tensor& lse, const AttentionProblem& problem) {
  dispatch_floating_cuda(q.dtype(), "attention", [&]<class T>() {
    if constexpr (!std::is_same_v<T, float>) backward_short<T>(dq, dk, dv, dout, q, k, v, o, lse, problem);
  });
}

}  // namespace tessera::ops

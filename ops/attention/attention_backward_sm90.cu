#include <algorithm>

#include "gpu/pack.cuh"
#include "ops/attention/attention_backward_sm90.cuh"
#include "ops/attention/attention_variants.h"

/// Attention backward for sm_90a: launches, and the kernels around the main one
/// (attention_backward_sm90.cuh). Before it: the statistics of every query, bound by reading O and dO. After
/// it: dQ rounded from the f32 sums (6 bytes per element), unless the main kernel stores the final dQ; and
/// where walks were split into chunks, the sums of their dK and dV (4 bytes per element and chunk).

namespace tessera::ops {
namespace {

using namespace sm90;

/// Arguments of the kernels before and after the main one.
template <class T>
struct PassArgs {
  CuSeqlens seqlens;
  HeadRows<const T> o, dout;
  HeadRows<T> dq;
  const float* lse;  // [B * H, lse_stride]
  int64_t lse_stride;
  float *statistics, *dq_sum;
  int* dq_semaphores;
  int64_t semaphore_count, sum_units;  // sum_units: 64 x 64 tiles of one dQ sum
  int sums;
  int heads, query_slots, queries, keys, dim;
  bool causal;
  float scale;  // the factor of dQ
  float keep;   // dropout's 1 - p

  /// All lanes of a warp: the sequence of a query slot.
  __device__ AttentionSequence sequence_of(int slot) const {
    if (seqlens.packed()) return seqlens.template find<true>(slot, kQueryTile);
    return {0, 0, queries, 0, keys, slot, true};
  }
};

/// One block per query slot: its statistics, four threads per row. Clears the semaphores.
template <class T>
__global__ void __launch_bounds__(256) attention_backward_prepare_kernel(PassArgs<T> args) {
  gpu::launch_dependents();
  gpu::grid_dependency_wait();
  const int64_t head_row = blockIdx.x / unsigned(args.query_slots);
  const AttentionSequence sequence = args.sequence_of(int(blockIdx.x % unsigned(args.query_slots)));
  const int64_t b = head_row / args.heads, h = head_row % args.heads;
  const int row = int(threadIdx.x) / 4, i = sequence.tile * kQueryTile + row;
  const bool exists = sequence.has_tile && i < sequence.queries;
  const int64_t q_row = int64_t(sequence.q_first) + i;
  float sum = 0;
  if (exists)
    for (int column = int(threadIdx.x) % 4 * 8; column < args.dim; column += 32) {
      const auto o = gpu::load_pack<8>(args.o.at(b, h, q_row) + column);
      const auto dout = gpu::load_pack<8>(args.dout.at(b, h, q_row) + column);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum += float(o.at[e]) * float(dout.at[e]);
    }
  sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
  sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
  if (threadIdx.x % 4 == 0) {
    const float lse = exists ? args.lse[head_row * args.lse_stride + q_row] : -INFINITY;
    float* const statistics = args.statistics + int64_t(blockIdx.x) * 2 * kQueryTile + statistics_place(row);
    statistics[0] = lse == -INFINITY ? -INFINITY : lse * -1.44269504f;
    statistics[kQueryTile] = sum * args.keep;
  }
  for (int64_t at = blockIdx.x * 256 + threadIdx.x; at < args.semaphore_count; at += int64_t(gridDim.x) * 256)
    args.dq_semaphores[at] = 0;
}

/// Rounds dQ to its dtype: one block per 64 queries and 64 columns, transposed in shared memory.
template <class T>
__global__ void __launch_bounds__(256) attention_backward_finish_kernel(PassArgs<T> args) {
  __shared__ float4 unit[kDqTileFloats / 4];
  gpu::grid_dependency_wait();
  const int units = args.dim > 64 ? 2 : 1;
  const int64_t index = blockIdx.x / units;
  const int box = int(blockIdx.x) % units;
  const int64_t head_row = index / args.query_slots;
  const AttentionSequence sequence = args.sequence_of(int(index % args.query_slots));
  if (!sequence.has_tile) return;
  const int64_t b = head_row / args.heads, h = head_row % args.heads;
  // Number of sums of the tile: those to which the first key tiles that it sees have added.
  int sums = 0;
  if (args.sums == 1)
    sums = sequence.keys > 0 &&
           sequence.tile >= first_query_tile(args.causal, sequence.queries, sequence.keys, 0);
  else
    while (sums < args.sums && sums * kKeyTile < sequence.keys &&
           sequence.tile >= first_query_tile(args.causal, sequence.queries, sequence.keys, sums))
      ++sums;
  const float4* const from =
      reinterpret_cast<const float4*>(args.dq_sum) + blockIdx.x * int64_t(kDqTileFloats / 4);
  float4 sum[kDqTileFloats / 4 / 256] = {};
#pragma unroll 4
  for (int n = 0; n < sums; ++n)
#pragma unroll
    for (int at = 0; at < kDqTileFloats / 4 / 256; ++at) {
      const float4 part = from[n * args.sum_units * (kDqTileFloats / 4) + at * 256 + threadIdx.x];
      sum[at].x += part.x, sum[at].y += part.y, sum[at].z += part.z, sum[at].w += part.w;
    }
#pragma unroll
  for (int at = 0; at < kDqTileFloats / 4 / 256; ++at) unit[at * 256 + threadIdx.x] = sum[at];
  __syncthreads();
  const float last = sequence.keys == 1 ? 0.0f : args.scale;
  // The accumulator dQ^T: column d = 16 w + 8 half + g of the head, query 8 j + 2 c + bit.
  const int lane = int(threadIdx.x) % 32, j = int(threadIdx.x) / 32;
  const int bit = lane % 2, c = lane / 2 % 4, half = lane / 8 % 2;
  const int query = sequence.tile * kQueryTile + 8 * j + 2 * c + bit;
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const int w = pair * 2 + lane / 16;
    const int column = box * 64 + w * 16 + half * 8;
    gpu::Pack<T, 8> out;
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      const int g = step ^ (lane / 16);  // the halves of a warp read different banks
      const float value =
          reinterpret_cast<const float*>(unit)[(j * 128 + w * 32 + g * 4 + c) * 4 + half * 2 + bit];
      // Indexed by constants only: the two halves swap neighbours afterwards.
      out.at[step] = T(value * last);
    }
    if (lane / 16)
#pragma unroll
      for (int step = 0; step < 8; step += 2) {
        const T first = out.at[step];
        out.at[step] = out.at[step + 1];
        out.at[step + 1] = first;
      }
    if (query < sequence.queries && column < args.dim)
      gpu::store_pack<8>(args.dq.at(b, h, int64_t(sequence.q_first) + query) + column, out);
  }
}

/// dK and dV of key tiles whose walks were split: adds the chunks in order, four values of the accumulators
/// per thread.
template <class T, int kHead>
__global__ void __launch_bounds__(256) attention_backward_chunks_kernel(BackwardArgs<T> args) {
  constexpr int kPlaces = kKeyTile * kHead / 2;  // of dK, then of dV
  gpu::grid_dependency_wait();
  const int place = int(blockIdx.x % (kPlaces / 256)) * 256 + int(threadIdx.x);
  const int64_t tile = blockIdx.x / (kPlaces / 256);
  const int kv_row = int(tile / args.key_slots), slot = int(tile % args.key_slots);
  AttentionSequence sequence{0, 0, args.queries, 0, args.keys, slot, true};
  if (args.seqlens.packed()) sequence = args.seqlens.template find<false>(slot, kKeyTile);
  if (!sequence.has_tile) return;
  const float4* const from =
      reinterpret_cast<const float4*>(args.partial) + tile * args.chunks * kPlaces + place;
  float4 sum = {};
#pragma unroll 4
  for (int chunk = 0; chunk < args.chunks; ++chunk) {
    const float4 part = from[chunk * kPlaces];
    sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
  }
  const bool is_dv = place >= kPlaces / 2;
  const int half = place % (kPlaces / 2) / (64 * kHead / 4), j = place % (64 * kHead / 4) / 128,
            thread = place % 128;
  const int key = sequence.tile * kKeyTile + half * 64 + thread / 32 * 16 + thread % 32 / 4,
            column = j * 8 + thread % 4 * 2;
  if (column >= args.dim) return;
  const HeadRows<T>& out = is_dv ? args.dv : args.dk;
  const float factor = is_dv ? args.drop.scale : sequence.keys == 1 ? 0.0f : args.scale;
  T* const to =
      out.at(kv_row / args.kv_heads, kv_row % args.kv_heads, int64_t(sequence.k_first) + key) + column;
  if (key < sequence.keys) gpu::store_pack<2>(to, gpu::Pack<T, 2>{T(sum.x * factor), T(sum.y * factor)});
  if (key + 8 < sequence.keys)
    gpu::store_pack<2>(to + 8 * out.row, gpu::Pack<T, 2>{T(sum.z * factor), T(sum.w * factor)});
}

/// Number of heads whose key tiles run concurrently. With more heads, fewer key tiles of each run at a time:
/// blocks wait less for the semaphores of others where walks start together, which matters most for short
/// walks (causal) and short steps (D <= 64), but they share less of Q, dO and the sums of dQ in L2. Without a
/// mask, or with grouped queries: as few as fill the GPU twice (once without a mask for heads of D > 64 with
/// few key tiles). Causal: as many as have 2,048 columns, if they read and add to at most 256 MB; their
/// blocks start at different times, and cannot share as much.
int64_t heads_at_once(const Tensor& q, int64_t sequences, int64_t group, int64_t key_tiles, bool causal) {
  const int64_t sms = q.device().multiprocessors();  // each runs one block
  const int64_t head = q.size(3) <= 64 ? 64 : 128;
  if (!causal || group > 1) {
    const bool once = !causal && head == 128 && key_tiles < sms;
    return gpu::ceil_div(once ? sms : 2 * sms, key_tiles);
  }
  const int64_t bytes = gpu::ceil_div(q.size(1), sequences) * head * (2 + 2 + 4);  // Q, dO, dQ
  return std::max(gpu::ceil_div(sms, key_tiles), std::min(2048 / head, (int64_t{256} << 20) / bytes));
}

/// Number of chunks into which walks are split: few key tiles do not fill the GPU, or leave its second wave
/// nearly empty. Minimises waves times steps per block, where a block's start and end count as three steps,
/// and a chunk's dK and dV in f32 as four more. Splitting at all must save a tenth of the time, each further
/// chunk a twentieth.
int64_t chunks_of_walk(int64_t blocks, int64_t tiles, int64_t group, int64_t sms) {
  const auto time = [&](int64_t chunks) {
    return gpu::ceil_div(blocks * chunks, sms) *
           (gpu::ceil_div(tiles, chunks) * group + (chunks > 1 ? 7 : 3));
  };
  int64_t best = 1, least = time(1) * 19 / 20;
  for (int64_t chunks = 2; chunks <= std::min<int64_t>(tiles, 16); ++chunks)
    if (time(chunks) * 20 < least * 19) {
      least = time(chunks);
      best = chunks;
    }
  return best;
}

/// Number of sums of dQ per query tile. With one, key tile n waits for tile n - 1 at each of the block's
/// `steps`, so a walk of few steps over many key tiles would be a chain of all of them. Enough sums that the
/// chain is not longer than the walk; where all `blocks` run concurrently, and nothing else hides the chain's
/// start, not longer than a quarter of it, with at most 16 sums. Each sum is read once more at the end.
int64_t sums_of_dq(int64_t key_tiles, int64_t steps, int64_t blocks, int64_t sms) {
  const int64_t chain = std::min<int64_t>(key_tiles, sms), walk = std::max<int64_t>(1, steps);
  int64_t sums = gpu::ceil_div(chain, walk);
  if (blocks <= sms) sums = std::max(sums, std::min<int64_t>(16, gpu::ceil_div(4 * chain, walk)));
  return std::clamp<int64_t>(sums, 1, key_tiles);
}

/// Everything with one configuration of the main kernel.
template <class T, class Config>
void backward_wgmma(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& dout, const Tensor& q,
                    const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                    const AttentionProblem& problem) {
  const Device device = q.device();
  const CuSeqlens seqlens = cu_seqlens(problem, q, k);
  const int64_t head_rows = q.size(0) * q.size(2), kv_rows = k.size(0) * k.size(2);
  const int64_t query_slots = seqlens.slots(q.size(1), kQueryTile),
                key_slots = seqlens.slots(k.size(1), kKeyTile);
  const int64_t units = head_rows * query_slots * Config::kBoxes;
  check(units <= int64_t{0x7FFFFFFF} && kv_rows * key_slots * 64 <= int64_t{0x7FFFFFFF},
        "attention: ", describe(q), " needs more than 2^31 - 1 blocks (split the batch)");
  const Tensor statistics =
      Tensor::empty_packed({head_rows * query_slots, 2 * kQueryTile}, DType::f32, device);
  // Packed sequences count by their mean lengths.
  const int64_t count = std::max(1, seqlens.count);
  const int64_t mean_tiles = std::max<int64_t>(1, gpu::ceil_div(gpu::ceil_div(k.size(1), count), kKeyTile));
  const int64_t walked = gpu::ceil_div(gpu::ceil_div(q.size(1), count), kQueryTile),
                group = q.size(2) / k.size(2);
  const int64_t sms = device.multiprocessors();
  const int64_t blocks = kv_rows * mean_tiles * count, chunks = chunks_of_walk(blocks, walked, group, sms);
  const int64_t sums =
      dq.defined() ? sums_of_dq(mean_tiles, gpu::ceil_div(walked, chunks) * group, blocks * chunks, sms) : 1;
  const Tensor dq_sum =
      Tensor::empty_packed({dq.defined() ? sums * units : 1, kDqTileFloats}, DType::f32, device);
  const bool adds = chunks > 1 && dk.defined();
  const Tensor partial = Tensor::empty_packed(
      {adds ? kv_rows * key_slots * chunks : 1, 2, kKeyTile * Config::kHead}, DType::f32, device);
  const Tensor dq_semaphores = Tensor::empty_packed({sums * units + 1}, DType::i32, device);

  BackwardArgs<T> args{};
  args.seqlens = seqlens;
  args.statistics = statistics.data<float>();
  args.dq_sum = dq_sum.data<float>();
  args.ticket = dq_semaphores.data<int32_t>();
  args.dq_semaphores = args.ticket + 1;
  args.heads = int(q.size(2));
  args.kv_heads = int(k.size(2));
  args.group = args.heads / args.kv_heads;
  args.kv_rows = int(kv_rows);
  args.chunks = int(chunks);
  args.partial = partial.data<float>();
  args.sums = int(sums);
  args.units = units;
  const int64_t at_once = heads_at_once(q, count, group, mean_tiles, problem.causal);
  args.rounds = int(std::clamp<int64_t>(gpu::ceil_div(kv_rows, at_once), 1, 0x7FFFFFFF / (kv_rows + 1)));
  args.key_slots = int(key_slots);
  args.query_slots = int(query_slots);
  args.queries = int(q.size(1));
  args.keys = int(k.size(1));
  args.dim = int(q.size(3));
  args.causal = problem.causal;
  args.wants_queries = dq.defined();
  // Only with one sum, where every query sees a key and no tile has padding rows.
  args.stores_final_dq = Config::kDqWarpgroup && dq.defined() && !seqlens.packed() && sums == 1 &&
                         (!problem.causal || k.size(1) >= q.size(1));
  args.wants_keys = dk.defined();
  if (dk.defined()) {
    args.dk = ops::head_rows<T>(dk);
    args.dv = ops::head_rows<T>(dv);
  }
  args.scale2 = float(problem.scale * 1.44269504088896340736);
  args.scale = float(problem.scale) * problem.drop.scale;
  args.drop = problem.drop;

  PassArgs<T> pass{};
  pass.seqlens = seqlens;
  pass.o = const_head_rows<T>(o);
  pass.dout = const_head_rows<T>(dout);
  pass.lse = lse.data<float>();
  pass.lse_stride = lse.row_stride();
  pass.statistics = statistics.data<float>();
  pass.dq_sum = dq_sum.data<float>();
  pass.dq_semaphores = args.ticket;
  pass.semaphore_count = sums * units + 1;
  pass.sums = args.sums;
  pass.sum_units = units;
  pass.heads = args.heads;
  pass.query_slots = args.query_slots;
  pass.queries = args.queries;
  pass.keys = args.keys;
  pass.dim = args.dim;
  pass.causal = args.causal;
  pass.scale = args.scale;
  pass.keep = problem.drop.keep;

  gpu::launch(device, {dim3(unsigned(head_rows * query_slots)), dim3(256), 0, 1, true},
              attention_backward_prepare_kernel<T>, pass);
  const Tensor& dk_or = dk.defined() ? dk : k;
  const Tensor& dv_or = dv.defined() ? dv : v;
  gpu::launch(
      device,
      {dim3(unsigned(kv_rows * key_slots * chunks)), dim3(Config::kThreads), Config::kSharedBytes, 1, true},
      attention_backward_wgmma_kernel<T, Config>, head_map<T>(q, kQueryTile), head_map<T>(k, kKeyTile),
      head_map<T>(v, kKeyTile), head_map<T>(dout, kQueryTile), head_map<T>(dk_or, 64), head_map<T>(dv_or, 64),
      head_map<T>(dq.defined() ? dq : q, kQueryTile), args);
  if (adds)
    gpu::launch(
        device,
        {dim3(unsigned(kv_rows * key_slots * (kKeyTile * Config::kHead / 2 / 256))), dim3(256), 0, 1, true},
        attention_backward_chunks_kernel<T, Config::kHead>, args);
  if (!dq.defined() || args.stores_final_dq) return;
  pass.dq = ops::head_rows<T>(dq);
  gpu::launch(device, {dim3(unsigned(units)), dim3(256), 0, 1, true}, attention_backward_finish_kernel<T>,
              pass);
}

}  // namespace

void attention_backward_wgmma_cuda(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& dout,
                                   const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                                   const Tensor& lse, const AttentionProblem& problem) {
  const bool narrow = q.size(3) <= 64, drops = problem.drop.drops();
  if (k.size(1) <= kShortBackwardKeys && narrow && !problem.packed() && !drops)
    return attention_backward_short_sm90(dq, dk, dv, dout, q, k, v, o, lse, problem);
  dispatch_floating_cuda(q.dtype(), "attention", [&]<class T>() {
    if constexpr (!std::is_same_v<T, float>) {
      const auto run = [&]<class Config>() {
        backward_wgmma<T, Config>(dq, dk, dv, dout, q, k, v, o, lse, problem);
      };
      if (narrow && drops) return run.template operator()<BackwardConfig<64, 4, 2, 192, 104, true>>();
      if (narrow) return run.template operator()<BackwardConfig<64, 4, 2, 208, 72>>();
      if (drops) return run.template operator()<BackwardConfig<128, 2, 2, 240, 24, true>>();
      run.template operator()<BackwardConfig<128, 2, 2, 240, 24>>();
    }
  });
}

}  // namespace tessera::ops

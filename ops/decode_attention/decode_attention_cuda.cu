#include "ops/decode_attention/decode_attention_device.cuh"

/// Variant "fma", the second kernel of both variants, and the copy into the cache.
///
/// Variant "fma" (f32, every head size; also the reference of the others): a warp reads four keys at a time,
/// eight lanes each, 16 bytes per lane and load; queries and weighted sums of a tile of up to four queries
/// lie in registers as f32. A score is a sum over eight lanes, three exchanges. Every group of eight lanes
/// has its own running maximum and sum, joined at the end. 4 operations per element and query against 4 bytes
/// (f32): bound by memory for a tile of queries.
///
/// The second kernel has a block for each query. Pieces are few hundred at most: what counts is that all
/// loads are in flight together.

namespace tessera::ops {
namespace decode {
namespace {

constexpr int kLanes = 8;     // that share a key
constexpr int kResident = 2;  // blocks that share an SM

template <class T, int kChunks, int kRows>
__global__ void __launch_bounds__(kThreads, kResident) attend_fma(Args<T> args) {
  constexpr int kPack = kPackOf<T>, kAhead = kRows == 1 && kChunks <= 4 ? 4 / kChunks * 2 : 1;
  constexpr int kStep = kWarp / kLanes * kAhead;
  __shared__ Found<kRows, kChunks * kLanes * kPack> found;
  gpu::launch_dependents();
  gpu::grid_dependency_wait();
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp, rank = lane % kLanes,
            group = lane / kLanes;
  const Unit unit(args, int(blockIdx.x));
  const Pieces pieces(args, length_of(args, unit.b));
  const int first_row = unit.tile * kRows, rows = min(kRows, args.queries - first_row);
  const int begin = unit.split * pieces.keys, end = min(begin + pieces.keys, pieces.length);
  if (begin >= end && (pieces.valid || args.splits > 1)) return;

  float q[kRows][kChunks][kPack], sums[kRows][kChunks][kPack] = {};
  float top[kRows], sum[kRows] = {};
  int seen[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = first_row + min(r, rows - 1);
    const T* const from = args.q + offset_of(args, args.q_stride, unit, row);
    seen[r] = seen_by(args, pieces, row);
    top[r] = gpu::Max::kIdentity;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int d = (c * kLanes + rank) * kPack;
      gpu::unpack(q[r][c], d < args.dim ? gpu::load_words(from + d) : Words<T>{});
    }
  }
  const T* const k = args.k + unit.b * args.k_stride[0] + unit.kv_head * args.k_stride[2] + rank * kPack;
  const T* const v = args.v + unit.b * args.v_stride[0] + unit.kv_head * args.v_stride[2] + rank * kPack;
  for (int j0 = begin + warp * kStep; j0 < end; j0 += kWarps * kStep) {
    Words<T> keys[kAhead][kChunks], values[kAhead][kChunks];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int j = j0 + a * (kStep / kAhead) + group;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const bool inside = j < end && (c * kLanes + rank) * kPack < args.dim;
        if (inside) keys[a][c] = gpu::load_words(k + j * args.k_stride[1] + c * (kLanes * kPack));
        if (inside) values[a][c] = gpu::load_words(v + j * args.v_stride[1] + c * (kLanes * kPack));
      }
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int j = j0 + a * (kStep / kAhead) + group;
      float score[kRows] = {};
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        float key[kPack];
        gpu::unpack(key, keys[a][c]);
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
          for (int i = 0; i < kPack; ++i) score[r] += q[r][c][i] * key[i];
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        score[r] = gpu::warp_reduce<gpu::Sum, kLanes>(score[r]) * args.scale;
        if (j >= end || j >= seen[r]) score[r] = gpu::Max::kIdentity;
        const float now = fmaxf(top[r], score[r]), base = now == gpu::Max::kIdentity ? 0.0f : now;
        const float rescale = gpu::exp2_approx(top[r] - base);
        score[r] = gpu::exp2_approx(score[r] - base);
        top[r] = now;
        sum[r] = sum[r] * rescale + score[r];
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
#pragma unroll
          for (int i = 0; i < kPack; ++i) sums[r][c][i] *= rescale;
      }
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        float value[kPack];
        gpu::unpack(value, values[a][c]);
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
          for (int i = 0; i < kPack; ++i) sums[r][c][i] += score[r] * value[i];
      }
    }
  }

#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float all = top[r];
#pragma unroll
    for (int step = kLanes; step < kWarp; step *= 2) all = fmaxf(all, __shfl_xor_sync(~0u, all, step));
    const float base = all == gpu::Max::kIdentity ? 0.0f : all;
    const float rescale = gpu::exp2_approx(top[r] - base);
    const auto join = [&](float& value) {
      value *= rescale;
#pragma unroll
      for (int step = kLanes; step < kWarp; step *= 2) value += __shfl_xor_sync(~0u, value, step);
    };
    join(sum[r]);
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (int i = 0; i < kPack; ++i) join(sums[r][c][i]);
    if (group != 0) continue;
    if (rank == 0) found.top[warp][r] = all, found.sum[warp][r] = sum[r];
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (int i = 0; i < kPack; i += 4)
        found.values[warp][r][((c * kLanes + rank) * kPack + i) / 4] = {sums[r][c][i], sums[r][c][i + 1],
                                                                        sums[r][c][i + 2], sums[r][c][i + 3]};
  }
  found.join(args, unit, pieces, first_row, rows);
}

constexpr int kJoinThreads = 256;

/// One block per query; four elements per thread; where threads remain, several of them share the pieces of
/// an element. Pieces that no block computed are loaded too, and ignored.
template <class T>
__global__ void __launch_bounds__(kJoinThreads) combine_splits(Args<T> args) {
  constexpr int kAhead = 8;
  __shared__ float4 sums[kJoinThreads];
  __shared__ float totals[kJoinThreads];
  gpu::launch_dependents();
  gpu::grid_dependency_wait();
  const int query = int(blockIdx.x), head = query % args.heads, token = query / args.heads % args.tokens,
            b = query / args.heads / args.tokens;
  const int lanes = args.dim / 4, ways = kJoinThreads / lanes;
  const int rank = int(threadIdx.x) % lanes, way = int(threadIdx.x) / lanes;
  const float2* const stats = args.stats + int64_t(query) * args.splits;
  const float4* const parts =
      reinterpret_cast<const float4*>(args.sums + int64_t(query) * args.splits * args.dim);
  const int most = way < ways ? args.splits : 0;

  // All on their way before the length and with it the number of pieces is known.
  float4 part[kAhead];
  float2 stat[kAhead];
#pragma unroll
  for (int a = 0; a < kAhead; ++a) {
    const int s = way + a * ways;
    if (s < most) part[a] = parts[int64_t(s) * lanes + rank], stat[a] = stats[s];
  }
  const int lane = int(threadIdx.x) % kWarp;
  const float first_top = lane < args.splits ? stats[lane].x : 0.0f;
  const Pieces pieces(args, length_of(args, b));
  if (pieces.used == 1) return;  // the first kernel has written o
  float top = lane < pieces.used ? first_top : gpu::Max::kIdentity;
  for (int s = lane + kWarp; s < pieces.used; s += kWarp) top = fmaxf(top, stats[s].x);
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  const float base = top == gpu::Max::kIdentity ? 0.0f : top;

  float4 sum = {};
  float total = 0;
  const auto add = [&](const float2& found, const float4& piece) {
    const float weight = gpu::exp2_approx(found.x - base);
    total += weight * found.y;
    sum.x += weight * piece.x, sum.y += weight * piece.y;
    sum.z += weight * piece.z, sum.w += weight * piece.w;
  };
  const int used = min(most, pieces.used);
#pragma unroll
  for (int a = 0; a < kAhead; ++a)
    if (way + a * ways < used) add(stat[a], part[a]);
  for (int s = way + kAhead * ways; s < used; s += ways) add(stats[s], parts[int64_t(s) * lanes + rank]);
  sums[threadIdx.x] = sum;
  totals[threadIdx.x] = total;
  __syncthreads();
  if (way != 0) return;
  for (int w = 1; w < ways; ++w) {
    const float4 other = sums[w * lanes + rank];
    sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
    total += totals[w * lanes + rank];
  }
  Found<1, 4>::write(
      args.o + b * args.o_stride[0] + token * args.o_stride[1] + head * args.o_stride[2] + rank * 4, sum,
      total, pieces.valid);
  if (rank == 0) write_lse(args, query, base, total);
}

template <class T, int kChunks, int kRows>
void run_fma(const DecodeProblem& p) {
  const Device device = p.q.device();
  const Plan<T> cut = plan<T>(p, kRows, kResident);
  gpu::launch(device, {.grid = dim3(unsigned(cut.blocks)), .block = kThreads, .overlaps = true},
              attend_fma<T, kChunks, kRows>, cut.args);
  join<T>(device, cut.args);
}

/// The tokens as words: elements, or packs of 16 bytes where everything lies so.
struct Append {
  Indices lengths;
  int64_t more, tokens, heads, dim, capacity, count;
  int64_t to[4], from[4];  // strides of sequences, tokens, heads, words
};

template <class Word>
__global__ void __launch_bounds__(256) append_rows(Word* cache, const Word* x, Append append) {
  gpu::launch_dependents();
  gpu::grid_dependency_wait();
  for (int64_t at = blockIdx.x * 256ll + threadIdx.x; at < append.count; at += gridDim.x * 256ll) {
    const int64_t head = at / append.dim, d = at - head * append.dim;
    const int64_t token = head / append.heads, h = head - token * append.heads;
    const int64_t b = token / append.tokens, t = token - b * append.tokens;
    const int64_t length = append.lengths[b] + append.more, row = length - append.tokens + t;
    if (row < t || length > append.capacity) continue;
    cache[b * append.to[0] + row * append.to[1] + h * append.to[2] + d * append.to[3]] =
        x[b * append.from[0] + t * append.from[1] + h * append.from[2] + d * append.from[3]];
  }
}

template <class Word>
void append_words(const AppendProblem& p, int64_t elements) {
  const Device device = p.x.device();
  Append append{.lengths = Indices(p.lengths),
                .more = p.more,
                .tokens = p.x.size(1),
                .heads = p.x.size(2),
                .dim = p.x.size(3) / elements,
                .capacity = p.cache.size(1),
                .count = p.x.count() / elements};
  for (int dim = 0; dim < 4; ++dim) {
    append.to[dim] = dim == 3 && elements > 1 ? 1 : p.cache.layout().stride(dim) / elements;
    append.from[dim] = dim == 3 && elements > 1 ? 1 : p.x.layout().stride(dim) / elements;
  }
  const int64_t blocks = std::min<int64_t>(gpu::ceil_div(append.count, 256), 32ll * device.multiprocessors());
  gpu::launch(device, {.grid = dim3(unsigned(blocks)), .block = 256, .overlaps = true}, append_rows<Word>,
              static_cast<Word*>(p.cache.raw()), static_cast<const Word*>(p.x.raw()), append);
}

bool in_packs(const Tensor& x, int64_t pack) {
  bool fits =
      x.size(3) % pack == 0 && x.layout().stride(3) == 1 && reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0;
  for (int dim = 0; dim < 3; ++dim) fits = fits && (x.size(dim) == 1 || x.layout().stride(dim) % pack == 0);
  return fits;
}

}  // namespace

template <class T>
void join(Device device, const Args<T>& args) {
  if (args.splits > 1)
    gpu::launch(device,
                {.grid = dim3(unsigned(args.batch * args.tokens * args.heads)),
                 .block = kJoinThreads,
                 .overlaps = true},
                combine_splits<T>, args);
}
template void join<float>(Device, const Args<float>&);
template void join<bf16>(Device, const Args<bf16>&);
template void join<f16>(Device, const Args<f16>&);

}  // namespace decode

void decode_attention_mma_cuda(const DecodeProblem& p) {
  p.q.dtype() == DType::bf16 ? decode::run_mma<bf16>(p) : decode::run_mma<f16>(p);
}

void decode_attention_fma_cuda(const DecodeProblem& p) {
  const int64_t dim = p.q.size(3);
  dispatch_floating_cuda(p.q.dtype(), "decode_attention", [&]<class T>() {
    const int64_t chunks = gpu::ceil_div(dim, decode::kLanes * gpu::kPackOf<T>);
    const bool single = p.q.size(1) * p.q.size(2) == p.keys.size(2);
    if (chunks <= 1) {
      single ? decode::run_fma<T, 1, 1>(p) : decode::run_fma<T, 1, 4>(p);
    } else if (chunks <= 2) {
      single ? decode::run_fma<T, 2, 1>(p) : decode::run_fma<T, 2, 4>(p);
    } else if (chunks <= 4) {
      single ? decode::run_fma<T, 4, 1>(p) : decode::run_fma<T, 4, sizeof(T) == 4 ? 4 : 2>(p);
    } else if constexpr (sizeof(T) == 4) {
      single ? decode::run_fma<T, 8, 1>(p) : decode::run_fma<T, 8, 2>(p);
    }
  });
}

void append_to_cache_cuda(const AppendProblem& p) {
  const int64_t size = int64_t(size_of(p.x.dtype())), pack = 16 / size;
  if (decode::in_packs(p.cache, pack) && decode::in_packs(p.x, pack))
    decode::append_words<uint4>(p, pack);
  else if (size == 1)
    decode::append_words<uint8_t>(p, 1);
  else if (size == 2)
    decode::append_words<uint16_t>(p, 1);
  else if (size == 4)
    decode::append_words<uint32_t>(p, 1);
  else
    decode::append_words<uint64_t>(p, 1);
}

}  // namespace tessera::ops

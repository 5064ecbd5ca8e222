#include <algorithm>

#include "gpu/barrier.cuh"
#include "gpu/dependent_launch.cuh"
#include "gpu/grid.cuh"
#include "gpu/pack.cuh"
#include "gpu/reread.cuh"
#include "gpu/shared.cuh"
#include "gpu/tma.cuh"
#include "gpu/wgmma.cuh"
#include "gpu/wgmma_instructions.cuh"
#include "ops/bits/bits_kernels.h"
#include "ops/bits/bits_math.h"

/// All pairs by single-bit MMAs of sm_90a: S[m][n] += popc(a[m] and b[n]), 64 x 128 x 256 bits each.
///
/// A block walks over tiles of 128 x 128 pairs: one producer thread loads 1,024 bits (128 bytes) of 128 rows
/// of both operands by TMA into the stages of a pipeline, two warpgroups multiply 64 rows each and store.
/// Rows of bits are
/// K-major tiles of 128-byte rows with the 128-byte swizzle, as 8-bit operands would be; a step of 256 bits
/// is 32 bytes along the row. TMA fills zeros past the edges, which add nothing to a count.
///
/// The result is what bounds the kernel (4 bytes per pair; 4,096 bits of a tile are 16 MMAs), so two blocks
/// share an SM and one's stores run under the other's MMAs. A thread stores its accumulators directly: four
/// lanes write 32 adjacent bytes of a row, whole sectors. If b is a, tiles on and above the diagonal are
/// computed, and the same registers are written transposed: eight lanes hold 32 adjacent bytes of a column.

namespace tessera::ops {
namespace {

constexpr int kTile = 128, kStages = 3, kGroups = 2, kThreads = 128 * kGroups + gpu::kWarp;
constexpr int kBoxWords = 32, kBoxBytes = kTile * 128, kStageBytes = 2 * kBoxBytes;
constexpr int kSharedBytes = kStages * kStageBytes + int(sizeof(gpu::Ring<kStages>));
constexpr int kSteps = 4;  // of 256 bits in a stage
constexpr uint64_t kStepOfDescriptor = 32 >> 4;
constexpr int kSums = kTile / 2;  // accumulators per thread

struct PairsArgs {
  uint32_t* out;
  int64_t stride;
  const int32_t *of_a, *of_b;
  int m, n, boxes;  // of 1,024 bits along a row
  int tiles_n, items;
  BitMeasure measure;
  bool mirrored, wide;  // wide: two neighbours may be stored as 8 bytes
};

struct PairsMaps {
  gpu::TensorMap a, b;
};

/// First row and column of a tile.
struct TileCoord {
  int m, n;
};
__device__ __forceinline__ TileCoord tile_of_item(const PairsArgs& args, int item) {
  if (!args.mirrored) {
    const int m = item / args.tiles_n;
    return {m * kTile, (item - m * args.tiles_n) * kTile};
  }
  // Column by column of the upper triangle: n (n + 1) / 2 tiles lie before column n.
  int n = int((sqrtf(8.0f * float(item) + 1.0f) - 1.0f) * 0.5f);
  while (int64_t(n) * (n + 1) / 2 > item) --n;
  while (int64_t(n + 1) * (n + 2) / 2 <= item) ++n;
  return {(item - int(int64_t(n) * (n + 1) / 2)) * kTile, n * kTile};
}

/// Producer thread: TMA loads.
__device__ __forceinline__ void load_operands(const PairsMaps& maps, const PairsArgs& args, char* stages,
                                              gpu::Ring<kStages>& ring) {
  gpu::RingState<kStages> state;
  for (int item = int(blockIdx.x); item < args.items; item += int(gridDim.x)) {
    const TileCoord tile = tile_of_item(args, item);
    for (int box = 0; box < args.boxes; ++box) {
      char* const to = stages + state.stage * kStageBytes;
      gpu::Barrier& full = ring.full[state.stage];
      ring.empty[state.stage].wait(state.parity ^ 1);
      full.arrive_expect(kStageBytes);
      gpu::tma_load(to, maps.a, full, box * kBoxWords, tile.m);
      gpu::tma_load(to + kBoxBytes, maps.b, full, box * kBoxWords, tile.n);
      state.advance();
    }
  }
}

/// Consumer warpgroup: the counts of its 64 rows of a tile.
__device__ __forceinline__ void count_tile(uint32_t (&sums)[kSums], int boxes, int group, char* stages,
                                           gpu::Ring<kStages>& ring, gpu::RingState<kStages>& state) {
  const auto release = [&](int stage) {
    if (threadIdx.x % gpu::kWarp == 0) ring.empty[stage].arrive();
  };
  const uint32_t start = gpu::shared_address(stages);
  const uint64_t a_tile = gpu::tile_descriptor<gpu::TileOrder::k_major>(start + uint32_t(group) * 64 * 128);
  const uint64_t b_tile = gpu::tile_descriptor<gpu::TileOrder::k_major>(start + kBoxBytes);
  int before = 0;
  for (int box = 0; box < boxes; ++box) {
    ring.full[state.stage].wait(state.parity);
    const uint64_t at = uint64_t(state.stage * (kStageBytes >> 4));
    gpu::warpgroup_fence_operand(sums);
    gpu::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      gpu::detail::WgmmaBits::ss(sums, a_tile + at + step * kStepOfDescriptor,
                                 b_tile + at + step * kStepOfDescriptor, box | step);
    gpu::warpgroup_commit();
    gpu::warpgroup_wait<1>();
    if (box > 0) release(before);
    before = state.stage;
    state.advance();
  }
  gpu::warpgroup_wait<0>();
  gpu::warpgroup_fence_operand(sums);
  release(before);
}

/// Epilogue: thread t holds rows 16 w + g and + 8, columns 8 j + 2 c and + 1 (gpu/wgmma.cuh).
__device__ __forceinline__ void store_tile(const PairsArgs& args, const TileCoord& tile, int group,
                                           uint32_t (&sums)[kSums]) {
  const int thread = gpu::reread_thread() % 128, lane = thread % gpu::kWarp;
  const int row = tile.m + group * 64 + thread / gpu::kWarp * 16 + lane / 4, first = tile.n + lane % 4 * 2;
  const bool counted = args.measure != BitMeasure::overlap, transposed = args.mirrored && tile.n > tile.m;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int m = row + 8 * half;
    if (m >= args.m) return;
    const uint32_t of_a = counted ? uint32_t(args.of_a[m]) : 0;
    uint32_t* const to = args.out + m * args.stride;
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j) {
      const int n = first + 8 * j;
      if (n >= args.n) break;
      const bool pair = n + 1 < args.n;
      uint32_t value[2] = {sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]};
      if (counted) {
        value[0] = pair_value(args.measure, of_a, uint32_t(args.of_b[n]), value[0]);
        if (pair) value[1] = pair_value(args.measure, of_a, uint32_t(args.of_b[n + 1]), value[1]);
      }
      if (args.wide && pair) {
        *reinterpret_cast<uint2*>(to + n) = {value[0], value[1]};
      } else {
        to[n] = value[0];
        if (pair) to[n + 1] = value[1];
      }
      if (transposed) {
        args.out[n * args.stride + m] = value[0];
        if (pair) args.out[(n + 1) * args.stride + m] = value[1];
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads, 2)
    pairs_kernel(const __grid_constant__ PairsMaps maps, const __grid_constant__ PairsArgs args) {
  extern __shared__ __align__(1024) char shared[];
  auto& ring = *reinterpret_cast<gpu::Ring<kStages>*>(shared + kStages * kStageBytes);
  const int group = gpu::uniform(int(threadIdx.x) / 128);
  if (threadIdx.x == 0) {
    ring.init(1, kGroups * 4);
    gpu::fence_barrier_init();
    gpu::prefetch_map(maps.a);
    gpu::prefetch_map(maps.b);
  }
  __syncthreads();
  gpu::wait_and_launch_dependents();
  if (group == kGroups) {
    if (threadIdx.x % gpu::kWarp == 0) load_operands(maps, args, shared, ring);
    return;
  }
  gpu::RingState<kStages> state;
  uint32_t sums[kSums];
  for (int item = int(blockIdx.x); item < args.items; item += int(gridDim.x)) {
    count_tile(sums, args.boxes, group, shared, ring, state);
    store_tile(args, tile_of_item(args, item), group, sums);
    __syncwarp();
  }
}

/// TMA moves bits: its type f32 stands for any element of 4 bytes.
gpu::TensorMap map_of(const Tensor& bits) {
  return gpu::tensor_map<float, 2>(reinterpret_cast<const float*>(bits.data<int32_t>()),
                                   {bits.size(1), bits.size(0)}, {bits.row_stride()}, {kBoxWords, kTile},
                                   gpu::Swizzle::k128);
}

}  // namespace

void bit_pairs_wgmma(const BitPairs& call) {
  const Device device = call.a.device();
  const int64_t tiles_m = gpu::ceil_div(call.a.size(0), kTile),
                tiles_n = gpu::ceil_div(call.b.size(0), kTile);
  const int64_t items = call.mirrored ? tiles_m * (tiles_m + 1) / 2 : tiles_m * tiles_n;
  check(items < int64_t{1} << 31, "bit_pairs: a is ", describe(call.a), ", b is ", describe(call.b),
        "; a launch takes at most 2^31 tiles of 128 x 128 pairs (split the rows over several calls)");
  const PairsMaps maps{map_of(call.a), map_of(call.b)};
  const PairsArgs args{
      .out = static_cast<uint32_t*>(call.out.raw()),
      .stride = call.out.row_stride(),
      .of_a = call.of_a.defined() ? call.of_a.data<int32_t>() : nullptr,
      .of_b = call.of_b.defined() ? call.of_b.data<int32_t>() : nullptr,
      .m = int(call.a.size(0)),
      .n = int(call.b.size(0)),
      .boxes = int(gpu::ceil_div(call.a.size(1), kBoxWords)),
      .tiles_n = int(tiles_n),
      .items = int(items),
      .measure = call.measure,
      .mirrored = call.mirrored,
      .wide = gpu::is_pack_aligned(static_cast<uint32_t*>(call.out.raw()), call.out.row_stride(), 2)};
  const int64_t blocks = std::min<int64_t>(items, 2 * int64_t(device.multiprocessors()));
  gpu::launch_dependent(device,
                        {.grid = gpu::grid_of(blocks), .block = kThreads, .shared_bytes = kSharedBytes},
                        pairs_kernel, maps, args);
}

}  // namespace tessera::ops

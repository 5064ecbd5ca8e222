#include <algorithm>

#include "gpu/reread.cuh"
#include "ops/grouped_mlp/grouped_mlp_sm90.cuh"

/// The hidden layer of the heads' backward in one kernel: h is recomputed, dh is written once, and the
/// gradient of the second weight is computed meanwhile.
///
/// A unit of work is 128 hidden columns of one head over a share of the tokens: the weight's 128 rows stay in
/// shared memory, tokens are streamed in tiles of 64. An accumulator h gives a = f(h) and f'(h) with one
/// special function; dh = da f'(h) is stored through shared memory, half a tile (64 columns) at a time. da =
/// dy down is a small MMA for 16 tokens and 8 columns; ddown^T = a^T dy is one over tokens: a is rounded to
/// the dtype, an 8 x 8 block is transposed in registers (movmatrix) and is then the left operand, and the
/// sums stay in registers for the whole unit: no reductions by shuffles.
///
/// FLOPs: 2 D F K per token (the other two GEMMs, dx and dup, are ordinary ones on dh). Bytes: dh written, 2
/// F K per token. An epilogue is a chain of short dependent steps with few registers to overlap them, so it
/// takes longer than the MMAs of a tile: three warpgroups take tiles in turn; one runs its MMAs next to the
/// epilogues of two.

namespace tessera::ops {
namespace {

constexpr int kTokens = 64, kColumns = 128, kStages = 8, kConsumers = 3;

template <class T>
struct BackwardArgs {
  const T* down;  // [K, E, F]
  int64_t down_group, down_row;
  const T* dy;  // [rows, K, E]
  int64_t dy_row, dy_group, dy_out;
  float* ddown;                                                                    // [splits, K, E, F]
  int rows, groups, wide, stored, out, chunks, tiles, token_tiles, splits, units;  // stored: columns of dh
};

struct BackwardShared {
  alignas(1024) char up[kHeadChunks][kColumns * 128];
  alignas(1024) char x[kStages][kTokens * 128];
  alignas(1024) char dh[kConsumers][kTokens * 128];  // 64 columns of a tile of each warpgroup
  alignas(16) uint4 dy[kConsumers][kTokens];         // one row per token: its outputs, zeros up to eight
  uint32_t down[4][kColumns + 8];                    // per column: outputs 2 i, 2 i + 1, zeros up to eight
  Resident resident;
  gpu::Ring<kStages> ring;
};

struct BackwardUnit {
  int split, group, first_column, first_tile, end_tile;

  template <class T>
  __device__ BackwardUnit(const BackwardArgs<T>& args, int unit)
      : split(unit % args.splits),
        group(unit / args.splits / args.tiles),
        first_column(unit / args.splits % args.tiles * kColumns),
        first_tile(int(int64_t(split) * args.token_tiles / args.splits)),
        end_tile(int(int64_t(split + 1) * args.token_tiles / args.splits)) {}
};

constexpr int kUnitDone = 8, kConsuming = kConsumers * 128;  // named barrier of all consumers

template <class T, Activation kKind>
__global__ void __launch_bounds__(head_threads(kConsumers), 1)
    hidden_gradient_kernel(const __grid_constant__ gpu::TensorMap map_x,
                           const __grid_constant__ gpu::TensorMap map_up,
                           const __grid_constant__ gpu::TensorMap map_dh, const BackwardArgs<T> args) {
  extern __shared__ __align__(1024) char bytes[];
  BackwardShared& shared = *reinterpret_cast<BackwardShared*>(bytes);
  const int group = gpu::uniform(int(threadIdx.x) / 128);
  if (threadIdx.x == 0) {
    shared.resident.init(kConsumers);
    shared.ring.init(1, 1);
    gpu::fence_barrier_init();
  }
  __syncthreads();

  if (group == 0) {
    // Producer: one thread issues the TMA loads.
    gpu::warpgroup_reg_dealloc<24>();
    if (threadIdx.x >= 32 || !gpu::elect_one()) return;
    StreamState<kStages> stream;
    uint32_t resident_parity = 0;
    for (int index = int(blockIdx.x); index < args.units; index += int(gridDim.x), resident_parity ^= 1) {
      const BackwardUnit unit(args, index);
      for (int tile = unit.first_tile; tile < unit.end_tile; ++tile)
        for (int chunk = 0; chunk < args.chunks; ++chunk, ++stream.at) {
          if (tile == unit.first_tile) {
            shared.resident.empty[chunk].wait(resident_parity ^ 1);
            shared.resident.full[chunk].arrive_expect(kColumns * 128);
            gpu::tma_load(shared.up[chunk], map_up, shared.resident.full[chunk], chunk * kHeadDepth,
                          unit.first_column, unit.group);
          }
          const int stage = stream.stage();
          shared.ring.empty[stage].wait(stream.parity() ^ 1);
          shared.ring.full[stage].arrive_expect(kTokens * 128);
          gpu::tma_load(shared.x[stage], map_x, shared.ring.full[stage], chunk * kHeadDepth, tile * kTokens);
        }
    }
    return;
  }

  // Consumer warpgroups.
  gpu::warpgroup_reg_alloc<160>();
  const int consumer = group - 1, thread = int(threadIdx.x) % 128;
  char* const staging = shared.dh[consumer];
  const OrderBarrier<kConsumers> order(consumer);
  StreamState<kStages> stream;
  int next_consumer = 0;
  uint32_t resident_parity = 0;
  for (int index = int(blockIdx.x); index < args.units; index += int(gridDim.x), resident_parity ^= 1) {
    // Per unit: second weight to shared memory.
    const BackwardUnit unit(args, index);
#pragma unroll 1
    for (int i = gpu::reread_thread() - 128; i < 4 * kColumns; i += kConsuming) {
      const int pair = i / kColumns, f = unit.first_column + i % kColumns;
      const T* const from = args.down + unit.group * args.down_group + f;
      const auto at = [&](int e) {
        return e < args.out && f < args.wide ? float(from[e * args.down_row]) : 0.0f;
      };
      shared.down[pair][i % kColumns] = gpu::pack_halves<T>(at(2 * pair), at(2 * pair + 1));
    }
    gpu::sync_named(kUnitDone, kConsuming);
    const int first_own = unit.first_tile + order.ahead(next_consumer);
    T dy[kMostHeadOut];  // of this thread's token in the next tile
    const auto read_dy = [&](int tile) {
      if (thread >= kTokens) return;
      const int64_t token = int64_t(tile) * kTokens + thread;
      const T* const row = args.dy + token * args.dy_row + unit.group * args.dy_group;
#pragma unroll
      for (int e = 0; e < kMostHeadOut; ++e)
        dy[e] = token < args.rows && e < args.out ? row[e * args.dy_out] : T();
    };
    read_dy(first_own);
    float sums[kColumns / 16][4] = {};  // ddown^T: columns 16 i + g (+ 8), outputs 2 c, 2 c + 1
    for (int tile = unit.first_tile; tile < unit.end_tile;
         ++tile, next_consumer = order.next(next_consumer)) {
      // The chunks of a skipped tile still advance the pipeline state.
      if (next_consumer != consumer) {
        stream.at += uint32_t(args.chunks);
        continue;
      }
      // Per tile: dy to shared memory, MMAs.
      gpu::sync_named(1 + consumer, 128);
      if (thread < kTokens)
        shared.dy[consumer][thread] = {gpu::pack_halves<T>(float(dy[0]), float(dy[1])),
                                       gpu::pack_halves<T>(float(dy[2]), 0), 0, 0};
      gpu::sync_named(1 + consumer, 128);
      float h[1][kColumns / 2];
      TileGemm<T, 1, kColumns, kStages, false>::run(
          h, gpu::shared_address(shared.x), gpu::shared_address(shared.up), shared.resident, resident_parity,
          tile + kConsumers >= unit.end_tile, shared.ring, stream, order, args.chunks);

      // Epilogue of the tile: da, dh, ddown.
#pragma unroll
      for (int part = 0; part < 2; ++part) {  // 64 columns
        if (thread == 0) gpu::wait_stores_read<0>();
        gpu::sync_named(1 + consumer, 128);         // the staging is free
        if (part == 1) read_dy(tile + kConsumers);  // here registers are free, and the latency is hidden
        const int lane = gpu::reread_lane(), warp = gpu::reread_thread() % 128 / 32, g = lane / 4,
                  c = lane % 4;
        // The dy of the warp's 16 tokens, as two operands: outputs along the rows, the left operand of da,
        // and along the columns, the right one of ddown. Two 8 x 8 blocks each; the other two are copies.
        uint32_t dy_left[4], dy_right[4];
        const uint32_t dy_row = gpu::shared_address(&shared.dy[consumer][warp * 16 + lane % 16]);
        gpu::ldmatrix_x4(dy_left, dy_row);
        gpu::ldmatrix_x4_trans(dy_right, dy_row);
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {  // 16 columns: two 8 x 8 blocks a row of blocks
          const int columns = part * 64 + pair * 16;
          uint32_t a[4], dh[4];  // blocks: rows + 0, 8 of block 0, then of block 1
#pragma unroll
          for (int block = 0; block < 2; ++block) {
            float da[4] = {};
            gpu::mma_m16n8k8<T>(da, dy_left[0], dy_left[1], shared.down[c][columns + block * 8 + g]);
#pragma unroll
            for (int eight = 0; eight < 2; ++eight) {
              const int at = 4 * (columns / 8 + block) + 2 * eight;
              float left, right;
              const float left_slope = ActivationApprox<T, kKind>::slope(h[0][at], left),
                          right_slope = ActivationApprox<T, kKind>::slope(h[0][at + 1], right);
              a[block + 2 * eight] = gpu::movmatrix_trans(gpu::pack_halves<T>(left, right));
              dh[eight + 2 * block] =
                  gpu::pack_halves<T>(da[2 * eight] * left_slope, da[2 * eight + 1] * right_slope);
            }
          }
          gpu::mma_m16n8k16<T>(sums[columns / 16], a, dy_right[0], dy_right[1]);
          gpu::stmatrix_x4(gpu::shared_address(staging) +
                               gpu::swizzled_offset(warp * 16 + lane % 16, pair * 2 + lane / 16),
                           dh);
        }
        gpu::fence_async_shared();
        gpu::sync_named(1 + consumer, 128);
        if (thread == 0) {
          const int column = unit.first_column + part * 64;
          if (column < args.stored) gpu::tma_store(map_dh, staging, column, unit.group, tile * kTokens);
          gpu::commit_stores();
        }
      }
    }
    if (first_own >= unit.end_tile)  // this warpgroup has no tile of the unit
      shared.resident.pass(resident_parity, args.chunks, thread == 0);

    // End of the unit: adds all warps' sums, in order, through the staging buffers, which only the consumers
    // use now.
    if (thread == 0) gpu::wait_stores_read<0>();
    gpu::sync_named(1 + consumer, 128);
    const int lane = gpu::reread_lane(), warp = gpu::reread_thread() % 128 / 32, g = lane / 4, c = lane % 4;
    float* const mine = reinterpret_cast<float*>(staging) + warp * kColumns * 4;  // [column][output]
    if (c < 2)
#pragma unroll
      for (int i = 0; i < kColumns / 16; ++i)
#pragma unroll
        for (int eight = 0; eight < 2; ++eight)
          *reinterpret_cast<float2*>(&mine[(i * 16 + eight * 8 + g) * 4 + 2 * c]) =
              make_float2(sums[i][2 * eight], sums[i][2 * eight + 1]);
    gpu::sync_named(kUnitDone, kConsuming);
    const int f = unit.first_column + thread;
    if (consumer == 0 && f < args.wide)
      for (int e = 0; e < args.out; ++e) {
        float total = 0;
#pragma unroll
        for (int w = 0; w < 4 * kConsumers; ++w)
          total += reinterpret_cast<const float*>(shared.dh[w / 4])[(w % 4 * kColumns + thread) * 4 + e];
        args.ddown[((int64_t(unit.split) * args.groups + unit.group) * args.out + e) * args.wide + f] = total;
      }
    gpu::sync_named(kUnitDone, kConsuming);
  }
  if (thread == 0) gpu::wait_stores<0>();
}

int token_tiles(const Tensor& x) {
  return int(gpu::ceil_div(x.size(0), kTokens));
}
int column_tiles(const Tensor& up) {
  return int(gpu::ceil_div(up.size(1), kColumns));
}

/// Of rows for one launch.
int splits_of(const Tensor& x, const Tensor& up) {
  return choose_splits(up.size(0) * column_tiles(up), token_tiles(x), x.device().multiprocessors(), 2.0);
}

/// Rows for one launch.
void hidden_gradient(const Tensor& dh, const Tensor& ddown_parts, const Tensor& dy, const Tensor& x,
                     const Tensor& up, const Tensor& down, Activation kind) {
  const Device device = x.device();
  dispatch_floating_cuda(x.dtype(), "grouped_mlp", [&]<class T>() {
    if constexpr (!std::is_same_v<T, float>) {
      BackwardArgs<T> args{};
      args.down = down.data<T>();
      args.down_group = down.layout().stride(0), args.down_row = down.layout().stride(1);
      args.dy = dy.data<T>();
      args.dy_row = dy.layout().stride(0), args.dy_group = dy.layout().stride(1),
      args.dy_out = dy.layout().stride(2);
      args.ddown = ddown_parts.data<float>();
      args.rows = int(x.size(0)), args.groups = int(up.size(0)), args.wide = int(up.size(1));
      args.stored = int(dh.size(2));
      args.out = int(down.size(1));
      args.chunks = int(gpu::ceil_div(x.size(1), kHeadDepth));
      args.tiles = column_tiles(up), args.token_tiles = token_tiles(x);
      args.splits = int(ddown_parts.size(0));
      args.units = args.groups * args.tiles * args.splits;
      const auto map_x = gpu::tensor_map<T, 2>(x.data<T>(), {x.size(1), x.size(0)}, {x.layout().stride(0)},
                                               {kHeadDepth, kTokens}, gpu::Swizzle::k128);
      const auto map_up = gpu::tensor_map<T, 3>(up.data<T>(), {up.size(2), up.size(1), up.size(0)},
                                                {up.layout().stride(1), up.layout().stride(0)},
                                                {kHeadDepth, kColumns, 1}, gpu::Swizzle::k128);
      const auto map_dh = gpu::tensor_map<T, 3>(dh.data<T>(), {dh.size(2), dh.size(1), dh.size(0)},
                                                {dh.layout().stride(1), dh.layout().stride(0)},
                                                {64, 1, kTokens}, gpu::Swizzle::k128);
      const int blocks = std::min(device.multiprocessors(), args.units);
      dispatch_activation(kind, [&]<Activation kKind>() {
        gpu::launch(device, {dim3(unsigned(blocks)), dim3(head_threads(kConsumers)), sizeof(BackwardShared)},
                    hidden_gradient_kernel<T, kKind>, map_x, map_up, map_dh, args);
      });
    }
  });
}

/// visit(begin, end) for the rows of each launch.
template <class Visit>
void for_launches(int64_t rows, int64_t launch_rows, Visit&& visit) {
  for (int64_t begin = 0; begin < rows; begin += launch_rows)
    visit(begin, std::min(begin + launch_rows, rows));
}

}  // namespace

int64_t grouped_mlp_gradient_splits(const Tensor& x, const Tensor& up, int64_t launch_rows) {
  int64_t splits = 0;
  for_launches(x.size(0), launch_rows,
               [&](int64_t begin, int64_t end) { splits += splits_of(x.slice(0, begin, end), up); });
  return splits;
}

void grouped_mlp_hidden_gradient_cuda(const Tensor& dh, const Tensor& ddown_parts, const Tensor& dy,
                                      const Tensor& x, const Tensor& up, const Tensor& down, Activation kind,
                                      int64_t launch_rows) {
  int64_t split = 0;
  for_launches(x.size(0), launch_rows, [&](int64_t begin, int64_t end) {
    const Tensor rows = x.slice(0, begin, end);
    const int64_t first = split;
    split += splits_of(rows, up);
    hidden_gradient(dh.slice(0, begin, end), ddown_parts.slice(0, first, split), dy.slice(0, begin, end),
                    rows, up, down, kind);
  });
}

}  // namespace tessera::ops

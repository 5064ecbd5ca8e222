#include <algorithm>

#include "ops/grouped_mlp/grouped_mlp_sm90.cuh"
#include "ops/linear/linear_kernels.h"

/// Forward of the heads in one kernel: the hidden rows exist only in registers.
///
/// A unit of work is 128 tokens of one head (or of a part of its hidden columns, where units are few): x
/// stays in shared memory (128 x 512, 128 KiB), the head's first weight is streamed in tiles of 152 columns,
/// nine of which make 1368 for the 1365 of the bundled model, and each warpgroup reduces its accumulators h
/// to E dot products with the second weight: f(h) is never stored. Only E floats per row remain of a tile.
///
/// FLOPs: 2 D F K per token. Bytes: x and the weights from L2, y. Bound by the tensor cores; the epilogue
/// (about ten instructions per accumulator, one of them special) takes a third of the time of a tile's MMAs
/// and runs next to those of the other warpgroup.

namespace tessera::ops {
namespace {

constexpr int kRows = 128, kColumns = 152, kStages = 4;

template <class T>
struct ForwardArgs {
  const T* down;  // [K, E, F]
  int64_t down_group, down_row;
  T* y;  // [rows, K, E]
  int64_t y_row, y_group;
  float* parts;  // [splits, rows, K, E] if splits > 1
  int rows, groups, wide, out, chunks, tiles, splits, units;
  Activation kind;
};

struct ForwardShared {
  alignas(1024) char x[kHeadChunks][kRows * 128];
  alignas(1024) char up[kStages][kColumns * 128];
  float down[2][kMostHeadOut][kColumns];
  float dots[kRows][kMostHeadOut];
  Resident resident;
  gpu::Ring<kStages> ring;
};

struct ForwardUnit {
  int split, group, first_row, first_tile, end_tile;

  template <class T>
  __device__ ForwardUnit(const ForwardArgs<T>& args, int unit)
      : split(unit % args.splits),
        group(unit / args.splits % args.groups),
        first_row(unit / args.splits / args.groups * kRows),
        first_tile(split * args.tiles / args.splits),
        end_tile((split + 1) * args.tiles / args.splits) {}
};

constexpr int kPartsFull = 3, kPartsFree = 4;  // named barriers

template <class T>
__global__ void __launch_bounds__(head_threads(2), 1)
    forward_kernel(const __grid_constant__ gpu::TensorMap map_x,
                   const __grid_constant__ gpu::TensorMap map_up, const ForwardArgs<T> args) {
  extern __shared__ __align__(1024) char bytes[];
  ForwardShared& shared = *reinterpret_cast<ForwardShared*>(bytes);
  const int group = gpu::uniform(int(threadIdx.x) / 128);
  if (threadIdx.x == 0) {
    shared.resident.init(2);
    shared.ring.init(1, 1);
    gpu::fence_barrier_init();
  }
  __syncthreads();

  if (group == 0) {
    // Producer: one thread issues the TMA loads.
    gpu::warpgroup_reg_dealloc<24>();
    if (threadIdx.x >= 32 || !gpu::elect_one()) return;
    StreamState<kStages> stream;
    uint32_t resident_parity = 0;  // phase of the resident operand: parity of the work unit
    for (int index = int(blockIdx.x); index < args.units; index += int(gridDim.x), resident_parity ^= 1) {
      const ForwardUnit unit(args, index);
      for (int tile = unit.first_tile; tile < unit.end_tile; ++tile)
        for (int chunk = 0; chunk < args.chunks; ++chunk, ++stream.at) {
          if (tile == unit.first_tile) {
            shared.resident.empty[chunk].wait(resident_parity ^ 1);
            shared.resident.full[chunk].arrive_expect(kRows * 128);
            gpu::tma_load(shared.x[chunk], map_x, shared.resident.full[chunk], chunk * kHeadDepth,
                          unit.first_row);
          }
          const int stage = stream.stage();
          shared.ring.empty[stage].wait(stream.parity() ^ 1);
          shared.ring.full[stage].arrive_expect(kColumns * 128);
          gpu::tma_load(shared.up[stage], map_up, shared.ring.full[stage], chunk * kHeadDepth,
                        tile * kColumns, unit.group);
        }
    }
    return;
  }

  // Consumer warpgroups.
  gpu::warpgroup_reg_alloc<240>();
  const int consumer = group - 1, thread = int(threadIdx.x) % 128, lane = thread % 32;
  float(&down)[kMostHeadOut][kColumns] = shared.down[consumer];
  const OrderBarrier<2> order(consumer);
  StreamState<kStages> stream;
  int next_consumer =
      0;  // consumer warpgroup of the next tile: they alternate over the whole stream of tiles
  uint32_t resident_parity = 0;
  for (int index = int(blockIdx.x); index < args.units; index += int(gridDim.x), resident_parity ^= 1) {
    // Per unit.
    const ForwardUnit unit(args, index);
    float dots[4][kMostHeadOut] = {};  // rows lane / 4 + 8 i of this warp's 16 in both halves
    for (int tile = unit.first_tile; tile < unit.end_tile; ++tile, next_consumer ^= 1) {
      // The chunks of a skipped tile still advance the pipeline state.
      if (next_consumer != consumer) {
        stream.at += uint32_t(args.chunks);
        continue;
      }
      // Per tile: second weight to shared memory, MMAs.
      gpu::sync_named(1 + consumer, 128);  // all warps have read the second weight of the last tile
      for (int i = thread; i < kMostHeadOut * kColumns; i += 128) {
        const int e = i / kColumns, column = i % kColumns, f = tile * kColumns + column;
        down[e][column] = e < args.out && f < args.wide
                              ? float(args.down[unit.group * args.down_group + e * args.down_row + f])
                              : 0.0f;
      }
      gpu::sync_named(1 + consumer, 128);
      float h[2][kColumns / 2];
      TileGemm<T, 2, kColumns, kStages, true>::run(
          h, gpu::shared_address(shared.x), gpu::shared_address(shared.up), shared.resident, resident_parity,
          tile + 2 >= unit.end_tile, shared.ring, stream, order, args.chunks);
      // Epilogue of the tile: f(h) times the second weight.
      with_activation(args.kind, [&]<Activation kKind>() {
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
          float2 w[kMostHeadOut];
#pragma unroll
          for (int e = 0; e < kMostHeadOut; ++e)
            w[e] = *reinterpret_cast<const float2*>(&down[e][j * 8 + lane % 4 * 2]);
#pragma unroll
          for (int row = 0; row < 4; ++row) {
            const float left = ActivationApprox<T, kKind>::value(h[row / 2][4 * j + row % 2 * 2]);
            const float right = ActivationApprox<T, kKind>::value(h[row / 2][4 * j + row % 2 * 2 + 1]);
#pragma unroll
            for (int e = 0; e < kMostHeadOut; ++e)
              dots[row][e] = fmaf(left, w[e].x, fmaf(right, w[e].y, dots[row][e]));
          }
        }
      });
    }
    // End of the unit: sum over the lanes of a row, then over both warpgroups; store.
    if (unit.end_tile - unit.first_tile == 1 && next_consumer == consumer)  // the other's tile
      shared.resident.pass(resident_parity, args.chunks, thread == 0);

#pragma unroll
    for (int row = 0; row < 4; ++row)
#pragma unroll
      for (int e = 0; e < kMostHeadOut; ++e) {
        dots[row][e] += __shfl_xor_sync(0xFFFFFFFFu, dots[row][e], 1);
        dots[row][e] += __shfl_xor_sync(0xFFFFFFFFu, dots[row][e], 2);
      }
    const int first = thread / 32 * 16 + lane / 4;
    if (consumer == 1) {
      if (index != int(blockIdx.x)) gpu::sync_named(kPartsFree, 256);
      if (lane % 4 == 0)
#pragma unroll
        for (int row = 0; row < 4; ++row)
#pragma unroll
          for (int e = 0; e < kMostHeadOut; ++e)
            shared.dots[first + row / 2 * 64 + row % 2 * 8][e] = dots[row][e];
      gpu::arrive_named(kPartsFull, 256);
    } else {
      gpu::sync_named(kPartsFull, 256);
      if (lane % 4 == 0)
#pragma unroll
        for (int row = 0; row < 4; ++row) {
          const int row_in_tile = first + row / 2 * 64 + row % 2 * 8;
          const int64_t t = unit.first_row + row_in_tile;
          if (t >= args.rows) continue;
#pragma unroll
          for (int e = 0; e < kMostHeadOut; ++e) {
            if (e >= args.out) continue;
            const float sum = dots[row][e] + shared.dots[row_in_tile][e];
            if (args.splits == 1)
              args.y[t * args.y_row + unit.group * args.y_group + e] = T(sum);
            else
              args.parts[((int64_t(unit.split) * args.rows + t) * args.groups + unit.group) * args.out + e] =
                  sum;
          }
        }
      if (index + int(gridDim.x) < args.units) gpu::arrive_named(kPartsFree, 256);
    }
  }
}

/// Rows for one launch.
void forward(const Tensor& y, const Tensor& x, const Tensor& up, const Tensor& down, Activation kind) {
  const Device device = x.device();
  dispatch_floating_cuda(x.dtype(), "grouped_mlp", [&]<class T>() {
    if constexpr (!std::is_same_v<T, float>) {
      ForwardArgs<T> args{};
      args.down = down.data<T>();
      args.down_group = down.layout().stride(0), args.down_row = down.layout().stride(1);
      args.y = y.data<T>();
      args.y_row = y.layout().stride(0), args.y_group = y.layout().stride(1);
      args.rows = int(x.size(0)), args.groups = int(up.size(0)), args.wide = int(up.size(1));
      args.out = int(down.size(1));
      args.chunks = int(gpu::ceil_div(x.size(1), kHeadDepth));
      args.tiles = int(gpu::ceil_div(up.size(1), kColumns));
      args.kind = kind;
      const int64_t units = gpu::ceil_div(x.size(0), kRows) * args.groups;
      const int blocks = device.multiprocessors();
      args.splits = choose_splits(units, args.tiles, blocks, 0.4);
      args.units = int(units * args.splits);
      const int64_t outputs = y.size(0) * y.size(1) * y.size(2);
      const Tensor parts = args.splits == 1
                               ? Tensor()
                               : Tensor::empty_packed(Shape{args.splits, 1, outputs}, DType::f32, device);
      if (parts.defined()) args.parts = parts.data<float>();
      const auto map_x = gpu::tensor_map<T, 2>(x.data<T>(), {x.size(1), x.size(0)}, {x.layout().stride(0)},
                                               {kHeadDepth, kRows}, gpu::Swizzle::k128);
      const auto map_up = gpu::tensor_map<T, 3>(up.data<T>(), {up.size(2), up.size(1), up.size(0)},
                                                {up.layout().stride(1), up.layout().stride(0)},
                                                {kHeadDepth, kColumns, 1}, gpu::Swizzle::k128);
      gpu::launch(
          device,
          {dim3(unsigned(std::min(blocks, args.units))), dim3(head_threads(2)), sizeof(ForwardShared)},
          forward_kernel<T>, map_x, map_up, args);
      if (parts.defined()) {
        const Tensor sums = Tensor::empty_packed(Shape{1, outputs}, DType::f32, device);
        column_sums_cuda(sums, parts);
        y.copy_from(sums.reshape(y.shape()));
      }
    }
  });
}

}  // namespace

void grouped_mlp_forward_cuda(const Tensor& y, const Tensor& x, const Tensor& up, const Tensor& down,
                              Activation kind, int64_t launch_rows) {
  for (int64_t begin = 0; begin < x.size(0); begin += launch_rows) {
    const int64_t end = std::min(begin + launch_rows, x.size(0));
    forward(y.slice(0, begin, end), x.slice(0, begin, end), up, down, kind);
  }
}

}  // namespace tessera::ops

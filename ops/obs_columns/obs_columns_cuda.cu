#include "gpu/launch.cuh"
#include "ops/obs_columns/obs_columns_kernels.h"

/// Rows do not depend on each other, columns are a chain: a warp has a row, its lanes every 32nd column of it
/// in registers, and for each column j the lane that has it makes q and the error, which a shuffle gives to
/// all lanes for their later columns. Row j of U is read by all warps of a block at about the same time, from
/// L1. The columns of a group of n:m are ranked by all lanes: each compares its column with every other of
/// the group, by shuffles.
///
/// rows x columns^2 multiply-adds, 4 bytes each of weights, errors (twice) and U from L2: bound by the chain
/// of shuffles, some 30 cycles a column.

namespace tessera::ops {
namespace {

constexpr int kWarps = 4;
constexpr unsigned kAll = 0xFFFFFFFFu;

struct Args {
  float* weight;
  float* error;
  const float* factor;
  const uint8_t* keep;        // null: chosen by groups
  const float *scale, *zero;  // null: no rounding
  int64_t rows;
  int columns, group, zeros;
  float highest;  // level of the grid
};

/// Which of the lane's columns of the group that begins at `first` stay, as bits by their places in the
/// registers.
template <int kPlaces>
__device__ __forceinline__ void choose_group(unsigned& stays, const float (&w)[kPlaces], const Args& args,
                                             int first, int lane) {
  for (int i = first; i < first + args.group; ++i) {  // the column that is ranked
    float own = 0;
#pragma unroll
    for (int p = 0; p < kPlaces; ++p)
      if (p == i / 32) own = w[p];
    const float value =
        column_score(__shfl_sync(kAll, own, i % 32), args.factor[int64_t(i) * args.columns + i]);
    int smaller = 0;
#pragma unroll
    for (int p = 0; p < kPlaces; ++p) {
      const int c = p * 32 + lane;
      if (c < first || c >= first + args.group) continue;
      const float square = column_score(w[p], args.factor[int64_t(c) * args.columns + c]);
      smaller += square < value || (square == value && c < i);
    }
    smaller = __reduce_add_sync(kAll, smaller);
    if (i % 32 == lane) {
      const unsigned bit = 1u << (i / 32);
      stays = smaller >= args.zeros ? stays | bit : stays & ~bit;
    }
  }
}

template <int kPlaces>
__global__ void __launch_bounds__(kWarps * 32) sweep_rows(Args args) {
  const int lane = int(threadIdx.x) % 32;
  const int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= args.rows) return;
  float w[kPlaces];
  unsigned stays = 0;
#pragma unroll
  for (int p = 0; p < kPlaces; ++p) {
    const int c = p * 32 + lane;
    w[p] = c < args.columns ? args.weight[row * args.columns + c] : 0.0f;
    if (c < args.columns && args.keep && args.keep[row * args.columns + c]) stays |= 1u << p;
  }
  const float scale = args.scale ? args.scale[row] : 1.0f, zero = args.scale ? args.zero[row] : 0.0f;
#pragma unroll
  for (int place = 0; place < kPlaces; ++place) {
    const int end = min(32, args.columns - place * 32);
    for (int from = 0; from < end; ++from) {
      const int j = place * 32 + from;
      if (!args.keep && j % args.group == 0) choose_group<kPlaces>(stays, w, args, j, lane);
      const float* const factors = args.factor + int64_t(j) * args.columns;
      float error = 0;
      if (lane == from) {
        float q = 0;
        if (stays >> place & 1)
          q = args.scale ? on_grid(rintf(w[place] / scale) + zero, scale, zero, args.highest) : w[place];
        error = (w[place] - q) / factors[j];
        w[place] = q;
        args.error[row * args.columns + j] = error;
      }
      error = __shfl_sync(kAll, error, from);
#pragma unroll
      for (int p = place; p < kPlaces; ++p) {
        const int c = p * 32 + lane;
        if (c > j && c < args.columns) w[p] -= error * factors[c];
      }
    }
  }
#pragma unroll
  for (int p = 0; p < kPlaces; ++p) {
    const int c = p * 32 + lane;
    if (c < args.columns) args.weight[row * args.columns + c] = w[p];
  }
}

template <int kPlaces>
void run(const Args& args, Device device) {
  gpu::launch(device, {.grid = unsigned(gpu::ceil_div(args.rows, kWarps)), .block = kWarps * 32},
              sweep_rows<kPlaces>, args);
}

}  // namespace

void obs_columns_cuda(const ObsBlock& result, const Tensor& factor, const ObsColumns& how) {
  const Device device = factor.device();
  const bool rounds = how.grid.scale.defined();
  const Args args{.weight = result.weight.data<float>(),
                  .error = result.error.data<float>(),
                  .factor = factor.data<float>(),
                  .keep = how.keep.defined() ? how.keep.data<uint8_t>() : nullptr,
                  .scale = rounds ? how.grid.scale.data<float>() : nullptr,
                  .zero = rounds ? how.grid.zero.data<float>() : nullptr,
                  .rows = result.weight.size(0),
                  .columns = int(result.weight.size(1)),
                  .group = int(how.group),
                  .zeros = int(how.zeros),
                  .highest = float(how.grid.levels - 1)};
  if (args.columns <= 128) return run<4>(args, device);
  run<8>(args, device);
}

}  // namespace tessera::ops

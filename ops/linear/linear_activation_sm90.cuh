#pragma once

#include "ops/linear/linear_activation_kernels.h"
#include "ops/mlp/mlp_sm90.cuh"

/// Variant "epilogue" of linear_activation: y = f(x weight^T + bias) and the counts of its columns, on the
/// main loop of ops/gemm/gemm_sm90.cuh; 2 T in out FLOPs and 2 T out bytes. The activation is applied to the
/// sums in registers, and each warpgroup counts what it stores before it stores it: a thread holds up to four
/// rows of each of its columns, whose counts travel in bytes (at most 32 of a warp's rows per part), four to
/// a register, so that three exchanges add those of the eight lanes with the same columns. One integer atomic
/// per warp, column and tile then adds to the counts in global memory; such sums depend on no order.
/// Ping-pong hides all of it under the MMAs of the other warpgroup.
///
/// Tiles of 128 x 128 need 640 clocks of shared memory per 64 of k (both operands written once, a read once,
/// b for each 64 rows) and 512 of MMA; "epilogue wide" has tiles of 128 x 192, 832 per 768, as the GEMM alone
/// chooses for long k. That, and not the atomics, is taken for what "epilogue" loses next to it: 8.4 million
/// atomics in sectors of eight are 1 million operations of L2, some 10 us.

namespace tessera::ops {
namespace {

/// The epilogue that stores Math's first output and counts its elements that are not zero.
template <class Tile, class T, class Math>
class CountingEpilogue : public TmaStoreEpilogue<Tile, T, Math, 2> {
  using Base = TmaStoreEpilogue<Tile, T, Math, 2>;
  static constexpr int kBlocks = Tile::kN / 8;
  static_assert(kBlocks % 2 == 0 && Tile::kMBlocks <= 7);  // a byte holds 16 rows per part and warp

 public:
  struct Params : Base::Params {
    int* counts;
    int m, n;
  };
  __device__ __forceinline__ CountingEpilogue(const Params& params, char* shared, gpu::Barrier* landed,
                                              int group)
      : Base(params, shared, landed, group), params_(params) {}

  __device__ __forceinline__ void finish(const WorkTile& work, int row,
                                         float (&sums)[Tile::kMBlocks][Tile::kN / 2]) {
    count(work, row, sums);
    Base::finish(work, row, sums);
  }

 private:
  /// 1 for each of the two halves that is not zero: in bytes 0 and 1.
  static __device__ __forceinline__ uint32_t nonzero(uint32_t halves) {
    return uint32_t((halves & 0x7FFFu) != 0) | uint32_t((halves & 0x7FFF0000u) != 0) << 8;
  }

  __device__ __forceinline__ void count(const WorkTile& work, int row,
                                        const float (&sums)[Tile::kMBlocks][Tile::kN / 2]) const {
    // 192 accumulators leave no register for what follows from the thread's number.
    const int thread = Tile::kManyAccumulators ? gpu::reread_thread() : int(threadIdx.x);
    const int lane = thread % 32, warp = thread % 128 / 32;
    // Columns 8 block + lane % 4 * 2 and the next one, of two blocks: four bytes.
#pragma unroll
    for (int pair = 0; pair < kBlocks / 2; ++pair) {
      uint32_t found = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int block = pair * 2 + half, column = work.n + block * 8 + lane % 4 * 2;
        const auto columns = params_.math.columns(work.batch, column);
#pragma unroll
        for (int down = 0; down < 2; ++down)
#pragma unroll
          for (int p = 0; p < Tile::kMBlocks; ++p) {
            uint32_t out[Math::kOutputs];
            const int i = block * 4 + down * 2;
            params_.math(sums[p][i], sums[p][i + 1], columns, 0u, out);
            // Rows past the last hold f(bias), which is no element.
            const bool exists = work.m + row + p * 64 + warp * 16 + lane / 4 + down * 8 < params_.m;
            found += (exists ? nonzero(out[0]) : 0) << (half * 16);
          }
      }
      found += __shfl_xor_sync(0xFFFFFFFFu, found, 4);
      found += __shfl_xor_sync(0xFFFFFFFFu, found, 8);
      found += __shfl_xor_sync(0xFFFFFFFFu, found, 16);
      // All eight lanes of a quad position hold the same four counts; four of them add one each.
      const int which = lane / 4;
      if (which < 4) {
        const int column = work.n + (pair * 2 + which / 2) * 8 + lane % 4 * 2 + which % 2;
        const int total = int(found >> (which * 8) & 0xFFu);
        if (total > 0 && column < params_.n) atomicAdd(params_.counts + column, total);
      }
    }
  }

  const Params& params_;
};

template <class T, class Math, int kColumns, int kStages, int kCluster>
void launch_counted(const Tensor& y, const Tensor& counts, const Tensor& x, const Tensor& weight,
                    const Math& math) {
  using enum gpu::TileOrder;
  using Tile = GemmTile<T, k_major, k_major, 128, kColumns, kStages, true, kCluster>;
  using Epilogue = CountingEpilogue<Tile, T, Math>;
  const int64_t m = y.size(0), n = y.size(1), k = x.size(1);
  const GemmMaps maps{operand_map<T, k_major>(operand_of<T>(x), m, k, 1, Tile::kM),
                      operand_map<T, k_major>(operand_of<T>(weight), n, k, 1, Tile::kN)};
  typename Epilogue::Params params{};
  params.outputs[0] = Epilogue::map(y.data<T>(), m, n, 1, y.layout().stride(0), 0);
  params.splits = 1;
  params.math = math;
  params.counts = counts.data<int32_t>();
  params.m = int(m), params.n = int(n);
  launch_gemm<Tile, Epilogue>(y.device(), maps, gemm_plan<Tile>(m, n, k, 1, 1), params);
}

template <class T, class Math>
void run_counted(const Tensor& y, const Tensor& counts, const Tensor& x, const Tensor& weight,
                 const Math& math, bool wide) {
  const int64_t tiles = gpu::ceil_div(y.size(0), 128) * gpu::ceil_div(y.size(1), 128);
  if (wide)
    launch_counted<T, Math, 192, 4, 2>(y, counts, x, weight, math);
  else if (pays_clusters(tiles, y.device()))
    launch_counted<T, Math, 128, 5, 2>(y, counts, x, weight, math);
  else
    launch_counted<T, Math, 128, 5, 1>(y, counts, x, weight, math);
}

}  // namespace

template <class T>
void linear_activation_sm90(const Tensor& y, const Tensor& counts, const Tensor& x, const Tensor& weight,
                            const Tensor& bias, Activation kind, bool wide) {
  GemmBias<T> biases;
  Tensor dense = bias;
  if (bias.defined()) {
    if (bias.layout().stride(0) != 1) dense = bias.clone();
    biases = {dense.data<T>(), 0, int(weight.size(0))};
  }
  if (kind == Activation::relu)
    run_counted<T>(y, counts, x, weight, Activate<T, Activation::relu, false>{biases}, wide);
  else
    run_counted<T>(y, counts, x, weight, Activate<T, Activation::relu_squared, false>{biases}, wide);
}

}  // namespace tessera::ops

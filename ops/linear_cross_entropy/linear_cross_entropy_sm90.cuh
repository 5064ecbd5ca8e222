#pragma once

#include "gpu/approx.cuh"
#include "gpu/mma.cuh"
#include "gpu/reduce.cuh"
#include "ops/gemm/gemm_sm90.cuh"
#include "ops/linear_cross_entropy/linear_cross_entropy_kernels.h"

/// Epilogue of the LM head's GEMM: turns logits into exponentials in registers; logits are never stored.

namespace tessera::ops {

/// Accumulators of a tile -> exp(l - o) in bf16, stored by TMA (kStores), and for each row the offset o and
/// the sum of those exponentials in f32. o is the row's `bases` value, or the tile's largest logit minus
/// kRoom where that is larger, so exponentials never overflow. The target's column (`own`) of a row gets 0.
template <class Tile, bool kStores>
class ExponentialEpilogue {
  static constexpr int kPanel = 64, kPanelBytes = 64 * 128, kBuffers = 2;
  static constexpr int kPanels = Tile::kMBlocks * Tile::kN / kPanel;
  static constexpr float kLog2E = 1.4426950408889634f;

 public:
  static constexpr float kRoom = 44;  // e^44 times 2^18 classes is 2^81: far from the end of f32 and bf16
  static constexpr int kSharedBytes = kStores ? kBuffers * kPanelBytes : 0;
  static constexpr int kBarriers = 0;
  struct Params {
    gpu::TensorMap exponentials;  // [rows, classes]
    const float* bases;           // [rows]
    const int* own;               // [rows]; -1: none
    float2* partials;             // [rows, tiles]: (o, sum)
    int rows, classes, tiles;
  };

  __device__ __forceinline__ ExponentialEpilogue(const Params& params, char* shared, gpu::Barrier*, int group)
      : params_(params),
        shared_(shared),
        group_(group),
        thread_(int(threadIdx.x) % 128),
        is_leader_(thread_ == 0) {}

  __device__ __forceinline__ void begin(const WorkTile&, int) {}

  __device__ __forceinline__ void finish(const WorkTile& work, int row,
                                         float (&sums)[Tile::kMBlocks][Tile::kN / 2]) {
#pragma unroll
    for (int p = 0; p < Tile::kMBlocks; ++p)
#pragma unroll
      for (int down = 0; down < 2; ++down)
        exponentiate(work, work.m + row + p * 64 + thread_ / 32 * 16 + thread_ % 32 / 4 + down * 8, sums[p],
                     down * 2);
    if constexpr (kStores) {
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        const int column = panel / Tile::kMBlocks * kPanel;
        char* const place = shared_ + panel % kBuffers * kPanelBytes;
        if (is_leader_) gpu::wait_stores_read<kBuffers - 1>();
        gpu::sync_named(1 + group_, 128);
        fill(sums[panel % Tile::kMBlocks], column, place);
        gpu::fence_async_shared();
        gpu::sync_named(1 + group_, 128);
        if (!is_leader_) continue;
        gpu::tma_store(params_.exponentials, place, work.n + column,
                       work.m + row + panel % Tile::kMBlocks * 64);
        gpu::commit_stores();
      }
    }
  }

  __device__ __forceinline__ void end() {
    if (kStores && is_leader_) gpu::wait_stores_read<0>();
  }

 private:
  /// A thread's logits of one row: elements first, first + 1 of every four. Four lanes share the row.
  __device__ __forceinline__ void exponentiate(const WorkTile& work, int row, float (&sums)[Tile::kN / 2],
                                               int first) {
    const bool inside = row < params_.rows;
    const float base = inside ? params_.bases[row] : 0.0f;
    const int from = work.n + thread_ % 4 * 2;  // the column of this lane's first logit
    const int own = (inside ? params_.own[row] : -1) - from;
    if (own >= 0 && own < Tile::kN) {  // seldom: a tile holds few of the targets
#pragma unroll
      for (int i = 0; i < Tile::kN / 4; ++i) {
        float& x = sums[i / 2 * 4 + first + i % 2];
        if (own == i / 2 * 8 + i % 2) x = -INFINITY;
      }
    }
    if (work.n + Tile::kN > params_.classes) {
#pragma unroll
      for (int i = 0; i < Tile::kN / 4; ++i) {
        float& x = sums[i / 2 * 4 + first + i % 2];
        if (from + i / 2 * 8 + i % 2 >= params_.classes) x = -INFINITY;
      }
    }
    float top = -INFINITY;
#pragma unroll
    for (int i = 0; i < Tile::kN / 4; ++i) top = fmaxf(top, sums[i / 2 * 4 + first + i % 2]);
    top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 2));
    const float offset = gpu::Max{}(base, top - kRoom), shift = offset * -kLog2E;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < Tile::kN / 4; ++i) {
      float& x = sums[i / 2 * 4 + first + i % 2];
      x = gpu::exp2_approx(fmaf(x, kLog2E, shift));
      sum += x;
    }
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
    if (inside && thread_ % 4 == 0)
      params_.partials[int64_t(row) * params_.tiles + work.n / Tile::kN] = make_float2(offset, sum);
  }

  /// The panel of 64 columns from `from` on.
  __device__ __forceinline__ void fill(const float (&sums)[Tile::kN / 2], int from, char* panel) const {
    const int lane = thread_ % 32, warp = thread_ / 32;
    const uint32_t base = gpu::shared_address(panel);
#pragma unroll
    for (int pair = 0; pair < kPanel / 16; ++pair) {
      uint32_t results[4];
#pragma unroll
      for (int at = 0; at < 4; ++at) {
        const int i = (from / 8 + pair * 2 + at / 2) * 4 + at % 2 * 2;
        results[at] = gpu::pack_halves<typename Tile::T>(sums[i], sums[i + 1]);
      }
      gpu::stmatrix_x4(base + gpu::swizzled_offset(warp * 16 + lane % 16, pair * 2 + lane / 16), results);
    }
  }

  const Params& params_;
  char* const shared_;
  const int group_, thread_;
  const bool is_leader_;
};

/// Sums of a tile in f32, added to what is there by TMA: no register holds the old value and
/// no thread waits for it. One tile adds to an element in a launch, so the order of the sums is that of the
/// launches.
template <class Tile>
class TmaReduceAddEpilogue {
  static constexpr int kPanel = 32, kPanelBytes = 64 * 128, kBuffers = 2;
  static constexpr int kPanels = Tile::kMBlocks * Tile::kN / kPanel;

 public:
  static constexpr int kSharedBytes = kBuffers * kPanelBytes;
  static constexpr int kBarriers = 0;
  struct Params {
    gpu::TensorMap output;  // [m, n]
  };

  __device__ __forceinline__ TmaReduceAddEpilogue(const Params& params, char* shared, gpu::Barrier*,
                                                  int group)
      : params_(params),
        shared_(shared),
        group_(group),
        thread_(int(threadIdx.x) % 128),
        is_leader_(thread_ == 0) {}

  __device__ __forceinline__ void begin(const WorkTile&, int) {}

  __device__ __forceinline__ void finish(const WorkTile& work, int row,
                                         float (&sums)[Tile::kMBlocks][Tile::kN / 2]) {
    const int lane = thread_ % 32, warp = thread_ / 32;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const int column = panel / Tile::kMBlocks * kPanel;
      char* const place = shared_ + panel % kBuffers * kPanelBytes;
      if (is_leader_) gpu::wait_stores_read<kBuffers - 1>();
      gpu::sync_named(1 + group_, 128);
#pragma unroll
      for (int block = 0; block < kPanel / 8; ++block)
#pragma unroll
        for (int down = 0; down < 2; ++down) {
          const int i = (column / 8 + block) * 4 + down * 2;
          *reinterpret_cast<float2*>(
              place + gpu::swizzled_offset(warp * 16 + lane / 4 + down * 8, block * 2 + lane % 4 / 2) +
              lane % 2 * 8) =
              make_float2(sums[panel % Tile::kMBlocks][i], sums[panel % Tile::kMBlocks][i + 1]);
        }
      gpu::fence_async_shared();
      gpu::sync_named(1 + group_, 128);
      if (!is_leader_) continue;
      const int to = work.m + row + panel % Tile::kMBlocks * 64;
      gpu::tma_reduce_add(params_.output, place, work.n + column, to);
      gpu::commit_stores();
    }
  }

  __device__ __forceinline__ void end() {
    if (is_leader_) gpu::wait_stores_read<0>();
  }

 private:
  const Params& params_;
  char* const shared_;
  const int group_, thread_;
  const bool is_leader_;
};

/// Ping-pong hides the epilogue: 24,576 exponentials take some 1,800 clocks, the products of d = 768 some
/// 9,200.
using LmHeadTile =
    GemmTile<bf16, gpu::TileOrder::k_major, gpu::TileOrder::k_major, 128, kExponentialColumns, 4, true, 1>;
/// Of the product over the tokens.
using TokenTile = GemmTile<bf16, gpu::TileOrder::mn_major, gpu::TileOrder::mn_major, 128, 192, 4, true, 1>;

}  // namespace tessera::ops

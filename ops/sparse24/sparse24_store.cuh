#pragma once

#include "gpu/mma.cuh"
#include "ops/gemm/gemm_sm90.cuh"

/// The epilogue of sparse24_sm90.cuh: d = alpha sum + bias + beta c, rounded once, where d's rows or its
/// columns are dense. As in gemm_sm90_tma_store.cuh, panels of 64 rows of d and 128 bytes go through swizzled
/// shared memory to TMA, and c comes in the same way before the MMAs end. What differs is decided at run
/// time, since every instance of the main loop costs its build: whether d is written along its columns
/// ("transposed": by stmatrix for 16-bit elements, f32 ones are stored one by one, without bank conflicts),
/// whether there is a c, and whether the threads write elements one by one, where TMA cannot.

namespace tessera::ops {

/// The operands of the epilogue besides the accumulators.
template <class T>
struct Sparse24Terms {
  const T* bias_n = nullptr;  // n values or null
  const T* bias_m = nullptr;  // m values or null
  float alpha = 1, beta = 0;  // beta: of c
  int m = 0, n = 0;
};

template <class Tile, class Out>
class Sparse24Store {
  using T = typename Tile::T;
  static constexpr int kPanel = 128 / int(sizeof(Out));  // columns of the sums
  static constexpr int kPanelBytes = 64 * 128, kBuffers = 2;
  static constexpr int kPanels = Tile::kMBlocks * Tile::kN / kPanel;
  static constexpr bool kWide = sizeof(Out) == 4;
  /// A transposed f32 panel is two boxes of 32 rows.
  static constexpr int kHalves = kWide ? 2 : 1;

 public:
  static constexpr int kSharedBytes = kBuffers * kPanelBytes, kBarriers = kBuffers;
  struct Params {
    gpu::TensorMap d, c;
    bool transposed, by_threads;
    Sparse24Terms<T> terms;
    Out* to;  // by_threads
    const Out* from;
    int64_t row_stride, column_stride;
  };

  /// d in memory: [m, n] with ld between rows; transposed: between columns.
  static gpu::TensorMap map(const Out* data, int64_t m, int64_t n, int64_t ld, bool transposed) {
    return transposed ? gpu::tensor_map<Out, 2>(data, {m, n}, {ld}, {64 / kHalves, kPanel}, swizzle())
                      : gpu::tensor_map<Out, 2>(data, {n, m}, {ld}, {kPanel, 64}, swizzle());
  }

  __device__ __forceinline__ Sparse24Store(const Params& params, char* shared, gpu::Barrier* landed,
                                           int group)
      : params_(params),
        shared_(shared),
        landed_(landed),
        group_(group),
        is_leader_(threadIdx.x % 128 == 0),
        adds_(params.terms.beta != 0 && !params.by_threads) {}

  __device__ __forceinline__ void begin(const WorkTile& work, int row) {
    if (!adds_ || !is_leader_) return;
    gpu::wait_stores_read<0>();
#pragma unroll
    for (int panel = 0; panel < kBuffers; ++panel) issue_load(work, row, panel);
  }

  __device__ __forceinline__ void finish(const WorkTile& work, int row,
                                         float (&sums)[Tile::kMBlocks][Tile::kN / 2]) {
    if (params_.by_threads) {
#pragma unroll
      for (int i = 0; i < Tile::kMBlocks; ++i) write_elements(work, row + 64 * i, sums[i]);
      return;
    }
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const int buffer = panel % kBuffers, which = panel % Tile::kMBlocks;
      if (adds_) {
        landed_[buffer].wait(parity_ >> buffer & 1);
        parity_ ^= 1u << buffer;
      } else {
        if (is_leader_) gpu::wait_stores_read<kBuffers - 1>();
        gpu::sync_named(1 + group_, 128);
      }
      const int first_row = work.m + row + which * 64, column = panel / Tile::kMBlocks * kPanel;
      if constexpr (kWide)
        fill_wide(sums[which], first_row, work.n + column, column, shared_ + buffer * kPanelBytes);
      else
        fill(sums[which], first_row, work.n + column, column, shared_ + buffer * kPanelBytes);
      gpu::fence_async_shared();
      gpu::sync_named(1 + group_, 128);
      if (!is_leader_) continue;
      each_box(work, row, panel, [&](char* at, int c0, int c1) { gpu::tma_store(params_.d, at, c0, c1); });
      gpu::commit_stores();
      if (adds_ && panel + kBuffers < kPanels) {
        gpu::wait_stores_read<0>();
        issue_load(work, row, panel + kBuffers);
      }
    }
  }

  __device__ __forceinline__ void end() {
    if (is_leader_) gpu::wait_stores_read<0>();
  }

 private:
  static constexpr gpu::Swizzle swizzle() {
    return gpu::Swizzle::k128;
  }

  /// Calls visit(shared memory, coordinates in d's map) for the boxes of a panel.
  template <class Visit>
  __device__ __forceinline__ void each_box(const WorkTile& work, int row, int panel, Visit&& visit) {
    char* const at = shared_ + panel % kBuffers * kPanelBytes;
    const int m = work.m + row + panel % Tile::kMBlocks * 64, n = work.n + panel / Tile::kMBlocks * kPanel;
    if (!params_.transposed) return visit(at, n, m);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) visit(at + half * (kPanelBytes / kHalves), m + half * 32, n);
  }
  __device__ __forceinline__ void issue_load(const WorkTile& work, int row, int panel) {
    gpu::Barrier& landed = landed_[panel % kBuffers];
    landed.arrive_expect(kPanelBytes);
    each_box(work, row, panel,
             [&](char* at, int c0, int c1) { gpu::tma_load(at, params_.c, landed, c0, c1); });
  }

  /// The bias of a row, and that of two columns.
  __device__ __forceinline__ float of_row(int m) const {
    const Sparse24Terms<T>& t = params_.terms;
    return t.bias_m && m < t.m ? float(t.bias_m[m]) : 0;
  }
  __device__ __forceinline__ float2 of_columns(int n) const {
    const Sparse24Terms<T>& t = params_.terms;
    if (!t.bias_n) return {0, 0};
    return {n < t.n ? float(t.bias_n[n]) : 0, n + 1 < t.n ? float(t.bias_n[n + 1]) : 0};
  }
  __device__ __forceinline__ float2 value(float x0, float x1, float row_bias, float2 bias, float2 c) const {
    const float alpha = params_.terms.alpha, beta = adds_ ? params_.terms.beta : 0;
    float low = fmaf(alpha, x0, row_bias + bias.x), high = fmaf(alpha, x1, row_bias + bias.y);
    if (adds_) low = fmaf(beta, c.x, low), high = fmaf(beta, c.y, high);
    return {low, high};
  }

  /// Columns `from` ... + 63 of the sums, column `first_n` of d, as a panel of 16-bit elements. Two blocks of
  /// 8 columns are four matrices of stmatrix: of the first block rows 16 w ... and + 8, then of the second.
  __device__ __forceinline__ void fill(const float (&sums)[Tile::kN / 2], int first_m, int first_n, int from,
                                       char* panel) {
    const int thread = gpu::reread_thread() % 128, lane = thread % 32, warp = thread / 32,
              m = first_m + warp * 16 + lane / 4;
    const uint32_t base = gpu::shared_address(panel);
    const float row_bias[2] = {of_row(m), of_row(m + 8)};
#pragma unroll
    for (int pair = 0; pair < kPanel / 16; ++pair) {
      // A row of the panel is a row of d and a chunk 8 columns; transposed: a column and 8 rows.
      const uint32_t at =
          base + (params_.transposed
                      ? gpu::swizzled_offset(pair * 16 + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2)
                      : gpu::swizzled_offset(warp * 16 + lane % 16, pair * 2 + lane / 16));
      uint32_t words[4]{};
      if (adds_) {
        if (params_.transposed)
          gpu::ldmatrix_x4_trans(words, at);
        else
          gpu::ldmatrix_x4(words, at);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int block = pair * 2 + i / 2, sum = (from / 8 + block) * 4 + i % 2 * 2;
        const float2 two =
            value(sums[sum], sums[sum + 1], row_bias[i % 2], of_columns(first_n + block * 8 + lane % 4 * 2),
                  gpu::unpack_halves<T>(words[i]));
        words[i] = gpu::pack_halves<T>(two.x, two.y);
      }
      if (params_.transposed)
        gpu::stmatrix_x4_trans(at, words);
      else
        gpu::stmatrix_x4(at, words);
    }
  }

  /// 32 columns of f32. What follows from the thread's number is computed here: the accumulators leave no
  /// registers to keep it.
  __device__ __forceinline__ void fill_wide(const float (&sums)[Tile::kN / 2], int first_m, int first_n,
                                            int from, char* panel) {
    const int thread = gpu::reread_thread() % 128, lane = thread % 32, first = thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      const int row = first + down * 8;
      const float row_bias = of_row(first_m + row);
      char* const half = panel + row / 32 * (kPanelBytes / 2) + row % 4 * 4;
#pragma unroll
      for (int block = 0; block < kPanel / 8; ++block) {
        const int sum = (from / 8 + block) * 4 + down * 2, column = block * 8 + lane % 4 * 2;
        const float2 bias = of_columns(first_n + column);
        if (params_.transposed) {
          float* const low = reinterpret_cast<float*>(half + gpu::swizzled_offset(column, row % 32 / 4));
          float* const high = reinterpret_cast<float*>(half + gpu::swizzled_offset(column + 1, row % 32 / 4));
          const float2 two =
              value(sums[sum], sums[sum + 1], row_bias, bias, adds_ ? float2{*low, *high} : float2{0, 0});
          *low = two.x, *high = two.y;
        } else {
          float2* const at = reinterpret_cast<float2*>(
              panel + gpu::swizzled_offset(row, block * 2 + lane % 4 / 2) + lane % 2 * 8);
          *at = value(sums[sum], sums[sum + 1], row_bias, bias, adds_ ? *at : float2{0, 0});
        }
      }
    }
  }

  /// 64 rows of the tile, element by element.
  __device__ __forceinline__ void write_elements(const WorkTile& work, int row,
                                                 const float (&sums)[Tile::kN / 2]) {
    const int thread = gpu::reread_thread() % 128, lane = thread % 32,
              first_m = work.m + row + thread / 32 * 16 + lane / 4, first_n = work.n + lane % 4 * 2;
    const Sparse24Terms<T>& t = params_.terms;
#pragma unroll
    for (int i = 0; i < Tile::kN / 2; ++i) {
      const int m = first_m + i / 2 % 2 * 8, n = first_n + i / 4 * 8 + i % 2;
      if (m >= t.m || n >= t.n) continue;
      const int64_t at = m * params_.row_stride + n * params_.column_stride;
      float sum = t.alpha * sums[i] + of_row(m) + (t.bias_n ? float(t.bias_n[n]) : 0);
      if (t.beta != 0) sum += t.beta * float(params_.from[at]);
      params_.to[at] = Out(sum);
    }
  }

  const Params& params_;
  char* const shared_;
  gpu::Barrier* const landed_;
  const int group_;
  const bool is_leader_, adds_;
  uint32_t parity_ = 0;  // a bit a buffer
};

}  // namespace tessera::ops

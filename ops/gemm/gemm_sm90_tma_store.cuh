#pragma once

#include "gpu/mma.cuh"
#include "ops/gemm/gemm_sm90.cuh"

/// TMA-store epilogue: accumulators -> Math (elementwise) -> up to three outputs of d's shape, through shared
/// memory and TMA, which writes full lines and clips the edges.
///
/// A warpgroup's tile is stored in panels of 64 rows and 128 bytes, swizzled, so that stores have no bank
/// conflicts. An operand of d's shape and dtype is loaded in the same way, before the MMAs begin, and its
/// panel is overwritten by that of the first output.
///
/// Where panels do not divide a tile, the last one ends where the tile does: the columns that it shares with
/// the one before are written twice, with the same values. An operand that is d itself would be added twice,
/// so such tiles take no operand.

namespace tessera::ops {

/// Two neighbouring elements of an output.
template <class Out>
struct GemmPair {
  using type = uint32_t;
};
template <>
struct GemmPair<float> {
  using type = float2;
};

template <class Out>
__device__ __forceinline__ typename GemmPair<Out>::type make_pair(float low, float high) {
  if constexpr (std::is_same_v<Out, float>)
    return make_float2(low, high);
  else
    return gpu::pack_halves<Out>(low, high);
}
template <class Out>
__device__ __forceinline__ float2 read_pair(typename GemmPair<Out>::type pair) {
  if constexpr (std::is_same_v<Out, float>)
    return pair;
  else
    return gpu::unpack_halves<Out>(pair);
}

/// Math is a class, a part of the kernel parameters, with
///   static constexpr int kOutputs        1 to 3
///   static constexpr bool kOperand       whether it reads a matrix
///   Columns columns(int batch, int column)                        what two columns need, such as a bias
///   void operator()(float x0, float x1, const Columns&, Pair operand, Pair (&outputs)[kOutputs])
/// columns() is called for columns past the edge as well. In tiles with gates, which take no operand, instead
///   void operator()(float2 gate, float2 up, Pair (&outputs)[kOutputs])
template <class Tile, class Out, class Math, int kMostBuffers>
class TmaStoreEpilogue {
  using Pair = typename GemmPair<Out>::type;
  static constexpr int kPanel = 128 / int(sizeof(Out));  // columns
  static constexpr int kPanelBytes = 64 * 128;
  static constexpr int kWidth = Tile::kFeatures;
  static constexpr int kAcross = (kWidth + kPanel - 1) / kPanel, kPanels = Tile::kMBlocks * kAcross;
  static constexpr int kBuffers = std::min(kMostBuffers, kPanels);
  static_assert(kWidth >= kPanel && kWidth % 16 == 0 && (kWidth % kPanel == 0 || !Math::kOperand));
  static_assert(!Tile::kGated || !Math::kOperand);
  // The panels of a tile use the buffers round-robin, and every tile starts with the first buffer: the last
  // store from a buffer is kBuffers stores back only if kBuffers divides the number of panels.
  static_assert(kPanels % kBuffers == 0);

 public:
  static constexpr int kSharedBytes = Math::kOutputs * kBuffers * kPanelBytes;
  static constexpr int kBarriers = Math::kOperand ? kBuffers : 0;
  struct Params {
    gpu::TensorMap outputs[Math::kOutputs];
    gpu::TensorMap operand;  // where Math reads one
    int splits;              // the third dimension of the outputs counts batch * splits
    Math math;
  };

  static gpu::TensorMap map(const Out* data, int64_t m, int64_t n, int64_t batch, int64_t ld,
                            int64_t stride) {
    return gpu::tensor_map<Out, 3>(data, {n, m, batch}, {ld, stride}, {kPanel, 64, 1}, gpu::Swizzle::k128);
  }

  __device__ __forceinline__ TmaStoreEpilogue(const Params& params, char* shared, gpu::Barrier* landed,
                                              int group)
      : params_(params),
        shared_(shared),
        landed_(landed),
        group_(group),
        thread_(int(threadIdx.x) % 128),
        is_leader_(thread_ == 0) {}

  __device__ __forceinline__ void begin(const WorkTile& work, int row) {
    if constexpr (Math::kOperand) {
      if (!is_leader_) return;
      gpu::wait_stores_read<0>();
#pragma unroll
      for (int panel = 0; panel < std::min(kBuffers, kPanels); ++panel) issue_load(work, row, panel);
    }
  }

  __device__ __forceinline__ void finish(const WorkTile& work, int row,
                                         float (&sums)[Tile::kMBlocks][Tile::kN / 2]) {
    const int z = work.batch * params_.splits + work.split;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const int buffer = panel % kBuffers, column = column_of(panel);
      if constexpr (Math::kOperand) {
        landed_[buffer].wait(parity_ >> buffer & 1);
        parity_ ^= 1u << buffer;
      } else {
        if (is_leader_) gpu::wait_stores_read<kBuffers - 1>();
        gpu::sync_named(1 + group_, 128);
      }
      fill(work, sums[panel % Tile::kMBlocks], work.n + column, column, at(0, buffer));
      gpu::fence_async_shared();
      gpu::sync_named(1 + group_, 128);
      if (!is_leader_) continue;
#pragma unroll
      for (int output = 0; output < Math::kOutputs; ++output)
        gpu::tma_store(params_.outputs[output], at(output, buffer), work.n + column,
                       work.m + row + panel % Tile::kMBlocks * 64, z);
      gpu::commit_stores();
      if constexpr (Math::kOperand && kPanels > kBuffers) {
        if (panel + kBuffers < kPanels) {
          gpu::wait_stores_read<0>();
          issue_load(work, row, panel + kBuffers);
        }
      }
    }
  }

  __device__ __forceinline__ void end() {
    if (is_leader_) gpu::wait_stores_read<0>();
  }

 private:
  static constexpr __device__ __host__ int column_of(int panel) {
    return std::min(panel / Tile::kMBlocks * kPanel, kWidth - kPanel);
  }
  __device__ __forceinline__ char* at(int output, int buffer) const {
    return shared_ + (output * kBuffers + buffer) * kPanelBytes;
  }
  __device__ __forceinline__ void issue_load(const WorkTile& work, int row, int panel) {
    gpu::Barrier& landed = landed_[panel % kBuffers];
    landed.arrive_expect(kPanelBytes);
    gpu::tma_load(at(0, panel % kBuffers), params_.operand, landed, work.n + column_of(panel),
                  work.m + row + panel % Tile::kMBlocks * 64, work.batch);
  }
  /// Fills the panel whose first column is column `from` of the tile, `first` of d. Loads come first, so that
  /// the arithmetic of all elements can overlap.
  __device__ __forceinline__ void fill(const WorkTile& work, const float (&sums)[Tile::kN / 2], int first,
                                       int from, char* panel) {
    constexpr int kBlocks = kPanel / 8;
    const int lane = thread_ % 32, warp = thread_ / 32;
    const uint32_t base = gpu::shared_address(panel);
    decltype(params_.math.columns(0, 0)) columns[kBlocks];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
      columns[block] = params_.math.columns(work.batch, first + block * 8 + lane % 4 * 2);
    const auto apply = [&](int block, int down, Pair operand, Pair(&out)[Math::kOutputs]) {
      const int i = (from / 8 + block) * 4 + down * 2;
      if constexpr (Tile::kGated) {
        const int j = i + Tile::kN / 4;  // the same place in the other half
        params_.math(make_float2(sums[i], sums[i + 1]), make_float2(sums[j], sums[j + 1]), out);
      } else {
        params_.math(sums[i], sums[i + 1], columns[block], operand, out);
      }
    };
    if constexpr (sizeof(Out) == 4) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
#pragma unroll
        for (int down = 0; down < 2; ++down) {
          Pair out[1];
          Pair* const to = reinterpret_cast<Pair*>(
              panel + gpu::swizzled_offset(warp * 16 + lane / 4 + down * 8, block * 2 + lane % 4 / 2) +
              lane % 2 * 8);
          apply(block, down, Math::kOperand ? *to : Pair{}, out);
          *to = out[0];
        }
    } else {
      static_assert(kBlocks % 2 == 0);
      const auto line = [&](int pair) {
        return base + gpu::swizzled_offset(warp * 16 + lane % 16, pair * 2 + lane / 16);
      };
      uint32_t operand[kBlocks / 2][4];
      if constexpr (Math::kOperand)
#pragma unroll
        for (int pair = 0; pair < kBlocks / 2; ++pair) gpu::ldmatrix_x4(operand[pair], line(pair));
      uint32_t results[Math::kOutputs][kBlocks / 2][4];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
#pragma unroll
        for (int down = 0; down < 2; ++down) {
          const int at = block % 2 * 2 + down;
          Pair out[Math::kOutputs];
          apply(block, down, operand[block / 2][at], out);
#pragma unroll
          for (int output = 0; output < Math::kOutputs; ++output)
            results[output][block / 2][at] = out[output];
        }
#pragma unroll
      for (int output = 0; output < Math::kOutputs; ++output)
#pragma unroll
        for (int pair = 0; pair < kBlocks / 2; ++pair)
          gpu::stmatrix_x4(line(pair) + uint32_t(output * kBuffers * kPanelBytes), results[output][pair]);
    }
  }

  const Params& params_;
  char* const shared_;
  gpu::Barrier* const landed_;
  const int group_, thread_;
  const bool is_leader_;
  uint32_t parity_ = 0;  // one bit per buffer
};

/// A row of biases, or null.
template <class T>
struct GemmBias {
  const T* values = nullptr;
  int64_t stride = 0;  // of the batch
  int n = 0;

  __device__ __forceinline__ float2 at(int batch, int column) const {
    if (!values) return {0, 0};
    const T* const from = values + batch * stride;
    return {column < n ? float(from[column]) : 0, column + 1 < n ? float(from[column + 1]) : 0};
  }
};

/// alpha x + bias (+ beta operand), rounded once.
template <class T, class Out, bool kAdds>
struct ScaleAndAdd {
  static constexpr int kOutputs = 1;
  static constexpr bool kOperand = kAdds;
  using Pair = typename GemmPair<Out>::type;
  float alpha = 1, beta = 0;
  GemmBias<T> bias;

  __device__ __forceinline__ float2 columns(int batch, int column) const { return bias.at(batch, column); }
  __device__ __forceinline__ void operator()(float x0, float x1, float2 added, Pair operand,
                                             Pair (&outputs)[1]) const {
    float low = fmaf(alpha, x0, added.x), high = fmaf(alpha, x1, added.y);
    if constexpr (kAdds) {
      const float2 old = read_pair<Out>(operand);
      low = fmaf(beta, old.x, low), high = fmaf(beta, old.y, high);
    }
    outputs[0] = make_pair<Out>(low, high);
  }
};

}  // namespace tessera::ops

#pragma once

#include "gpu/global.cuh"
#include "ops/matmul/gemm_sm90_store.cuh"

/// The epilogue for sums that TMA cannot write as they come: parts of k that have to be added up,
/// results in f32, and a d whose rows lie anywhere. The threads write d from their registers, 32 bytes of a
/// row together: what leaves this way is small (a weight's gradient) or odd.
///
/// Parts of k: the warpgroups that hold the parts of one piece of d are on different SMs at the same time
/// (see ProductPlan), so they add up on the spot. Each writes its sums to scratch as they are in its
/// registers, which is 16 dense bytes per thread, counts itself as there, waits for the others, and makes its
/// own share of d from all partial sums, in the order of k. Nothing depends on the order of arrival. With 22
/// tiles of 128 x 256 and six parts, that is 128 KiB out to L2 and back for an SM and one round of waiting, 3
/// us; a second kernel took 5 to 7.
///
/// All blocks must be co-resident (one per SM), or this spin-wait deadlocks; a dependent kernel starts only
/// once the last block runs.

namespace tessera::ops {
namespace {

/// Arrival count per output tile; the last block resets it to 0. GEMMs of one stream run one after the other,
/// so they share it.
constexpr int kMostPieces = 4096;
__device__ unsigned parts_there[kMostPieces];

/// One thread: says that a part is there and returns when all are.
__device__ __forceinline__ void meet(unsigned* there, unsigned parts) {
  atomicInc(there, 2 * parts - 1);
  while (gpu::load_acquire(there) < parts) __nanosleep(64);
  atomicInc(there, 2 * parts - 1);  // the last of all brings it back to 0
}

/// d = alpha sums + bias + beta c, rounded once. Of a pair of problems, the second one's d is transposed.
template <class Tile, bool kPair = false>
class SumEpilogue {
  using T = typename Tile::T;
  static constexpr int kAcross = Tile::kN / 8;  // a fragment: 4 sums of a thread, in 8 columns
  static constexpr int kFragments = Tile::kParts * kAcross;
  static constexpr int kShares = Tile::kPingPong ? 1 : Tile::kGroups;  // pieces of a tile, one a warpgroup

 public:
  static constexpr int kSharedBytes = 0, kBarriers = 0;
  struct Params {
    void* d;
    const void* c;  // d, or what lies as d does
    int64_t ld, stride;
    bool wide;        // d is f32, not T
    bool pairs;       // two neighbours can be written at once
    float4* scratch;  // where splits > 1: scratch_bytes()
    int m, n;
    float alpha, beta;
    ProductBias<T> bias;
    struct {  // of a pair's second problem: d (+)= the transposed sums
      void* d;
      int64_t ld;
      bool wide, adds;
    } second;
  };
  static int64_t pieces(const ProductPlan& plan) {
    return int64_t(plan.batch * plan.rows * plan.columns - plan.whole) * Tile::kCluster * kShares;
  }
  static int64_t scratch_bytes(const ProductPlan& plan) {
    return pieces(plan) * plan.splits * kFragments * 128 * int64_t(sizeof(float4));
  }

  __device__ __forceinline__ SumEpilogue(const Params& params, char*, gpu::Barrier*, int group)
      : params_(params), group_(group), thread_(int(threadIdx.x) % 128) {}

  __device__ __forceinline__ void begin(const ProductPart&, int) {}

  __device__ __forceinline__ void finish(const ProductPart& part, int row,
                                         float (&sums)[Tile::kParts][Tile::kN / 2]) {
    const auto fragment = [&](int i) {
      const float* const at = &sums[i / kAcross][i % kAcross * 4];
      return make_float4(at[0], at[1], at[2], at[3]);
    };
    if (part.splits == 1) {
#pragma unroll
      for (int first = 0; first < kFragments; first += kTogether) {
        float4 some[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) some[i] = fragment(first + i);
        write(part, row, first, kFragments, some);
      }
      return;
    }
    const int piece = (part.number * Tile::kCluster +
                       (Tile::kSharesA ? part.n / Tile::kN : part.m / Tile::kM) % Tile::kCluster) *
                          kShares +
                      row / Tile::kRows;
    const float4* const all = params_.scratch + int64_t(piece) * part.splits * (kFragments * 128) + thread_;
    float4* const own = const_cast<float4*>(all) + part.split * (kFragments * 128);
#pragma unroll
    for (int i = 0; i < kFragments; ++i) __stcg(own + i * 128, fragment(i));
    __threadfence();
    gpu::sync_named(1 + group_, 128);
    if (thread_ == 0) meet(&parts_there[piece], unsigned(part.splits));
    gpu::sync_named(1 + group_, 128);
    if (part.splits <= 4)
      add<4>(part, row, all);
    else if (part.splits <= 8)
      add<8>(part, row, all);
    else
      add<16>(part, row, all);
  }

  __device__ __forceinline__ void end() {}

 private:
  static constexpr int kTogether = 4;  // fragments whose old values are read at once

  /// This part's share of the piece, kTerms parts at a time, 16 loads in flight together.
  template <int kTerms>
  __device__ __forceinline__ void add(const ProductPart& part, int row, const float4* all) const {
    constexpr int kSome = 16 / kTerms;
    const int splits = part.splits, end = (part.split + 1) * kFragments / splits;
    for (int first = part.split * kFragments / splits; first < end; first += kSome) {
      float4 total[kSome] = {};
      for (int split = 0; split < splits; split += kTerms) {
        float4 terms[kSome][kTerms] = {};
#pragma unroll
        for (int i = 0; i < kSome; ++i)
#pragma unroll
          for (int term = 0; term < kTerms; ++term)
            if (first + i < end && split + term < splits)
              terms[i][term] = __ldcg(all + ((split + term) * kFragments + first + i) * 128);
#pragma unroll
        for (int i = 0; i < kSome; ++i)
#pragma unroll
          for (int term = 0; term < kTerms; ++term) {
            total[i].x += terms[i][term].x, total[i].y += terms[i][term].y;
            total[i].z += terms[i][term].z, total[i].w += terms[i][term].w;
          }
      }
      write(part, row, first, end, total);
    }
  }

  /// Fragments first ... of the piece, those before `end`.
  template <int kCount>
  __device__ __forceinline__ void write(const ProductPart& part, int row, int first, int end,
                                        const float4 (&sums)[kCount]) const {
    if (kPair && part.batch == 1 ? params_.second.wide : params_.wide)
      write_as<float>(part, row, first, end, sums);
    else
      write_as<T>(part, row, first, end, sums);
  }
  template <class Out, int kCount>
  __device__ __forceinline__ void write_as(const ProductPart& part, int row, int first, int end,
                                           const float4 (&sums)[kCount]) const {
    using Pair = typename ProductPair<Out>::type;
    const int lane = thread_ % 32, line = part.m + row + thread_ / 32 * 16 + lane / 4;
    const auto place = [&](int i, int down, int& inside) {  // of the pair in d; how many of it are inside
      const int r = line + (first + i) / kAcross * 64 + down * 8;
      const int column = part.n + (first + i) % kAcross * 8 + lane % 4 * 2;
      inside = first + i < end && r < params_.m ? params_.n - column : 0;
      return part.batch * params_.stride + r * params_.ld + column;
    };
    if constexpr (kPair) {
      if (part.batch == 1) return write_transposed<Out>(line, part.n + lane % 4 * 2, first, end, sums);
    }
    float2 old[kCount][2] = {};
    if (params_.beta != 0)
#pragma unroll
      for (int i = 0; i < kCount; ++i)
#pragma unroll
        for (int down = 0; down < 2; ++down) {
          int inside;
          const Out* const from = static_cast<const Out*>(params_.c) + place(i, down, inside);
          if (inside >= 2 && params_.pairs)
            old[i][down] = read_pair<Out>(*reinterpret_cast<const Pair*>(from));
          else if (inside > 0)
            old[i][down] = {float(from[0]), inside > 1 ? float(from[1]) : 0};
        }
#pragma unroll
    for (int i = 0; i < kCount; ++i)
#pragma unroll
      for (int down = 0; down < 2; ++down) {
        int inside;
        Out* const to = static_cast<Out*>(params_.d) + place(i, down, inside);
        if (inside <= 0) continue;
        const float2 bias = params_.bias.at(part.batch, part.n + (first + i) % kAcross * 8 + lane % 4 * 2);
        float low = fmaf(params_.alpha, down ? sums[i].z : sums[i].x, bias.x);
        float high = fmaf(params_.alpha, down ? sums[i].w : sums[i].y, bias.y);
        if (params_.beta != 0) {
          low = fmaf(params_.beta, old[i][down].x, low);
          high = fmaf(params_.beta, old[i][down].y, high);
        }
        if (inside >= 2 && params_.pairs) {
          *reinterpret_cast<Pair*>(to) = make_pair<Out>(low, high);
        } else {
          to[0] = Out(low);
          if (inside > 1) to[1] = Out(high);
        }
      }
  }

  /// Eight lanes with neighbouring lines write 32 bytes of a row of d together.
  template <class Out, int kCount>
  __device__ __forceinline__ void write_transposed(int line, int column, int first, int end,
                                                   const float4 (&sums)[kCount]) const {
    const auto place = [&](int i, int of_four) -> int64_t {  // in d, or -1
      const int r = line + (first + i) / kAcross * 64 + of_four / 2 * 8,
                c = column + (first + i) % kAcross * 8 + of_four % 2;
      return first + i < end && r < params_.m && c < params_.n ? c * params_.second.ld + r : -1;
    };
    Out* const d = static_cast<Out*>(params_.second.d);
    float old[kCount][4] = {};
    if (params_.second.adds)
#pragma unroll
      for (int i = 0; i < kCount; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (const int64_t at = place(i, j); at >= 0) old[i][j] = float(d[at]);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float of_four[4] = {sums[i].x, sums[i].y, sums[i].z, sums[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (const int64_t at = place(i, j); at >= 0) d[at] = Out(fmaf(params_.alpha, of_four[j], old[i][j]));
    }
  }

  const Params& params_;
  const int group_, thread_;
};

}  // namespace
}  // namespace tessera::ops

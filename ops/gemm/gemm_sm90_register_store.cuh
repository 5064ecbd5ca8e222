#pragma once

#include "gpu/global.cuh"
#include "gpu/reread.cuh"
#include "ops/gemm/gemm_sm90_tma_store.cuh"

/// Register-store epilogue, for what TMA cannot store directly: split-K, a d with unaligned rows, and f32
/// results outside weight gradients. The threads store d from their registers, 32 bytes of a row (16 of a
/// 16-bit d) together.
///
/// Split-K: the warpgroups that compute the splits of one piece (the accumulators of a warpgroup) run on
/// different SMs at the same time, if no other kernel occupies SMs (see GemmPlan), so they reduce in this
/// kernel. Each writes its accumulators to the workspace in register order (16 dense bytes per thread),
/// counts itself as arrived, waits for the others, and computes its share of d from all partial sums, in the
/// order of k, so the result does not depend on the order of arrival. With 22 tiles of 128 x 256 and six
/// splits, that is 128 KiB to L2 and back per SM and one wait, 3 us; a second kernel took 5 to 7.
///
/// Termination: a warpgroup waits only for warpgroups that are already running. Those that take the splits of
/// the same tiles are counted while they run. One that still finds some of them not running after kPolls
/// polls, because other kernels occupy SMs, marks its share as deferred when it arrives and goes on to its
/// next tile. (The polls allow for blocks that start a little later, when the previous kernel has left their
/// SMs: otherwise one warpgroup would have to compute several shares.) A deferred share is computed by a
/// warpgroup that waited, or, if all deferred, by the last to arrive, from the same sums in the same order,
/// so d has the same bits. Every wait ends, since a warpgroup waits only for arrivals of the same wave of
/// tiles, and those depend only on earlier waves. The count costs two reductions without a return value per
/// warpgroup and a load that is in flight with the sums. With tickets instead, blocks would wait only for
/// earlier ones, but the last split of a tile would do the whole reduction: 768 KiB for one SM instead of
/// 128, some 8 us more.

namespace tessera::ops {
namespace {

/// Layout of a GEMM's counters (Device::counters): one per piece, one per warpgroup of a cluster's splits,
/// one per 64 rows whose sums are computed (gemm_sm90_bias_gradient.cuh), and one bit per piece and split.
constexpr int kMaxTiles = 4096, kMaxRunning = 1024, kMaxDeferred = 4096;
constexpr int kRunningAt = kMaxTiles, kSumsAt = kRunningAt + kMaxRunning,
              kDeferredAt = kSumsAt + int(kMostSummedRows / 64), kGemmCounters = kDeferredAt + kMaxDeferred;
static_assert(kGemmCounters <= Device::kCounters);

/// The counter of a piece, three fields in one word: splits that have arrived, those of them that deferred
/// their share, and those that have seen all arrive. The last user resets it to 0.
struct SplitKCounter {
  static constexpr unsigned kMost = 1023, kDeferred = 1u << 10, kSeen = 1u << 20;
  static __device__ __forceinline__ unsigned arrived(unsigned word) { return word & kMost; }
  static __device__ __forceinline__ unsigned deferred(unsigned word) { return word >> 10 & kMost; }
  static __device__ __forceinline__ unsigned seen(unsigned word) { return word >> 20; }
};

/// d = alpha sums + bias + beta c, rounded once. Of a pair of problems, the second one's d is transposed.
template <class Tile, bool kPair = false>
class RegisterStoreEpilogue {
  using T = typename Tile::T;
  static constexpr int kAcross = Tile::kN / 8;  // a fragment: 4 sums of a thread, in 8 columns
  static constexpr int kFragments = Tile::kMBlocks * kAcross;
  static constexpr int kShares =
      Tile::kPingPong ? 1 : Tile::kGroups;  // pieces of a work tile, one per warpgroup

 public:
  static constexpr int kSharedBytes = 0, kBarriers = 0, kGroups = Tile::kGroups;
  struct Params {
    void* d;
    const void* c;  // d, or a matrix with the layout of d
    int64_t ld, stride;
    bool wide;           // d is f32, not T
    bool pairs;          // two neighbouring elements can be stored at once
    float4* scratch;     // where splits > 1: scratch_bytes()
    unsigned* counters;  // likewise: kGemmCounters
    int splits;          // of the plan
    int m, n;
    float alpha, beta;
    GemmBias<T> bias;
    struct {  // of a pair's second problem: d (+)= the transposed sums
      void* d;
      int64_t ld;
      bool wide, adds;
    } second;
  };
  static int64_t pieces(const GemmPlan& plan) {
    return int64_t(plan.batch * plan.rows * plan.columns - plan.whole) * Tile::kCluster * kShares;
  }
  static int64_t scratch_bytes(const GemmPlan& plan) {
    return pieces(plan) * plan.splits * kFragments * 128 * int64_t(sizeof(float4));
  }

  __device__ __forceinline__ RegisterStoreEpilogue(const Params& params, char*, gpu::Barrier*, int group)
      : params_(params), group_(group), thread_(int(threadIdx.x) % 128) {
    if (params.splits > 1 && thread_ == 0) atomicAdd(running(), 1u);
  }

  __device__ __forceinline__ void begin(const WorkTile&, int) {}

  /// Not split: stores d. Split:
  ///   1. writes the accumulators to the workspace;
  ///   2. decides whether all splits of the tile are running, otherwise defers its share;
  ///   3. arrives on the piece's counter and, unless it defers, waits until all splits have arrived;
  ///   4. computes its share of d from all partial sums, and the deferred shares too if it is the first that
  ///      waited;
  ///   5. the last one resets the counter.
  __device__ __forceinline__ void finish(const WorkTile& work, int row,
                                         float (&sums)[Tile::kMBlocks][Tile::kN / 2]) {
    const auto fragment = [&](int i) {
      const float* const at = &sums[i / kAcross][i % kAcross * 4];
      return make_float4(at[0], at[1], at[2], at[3]);
    };
    if (work.splits == 1) {
#pragma unroll
      for (int first = 0; first < kFragments; first += kTogether) {
        float4 some[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) some[i] = fragment(first + i);
        write(work, row, first, kFragments, some);
      }
      return;
    }
    // 1. Accumulators to the workspace, in register order.
    const int piece =
        (work.number * Tile::kCluster + (Tile::kCluster > 1 ? gpu::reread_cluster_rank() : 0)) * kShares +
        row / Tile::kRows;
    const float4* const all = params_.scratch + int64_t(piece) * work.splits * (kFragments * 128) + thread_;
    float4* const own = const_cast<float4*>(all) + work.split * (kFragments * 128);
#pragma unroll
    for (int i = 0; i < kFragments; ++i) __stcg(own + i * 128, fragment(i));
    // 2. Only thread 0 reads the count of running warpgroups. The others start with the full count, so only
    // thread 0 polls, and only thread 0 can have `defers` true.
    const unsigned splits = unsigned(work.splits);
    unsigned running_now = thread_ == 0 ? *static_cast<volatile unsigned*>(running()) : splits;
    __threadfence();
    gpu::sync_named(1 + group_, 128);
    unsigned* const counter = params_.counters + piece;
    for (int polls = 0; running_now != splits && polls < kPolls; ++polls) {
      __nanosleep(64);
      running_now = *static_cast<volatile unsigned*>(running());
    }
    const bool defers = running_now != splits;
    // 3. Arrive; wait for the other splits unless the share is deferred.
    unsigned word = 0,
             before = 0;  // thread 0 only: the counter before it was marked as seen
    if (defers) {
      atomicOr(deferred_word(piece, work, work.split), deferred_bit(piece, work, work.split));
      __threadfence();
      word = atomicAdd(counter, 1 + SplitKCounter::kDeferred) + 1 + SplitKCounter::kDeferred;
      __threadfence();
    } else if (thread_ == 0) {
      atomicAdd(counter, 1u);
      while (SplitKCounter::arrived(word = gpu::load_acquire(counter)) < splits) __nanosleep(64);
      before = atomicAdd(counter, SplitKCounter::kSeen);
    }
    // 4. All threads learn whether a share of the piece was deferred; compute the share of d.
    if (gpu::sync_named_or(1 + group_, 128, SplitKCounter::deferred(word) > 0)) [[unlikely]] {
      if (reduce_deferred(work, row, piece, all, defers, word, before)) return;
    } else if (work.splits <= 4) {
      add<4>(work, work.split, row, all);
    } else if (work.splits <= 8) {
      add<8>(work, work.split, row, all);
    } else {
      add<kMostTerms>(work, work.split, row, all);
    }
    // 5. The last split to see all arrive resets the counter; if all deferred, the last to arrive.
    if (thread_ == 0 &&
        (defers || SplitKCounter::seen(before) + 1 + SplitKCounter::deferred(before) == splits))
      *counter = 0;
  }

  __device__ __forceinline__ void end() {
    if (params_.splits > 1 && thread_ == 0) atomicAdd(running(), ~0u);
  }

 private:
  // Splits whose fragments are loaded at once, at most: three warpgroups have few registers.
  static constexpr int kMostTerms = Tile::kGroups == 3 ? 8 : 16;
  static constexpr int kTogether = 4;  // fragments whose values of c are loaded at once
  // Polls of the count, about 0.7 us each: together as long as the last tile of the previous kernel may take,
  // whose SMs the missing blocks wait for.
  static constexpr int kPolls = 256;

  /// Number of running warpgroups that take the splits of the same tiles: those of the same index in blocks
  /// of the same rank in `splits` neighbouring clusters.
  __device__ __forceinline__ unsigned* running() const {
    const int block = gpu::reread_block();
    const int of_splits = block / Tile::kCluster / params_.splits * Tile::kCluster + block % Tile::kCluster;
    return params_.counters + kRunningAt + of_splits * Tile::kGroups + group_;
  }

  /// One bit per piece and split: whether the split deferred its share.
  __device__ __forceinline__ unsigned* deferred_word(int piece, const WorkTile& work, int split) const {
    return params_.counters + kDeferredAt + (piece * work.splits + split) / 32;
  }
  __device__ __forceinline__ static unsigned deferred_bit(int piece, const WorkTile& work, int split) {
    return 1u << (piece * work.splits + split) % 32;
  }
  /// For a piece of which some shares were deferred: computes its own share, and the deferred ones if this is
  /// the first that waited, or, if all deferred, the last to arrive. Returns true if it only defers its own.
  /// `defers`, `word` and `before` are valid in thread 0.
  __device__ __forceinline__ bool reduce_deferred(const WorkTile& work, int row, int piece, const float4* all,
                                                  bool defers, unsigned word, unsigned before) const {
    const bool all_deferred = SplitKCounter::deferred(word) == unsigned(work.splits);
    const bool first = defers ? all_deferred : thread_ == 0 && SplitKCounter::seen(before) == 0;
    const bool cleans = gpu::sync_named_or(1 + group_, 128, first);
    if (gpu::sync_named_or(1 + group_, 128, defers && !all_deferred)) return true;
#pragma unroll 1
    for (int split = 0; split < work.splits; ++split) {
      const bool deferred =
          (__ldcg(deferred_word(piece, work, split)) & deferred_bit(piece, work, split)) != 0;
      if (split == work.split || (cleans && deferred)) add<1, 1>(work, split, row, all);
    }
    if (!cleans) return false;
    gpu::sync_named(1 + group_, 128);  // all threads have read the bits
    for (int split = thread_; split < work.splits; split += 128)
      atomicAnd(deferred_word(piece, work, split), ~deferred_bit(piece, work, split));
    return false;
  }

  /// Computes share `share` of the piece, kTerms splits and kSome fragments at a time, whose loads are in
  /// flight together. The order of summation does not depend on them.
  template <int kTerms, int kSome = Tile::kGroups == 3 ? 1 : 16 / kTerms>
  __device__ __forceinline__ void add(const WorkTile& work, int share, int row, const float4* all) const {
    const int splits = work.splits, end = (share + 1) * kFragments / splits;
    for (int first = share * kFragments / splits; first < end; first += kSome) {
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
      write(work, row, first, end, total);
    }
  }

  /// Writes fragments first ... first + kCount - 1 of the piece, those before `end`.
  template <int kCount>
  __device__ __forceinline__ void write(const WorkTile& work, int row, int first, int end,
                                        const float4 (&sums)[kCount]) const {
    if (kPair && work.batch == 1 ? params_.second.wide : params_.wide)
      write_as<float>(work, row, first, end, sums);
    else
      write_as<T>(work, row, first, end, sums);
  }
  template <class Out, int kCount>
  __device__ __forceinline__ void write_as(const WorkTile& work, int row, int first, int end,
                                           const float4 (&sums)[kCount]) const {
    using Pair = typename GemmPair<Out>::type;
    const int lane = thread_ % 32, line = work.m + row + thread_ / 32 * 16 + lane / 4;
    const auto place = [&](int i, int down,
                           int& inside) {  // offset of the pair in d; `inside`: how many of the two are in d
      const int r = line + (first + i) / kAcross * 64 + down * 8;
      const int column = work.n + (first + i) % kAcross * 8 + lane % 4 * 2;
      inside = first + i < end && r < params_.m ? params_.n - column : 0;
      return work.batch * params_.stride + r * params_.ld + column;
    };
    if constexpr (kPair) {
      if (work.batch == 1) return write_transposed<Out>(line, work.n + lane % 4 * 2, first, end, sums);
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
        const float2 bias = params_.bias.at(work.batch, work.n + (first + i) % kAcross * 8 + lane % 4 * 2);
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
    const auto place = [&](int i, int of_four) -> int64_t {  // offset in d, or -1
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

#pragma once

#include "ops/decoder_layers/decoder_ring.cuh"
#include "ops/decoder_layers/sell_decoder_plan.h"
#include "ops/sparse_linear/sell_chunk.cuh"
#include "ops/swiglu/swiglu_math.h"

/// Weights in sell_delta4 (ops/sparse_linear/sparse_weight.h) in decoder_layers_sm90.cuh.
///
/// A slice of 32 rows belongs to a block, whose warps have a part of its columns each, or every eighth, and a
/// lane a row. A stage holds up to 12 chunks, values before distances, and a note of how many. The input
/// vector is in shared memory in 16 bits. Sums are added over the warps, in order, when a block has done all
/// its slices of the phase.
///
/// What pads a row multiplies up to 8 inputs past its part, not zeros as in sell.cuh.

namespace tessera::ops::decoder {
namespace {

template <class Element>
class SellWeights {
 public:
  using T = Element;
  static constexpr int64_t kMaxLayers = kMaxSellLayers;
  static constexpr int kChunks = 12;                                     // of a stage
  static constexpr int kValueBytes = kWarp * 16, kGapBytes = kWarp * 4;  // of a chunk
  static constexpr int kNote = kChunks * (kValueBytes + kGapBytes);      // where a stage has its note
  static constexpr int kStageBytes = kSellStageBytes;
  static_assert(kNote + 4 <= kStageBytes);

  struct Matrix {
    const char *values, *gaps;
    const uint32_t* rows;
    const int32_t* offsets;
  };
  struct Layer {
    Matrix matrix[kSellMatrices];
  };
  struct Plan {
    SellGemv gemv[kGemvs];
    int first_slice[kSellMatrices], first_row[kSellMatrices], rows[kSellMatrices];
    float* gated;  // [2F]: gate, up
  };
  using Arguments = Args<SellWeights>;

  __device__ __forceinline__ SellWeights(int warp, int lane) : warp_(warp), lane_(lane) {}

  /// The input of the output projection, or silu(gate) up.
  static __device__ __forceinline__ void load_vector(const Arguments& args, int phase, T* vector) {
    const int count = args.columns[phase];
    if (phase == kOut) {
      copy_vector(vector, args.mixed, count);
    } else {
      constexpr int kTogether = 4;  // packs whose loads are in flight together
      const float* const gated = args.plan.gated;
      for (int first = int(threadIdx.x) * 4; first < count; first += kTogether * kThreads * 4) {
        float4 gate[kTogether], up[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
          if (const int k = first + i * kThreads * 4; k < count) {
            gate[i] = __ldcg(reinterpret_cast<const float4*>(gated + k));
            up[i] = __ldcg(reinterpret_cast<const float4*>(gated + count + k));
          }
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
          if (const int k = first + i * kThreads * 4; k < count) {
            gpu::Pack<T, 4> pack;  // every block does it for itself: exp2 and reciprocal by approximation
            pack.at[0] = T(swiglu_value<true>(gate[i].x, up[i].x));
            pack.at[1] = T(swiglu_value<true>(gate[i].y, up[i].y));
            pack.at[2] = T(swiglu_value<true>(gate[i].z, up[i].z));
            pack.at[3] = T(swiglu_value<true>(gate[i].w, up[i].w));
            gpu::store_pack(vector + k, pack);
          }
      }
    }
  }
  /// Zeros past the last input, to the end of what a row can reach.
  static __device__ __forceinline__ void pad_vector(const Arguments& args, int phase, T* vector) {
    const SellGemv& gemv = gemv_of(args, phase);
    const int end = gemv.parts * gemv.width + int(sell_delta4::kEntries);
    for (int k = args.columns[phase] + int(threadIdx.x); k < end; k += kThreads) vector[k] = T(0.0f);
  }

  // ---- Load cursor ----

  /// Moves to the warp's first stage of the phase; false if it has none.
  __device__ __forceinline__ bool begin(const Arguments& args, int layer, int phase) {
    if (next_.layer < 0) {
      next_ = {.layer = 0, .phase = kQkv, .slices = own(args, kQkv), .part = warp_};
      find(args);
    }
    return take(args, layer, phase);
  }
  /// Loads a stage; false if it was the warp's last one in the phase.
  __device__ __forceinline__ bool issue(const Arguments& args, int layer, int phase, char* stage,
                                        gpu::Barrier& full, uint64_t policy) {
    const int count = min(kChunks, end_ - chunk_);
    if (gpu::elect_one()) {
      *reinterpret_cast<int*>(stage + kNote) = count << 1 | (chunk_ + count == end_);
      if (count > 0) {
        full.arrive_expect(uint32_t(count * (kValueBytes + kGapBytes)));
        gpu::bulk_load(stage, values_ + int64_t(chunk_) * kValueBytes, uint32_t(count * kValueBytes), full,
                       policy);
        gpu::bulk_load(stage + kChunks * kValueBytes, gaps_ + int64_t(chunk_) * kGapBytes,
                       uint32_t(count * kGapBytes), full, policy);
      } else {
        full.arrive();  // a slice without entries
      }
    }
    chunk_ += count;
    return chunk_ < end_ || take(args, layer, phase);
  }

  // ---- GEMV ----

  /// Computes the block's slices of the phase's GEMV and stores the sums: q, k and v, and gate and up, as
  /// f32; the others are added to the residual stream and, in the last layer, also written as y.
  template <int kDim>
  static __device__ __forceinline__ void multiply(const Arguments& args, Ring<SellWeights, kDim>& ring,
                                                  int layer, int phase, const T* vector, char* memory,
                                                  int warp, int lane) {
    const SellGemv& gemv = gemv_of(args, phase);
    const Range range = own(args, phase);
    float* const sums = reinterpret_cast<float*>(memory);  // (slices, warps, 32)
    // The rows that this warp will store. Their loads are long done by then.
    Output output(args, layer, phase, range.begin + warp, range.end, lane);
    for (int slice = range.begin; slice < range.end; ++slice) {
      float sum = 0;
      for (int part = warp; part < gemv.parts; part += kWarps) {
        uint32_t place = gpu::shared_address(vector) + uint32_t(part * gemv.width) * 2;
        const uint32_t end = place + uint32_t(gemv.width) * 2;
        bool last = false;
        while (!last) {
          const char* const stage = ring.wait();
          const int note = *reinterpret_cast<const int*>(stage + kNote), count = note >> 1;
          last = note & 1;
          add_chunks(stage, count, lane, sum, place, end);
          ring.refill(args);
        }
      }
      sums[((slice - range.begin) * kWarps + warp) * kWarp + lane] = sum;
    }
    __syncthreads();
    for (int slice = range.begin + warp; slice < range.end; slice += kWarps) {
      float total = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total += sums[((slice - range.begin) * kWarps + w) * kWarp + lane];
      output.store(args, layer, phase, total);
      if (slice + kWarps < range.end) output = Output(args, layer, phase, slice + kWarps, range.end, lane);
    }
  }

 private:
  /// A chunk on its way through add_chunks: the lane's values, and its inputs.
  struct Operands {
    uint4 values;
    T x[8];

    __device__ __forceinline__ void load(const uint4* from, uint32_t gaps, uint32_t& place, uint32_t end) {
      values = *from;
      const sparse::SellDistances distances(gaps);
#pragma unroll
      for (int e = 0; e < 8; ++e)
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x[e].bits) : "r"(distances.at<2>(place, e)));
      place = min(distances.after<2>(place), end);
    }
    __device__ __forceinline__ void add_to(float& sum) const {
      const uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 value = sparse::unpack_pair<T>(words[w]);
        sum = fmaf(value.x, float(x[2 * w]), sum);
        sum = fmaf(value.y, float(x[2 * w + 1]), sum);
      }
    }
  };

  /// Adds the products of the chunks of a stage. The inputs of a chunk are loaded while the one before is
  /// multiplied, its distances one earlier. What lies past the last chunk is loaded and not used.
  static __device__ __forceinline__ void add_chunks(const char* stage, int count, int lane, float& sum,
                                                    uint32_t& place, uint32_t end) {
    if (count == 0) return;
    const uint4* const values = reinterpret_cast<const uint4*>(stage) + lane;
    const uint32_t* const gaps = reinterpret_cast<const uint32_t*>(stage + kChunks * kValueBytes) + lane;
    Operands one, other;
    one.load(values, gaps[0], place, end);
    uint32_t following = gaps[kWarp];
    for (int c = 1;; c += 2) {
      if (c == count) return one.add_to(sum);
      other.load(values + c * kWarp, following, place, end);
      following = gaps[(c + 1) * kWarp];
      one.add_to(sum);
      if (c + 1 == count) return other.add_to(sum);
      one.load(values + (c + 1) * kWarp, following, place, end);
      following = gaps[(c + 2) * kWarp];
      other.add_to(sum);
    }
  }

  struct Range {
    int begin, end;
  };
  /// A slice of a GEMV.
  struct Slice {
    int matrix, at;  // of the layer; the slice in it

    __device__ __forceinline__ Slice(const Arguments& args, int phase, int slice) {
      const int(&first)[kSellMatrices] = args.plan.first_slice;
      if (phase == kQkv)
        matrix = int(slice >= first[1]) + int(slice >= first[2]);
      else
        matrix = phase == kOut ? 3 : phase == kUp ? 4 + int(slice >= first[5]) : 6;
      at = slice - first[matrix];
    }
  };

  /// Where the sums of this lane's row of a slice go.
  struct Output {
    int row = -1;      // of all matrices of the phase, or there is none
    float before = 0;  // what is added: the residual stream

    __device__ __forceinline__ Output(const Arguments& args, int layer, int phase, int slice, int end,
                                      int lane) {
      if (slice >= end) return;
      const Slice of(args, phase, slice);
      const uint32_t rows = args.layer[layer].weights.matrix[of.matrix].rows[of.at * 8 + lane / 4];
      const int in_matrix =
          of.at / int(sell_delta4::kSlices) * int(sell_delta4::kGroupRows) + int(rows >> lane % 4 * 8 & 0xFF);
      if (in_matrix >= args.plan.rows[of.matrix]) return;
      row = args.plan.first_row[of.matrix] + in_matrix;
      if (phase == kOut || phase == kDown)  // another block may have written it in the phase before
        before = layer == 0 && phase == kOut ? float(args.x[row]) : __ldcg(args.stream + row);
    }
    __device__ __forceinline__ void store(const Arguments& args, int layer, int phase, float total) const {
      if (row < 0) return;
      if (phase == kQkv || phase == kUp) {
        (phase == kQkv ? args.qkv : args.plan.gated)[row] = total;
        return;
      }
      args.stream[row] = before + total;
      if (layer + 1 == args.layers && phase == kDown) args.y[row] = T(before + total);
    }
  };

  static __device__ __forceinline__ const SellGemv& gemv_of(const Arguments& args, int phase) {
    return args.plan.gemv[phase == kQkv ? 0 : phase - 1];
  }
  /// This block's slices.
  static __device__ __forceinline__ Range own(const Arguments& args, int phase) {
    const SellGemv& gemv = gemv_of(args, phase);
    const int blocks = int(gridDim.x), least = gemv.slices / blocks, longer = gemv.slices % blocks;
    const int shifted = int(blockIdx.x) - gemv.first, rank = shifted < 0 ? shifted + blocks : shifted;
    const int begin = rank * least + min(rank, longer);
    return {begin, begin + least + int(rank < longer)};
  }

  /// If the next run of chunks is of that phase, it becomes the one that is loaded, and the offsets of the
  /// run after it are requested, long before they are needed.
  __device__ __forceinline__ bool take(const Arguments& args, int layer, int phase) {
    if (next_.layer != layer || next_.phase != phase) return false;
    chunk_ = gpu::uniform(next_.chunk), end_ = gpu::uniform(next_.end);
    const Matrix& matrix = args.layer[layer].weights.matrix[next_.matrix];
    values_ = matrix.values, gaps_ = matrix.gaps;
    next_.part += kWarps;
    find(args);
    return true;
  }
  /// The first run from `next_` on, and its offsets.
  __device__ __forceinline__ void find(const Arguments& args) {
    while (next_.slices.begin >= next_.slices.end || next_.part >= gemv_of(args, next_.phase).parts) {
      next_.part = warp_;
      if (next_.slices.begin < next_.slices.end && warp_ < gemv_of(args, next_.phase).parts) {
        ++next_.slices.begin;
        continue;
      }
      next_.phase = next_.phase == kQkv ? kOut : next_.phase + 1;
      if (next_.phase == kPhases) {
        next_.phase = kQkv;
        if (++next_.layer >= args.layers) return;
      }
      next_.slices = own(args, next_.phase);
    }
    const Slice of(args, next_.phase, next_.slices.begin);
    constexpr int kSlices = int(sell_delta4::kSlices);
    const int64_t at = (int64_t(of.at / kSlices) * gemv_of(args, next_.phase).parts + next_.part) * kSlices +
                       of.at % kSlices;
    const int32_t* const offsets = args.layer[next_.layer].weights.matrix[of.matrix].offsets + at;
    next_.matrix = of.matrix;
    next_.chunk = __ldg(offsets), next_.end = __ldg(offsets + 1);
  }

  struct Next {
    int layer = -1, phase = kQkv;
    Range slices{0, 0};
    int part = 0, chunk = 0, end = 0, matrix = 0;
  };

  int warp_, lane_;
  int chunk_ = 0, end_ = 0;  // of `values_` and `gaps_`, which are not issued yet
  const char *values_ = nullptr, *gaps_ = nullptr;
  Next next_;  // the run after them
};

}  // namespace
}  // namespace tessera::ops::decoder

#pragma once

#include <algorithm>

#include "gpu/again.cuh"
#include "gpu/barrier.cuh"
#include "gpu/launch.cuh"
#include "gpu/mma.cuh"
#include "gpu/pack.cuh"
#include "gpu/shared.cuh"
#include "gpu/tma.cuh"
#include "gpu/wgmma.cuh"
#include "ops/activation/activation_approx.cuh"
#include "ops/gemm/gemm_sm90_store.cuh"
#include "ops/mlp/mlp_fused.h"

/// The whole mlp in one kernel: hidden rows never leave the chip.
///
/// Two blocks, a cluster, take 128 tokens. Each keeps all of their x in shared memory (128 KiB at D = 512),
/// makes half of the hidden columns and half of the columns of y, whose sums, 128 x 256, are half of its
/// registers. So what one makes of a hidden row, both need: every chunk of 256 hidden columns is handed over,
/// half of it each way.
///
/// It travels as registers. The sums of the first product, rounded and packed, are the left operand of the
/// second (gpu/wgmma.cuh), and thread t of warpgroup w of the one block holds exactly what thread t of
/// warpgroup w of the other will need: 16 bytes for each k step, stored into the other's shared memory in the
/// order of the threads (st.async, counted on a barrier there) and read back as they were stored. No layout,
/// no fence between proxies, and the second product reads nothing but weights from shared memory.
///
/// A warpgroup has 64 tokens, 128 sums per thread for y and 64 for h: with no more than 240 registers the
/// products of a chunk cannot be issued before the second ones of the chunk before. They overlap with those
/// of the other warpgroup. A thread brings the weights through a ring of 16 KiB, [128 rows, 64 of k], in the
/// order of their use; another brings x when the last chunk's first product has let it go, and asks L2 for
/// the next tile's early. y goes out of the registers, four lanes exchanging words so that each writes 16
/// bytes.
///
/// 2 T F (D + E) FLOPs. Bytes: x and y, once; from L2 the weights for every 128 tokens, 32 bytes per clock
/// and SM. The paper model and what was measured: docs/ops/mlp.md.

namespace tessera::ops {
namespace {

template <class T>
struct WholeArgs {
  const T* up_bias;    // [F] or null
  const T* down_bias;  // [E] or null
  const T* residual;   // rows of residual_row elements, or null
  T* y;
  float* parts;  // of the split tiles: [tile, part, 128, E]
  int64_t residual_row, y_row;
  int rows, wide, out, depths;  // T, F, E, and 64s of D
  int half;                     // columns of y that the first block of a cluster makes
  int chunks, units, whole, splits;
};

inline constexpr int kWholeRows = 128, kWholeSpan = 256, kWholeDepths = 8, kWholeThreads = 384;
inline constexpr int kWholeSlots = 5, kWholeHands = 1;
inline constexpr int kSlotBytes = 128 * 128, kHandBytes = 128 * 64;

/// kSlots: of the ring; kHands: halves of hidden rows from the other block that a warpgroup has room for.
template <int kSlots, int kHands>
struct WholeShared {
  alignas(1024) char x[kWholeDepths][kSlotBytes];
  char slots[kSlots][kSlotBytes];
  char hands[2][kHands][kHandBytes];
  float biases[2][2][128];
  gpu::Ring<kSlots> ring;
  gpu::Barrier x_full[kWholeDepths], x_empty[kWholeDepths];
  gpu::Barrier landed[2][kHands], may_send[2][kHands];
};

/// Chunks `first` ... `end` - 1 of the tile whose first row is `row`.
struct WholeUnit {
  int row, split, first, end;

  template <class T>
  __device__ __forceinline__ WholeUnit(const WholeArgs<T>& args, int unit) {
    const int over = max(unit - args.whole, 0), tile = over / args.splits;
    split = over - tile * args.splits;
    row = (min(unit, args.whole) + tile) * kWholeRows;
    const bool splitted = unit >= args.whole;
    first = splitted ? split * args.chunks / args.splits : 0;
    end = splitted ? (split + 1) * args.chunks / args.splits : args.chunks;
  }
};

/// Whether the chunk's half is 64 wide instead of 128: the last one of at most 128.
template <class T>
__device__ __forceinline__ bool is_short(const WholeArgs<T>& args, int chunk) {
  return args.wide - chunk * kWholeSpan <= kWholeSpan / 2;
}

/// The thread that brings the weights, in the order in which they are multiplied.
template <class T, class Shared, int kSlots>
__device__ __forceinline__ void bring_weights(const gpu::TensorMap& up, const gpu::TensorMap& down,
                                              const WholeArgs<T>& args, Shared& shared, int rank) {
  gpu::RingPlace<kSlots> place;
  const auto begin = [&](int bytes) -> gpu::Barrier& {
    shared.ring.empty[place.stage].wait(place.parity ^ 1);
    shared.ring.full[place.stage].arrive_expect(uint32_t(bytes));
    return shared.ring.full[place.stage];
  };
  for (int index = int(blockIdx.x) / 2; index < args.units; index += int(gridDim.x) / 2) {
    const WholeUnit unit(args, index);
    for (int chunk = unit.first; chunk < unit.end; ++chunk) {
      const int boxes = is_short(args, chunk) ? 1 : 2;
      const int own = chunk * kWholeSpan + rank * boxes * 64,
                other = chunk * kWholeSpan + (rank ^ 1) * boxes * 64;
      for (int depth = 0; depth < args.depths; ++depth) {
        gpu::Barrier& full = begin(boxes * kSlotBytes / 2);
        char* const slot = shared.slots[place.stage];
        gpu::load_box(slot, up, full, depth * 64, own);
        if (boxes == 2) gpu::load_box(slot + kSlotBytes / 2, up, full, depth * 64, own + 64);
        place.advance();
      }
      for (int part = 0; part < boxes * 4; ++part) {  // own, other's; each for both 128s of columns
        const int hidden = (part & 2 ? other : own) + part / 4 * 64,
                  column = rank * args.half + part % 2 * 128;
        gpu::Barrier& full = begin(kSlotBytes);
        char* const slot = shared.slots[place.stage];
        gpu::load_box(slot, down, full, hidden, column);
        gpu::load_box(slot + kSlotBytes / 2, down, full, hidden, column + 64);
        place.advance();
      }
    }
  }
}

/// The thread that brings the tokens: as soon as both warpgroups are done with those of the tile before.
template <class T, class Shared>
__device__ __forceinline__ void bring_tokens(const gpu::TensorMap& x, const WholeArgs<T>& args,
                                             Shared& shared) {
  uint32_t parity = 0;
  for (int index = int(blockIdx.x) / 2; index < args.units; index += int(gridDim.x) / 2, parity ^= 1) {
    const WholeUnit unit(args, index);
    for (int depth = 0; depth < args.depths; ++depth) {
      shared.x_empty[depth].wait(parity ^ 1);
      shared.x_full[depth].arrive_expect(kSlotBytes);
      gpu::load_box(shared.x[depth], x, shared.x_full[depth], depth * 64, unit.row);
    }
    const int next = index + int(gridDim.x) / 2;
    if (next < args.units)
      for (int depth = 0; depth < args.depths; ++depth)
        gpu::prefetch_box(x, depth * 64, WholeUnit(args, next).row);
  }
}

/// One warpgroup's 64 rows.
template <class T, Activation kKind, class Shared, int kSlots, int kHands>
class WholeGroup {
  using enum gpu::TileOrder;

 public:
  __device__ __forceinline__ WholeGroup(const WholeArgs<T>& args, Shared& shared, int group)
      : args_(args),
        shared_(shared),
        group_(group),
        slots_(uint32_t(gpu::tile_descriptor<along_k>(gpu::shared_address(shared.slots)))),
        x_(uint32_t(gpu::tile_descriptor<along_k>(gpu::shared_address(shared.x) + uint32_t(group) * 8192))) {}

  __device__ __forceinline__ void run() {
    for (int index = int(blockIdx.x) / 2; index < args_.units; index += int(gridDim.x) / 2, round_ ^= 1) {
      const WholeUnit unit(args_, index);
      float y[2][64];
      for (int chunk = unit.first; chunk < unit.end; ++chunk)
        run_chunk(y, chunk, chunk == unit.first, chunk + 1 == unit.end);
      gpu::wait_products<0>();
      gpu::pin(y[0]);
      gpu::pin(y[1]);
      release<1>();
      if (index < args_.whole)
        store(y, unit.row);
      else
        store_part(y, index - args_.whole);
    }
  }

 private:
  /// Releases the stage whose MMAs were issued last, or the one before.
  __device__ __forceinline__ bool speaks() const { return speaks_; }
  /// The thread's index in the group, re-read: y and h leave no registers for what can be had again.
  static __device__ __forceinline__ int place() { return gpu::thread_again() % 128; }
  static __device__ __forceinline__ uint64_t descriptor(uint32_t low) {
    return uint64_t(uint32_t(gpu::tile_descriptor<along_k>(0) >> 32)) << 32 | low;
  }
  template <int kBack>
  __device__ __forceinline__ void release() {
    const int slot = place_.stage - kBack;
    if (speaks()) shared_.ring.empty[slot < 0 ? slot + kSlots : slot].arrive();
  }
  __device__ __forceinline__ void settle() {
    gpu::wait_products<1>();
    release<2>();
  }
  __device__ __forceinline__ uint64_t await_slot() {
    shared_.ring.full[place_.stage].wait(place_.parity);
    return descriptor(slots_ + uint32_t(place_.stage * (kSlotBytes >> 4)));
  }

  template <bool kFirst, int kCount>
  __device__ __forceinline__ void multiply_tokens(float (&h)[kCount], int depth) {
    const uint64_t slot = await_slot(), x = descriptor(x_ + uint32_t(depth * (kSlotBytes >> 4)));
    gpu::fence_products();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      gpu::multiply<T, along_k, along_k>(h, x + step * gpu::kDescriptorStep<along_k>,
                                         slot + step * gpu::kDescriptorStep<along_k>, !kFirst || step > 0);
    gpu::commit_products();
    place_.advance();
  }
  /// Sums += 16-bit halves in registers times a slot.
  __device__ __forceinline__ void add_slot(float (&sums)[64], const uint32_t (&a)[4][4], int add_first) {
    const uint64_t slot = await_slot();
    gpu::fence_products();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      gpu::multiply<T, along_k>(sums, a[step], slot + step * gpu::kDescriptorStep<along_k>,
                                step == 0 ? add_first : 1);
    gpu::commit_products();
    place_.advance();
  }

  /// f of pairs of h.
  static __device__ __forceinline__ void activate_pairs(uint32_t (&a)[4][4]) {
    if constexpr (kKind != Activation::none)
#pragma unroll
      for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 value = gpu::unpack_halves<T>(a[step][i]);
          a[step][i] = gpu::pack_halves<T>(ActivationApprox<T, kKind>::value(value.x),
                                           ActivationApprox<T, kKind>::value(value.y));
        }
  }
  __device__ __forceinline__ uint32_t hand_address(uint32_t hand) const {
    return gpu::shared_address(shared_.hands[group_]) + hand * kHandBytes + uint32_t(place()) * 16;
  }
  /// The halves of 64 columns to this thread's counterpart in the other block.
  __device__ __forceinline__ void send(const uint32_t (&a)[4][4]) {
    const uint32_t hand = hand_ % kHands;
    shared_.may_send[group_][hand].wait((hand_ / kHands & 1) ^ 1);
    const int other = gpu::cluster_rank_again() ^ 1;
    const uint32_t to = gpu::cluster_address_again(hand_address(hand), other),
                   landed =
                       gpu::cluster_address_again(gpu::shared_address(&shared_.landed[group_][hand]), other);
#pragma unroll
    for (int step = 0; step < 4; ++step) gpu::send_words(to + uint32_t(step) * 2048, a[step], landed);
  }
  /// The counterpart's, into registers.
  __device__ __forceinline__ void receive(uint32_t (&a)[4][4]) {
    const uint32_t hand = hand_ % kHands;
    gpu::Barrier& landed = shared_.landed[group_][hand];
    landed.wait(hand_ / kHands & 1);
    if (place() == 0) landed.arrive_expect(kHandBytes);
    const uint32_t from = hand_address(hand);
#pragma unroll
    for (int step = 0; step < 4; ++step) gpu::load_shared(a[step], from + uint32_t(step) * 2048);
  }
  /// After products that read them have been issued, so that they are in registers.
  __device__ __forceinline__ void let_send() {
    __syncwarp();
    if (speaks()) shared_.may_send[group_][hand_ % kHands].let_go_at(uint32_t(gpu::cluster_rank_again() ^ 1));
    ++hand_;
  }

  /// The first product of a chunk; kCount accumulators, 64 or 128 columns.
  template <int kCount>
  __device__ __forceinline__ void multiply_up(float (&h)[kCount], bool begins, bool ends) {
    // The first block apart: only if h is known to begin there are its registers free until then.
    if (begins) shared_.x_full[0].wait(round_);
    multiply_tokens<true>(h, 0);
    if (!begins) settle();
    for (int depth = 1; depth < args_.depths; ++depth) {
      if (begins) shared_.x_full[depth].wait(round_);
      multiply_tokens<false>(h, depth);
      settle();
      if (ends && speaks()) shared_.x_empty[depth - 1].arrive();
    }
    gpu::wait_products<0>();
    gpu::pin(h);
    if (ends && speaks()) shared_.x_empty[args_.depths - 1].arrive();
  }

  /// h += the biases of the chunk's columns, which the threads fetch for each other. A warp that fetches
  /// those of a chunk has seen all others fetch the last chunk's, so they have used those of the one before.
  __device__ __forceinline__ void add_bias(float (&h)[64], int chunk, int wide) {
    const int thread = place(), column = chunk * kWholeSpan + gpu::cluster_rank_again() * wide + thread;
    float* const biases = shared_.biases[group_][biased_];
    biases[thread] = column < args_.wide ? float(args_.up_bias[column]) : 0.0f;
    biased_ ^= 1;
    gpu::sync_named(1 + group_, 128);
#pragma unroll
    for (int block = 0; block < 16; ++block) {
      const float2 added = *reinterpret_cast<const float2*>(biases + block * 8 + thread % 4 * 2);
      h[4 * block] += added.x, h[4 * block + 1] += added.y;
      h[4 * block + 2] += added.x, h[4 * block + 3] += added.y;
    }
  }

  __device__ __forceinline__ void run_chunk(float (&y)[2][64], int chunk, bool begins, bool ends) {
    const bool half = is_short(args_, chunk);
    uint32_t own[2][4][4], other[4][4];
    int add = !begins;
    {
      float h[64];
      if (half) {
        multiply_up(reinterpret_cast<float(&)[32]>(h), begins, ends);
#pragma unroll
        for (int i = 32; i < 64; ++i) h[i] = 0;  // or their registers would be taken since the last chunk
      } else {
        multiply_up(h, begins, ends);
      }
      if (args_.up_bias) add_bias(h, chunk, half ? 64 : 128);
#pragma unroll
      for (int pair = 0; pair < 32; ++pair)
        own[pair / 16][pair / 4 % 4][pair % 4] = gpu::pack_halves<T>(h[2 * pair], h[2 * pair + 1]);
    }

    for (int part = half ? 1 : 0;; ++part) {
      activate_pairs(own[0]);
      send(own[0]);
      add_slot(y[0], own[0], add);
      settle();
      add_slot(y[1], own[0], add);
      settle();
      receive(other);
      add_slot(y[0], other, 1);
      let_send();
      settle();
      add_slot(y[1], other, 1);
      settle();
      if (part == 1) break;
      add = 1;
#pragma unroll
      for (int i = 0; i < 16; ++i) own[0][i / 4][i % 4] = own[1][i / 4][i % 4];
    }
  }

  /// y = sums + bias + residual, rounded. Four lanes exchange pairs of four blocks of 8 columns, so that each
  /// writes 16 bytes.
  __device__ __forceinline__ void store(const float (&y)[2][64], int first_row) {
    const int rank = gpu::cluster_rank_again(), quad = place() % 4,
              rows[2] = {first_row + row(0), first_row + row(1)};
    const int end = min(args_.out, rank ? args_.out : args_.half);
    const ProductBias<T> bias{args_.down_bias, 0, args_.out};
#pragma unroll
    for (int part = 0; part < 2; ++part)
#pragma unroll
      for (int four = 0; four < 4; ++four) {
        const int column = rank * args_.half + part * 128 + four * 32;
        uint32_t words[2][4];
#pragma unroll
        for (int block = 0; block < 4; ++block) {
          const int at = column + block * 8 + quad * 2;
          const float2 added = bias.at(0, at);
#pragma unroll
          for (int down = 0; down < 2; ++down) {
            const int i = (four * 4 + block) * 4 + down * 2;
            float2 sum{y[part][i] + added.x, y[part][i + 1] + added.y};
            if (args_.residual && rows[down] < args_.rows && at < end) {
              const float2 old = gpu::unpack_halves<T>(
                  *reinterpret_cast<const uint32_t*>(args_.residual + rows[down] * args_.residual_row + at));
              sum.x += old.x, sum.y += old.y;
            }
            words[down][block] = gpu::pack_halves<T>(sum.x, sum.y);
          }
        }
#pragma unroll
        for (int down = 0; down < 2; ++down) {
          exchange<1>(words[down], quad);
          exchange<2>(words[down], quad);
          const int at = column + quad * 8;
          if (rows[down] < args_.rows && at < end)
            *reinterpret_cast<uint4*>(args_.y + rows[down] * args_.y_row + at) =
                make_uint4(words[down][0], words[down][1], words[down][2], words[down][3]);
        }
      }
  }
  /// A step of the transposition of 4 x 4 words among four lanes.
  template <int kDistance>
  static __device__ __forceinline__ void exchange(uint32_t (&words)[4], int quad) {
    const bool upper = quad & kDistance;
#pragma unroll
    for (int low = 0; low < 4; ++low) {
      if (low & kDistance) continue;
      const uint32_t given = upper ? words[low] : words[low | kDistance];
      const uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, given, kDistance);
      if (upper)
        words[low] = got;
      else
        words[low | kDistance] = got;
    }
  }

  __device__ __forceinline__ void store_part(const float (&y)[2][64], int part_index) {
    const int rank = gpu::cluster_rank_again(), thread = place(),
              end = min(args_.out, rank ? args_.out : args_.half);
    float* const to = args_.parts + (int64_t(part_index) * kWholeRows + row(0)) * args_.out;
    const int lower = 8 * args_.out;
#pragma unroll
    for (int part = 0; part < 2; ++part)
#pragma unroll
      for (int block = 0; block < 16; ++block) {
        const int at = rank * args_.half + part * 128 + block * 8 + thread % 4 * 2;
        if (at >= end) continue;
#pragma unroll
        for (int down = 0; down < 2; ++down)
          *reinterpret_cast<float2*>(to + at + down * lower) =
              make_float2(y[part][block * 4 + down * 2], y[part][block * 4 + down * 2 + 1]);
      }
  }
  /// In the tile, of this thread's upper or lower row.
  __device__ __forceinline__ int row(int down) const {
    const int thread = place();
    return group_ * 64 + thread / 32 * 16 + thread % 32 / 4 + down * 8;
  }

  const WholeArgs<T>& args_;
  Shared& shared_;
  const int group_;
  const uint32_t slots_, x_;  // the lower words of descriptors
  gpu::RingPlace<kSlots> place_;
  const bool speaks_ = threadIdx.x % 32 == 0;
  uint32_t round_ = 0;  // parity of the tokens
  uint32_t hand_ = 0;   // of the next exchange
  int biased_ = 0;      // which biases come next
};

template <class T, Activation kKind, int kSlots, int kHands>
__global__ void __launch_bounds__(kWholeThreads, 1)
    whole_kernel(const __grid_constant__ gpu::TensorMap x, const __grid_constant__ gpu::TensorMap up,
                 const __grid_constant__ gpu::TensorMap down, const __grid_constant__ WholeArgs<T> args) {
  using Shared = WholeShared<kSlots, kHands>;
  static_assert(sizeof(Shared) <= 227 * 1024);
  extern __shared__ __align__(1024) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  const int group = gpu::uniform(int(threadIdx.x) / 128) - 1, rank = int(gpu::cluster_rank());
  if (threadIdx.x == 0) {
    shared.ring.init(1, 8);
    for (int depth = 0; depth < kWholeDepths; ++depth) {
      shared.x_full[depth].init(1);
      shared.x_empty[depth].init(8);
    }
    for (int i = 0; i < 2; ++i)
      for (int hand = 0; hand < kHands; ++hand) {
        shared.landed[i][hand].init(1);
        shared.may_send[i][hand].init(4);
      }
    gpu::fence_barrier_init();
    for (int i = 0; i < 2; ++i)
      for (int hand = 0; hand < kHands; ++hand) shared.landed[i][hand].arrive_expect(kHandBytes);
    gpu::prefetch_map(x);
    gpu::prefetch_map(up);
    gpu::prefetch_map(down);
  }
  gpu::cluster_sync();
  gpu::wait_for_earlier();
  gpu::let_later_start();

  if (group < 0) {
    gpu::give_registers<24>();
    if (threadIdx.x < 32) {
      if (gpu::elect_one()) bring_weights<T, Shared, kSlots>(up, down, args, shared, rank);
    } else if (threadIdx.x < 64) {
      if (gpu::elect_one()) bring_tokens<T>(x, args, shared);
    }
    __syncwarp();
  } else {
    gpu::take_registers<240>();
    WholeGroup<T, kKind, Shared, kSlots, kHands>(args, shared, group).run();
  }
  gpu::cluster_sync();  // no exchange may reach a block that has exited
}

/// The split tiles: their parts in the order of the hidden columns, bias, residual. A thread makes 8 columns.
template <class T>
__global__ void __launch_bounds__(256) add_parts_kernel(const WholeArgs<T> args) {
  gpu::wait_for_earlier();
  gpu::let_later_start();
  const int64_t eights = args.out / 8, index = int64_t(blockIdx.x) * 256 + threadIdx.x;
  const int64_t row = index / eights, of_y = row + int64_t(args.whole) * kWholeRows;
  const int column = int(index % eights) * 8;
  if (of_y >= args.rows) return;
  const int64_t tile = row / kWholeRows, at = row % kWholeRows * args.out + column;
  float sums[8] = {};
  for (int split = 0; split < args.splits; ++split) {
    const float* const from = args.parts + (tile * args.splits + split) * kWholeRows * args.out + at;
    const float4 low = *reinterpret_cast<const float4*>(from),
                 high = *reinterpret_cast<const float4*>(from + 4);
    const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] += values[i];
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (args.down_bias) sums[i] += float(args.down_bias[column + i]);
    if (args.residual) sums[i] += float(args.residual[of_y * args.residual_row + column + i]);
  }
  gpu::store_words(args.y + of_y * args.y_row + column, gpu::round_to_words<T>(sums));
}

/// Tiles that do not fill a round of the clusters are cut along the hidden columns, so that they do.
template <class T>
WholeArgs<T> whole_plan(int64_t rows, int64_t wide, int clusters) {
  WholeArgs<T> args{};
  args.rows = int(rows), args.wide = int(wide);
  args.chunks = int(gpu::ceil_div(wide, kWholeSpan));
  const int tiles = int(gpu::ceil_div(rows, kWholeRows)), rest = tiles % clusters;
  args.splits = rest == 0 ? 1 : std::min(clusters / rest, args.chunks);
  args.whole = args.splits > 1 ? tiles - rest : tiles;
  args.units = args.whole + (tiles - args.whole) * args.splits;
  return args;
}

}  // namespace

template <class T>
void fused_mlp_cuda(const Tensor& y, const Tensor& x, const Tensor& up, const Tensor& down,
                    const Tensor& up_bias, const Tensor& down_bias, const Tensor& residual, Activation kind) {
  const Device device = x.device();
  const int clusters = device.multiprocessors() / 2;
  WholeArgs<T> args = whole_plan<T>(x.size(0), up.size(0), clusters);
  const auto dense = [](const Tensor& bias) {
    return bias.defined() && bias.layout().stride(0) != 1 ? bias.clone() : bias.detach();
  };
  const Tensor bias_of_h = dense(up_bias), bias_of_y = dense(down_bias);
  if (bias_of_h.defined()) args.up_bias = bias_of_h.data<T>();
  if (bias_of_y.defined()) args.down_bias = bias_of_y.data<T>();
  if (residual.defined()) args.residual = residual.data<T>(), args.residual_row = residual.layout().stride(0);
  args.y = y.data<T>(), args.y_row = y.layout().stride(0);
  args.out = int(y.size(1)), args.depths = int(gpu::ceil_div(x.size(1), 64));
  args.half = std::min(256, (args.out / 8 + 1) / 2 * 8);
  const int cut = args.units - args.whole;
  Tensor parts;
  if (args.splits > 1) {
    parts = Tensor::empty_packed(Shape{cut, kWholeRows, args.out}, DType::f32, device);
    args.parts = parts.data<float>();
  }
  const auto map = [](const Tensor& a, int boxed) {
    return gpu::tensor_map<T, 2>(a.data<T>(), {a.size(1), a.size(0)}, {a.layout().stride(0)}, {64, boxed},
                                 gpu::Swizzle::k128);
  };
  dispatch_activation(kind, [&]<Activation kKind>() {
    gpu::launch(device,
                {.grid = dim3(unsigned(2 * std::min(clusters, args.units))),
                 .block = dim3(kWholeThreads),
                 .shared_bytes = sizeof(WholeShared<kWholeSlots, kWholeHands>),
                 .cluster = 2,
                 .overlaps = true},
                whole_kernel<T, kKind, kWholeSlots, kWholeHands>, map(x, kWholeRows), map(up, 64),
                map(down, 64), args);
  });
  if (parts.defined()) {
    const int64_t rows = x.size(0) - int64_t(args.whole) * kWholeRows;
    gpu::launch(device,
                {.grid = dim3(unsigned(gpu::ceil_div(rows * (args.out / 8), 256))),
                 .block = dim3(256),
                 .overlaps = true},
                add_parts_kernel<T>, args);
  }
}

}  // namespace tessera::ops

#include <algorithm>

#include "gpu/dependent_launch.cuh"
#include "gpu/divide.cuh"
#include "gpu/grid.cuh"
#include "gpu/row.cuh"
#include "ops/indices.h"
#include "ops/rope/rope_kernels.h"
#include "ops/rope/rope_rotate.cuh"

/// A thread takes one pack of 16 bytes from the first half of a head and its partner from the second, so that
/// both results are in its registers: x is read once and y written once. It does so for up to kHeads heads of
/// a token, whose loads are all in flight together and which share what it read of the table. The table (1
/// MiB for 2,048 positions of 128 elements) stays in L2. 3 multiply-adds an element against 4 bytes or more:
/// bound by memory. What is not rotated is copied by the packs that follow the pairs.
///
/// Heads whose half is not a whole number of packs, or that do not start on 16 bytes, go element by element
/// (one pair a thread): a correct path for odd shapes, four to eight times slower.

namespace tessera::ops {
namespace {

using gpu::ceil_div;
using gpu::kPackOf;
using gpu::Words;

constexpr int kBlock = 256, kHeads = 4;

template <class T>
struct Args {
  T* y;
  const T* x;
  const float* table;
  Indices positions;  // data null: offset + t
  int64_t y_stride[3], x_stride[3];
  int64_t count, tokens, heads;  // count: tokens of the whole batch
  int64_t half, rotary, rows, pitch, offset;
  int pairs, work, groups;  // of a head: packs of a half; and with those of the rest; of heads, a thread each
  int tokens_per_block;
  gpu::Divider by_token, by_work;  // work * groups and work
  float sign;
  bool each;  // positions [B, T]
};

__device__ __forceinline__ float not_a_number() {
  return __int_as_float(0x7FC00000);
}

/// Pack `piece` of the heads group, group + groups, ... of a token; kPack 1: one element and its partner.
template <class T, int kPack>
__device__ __forceinline__ void rotate_heads(const Args<T>& args, int64_t token, int group, int piece) {
  constexpr bool kWhole = kPack > 1;
  const int64_t b = token / args.tokens, t = token - b * args.tokens;
  const int64_t position = args.positions.data ? args.positions[args.each ? token : t] : args.offset + t;
  const bool valid = 0 <= position && position < args.rows, turns = piece < args.pairs;
  const int64_t begin = turns ? int64_t(piece) * kPack : args.rotary + int64_t(piece - args.pairs) * kPack;
  const T* const in = args.x + b * args.x_stride[0] + t * args.x_stride[1] + begin;
  T* const out = args.y + b * args.y_stride[0] + t * args.y_stride[1] + begin;
  const auto load = [](const T* from) {
    if constexpr (kWhole)
      return gpu::load_words(from);
    else
      return gpu::load_part(from, 1);
  };
  const auto store = [](T* to, const Words<T>& words) {
    if constexpr (kWhole)
      gpu::store_words(to, words);
    else
      gpu::store_part(to, words, 1);
  };
  constexpr int kLanes = kPackOf<T>;  // of Words
  Words<T> first[kHeads], second[kHeads];
#pragma unroll
  for (int n = 0; n < kHeads; ++n) {
    const int64_t h = group + int64_t(n) * args.groups;
    if (h >= args.heads) continue;
    first[n] = load(in + h * args.x_stride[2]);
    if (turns) second[n] = load(in + h * args.x_stride[2] + args.half);
  }
  alignas(16) float cosine[kLanes] = {}, sine[kLanes] = {};
  if (turns) {
    const float* const row = args.table + (valid ? position : 0) * args.pitch + begin;
    if constexpr (kWhole) {
#pragma unroll
      for (int k = 0; k < kLanes; k += 4) {
        *reinterpret_cast<float4*>(cosine + k) = *reinterpret_cast<const float4*>(row + k);
        *reinterpret_cast<float4*>(sine + k) = *reinterpret_cast<const float4*>(row + args.half + k);
      }
    } else {
      cosine[0] = row[0], sine[0] = row[args.half];
    }
  }
#pragma unroll
  for (int k = 0; k < kLanes; ++k) {
    if (!valid) cosine[k] = not_a_number();
    sine[k] = args.sign * sine[k];
  }
#pragma unroll
  for (int n = 0; n < kHeads; ++n) {
    const int64_t h = group + int64_t(n) * args.groups;
    if (h >= args.heads) continue;
    T* const to = out + h * args.y_stride[2];
    float a[kLanes], b[kLanes];
    gpu::unpack(a, first[n]);
    if (turns) {
      gpu::unpack(b, second[n]);
#pragma unroll
      for (int k = 0; k < kLanes; ++k) rotate_pair(a[k], b[k], cosine[k], sine[k]);
      store(to + args.half, gpu::round_to_words<T>(b));
    } else if (!valid) {
#pragma unroll
      for (int k = 0; k < kLanes; ++k) a[k] = not_a_number();
    }
    store(to, gpu::round_to_words<T>(a));
  }
}

template <class T, int kPack>
__global__ void __launch_bounds__(kBlock) rotate(Args<T> args) {
  gpu::wait_and_launch_dependents();
  const uint32_t all = uint32_t(args.tokens_per_block) * args.by_token.divisor;
  for (uint32_t at = threadIdx.x; at < all; at += kBlock) {
    const uint32_t local = args.by_token.divide(at), rest = at - local * args.by_token.divisor;
    const uint32_t group = args.by_work.divide(rest), piece = rest - group * args.by_work.divisor;
    const int64_t token = blockIdx.x * int64_t(args.tokens_per_block) + local;
    if (token < args.count) rotate_heads<T, kPack>(args, token, int(group), int(piece));
  }
}

}  // namespace

void rope_cuda(const RopeProblem& rope) {
  dispatch_floating_cuda(rope.x.dtype(), "rope", [&]<class T>() {
    if (rope.x.count() == 0) return;
    const Device device = rope.x.device();
    const int64_t rotary = rope.table.size(1), half = rotary / 2;
    const bool whole = heads_in_packs<T>(rope.x, half, rotary) && heads_in_packs<T>(rope.y, half, rotary) &&
                       gpu::is_pack_aligned(rope.table.data<float>(), rope.table.row_stride(), 4);
    const int64_t pack = whole ? kPackOf<T> : 1;
    const int64_t pairs = half / pack, work = pairs + (rope.x.size(3) - rotary) / pack,
                  groups = ceil_div(rope.x.size(2), kHeads), per_token = groups * work;
    check(per_token < (int64_t(1) << 30), "rope: x ", describe(rope.x),
          " has more than 2^30 elements per token");
    Args<T> args{.y = rope.y.data<T>(),
                 .x = rope.x.data<T>(),
                 .table = rope.table.data<float>(),
                 .positions = Indices(rope.positions.defined() ? rope.positions : rope.table),
                 .count = rope.x.size(0) * rope.x.size(1),
                 .tokens = rope.x.size(1),
                 .heads = rope.x.size(2),
                 .half = half,
                 .rotary = rotary,
                 .rows = rope.table.size(0),
                 .pitch = rope.table.row_stride(),
                 .offset = rope.offset,
                 .pairs = int(pairs),
                 .work = int(work),
                 .groups = int(groups),
                 .tokens_per_block = int(std::max<int64_t>(1, kBlock / per_token)),
                 .by_token = gpu::Divider(uint32_t(per_token)),
                 .by_work = gpu::Divider(uint32_t(work)),
                 .sign = rope.inverse ? -1.0f : 1.0f,
                 .each = rope.positions.defined() && rope.positions.rank() == 2};
    if (!rope.positions.defined()) args.positions.data = nullptr;
    for (int dim = 0; dim < 3; ++dim) {
      args.x_stride[dim] = rope.x.layout().stride(dim);
      args.y_stride[dim] = rope.y.layout().stride(dim);
    }
    const gpu::LaunchShape shape{gpu::grid_of(ceil_div(args.count, args.tokens_per_block)), kBlock};
    if (whole)
      gpu::launch_dependent(device, shape, rotate<T, kPackOf<T>>, args);
    else
      gpu::launch_dependent(device, shape, rotate<T, 1>, args);
  });
}

}  // namespace tessera::ops

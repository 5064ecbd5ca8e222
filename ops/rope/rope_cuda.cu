#include <algorithm>

#include "gpu/row.cuh"
#include "ops/indices.h"
#include "ops/rope/rope_kernels.h"
#include "ops/rope/rope_turn.cuh"

/// A thread takes one pack of 16 bytes from the first half of a head and its partner from the second, so that
/// both results are in its registers: x is read once and y written once. A row of the table serves all heads
/// of a token and stays in L1; the whole table (1 MiB for 2,048 positions of 128 elements) stays in L2. 3
/// multiply-adds per element against 4 bytes or more: bound by memory. What is not rotated is copied by the
/// packs that follow the pairs.
///
/// Heads whose half is not a whole number of packs, or that do not start on 16 bytes, go element by element
/// (one pair a thread): a correct path for odd shapes, four to eight times slower.

namespace tessera::ops {
namespace {

using gpu::ceil_div;
using gpu::kPackOf;
using gpu::load_row;
using gpu::store_row;

constexpr int kBlock = 256;

template <class T>
struct Args {
  T* y;
  const T* x;
  const float* table;
  Indices positions;  // data null: offset + t
  int64_t y_stride[3], x_stride[3];
  int64_t tokens, heads, width, half, rotary, rows, pitch, offset;
  int64_t pairs, work, count;  // of a head: packs of a half; and with those of the rest; of all heads
  float sign;
  bool each;  // positions [B, T]
};

template <class T, int kPack>
__global__ void __launch_bounds__(kBlock) rotate(Args<T> args) {
  for (int64_t at = blockIdx.x * int64_t(kBlock) + threadIdx.x; at < args.count;
       at += int64_t(gridDim.x) * kBlock) {
    const int64_t head = at / args.work, piece = at - head * args.work;
    const int64_t token = head / args.heads, h = head - token * args.heads;
    const int64_t b = token / args.tokens, t = token - b * args.tokens;
    const T* const in = args.x + b * args.x_stride[0] + t * args.x_stride[1] + h * args.x_stride[2];
    T* const out = args.y + b * args.y_stride[0] + t * args.y_stride[1] + h * args.y_stride[2];
    const int64_t position = args.positions.data ? args.positions[args.each ? token : t] : args.offset + t;
    const bool valid = 0 <= position && position < args.rows;
    constexpr bool kWhole = kPack > 1;
    float first[kPack], second[kPack];
    if (piece >= args.pairs) {
      const int64_t begin = args.rotary + (piece - args.pairs) * kPack;
      load_row(first, in, begin, args.width, kWhole, 0.0f);
#pragma unroll
      for (int k = 0; k < kPack; ++k) first[k] = valid ? first[k] : __int_as_float(0x7FC00000);
      store_row(out, begin, args.width, kWhole, first);
      continue;
    }
    const int64_t begin = piece * kPack;
    load_row(first, in, begin, args.half, kWhole, 0.0f);
    load_row(second, in + args.half, begin, args.half, kWhole, 0.0f);
    const float* const row = args.table + (valid ? position : 0) * args.pitch + begin;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const float cosine = valid ? row[k] : __int_as_float(0x7FC00000);
      const float sine = args.sign * row[args.half + k];
      turn(first[k], second[k], cosine, sine);
    }
    store_row(out, begin, args.half, kWhole, first);
    store_row(out + args.half, begin, args.half, kWhole, second);
  }
}

}  // namespace

void rope_cuda(const RopeProblem& rope) {
  dispatch_floating_cuda(rope.x.dtype(), "rope", [&]<class T>() {
    if (rope.x.count() == 0) return;
    const Device device = rope.x.device();
    const int64_t rotary = rope.table.size(1), half = rotary / 2;
    const bool whole = heads_in_packs<T>(rope.x, half, rotary) && heads_in_packs<T>(rope.y, half, rotary);
    const int64_t pack = whole ? kPackOf<T> : 1;
    Args<T> args{.y = rope.y.data<T>(),
                 .x = rope.x.data<T>(),
                 .table = rope.table.data<float>(),
                 .positions = Indices(rope.positions.defined() ? rope.positions : rope.table),
                 .tokens = rope.x.size(1),
                 .heads = rope.x.size(2),
                 .width = rope.x.size(3),
                 .half = half,
                 .rotary = rotary,
                 .rows = rope.table.size(0),
                 .pitch = rope.table.row_stride(),
                 .offset = rope.offset,
                 .pairs = half / pack,
                 .work = half / pack + (rope.x.size(3) - rotary) / pack,
                 .sign = rope.inverse ? -1.0f : 1.0f,
                 .each = rope.positions.defined() && rope.positions.rank() == 2};
    if (!rope.positions.defined()) args.positions.data = nullptr;
    for (int dim = 0; dim < 3; ++dim) {
      args.x_stride[dim] = rope.x.layout().stride(dim);
      args.y_stride[dim] = rope.y.layout().stride(dim);
    }
    args.count = rope.x.size(0) * args.tokens * args.heads * args.work;
    const int64_t blocks =
        std::min<int64_t>(ceil_div(args.count, kBlock), int64_t(device.card().multiprocessors) * 32);
    const dim3 grid{unsigned(blocks)};
    if (whole)
      gpu::launch(device, {grid, kBlock}, rotate<T, kPackOf<T>>, args);
    else
      gpu::launch(device, {grid, kBlock}, rotate<T, 1>, args);
  });
}

}  // namespace tessera::ops

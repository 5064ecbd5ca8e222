#include <algorithm>

#include "gpu/elementwise.cuh"
#include "ops/dropout/dropout_mask.cuh"

/// One read and one write an element, and its part of a Philox block (ops/dropout/dropout_mask.cuh): bound by
/// memory, and in 16 bits by both where x is in L2.
///
/// A thread makes one pack of 16 bytes. Dense tensors are one row: no divisions, and a pack has Philox blocks
/// of its own. Elsewhere a pack starts where a row does, a Philox block where four elements of the row-major
/// order do: two packs may share one. So a block draws the numbers of its tile of packs, neighbours in that
/// order, together, and each pack takes its bits from shared memory.

namespace tessera::ops {
namespace {

constexpr int kThreads = 256;

struct Rows {
  StridedLoop<2> loop;  // y, x
  int64_t packs, packs_per_row;
  gpu::Divider by_packs_per_row;
  bool small;    // packs are few enough for it
  bool aligned;  // rows begin on packs
};

/// A pack: its row and first column, and its row-major index.
struct Place {
  int64_t row, first, index;
  __device__ __forceinline__ explicit Place(int64_t first)
      : row(0), first(first), index(first) {}  // of one row
  __device__ __forceinline__ Place(const Rows& rows, int64_t pack, int per_pack) {
    row = rows.small ? int64_t(rows.by_packs_per_row.divide(uint32_t(pack))) : pack / rows.packs_per_row;
    first = (pack - row * rows.packs_per_row) * per_pack;
    index = row * rows.loop.sizes[rows.loop.rank - 1] + first;
  }
};

template <class T, bool kDense>
__global__ void __launch_bounds__(kThreads)
    dropout_kernel(const __grid_constant__ Rows rows, T* y, const T* x, const DropoutDraw draw) {
  gpu::wait_and_launch_dependents();
  constexpr int kPack = gpu::kPackOf<T>;
  __shared__ uint8_t
      drawn[2][kDense ? 1 : kThreads * kPack / 8 + 2];  // bit k of all: element k of the tile lives
  const uint64_t offset = draw.offset();
  const float scale = draw.scale;
  const StridedLoop<2>& loop = rows.loop;
  const int inner = loop.rank - 1;
  const int64_t width = loop.sizes[inner], y_stride = loop.strides[0][inner],
                x_stride = loop.strides[1][inner];
  int buffer = 0;
  for (int64_t tile = int64_t(blockIdx.x) * kThreads; tile < rows.packs;
       tile += int64_t(gridDim.x) * kThreads) {
    const int64_t pack = tile + threadIdx.x;
    const Place own = kDense ? Place(pack * kPack) : Place(rows, pack, kPack);
    const int valid = pack < rows.packs ? int(min(width - own.first, int64_t(kPack))) : 0;
    int64_t row = own.row, at = own.first * y_stride, from = own.first * x_stride;
    if (!kDense) {
      for (int dim = inner - 1; dim > 0; --dim) {
        const int64_t outer = row / loop.sizes[dim], index = row - outer * loop.sizes[dim];
        row = outer;
        at += index * loop.strides[0][dim], from += index * loop.strides[1][dim];
      }
      at += row * loop.strides[0][0], from += row * loop.strides[1][0];
    }
    gpu::PackedWords<T, kPack> words;
    T values[kPack];
    if (rows.aligned) {  // on its way while the numbers are drawn
      words = gpu::load_partial_pack<kPack>(x + from, valid);
    } else {
#pragma unroll
      for (int k = 0; k < kPack; ++k)
        if (k < valid) values[k] = x[from + k * x_stride];
    }

    uint32_t keep = 0;  // bit k: element k lives
    if constexpr (kDense) {
      if (valid > 0) keep = draw.keep_bits<kPack, true>(offset, own.index);
    } else {
      const int64_t next = min(tile + kThreads, rows.packs);
      const int64_t block = Place(rows, tile, kPack).index / 4;
      const int bytes = int((Place(rows, next, kPack).index - 4 * block + 7) / 8);
      for (int i = int(threadIdx.x); i < bytes; i += kThreads)
        drawn[buffer][i] = uint8_t(draw.four(offset, uint64_t(block + 2 * i)) |
                                   draw.four(offset, uint64_t(block + 2 * i + 1)) << 4);
      __syncthreads();
      if (valid > 0) {
        const int bit = int(own.index - 4 * block);
        keep = (drawn[buffer][bit / 8] | uint32_t(drawn[buffer][bit / 8 + 1]) << 8) >> bit % 8;
      }
      buffer ^= 1;  // the next tile's writes are a barrier after these reads
    }
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const T value = rows.aligned ? words[k] : values[k];
      values[k] = T(float(value) * (keep >> k & 1u ? scale : 0.0f));
    }
    const auto results = gpu::packed<kPack>(values);
    if (rows.aligned && valid == kPack) {
      gpu::store_whole(y + at, results);
    } else {
#pragma unroll
      for (int k = 0; k < kPack; ++k)
        if (k < valid) y[at + k * y_stride] = results[k];
    }
  }
}

}  // namespace

void dropout_cuda(const Tensor& y, const Tensor& x, const DropoutMask& mask) {
  Rows rows{.loop = make_loop(y.shape(), y, x)};
  const auto& loop = rows.loop;
  if (loop.count == 0) return;
  const Device device = y.device();
  dispatch_floating_cuda(x.dtype(), "dropout", [&]<class T>() {
    constexpr int kPack = gpu::kPackOf<T>;
    T* const out = y.data<T>();
    const T* const in = x.data<T>();
    const int inner = loop.rank - 1;
    rows.aligned = gpu::is_pack_aligned(out, 0, kPack) && gpu::is_pack_aligned(in, 0, kPack);
    for (int n = 0; n < 2; ++n) {
      rows.aligned = rows.aligned && loop.strides[n][inner] == 1;
      for (int dim = 0; dim < inner; ++dim) rows.aligned = rows.aligned && loop.strides[n][dim] % kPack == 0;
    }
    rows.packs_per_row = gpu::ceil_div(loop.sizes[inner], kPack);
    rows.packs = loop.count / loop.sizes[inner] * rows.packs_per_row;
    rows.small = rows.packs < (int64_t(1) << 31) - kThreads;
    if (rows.small) rows.by_packs_per_row = gpu::Divider(uint32_t(rows.packs_per_row));
    const int64_t blocks =
        std::min<int64_t>(gpu::ceil_div(rows.packs, kThreads), int64_t(device.multiprocessors()) * 32);
    gpu::launch_dependent(device, {dim3(unsigned(blocks)), kThreads},
                          loop.rank == 1 ? dropout_kernel<T, true> : dropout_kernel<T, false>, rows, out, in,
                          DropoutDraw(mask));
  });
}

}  // namespace tessera::ops

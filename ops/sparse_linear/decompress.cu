#include "ops/select/radix_search.cuh"
#include "ops/sparse_linear/gated.cuh"

/// What variant "gemm" needs: compressed rows as dense ones, x under a gate, and the bits of a gate that
/// keeps the k largest.
///
/// decompress: a block has one group, of sell_delta4 a slice of one. Its elements are put into a tile of
/// zeros in shared memory, which is then written by rows, 16 bytes at a time. Bound by memory: the compressed
/// bytes read once, the dense ones written once, for the GEMM to read (sparse_linear.cpp).

namespace tessera::ops {
namespace {

using namespace sparse;

template <class T>
struct DecompressArgs {
  T* to;
  const T* values;
  const uint32_t *bitmaps, *gaps;
  const int32_t *offsets, *info;
  int64_t stride;
  int rows, in, group_columns, first_group_row;
};

template <int kRows>
using Tile = uint16_t[kRows][64 + 8];

/// Writes a tile whose element (0, 0) is (row, column) of the result.
template <class T, int kRows>
__device__ __forceinline__ void write_tile(const Tile<kRows>& tile, const DecompressArgs<T>& args, int row,
                                           int column) {
  for (int i = int(threadIdx.x); i < kRows * 8; i += int(blockDim.x)) {
    const int r = i / 8, c = i % 8 * 8, left = args.in - (column + c);
    if (row + r >= args.rows || left <= 0) continue;
    const auto words = *reinterpret_cast<const gpu::Words<T>*>(&tile[r][c]);
    T* const to = args.to + (row + r) * args.stride + column + c;
    if (left >= 8 && args.stride % 8 == 0)
      gpu::store_words(to, words);
    else
      gpu::store_part(to, words, left);
  }
}

/// 128 threads: a warp per median.
template <class T>
__global__ void __launch_bounds__(128) decompress_tca_bme(const DecompressArgs<T> args) {
  __shared__ alignas(16) Tile<64> tile;
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const int group_row = int(blockIdx.x) / args.group_columns,
            group_column = int(blockIdx.x) % args.group_columns;
  const int64_t group = int64_t(args.first_group_row + group_row) * args.group_columns + group_column;
  const T* next = args.values + args.offsets[group] + args.info[group * 4 + warp];
  const uint32_t* const halves = args.bitmaps + group * 128 + warp * 32;
  for (int b = 0; b < 16; ++b) {
    const uint32_t low = halves[2 * b], high = halves[2 * b + 1], mine = lane < 16 ? low : high;
    const int bit = lane % 16 * 2;
    const int at = (lane < 16 ? 0 : __popc(low)) + __popc(mine & ((1u << bit) - 1));
    const uint32_t pair = mine >> bit & 3;
    const int row = warp * 16 + b % 2 * 8 + lane / 4, column = b / 4 * 16 + b / 2 % 2 * 8 + lane % 4 * 2;
    tile[row][column] = pair & 1 ? next[at].bits : uint16_t(0);
    tile[row][column + 1] = pair & 2 ? next[at + int(pair & 1)].bits : uint16_t(0);
    next += __popc(low) + __popc(high);
  }
  __syncthreads();
  write_tile<T, 64>(tile, args, group_row * 64, group_column * 64);
}

/// 256 threads: a warp per column in turn, a lane per 8 rows.
template <class T>
__global__ void __launch_bounds__(256) decompress_tiled_cbc(const DecompressArgs<T> args) {
  __shared__ alignas(16) Tile<256> tile;
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const int group_row = int(blockIdx.x) / args.group_columns,
            group_column = int(blockIdx.x) % args.group_columns;
  const int64_t group = int64_t(args.first_group_row + group_row) * args.group_columns + group_column;
  for (int c = warp; c < 64; c += 8) {
    const int64_t column = group * 64 + c;
    const uint32_t word = args.bitmaps[column * 8 + lane / 4], own = uint32_t(__popc(word));
    uint32_t before = own;
#pragma unroll
    for (int step = 4; step < kWarp; step *= 2) {
      const uint32_t other = __shfl_up_sync(0xFFFFFFFFu, before, step);
      if (lane >= step) before += other;
    }
    const T* next = args.values + args.offsets[group] +
                    (uint32_t(args.info[column]) >> tiled_cbc::kCountBits) + (before - own) +
                    __popc(word & ((1u << (lane % 4 * 8)) - 1));
    const uint32_t byte = word >> (lane % 4 * 8) & 0xFF;
#pragma unroll
    for (int i = 0; i < 8; ++i) tile[lane * 8 + i][c] = byte >> i & 1 ? (*next++).bits : uint16_t(0);
  }
  __syncthreads();
  write_tile<T, 256>(tile, args, group_row * 256, group_column * 64);
}

/// Writes a row of a tile by a warp, 16 bytes per lane at a time; `stride`: of the result's rows.
template <class T>
__device__ __forceinline__ void write_row(T* to, const uint16_t* row, int columns, int64_t stride) {
  for (int c = int(threadIdx.x) % kWarp * 8; c < columns; c += kWarp * 8) {
    const auto words = *reinterpret_cast<const gpu::Words<T>*>(row + c);
    if (columns - c >= 8 && stride % 8 == 0)
      gpu::store_words(to + c, words);
    else
      gpu::store_part(to + c, words, columns - c);
  }
}

constexpr int kSellWarps = 8;

/// Columns that the 8 entries of a word of distances cover: the sum of the distances, and one for each.
__device__ __forceinline__ int columns_of(uint32_t distances) {
  const uint32_t odd = distances >> 4 & 0x0F0F0F0Fu, even = distances & 0x0F0F0F0Fu;
  return int(__dp4a(even + odd, 0x01010101u, uint32_t(sell_delta4::kEntries)));
}

/// A block has one slice of one part of the columns: a tile of 32 rows, zeros first, in dynamic shared
/// memory. A lane has a row, a warp an equal share of the slice's chunks. Where a share begins is known from
/// the distances of those before it, which the first pass adds up; the second one puts the elements into the
/// tile. All lanes of a warp are at the same chunk, so that loads of later chunks are in flight while one is
/// used.
template <class T>
__global__ void __launch_bounds__(kSellWarps* kWarp)
    decompress_sell(const DecompressArgs<T> args, int width, int pitch) {
  using namespace sell_delta4;
  extern __shared__ uint4 shared[];
  uint16_t* const tile = reinterpret_cast<uint16_t*>(shared);  // (kSliceRows, pitch)
  __shared__ int covered[kSellWarps][kWarp];
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const int slice = int(blockIdx.x) % int(kSlices), grouped = int(blockIdx.x) / int(kSlices);
  const int group_row = grouped / args.group_columns, group_column = grouped % args.group_columns;
  const int64_t group = int64_t(args.first_group_row + group_row) * args.group_columns + group_column,
                first_chunk = args.offsets[group * kSlices + slice];
  const int chunks = int(args.offsets[group * kSlices + slice + 1] - first_chunk);
  const int begin = int(int64_t(chunks) * warp / kSellWarps),
            end = int(int64_t(chunks) * (warp + 1) / kSellWarps);
  const uint32_t* const gaps = args.gaps + first_chunk * kSliceRows + lane;
  const auto* const values =
      reinterpret_cast<const uint4*>(args.values + first_chunk * kChunk) + lane;  // 8 values of 16 bits
  // Columns of this warp's share.
  int sum = 0;
#pragma unroll 8
  for (int chunk = begin; chunk < end; ++chunk) sum += columns_of(gaps[int64_t(chunk) * kSliceRows]);
  covered[warp][lane] = sum;
  for (int i = int(threadIdx.x); i < int(kSliceRows) * pitch / 8; i += kSellWarps * kWarp) shared[i] = {};
  __syncthreads();
  int at = -1;
  for (int before = 0; before < warp; ++before) at += covered[before][lane];
  uint16_t* const row = tile + lane * pitch;
#pragma unroll 4
  for (int chunk = begin; chunk < end; ++chunk) {
    const uint32_t distances = gaps[int64_t(chunk) * kSliceRows];
    const uint4 pack = values[int64_t(chunk) * kSliceRows];
    const uint32_t pairs[4] = {pack.x, pack.y, pack.z, pack.w};
#pragma unroll
    for (int entry = 0; entry < int(kEntries); ++entry) {
      at += 1 + int(distances >> entry * 4 & 15);
      const uint16_t bits = uint16_t(pairs[entry / 2] >> entry % 2 * 16);
      if (bits != 0 && at < width) row[at] = bits;  // what fills rows up is 0, and may lie past the end
    }
  }
  __syncthreads();
  // Rows of the tile are the slice's, in order of their length: each goes to its own place.
  const int first = group_column * width, columns = min(width, args.in - first);
  for (int slot = warp; slot < int(kSliceRows); slot += kSellWarps) {
    const int64_t word =
        int64_t(args.first_group_row + group_row) * (kGroupRows / 4) + slice * (kSliceRows / 4) + slot / 4;
    const int to_row = group_row * int(kGroupRows) + int(uint32_t(args.info[word]) >> slot % 4 * 8 & 0xFF);
    if (to_row >= args.rows) continue;
    write_row(args.to + to_row * args.stride + first, tile + slot * pitch, columns, args.stride);
  }
}

constexpr int kMmaPitch = int(mma_delta4::kMostTiles * mma_delta4::kTileColumns) + 8;
constexpr size_t kMmaShared = size_t(mma_delta4::kGroupRows) / 4 * kMmaPitch * 2;

constexpr int kMmaThreads = 256;

/// A block has four strips of a group of mma_delta4, each in two warps: its 16 rows, zeros first, in dynamic
/// shared memory, and a stream for each warp.
template <class T>
__global__ void __launch_bounds__(kMmaThreads) decompress_mma(const DecompressArgs<T> args) {
  using namespace mma_delta4;
  extern __shared__ uint4 shared[];
  __shared__ uint8_t rows[kGroupRows];
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const int grouped = int(blockIdx.x) / 4, own = warp / 2, stream = warp % 2,
            strip = int(blockIdx.x) % 4 * 4 + own;
  const int group_row = grouped / args.group_columns, part = grouped % args.group_columns;
  const int64_t group = int64_t(args.first_group_row + group_row) * args.group_columns + part;
  const auto* const places = reinterpret_cast<const uint8_t*>(args.info) + group * kGroupRows;
  static_assert(kGroupRows == kMmaThreads);
  rows[places[threadIdx.x]] = uint8_t(threadIdx.x);
  for (int i = int(threadIdx.x); i < int(kMmaShared / 16); i += kMmaThreads) shared[i] = {};
  __syncthreads();
  uint16_t* const tile = reinterpret_cast<uint16_t*>(shared) + own * int(kStripRows) * kMmaPitch;
  const int first = int(first_tile(args.in, part)), tiles = int(first_tile(args.in, part + 1)) - first;
  const int64_t index = group * (kStrips * kStreams) + strip * 2 + stream;
  const int begin = args.offsets[index], end = args.offsets[index + 1];
  const auto* const values = reinterpret_cast<const uint4*>(args.values) + lane;
  uint16_t* const row = tile + lane / 4 * kMmaPitch + stream * tiles * 8 + lane % 4 * 2;
  int at = -1;
#pragma unroll 4
  for (int chunk = begin; chunk < end; ++chunk) {
    const uint32_t distances = args.gaps[int64_t(chunk) * kLanes + lane];
    const uint4 pack = values[int64_t(chunk) * kLanes];
    const uint32_t pairs[4] = {pack.x, pack.y, pack.z, pack.w};
#pragma unroll
    for (int entry = 0; entry < int(kEntries); ++entry) {
      at += 1 + int(distances >> entry * 4 & 15);
      const uint16_t bits = uint16_t(pairs[entry / 2] >> entry % 2 * 16);
      // What fills streams up is 0, and may lie where the other warp writes.
      if (bits != 0) row[(at & 2) * 4 * kMmaPitch + at / 4 * 8 + at % 2] = bits;
    }
  }
  __syncthreads();
  const int columns = min(tiles * int(kTileColumns), args.in - first * int(kTileColumns));
  for (int r = stream; r < int(kStripRows); r += 2) {
    const int to_row = group_row * int(kGroupRows) + rows[strip * int(kStripRows) + r];
    if (to_row >= args.rows) continue;
    write_row(args.to + to_row * args.stride + first * int(kTileColumns), tile + r * kMmaPitch, columns,
              args.stride);
  }
}

// ---- gates ----

template <class T>
__global__ void gate_rows(T* y, const T* x, int64_t y_stride, int64_t x_stride, int64_t x_step,
                          DeviceGate gate, int in) {
  const int j = int(blockIdx.x) * int(blockDim.x) + int(threadIdx.x), token = int(blockIdx.y);
  if (j >= in) return;
  const T value = x[token * x_stride + j * x_step];
  y[token * y_stride + j] = gate.counts(token, j, float(value)) ? value : T(0.0f);
}

constexpr int kBitThreads = 512;

/// A block per token: the search for the k-th largest (radix_search.cuh), then the inputs above it and, in
/// index order, the first of those at it.
template <class T>
__global__ void __launch_bounds__(kBitThreads)
    gate_bits(uint32_t* bits, const T* x, int64_t x_stride, int64_t x_step, const float* scales, int in,
              int keep) {
  __shared__ RadixBins<false> bins;
  __shared__ RadixSearch found;
  const int words = (in + 31) / 32;
  bits += int64_t(blockIdx.x) * words;
  x += int64_t(blockIdx.x) * x_stride;
  const auto rank_of = [&](int j) {
    return gate_rank(gate_value(float(x[j * x_step]), scales ? scales[j] : 1.0f));
  };
  if (threadIdx.x == 0) found = {};
  __syncthreads();
  for (int pass = 0; keep > 0 && pass < kRadixPasses; ++pass) {
    const RadixSearch before = found;
    count_digits<false, false, kBitThreads>(bins, pass, before.bar, 0, uint32_t(in),
                                            [&](uint32_t(&values)[kRadixGroup], uint32_t first) {
#pragma unroll
                                              for (int i = 0; i < kRadixGroup; ++i)
                                                values[i] = int(first) + i < in ? rank_of(int(first) + i) : 0;
                                            });
    find_digit<false, kBitThreads>(found, bins, before, pass, uint32_t(keep));
  }
  const uint32_t bar = found.bar;
  const uint32_t picks = uint32_t(keep) - found.above;  // of those at the bar
  RowTerm base{};
  for (int first = 0; first < words * 32; first += kBitThreads) {
    const int j = first + int(threadIdx.x);
    const uint32_t rank = j < in ? rank_of(j) : 0;
    const bool at_bar = keep > 0 && j < in && rank == bar;
    RowTerm before = base;
    const RowTerm all = block_scan<kBitThreads>(RowTerm{uint32_t(at_bar), 0}, before);
    base.chosen += all.chosen;
    const bool counts = keep > 0 && j < in && (rank > bar || (at_bar && before.chosen < picks));
    const unsigned vote = __ballot_sync(0xFFFFFFFFu, counts);
    if (threadIdx.x % kWarp == 0 && j < words * 32) bits[j / 32] = vote;
  }
}

}  // namespace

void decompress_cuda(const Tensor& dense, const SparseWeight& weight, int64_t first) {
  dispatch_floating_cuda(dense.dtype(), "sparse_linear", [&]<class T>() {
    if constexpr (sizeof(T) == 2) {
      const bool is_bme = weight.format == SparseFormat::tca_bme,
                 is_sell = weight.format == SparseFormat::sell_delta4;
      const auto words = [](const Tensor& array) {
        return array.defined() ? static_cast<const uint32_t*>(array.raw()) : nullptr;
      };
      const int64_t height = is_bme ? tca_bme::kGroupRows : tiled_cbc::kGroupRows;
      const DecompressArgs<T> args{.to = dense.data<T>(),
                                   .values = weight.values.template data<T>(),
                                   .bitmaps = words(weight.bitmaps),
                                   .gaps = words(weight.gaps),
                                   .offsets = weight.offsets.template data<int32_t>(),
                                   .info = weight.info.template data<int32_t>(),
                                   .stride = dense.layout().stride(0),
                                   .rows = int(dense.size(0)),
                                   .in = int(weight.in),
                                   .group_columns = int(weight.group_columns()),
                                   .first_group_row = int(first / height)};
      const unsigned groups = unsigned(gpu::ceil_div(dense.size(0), height) * args.group_columns);
      const gpu::LaunchShape shape{.grid = groups, .block = unsigned(is_bme ? 128 : 256)};
      if (is_sell) {
        using namespace sell_delta4;
        const int width = int(width_of(weight.in)), pitch = width + 8;  // 8: rows begin in different banks
        gpu::launch(dense.device(),
                    {.grid = groups * unsigned(kSlices),
                     .block = kSellWarps * kWarp,
                     .shared_bytes = size_t(kSliceRows * pitch) * sizeof(T)},
                    decompress_sell<T>, args, width, pitch);
      } else if (weight.format == SparseFormat::mma_delta4)
        gpu::launch(dense.device(), {.grid = groups * 4, .block = kMmaThreads, .shared_bytes = kMmaShared},
                    decompress_mma<T>, args);
      else if (is_bme)
        gpu::launch(dense.device(), shape, decompress_tca_bme<T>, args);
      else
        gpu::launch(dense.device(), shape, decompress_tiled_cbc<T>, args);
    }
  });
}

void apply_gate_cuda(const Tensor& y, const Tensor& x, const Gate& gate) {
  dispatch_floating_cuda(x.dtype(), "apply_gate", [&]<class T>() {
    Tensor bits;
    const DeviceGate on_device = device_gate(gate, x, bits);
    // Tokens are the grid's second dimension, of 65,535 blocks at most.
    for (int64_t first = 0; first < x.size(0); first += 65535) {
      DeviceGate rows = on_device;
      if (rows.bits) rows.bits += first * rows.words;
      gpu::launch(x.device(),
                  {.grid = dim3(unsigned(gpu::ceil_div(x.size(1), 256)),
                                unsigned(std::min<int64_t>(65535, x.size(0) - first))),
                   .block = 256},
                  gate_rows<T>, y.data<T>() + first * y.layout().stride(0),
                  x.data<T>() + first * x.layout().stride(0), y.layout().stride(0), x.layout().stride(0),
                  x.layout().stride(1), rows, int(x.size(1)));
    }
  });
}

Tensor gate_bits_cuda(const Tensor& x, const Gate& gate) {
  const int64_t words = gpu::ceil_div(x.size(1), 32);
  const Tensor bits = Tensor::empty_packed({x.size(0), words}, DType::i32, x.device());
  dispatch_floating_cuda(x.dtype(), "gate", [&]<class T>() {
    gpu::launch(x.device(), {.grid = dim3(unsigned(x.size(0))), .block = kBitThreads}, gate_bits<T>,
                reinterpret_cast<uint32_t*>(bits.data<int32_t>()), x.data<T>(), x.layout().stride(0),
                x.layout().stride(1), gate.scales.defined() ? gate.scales.data<float>() : nullptr,
                int(x.size(1)), int(gate.keep));
  });
  return bits;
}

}  // namespace tessera::ops

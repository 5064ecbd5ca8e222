#pragma once

#include <tuple>
#include <utility>

#include "gpu/divide.cuh"
#include "gpu/launch.cuh"
#include "gpu/pack.cuh"
#include "tensor/elementwise.h"

/// y = f(x...) over strided operands: the kernel behind every element-by-element operator.
///
/// Each thread makes kPack neighbouring elements of one row (16 bytes of the output's type), read and written
/// as words where every operand's rows are aligned for it, one by one at ragged ends and in other layouts.
/// Bound by memory; divisions by the sizes are multiplications as long as all numbers fit into 31 bits.

namespace tessera::gpu {

template <class Out, class... In>
struct ElementwiseArgs {
  StridedLoop<1 + int(sizeof...(In))> loop;
  Out* out;
  std::tuple<const In*...> in;
  int64_t packs, packs_per_row;
  bool aligned;  // every operand: innermost stride 1 (inputs also 0), base and outer strides multiples of a
                 // pack
  bool small;    // fewer than 2^31 packs: the dividers serve
  Divider by_packs_per_row, by_size[kMaxRank];
};

/// Splits a row number into indices of the outer dimensions, innermost first; what is left is the outermost
/// index.
template <class Row, class Divide, class Visit>
__device__ __forceinline__ void split_row(Row row, int inner, Divide divide, Visit visit) {
  for (int dim = inner - 1; dim > 0; --dim) {
    Row index;
    row = divide(row, dim, index);
    visit(dim, int64_t(index));
  }
  if (inner > 0) visit(0, int64_t(row));
}

template <int kPack, class F, class Out, class... In, size_t... K>
__device__ __forceinline__ void elementwise_pack(const ElementwiseArgs<Out, In...>& args, F f, int64_t pack,
                                                 std::index_sequence<K...>) {
  constexpr int N = 1 + int(sizeof...(In));
  const auto& loop = args.loop;
  const int inner = loop.rank - 1;
  int64_t offset[N] = {};
  int64_t first;
  const auto add_offset = [&](int dim, int64_t index) {
    for (int n = 0; n < N; ++n) offset[n] += index * loop.strides[n][dim];
  };
  if (args.small) {
    const uint32_t row = args.by_packs_per_row.divide(uint32_t(pack));
    first = int64_t(uint32_t(pack) - row * uint32_t(args.packs_per_row)) * kPack;
    split_row(
        row, inner,
        [&](uint32_t value, int dim, uint32_t& index) {
          const uint32_t outer = args.by_size[dim].divide(value);
          index = value - outer * args.by_size[dim].divisor;
          return outer;
        },
        add_offset);
  } else {
    const int64_t row = pack / args.packs_per_row;
    first = (pack - row * args.packs_per_row) * kPack;
    split_row(
        row, inner,
        [&](int64_t value, int dim, int64_t& index) {
          const int64_t outer = value / loop.sizes[dim];
          index = value - outer * loop.sizes[dim];
          return outer;
        },
        add_offset);
  }
  const int64_t left = loop.sizes[inner] - first;
  if (args.aligned && left >= kPack) {
    std::tuple<Pack<In, kPack>...> values;
    ((loop.strides[K + 1][inner] == 0
          ? [&] {
              const In value = std::get<K>(args.in)[offset[K + 1]];
              for (int i = 0; i < kPack; ++i) std::get<K>(values).at[i] = value;
            }()
          : [&] { std::get<K>(values) = load_pack<kPack>(std::get<K>(args.in) + offset[K + 1] + first); }()),
     ...);
    Pack<Out, kPack> result;
    for (int i = 0; i < kPack; ++i) result.at[i] = f(std::get<K>(values).at[i]...);
    store_pack<kPack>(args.out + offset[0] + first, result);
  } else {
    for (int64_t i = first; i < first + (left < kPack ? left : int64_t(kPack)); ++i)
      args.out[offset[0] + i * loop.strides[0][inner]] =
          f(std::get<K>(args.in)[offset[K + 1] + i * loop.strides[K + 1][inner]]...);
  }
}

template <int kPack, class F, class Out, class... In>
__global__ void __launch_bounds__(256, 4) elementwise_kernel(ElementwiseArgs<Out, In...> args, F f) {
  for (int64_t pack = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; pack < args.packs;
       pack += int64_t(gridDim.x) * blockDim.x)
    elementwise_pack<kPack>(args, f, pack, std::index_sequence_for<In...>{});
}

/// y = f(x...): `f` takes the inputs' element types and returns the output's. Inputs broadcast to y's shape;
/// all tensors are on y's device. y may be one of the inputs.
template <class Out, class... In, class F, class... Inputs>
void elementwise(const Tensor& y, F f, const Inputs&... x) {
  static_assert(sizeof...(In) == sizeof...(Inputs));
  constexpr int kPack = kPackOf<Out>;
  ElementwiseArgs<Out, In...> args;
  args.loop = make_loop(y.shape(), y, x...);
  if (args.loop.count == 0) return;
  args.out = y.data<Out>();
  args.in = {x.template data<In>()...};
  const auto& loop = args.loop;
  const int inner = loop.rank - 1;
  const auto row_aligned = [&](int n, const void* base, size_t size) {
    if (n > 0 && loop.strides[n][inner] == 0) return true;  // read as one value
    bool fits = loop.strides[n][inner] == 1 &&
                reinterpret_cast<uintptr_t>(base) % std::min<size_t>(16, size * kPack) == 0;
    for (int dim = 0; dim < inner; ++dim) fits = fits && loop.strides[n][dim] % kPack == 0;
    return fits;
  };
  args.aligned = loop.sizes[inner] >= kPack && row_aligned(0, args.out, sizeof(Out));
  int n = 1;
  ((args.aligned = args.aligned && row_aligned(n++, x.template data<In>(), sizeof(In))), ...);
  args.packs_per_row = ceil_div(loop.sizes[inner], kPack);
  args.packs = loop.count / loop.sizes[inner] * args.packs_per_row;
  args.small = args.packs < (int64_t(1) << 31);
  if (args.small) {
    args.by_packs_per_row = Divider(uint32_t(args.packs_per_row));
    for (int dim = 0; dim < inner; ++dim) args.by_size[dim] = Divider(uint32_t(loop.sizes[dim]));
  }
  const int64_t blocks =
      std::min<int64_t>(ceil_div(args.packs, 256), int64_t(y.device().card().multiprocessors) * 32);
  launch(y.device(), {dim3(unsigned(blocks)), 256}, elementwise_kernel<kPack, F, Out, In...>, args, f);
}

}  // namespace tessera::gpu

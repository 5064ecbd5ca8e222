#pragma once

#include <tuple>
#include <utility>

#include "gpu/dependent_launch.cuh"
#include "gpu/divide.cuh"
#include "gpu/pack.cuh"
#include "tensor/elementwise.h"
#include "tensor/pads.h"

/// y = f(x...) over strided operands: the kernels behind every element-by-element operator. Bound by memory.
///
/// Both process packs: kPack neighbouring elements of one row, 16 bytes of the output's type, read and
/// written as words where every operand's rows are aligned for it, else (ragged ends, other layouts) one by
/// one.
///   aligned_rows  floats and bools (or a plain copy) whose rows are dense, or a single element that
///                 broadcasts along the row: the usual case. Packed tensors are one row, pitched ones many.
///                 A thread makes several packs and all their loads are in flight before the first is
///                 used; where a pack lies costs one multiplication by an inverse for its row, another for
///                 each dimension beyond two that broadcasting leaves, and one multiplication per operand. A
///                 ragged end is read as 16 bytes like any other pack. Rows whose pads are shorter than a
///                 pack are one row, row padding included, where that of the result may be overwritten.
///                 Rows that begin inside a pack, the same for all of an operand (the second half of an odd
///                 width), are written by the result's packs and read as two packs that are shifted.
///   any_layout    the rest: a thread makes one pack after the other and splits its number along all
///                 dimensions.
/// Divisions by the sizes are multiplications as long as all numbers fit into 31 bits.

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
__global__ void __launch_bounds__(256, 4) any_layout(ElementwiseArgs<Out, In...> args, F f) {
  wait_and_launch_dependents();
  for (int64_t pack = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; pack < args.packs;
       pack += int64_t(gridDim.x) * blockDim.x)
    elementwise_pack<kPack>(args, f, pack, std::index_sequence_for<In...>{});
}

constexpr int kMostOuter = 3;  // dimensions that number the rows of aligned_rows

/// Whether the packs of all operands are 16 bytes of 32-bit words, which load_shifted takes.
template <int kPack, class... T>
inline constexpr bool kShifts = ((sizeof(T) <= 4 && sizeof(T) * kPack == 16) && ...);

template <class Out, class... In>
struct AlignedRows {
  static constexpr int kOperands = 1 + int(sizeof...(In));
  Out* out;
  std::tuple<const In*...> in;
  int64_t strides[kOperands][kMostOuter];  // along the outer dimensions, outermost first
  bool repeats[kOperands];                 // the row is one element
  int lead;                                // elements of its pack before a row of the result
  int shift[kOperands];                    // elements by which packs then lie after those in memory
  int outer;                               // number of those dimensions; with none there is one row
  int64_t width;
  uint32_t packs, packs_per_row;
  Divider by_packs_per_row, by_size[kMostOuter];

  /// Where the row lies in each operand. kDeep: there may be more than one outer dimension.
  template <bool kDeep>
  __device__ __forceinline__ void offsets(uint32_t row, int64_t (&to)[kOperands]) const {
#pragma unroll
    for (int n = 0; n < kOperands; ++n) to[n] = 0;
#pragma unroll
    for (int dim = kMostOuter - 1; dim > 0; --dim) {
      if (!kDeep || dim >= outer) continue;
      const uint32_t rest = by_size[dim].divide(row), index = row - rest * by_size[dim].divisor;
#pragma unroll
      for (int n = 0; n < kOperands; ++n) to[n] += int64_t(index) * strides[n][dim];
      row = rest;
    }
#pragma unroll
    for (int n = 0; n < kOperands; ++n) to[n] += int64_t(row) * strides[n][0];
  }
};

/// kPack elements as they are in memory, in as few registers as possible: an array of 16-bit numbers would
/// take one register per element.
template <class T, int kPack>
struct alignas(sizeof(T) * kPack < 16 ? sizeof(T) * kPack : 16) PackedWords {
  using Word = std::conditional_t<sizeof(T) * kPack % 4 == 0 && sizeof(T) <= 4, uint32_t, T>;
  static constexpr int kPerWord = int(sizeof(Word) / sizeof(T));
  Word word[kPack / kPerWord];

  __device__ __forceinline__ T operator[](int i) const {
    if constexpr (kPerWord == 1) {
      return std::bit_cast<T>(word[i]);
    } else if constexpr (sizeof(T) == 2) {
      return std::bit_cast<T>(uint16_t(word[i / 2] >> (i % 2 * 16)));
    } else {
      return std::bit_cast<T>(uint8_t(word[i / 4] >> (i % 4 * 8)));
    }
  }
};

/// The elements of a pack as words.
template <int kPack, class T>
__device__ __forceinline__ PackedWords<T, kPack> packed(const T (&values)[kPack]) {
  using Words = PackedWords<T, kPack>;
  Words to;
  if constexpr (Words::kPerWord == 1) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) to.word[i] = std::bit_cast<typename Words::Word>(values[i]);
  } else {
    using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint8_t>;
    constexpr int kPerWord = Words::kPerWord;
#pragma unroll
    for (int w = 0; w < kPack / kPerWord; ++w) {
      to.word[w] = 0;
#pragma unroll
      for (int i = 0; i < kPerWord; ++i)
        to.word[w] |= uint32_t(std::bit_cast<Bits>(values[w * kPerWord + i])) << (i * 32 / kPerWord);
    }
  }
  return to;
}

/// One store for all words. The compiler would store them one by one next to the element-wise stores of
/// ragged ends, at a quarter of the speed.
template <int kPack, class T>
__device__ __forceinline__ void store_whole(T* to, const PackedWords<T, kPack>& from) {
  if constexpr (sizeof(from) == 16) {
    const uint4 all = std::bit_cast<uint4>(from);
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(all.x), "r"(all.y), "r"(all.z),
                 "r"(all.w)
                 : "memory");
  } else if constexpr (sizeof(from) == 8) {
    const uint2 all = std::bit_cast<uint2>(from);
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(all.x), "r"(all.y) : "memory");
  } else {
    *reinterpret_cast<PackedWords<T, kPack>*>(to) = from;
  }
}

/// The element as often as a pack has elements.
template <int kPack, class T>
__device__ __forceinline__ PackedWords<T, kPack> repeated(T value) {
  using Words = PackedWords<T, kPack>;
  typename Words::Word word;
  if constexpr (Words::kPerWord == 1) {
    word = std::bit_cast<typename Words::Word>(value);
  } else if constexpr (sizeof(T) == 2) {
    word = std::bit_cast<uint16_t>(value) * 0x10001u;
  } else {
    word = std::bit_cast<uint8_t>(value) * 0x1010101u;
  }
  Words to;
#pragma unroll
  for (auto& each : to.word) each = word;
  return to;
}

/// Loads the pack at `from`, of which `left` elements are inside the row: every 16-byte word that begins
/// inside the row. Its elements past the row's end are read but not used: they lie inside the storage, whose
/// size is a multiple of 16 bytes.
template <int kPack, class T>
__device__ __forceinline__ PackedWords<T, kPack> load_partial_pack(const T* from, int left) {
  using Words = PackedWords<T, kPack>;
  constexpr int kUnit = sizeof(T) * kPack <= 16 ? kPack : 16 / int(sizeof(T));
  struct alignas(sizeof(T) * kUnit) Unit {
    typename Words::Word word[kUnit / Words::kPerWord];
  };
  Words to = {};
#pragma unroll
  for (int u = 0; u < kPack / kUnit; ++u) {
    if (u * kUnit >= left) continue;
    const Unit unit = *reinterpret_cast<const Unit*>(from + u * kUnit);
#pragma unroll
    for (int w = 0; w < kUnit / Words::kPerWord; ++w)
      to.word[u * (kUnit / Words::kPerWord) + w] = unit.word[w];
  }
  return to;
}

/// The pack at `from`, which is `shift` elements after one in memory, and of which elements `before` to
/// `left` - 1 are inside the row: read as the two that it lies in, as far as these hold any of those.
template <int kPack, class T>
__device__ __forceinline__ PackedWords<T, kPack> load_shifted(const T* from, int shift, int before,
                                                              int left) {
  uint4 two[2] = {};
  const auto* const packs = reinterpret_cast<const uint4*>(from - shift);
  if (left > 0 && kPack - shift > before) two[0] = packs[0];
  if (left > kPack - shift) two[1] = packs[1];
  uint32_t words[] = {two[0].x, two[0].y, two[0].z, two[0].w, two[1].x, two[1].y, two[1].z, two[1].w};
  const int bits = shift * int(sizeof(T)) * 8;
#pragma unroll
  for (int step = 2; step > 0; step /= 2)  // by two words, by one
#pragma unroll
    for (int w = 0; w + step < 8; ++w) words[w] = bits & (32 * step) ? words[w + step] : words[w];
  PackedWords<T, kPack> to;
#pragma unroll
  for (int w = 0; w < 4; ++w) to.word[w] = __funnelshift_r(words[w], words[w + 1], uint32_t(bits % 32));
  return to;
}

/// Whether the function says that its code is long (kLong): each copy of it in a kernel is fetched from
/// memory before a small tensor is done.
template <class F>
constexpr bool is_long() {
  if constexpr (requires { F::kLong; }) return F::kLong;
  return false;
}

/// Packs per thread: as many as keep up to 64 bytes of loads in flight.
template <int kPack, class F, class... In>
constexpr int packs_per_thread() {
  constexpr int bytes = (0 + ... + (int(sizeof(In)) * kPack));
  return is_long<F>() ? 1 : bytes <= 16 ? 4 : bytes <= 48 ? 2 : 1;
}

template <bool kDeep, int kPack, class F, class Out, class... In, size_t... K>
__device__ __forceinline__ void aligned_rows_body(const AlignedRows<Out, In...>& args, F f,
                                                  std::index_sequence<K...>) {
  constexpr int kPacks = packs_per_thread<kPack, F, In...>(), kOperands = 1 + int(sizeof...(In));
  constexpr bool kMayShift = kDeep && kShifts<kPack, Out, In...>;
  std::tuple<PackedWords<In, kPack>...> values[kPacks];
  int64_t at[kPacks][kOperands];
  int before[kPacks], left[kPacks];  // elements of the pack ahead of the row, and up to the row's end
#pragma unroll
  for (int n = 0; n < kPacks; ++n) {
    const uint32_t pack = (blockIdx.x * kPacks + n) * blockDim.x + threadIdx.x;
    const uint32_t row = args.by_packs_per_row.divide(pack);
    const int64_t column = int64_t(pack - row * args.packs_per_row) * kPack - (kMayShift ? args.lead : 0);
    const int64_t inside = pack < args.packs ? args.width - column : 0;
    before[n] = kMayShift && column < 0 ? int(-column) : 0;
    left[n] = inside < kPack ? int(inside) : kPack;
    args.template offsets<kDeep>(row, at[n]);
    at[n][0] += column;
    (([&] {
       const In* const from = std::get<K>(args.in) + at[n][K + 1];
       if constexpr (kMayShift) {
         if (args.shift[K + 1] != 0) {
           std::get<K>(values[n]) = load_shifted<kPack>(from + column, args.shift[K + 1], before[n], left[n]);
           return;
         }
       }
       if (!kDeep || !args.repeats[K + 1])
         std::get<K>(values[n]) = load_partial_pack<kPack>(from + column, left[n]);
       else if (left[n] > 0)
         std::get<K>(values[n]) = repeated<kPack>(*from);
     }()),
     ...);
  }
#pragma unroll
  for (int n = 0; n < kPacks; ++n) {
    if (left[n] == 0) continue;
    Out* const out = args.out + at[n][0];
    Out results[kPack];
#pragma unroll
    for (int i = 0; i < kPack; ++i) results[i] = f(std::get<K>(values[n])[i]...);
    const auto words = packed<kPack>(results);
    if (left[n] - before[n] == kPack) {
      store_whole(out, words);
    } else {
#pragma unroll
      for (int i = 0; i < kPack; ++i)
        if (i >= before[n] && i < left[n]) out[i] = words[i];
    }
  }
}

/// kDeep: rows have several outer dimensions or begin inside packs, or an operand repeats. A kernel of its
/// own, since what that takes would cost the others some 5 %.
template <bool kDeep, int kPack, class F, class Out, class... In>
__global__ void __launch_bounds__(256) aligned_rows(AlignedRows<Out, In...> args, F f) {
  wait_and_launch_dependents();
  aligned_rows_body<kDeep, kPack>(args, f, std::index_sequence_for<In...>{});
}

template <class T>
inline constexpr bool kInAlignedRows =
    std::is_same_v<T, float> || std::is_same_v<T, bf16> || std::is_same_v<T, f16> || std::is_same_v<T, bool>;

/// Elements of a pack: 16 bytes of the output or, where that is bools, of the widest input.
template <class Out, class... In>
constexpr int pack_of() {
  if constexpr (sizeof...(In) > 0 && std::is_same_v<Out, bool>)
    return 16 / int(std::max({sizeof(In)...}));
  else
    return kPackOf<Out>;
}

/// y = f(x...): `f` takes the inputs' element types and returns the output's. Inputs broadcast to y's shape;
/// all tensors are on y's device. y may be one of the inputs.
template <class Out, class... In, class F, class... Inputs>
void elementwise(const Tensor& y, F f, const Inputs&... x) {
  static_assert(sizeof...(In) == sizeof...(Inputs));
  constexpr int kPack = pack_of<Out, In...>();
  ElementwiseArgs<Out, In...> args;
  args.loop = make_loop(y.shape(), y, x...);
  if (args.loop.count == 0) return;
  args.out = y.data<Out>();
  args.in = {x.template data<In>()...};
  const auto& loop = args.loop;
  const int inner = loop.rank - 1;
  constexpr int kOperands = 1 + int(sizeof...(In));
  const void* const bases[] = {args.out, x.template data<In>()...};
  constexpr int64_t sizes[] = {sizeof(Out), sizeof(In)...};
  bool follow = loop.sizes[inner] >= kPack;  // rows follow each other by whole packs
  int64_t shift[kOperands] = {};
  const auto after_pack = [&](int n) {  // elements
    return int64_t(reinterpret_cast<uintptr_t>(bases[n]) % std::min<size_t>(16, size_t(sizes[n]) * kPack)) /
           sizes[n];
  };
  const int64_t lead = after_pack(0);
  args.aligned = true;
  for (int n = 0; n < kOperands; ++n) {
    if (n > 0 && loop.strides[n][inner] == 0) continue;  // read as one value
    follow = follow && loop.strides[n][inner] == 1;
    for (int dim = 0; dim < inner; ++dim) follow = follow && loop.strides[n][dim] % kPack == 0;
    shift[n] = (after_pack(n) + kPack - lead) % kPack;
    args.aligned = args.aligned && after_pack(n) == 0;
  }
  args.aligned = args.aligned && follow;
  // A kernel without inputs whose rows are not aligned stores one element per thread: a warp's are
  // neighbours.
  const bool singly = sizeof...(In) == 0 && !args.aligned;
  args.packs_per_row = ceil_div(loop.sizes[inner], singly ? 1 : kPack);
  args.packs = loop.count / loop.sizes[inner] * args.packs_per_row;
  args.small = args.packs < (int64_t(1) << 31);
  if constexpr ((kInAlignedRows<Out> && ... && kInAlignedRows<In>) ||
                (sizeof...(In) == 1 && (std::is_same_v<Out, In> && ...))) {
    constexpr int kPacks = packs_per_thread<kPack, F, In...>();
    constexpr bool kMayShift = kShifts<kPack, Out, In...>;
    const int64_t per_row = ceil_div(loop.sizes[inner] + lead, kPack),
                  packs = loop.count / loop.sizes[inner] * per_row;
    if (follow && (args.aligned || kMayShift) && packs < (int64_t(1) << 31) - 256 * kPacks &&
        inner <= kMostOuter) {
      AlignedRows<Out, In...> rows{.out = args.out,
                                   .in = args.in,
                                   .lead = int(lead),
                                   .outer = inner,
                                   .width = loop.sizes[inner],
                                   .packs = uint32_t(packs),
                                   .packs_per_row = uint32_t(per_row),
                                   .by_packs_per_row = Divider(uint32_t(per_row))};
      for (int operand = 0; operand < kOperands; ++operand) {
        std::copy_n(loop.strides[operand], inner, rows.strides[operand]);
        rows.repeats[operand] = operand > 0 && loop.strides[operand][inner] == 0;
        rows.shift[operand] = int(shift[operand]);
      }
      for (int dim = 0; dim < inner; ++dim) rows.by_size[dim] = Divider(uint32_t(loop.sizes[dim]));
      const int64_t pitch = per_row * kPack;
      bool one_row = args.aligned && inner == 1 && owns_row_padding(y, pitch);
      size_t operand = 0;
      for (const size_t size : {sizeof(Out), sizeof(In)...}) {
        const int64_t unit =
            std::min<int64_t>(kPack, 16 / int64_t(size));  // read whole if it begins inside the row
        one_row = one_row && !rows.repeats[operand] && rows.strides[operand++][0] == pitch &&
                  ceil_div(rows.width, unit) * unit == pitch;
      }
      if (one_row) {
        rows.outer = 0;
        rows.width = packs * kPack;
        rows.packs_per_row = rows.packs;
        rows.by_packs_per_row = Divider(rows.packs);
      }
      const bool deep =
          rows.outer > 1 || !args.aligned || std::ranges::find(rows.repeats, true) != std::end(rows.repeats);
      // Small tensors are spread over all SMs.
      const int64_t threads = ceil_div(packs, kPacks);
      const int block = threads >= int64_t(y.device().multiprocessors()) * 1024 ? 256 : 64;
      launch_dependent(
          y.device(), {dim3(unsigned(ceil_div(threads, block))), dim3(unsigned(block))},
          deep ? aligned_rows<true, kPack, F, Out, In...> : aligned_rows<false, kPack, F, Out, In...>, rows,
          f);
      return;
    }
  }
  if (args.small) {
    args.by_packs_per_row = Divider(uint32_t(args.packs_per_row));
    for (int dim = 0; dim < inner; ++dim) args.by_size[dim] = Divider(uint32_t(loop.sizes[dim]));
  }
  const int64_t blocks =
      std::min<int64_t>(ceil_div(args.packs, 256), int64_t(y.device().multiprocessors()) * 32);
  const LaunchShape shape{dim3(unsigned(blocks)), 256};
  if constexpr (sizeof...(In) == 0) {
    if (singly) return launch_dependent(y.device(), shape, any_layout<1, F, Out>, args, f);
  }
  launch_dependent(y.device(), shape, any_layout<kPack, F, Out, In...>, args, f);
}

/// Two results of one function.
template <class T>
struct Pair {
  T first, second;
};

template <class Out, class... In>
struct PairedRows {
  Out* out[2];
  std::tuple<const In*...> in;
  int64_t strides[2 + sizeof...(In)];  // between rows: of the results, then of the inputs
  uint32_t packs, packs_per_row;
  Divider by_packs_per_row;
};

/// One pack of each operand per thread.
template <int kPack, class F, class Out, class... In, size_t... K>
__device__ __forceinline__ void paired_rows_body(const PairedRows<Out, In...>& args, F f,
                                                 std::index_sequence<K...>) {
  const uint32_t pack = blockIdx.x * blockDim.x + threadIdx.x;
  if (pack >= args.packs) return;
  const uint32_t row = args.by_packs_per_row.divide(pack);
  const int64_t column = int64_t(pack - row * args.packs_per_row) * kPack;
  const auto offset = [&](size_t operand) { return int64_t(row) * args.strides[operand] + column; };
  const std::tuple<Pack<In, kPack>...> values{load_pack<kPack>(std::get<K>(args.in) + offset(K + 2))...};
  Pack<Out, kPack> first, second;
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    const Pair<Out> both = f(std::get<K>(values).at[i]...);
    first.at[i] = both.first, second.at[i] = both.second;
  }
  store_pack<kPack>(args.out[0] + offset(0), first);
  store_pack<kPack>(args.out[1] + offset(1), second);
}
template <int kPack, class F, class Out, class... In>
__global__ void __launch_bounds__(256) paired_rows(PairedRows<Out, In...> args, F f) {
  wait_and_launch_dependents();
  paired_rows_body<kPack>(args, f, std::index_sequence_for<In...>{});
}

/// a, b = the Pair f(x...), of the inputs' shape, in one pass. Returns false, and has done nothing, unless
/// all are rows that begin on packs, and are whole packs or end with row padding of the results' own.
template <class Out, class... In, class F, class... Inputs>
bool elementwise_pair(const Tensor& a, const Tensor& b, F f, const Inputs&... x) {
  static_assert(sizeof...(In) == sizeof...(Inputs));
  constexpr int kPack = kPackOf<Out>, kOperands = 2 + int(sizeof...(In)), kThreads = 256;
  const auto loop = make_loop(a.shape(), a, b, x...);
  if (loop.count == 0) return true;
  const int inner = loop.rank - 1;
  const int64_t width = loop.sizes[inner], packs_per_row = ceil_div(width, kPack),
                whole = packs_per_row * kPack;
  const int64_t packs = loop.count / width * packs_per_row;
  if (loop.rank > 2 || packs >= (int64_t(1) << 31) - kThreads) return false;
  if (width != whole && !(owns_row_padding(a, whole) && owns_row_padding(b, whole))) return false;
  PairedRows<Out, In...> rows{.out = {a.data<Out>(), b.data<Out>()}, .in = {x.template data<In>()...}};
  const void* const bases[] = {rows.out[0], rows.out[1], x.template data<In>()...};
  const size_t sizes[] = {sizeof(Out), sizeof(Out), sizeof(In)...};
  for (int operand = 0; operand < kOperands; ++operand) {
    const int64_t stride = inner == 1 ? loop.strides[operand][0] : 0;
    if (loop.strides[operand][inner] != 1 || stride % kPack != 0 ||
        reinterpret_cast<uintptr_t>(bases[operand]) % (sizes[operand] * kPack) != 0)
      return false;
    rows.strides[operand] = stride;
  }
  rows.packs = uint32_t(packs), rows.packs_per_row = uint32_t(packs_per_row);
  rows.by_packs_per_row = Divider(rows.packs_per_row);
  launch_dependent(a.device(), {dim3(unsigned(ceil_div(packs, kThreads))), kThreads},
                   paired_rows<kPack, F, Out, In...>, rows, f);
  return true;
}

}  // namespace tessera::gpu

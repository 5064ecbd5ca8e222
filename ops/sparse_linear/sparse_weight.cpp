#include "ops/sparse_linear/sparse_weight.h"

#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <span>

#include "ops/sparse_linear/mma_delta4_internal.h"
#include "ops/sparse_linear/sparse_walk_internal.h"
#include "ops/variant.h"
#include "runtime/call_site.h"
#include "runtime/integers.h"
#include "runtime/parallel.h"
#include "runtime/text.h"

namespace tessera::ops {

using namespace sparse_internal;

namespace {

int64_t rows_of_group(SparseFormat format) {
  return with_order(format, [](auto order) { return decltype(order)::kRows; });
}
int64_t columns_of_group(SparseFormat format) {
  return with_bitmaps(format, [](auto order) { return decltype(order)::kColumns; });
}

}  // namespace

const char* name_of(SparseFormat format) {
  return kSparseFormats[size_t(format)];
}

SparseFormat parse_sparse_format(std::string_view name) {
  return parse_name<SparseFormat>("sparse weight: there is no format", kSparseFormats, name);
}

bool SparseWeight::operator==(const SparseWeight& other) const {
  return format == other.format && out == other.out && in == other.in && values.same_elements(other.values) &&
         bitmaps.same_elements(other.bitmaps) && gaps.same_elements(other.gaps) &&
         offsets.same_elements(other.offsets) && info.same_elements(other.info);
}

int64_t SparseWeight::group_rows() const {
  return format == SparseFormat::dense_columns ? 0 : ceil_div(out, rows_of_group(format));
}
int64_t SparseWeight::group_columns() const {
  if (format == SparseFormat::dense_columns || in == 0) return 0;
  if (format == SparseFormat::sell_delta4) return sell_delta4::parts_of(in);
  if (format == SparseFormat::mma_delta4) return mma_delta4::parts_of(in);
  const int64_t columns = columns_of_group(format);
  return ceil_div(in, columns);
}

uint64_t SparseWeight::bytes() const {
  uint64_t sum = 0;
  for (const Tensor* array : {&values, &bitmaps, &gaps, &offsets, &info})
    if (array->defined()) sum += array->bytes();
  return sum;
}

double SparseWeight::sparsity() const {
  const double all = double(out) * double(in);
  return all > 0 ? 1 - double(stored) / all : 0;
}

SparseWeight SparseWeight::to(Device device) const {
  SparseWeight moved = *this;
  for (Tensor* array : {&moved.values, &moved.bitmaps, &moved.gaps, &moved.offsets, &moved.info})
    if (array->defined()) *array = array->to(device);
  if (values.defined() && device != this->device()) {
    moved.constant = false;
    moved.settle();
  }
  return moved;
}

void SparseWeight::settle() {
  if (values.defined() && device().is_cuda()) {
    check(!device().capturing(),
          "sparse weight: cannot wait for its arrays while a graph is being captured; settle it before");
    device().synchronize();
  }
  constant = true;
}

// ---- compression ----

namespace {

/// Non-zero elements of each group of one row of groups.
template <class Order, class Bits>
void mark_row(const SparseWeight& made, const Bits* dense, int64_t stride, int64_t group_row) {
  const int64_t columns = made.group_columns();
  int64_t* const bitmaps = made.bitmaps.data<int64_t>();
  for (int64_t g = group_row * columns; g < (group_row + 1) * columns; ++g) {
    const int64_t row = group_row * Order::kRows, column = g % columns * Order::kColumns;
    for (int64_t b = 0; b < Order::kBitmaps; ++b) {
      uint64_t bitmap = 0;
      for (int bit = 0; bit < 64; ++bit) {
        const int64_t r = row + Order::row_of(b) + Order::row_of_bit(bit),
                      c = column + Order::column_of(b) + Order::column_of_bit(bit);
        if (r < made.out && c < made.in && dense[r * stride + c] != 0) bitmap |= uint64_t{1} << bit;
      }
      bitmaps[g * Order::kBitmaps + b] = int64_t(bitmap);
    }
  }
}

int64_t count_bits(const int64_t* bitmaps, int64_t count) {
  int64_t bits = 0;
  for (int64_t b = 0; b < count; ++b) bits += std::popcount(uint64_t(bitmaps[b]));
  return bits;
}

/// `info` of one group, from its bitmaps. Returns the number of its values.
int64_t index_group(SparseFormat format, const int64_t* bitmaps, int32_t* info) {
  int64_t values = 0;
  if (format == SparseFormat::tca_bme) {
    constexpr int64_t kOfMedian = tca_bme::kBitmaps / tca_bme::kMedians;
    for (int64_t m = 0; m < tca_bme::kMedians; ++m) {
      info[m] = int32_t(values);
      values += count_bits(bitmaps + m * kOfMedian, kOfMedian);
    }
  } else {
    for (int64_t c = 0; c < tiled_cbc::kGroupColumns; ++c) {
      const int64_t count =
          count_bits(bitmaps + c * tiled_cbc::kBitmapsOfColumn, tiled_cbc::kBitmapsOfColumn);
      info[c] = int32_t(values << tiled_cbc::kCountBits | count);
      values += count;
    }
  }
  return values;
}

int64_t info_of_group(SparseFormat format) {
  return format == SparseFormat::tca_bme ? tca_bme::kMedians : tiled_cbc::kGroupColumns;
}

template <class Order, class Bits>
void compress_groups(SparseWeight& made, const Tensor& dense) {
  const Device cpu = Device::cpu();
  const int64_t groups = made.groups(), columns = made.group_columns();
  made.bitmaps = Tensor::empty_packed({groups * Order::kBitmaps}, DType::i64, cpu);
  made.offsets = Tensor::empty_packed({groups + 1}, DType::i32, cpu);
  made.info = Tensor::empty_packed({groups * info_of_group(made.format)}, DType::i32, cpu);
  const Bits* const from = static_cast<const Bits*>(dense.raw());
  const int64_t stride = dense.rows() > 1 ? dense.row_stride() : 0;
  parallel_for(made.group_rows(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) mark_row<Order, Bits>(made, from, stride, row);
  });
  const int64_t* const bitmaps = made.bitmaps.data<int64_t>();
  int32_t* const offsets = made.offsets.data<int32_t>();
  int64_t at = 0;
  for (int64_t g = 0; g < groups; ++g) {
    check(at <= std::numeric_limits<int32_t>::max(), "compress: weight ", describe(dense),
          " has 2^31 values or more, which offsets of 32 bits cannot address; split its rows");
    offsets[g] = int32_t(at);
    const int64_t values = index_group(made.format, bitmaps + g * Order::kBitmaps,
                                       made.info.data<int32_t>() + g * info_of_group(made.format));
    made.stored += values;
    if (made.format == SparseFormat::tca_bme)
      made.most = std::max(made.most, round_up(values, tca_bme::kMostStep));
    at = round_up(at + values, kValuesOfGroup);
  }
  check(at <= std::numeric_limits<int32_t>::max(), "compress: weight ", describe(dense),
        " has 2^31 values or more, which offsets of 32 bits cannot address; split its rows");
  offsets[groups] = int32_t(at);
  made.values = Tensor::zeros({at}, dense.dtype(), cpu);
  Bits* const to = static_cast<Bits*>(made.values.raw());
  parallel_for(made.group_rows(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin * columns; g < end * columns; ++g) {
      Bits* next = to + offsets[g];
      for_each_stored<Order, Bits>(made, g,
                                   [&](int64_t r, int64_t c, Bits) { *next++ = from[r * stride + c]; });
    }
  });
}

using namespace sell_delta4;

/// Compresses to sell_delta4, a window of 256 rows at a time.
template <class Bits>
class SellEncoder {
 public:
  SellEncoder(SparseWeight& made, const Tensor& dense)
      : made_(made),
        dense_(dense),
        from_(static_cast<const Bits*>(dense.raw())),
        stride_(dense.rows() > 1 ? dense.row_stride() : 0),
        width_(width_of(made.in)) {}

  void run() {
    const Device cpu = Device::cpu();
    const int64_t groups = made_.groups(), parts = made_.group_columns();
    made_.offsets = Tensor::zeros({groups * kSlices + 1}, DType::i32, cpu);
    made_.info = Tensor::zeros({made_.group_rows() * kGroupRows / 4}, DType::i32, cpu);
    std::vector<int64_t> stored(size_t(made_.group_rows()), 0);
    parallel_for(made_.group_rows(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t window = begin; window < end; ++window) stored[size_t(window)] = sort_window(window);
    });
    made_.stored = std::accumulate(stored.begin(), stored.end(), int64_t{0});
    int32_t* const offsets = made_.offsets.template data<int32_t>();
    for (int64_t slice = 0; slice < groups * kSlices; ++slice) {
      const int64_t end = int64_t(offsets[slice]) + offsets[slice + 1];
      check(
          end <= std::numeric_limits<int32_t>::max(), "compress: weight ", describe(dense_),
          " has 2^31 chunks of 256 values or more, which offsets of 32 bits cannot address; split its rows");
      offsets[slice + 1] = int32_t(end);
    }
    const int64_t chunks = offsets[groups * kSlices];
    made_.values = Tensor::zeros({chunks * kChunk}, dense_.dtype(), cpu);
    made_.gaps = Tensor::zeros({chunks * kSliceRows}, DType::i32, cpu);
    parallel_for(groups, std::max<int64_t>(1, parts), [&](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; ++g) write_group(g);
    });
  }

 private:
  /// visit(gap, value) for each entry of a row of a group.
  template <class Visit>
  void for_each(int64_t group, int64_t row_of_group, Visit&& visit) const {
    const int64_t parts = made_.group_columns(), row = group / parts * kGroupRows + row_of_group,
                  first = group % parts * width_, end = std::min(made_.in, first + width_);
    if (row >= made_.out) return;
    for (int64_t at = first, c = first; c < end; ++c) {
      const Bits value = from_[row * stride_ + c];
      if (value == 0) continue;
      for (; c - at > kMostGap; at += kMostGap + 1) visit(kMostGap, Bits(0));
      visit(c - at, value);
      at = c + 1;
    }
  }

  /// The order of a window's rows, and the chunks of its slices at offsets[slice + 1]. Returns its elements.
  int64_t sort_window(int64_t window) {
    const int64_t parts = made_.group_columns();
    std::vector<std::array<int64_t, kGroupRows>> entries(size_t(parts), std::array<int64_t, kGroupRows>{});
    std::array<int64_t, kGroupRows> all{}, order{};
    int64_t stored = 0;
    for (int64_t part = 0; part < parts; ++part)
      for (int64_t r = 0; r < kGroupRows; ++r)
        for_each(window * parts + part, r, [&](int64_t, Bits value) {
          ++entries[size_t(part)][size_t(r)], ++all[size_t(r)];
          stored += value != 0;
        });
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, std::greater<>(), [&](int64_t r) { return all[size_t(r)]; });
    int32_t* const info = made_.info.template data<int32_t>() + window * kGroupRows / 4;
    for (int64_t slot = 0; slot < kGroupRows; ++slot)
      info[slot / 4] = int32_t(uint32_t(info[slot / 4]) | uint32_t(order[size_t(slot)]) << slot % 4 * 8);
    int32_t* const chunks = made_.offsets.template data<int32_t>() + window * parts * kSlices + 1;
    for (int64_t slice = 0; slice < parts * kSlices; ++slice) {
      const std::span<const int64_t> rows(order.data() + slice % kSlices * kSliceRows, size_t(kSliceRows));
      int64_t most = 0;
      for (const int64_t r : rows) most = std::max(most, entries[size_t(slice / kSlices)][size_t(r)]);
      chunks[slice] = int32_t(ceil_div(most, kEntries));
    }
    return stored;
  }

  void write_group(int64_t group) const {
    const int32_t* const offsets = made_.offsets.template data<int32_t>() + group * kSlices;
    const uint32_t* const info = reinterpret_cast<const uint32_t*>(made_.info.template data<int32_t>()) +
                                 group / made_.group_columns() * kGroupRows / 4;
    Bits* const values = static_cast<Bits*>(made_.values.raw());
    uint32_t* const gaps = reinterpret_cast<uint32_t*>(made_.gaps.template data<int32_t>());
    for (int64_t slot = 0; slot < kGroupRows; ++slot) {
      const int64_t lane = slot % kSliceRows, chunk = offsets[slot / kSliceRows];
      int64_t entry = 0;
      for_each(group, info[slot / 4] >> slot % 4 * 8 & 0xFF, [&](int64_t gap, Bits value) {
        const int64_t at = chunk + entry / kEntries, place = entry % kEntries;
        values[at * kChunk + lane * kEntries + place] = value;
        gaps[at * kSliceRows + lane] |= uint32_t(gap) << 4 * place;
        ++entry;
      });
    }
  }

  SparseWeight& made_;
  const Tensor& dense_;
  const Bits* const from_;
  const int64_t stride_, width_;
};

}  // namespace

void check_sizes(std::string_view name, int64_t out, int64_t in) {
  check(0 <= out && out <= kMostSparseSize && 0 <= in && in <= kMostSparseSize, name, ": the matrix is [",
        out, ", ", in, "]; expected sizes of 0 to ", kMostSparseSize);
}

SparseWeight compress(const Tensor& weight, SparseFormat format, Site site) {
  const CallScope call(site);
  check(weight.defined() && weight.rank() == 2, "compress: weight is ",
        weight.defined() ? text_of(describe(weight)) : "undefined", "; expected a matrix [out, in]");
  const DType dtype = weight.dtype();
  check(dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f32, "compress: weight is ",
        describe(weight), "; expected f16, bf16 or f32");
  check_sizes("compress", weight.size(0), weight.size(1));
  SparseWeight made{.format = format, .out = weight.size(0), .in = weight.size(1)};
  if (format == SparseFormat::dense_columns) {
    made.values = weight.detach().transpose(0, 1).clone();
    made.stored = weight.count();
    made.settle();
    return made;
  }
  const Tensor dense = weight.detach().to(Device::cpu()).with_rows();
  if (format == SparseFormat::sell_delta4) {
    with_bits(dtype, [&]<class Bits>() { SellEncoder<Bits>(made, dense).run(); });
    made.settle();
    return made.to(weight.device());
  }
  if (format == SparseFormat::mma_delta4) {
    compress_mma_delta4(made, dense);
    made.settle();
    return made.to(weight.device());
  }
  with_bitmaps(format, [&](auto order) {
    with_bits(dtype, [&]<class Bits>() { compress_groups<decltype(order), Bits>(made, dense); });
  });
  made.settle();
  return made.to(weight.device());
}

Tensor to_dense(const SparseWeight& given, Site site) {
  const CallScope call(site);
  const SparseWeight weight = given.to(Device::cpu());
  if (weight.format == SparseFormat::dense_columns) return weight.values.transpose(0, 1).clone();
  const Tensor dense = Tensor::zeros({weight.out, weight.in}, weight.dtype(), Device::cpu());
  const int64_t stride = weight.out > 1 ? dense.row_stride() : 0;
  with_order(weight.format, [&](auto order) {
    with_bits(weight.dtype(), [&]<class Bits>() {
      Bits* const to = static_cast<Bits*>(dense.raw());
      parallel_for(weight.group_rows(), 1, [&](int64_t begin, int64_t end) {
        for (int64_t g = begin * weight.group_columns(); g < end * weight.group_columns(); ++g)
          for_each_stored<decltype(order), Bits>(
              weight, g, [&](int64_t r, int64_t c, Bits value) { to[r * stride + c] = value; });
      });
    });
  });
  return dense;
}

Tensor column_norms(const SparseWeight& given, Site site) {
  const CallScope call(site);
  const SparseWeight weight = given.to(Device::cpu());
  std::vector<double> sums(size_t(weight.in), 0.0);
  const auto add = [&](int64_t c, double value) { sums[size_t(c)] += value * value; };
  dispatch_floating(weight.dtype(), "column_norms", [&]<class T>() {
    if (weight.format == SparseFormat::dense_columns) {
      for (int64_t c = 0; c < weight.in; ++c)
        for (int64_t r = 0; r < weight.out; ++r)
          add(c, double(weight.values.data<T>()[c * weight.values.layout().stride(0) + r]));
      return;
    }
    with_order(weight.format, [&](auto order) {
      for (int64_t g = 0; g < weight.groups(); ++g)
        for_each_stored<decltype(order), T>(weight, g,
                                            [&](int64_t, int64_t c, T value) { add(c, double(value)); });
    });
  });
  std::vector<float> norms;
  for (const double sum : sums) norms.push_back(float(std::sqrt(sum)));
  return Tensor::from(norms, {weight.in});
}

// ---- validation ----

void check_array(const std::string& name, const char* what, const Tensor& array, DType dtype, int64_t count) {
  check(array.defined(), name, ": the array '", what, "' is missing");
  check(array.dtype() == dtype && array.rank() == 1 && array.count() == count, name, ": the array '", what,
        "' is ", describe(array), "; expected ", dtype, "[", count, "]");
}

void check_chunks(const SparseWeight& weight, const std::string& name, const char* what, int64_t count) {
  static_assert(kChunk == mma_delta4::kChunk && kSliceRows == mma_delta4::kLanes);
  check_array(name, "offsets", weight.offsets, DType::i32, count + 1);
  const int32_t* const offsets = weight.offsets.data<int32_t>();
  check(offsets[0] == 0, name, ": the chunks of the first ", what, " start at ", offsets[0], "; expected 0");
  for (int64_t i = 0; i < count; ++i)
    check(offsets[i + 1] >= offsets[i], name, ": offsets descend after ", what, " ", i, ", from ", offsets[i],
          " to ", offsets[i + 1]);
  check_array(name, "values", weight.values, weight.dtype(), offsets[count] * kChunk);
  check_array(name, "gaps", weight.gaps, DType::i32, offsets[count] * kSliceRows);
}

namespace {

/// Bits of a bitmap whose elements lie inside the matrix.
template <class Order>
uint64_t allowed_bits(const SparseWeight& weight, int64_t group, int64_t bitmap) {
  const int64_t row = group / weight.group_columns() * Order::kRows + Order::row_of(bitmap),
                column = group % weight.group_columns() * Order::kColumns + Order::column_of(bitmap);
  uint64_t bits = 0;
  for (int bit = 0; bit < 64; ++bit)
    if (row + Order::row_of_bit(bit) < weight.out && column + Order::column_of_bit(bit) < weight.in)
      bits |= uint64_t{1} << bit;
  return bits;
}

/// The slices of sell_delta4 are what the kernel may read: rows once each, elements inside their part.
SparseCounts validate_slices(const SparseWeight& weight, const std::string& name) {
  const int64_t groups = weight.groups(), parts = weight.group_columns(), slices = groups * kSlices;
  check_chunks(weight, name, "slice", slices);
  check_array(name, "info", weight.info, DType::i32, weight.group_rows() * kGroupRows / 4);
  for (int64_t window = 0; window < weight.group_rows(); ++window) {
    const uint32_t* const info =
        reinterpret_cast<const uint32_t*>(weight.info.data<int32_t>()) + window * kGroupRows / 4;
    const int64_t there = std::min(kGroupRows, weight.out - window * kGroupRows);
    std::array<bool, kGroupRows> seen{};
    for (int64_t slot = 0; slot < kGroupRows; ++slot) {
      const uint32_t row = info[slot / 4] >> slot % 4 * 8 & 0xFF;
      check(!seen[row], name, ": 'info' has row ", row, " of window ", window, " twice");
      check((row < there) == (slot < there), name, ": 'info' has row ", row, " of window ", window,
            " in place ", slot, "; expected the ", there, " rows that there are before others");
      seen[row] = true;
    }
  }
  int64_t stored = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t end = std::min(weight.in, (g % parts + 1) * width_of(weight.in));
    with_bits(weight.dtype(), [&]<class Bits>() {
      for_each_entry<Bits>(weight, g, [&](int64_t r, int64_t c, int64_t gap, Bits value) {
        if (value == 0 && gap == 0) return;
        check(r < weight.out && c < end, name, ": group ", g, " has an element in row ", r, ", column ", c,
              ", outside its part of the matrix [", weight.out, ", ", weight.in, "]");
        stored += value != 0;
      });
    });
  }
  return {stored, 0};
}

template <class Order>
SparseCounts validate_groups(const SparseWeight& weight, const std::string& name) {
  const int64_t groups = weight.groups(), per_group = info_of_group(weight.format);
  check_array(name, "bitmaps", weight.bitmaps, DType::i64, groups * Order::kBitmaps);
  check_array(name, "offsets", weight.offsets, DType::i32, groups + 1);
  check_array(name, "info", weight.info, DType::i32, groups * per_group);
  const int32_t* const offsets = weight.offsets.data<int32_t>();
  check_array(name, "values", weight.values, weight.dtype(), offsets[groups]);
  check(offsets[0] == 0, name, ": the values of the first group start at ", offsets[0], "; expected 0");
  std::vector<int32_t> expected(size_t(per_group), 0);
  int64_t stored = 0, most = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t* const bitmaps = weight.bitmaps.data<int64_t>() + g * Order::kBitmaps;
    const bool at_edge = (g / weight.group_columns() + 1) * Order::kRows > weight.out ||
                         (g % weight.group_columns() + 1) * Order::kColumns > weight.in;
    for (int64_t b = 0; at_edge && b < Order::kBitmaps; ++b)
      check((uint64_t(bitmaps[b]) & ~allowed_bits<Order>(weight, g, b)) == 0, name, ": bitmap ", b,
            " of group ", g, " has an element outside the matrix [", weight.out, ", ", weight.in, "]");
    const int64_t values = index_group(weight.format, bitmaps, expected.data());
    check(offsets[g + 1] >= offsets[g], name, ": offsets descend after group ", g, ", from ", offsets[g],
          " to ", offsets[g + 1]);
    check(offsets[g + 1] - offsets[g] == round_up(values, kValuesOfGroup), name, ": the bitmaps of group ", g,
          " have ", values, " elements, but offsets ", offsets[g], " and ", offsets[g + 1],
          " leave room for ", offsets[g + 1] - offsets[g]);
    const int32_t* const info = weight.info.data<int32_t>() + g * per_group;
    for (int64_t i = 0; i < per_group; ++i)
      check(info[i] == expected[size_t(i)], name, ": entry ", i, " of group ", g, " in 'info' is ", info[i],
            "; by the bitmaps it is ", expected[size_t(i)]);
    stored += values;
    if (weight.format == SparseFormat::tca_bme) most = std::max(most, round_up(values, tca_bme::kMostStep));
  }
  return {stored, most};
}

}  // namespace

void validate(const SparseWeight& weight, const std::string& name) {
  const auto [stored, most] = validate_arrays(weight, name);
  check(weight.stored == stored && weight.most == most, name, ": says ", weight.stored,
        " stored elements, at most ", weight.most, " of a group; the arrays have ", stored, " and ", most);
}

SparseCounts validate_arrays(const SparseWeight& weight, const std::string& name) {
  check_sizes(name, weight.out, weight.in);
  check(weight.values.defined(), name, ": the array 'values' is missing");
  const DType dtype = weight.dtype();
  check(dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f32, name, ": values are ", dtype,
        "; expected f16, bf16 or f32");
  if (weight.format != SparseFormat::dense_columns) {
    if (weight.format == SparseFormat::sell_delta4) return validate_slices(weight, name);
    if (weight.format == SparseFormat::mma_delta4) return validate_mma_delta4(weight, name);
    SparseCounts counts;
    with_bitmaps(weight.format, [&](auto order) { counts = validate_groups<decltype(order)>(weight, name); });
    return counts;
  }
  check(weight.values.shape() == Shape{weight.in, weight.out}, name, ": values are ", describe(weight.values),
        "; expected [", weight.in, ", ", weight.out, "]");
  return {weight.out * weight.in, 0};
}

}  // namespace tessera::ops

#include "ops/bits/bits.h"
#include "ops/bits/bits_kernels.h"
#include "ops/op.h"

namespace tessera::ops {
namespace {

/// Half of the bits of `count` words per row, or of as many columns.
InputCase words(int64_t rows, int64_t count, int64_t columns = -1) {
  return {
      .shape = {rows, count}, .fill = Fill::bits, .high = columns < 0 ? 32 * count : columns, .density = 0.5};
}
InputSpec bits_input(const char* name, const char* shape, bool optional = false) {
  return {
      .name = name, .shape = shape, .optional = optional, .differentiable = false, .dtypes = {DType::i32}};
}

Case of(const Dims& dims, const Attrs& attrs = {}, Placement placement = Placement::pitched) {
  return {.dims = dims, .attrs = attrs, .placement = placement};
}

// ---- pack, unpack, transpose, count ----

OpSpec pack_bits_spec() {
  OpSpec op{
      .name = "pack_bits",
      .summary = "bit j of word w: whether x[r, 32 w + j] is not zero",
      .inputs = {{.name = "x", .shape = "[R, C]", .differentiable = false}},
      .outputs = {{"bits", "[R, ceil(C / 32)]", false, {DType::i32}}},
      .run = [](const std::vector<Tensor>& in, const Attrs&) { return std::vector{pack_bits(in[0])}; },
      .problem =
          [](const Dims& d, const Attrs&) {
            const int64_t rows = d.at("R"), columns = d.at("C");
            return Problem{.inputs = {{.shape = {rows, columns}, .density = 0.6}},
                           .forward_elements = double(rows) * double(columns),
                           .forward_bytes = 4 * double(rows) * double(bit_words(columns))};
          },
      .benches = {of({{"R", 65536}, {"C", 8192}}), of({{"R", 11008}, {"C", 4096}})},
      .sweep =
          [](Draw& draw) {
            return of({{"R", draw.size(1, 20000)}, {"C", draw.size(1, 20000)}});
          },
  };
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{0, 5},
                                      {5, 0},
                                      {1, 1},
                                      {3, 31},
                                      {7, 32},
                                      {5, 33},
                                      {2, 257},
                                      {33, 1023},
                                      {4, 5000}})
    op.cases.push_back(of({{"R", rows}, {"C", columns}}));
  op.cases.push_back(of({{"R", 35}, {"C", 70}}, {}, Placement::strided));
  op.cases.push_back(of({{"R", 35}, {"C", 70}}, {}, Placement::transposed));
  return op;
}

OpSpec unpack_bits_spec() {
  OpSpec op{
      .name = "unpack_bits",
      .summary = "y[r, c] = bit c % 32 of bits[r, c / 32], as f32",
      .inputs = {bits_input("bits", "[R, ceil(columns / 32)]")},
      .attrs = {{"columns", int64_t{1}, "columns of the mask"}},
      .outputs = {{"y", "[R, columns]", false, {DType::f32}}},
      .cpu_dtypes = {DType::f32},
      .cuda_dtypes = {DType::f32},
      .run = [](const std::vector<Tensor>& in,
                const Attrs& attrs) { return std::vector{unpack_bits(in[0], attrs.integer("columns"))}; },
      .problem =
          [](const Dims& d, const Attrs& attrs) {
            const int64_t columns = attrs.integer("columns");
            return Problem{.inputs = {words(d.at("R"), bit_words(columns), columns)},
                           .forward_bytes = 4 * double(d.at("R")) * double(columns + bit_words(columns))};
          },
      .benches = {of({{"R", 11008}}, {{"columns", int64_t{4096}}})},
      .sweep =
          [](Draw& draw) {
            return of({{"R", draw.size(1, 20000)}}, {{"columns", draw.size(1, 20000)}});
          },
  };
  for (const auto& [rows, columns] :
       {std::pair<int64_t, int64_t>{0, 5}, {5, 0}, {1, 1}, {3, 31}, {7, 32}, {5, 33}, {9, 257}})
    op.cases.push_back(of({{"R", rows}}, {{"columns", columns}}));
  op.cases.push_back(of({{"R", 9}}, {{"columns", int64_t{70}}}, Placement::strided));
  return op;
}

OpSpec transpose_bits_spec() {
  OpSpec op{
      .name = "transpose_bits",
      .summary = "the mask whose rows are the columns",
      .inputs = {bits_input("bits", "[R, ceil(columns / 32)]")},
      .attrs = {{"columns", int64_t{1}, "columns of the mask"}},
      .outputs = {{"out", "[columns, ceil(R / 32)]", false, {DType::i32}}},
      .cpu_dtypes = {DType::f32},
      .cuda_dtypes = {DType::f32},
      .run = [](const std::vector<Tensor>& in,
                const Attrs& attrs) { return std::vector{transpose_bits(in[0], attrs.integer("columns"))}; },
      .problem =
          [](const Dims& d, const Attrs& attrs) {
            const int64_t rows = d.at("R"), columns = attrs.integer("columns");
            return Problem{.inputs = {words(rows, bit_words(columns), columns)},
                           .forward_bytes = 4 * (double(rows) * double(bit_words(columns)) +
                                                 double(columns) * double(bit_words(rows)))};
          },
      .benches = {of({{"R", 11008}}, {{"columns", int64_t{4096}}})},
      .sweep =
          [](Draw& draw) {
            return of({{"R", draw.size(1, 20000)}}, {{"columns", draw.size(1, 20000)}});
          },
  };
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{0, 5},
                                      {5, 0},
                                      {1, 1},
                                      {31, 33},
                                      {32, 32},
                                      {33, 31},
                                      {100, 257},
                                      {1025, 70}})
    op.cases.push_back(of({{"R", rows}}, {{"columns", columns}}));
  op.cases.push_back(of({{"R", 40}}, {{"columns", int64_t{70}}}, Placement::strided));
  return op;
}

OpSpec count_bits_spec() {
  OpSpec op{
      .name = "count_bits",
      .summary = "set bits per row",
      .inputs = {bits_input("bits", "[R, W]")},
      .outputs = {{"counts", "[R]", false, {DType::i32}}},
      .cpu_dtypes = {DType::f32},
      .cuda_dtypes = {DType::f32},
      .run = [](const std::vector<Tensor>& in, const Attrs&) { return std::vector{count_bits(in[0])}; },
      .problem =
          [](const Dims& d, const Attrs&) {
            const double words_read = double(d.at("R")) * double(d.at("W"));
            return Problem{.inputs = {words(d.at("R"), d.at("W"))},
                           .forward_bytes = 4 * (words_read + double(d.at("R")))};
          },
      .benches = {of({{"R", 11008}, {"W", 128}})},
      .sweep =
          [](Draw& draw) {
            return of({{"R", draw.size(1, 20000)}, {"W", draw.size(1, 500)}});
          },
  };
  for (const auto& [rows, count] :
       {std::pair<int64_t, int64_t>{0, 5}, {5, 0}, {1, 1}, {33, 31}, {9, 32}, {1025, 33}})
    op.cases.push_back(of({{"R", rows}, {"W", count}}));
  op.cases.push_back(of({{"R", 9}, {"W", 7}}, {}, Placement::strided));
  return op;
}

OpSpec count_differences_spec() {
  OpSpec op{
      .name = "count_differences",
      .summary = "bits in which two masks differ",
      .inputs = {bits_input("a", "[R, W]"), bits_input("b", "[R, W]")},
      .outputs = {{"count", "[1]", false, {DType::i64}}},
      .cpu_dtypes = {DType::f32},
      .cuda_dtypes = {DType::f32},
      .run = [](const std::vector<Tensor>& in,
                const Attrs&) { return std::vector{count_differences(in[0], in[1])}; },
      .problem =
          [](const Dims& d, const Attrs&) {
            const int64_t rows = d.at("R"), count = d.at("W");
            return Problem{.inputs = {words(rows, count), words(rows, count)},
                           .forward_bytes = 8 * double(rows) * double(count) + 8};
          },
      .benches = {of({{"R", 11008}, {"W", 128}})},
      .sweep =
          [](Draw& draw) {
            return of({{"R", draw.size(1, 20000)}, {"W", draw.size(1, 500)}});
          },
  };
  for (const auto& [rows, count] :
       {std::pair<int64_t, int64_t>{0, 5}, {5, 0}, {1, 1}, {1, 5000}, {33, 31}, {9, 32}, {1025, 33}})
    op.cases.push_back(of({{"R", rows}, {"W", count}}));
  op.cases.push_back(of({{"R", 9}, {"W", 7}}, {}, Placement::strided));
  return op;
}

// ---- pairs ----

BitMeasure measure_of(const Attrs& attrs) {
  const std::string& word = attrs.word("measure");
  return word == "overlap"   ? BitMeasure::overlap
         : word == "hamming" ? BitMeasure::hamming
                             : BitMeasure::jaccard;
}

/// Dims: M rows of a, N of b (none: b is a), W words.
OpSpec bit_pairs_spec() {
  const auto with = [](const Dims& dims, const char* measure, Placement placement = Placement::pitched) {
    return of(dims, {{"measure", std::string(measure)}}, placement);
  };
  OpSpec op{
      .name = "bit_pairs",
      .summary =
          "all pairs of a row of a and a row of b: common bits, Hamming distance or Jaccard similarity",
      .inputs = {bits_input("a", "[M, W]"), bits_input("b", "[N, W]; none: a", true)},
      .attrs =
          {{"measure", std::string("overlap"), "how rows are compared", {"overlap", "hamming", "jaccard"}}},
      .outputs = {{"y", "[M, N]", false, {DType::i32, DType::f32}}},
      .cpu_dtypes = {DType::f32},
      .cuda_dtypes = {DType::f32},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            const Tensor a = in[0], b = in[1];
            return std::vector{bit_pairs(a, b.defined() ? b : a, measure_of(attrs))};
          },
      .problem =
          [](const Dims& d, const Attrs&) {
            const bool itself = !d.contains("N");
            const int64_t m = d.at("M"), n = itself ? m : d.at("N"), w = d.at("W");
            InputCase b = words(n, w);
            if (itself) b.fill = Fill::absent;
            return Problem{
                .inputs = {words(m, w), b},
                .forward_flops = 2 * double(m) * double(n) * 32 * double(w),
                .forward_bytes = 4 * (double(m) * double(n) + double(itself ? m : m + n) * double(w))};
          },
      .benches = {with({{"M", 11008}, {"W", 128}}, "overlap"), with({{"M", 11008}, {"W", 128}}, "hamming"),
                  with({{"M", 4096}, {"W", 344}}, "overlap"),
                  with({{"M", 4096}, {"N", 4096}, {"W", 128}}, "overlap")},
      .sweep =
          [with](Draw& draw) {
            Dims dims{{"M", draw.size(1, 3000)}, {"W", draw.size(1, 500)}};
            if (draw.chance(0.5)) dims["N"] = draw.size(1, 3000);
            const char* const measures[] = {"overlap", "hamming", "jaccard"};
            return with(dims, measures[draw.below(3)]);
          },
      .variants = bit_pairs_variants(),
  };
  for (const char* measure : {"overlap", "hamming", "jaccard"}) {
    for (const auto& [m, w] :
         {std::pair<int64_t, int64_t>{0, 3}, {1, 1}, {5, 0}, {63, 3}, {65, 4}, {129, 33}, {300, 70}})
      op.cases.push_back(with({{"M", m}, {"W", w}}, measure));
    op.cases.push_back(with({{"M", 7}, {"N", 0}, {"W", 8}}, measure));
    op.cases.push_back(with({{"M", 33}, {"N", 130}, {"W", 31}}, measure));
    op.cases.push_back(with({{"M", 257}, {"N", 3}, {"W", 36}}, measure));
    op.cases.push_back(with({{"M", 31}, {"N", 40}, {"W", 9}}, measure, Placement::strided));
  }
  op.cases.push_back(with({{"M", 641}, {"W", 128}}, "overlap"));
  return op;
}

/// Dims: M queries, N rows (none: the queries themselves), W words.
OpSpec nearest_bits_spec() {
  const auto with = [](const Dims& dims, int64_t k) { return of(dims, {{"k", k}}); };
  return {
      .name = "nearest_bits",
      .summary = "the k rows of bits that are nearest to each query by Hamming distance",
      .inputs = {bits_input("queries", "[M, W]"), bits_input("bits", "[N, W]; none: the queries", true)},
      .attrs = {{"k", int64_t{8}, "neighbours per query"}},
      .outputs = {{"indices", "[M, k]", false, {DType::i32}}, {"distances", "[M, k]", false, {DType::i32}}},
      .cpu_dtypes = {DType::f32},
      .cuda_dtypes = {DType::f32},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            const Tensor queries = in[0], bits = in[1];
            const NearestRows found =
                nearest_bits(queries, bits.defined() ? bits : queries, attrs.integer("k"));
            return std::vector{found.indices, found.distances};
          },
      .problem =
          [](const Dims& d, const Attrs& attrs) {
            const bool itself = !d.contains("N");
            const int64_t m = d.at("M"), n = itself ? m : d.at("N"), w = d.at("W");
            InputCase bits = words(n, w);
            if (itself) bits.fill = Fill::absent;
            return Problem{.inputs = {words(m, w), bits},
                           .forward_flops = 2 * double(m) * double(n) * 32 * double(w),
                           .forward_bytes = 8 * double(m) * double(attrs.integer("k"))};
          },
      .cases = {with({{"M", 1}, {"W", 1}}, 1), with({{"M", 40}, {"W", 1}}, 40),
                with({{"M", 130}, {"W", 5}}, 8), with({{"M", 7}, {"N", 300}, {"W", 33}}, 9),
                with({{"M", 0}, {"N", 3}, {"W", 2}}, 2), with({{"M", 5}, {"N", 3}, {"W", 0}}, 2)},
      .benches = {with({{"M", 11008}, {"W", 128}}, 8)},
      .sweep =
          [with](Draw& draw) {
            const int64_t rows = draw.size(1, 3000);
            return with({{"M", draw.size(1, 1000)}, {"N", rows}, {"W", draw.size(1, 300)}},
                        1 + draw.below(std::min<int64_t>(rows, 64)));
          },
  };
}

OpSpec hamming_histogram_spec() {
  const auto rows = [](int64_t r, int64_t w) { return of({{"R", r}, {"W", w}}); };
  return {
      .name = "hamming_histogram",
      .summary = "number of pairs of rows at each Hamming distance",
      .inputs = {bits_input("bits", "[R, W]")},
      .outputs = {{"histogram", "[32 W + 1]", false, {DType::i64}}},
      .cpu_dtypes = {DType::f32},
      .cuda_dtypes = {DType::f32},
      .run = [](const std::vector<Tensor>& in,
                const Attrs&) { return std::vector{hamming_histogram(in[0])}; },
      .problem =
          [](const Dims& d, const Attrs&) {
            const double r = double(d.at("R")), w = double(d.at("W"));
            return Problem{.inputs = {words(d.at("R"), d.at("W"))},
                           .forward_flops = r * r * 32 * w,
                           .forward_bytes = 4 * r * w + 8 * (32 * w + 1)};
          },
      .cases = {rows(0, 1), rows(1, 2), rows(2, 0), rows(2, 1), rows(33, 3), rows(130, 33), rows(300, 1)},
      .benches = {rows(11008, 128)},
      .sweep = [rows](Draw& draw) { return rows(draw.size(1, 3000), draw.size(1, 300)); },
  };
}

}  // namespace

std::vector<OpSpec> bits_specs() {
  return {pack_bits_spec(),         unpack_bits_spec(), transpose_bits_spec(), count_bits_spec(),
          count_differences_spec(), bit_pairs_spec(),   nearest_bits_spec(),   hamming_histogram_spec()};
}

}  // namespace tessera::ops

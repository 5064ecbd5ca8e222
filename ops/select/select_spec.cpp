#include <utility>

#include "ops/op.h"
#include "ops/select/select.h"
#include "ops/select/select_kernels.h"

namespace tessera::ops {
namespace {

/// An index input as selections have it. Numbers that i32 cannot hold are an error, on a GPU (where the host
/// would have to wait to see them) their lower half.
Tensor to_i32(const char* op, const char* name, const Tensor& given) {
  if (!given.defined() || given.dtype() == DType::i32) return given;
  if (given.device().is_cpu())
    for (const int64_t value : given.to_vector<int64_t>())
      check(std::in_range<int32_t>(value), op, ": ", name, " has ", value, "; expected numbers that fit i32");
  return given.to(DType::i32);
}

// ---- select ----

Attrs choose(const char* mode, int64_t n, int64_t seed = 0, double threshold = 1) {
  return {{"mode", std::string(mode)}, {"n", n}, {"seed", seed}, {"threshold", threshold}};
}

Selection selected(const Tensor& norms, const SelectionCounts& counts, const Attrs& attrs) {
  const std::string& mode = attrs.word("mode");
  const int64_t n = attrs.integer("n");
  if (mode == "first") return Selection::first(norms.count(), n, norms.device(), counts);
  if (mode == "top_norm") return Selection::top_norm(norms, n, counts);
  if (mode == "threshold") return Selection::threshold(norms, attrs.number("threshold"), counts);
  SeededRng random(attrs.integer("seed"));
  if (mode == "random") return Selection::random(norms.count(), n, random.rng(), norms.device(), counts);
  return Selection::importance(norms, n, random.rng(), counts);
}

/// Dims: M norms; "n" and "rows" give the numbers on the device.
Problem select_problem(const Dims& d, const Attrs& attrs) {
  const auto count = [&](const char* name) {
    if (!d.contains(name)) return InputCase{.shape = {1}, .fill = Fill::absent};
    return InputCase{.shape = {1}, .fill = Fill::index, .values = {d.at(name)}};
  };
  const int64_t capacity = attrs.word("mode") == "threshold" ? d.at("M") : attrs.integer("n");
  const bool reads = attrs.word("mode") != "first" && attrs.word("mode") != "random";
  return {.inputs = {{.shape = {d.at("M")}, .fill = Fill::positive}, count("n"), count("rows")},
          .forward_elements = reads ? double(d.at("M")) : 0,
          .forward_bytes = 8 * double(capacity) + 4};
}

std::vector<Case> select_cases() {
  std::vector<Case> cases;
  const auto add = [&](const Dims& dims, const Attrs& attrs, Placement placement = Placement::pitched) {
    cases.push_back({.dims = dims, .attrs = attrs, .placement = placement});
  };
  for (const char* mode : {"first", "top_norm", "random", "importance"}) {
    for (const auto& [rows, n] : {std::pair<int64_t, int64_t>{0, 0},
                                  {1, 0},
                                  {1, 1},
                                  {5, 3},
                                  {31, 31},
                                  {33, 7},
                                  {1023, 50},
                                  {1025, 102},
                                  {2049, 2048},
                                  {4099, 1}})
      add({{"M", rows}}, choose(mode, n, rows));
    add({{"M", 1031}, {"n", 17}}, choose(mode, 200, 1));
    add({{"M", 1031}, {"rows", 513}}, choose(mode, 200, 2));
    add({{"M", 1031}, {"n", 100}, {"rows", 30}}, choose(mode, 200, 3));
    add({{"M", 1031}, {"n", 5000}, {"rows", 0}}, choose(mode, 200, 3));
    add({{"M", 261}}, choose(mode, 26, 4), Placement::strided);
    add({{"M", 40961}}, choose(mode, 4096, 5));
  }
  for (const double threshold : {-1.0, 0.8, 1.5, 1e30})
    for (const int64_t rows : {0, 1, 33, 2049}) add({{"M", rows}}, choose("threshold", 0, 0, threshold));
  add({{"M", 1031}, {"rows", 513}}, choose("threshold", 0));
  add({{"M", 40961}}, choose("threshold", 0));
  return cases;
}

std::vector<Case> select_benches() {
  std::vector<Case> benches;
  for (const char* mode : {"first", "top_norm", "threshold", "random", "importance"})
    for (const int64_t rows : {2048, 8192, 16384, 36096, 1048576})
      benches.push_back({.dims = {{"M", rows}}, .attrs = choose(mode, rows / 10)});
  return benches;
}

/// What Selection refuses too, but by the names of its own arguments.
void check_counts(const std::vector<Tensor>& in, const Attrs& attrs) {
  const std::string& mode = attrs.word("mode");
  for (const auto& [name, i] : {std::pair{"device_n", 1}, {"device_rows", 2}}) {
    const Tensor& count = in[size_t(i)];
    check(!count.defined() || (count.rank() == 1 && count.count() == 1), "select ", mode, ": input \"", name,
          "\" is ", describe(count), "; expected [1]");
  }
  check(mode != "threshold" || !in[1].defined(),
        "select threshold: input \"device_n\" is given; expected none (the threshold decides how many)");
}

OpSpec select_spec() {
  return {
      .name = "select",
      .summary = "indices, scales and count of n of M rows",
      .inputs = {{.name = "norms", .shape = "[M]", .differentiable = false},
                 {.name = "device_n",
                  .shape = "[1]",
                  .optional = true,
                  .differentiable = false,
                  .dtypes = index_dtypes()},
                 {.name = "device_rows",
                  .shape = "[1]",
                  .optional = true,
                  .differentiable = false,
                  .dtypes = index_dtypes()}},
      .attrs = {{"mode",
                 std::string("top_norm"),
                 "how rows are chosen",
                 {"first", "top_norm", "threshold", "random", "importance"}},
                {"n", int64_t{1}, "rows to choose, at most M; not used by threshold"},
                {"threshold", 0.0, "smallest norm that threshold chooses"},
                {"seed", int64_t{0}, "random seed"}},
      .outputs = {{"indices", "[n], threshold: [M]", false, {DType::i32}},
                  {"scales", "[n], threshold: [M]", false, {DType::f32}},
                  {"count", "[1]", false, {DType::i32}}},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            check_counts(in, attrs);
            const SelectionCounts counts{to_i32("select", "device_n", in[1]),
                                         to_i32("select", "device_rows", in[2])};
            const Selection chosen = selected(in[0], counts, attrs);
            return std::vector{chosen.indices, chosen.scales, chosen.count};
          },
      .seed = "seed",
      .problem = select_problem,
      .cases = select_cases(),
      .benches = select_benches(),
      .variants = select_variants(),
  };
}

// ---- row_norms ----

OpSpec row_norms_spec() {
  const auto rows = [](int64_t m, int64_t c, Placement placement = Placement::pitched, bool check = true) {
    return Case{.dims = {{"M", m}, {"C", c}}, .placement = placement, .gradcheck = check};
  };
  return {
      .name = "row_norms",
      .summary = "y[m] = sqrt(sum of x[m]^2), in f32",
      .inputs = {{.name = "x", .shape = "[M, ...]", .differentiable = false}},
      .outputs = {{"y", "[M]", false, sum_dtypes()}},
      .run = [](const std::vector<Tensor>& in, const Attrs&) { return std::vector{row_norms(in[0])}; },
      .problem =
          [](const Dims& d, const Attrs&) {
            const double n = double(d.at("M")) * double(d.at("C"));
            const Shape x =
                d.contains("A") ? Shape{d.at("M"), d.at("A"), d.at("C")} : Shape{d.at("M"), d.at("C")};
            return Problem{.inputs = {{.shape = x}},
                           .forward_flops = 2 * n,
                           .forward_elements = n,
                           .forward_bytes = 4 * double(d.at("M"))};
          },
      .cases = {rows(1, 1),
                rows(7, 13),
                rows(0, 5),
                rows(5, 0),
                rows(33, 129),
                rows(3, 1025),
                rows(17, 11, Placement::strided),
                rows(17, 11, Placement::transposed),
                {.dims = {{"M", 5}, {"A", 3}, {"C", 7}}},
                {.dims = {{"M", 5}, {"A", 4}, {"C", 6}}, .placement = Placement::strided},
                rows(259, 768, Placement::pitched, false),
                rows(67, 3072, Placement::pitched, false)},
      .benches = {rows(16384, 768), rows(36096, 768), rows(16384, 3072)},
      .sweep = [rows](Draw& draw) { return rows(draw.size(1, 200000), draw.size(1, 8192)); },
      .variants = row_norms_variants(),
  };
}

// ---- gather_selected, scatter_selected ----

/// Dims: N entries, the last P of them padding, of M rows of (A x) B elements; S: with scales.
Shape selected_shape(const Dims& d, int64_t rows) {
  return d.contains("A") ? Shape{rows, d.at("A"), d.at("B")} : Shape{rows, d.at("B")};
}

Problem move_problem(const Dims& d, bool gathers) {
  const char* const op = gathers ? "gather_selected" : "scatter_selected";
  const int64_t n = d.at("N"), rows = d.at("M"), padding = d.contains("P") ? d.at("P") : 0,
                valid = n - padding;
  check(valid >= 0 && valid <= rows, op, ": N is ", n, ", of which P are padding: ", padding, ", of ", rows,
        " rows; expected P <= N <= P + rows");
  check_listed(op, double(n));
  std::vector<int64_t> indices(static_cast<size_t>(n), rows);
  for (int64_t i = 0; i < valid; ++i) indices[size_t(i)] = (i * rows + rows / 2) / valid;
  const double row = double(selected_shape(d, 1).count());
  const InputCase scales{.shape = {n}, .fill = is_set(d, "S") ? Fill::positive : Fill::absent};
  return {.inputs = {{.shape = selected_shape(d, gathers ? rows : n)},
                     {.shape = {n}, .fill = Fill::index, .high = rows, .values = indices},
                     scales},
          .forward_elements = gathers ? double(valid + n) * row : double(valid + rows) * row,
          .backward_elements = gathers ? double(valid + rows) * row : double(valid + n) * row,
          .forward_bytes = 4 * double(n),
          .backward_bytes = 4 * double(n)};
}

std::vector<Case> move_cases() {
  std::vector<Case> cases;
  for (const bool scaled : {false, true}) {
    const auto add = [&](Dims dims, Placement placement = Placement::pitched, bool check = true) {
      if (scaled) dims["S"] = 1;
      cases.push_back({.dims = std::move(dims), .placement = placement, .gradcheck = check});
    };
    add({{"N", 3}, {"M", 7}, {"B", 5}});
    add({{"N", 7}, {"M", 7}, {"B", 13}});
    add({{"N", 1}, {"M", 1}, {"B", 1}});
    add({{"N", 0}, {"M", 4}, {"B", 3}});
    add({{"N", 2}, {"M", 4}, {"B", 0}});
    add({{"N", 5}, {"P", 2}, {"M", 11}, {"B", 8}});
    add({{"N", 4}, {"P", 4}, {"M", 6}, {"B", 9}});
    add({{"N", 5}, {"M", 9}, {"A", 3}, {"B", 5}});
    add({{"N", 6}, {"P", 1}, {"M", 10}, {"A", 2}, {"B", 11}}, Placement::strided);
    add({{"N", 6}, {"M", 10}, {"B", 9}}, Placement::strided);
    add({{"N", 6}, {"M", 10}, {"B", 9}}, Placement::transposed);
    add({{"N", 33}, {"M", 1000}, {"B", 2}});
    add({{"N", 1}, {"M", 300}, {"B", 17}});
    add({{"N", 103}, {"P", 4}, {"M", 1031}, {"B", 768}}, Placement::pitched, false);
    add({{"N", 1055}, {"P", 31}, {"M", 2113}, {"B", 65}}, Placement::pitched, false);
  }
  return cases;
}

std::vector<Case> move_benches() {
  std::vector<Case> benches;
  for (const int64_t width : {768, 3072})
    for (const int64_t n : {50, 1638, 16384})
      benches.push_back({.dims = {{"N", n}, {"M", 16384}, {"B", width}, {"S", 1}}});
  return benches;
}

Case draw_move(Draw& draw) {
  const int64_t rows = draw.size(1, 200000);
  Dims dims{{"N", draw.size(1, rows)}, {"M", rows}, {"B", draw.size(1, 4096)}};
  if (draw.chance(0.5)) dims["S"] = 1;
  return {.dims = dims};
}

Selection given_selection(const char* op, const Tensor& indices, const Tensor& scales, int64_t rows) {
  return {.indices = to_i32(op, "indices", indices), .scales = scales, .rows = rows};
}
RowScale scale_of(const Tensor& scales) {
  return scales.defined() ? RowScale::selection : RowScale::none;
}

std::vector<OpSpec> move_specs() {
  const InputSpec indices{.name = "indices",
                          .shape = "[N], ascending, then M",
                          .differentiable = false,
                          .dtypes = index_dtypes()};
  const InputSpec scales{.name = "scales",
                         .shape = "[N]",
                         .optional = true,
                         .differentiable = false,
                         .dtypes = {DType::f32}};  // as Selection has them, in every dtype of x
  OpSpec gather{
      .name = "gather_selected",
      .summary = "y[n] = x[indices[n]] scales[n]; 0 where indices[n] is M",
      .inputs = {{"x", "[M, ...]"}, indices, scales},
      .outputs = {{"y", "[N, ...]"}},
      .run =
          [](const std::vector<Tensor>& in, const Attrs&) {
            check(in[0].rank() >= 1, "gather_selected: x is ", describe(in[0]),
                  "; expected at least one dimension");
            return std::vector{gather_selected(
                in[0], given_selection("gather_selected", in[1], in[2], in[0].size(0)), scale_of(in[2]))};
          },
      .problem = [](const Dims& d, const Attrs&) { return move_problem(d, true); },
      .cases = move_cases(),
      .benches = move_benches(),
      .sweep = draw_move,
  };
  OpSpec scatter{
      .name = "scatter_selected",
      .summary = "y[indices[n]] = x[n] scales[n], all other rows 0",
      .inputs = {{"x", "[N, ...]"}, indices, scales},
      .attrs = {{"rows", int64_t{1}, "rows of y (M)"}},
      .outputs = {{"y", "[rows, ...]"}},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            const int64_t rows = attrs.integer("rows");
            check(rows >= 0, "scatter_selected: ", rows, " rows; expected 0 or more");
            return std::vector{scatter_selected(
                in[0], given_selection("scatter_selected", in[1], in[2], rows), scale_of(in[2]))};
          },
      .problem =
          [](const Dims& d, const Attrs& attrs) {
            Dims all = d;
            all["M"] = attrs.integer("rows");
            return move_problem(all, false);
          },
      .cases = move_cases(),
      .benches = move_benches(),
      .sweep =
          [](Draw& draw) {
            Case c = draw_move(draw);
            c.attrs.set("rows", c.dims.at("M"));
            c.dims.erase("M");
            return c;
          },
  };
  for (auto* list : {&scatter.cases, &scatter.benches})
    for (Case& c : *list) {
      c.attrs.set("rows", c.dims.at("M"));
      c.dims.erase("M");
    }
  return {gather, scatter};
}

}  // namespace

std::vector<OpSpec> select_specs() {
  std::vector<OpSpec> specs{row_norms_spec(), select_spec()};
  for (OpSpec& spec : move_specs()) specs.push_back(std::move(spec));
  return specs;
}

}  // namespace tessera::ops

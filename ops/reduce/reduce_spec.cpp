#include "ops/op.h"
#include "ops/reduce/reduce.h"

namespace tessera::ops {
namespace {

constexpr int kAll = -100;  // as the attribute "dim" says it

/// The dimensions that "dims" lists, else "dim" alone.
std::vector<int> dims_of(const Attrs& attrs) {
  const std::vector<int64_t> listed = attrs.integers("dims");
  if (listed.empty()) return {attrs.dimension("dim")};
  return {listed.begin(), listed.end()};
}

/// `of_nothing`: with those over no element at all.
std::vector<Case> reduce_cases(bool of_nothing) {
  const Attrs all{{"dim", int64_t{kAll}}}, first{{"dim", int64_t{0}}}, middle{{"dim", int64_t{1}}},
      last{{"dim", int64_t{-1}}}, first_keep{{"dim", int64_t{0}}, {"keep", true}},
      last_keep{{"dim", int64_t{2}}, {"keep", true}};
  std::vector<Case> cases;
  for (const Attrs& attrs : {all, first, middle, last, first_keep, last_keep}) {
    for (const Placement placement : {Placement::pitched, Placement::strided, Placement::transposed}) {
      cases.push_back({.dims = {{"A", 3}, {"B", 5}, {"C", 9}}, .attrs = attrs, .placement = placement});
      cases.push_back({.dims = {{"A", 2}, {"B", 5}, {"C", 13}}, .attrs = attrs, .placement = placement});
      cases.push_back({.dims = {{"A", 3}, {"B", 33}, {"C", 129}},
                       .attrs = attrs,
                       .placement = placement,
                       .gradcheck = false});
    }
    cases.push_back({.dims = {{"A", 1}, {"B", 1}, {"C", 1}}, .attrs = attrs});
    cases.push_back({.dims = {{"A", 1}, {"B", 1031}, {"C", 1}}, .attrs = attrs, .gradcheck = false});
    cases.push_back({.dims = {{"A", 1500}, {"B", 1}, {"C", 8}}, .attrs = attrs, .gradcheck = false});
  }
  // Long enough to be cut into chunks, by columns and by rows.
  for (const Attrs& attrs : {all, first})
    cases.push_back({.dims = {{"A", 1031}, {"B", 1}, {"C", 33}}, .attrs = attrs, .gradcheck = false});
  for (const Attrs& attrs : {all, last})
    cases.push_back({.dims = {{"A", 1}, {"B", 2}, {"C", 8209}}, .attrs = attrs, .gradcheck = false});
  for (const char* const dims : {"0,2", "-1,1", "1,0", "2,0,1"})
    for (const bool keep : {false, true})
      for (const Placement placement : {Placement::pitched, Placement::strided, Placement::transposed})
        cases.push_back({.dims = {{"A", 3}, {"B", 5}, {"C", 9}},
                         .attrs = {{"dims", std::string(dims)}, {"keep", keep}},
                         .placement = placement});
  cases.push_back({.dims = {{"A", 17}, {"B", 33}, {"C", 129}},
                   .attrs = {{"dims", std::string("0,2")}},
                   .gradcheck = false});
  // Two dimensions that do not merge, in chunks; a few long rows.
  for (const char* const dims : {"0,2", "0,1,2"})
    cases.push_back({.dims = {{"A", 40}, {"B", 3}, {"C", 300}},
                     .attrs = {{"dims", std::string(dims)}},
                     .gradcheck = false});
  cases.push_back({.dims = {{"A", 3}, {"B", 2}, {"C", 2003}}, .attrs = first, .gradcheck = false});
  cases.push_back({.dims = {{"A", 0}, {"B", 3}, {"C", 5}}, .attrs = middle});
  cases.push_back({.dims = {{"A", 3}, {"B", 4}, {"C", 0}}, .attrs = first});
  if (of_nothing) {
    cases.push_back({.dims = {{"A", 2}, {"B", 0}, {"C", 5}}, .attrs = middle});
    cases.push_back({.dims = {{"A", 2}, {"B", 5}, {"C", 0}}, .attrs = last});
    cases.push_back({.dims = {{"A", 0}, {"B", 0}, {"C", 0}}, .attrs = all});
  }
  return cases;
}

/// Half of them matrices, else three dimensions.
Dims random_dims(Draw& draw) {
  if (draw.chance(0.5)) return {{"A", draw.size(1, 100000)}, {"B", 1}, {"C", draw.size(1, 100000)}};
  return {{"A", draw.size(1, 3000)}, {"B", draw.size(1, 3000)}, {"C", draw.size(1, 100000)}};
}

/// One dimension, several or all of them.
Case reduce_sweep(Draw& draw) {
  Case drawn{.dims = random_dims(draw)};
  const bool keep = draw.chance(0.5);
  if (draw.chance(0.7)) {
    const int64_t dim = draw.pick({kAll, 0, 1, -1});
    drawn.attrs = {{"dim", dim}, {"keep", keep && dim != kAll}};
  } else {
    const char* const several[] = {"0,1", "0,2", "1,2", "0,1,2"};
    drawn.attrs = {{"dims", std::string(several[draw.below(4)])}, {"keep", keep}};
  }
  return drawn;
}

/// argmax and argmin.
OpSpec index_spec(const char* name, const char* formula, Tensor (*run)(const Tensor&, int, bool, Site)) {
  std::vector<Case> cases;
  for (const int64_t dim : {0, 1, -1})
    for (const Placement placement : {Placement::pitched, Placement::strided, Placement::transposed})
      for (const Dims& dims : {Dims{{"A", 3}, {"B", 5}, {"C", 9}}, Dims{{"A", 3}, {"B", 33}, {"C", 129}},
                               Dims{{"A", 3}, {"B", 2}, {"C", 2003}}})
        cases.push_back({.dims = dims,
                         .attrs = {{"dim", dim}, {"keep", dim == 1}},
                         .placement = placement,
                         .gradcheck = false});
  for (const Dims& dims : {Dims{{"A", 1}, {"B", 1}, {"C", 1}}, Dims{{"A", 1031}, {"B", 1}, {"C", 33}},
                           Dims{{"A", 3}, {"B", 4}, {"C", 0}}, Dims{{"A", 2}, {"B", 1}, {"C", 8209}}})
    cases.push_back(
        {.dims = dims, .attrs = {{"dim", int64_t{dims.at("C") > 33 ? -1 : 0}}}, .gradcheck = false});
  return {
      .name = name,
      .summary = formula,
      .inputs = {{.name = "x", .shape = "[...]", .differentiable = false}},
      .attrs = {{"dim", int64_t{-1}, "dimension to reduce"},
                {"keep", false, "keep that dimension with size 1"}},
      .outputs = {{"index", "x without dim", false, {DType::i64}}},
      .run =
          [run](const std::vector<Tensor>& in, const Attrs& attrs) {
            return std::vector{run(in[0], attrs.dimension("dim"), attrs.flag("keep"), Site::here())};
          },
      .problem =
          [](const Dims& d, const Attrs& attrs) {
            const Shape shape{d.at("A"), d.at("B"), d.at("C")};
            const double n = double(shape.count()),
                         outputs = double(shape.without(attrs.dimension("dim")).count());
            return Problem{.inputs = {{.shape = shape}},
                           .forward_flops = 2 * n,
                           .forward_elements = 2 * n + 2 * outputs,
                           .forward_bytes = 8 * outputs};
          },
      .cases = std::move(cases),
      .benches = {{.dims = {{"A", 36096}, {"B", 1}, {"C", 512}}, .attrs = {{"dim", int64_t{-1}}}},
                  {.dims = {{"A", 36096}, {"B", 1}, {"C", 512}}, .attrs = {{"dim", int64_t{0}}}}},
      .sweep =
          [](Draw& draw) {
            return Case{.dims = random_dims(draw), .attrs = {{"dim", draw.pick({0, 1, -1})}}};
          },
  };
}

}  // namespace

std::vector<OpSpec> reduce_specs() {
  struct Family {
    const char* name;
    Tensor (*all_of)(const Tensor&, Site);
    Tensor (*along)(const Tensor&, const std::vector<int>& dims, bool keep, Site);
    const char* formula;
    double forward_flops, backward_flops, backward_reads;  // an element
    bool of_nothing = true;                                // reduces nothing to something
    Fill fill = Fill::normal;
    double scale = 1;
  };
  // Sums of positive numbers are well conditioned, so that the computed tolerance measures the kernel and not
  // cancellation (tests/ops/reduce_test.cpp adds numbers of both signs exactly); small ones stay in f16's
  // range. The length of a short vector near 0 bends too much for central differences.
  const Family families[] = {
      {"sum", sum, sum, "y = sum of x", 1, 0, 0, true, Fill::positive, 0.25},
      {"mean", mean, mean, "y = sum of x / n", 1, 0, 0, true, Fill::positive, 0.25},
      {"max", max, max, "y = largest x", 1, 1, 1, false},
      {"min", min, min, "y = smallest x", 1, 1, 1, false},
      {"norm", norm, norm, "y = sqrt(sum of x^2)", 2, 2, 1, true, Fill::away_from_0, 4},
      {"logsumexp", logsumexp, logsumexp, "y = ln(sum of e^x)", 4, 3, 1}};
  std::vector<OpSpec> specs;
  for (const Family& family : families) {
    specs.push_back({
        .name = family.name,
        .summary = family.formula,
        .inputs = {{"x", "[...]"}},
        .attrs = {{"dim", int64_t{kAll}, "dimension to reduce; -100: all elements"},
                  {"dims", std::string(), "dimensions to reduce instead, with commas between: 0,2"},
                  {"keep", false, "keep the reduced dimensions with size 1"}},
        .outputs = {{"y", "x without dim, or without dims"}},
        .run =
            [family](const std::vector<Tensor>& in, const Attrs& attrs) {
              const std::vector<int> dims = dims_of(attrs);
              const bool all = dims.front() == kAll, keep = attrs.flag("keep");
              check(!all || !keep, family.name,
                    ": attribute \"keep\": all dimensions are reduced; say which with dim or dims");
              return std::vector{all ? family.all_of(in[0], Site::here())
                                     : family.along(in[0], dims, keep, Site::here())};
            },
        .problem =
            [family](const Dims& d, const Attrs& attrs) {
              const Shape shape{d.at("A"), d.at("B"), d.at("C")};
              const double n = double(shape.count());
              Shape kept = shape;
              for (const int dim : dims_of(attrs)) kept = dim == kAll ? Shape() : kept.with(dim, 1);
              const double outputs = double(kept.count());
              return Problem{.inputs = {{.shape = shape, .fill = family.fill, .scale = family.scale}},
                             .forward_flops = family.forward_flops * n,
                             .backward_flops = family.backward_flops * n,
                             .forward_elements = n + outputs,
                             .backward_elements =
                                 (1 + family.backward_reads) * n + (1 + family.backward_reads) * outputs};
            },
        .cases = reduce_cases(family.of_nothing),
        .benches = {{.dims = {{"A", 36096}, {"B", 1}, {"C", 512}}, .attrs = {{"dim", int64_t{kAll}}}},
                    {.dims = {{"A", 36096}, {"B", 1}, {"C", 512}}, .attrs = {{"dim", int64_t{0}}}},
                    {.dims = {{"A", 36096}, {"B", 1}, {"C", 512}}, .attrs = {{"dim", int64_t{-1}}}},
                    {.dims = {{"A", 36096}, {"B", 1}, {"C", 1365}}, .attrs = {{"dim", int64_t{kAll}}}}},
        .sweep = reduce_sweep,
    });
  }
  specs.push_back(index_spec("argmax", "index = that of the largest x", argmax));
  specs.push_back(index_spec("argmin", "index = that of the smallest x", argmin));
  return specs;
}

}  // namespace tessera::ops

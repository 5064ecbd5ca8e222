#include "ops/op.h"
#include "ops/reduce/reduce_kernels.h"

namespace tessera::ops {
namespace {

constexpr int kAll = -100;  // as the attribute "dim" says it

}  // namespace

namespace {

std::vector<Case> reduce_cases(ReduceKind kind) {
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
  cases.push_back({.dims = {{"A", 0}, {"B", 3}, {"C", 5}}, .attrs = middle});
  cases.push_back({.dims = {{"A", 3}, {"B", 4}, {"C", 0}}, .attrs = first});
  if (kind != ReduceKind::max) {
    cases.push_back({.dims = {{"A", 2}, {"B", 0}, {"C", 5}}, .attrs = middle});
    cases.push_back({.dims = {{"A", 2}, {"B", 5}, {"C", 0}}, .attrs = last});
    cases.push_back({.dims = {{"A", 0}, {"B", 0}, {"C", 0}}, .attrs = all});
  }
  return cases;
}

}  // namespace

std::vector<OpSpec> reduce_specs() {
  struct Family {
    ReduceKind kind;
    Tensor (*all_of)(const Tensor&, Site);
    Tensor (*along)(const Tensor&, int dim, bool keep, Site);
    const char* formula;
    double forward_flops, backward_flops, backward_reads;  // an element
  };
  const Family families[] = {{ReduceKind::sum, sum, sum, "y = sum of x", 1, 0, 0},
                             {ReduceKind::mean, mean, mean, "y = sum of x / n", 1, 0, 0},
                             {ReduceKind::max, max, max, "y = largest x", 1, 1, 1},
                             {ReduceKind::norm, norm, norm, "y = sqrt(sum of x^2)", 2, 2, 1}};
  std::vector<OpSpec> specs;
  for (const auto& [kind, all_of, along, formula, forward_flops, backward_flops, backward_reads] : families) {
    // Sums of positive numbers are well conditioned, so that the computed tolerance measures the kernel and
    // not cancellation (tests/ops/reduce_test.cpp adds numbers of both signs exactly); small ones stay in
    // f16's range. The length of a short vector near 0 bends too much for central differences.
    const bool adds = kind == ReduceKind::sum || kind == ReduceKind::mean, bends = kind == ReduceKind::norm;
    const Fill fill = adds ? Fill::positive : bends ? Fill::away_from_0 : Fill::normal;
    const double scale = adds ? 0.25 : bends ? 4.0 : 1.0;
    specs.push_back({
        .name = name_of(kind),
        .summary = formula,
        .inputs = {{"x", "[...]"}},
        .attrs = {{"dim", int64_t{kAll}, "dimension to reduce; -100: all elements"},
                  {"keep", false, "keep that dimension with size 1"}},
        .outputs = {{"y", "x without dim"}},
        .run =
            [all_of = all_of, along = along](const std::vector<Tensor>& in, const Attrs& attrs) {
              const int dim = attrs.dimension("dim");
              const bool keep = attrs.flag("keep");  // of all: refused by the function of one dimension
              return std::vector{dim == kAll && !keep ? all_of(in[0], Site::here())
                                                      : along(in[0], dim, keep, Site::here())};
            },
        .problem =
            [=, forward_flops = forward_flops, backward_flops = backward_flops,
             backward_reads = backward_reads](const Dims& d, const Attrs& attrs) {
              const Shape shape{d.at("A"), d.at("B"), d.at("C")};
              const int dim = attrs.dimension("dim");
              const double n = double(shape.count());
              const double outputs = dim == kAll ? 1 : double(shape.without(dim).count());
              return Problem{.inputs = {{.shape = shape, .fill = fill, .scale = scale}},
                             .forward_flops = forward_flops * n,
                             .backward_flops = backward_flops * n,
                             .forward_elements = n + outputs,
                             .backward_elements = (1 + backward_reads) * n + (1 + backward_reads) * outputs};
            },
        .cases = reduce_cases(kind),
        .benches = {{.dims = {{"A", 36096}, {"B", 1}, {"C", 512}}, .attrs = {{"dim", int64_t{kAll}}}},
                    {.dims = {{"A", 36096}, {"B", 1}, {"C", 512}}, .attrs = {{"dim", int64_t{0}}}},
                    {.dims = {{"A", 36096}, {"B", 1}, {"C", 512}}, .attrs = {{"dim", int64_t{-1}}}},
                    {.dims = {{"A", 36096}, {"B", 1}, {"C", 1365}}, .attrs = {{"dim", int64_t{kAll}}}}},
        .sweep =
            [](Draw& draw) {
              return Case{.dims = {{"A", draw.size(1, 100000)}, {"B", 1}, {"C", draw.size(1, 100000)}},
                          .attrs = {{"dim", draw.pick({kAll, 0, -1})}}};
            },
    });
  }
  return specs;
}

}  // namespace tessera::ops

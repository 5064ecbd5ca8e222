#include <algorithm>

#include "ops/cumprod/cumprod.h"
#include "ops/op.h"

namespace tessera::ops {

std::vector<OpSpec> cumprod_specs() {
  std::vector<Case> cases;
  for (const int64_t dim : {0, 1, -1}) {
    const Attrs attrs{{"dim", dim}};
    for (const Placement placement : {Placement::pitched, Placement::strided, Placement::transposed}) {
      cases.push_back({.dims = {{"A", 3}, {"B", 4}, {"C", 5}}, .attrs = attrs, .placement = placement});
      cases.push_back({.dims = {{"A", 2}, {"B", 33}, {"C", 65}},
                       .attrs = attrs,
                       .placement = placement,
                       .gradcheck = false});
    }
    cases.push_back({.dims = {{"A", 1}, {"B", 1}, {"C", 1}}, .attrs = attrs});
    cases.push_back({.dims = {{"A", 3}, {"B", 0}, {"C", 5}}, .attrs = attrs});
  }
  for (const int64_t length : {31, 32, 33, 70})  // rounds of a warp on a GPU
    cases.push_back(
        {.dims = {{"A", 5}, {"B", 1}, {"C", length}}, .attrs = {{"dim", int64_t{-1}}}, .gradcheck = false});
  for (const Dims& dims :
       {Dims{{"A", 300}, {"B", 1}, {"C", 5}}, Dims{{"A", 129}, {"B", 2}, {"C", 33}}})  // in chunks
    cases.push_back({.dims = dims, .attrs = {{"dim", int64_t{0}}}, .gradcheck = false});
  return {{
      .name = "cumprod",
      .summary = "y_i = x_0 ... x_i along dim",
      .inputs = {{"x", "[...]"}},
      .attrs = {{"dim", int64_t{-1}, "dimension along which products run"}},
      .outputs = {{"y", "as x"}},
      .run = [](const std::vector<Tensor>& in,
                const Attrs& attrs) { return std::vector{cumprod(in[0], attrs.dimension("dim"))}; },
      .problem =
          [](const Dims& d, const Attrs&) {
            const Shape shape{d.at("A"), d.at("B"), d.at("C")};
            const double n = double(shape.count());
            // Factors around 1, so that products neither vanish nor overflow f16: less than 1 where there are
            // hundreds, so that long ones vanish in the end (ln x is 0 or, where benchmarks draw from
            // [0.5, 2), 0.15 in the mean).
            const bool many = std::max({shape[0], shape[1], shape[2]}) > 100;
            return Problem{.inputs = {{.shape = shape, .fill = Fill::positive, .scale = many ? 0.8 : 1.0}},
                           .forward_flops = n,
                           .backward_flops = 3 * n,
                           .forward_elements = 2 * n,
                           .backward_elements = 4 * n};
          },
      .cases = cases,
      .benches = {{.dims = {{"A", 36096}, {"B", 1}, {"C", 512}}, .attrs = {{"dim", int64_t{-1}}}},
                  {.dims = {{"A", 36096}, {"B", 1}, {"C", 512}}, .attrs = {{"dim", int64_t{0}}}}},
      .sweep =
          [](Draw& draw) {
            const Dims dims{{"A", draw.size(1, 10000)}, {"B", draw.size(1, 30)}, {"C", draw.size(1, 10000)}};
            return Case{.dims = dims, .attrs = {{"dim", draw.pick({0, 1, -1})}}};
          },
      .cpu_extra_ulp = 4,
      .cpu_extra_reason = "backward multiplies by the rounded y, and s is rounded once more",
  }};
}

}  // namespace tessera::ops

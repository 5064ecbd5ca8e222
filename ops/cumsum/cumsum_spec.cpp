#include "ops/cumsum/cumsum.h"
#include "ops/op.h"

namespace tessera::ops {

std::vector<OpSpec> cumsum_specs() {
  std::vector<Case> cases;
  for (const int64_t dim : {0, 1, -1}) {
    const Attrs attrs{{"dim", dim}};
    for (const Placement placement : {Placement::pitched, Placement::strided, Placement::transposed}) {
      cases.push_back({.dims = {{"A", 3}, {"B", 5}, {"C", 9}}, .attrs = attrs, .placement = placement});
      cases.push_back({.dims = {{"A", 2}, {"B", 33}, {"C", 129}},
                       .attrs = attrs,
                       .placement = placement,
                       .gradcheck = false});
    }
    cases.push_back({.dims = {{"A", 1}, {"B", 1}, {"C", 1}}, .attrs = attrs});
    cases.push_back({.dims = {{"A", 7}, {"B", 1}, {"C", 13}}, .attrs = attrs});
    cases.push_back({.dims = {{"A", 3}, {"B", 0}, {"C", 5}}, .attrs = attrs});
    // On a GPU one round of a warp and its neighbours, and lines that are cut into chunks.
    for (const int64_t length : {127, 128, 129, 257})
      cases.push_back({.dims = {{"A", dim == 0 ? length : 2},
                                {"B", dim == 1 ? length : 1},
                                {"C", dim == -1 ? length : 3}},
                       .attrs = attrs,
                       .gradcheck = false});
    cases.push_back(
        {.dims = {{"A", dim == 0 ? 9001 : 2}, {"B", dim == 1 ? 9001 : 1}, {"C", dim == -1 ? 20011 : 3}},
         .attrs = attrs,
         .gradcheck = false});
  }
  cases.push_back(
      {.dims = {{"A", 2}, {"B", 3}, {"C", 16384}}, .attrs = {{"dim", int64_t{2}}}, .gradcheck = false});
  return {{
      .name = "cumsum",
      .summary = "y_i = x_0 + ... + x_i along dim",
      .inputs = {{"x", "[...]"}},
      .attrs = {{"dim", int64_t{-1}, "along which x is summed"}},
      .outputs = {{"y", "as x"}},
      .run = [](const std::vector<Tensor>& in,
                const Attrs& attrs) { return std::vector{cumsum(in[0], attrs.dimension("dim"))}; },
      .problem =
          [](const Dims& d, const Attrs&) {
            const Shape shape{d.at("A"), d.at("B"), d.at("C")};
            const double n = double(shape.count());
            return Problem{.inputs = {{.shape = shape}},
                           .forward_flops = n,
                           .backward_flops = n,
                           .forward_elements = 2 * n,
                           .backward_elements = 2 * n};
          },
      .cases = std::move(cases),
      .benches = {{.dims = {{"A", 36096}, {"B", 1}, {"C", 512}}, .attrs = {{"dim", int64_t{-1}}}},
                  {.dims = {{"A", 36096}, {"B", 1}, {"C", 512}}, .attrs = {{"dim", int64_t{0}}}},
                  {.dims = {{"A", 1}, {"B", 1}, {"C", 16777216}}, .attrs = {{"dim", int64_t{-1}}}}},
      .sweep =
          [](Draw& draw) {
            const int64_t middle = draw.chance(0.5) ? 1 : draw.size(1, 3000);
            return Case{.dims = {{"A", draw.size(1, 100000)}, {"B", middle}, {"C", draw.size(1, 100000)}},
                        .attrs = {{"dim", draw.pick({0, 1, -1})}}};
          },
  }};
}

}  // namespace tessera::ops

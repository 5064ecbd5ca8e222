#include "ops/op.h"
#include "ops/triangle/triangle.h"

namespace tessera::ops {
namespace {

OpSpec triangle_spec(const char* name, const char* summary, Tensor (*run)(const Tensor&, int64_t, Site)) {
  const auto make = [](int64_t b, int64_t r, int64_t c, int64_t diagonal,
                       Placement placement = Placement::pitched, bool gradcheck = true) {
    return Case{.dims = {{"B", b}, {"R", r}, {"C", c}},
                .attrs = {{"diagonal", diagonal}},
                .placement = placement,
                .gradcheck = gradcheck};
  };
  return {
      .name = name,
      .summary = summary,
      .inputs = {{"x", "[..., R, C]"}},
      .attrs = {{"diagonal", int64_t{0}, "the last one that stays; 1: the one above the main one"}},
      .outputs = {{"y", "as x"}},
      .run =
          [run](const std::vector<Tensor>& in, const Attrs& attrs) {
            return std::vector{run(in[0], attrs.integer("diagonal"), Site::here())};
          },
      .problem =
          [](const Dims& d, const Attrs&) {
            const Shape x{d.at("B"), d.at("R"), d.at("C")};
            const double n = double(x.count());
            return Problem{
                .inputs = {{.shape = x}}, .forward_elements = 1.5 * n, .backward_elements = 1.5 * n};
          },
      .cases = {make(1, 7, 7, 0), make(2, 5, 9, 1), make(2, 9, 5, -2), make(1, 1, 1, 0), make(3, 4, 4, -9),
                make(3, 4, 4, 9), make(2, 0, 5, 0), make(2, 5, 0, 0), make(0, 3, 3, 0),
                make(2, 6, 9, 2, Placement::strided), make(2, 6, 9, -1, Placement::transposed),
                make(3, 67, 129, 0, Placement::pitched, false)},
      .benches = {make(16, 1024, 1024, 0)},
      .sweep =
          [make](Draw& draw) {
            const int64_t rows = draw.size(1, 5000), columns = draw.chance(0.5) ? rows : draw.size(1, 5000);
            const int64_t diagonal = draw.chance(0.4) ? 0 : draw.below(rows + columns + 3) - rows - 1;
            return make(draw.size(1, 300), rows, columns, diagonal);
          },
  };
}

}  // namespace

std::vector<OpSpec> triangle_specs() {
  return {triangle_spec("tril", "y = x up to a diagonal, 0 above it", tril),
          triangle_spec("triu", "y = x from a diagonal on, 0 below it", triu)};
}

}  // namespace tessera::ops

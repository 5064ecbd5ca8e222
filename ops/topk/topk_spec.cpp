#include "ops/op.h"
#include "ops/topk/topk.h"

namespace tessera::ops {
namespace {

Case make(int64_t a, int64_t b, int64_t c, int64_t dim, int64_t k, bool gradcheck = true,
          Placement placement = Placement::pitched) {
  return {.dims = {{"A", a}, {"B", b}, {"C", c}},
          .attrs = {{"k", k}, {"dim", dim}},
          .placement = placement,
          .gradcheck = gradcheck};
}

}  // namespace

std::vector<OpSpec> topk_specs() {
  OpSpec op{
      .name = "topk",
      .summary = "the k largest along dim, and their indices",
      .inputs = {{"x", "[...]"}},
      .attrs = {{"k", int64_t{1}, "how many"}, {"dim", int64_t{-1}, "along which they are chosen"}},
      .outputs = {{"values", "[..., k, ...]"}, {"indices", "[..., k, ...]", false, {DType::i64}}},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            const TopK top = topk(in[0], attrs.integer("k"), attrs.dimension("dim"));
            return std::vector{top.values, top.indices};
          },
      .problem =
          [](const Dims& d, const Attrs& attrs) {
            const Shape x{d.at("A"), d.at("B"), d.at("C")};
            const double n = double(x.count()),
                         chosen = double(x.with(attrs.dimension("dim"), attrs.integer("k")).count());
            return Problem{.inputs = {{.shape = x}},
                           .backward_flops = chosen,
                           .forward_elements = n + chosen,
                           .backward_elements = n + chosen,
                           .forward_bytes = 8 * chosen,
                           .backward_bytes = 8 * chosen};
          },
      .cases = {make(1, 1, 1, 0, 1), make(2, 3, 4, -1, 0), make(0, 3, 4, -1, 2), make(3, 0, 4, 0, 2),
                make(5, 1, 1031, -1, 17, false), make(67, 1, 129, -1, 128, false),
                make(1031, 1, 9, 0, 40, false),
                // Rounded to 16 bits many are equal; beyond 1,024 a GPU sorts in device memory.
                make(2, 1, 5003, -1, 1024, false), make(3, 1, 5003, -1, 1025, false),
                make(2, 1, 2049, -1, 2049, false), make(1300, 1, 3, 0, 1300, false, Placement::strided)},
      .benches = {make(36096, 1, 512, -1, 8, false), make(64, 1, 50257, -1, 50, false)},
      .sweep =
          [](Draw& draw) {
            const int64_t length = draw.size(1, 60000);
            return make(draw.size(1, 20000), 1, length, -1, std::min<int64_t>(length, draw.size(1, 256)),
                        false);
          },
  };
  for (const int64_t dim : {0, 1, -1})
    for (const Placement placement : {Placement::pitched, Placement::strided, Placement::transposed}) {
      op.cases.push_back(make(3, 4, 7, dim, 2, true, placement));
      op.cases.push_back(make(4, 4, 4, dim, 4, true, placement));
    }
  return {op};
}

}  // namespace tessera::ops

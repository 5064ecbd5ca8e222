#include "ops/op.h"
#include "ops/rope/rope.h"
#include "ops/sum_dtype.h"

namespace tessera::ops {
namespace {

Problem rope_problem(const Dims& d, const Attrs& attrs) {
  const int64_t batch = d.at("B"), tokens = d.at("T"), heads = d.at("H"), width = d.at("D");
  const double n = double(batch) * double(tokens) * double(heads) * double(width);
  const double table = double(tokens) * double(d.at("R"));
  const bool given = attrs.flag("positions");
  return {.inputs = {{.shape = {batch, tokens, heads, width}},
                     {.shape = {d.at("P"), d.at("R")}},
                     given ? InputCase{.shape = {batch, tokens}, .fill = Fill::index, .high = d.at("P")}
                           : InputCase{.fill = Fill::absent}},
          .forward_flops = 3 * n,
          .backward_flops = 3 * n,
          .forward_elements = 2 * n + table,
          .backward_elements = 2 * n + table};
}

}  // namespace

std::vector<OpSpec> rope_specs() {
  return {{
      .name = "rope",
      .summary = "y = x turned by the angles of its position: [x1 c - x2 s, x2 c + x1 s]",
      .inputs = {{"x", "[B, T, H, D]"},
                 {"table", "[P, R]: R/2 cosines, R/2 sines", false, false},
                 {"positions", "[T] or [B, T]", true, false, index_dtypes()}},
      .attrs = {{"offset", int64_t{0}, "position of the first token, without positions"},
                {"positions", false, "of cases and benchmarks: positions are given"}},
      .outputs = {{"y", "[B, T, H, D]"}},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            const int64_t offset = attrs.integer("offset");
            check(in[2].defined() || !attrs.flag("positions"),
                  "rope: positions=true, but there is no input \"positions\"");
            check(!in[2].defined() || offset == 0, "rope: offset ", offset,
                  " with positions, which already say where the tokens are");
            // One declaration has one dtype: the table comes in x's and becomes the one that rope wants.
            const Tensor table = in[1].detach().to(sum_dtype(in[0].dtype()));
            return std::vector{in[2].defined() ? rope(in[0], table, in[2]) : rope(in[0], table, offset)};
          },
      .problem = rope_problem,
      .cases = {{.dims = {{"B", 2}, {"T", 3}, {"H", 2}, {"D", 6}, {"R", 6}, {"P", 3}}},
                {.dims = {{"B", 1}, {"T", 1}, {"H", 1}, {"D", 2}, {"R", 2}, {"P", 1}}},
                {.dims = {{"B", 2}, {"T", 0}, {"H", 2}, {"D", 4}, {"R", 4}, {"P", 0}}},
                {.dims = {{"B", 2}, {"T", 3}, {"H", 2}, {"D", 5}, {"R", 0}, {"P", 4}}},
                // Half of each head turned; from a later position.
                {.dims = {{"B", 1}, {"T", 4}, {"H", 3}, {"D", 16}, {"R", 8}, {"P", 11}},
                 .attrs = {{"offset", int64_t{7}}}},
                {.dims = {{"B", 3}, {"T", 5}, {"H", 2}, {"D", 8}, {"R", 8}, {"P", 9}},
                 .attrs = {{"positions", true}}},
                {.dims = {{"B", 2}, {"T", 4}, {"H", 3}, {"D", 16}, {"R", 16}, {"P", 7}},
                 .placement = Placement::strided},
                {.dims = {{"B", 2}, {"T", 4}, {"H", 3}, {"D", 16}, {"R", 16}, {"P", 7}},
                 .placement = Placement::transposed},
                {.dims = {{"B", 2}, {"T", 4}, {"H", 3}, {"D", 16}, {"R", 12}, {"P", 7}},
                 .attrs = {{"positions", true}},
                 .placement = Placement::strided},
                {.dims = {{"B", 2}, {"T", 67}, {"H", 5}, {"D", 128}, {"R", 128}, {"P", 100}},
                 .attrs = {{"offset", int64_t{33}}},
                 .gradcheck = false},
                {.dims = {{"B", 3}, {"T", 129}, {"H", 7}, {"D", 64}, {"R", 64}, {"P", 129}},
                 .attrs = {{"positions", true}},
                 .gradcheck = false}},
      .benches = {{.dims = {{"B", 1}, {"T", 4096}, {"H", 64}, {"D", 128}, {"R", 128}, {"P", 4096}}}},
      .sweep =
          [](Draw& draw) {
            const int64_t width = draw.chance(0.5) ? draw.pick({64, 128}) : draw.size(1, 300);
            const int64_t turned = 2 * (draw.chance(0.5) ? width / 2 : draw.below(width / 2 + 1));
            const int64_t tokens = draw.size(1, 8192), offset = draw.chance(0.5) ? 0 : draw.size(1, 500);
            const bool positions = draw.chance(0.3);
            Case drawn{.dims = {{"B", draw.size(1, 64)},
                                {"T", tokens},
                                {"H", draw.size(1, 64)},
                                {"D", width},
                                {"R", turned},
                                {"P", tokens + offset + draw.below(100)}}};
            if (positions)
              drawn.attrs = {{"positions", true}};
            else
              drawn.attrs = {{"offset", offset}};
            return drawn;
          },
  }};
}

}  // namespace tessera::ops

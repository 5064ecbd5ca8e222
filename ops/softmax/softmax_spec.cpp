#include "ops/op.h"
#include "ops/softmax/softmax.h"

namespace tessera::ops {
namespace {

Problem softmax_problem(const Dims& d, const Attrs&) {
  Shape shape{d.at("R"), d.at("C")};
  if (d.contains("S")) shape = shape.inserted(2, d.at("S"));
  const double n = double(shape.count());
  // Maximum, difference, exponential, sum and quotient; backward a product, a sum, a difference, a product.
  return {.inputs = {{.shape = shape, .scale = 2}},
          .forward_flops = 5 * n,
          .backward_flops = 4 * n,
          .forward_elements = 2 * n,
          .backward_elements = 3 * n};
}

std::vector<Case> softmax_cases() {
  return {{.dims = {{"R", 7}, {"C", 13}}},
          {.dims = {{"R", 1}, {"C", 1}}},
          {.dims = {{"R", 3}, {"C", 1}}},
          {.dims = {{"R", 0}, {"C", 5}}},
          {.dims = {{"R", 5}, {"C", 0}}},
          {.dims = {{"R", 9}, {"C", 129}}, .placement = Placement::strided},
          {.dims = {{"R", 17}, {"C", 11}}, .placement = Placement::transposed},
          {.dims = {{"R", 11}, {"C", 5}}, .attrs = {{"dim", int64_t{0}}}},
          {.dims = {{"R", 5}, {"C", 7}, {"S", 3}}, .attrs = {{"dim", int64_t{1}}}},
          {.dims = {{"R", 3}, {"C", 7}, {"S", 4}},
           .attrs = {{"dim", int64_t{-2}}},
           .placement = Placement::strided},
          {.dims = {{"R", 4}, {"C", 3}, {"S", 5}},
           .attrs = {{"dim", int64_t{0}}},
           .placement = Placement::transposed},
          // The ends of the kernel's rows: a warp's registers, a block's, and rows longer than both.
          {.dims = {{"R", 9}, {"C", 127}}, .gradcheck = false},
          {.dims = {{"R", 9}, {"C", 257}}, .gradcheck = false},
          {.dims = {{"R", 65}, {"C", 1024}}, .gradcheck = false},
          {.dims = {{"R", 5}, {"C", 1025}}, .gradcheck = false},
          {.dims = {{"R", 3}, {"C", 4097}}, .gradcheck = false},
          {.dims = {{"R", 3}, {"C", 8193}}, .gradcheck = false},
          {.dims = {{"R", 2}, {"C", 16411}}, .placement = Placement::strided, .gradcheck = false},
          {.dims = {{"R", 3}, {"C", 67}, {"S", 129}}, .attrs = {{"dim", int64_t{1}}}, .gradcheck = false},
          // Narrow rows of a few lanes each; one more than whole packs.
          {.dims = {{"R", 67}, {"C", 9}}},
          {.dims = {{"R", 131}, {"C", 17}}, .placement = Placement::strided, .gradcheck = false},
          {.dims = {{"R", 65}, {"C", 33}}, .gradcheck = false},
          {.dims = {{"R", 33}, {"C", 66}}, .gradcheck = false},
          {.dims = {{"R", 9}, {"C", 255}}, .gradcheck = false},
          // Trailing dimensions of size one: rows that start anywhere, of every kernel.
          {.dims = {{"R", 7}, {"C", 3}, {"S", 1}}, .attrs = {{"dim", int64_t{1}}}},
          {.dims = {{"R", 9}, {"C", 13}, {"S", 1}},
           .attrs = {{"dim", int64_t{1}}},
           .placement = Placement::strided},
          {.dims = {{"R", 17}, {"C", 251}, {"S", 1}}, .attrs = {{"dim", int64_t{1}}}, .gradcheck = false},
          {.dims = {{"R", 9}, {"C", 1019}, {"S", 1}}, .attrs = {{"dim", int64_t{1}}}, .gradcheck = false},
          {.dims = {{"R", 9}, {"C", 8187}, {"S", 1}}, .attrs = {{"dim", int64_t{1}}}, .gradcheck = false},
          {.dims = {{"R", 3}, {"C", 10678}, {"S", 1}}, .attrs = {{"dim", int64_t{1}}}, .gradcheck = false},
          {.dims = {{"R", 5}, {"C", 17683}, {"S", 1}}, .attrs = {{"dim", int64_t{1}}}, .gradcheck = false},
          // Lines side by side: in packs and one by one, held and read twice, one part and many.
          {.dims = {{"R", 37}, {"C", 3}, {"S", 1843}}, .attrs = {{"dim", int64_t{1}}}, .gradcheck = false},
          {.dims = {{"R", 5}, {"C", 2050}, {"S", 11}}, .attrs = {{"dim", int64_t{1}}}, .gradcheck = false},
          {.dims = {{"R", 3}, {"C", 613}, {"S", 77}}, .attrs = {{"dim", int64_t{1}}}, .gradcheck = false},
          {.dims = {{"R", 9}, {"C", 2111}, {"S", 5}}, .attrs = {{"dim", int64_t{1}}}, .gradcheck = false},
          {.dims = {{"R", 63}, {"C", 19}, {"S", 40}},
           .attrs = {{"dim", int64_t{1}}},
           .placement = Placement::strided,
           .gradcheck = false}};
}

}  // namespace

std::vector<OpSpec> softmax_specs() {
  std::vector<OpSpec> specs;
  for (const bool log : {false, true}) {
    specs.push_back({
        .name = log ? "log_softmax" : "softmax",
        .summary = log ? "y = x - log(sum(exp(x))) along dim" : "y = exp(x) / sum(exp(x)) along dim",
        .inputs = {{"x", "[...]"}},
        .attrs = {{"dim", int64_t{-1}, "the dimension that is normalised; negative: from the end"}},
        .outputs = {{"y", "as x"}},
        .run =
            [log](const std::vector<Tensor>& in, const Attrs& attrs) {
              const int dim = attrs.dimension("dim");
              return std::vector{log ? log_softmax(in[0], dim) : softmax(in[0], dim)};
            },
        .problem = softmax_problem,
        .cases = softmax_cases(),
        .benches = {{.dims = {{"R", 32768}, {"C", 4096}}},
                    {.dims = {{"R", 64}, {"C", 512}, {"S", 512}}, .attrs = {{"dim", int64_t{1}}}}},
        .sweep =
            [](Draw& draw) {
              Case c{.dims = {{"R", draw.size(1, 300000)}, {"C", draw.size(1, 50304)}}};
              if (!draw.chance(0.25)) return c;
              c.dims["S"] = draw.size(1, 4096);
              c.attrs.set("dim", int64_t{1});
              return c;
            },
        .tolerance_factor_f32 = 4,
        .tolerance_reason =
            "the CPU sums in f64 and its exp is right to half an ulp; the GPU's is right to two",
    });
  }
  return specs;
}

}  // namespace tessera::ops

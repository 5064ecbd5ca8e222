#include "ops/dropout/dropout.h"
#include "ops/op.h"

namespace tessera::ops {

std::vector<OpSpec> dropout_specs() {
  const auto attrs = [](double p, int64_t seed) { return Attrs{{"p", p}, {"seed", seed}}; };
  return {{
      .name = "dropout",
      .summary = "y = x / (1 - p), or 0 with probability p",
      .inputs = {{"x", "[...]"}},
      .attrs = {{"p", 0.1, "probability of 0, in [0, 1)"}, {"seed", int64_t{0}, "of the random numbers"}},
      .outputs = {{"y", "as x"}},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            SeededRng random(attrs.integer("seed"));
            return std::vector{dropout(in[0], attrs.number("p"), random.rng())};
          },
      .seed = "seed",
      .problem =
          [](const Dims& d, const Attrs&) {
            const double n = double(d.at("R")) * double(d.at("C"));
            return Problem{.inputs = {{.shape = {d.at("R"), d.at("C")}}},
                           .forward_flops = n,
                           .backward_flops = n,
                           .forward_elements = 2 * n,
                           .backward_elements = 2 * n};
          },
      .cases = {{.dims = {{"R", 7}, {"C", 13}}, .attrs = attrs(0.5, 1)},
                {.dims = {{"R", 7}, {"C", 13}}, .attrs = attrs(0, 1)},
                {.dims = {{"R", 4}, {"C", 16}}, .attrs = attrs(0.9, 2)},
                {.dims = {{"R", 1}, {"C", 1}}, .attrs = attrs(0.1, 3)},
                {.dims = {{"R", 0}, {"C", 5}}},
                {.dims = {{"R", 5}, {"C", 0}}},
                {.dims = {{"R", 3}, {"C", 129}}, .attrs = attrs(0.3, 4), .placement = Placement::strided},
                {.dims = {{"R", 17}, {"C", 11}}, .attrs = attrs(0.3, 5), .placement = Placement::transposed},
                {.dims = {{"R", 67}, {"C", 1365}}, .attrs = attrs(0.1, 6), .gradcheck = false},
                {.dims = {{"R", 130}, {"C", 512}}, .attrs = attrs(0.1, -7), .gradcheck = false}},
      .benches = {{.dims = {{"R", 36096}, {"C", 512}}, .attrs = attrs(0.1, 0)},
                  {.dims = {{"R", 36096}, {"C", 1365}}, .attrs = attrs(0.1, 0)}},
      .sweep =
          [attrs](Draw& draw) {
            return Case{.dims = {{"R", draw.size(1, 300000)}, {"C", draw.size(1, 20000)}},
                        .attrs = attrs(0.1, 7)};
          },
  }};
}

}  // namespace tessera::ops

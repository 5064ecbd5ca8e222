#include "ops/activation/activation.h"
#include "ops/op.h"

namespace tessera::ops {

std::vector<OpSpec> activation_specs() {
  const std::pair<Activation, const char*> kinds[] = {
      {Activation::relu, "y = max(x, 0)"},
      {Activation::relu_squared, "y = max(x, 0)^2"},
      {Activation::silu, "y = x / (1 + exp(-x))"},
      {Activation::gelu, "y = x Phi(x), by erf"},
      {Activation::gelu_tanh, "y = x Phi(x), by the tanh approximation"}};
  std::vector<OpSpec> specs;
  for (const auto& [kind, formula] : kinds) {
    const bool kinked = kind == Activation::relu;
    specs.push_back({
        .name = name_of(kind),
        .summary = formula,
        .inputs = {{"x", "[...]"}},
        .outputs = {{"y", "as x"}},
        .run = [kind = kind](const std::vector<Tensor>& in,
                             const Attrs&) { return std::vector{activation(in[0], kind)}; },
        .problem =
            [kinked](const Dims& d, const Attrs&) {
              const double n = double(d.at("R")) * double(d.at("C"));
              return Problem{.inputs = {{.shape = {d.at("R"), d.at("C")},
                                         .fill = kinked ? Fill::away_from_0 : Fill::normal,
                                         .scale = 2}},
                             .forward_flops = n,
                             .backward_flops = n,
                             .forward_elements = 2 * n,
                             .backward_elements = 3 * n};
            },
        .cases = {{.dims = {{"R", 7}, {"C", 13}}},
                  {.dims = {{"R", 1}, {"C", 1}}},
                  {.dims = {{"R", 0}, {"C", 5}}},
                  {.dims = {{"R", 5}, {"C", 0}}},
                  {.dims = {{"R", 3}, {"C", 129}}, .placement = Placement::strided},
                  {.dims = {{"R", 17}, {"C", 11}}, .placement = Placement::transposed},
                  {.dims = {{"R", 257}, {"C", 1365}}, .gradcheck = false}},
        .benches = {{.dims = {{"R", 36096}, {"C", 1365}}}},
        .sweep =
            [](Draw& draw) {
              return Case{.dims = {{"R", draw.size(1, 300000)}, {"C", draw.size(1, 20000)}}};
            },
    });
  }
  return specs;
}

}  // namespace tessera::ops

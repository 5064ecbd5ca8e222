#include "ops/gmm_nll/gmm_nll.h"
#include "ops/op.h"

namespace tessera::ops {
namespace {

Problem gmm_nll_problem(const Dims& d, const Attrs&) {
  const int64_t count = d.at("T"), components = d.at("K");
  const double n = double(count) * double(components);
  return {.inputs = {{.shape = {count, components, 3}, .scale = 0.7}, {.shape = {count}}},
          // A component: three exponentials and ten operations; backward those again and twelve more.
          .forward_flops = 13 * n,
          .backward_flops = 28 * n,
          .forward_elements = 3 * n + double(count),
          .backward_elements = 6 * n + 2 * double(count)};
}

}  // namespace

std::vector<OpSpec> gmm_nll_specs() {
  const auto reduced = [](const char* word) { return Attrs{{"reduction", std::string(word)}}; };
  return {{
      .name = "gmm_nll",
      .summary = "-log sum_k softmax(w)_k N(y; mu_k, exp(s_k)), with params_k = (w, mu, s)",
      .inputs = {{"params", "[..., K, 3]"}, {"y", "[...]"}},
      .attrs = {{"reduction", std::string("mean"), "how the losses become one", {"mean", "sum", "none"}}},
      .outputs = {{.name = "loss", .shape = "[] or as y", .dtypes = sum_dtypes()}},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            return std::vector{gmm_nll(in[0], in[1], parse_reduction(attrs.word("reduction")))};
          },
      .problem = gmm_nll_problem,
      .cases = {{.dims = {{"T", 7}, {"K", 10}}},
                {.dims = {{"T", 5}, {"K", 3}}, .attrs = reduced("none")},
                {.dims = {{"T", 11}, {"K", 2}}, .attrs = reduced("sum")},
                {.dims = {{"T", 1}, {"K", 1}}},
                {.dims = {{"T", 6}, {"K", 1}}, .attrs = reduced("none")},
                {.dims = {{"T", 0}, {"K", 4}}, .attrs = reduced("none")},
                {.dims = {{"T", 0}, {"K", 4}}, .attrs = reduced("sum")},
                {.dims = {{"T", 5}, {"K", 4}}, .attrs = reduced("none"), .placement = Placement::strided},
                {.dims = {{"T", 5}, {"K", 4}}, .placement = Placement::transposed},
                // A warp works on 32 elements; kernels hold up to 4, 10 or 20 components in registers, more
                // components are a warp's.
                {.dims = {{"T", 127}, {"K", 10}}, .gradcheck = false},
                {.dims = {{"T", 97}, {"K", 7}}, .attrs = reduced("none"), .gradcheck = false},
                {.dims = {{"T", 64}, {"K", 20}}, .attrs = reduced("sum"), .gradcheck = false},
                {.dims = {{"T", 33}, {"K", 21}}, .attrs = reduced("none"), .gradcheck = false},
                {.dims = {{"T", 31}, {"K", 13}}, .gradcheck = false},
                {.dims = {{"T", 257}, {"K", 10}}, .attrs = reduced("none"), .gradcheck = false},
                {.dims = {{"T", 128}, {"K", 31}}, .gradcheck = false},
                {.dims = {{"T", 131}, {"K", 32}}, .attrs = reduced("sum"), .gradcheck = false},
                {.dims = {{"T", 130}, {"K", 67}}, .attrs = reduced("none"), .gradcheck = false},
                // More tiles than warps are on the GPU at once.
                {.dims = {{"T", 135169}, {"K", 1}}, .gradcheck = false}},
      .benches = {{.dims = {{"T", 32000}, {"K", 10}}},
                  {.dims = {{"T", 1048576}, {"K", 10}}},
                  {.dims = {{"T", 8388608}, {"K", 10}}}},
      .sweep =
          [](Draw& draw) {
            const int64_t components = draw.chance(0.5) ? 10 : draw.size(1, 64);
            return Case{.dims = {{"T", draw.size(1, 4000000)}, {"K", components}}};
          },
  }};
}

}  // namespace tessera::ops

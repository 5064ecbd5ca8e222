#include "ops/op.h"
#include "ops/swiglu/swiglu.h"

namespace tessera::ops {
namespace {

OpSpec spec(const char* name, const char* summary, bool packed) {
  OpSpec op{
      .name = name,
      .summary = summary,
      .outputs = {{"y", "[..., F]"}},
      .run = [packed](const std::vector<Tensor>& in,
                      const Attrs&) { return std::vector{packed ? swiglu(in[0]) : swiglu(in[0], in[1])}; },
      .problem =
          [packed](const Dims& d, const Attrs&) {
            const int64_t rows = d.at("R"), width = d.at("F");
            const double n = double(rows) * double(width);
            Problem problem{.forward_flops = 2 * n,
                            .backward_flops = 3 * n,
                            .forward_elements = 3 * n,
                            .backward_elements = 5 * n};
            problem.inputs.push_back({.shape = {rows, packed ? 2 * width : width}, .scale = 2});
            if (!packed) problem.inputs.push_back({.shape = {rows, width}});
            return problem;
          },
      .cases = {{.dims = {{"R", 7}, {"F", 13}}},
                {.dims = {{"R", 1}, {"F", 1}}},
                {.dims = {{"R", 0}, {"F", 5}}},
                {.dims = {{"R", 5}, {"F", 0}}},
                {.dims = {{"R", 3}, {"F", 129}}, .placement = Placement::strided},
                {.dims = {{"R", 17}, {"F", 11}}, .placement = Placement::transposed},
                {.dims = {{"R", 257}, {"F", 1365}}, .gradcheck = false},
                {.dims = {{"R", 64}, {"F", 1024}}, .gradcheck = false}},
      .benches = {{.dims = {{"R", 4096}, {"F", 11008}}}},
      .sweep =
          [](Draw& draw) {
            return Case{.dims = {{"R", draw.size(1, 200000)}, {"F", draw.size(1, 20000)}}};
          },
  };
  if (packed)
    op.inputs = {{"x", "[..., 2F]"}};
  else
    op.inputs = {{"gate", "[..., F]"}, {"up", "[..., F]"}};
  return op;
}

}  // namespace

std::vector<OpSpec> swiglu_specs() {
  return {spec("swiglu", "y = silu(gate) up", false),
          spec("swiglu_packed", "y = silu(x[..., :F]) x[..., F:]", true)};
}

}  // namespace tessera::ops

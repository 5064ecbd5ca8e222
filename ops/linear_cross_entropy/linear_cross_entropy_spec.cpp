#include <cmath>

#include "ops/linear_cross_entropy/linear_cross_entropy_kernels.h"
#include "ops/op.h"

namespace tessera::ops {
namespace {

LinearCrossEntropyOptions linear_cross_entropy_options(const Attrs& attrs) {
  return {.ignore_index = attrs.integer("ignore_index"),
          .label_smoothing = attrs.number("label_smoothing"),
          .reduction = parse_reduction(attrs.word("reduction")),
          .chunk = attrs.integer("chunk")};
}

/// N tokens of d features, V classes. The scale of the weight keeps logits near N(0, 4).
Problem linear_cross_entropy_problem(const Dims& d, const Attrs& attrs) {
  const int64_t tokens = d.at("N"), width = d.at("d"), classes = d.at("V");
  const double n = double(tokens), w = double(width), v = double(classes), logits = n * v;
  return {.inputs = {{.shape = {tokens, width}},
                     {.shape = {classes, width}, .scale = 2 / std::sqrt(std::max(w, 1.0))},
                     {.shape = {tokens},
                      .fill = Fill::index,
                      .high = classes,
                      .ignore = attrs.integer("ignore_index")},
                     {.shape = {classes}, .fill = d.at("bias") ? Fill::normal : Fill::absent}},
          .forward_flops = 2 * logits * w,
          .backward_flops = 4 * logits * w,
          .forward_elements = n * w + v * w,
          .backward_elements = n * w + v * w};
}

std::vector<Case> linear_cross_entropy_cases() {
  const auto dims = [](int64_t tokens, int64_t width, int64_t classes, int64_t bias) {
    return Dims{{"N", tokens}, {"d", width}, {"V", classes}, {"bias", bias}};
  };
  const auto options = [](const char* word, double smoothing, int64_t chunk) {
    return Attrs{{"reduction", std::string(word)}, {"label_smoothing", smoothing}, {"chunk", chunk}};
  };
  return {{.dims = dims(11, 5, 7, 0)},
          {.dims = dims(11, 5, 7, 1)},
          {.dims = dims(11, 5, 7, 1), .attrs = options("mean", 0, 4)},
          {.dims = dims(11, 5, 7, 0), .attrs = options("mean", 0, 4)},
          {.dims = dims(9, 4, 6, 1), .attrs = options("sum", 0.1, 0)},
          {.dims = dims(9, 4, 6, 0), .attrs = options("sum", 0, 3)},
          {.dims = dims(7, 3, 5, 0), .attrs = options("none", 0, 0)},
          {.dims = dims(7, 3, 5, 1), .attrs = options("none", 0.3, 2)},
          {.dims = dims(6, 3, 4, 0), .attrs = {{"ignore_index", int64_t{2}}}},
          {.dims = dims(1, 1, 1, 0), .attrs = options("sum", 0, 0)},
          {.dims = dims(3, 2, 1, 1), .attrs = options("sum", 0, 0)},
          {.dims = dims(0, 3, 5, 1), .attrs = options("sum", 0, 0)},
          {.dims = dims(0, 3, 0, 0), .attrs = options("none", 0, 0)},
          {.dims = dims(3, 0, 4, 1), .attrs = options("sum", 0, 0)},
          {.dims = dims(5, 4, 7, 1), .placement = Placement::strided},
          {.dims = dims(5, 4, 7, 0), .placement = Placement::strided},
          {.dims = dims(6, 5, 8, 0), .placement = Placement::transposed},
          // The fewest features and classes that variant wgmma takes.
          {.dims = dims(5, 8, 8, 0), .attrs = options("sum", 0, 2), .gradcheck = false},
          // Tiles of 128 x 192 and one more of either, several chunks, a wide vocabulary.
          {.dims = dims(129, 64, 193, 0), .gradcheck = false},
          {.dims = dims(127, 65, 191, 0), .attrs = options("none", 0, 64), .gradcheck = false},
          {.dims = dims(300, 40, 1001, 0), .attrs = options("sum", 0, 128), .gradcheck = false},
          {.dims = dims(300, 40, 1001, 1), .attrs = options("mean", 0.1, 128), .gradcheck = false},
          {.dims = dims(65, 128, 5003, 0), .gradcheck = false},
          {.dims = dims(3, 96, 50257, 0), .gradcheck = false}};
}

}  // namespace

std::vector<OpSpec> linear_cross_entropy_specs() {
  OpSpec spec;
  spec.name = "linear_cross_entropy";
  spec.summary = "cross_entropy(x weight^T + bias, targets), whose logits are never there as a whole";
  spec.inputs = {{"x", "[..., d]"},
                 {"weight", "[V, d]"},
                 {"targets", "[...]", false, false, index_dtypes()},
                 {"bias", "[V]", true}};
  spec.attrs = {{"ignore_index", int64_t{-100}, "targets of this value do not count"},
                {"label_smoothing", 0.0, "probability spread evenly over the classes"},
                {"reduction", std::string("mean"), "how the losses become one", {"mean", "sum", "none"}},
                {"chunk", int64_t{0}, "tokens whose logits exist at once; 0: as many as take 1 GiB"}};
  spec.outputs = {{.name = "loss", .shape = "[] or as targets", .dtypes = sum_dtypes()}};
  spec.honours_f32_math = true;
  spec.tolerance_factor_f32 = 8;
  spec.tolerance_reason = "as linear: one long f32 chain on the GPU, blocks on the CPU";
  spec.variants = linear_cross_entropy_variants();
  spec.variant_dtypes = {{DType::bf16}, {}};
  spec.run = [](const std::vector<Tensor>& in, const Attrs& attrs) {
    return std::vector{linear_cross_entropy(in[0], in[1], in[2], in[3], linear_cross_entropy_options(attrs))};
  };
  spec.problem = linear_cross_entropy_problem;
  spec.cases = linear_cross_entropy_cases();
  spec.benches = {{.dims = {{"N", 65536}, {"d", 768}, {"V", 50257}, {"bias", 0}}},
                  {.dims = {{"N", 8192}, {"d", 4096}, {"V", 32000}, {"bias", 0}}}};
  spec.sweep = [](Draw& draw) {
    return Case{.dims = {{"N", draw.size(1, 65536)},
                         {"d", draw.size(1, 4096)},
                         {"V", draw.size(2, 150000)},
                         {"bias", draw.chance(0.2)}}};
  };
  return {std::move(spec)};
}

}  // namespace tessera::ops

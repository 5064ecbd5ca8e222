#include "ops/cross_entropy/cross_entropy.h"
#include "ops/op.h"
#include "ops/pointwise/pointwise.h"

namespace tessera::ops {
namespace {

CrossEntropyOptions cross_entropy_options(const Attrs& attrs) {
  return {.ignore_index = attrs.integer("ignore_index"),
          .label_smoothing = attrs.number("label_smoothing"),
          .reduction = parse_reduction(attrs.word("reduction")),
          .overwrite_logits = attrs.flag("overwrite_logits")};
}

Problem cross_entropy_problem(const Dims& d, const Attrs& attrs) {
  const int64_t rows = d.at("R"), classes = d.at("V");
  const double n = double(rows) * double(classes);
  return {.inputs = {{.shape = {rows, classes}, .scale = 2},
                     {.shape = {rows},
                      .fill = Fill::index,
                      .high = classes,
                      .ignore = attrs.integer("ignore_index")}},
          // Maximum, difference, exponential and sum; backward a difference, an exponential and a product.
          .forward_flops = 4 * n,
          .backward_flops = 4 * n,
          .forward_elements = n,
          .backward_elements = 2 * n};
}

std::vector<Case> cross_entropy_cases() {
  const auto options = [](const char* word, double smoothing) {
    return Attrs{{"reduction", std::string(word)}, {"label_smoothing", smoothing}};
  };
  const auto over = [&](const char* word, double smoothing) {
    Attrs attrs = options(word, smoothing);
    attrs.set("overwrite_logits", true);
    return attrs;
  };
  return {{.dims = {{"R", 11}, {"V", 7}}},
          {.dims = {{"R", 5}, {"V", 13}}, .attrs = options("none", 0)},
          {.dims = {{"R", 9}, {"V", 6}}, .attrs = options("sum", 0.1)},
          {.dims = {{"R", 17}, {"V", 5}}, .attrs = options("mean", 0.3)},
          {.dims = {{"R", 4}, {"V", 3}}, .attrs = options("none", 1)},
          {.dims = {{"R", 8}, {"V", 5}}, .attrs = {{"ignore_index", int64_t{2}}}},
          {.dims = {{"R", 3}, {"V", 1}}, .attrs = options("none", 0.1)},
          {.dims = {{"R", 0}, {"V", 5}}, .attrs = options("sum", 0)},
          {.dims = {{"R", 0}, {"V", 0}}, .attrs = options("none", 0)},
          {.dims = {{"R", 9}, {"V", 17}}, .attrs = options("mean", 0.1), .placement = Placement::strided},
          {.dims = {{"R", 13}, {"V", 10}}, .placement = Placement::transposed},
          // Rows of 4 and 8 lanes, of a warp, of a block, of a large one.
          {.dims = {{"R", 33}, {"V", 1024}}, .gradcheck = false},
          {.dims = {{"R", 9}, {"V", 1025}}, .attrs = options("none", 0.1), .gradcheck = false},
          {.dims = {{"R", 3}, {"V", 50304}}, .attrs = options("sum", 0.1), .gradcheck = false},
          {.dims = {{"R", 2}, {"V", 20011}}, .attrs = options("mean", 0), .gradcheck = false},
          {.dims = {{"R", 1031}, {"V", 3}}, .attrs = options("mean", 0), .gradcheck = false},
          {.dims = {{"R", 131}, {"V", 37}}, .attrs = options("mean", 0.1), .gradcheck = false},
          {.dims = {{"R", 67}, {"V", 251}}, .attrs = options("none", 0), .gradcheck = false},
          // In place: rows of a warp and of blocks, longer than shared memory, not aligned, ignored ones.
          {.dims = {{"R", 9}, {"V", 7}}, .attrs = over("mean", 0.1)},
          {.dims = {{"R", 6}, {"V", 11}}, .attrs = over("sum", 0)},
          {.dims = {{"R", 1}, {"V", 1}}, .attrs = over("mean", 0)},
          {.dims = {{"R", 0}, {"V", 5}}, .attrs = over("sum", 0)},
          {.dims = {{"R", 301}, {"V", 1001}}, .attrs = over("mean", 0.1), .gradcheck = false},
          {.dims = {{"R", 5}, {"V", 9001}}, .attrs = over("sum", 0.1), .gradcheck = false},
          {.dims = {{"R", 3}, {"V", 50304}}, .attrs = over("mean", 0), .gradcheck = false},
          {.dims = {{"R", 2}, {"V", 130003}}, .attrs = over("mean", 0.1), .gradcheck = false},
          {.dims = {{"R", 9}, {"V", 3}},
           .attrs = {{"ignore_index", int64_t{1}}, {"overwrite_logits", true}},
           .gradcheck = false}};
}

}  // namespace

std::vector<OpSpec> cross_entropy_specs() {
  return {{
      .name = "cross_entropy",
      .summary = "-(1 - e) log p_t - (e / V) sum_v log p_v, with p = softmax(logits), e = label_smoothing",
      .inputs = {{"logits", "[..., V]"}, {"targets", "[...]", false, false, index_dtypes()}},
      .attrs = {{"ignore_index", int64_t{-100}, "targets of this value do not count"},
                {"label_smoothing", 0.0, "probability spread evenly over the classes"},
                {"reduction", std::string("mean"), "how the losses become one", {"mean", "sum", "none"}},
                {"overwrite_logits", false, "write the gradient over the logits (here: over a copy)"}},
      .outputs = {{.name = "loss", .shape = "[] or as targets", .dtypes = sum_dtypes()}},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            const CrossEntropyOptions options = cross_entropy_options(attrs);
            return std::vector{
                cross_entropy(options.overwrite_logits ? scale(in[0], 1.0) : in[0], in[1], options)};
          },
      .problem = cross_entropy_problem,
      .cases = cross_entropy_cases(),
      .benches = {{.dims = {{"R", 8192}, {"V", 50304}}}},
      .sweep =
          [](Draw& draw) {
            return Case{.dims = {{"R", draw.size(1, 65536)}, {"V", draw.size(2, 150000)}}};
          },
  }};
}

}  // namespace tessera::ops

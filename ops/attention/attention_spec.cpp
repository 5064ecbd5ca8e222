#include <algorithm>

#include "ops/attention/attention.h"
#include "ops/attention/attention_rows.h"
#include "ops/op.h"

/// The declaration of attention: its problem, cases and benchmarks.

namespace tessera::ops {
namespace {

int64_t size_or(const Dims& dims, const char* name, int64_t fallback) {
  const auto found = dims.find(name);
  return found == dims.end() ? fallback : found->second;
}

/// Lengths: Lq and Lk, or, as a Transformer Neural Process has them, M context and N target tokens: queries
/// are all M + N, keys the first M.
Problem problem(const Dims& dims, const Attrs& attrs) {
  const int64_t batch = size_or(dims, "B", 1), heads = size_or(dims, "H", 8), dim = size_or(dims, "D", 64);
  const int64_t context = size_or(dims, "M", 1024), targets = size_or(dims, "N", 0);
  const int64_t keys = size_or(dims, "Lk", context), queries = size_or(dims, "Lq", context + targets);
  double pairs = double(queries) * double(keys);
  if (attrs.flag("causal")) {
    // Query i sees i + 1 + keys - queries keys, from 0 upwards.
    const double last = double(keys), first = double(std::max<int64_t>(0, keys - queries));
    pairs = (last * (last + 1) - first * (first + 1)) / 2;
  }
  const double products = double(batch) * double(heads) * double(dim);
  const double q_elements = products * double(queries), k_elements = products * double(keys);
  return {.inputs = {{.shape = {batch, queries, heads, dim}},
                     {.shape = {batch, keys, heads, dim}},
                     {.shape = {batch, keys, heads, dim}}},
          .forward_flops = 4 * products * pairs,
          .backward_flops = 10 * products * pairs,
          .forward_elements = 2 * q_elements + 2 * k_elements,
          .backward_elements = 4 * q_elements + 4 * k_elements};
}

Case lengths(int64_t queries, int64_t keys, int64_t dim, bool causal,
             Placement placement = Placement::pitched) {
  // Lengths about the CUDA tiles (64 and 128) are too large for central differences.
  const bool small = queries <= 16 && keys <= 16 && dim <= 40;
  return {.dims = {{"B", 2}, {"Lq", queries}, {"Lk", keys}, {"H", small ? 2 : 1}, {"D", dim}},
          .attrs = {{"causal", causal}},
          .placement = placement,
          .gradcheck = small};
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const bool causal : {false, true}) {
    for (const auto& [queries, keys] : {std::pair<int64_t, int64_t>{5, 7},
                                        {7, 5},
                                        {1, 1},
                                        {1, 11},
                                        {11, 1},
                                        {0, 5},
                                        {5, 0},
                                        {0, 0},
                                        {2, 2}})
      all.push_back(lengths(queries, keys, 32, causal));
    all.push_back(lengths(3, 13, 40, causal));
    all.push_back(lengths(13, 3, 40, causal, Placement::strided));
    all.push_back(lengths(6, 5, 32, causal, Placement::transposed));
    for (const auto& [queries, keys] : {std::pair<int64_t, int64_t>{63, 65},
                                        {65, 63},
                                        {64, 64},
                                        {64, 128},
                                        {128, 64},
                                        {127, 129},
                                        {129, 127},
                                        {1, 257},
                                        {257, 1},
                                        {131, 71},
                                        {71, 131}})
      all.push_back(lengths(queries, keys, 64, causal));
    all.push_back(lengths(67, 97, 32, causal));
    all.push_back(lengths(97, 67, 40, causal));
    all.push_back(lengths(131, 73, 40, causal, Placement::strided));
    all.push_back(lengths(89, 65, 64, causal, Placement::transposed));
    all.push_back(lengths(130, 66, 96, causal));
    all.push_back(lengths(65, 130, 128, causal));
    all.push_back(lengths(193, 191, 128, causal, Placement::strided));
    all.push_back({.dims = {{"B", 1}, {"Lq", 515}, {"Lk", 259}, {"H", 2}, {"D", 64}},
                   .attrs = {{"causal", causal}},
                   .gradcheck = false});
  }
  all.push_back({.dims = {{"B", 2}, {"Lq", 4}, {"Lk", 6}, {"H", 2}, {"D", 32}}, .attrs = {{"scale", 0.37}}});
  all.push_back({.dims = {{"B", 1}, {"M", 50}, {"N", 14}, {"H", 2}, {"D", 64}},
                 .attrs = {{"scale", 0.5}},
                 .gradcheck = false});
  // Fewer heads than rows of a tile, and many small problems.
  all.push_back({.dims = {{"B", 33}, {"Lq", 17}, {"Lk", 9}, {"H", 5}, {"D", 64}}, .gradcheck = false});
  return all;
}

/// Half of the head sizes are those that models use. Both lengths are drawn on their own, but for half of the
/// causal problems, which are square.
Case sweep(Draw& draw) {
  const bool causal = draw.chance(0.35);
  const int64_t dim =
      draw.chance(0.7) ? draw.pick({64, 128}) : 8 * draw.pick({1, 2, 3, 4, 5, 7, 9, 10, 12, 15});
  const int64_t queries = draw.size(1, 16384);
  const int64_t keys = causal && draw.chance(0.5) ? queries : draw.size(1, 16384);
  return {
      .dims = {{"B", draw.size(1, 64)}, {"Lq", queries}, {"Lk", keys}, {"H", draw.size(1, 32)}, {"D", dim}},
      .attrs = {{"causal", causal}}};
}

}  // namespace

std::vector<OpSpec> attention_specs() {
  const auto rectangle = [](int64_t context, int64_t targets, int64_t batch) {
    return Case{.dims = {{"B", batch}, {"M", context}, {"N", targets}, {"H", 8}, {"D", 64}}};
  };
  const auto square = [](int64_t batch, int64_t length, int64_t heads, int64_t dim, bool causal) {
    return Case{.dims = {{"B", batch}, {"M", length}, {"N", 0}, {"H", heads}, {"D", dim}},
                .attrs = {{"causal", causal}}};
  };
  return {{
      .name = "attention",
      .summary = "o = softmax(scale q k^T) v for every batch and head; lse = log sum exp(scale q k^T)",
      .inputs = {{"q", "[B, Lq, H, D]"}, {"k", "[B, Lk, H, D]"}, {"v", "[B, Lk, H, D]"}},
      .attrs = {{"causal", false, "query i sees the keys j <= i + Lk - Lq"},
                {"scale", 0.0, "factor of the scores; 0: 1 / sqrt(D)"}},
      .outputs = {{"o", "as q"}, {"lse", "[B, H, Lq]", false}},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            AttentionResult result = attention_with_lse(
                in[0], in[1], in[2], {.causal = attrs.flag("causal"), .scale = attrs.number("scale")});
            return std::vector{result.o, result.lse};
          },
      .problem = problem,
      .cases = cases(),
      .benches = {rectangle(64, 500, 64), rectangle(10000, 1000, 1), rectangle(10000, 1000, 4),
                  rectangle(200000, 5000, 1), square(16, 1024, 32, 64, false), square(16, 1024, 32, 64, true),
                  square(4, 4096, 32, 64, false), square(4, 4096, 32, 64, true),
                  square(1, 16384, 32, 64, false), square(1, 16384, 32, 64, true),
                  square(16, 1024, 16, 128, false), square(16, 1024, 16, 128, true),
                  square(4, 4096, 16, 128, false), square(4, 4096, 16, 128, true),
                  square(1, 16384, 16, 128, false), square(1, 16384, 16, 128, true)},
      .sweep = sweep,
      .tolerance_factor_f32 = 3,
      .tolerance_reason =
          "the kernels take exp2 from the special-function unit (2 ulp) and rebuild the probabilities "
          "in backward from the rounded log-sum-exp",
      .rows = attention_row_names(),
      .row_dtypes = {{}, {DType::bf16, DType::f16}},
  }};
}

}  // namespace tessera::ops

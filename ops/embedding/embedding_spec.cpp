#include "ops/embedding/embedding_kernels.h"
#include "ops/op.h"

namespace tessera::ops {
namespace {

Problem embedding_problem(const Dims& d, const Attrs&) {
  const int64_t rows = d.at("V"), width = d.at("C"), count = d.at("T");
  const double n = double(count) * double(width);
  return {.inputs = {{.shape = {rows, width}}, {.shape = {count}, .fill = Fill::index, .high = rows}},
          .backward_flops = n,
          .forward_elements = 2 * n,
          .backward_elements = n + double(rows) * double(width)};
}

}  // namespace

std::vector<OpSpec> embedding_specs() {
  return {{
      .name = "embedding",
      .summary = "y[i] = table[indices[i]]",
      .inputs = {{"table", "[V, C]"}, {"indices", "[...]", false, false, index_dtypes()}},
      .attrs = {},
      .outputs = {{"y", "[..., C]"}},
      .run = [](const std::vector<Tensor>& in, const Attrs&) { return std::vector{embedding(in[0], in[1])}; },
      .problem = embedding_problem,
      .cases =
          {{.dims = {{"V", 7}, {"C", 5}, {"T", 11}}},
           {.dims = {{"V", 1}, {"C", 1}, {"T", 3}}},
           {.dims = {{"V", 13}, {"C", 8}, {"T", 1}}},
           {.dims = {{"V", 5}, {"C", 3}, {"T", 0}}},
           {.dims = {{"V", 5}, {"C", 0}, {"T", 4}}},
           {.dims = {{"V", 0}, {"C", 3}, {"T", 0}}},
           {.dims = {{"V", 9}, {"C", 6}, {"T", 17}}, .placement = Placement::strided},
           {.dims = {{"V", 9}, {"C", 6}, {"T", 17}}, .placement = Placement::transposed},
           // Rows named by few and by many indices; a warp's columns and one more; tables of few rows
           // with segments of many chunks, and of many rows with few indices; rows on lines of memory.
           {.dims = {{"V", 257}, {"C", 129}, {"T", 600}}, .gradcheck = false},
           {.dims = {{"V", 3}, {"C", 257}, {"T", 1000}}, .gradcheck = false},
           {.dims = {{"V", 10007}, {"C", 12}, {"T", 3001}}, .gradcheck = false},
           {.dims = {{"V", 1}, {"C", 42}, {"T", 200}}, .gradcheck = false},
           {.dims = {{"V", 3}, {"C", 300}, {"T", 256}}, .gradcheck = false},
           {.dims = {{"V", 5}, {"C", 5}, {"T", 9001}}, .gradcheck = false},
           {.dims = {{"V", 1}, {"C", 33}, {"T", 4097}}, .gradcheck = false},
           {.dims = {{"V", 700}, {"C", 40}, {"T", 8192}}, .gradcheck = false},  // the most that are counted
           {.dims = {{"V", 3}, {"C", 33}, {"T", 8193}}, .gradcheck = false},
           {.dims = {{"V", 40}, {"C", 17}, {"T", 5000}}, .placement = Placement::strided, .gradcheck = false},
           {.dims = {{"V", 2}, {"C", 3}, {"T", 140001}}, .gradcheck = false},
           {.dims = {{"V", 20011}, {"C", 7}, {"T", 2}}, .gradcheck = false},
           {.dims = {{"V", 300}, {"C", 1201}, {"T", 19}}, .gradcheck = false},
           {.dims = {{"V", 3001}, {"C", 348}, {"T", 700}}, .gradcheck = false}},
      .benches = {{.dims = {{"V", 50257}, {"C", 768}, {"T", 65536}}},
                  {.dims = {{"V", 1000}, {"C", 64}, {"T", 512}}}},
      .sweep =
          [](Draw& draw) {
            return Case{.dims = {{"V", draw.size(1, 150000)},
                                 {"C", draw.size(1, 4096)},
                                 {"T", draw.size(1, 200000)}}};
          },
      .variants = embedding_variants(),  // of backward
  }};
}

}  // namespace tessera::ops

#pragma once

#include <vector>

#include "ops/dropout/dropout.h"
#include "ops/gather/gather.h"
#include "ops/op.h"
#include "ops/pointwise/pointwise.h"

/// An operator made of others that declares what few of the bundled ones do: an input of bytes, one that is
/// made from it and whose size only its values say, an output in i32, and random numbers. The generic tests
/// run it next to the bundled ones.

namespace tessera::ops {

/// The rows whose weight is not 0.
inline std::vector<Tensor> rows_of_weights(const Tensor& weights) {
  std::vector<int32_t> rows;
  const auto values = weights.to_vector<uint8_t>();
  for (size_t r = 0; r < values.size(); ++r)
    if (values[r] != 0) rows.push_back(int32_t(r));
  return {Tensor::from(rows, {int64_t(rows.size())})};
}

inline OpSpec example_op() {
  const auto make = [](int64_t rows, int64_t width, double p, Placement placement = Placement::pitched,
                       bool gradcheck = true) {
    return Case{.dims = {{"R", rows}, {"C", width}},
                .attrs = {{"p", p}, {"seed", rows}},
                .placement = placement,
                .gradcheck = gradcheck};
  };
  return {
      .name = "weighted_rows",
      .summary = "y[k] = dropout(x)[rows[k]] weights[rows[k]]",
      .inputs = {{"x", "[R, C]"},
                 {.name = "weights", .shape = "[R]", .differentiable = false, .dtypes = {DType::u8}},
                 {.name = "rows",
                  .shape = "[K]: rows whose weight is not 0",
                  .differentiable = false,
                  .dtypes = {DType::i32},
                  .from = {"weights"}}},
      .attrs = {{"p", 0.25, "chance of an element to be dropped"},
                {"seed", int64_t{0}, "of the random numbers"}},
      .outputs = {{"y", "[K, C]"}, {"rows", "[K]", false, {DType::i32}}},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            SeededRng random(attrs.integer("seed"));
            const Tensor factors = in[1].to(in[0].dtype()).reshape({in[1].size(0), 1});
            const Tensor dropped = dropout(in[0], attrs.number("p"), random.rng());
            return std::vector{mul(gather_rows(dropped, in[2]), gather_rows(factors, in[2])), in[2].clone()};
          },
      .derive = [](const std::vector<Tensor>& in, const Attrs&) { return rows_of_weights(in[1]); },
      .seed = "seed",
      .problem =
          [](const Dims& d, const Attrs&) {
            const double n = double(d.at("R")) * double(d.at("C"));
            return Problem{.inputs = {{.shape = {d.at("R"), d.at("C")}},
                                      {.shape = {d.at("R")}, .fill = Fill::index, .high = 4},
                                      {}},
                           .forward_elements = 2 * n,
                           .backward_elements = 2 * n,
                           .forward_bytes = 5 * double(d.at("R"))};
          },
      .cases = {make(7, 5, 0.25), make(1, 1, 0), make(0, 3, 0.5), make(5, 0, 0.5),
                make(33, 13, 0.5, Placement::strided), make(17, 11, 0.1, Placement::transposed),
                make(257, 129, 0.25, Placement::pitched, false)},
      .benches = {make(33, 13, 0.25)},
      .sweep = [make](Draw& draw) { return make(draw.size(1, 1000), draw.size(1, 100), 0.25); },
  };
}

/// The bundled operators and that one.
inline const std::vector<OpSpec>& tested_ops() {
  static const auto& all = *[] {
    auto* const list = new std::vector<OpSpec>(all_ops());
    list->push_back(example_op());
    return list;
  }();
  return all;
}

}  // namespace tessera::ops

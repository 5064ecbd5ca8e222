#include "ops/op.h"
#include "ops/shape/shape.h"

/// The declarations of the folder. Shapes as attributes are words: "2,3,-1".

namespace tessera::ops {
namespace {

/// The attribute's shape, -1 for the size that x has there.
Shape expanded(const Attrs& attrs, const Shape& x) {
  std::vector<int64_t> sizes = attrs.integers("shape");
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] != -1) continue;
    const int own = int(dim) - (int(sizes.size()) - x.rank());
    check(own >= 0, "expand: size -1 of shape \"", attrs.word("shape"), "\" stands before the dimensions of ",
          x);
    sizes[dim] = x[own];
  }
  return Shape(sizes);
}

/// X Y Z, or fewer dimensions.
Shape shape_of(const Dims& d) {
  std::vector<int64_t> sizes;
  for (const char* name : {"X", "Y", "Z"})
    if (d.contains(name)) sizes.push_back(d.at(name));
  return Shape(sizes);
}

Problem moves(std::vector<InputCase> inputs, double forward, double backward, double sums = 0) {
  return {.inputs = std::move(inputs),
          .backward_flops = sums,
          .forward_elements = forward,
          .backward_elements = backward};
}

OpSpec concat_spec() {
  const auto make = [](int64_t dim, Dims dims) {
    return Case{.dims = std::move(dims), .attrs = {{"dim", dim}}};
  };
  OpSpec spec{
      .name = "concat",
      .summary = "y = the parts one after the other along dim",
      .inputs = {{"a", "[..., A, ...]"},
                 {.name = "b", .shape = "[..., B, ...]", .optional = true},
                 {.name = "c", .shape = "[..., C, ...]", .optional = true}},
      .attrs = {{"dim", int64_t{0}, "along which the parts are joined"}},
      .outputs = {{"y", "[..., A + B + C, ...]"}},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            std::vector<Tensor> parts;
            for (const Tensor& part : in)
              if (part.defined()) parts.push_back(part);
            return std::vector{concat(parts, attrs.dimension("dim"))};
          },
      .problem =
          [](const Dims& d, const Attrs& attrs) {
            std::vector<InputCase> parts;
            double n = 0;
            for (const char* name : {"A", "B", "C"}) {
              if (!d.contains(name)) {
                parts.push_back({.fill = Fill::absent});
                continue;
              }
              parts.push_back({.shape = shape_of(d).with(attrs.dimension("dim"), d.at(name))});
              n += double(parts.back().shape.count());
            }
            return moves(std::move(parts), 2 * n, 2 * n);
          },
      .cases = {make(0, {{"X", 1}, {"Y", 3}, {"A", 2}, {"B", 5}, {"C", 1}}),
                make(-1, {{"X", 4}, {"Y", 1}, {"A", 7}, {"B", 1}, {"C", 4}}),
                make(1, {{"X", 3}, {"Y", 1}, {"Z", 5}, {"A", 2}, {"B", 0}, {"C", 3}}),
                make(-2, {{"X", 2}, {"Y", 1}, {"Z", 11}, {"A", 3}, {"B", 2}}),
                make(0, {{"X", 1}, {"A", 5}, {"B", 3}}), make(0, {{"X", 1}, {"Y", 6}, {"A", 4}}),
                make(1, {{"X", 0}, {"Y", 1}, {"A", 2}, {"B", 3}}), make(0, {{"X", 1}, {"A", 0}, {"B", 0}})},
      .benches = {make(1, {{"X", 64}, {"Y", 1}, {"Z", 512}, {"A", 64}, {"B", 500}}),
                  make(-1, {{"X", 36096}, {"Y", 1}, {"A", 512}, {"B", 512}})},
  };
  Case strided = make(-1, {{"X", 5}, {"Y", 1}, {"A", 3}, {"B", 8}, {"C", 2}});
  strided.placement = Placement::strided;
  Case transposed = make(0, {{"X", 1}, {"Y", 9}, {"A", 4}, {"B", 2}, {"C", 3}});
  transposed.placement = Placement::transposed;
  Case large = make(0, {{"X", 1}, {"Y", 1365}, {"A", 129}, {"B", 64}, {"C", 1}});
  large.gradcheck = false;
  for (Case& more : {std::ref(strided), std::ref(transposed), std::ref(large)}) spec.cases.push_back(more);
  return spec;
}

OpSpec slice_spec() {
  const auto make = [](Dims dims, int64_t dim, int64_t begin, int64_t end, int64_t step = 1,
                       Placement placement = Placement::pitched, bool gradcheck = true) {
    return Case{.dims = std::move(dims),
                .attrs = {{"dim", dim}, {"begin", begin}, {"end", end}, {"step", step}},
                .placement = placement,
                .gradcheck = gradcheck};
  };
  return {
      .name = "slice",
      .summary = "y = x[..., begin:end:step, ...], a view",
      .inputs = {{"x", "[...]"}},
      .attrs = {{"dim", int64_t{0}, "the dimension that is cut"},
                {"begin", int64_t{0}, "the first element; below 0: from the end"},
                {"end", int64_t{1}, "one past the last element; below 0: from the end"},
                {"step", int64_t{1}, "from one element to the next, at least 1"}},
      .outputs = {{"y", "[...]"}},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& a) {
            return std::vector{
                slice(in[0], a.dimension("dim"), a.integer("begin"), a.integer("end"), a.integer("step"))};
          },
      .problem =
          [](const Dims& d, const Attrs&) {
            const Shape shape = shape_of(d);
            return moves({{.shape = shape}}, 0, double(shape.count()));
          },
      .cases = {make({{"X", 7}, {"Y", 5}}, 0, 2, 5), make({{"X", 7}, {"Y", 5}}, 1, 1, 5, 3),
                make({{"X", 3}, {"Y", 4}, {"Z", 11}}, -1, -5, -1, 2),
                make({{"X", 3}, {"Y", 4}, {"Z", 2}}, 1, 0, 4), make({{"X", 13}}, 0, 12, 13),
                make({{"X", 5}, {"Y", 3}}, 0, 2, 2), make({{"X", 4}, {"Y", 0}}, 0, 1, 3),
                make({{"X", 1}, {"Y", 1}}, 0, 0, 1, 9),
                make({{"X", 6}, {"Y", 9}}, 0, 1, 6, 2, Placement::strided),
                make({{"X", 6}, {"Y", 9}}, -1, 2, 9, 1, Placement::transposed),
                make({{"X", 129}, {"Y", 1365}}, 0, 64, 129, 1, Placement::pitched, false)},
      .benches = {make({{"X", 64}, {"Y", 564}, {"Z", 512}}, 1, 64, 564)},
  };
}

OpSpec split_spec() {
  const auto make = [](Dims dims, int64_t dim, const char* sizes, Placement placement = Placement::pitched,
                       bool gradcheck = true) {
    return Case{.dims = std::move(dims),
                .attrs = {{"dim", dim}, {"sizes", std::string(sizes)}},
                .placement = placement,
                .gradcheck = gradcheck};
  };
  return {
      .name = "split",
      .summary = "a, b, c = x cut along dim, views",
      .inputs = {{"x", "[...]"}},
      .attrs = {{"dim", int64_t{0}, "the dimension that is cut"},
                {"sizes", std::string("1,1,1"), "of the three parts, with commas between"}},
      .outputs = {{"a", "[..., A, ...]"}, {"b", "[..., B, ...]"}, {"c", "[..., C, ...]"}},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            const std::vector<int64_t> sizes = attrs.integers("sizes");
            check(sizes.size() == 3, "split: ", sizes.size(), " sizes \"", attrs.word("sizes"),
                  "\"; expected 3");
            return split(in[0], attrs.dimension("dim"), sizes);
          },
      .problem =
          [](const Dims& d, const Attrs&) {
            const Shape shape = shape_of(d);
            return moves({{.shape = shape}}, 0, 2 * double(shape.count()));
          },
      .cases = {make({{"X", 7}, {"Y", 5}}, 0, "3,2,2"), make({{"X", 7}, {"Y", 5}}, -1, "1,0,4"),
                make({{"X", 3}, {"Y", 9}, {"Z", 11}}, 1, "4,4,1"), make({{"X", 0}, {"Y", 3}}, 1, "1,1,1"),
                make({{"X", 13}}, 0, "13,0,0"), make({{"X", 6}, {"Y", 9}}, 1, "2,3,4", Placement::strided),
                make({{"X", 6}, {"Y", 9}}, 0, "2,3,1", Placement::transposed),
                make({{"X", 129}, {"Y", 1365}}, 1, "512,512,341", Placement::pitched, false)},
      .benches = {make({{"X", 65536}, {"Y", 2304}}, 1, "768,768,768")},
      .cpu_benches = {make({{"X", 1024}, {"Y", 2304}}, 1, "768,768,768")},
  };
}

OpSpec stack_spec() {
  const auto make = [](Dims dims, int64_t dim, Placement placement = Placement::pitched,
                       bool gradcheck = true) {
    return Case{
        .dims = std::move(dims), .attrs = {{"dim", dim}}, .placement = placement, .gradcheck = gradcheck};
  };
  return {
      .name = "stack",
      .summary = "y = the parts joined along a new dimension",
      .inputs = {{"a", "[...]"}, {"b", "as a"}, {.name = "c", .shape = "as a", .optional = true}},
      .attrs = {{"dim", int64_t{0}, "of y, along which the parts are joined"}},
      .outputs = {{"y", "[..., 2 or 3, ...]"}},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            std::vector<Tensor> parts{in[0], in[1]};
            if (in[2].defined()) parts.push_back(in[2]);
            return std::vector{stack(parts, attrs.dimension("dim"))};
          },
      .problem =
          [](const Dims& d, const Attrs&) {
            const Shape shape = shape_of(d);
            const bool three = is_set(d, "three");
            const double n = double(shape.count()) * (three ? 3 : 2);
            return moves({{.shape = shape},
                          {.shape = shape},
                          {.shape = shape, .fill = three ? Fill::normal : Fill::absent}},
                         2 * n, 2 * n);
          },
      .cases = {make({{"X", 7}, {"Y", 5}, {"three", 1}}, 0), make({{"X", 7}, {"Y", 5}}, 1),
                make({{"X", 7}, {"Y", 5}, {"three", 1}}, 2), make({{"X", 2}, {"Y", 3}, {"Z", 11}}, -2),
                make({{"X", 9}}, -1), make({}, 0), make({{"X", 0}, {"Y", 3}}, 1),
                make({{"X", 6}, {"Y", 9}, {"three", 1}}, 1, Placement::strided),
                make({{"X", 6}, {"Y", 9}}, -1, Placement::transposed),
                make({{"X", 129}, {"Y", 1365}}, 0, Placement::pitched, false)},
      .benches = {make({{"X", 36096}, {"Y", 512}}, 0)},
  };
}

OpSpec select_index_spec() {
  const auto make = [](Dims dims, int64_t dim, int64_t index, Placement placement = Placement::pitched,
                       bool gradcheck = true) {
    return Case{.dims = std::move(dims),
                .attrs = {{"dim", dim}, {"index", index}},
                .placement = placement,
                .gradcheck = gradcheck};
  };
  return {
      .name = "select_index",
      .summary = "y = x[..., index, ...], a view",
      .inputs = {{"x", "[...]"}},
      .attrs = {{"dim", int64_t{0}, "the dimension that goes away"},
                {"index", int64_t{0}, "the element that stays"}},
      .outputs = {{"y", "x without dim"}},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            return std::vector{select(in[0], attrs.dimension("dim"), attrs.integer("index"))};
          },
      .problem =
          [](const Dims& d, const Attrs&) {
            const Shape shape = shape_of(d);
            return moves({{.shape = shape}}, 0, double(shape.count()));
          },
      .cases = {make({{"X", 7}, {"Y", 5}}, 0, 2), make({{"X", 7}, {"Y", 5}}, 1, -1),
                make({{"X", 3}, {"Y", 4}, {"Z", 11}}, -2, 3), make({{"X", 13}}, 0, 12),
                make({{"X", 4}, {"Y", 0}}, 0, 1), make({{"X", 1}, {"Y", 1}}, 0, 0),
                make({{"X", 6}, {"Y", 9}}, 0, 1, Placement::strided),
                make({{"X", 6}, {"Y", 9}}, -1, 2, Placement::transposed),
                make({{"X", 129}, {"Y", 1365}}, 0, 64, Placement::pitched, false)},
  };
}

OpSpec permute_spec() {
  const auto make = [](Dims dims, const char* order, Placement placement = Placement::pitched,
                       bool gradcheck = true) {
    return Case{.dims = std::move(dims),
                .attrs = {{"order", std::string(order)}},
                .placement = placement,
                .gradcheck = gradcheck};
  };
  return {
      .name = "permute",
      .summary = "y = x with its dimensions in another order, a view",
      .inputs = {{"x", "[...]"}},
      .attrs = {{"order", std::string("1,0"), "the dimensions of x with commas between, in y's order"}},
      .outputs = {{"y", "[...]"}},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            const std::vector<int64_t> order = attrs.integers("order");
            return std::vector{permute(in[0], std::vector<int>(order.begin(), order.end()))};
          },
      .problem = [](const Dims& d, const Attrs&) { return moves({{.shape = shape_of(d)}}, 0, 0); },
      .cases = {make({{"X", 7}, {"Y", 5}}, "1,0"), make({{"X", 2}, {"Y", 3}, {"Z", 5}}, "2,0,1"),
                make({{"X", 2}, {"Y", 3}, {"Z", 5}}, "1,-1,0"), make({{"X", 2}, {"Y", 3}, {"Z", 5}}, "0,1,2"),
                make({{"X", 3}, {"Y", 1}, {"Z", 4}}, "2,1,0"), make({{"X", 5}}, "0"), make({}, ""),
                make({{"X", 0}, {"Y", 3}}, "1,0"),
                make({{"X", 3}, {"Y", 4}, {"Z", 5}}, "1,2,0", Placement::strided),
                make({{"X", 3}, {"Y", 4}, {"Z", 5}}, "2,0,1", Placement::transposed),
                make({{"X", 9}, {"Y", 33}, {"Z", 65}}, "1,2,0", Placement::pitched, false)},
  };
}

/// unsqueeze and squeeze.
OpSpec single_spec(const char* name, const char* summary, Tensor (*run)(const Tensor&, int, Site),
                   const std::vector<std::pair<Dims, int64_t>>& problems) {
  std::vector<Case> cases;
  for (const auto& [dims, dim] : problems) cases.push_back({.dims = dims, .attrs = {{"dim", dim}}});
  for (const Placement placement : {Placement::strided, Placement::transposed})
    cases.push_back(
        {.dims = {{"X", 4}, {"Y", 1}, {"Z", 9}}, .attrs = {{"dim", int64_t{1}}}, .placement = placement});
  return {
      .name = name,
      .summary = summary,
      .inputs = {{"x", "[...]"}},
      .attrs = {{"dim", int64_t{0}, "the dimension of size 1"}},
      .outputs = {{"y", "[...]"}},
      .run =
          [run](const std::vector<Tensor>& in, const Attrs& attrs) {
            return std::vector{run(in[0], attrs.dimension("dim"), Site::here())};
          },
      .problem = [](const Dims& d, const Attrs&) { return moves({{.shape = shape_of(d)}}, 0, 0); },
      .cases = std::move(cases),
  };
}

OpSpec transpose_spec() {
  const auto make = [](Dims dims, int64_t a, int64_t b, Placement placement = Placement::pitched,
                       bool gradcheck = true) {
    return Case{.dims = std::move(dims),
                .attrs = {{"a", a}, {"b", b}},
                .placement = placement,
                .gradcheck = gradcheck};
  };
  return {
      .name = "transpose",
      .summary = "y = x with dimensions a and b exchanged, a view",
      .inputs = {{"x", "[...]"}},
      .attrs = {{"a", int64_t{-2}, "a dimension"}, {"b", int64_t{-1}, "the one it changes places with"}},
      .outputs = {{"y", "[...]"}},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            return std::vector{transpose(in[0], attrs.dimension("a"), attrs.dimension("b"))};
          },
      .problem = [](const Dims& d, const Attrs&) { return moves({{.shape = shape_of(d)}}, 0, 0); },
      .cases = {make({{"X", 7}, {"Y", 5}}, 0, 1), make({{"X", 2}, {"Y", 3}, {"Z", 5}}, 0, 2),
                make({{"X", 2}, {"Y", 3}, {"Z", 5}}, -2, -3), make({{"X", 4}, {"Y", 6}}, 1, 1),
                make({{"X", 1}, {"Y", 9}}, -1, -2), make({{"X", 0}, {"Y", 3}}, 0, 1),
                make({{"X", 3}, {"Y", 11}}, 0, 1, Placement::strided),
                make({{"X", 3}, {"Y", 11}}, 0, 1, Placement::transposed),
                make({{"X", 65}, {"Y", 129}}, 0, 1, Placement::pitched, false)},
  };
}

Case to_shape(Dims dims, const char* shape, Placement placement = Placement::pitched, bool gradcheck = true) {
  return {.dims = std::move(dims),
          .attrs = {{"shape", std::string(shape)}},
          .placement = placement,
          .gradcheck = gradcheck};
}

OpSpec reshape_spec() {
  return {
      .name = "reshape",
      .summary = "y = the elements of x under another shape, a view where the strides allow it",
      .inputs = {{"x", "[...]"}},
      .attrs = {{"shape", std::string("-1"), "sizes with commas between; one may be -1"}},
      .outputs = {{"y", "shape"}},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            return std::vector{reshape(in[0], complete_shape(attrs.integers("shape"), in[0].count()))};
          },
      .problem =
          [](const Dims& d, const Attrs&) {
            const Shape shape = shape_of(d);
            return moves({{.shape = shape}}, 2 * double(shape.count()), 2 * double(shape.count()));
          },
      .cases = {to_shape({{"X", 6}, {"Y", 4}}, "-1"), to_shape({{"X", 6}, {"Y", 5}}, "2,3,-1"),
                to_shape({{"X", 6}, {"Y", 5}}, "5,6"), to_shape({{"X", 2}, {"Y", 3}, {"Z", 11}}, "6,11"),
                to_shape({{"X", 2}, {"Y", 3}, {"Z", 11}}, "33,2"), to_shape({{"X", 1}, {"Y", 1}}, ""),
                to_shape({{"X", 7}}, "1,7,1"), to_shape({{"X", 0}, {"Y", 3}}, "5,0,2"),
                to_shape({{"X", 6}, {"Y", 4}}, "3,2,4", Placement::strided),
                to_shape({{"X", 6}, {"Y", 4}}, "8,3", Placement::strided),
                to_shape({{"X", 6}, {"Y", 4}}, "2,12", Placement::transposed),
                to_shape({{"X", 65}, {"Y", 129}}, "129,65", Placement::pitched, false)},
      .benches = {to_shape({{"X", 36096}, {"Y", 1365}}, "-1")},
  };
}

OpSpec expand_spec() {
  return {
      .name = "expand",
      .summary = "y = x broadcast to shape, a view; dx = the sum of dy over the expanded dimensions",
      .inputs = {{"x", "[...]"}},
      .attrs = {{"shape", std::string("-1"), "sizes with commas between; -1 keeps x's"}},
      .outputs = {{"y", "shape"}},
      .run = [](const std::vector<Tensor>& in,
                const Attrs& attrs) { return std::vector{expand(in[0], expanded(attrs, in[0].shape()))}; },
      .problem =
          [](const Dims& d, const Attrs& attrs) {
            const Shape x = shape_of(d);
            const double n = double(x.count()), whole = double(expanded(attrs, x).count());
            return moves({{.shape = x}}, 0, whole + n, whole - n);
          },
      .cases = {to_shape({{"X", 1}, {"Y", 5}}, "7,5"), to_shape({{"X", 6}, {"Y", 1}}, "-1,11"),
                to_shape({{"X", 1}, {"Y", 4}, {"Z", 1}}, "3,-1,5"), to_shape({{"X", 5}}, "2,3,-1"),
                to_shape({}, "4,3"), to_shape({{"X", 3}, {"Y", 4}}, "3,4"),
                to_shape({{"X", 1}, {"Y", 3}}, "0,3"), to_shape({{"X", 0}, {"Y", 1}}, "0,4"),
                to_shape({{"X", 1}, {"Y", 1}}, "1,1,1"),
                to_shape({{"X", 4}, {"Y", 1}}, "2,-1,9", Placement::strided),
                to_shape({{"X", 1}, {"Y", 7}}, "5,-1", Placement::transposed),
                to_shape({{"X", 1}, {"Y", 129}}, "257,-1", Placement::pitched, false),
                to_shape({{"X", 65}, {"Y", 1}}, "-1,1365", Placement::pitched, false)},
      .benches = {to_shape({{"X", 1}, {"Y", 512}}, "36096,-1")},
  };
}

}  // namespace

std::vector<OpSpec> shape_specs() {
  return {concat_spec(),
          stack_spec(),
          slice_spec(),
          split_spec(),
          select_index_spec(),
          transpose_spec(),
          permute_spec(),
          single_spec("unsqueeze", "y = x with a dimension of size 1 more, a view", unsqueeze,
                      {{{{"X", 7}, {"Y", 5}}, 0},
                       {{{"X", 7}, {"Y", 5}}, -1},
                       {{{"X", 7}, {"Y", 5}}, 2},
                       {{}, 0},
                       {{{"X", 0}}, 1}}),
          single_spec("squeeze", "y = x without a dimension of size 1, a view", squeeze,
                      {{{{"X", 1}, {"Y", 5}}, 0},
                       {{{"X", 7}, {"Y", 1}}, -1},
                       {{{"X", 1}, {"Y", 1}, {"Z", 3}}, -2},
                       {{{"X", 1}}, 0},
                       {{{"X", 0}, {"Y", 1}}, 1}}),
          reshape_spec(),
          expand_spec()};
}

}  // namespace tessera::ops

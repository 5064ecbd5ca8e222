#include <charconv>

#include "ops/op.h"
#include "ops/shape/shape.h"

/// The declarations of the folder. Shapes as attributes are words: "2,3,-1".

namespace tessera::ops {
namespace {

std::vector<int64_t> parse_sizes(const char* op, std::string_view word) {
  std::vector<int64_t> sizes;
  for (std::string_view rest = word; !rest.empty();) {
    const size_t comma = std::min(rest.find(','), rest.size());
    int64_t size = 0;
    const auto [end, code] = std::from_chars(rest.data(), rest.data() + comma, size);
    check(code == std::errc{} && end == rest.data() + comma && size >= -1 &&
              (comma == rest.size() || comma + 1 < rest.size()),
          op, ": shape \"", word, "\": expected sizes with commas between, for example 2,3,-1");
    sizes.push_back(size);
    rest.remove_prefix(std::min(comma + 1, rest.size()));
  }
  return sizes;
}

/// The word's shape for `count` elements: one size may be -1.
Shape reshape_word(std::string_view word, int64_t count) {
  std::vector<int64_t> sizes = parse_sizes("reshape", word);
  int64_t known = 1;
  int64_t* open = nullptr;
  for (int64_t& size : sizes) {
    check(size != -1 || !open, "reshape: shape \"", word, "\" has more than one -1");
    if (size == -1) {
      open = &size;
    } else {
      check(!__builtin_mul_overflow(known, size, &known), "reshape: shape \"", word, "\" overflows");
    }
  }
  if (open) {
    check(known > 0 && count % known == 0, "reshape: ", count, " elements do not divide by the ", known,
          " of shape \"", word, "\"");
    *open = count / known;
  }
  return Shape(sizes);
}

/// The word's shape, -1 for the size that x has there.
Shape expand_word(std::string_view word, const Shape& x) {
  std::vector<int64_t> sizes = parse_sizes("expand", word);
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] != -1) continue;
    const int own = int(dim) - (int(sizes.size()) - x.rank());
    check(own >= 0, "expand: size -1 of shape \"", word, "\" stands before the dimensions of ", x);
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
                {"begin", int64_t{0}, "the first element"},
                {"end", int64_t{1}, "one past the last element"},
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
            const std::vector<int64_t> sizes = parse_sizes("split", attrs.word("sizes"));
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
            return std::vector{reshape(in[0], reshape_word(attrs.word("shape"), in[0].count()))};
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
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            return std::vector{expand(in[0], expand_word(attrs.word("shape"), in[0].shape()))};
          },
      .problem =
          [](const Dims& d, const Attrs& attrs) {
            const Shape x = shape_of(d);
            const double n = double(x.count()), whole = double(expand_word(attrs.word("shape"), x).count());
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
  return {concat_spec(), slice_spec(), split_spec(), transpose_spec(), reshape_spec(), expand_spec()};
}

}  // namespace tessera::ops

#include "ops/op.h"
#include "ops/take_along/take_along.h"

namespace tessera::ops {
namespace {

Shape shape_of(const Dims& d) {
  return {d.at("A"), d.at("B"), d.at("C")};
}

/// N indices along `dim` of x [A, B, C].
Case along(int64_t dim, int64_t a, int64_t b, int64_t c, int64_t n, bool gradcheck = true,
           Placement placement = Placement::pitched) {
  return {.dims = {{"A", a}, {"B", b}, {"C", c}, {"N", n}},
          .attrs = {{"dim", dim}},
          .placement = placement,
          .gradcheck = gradcheck};
}

OpSpec take_along_spec() {
  OpSpec op{
      .name = "take_along",
      .summary = "y[..., n] = x[..., indices[..., n]], along any dim",
      .inputs =
          {{"x", "[..., R, ...]"},
           {.name = "indices", .shape = "[..., N, ...]", .differentiable = false, .dtypes = index_dtypes()}},
      .attrs = {{"dim", int64_t{-1}, "from which elements are taken"}},
      .outputs = {{"y", "[..., N, ...]"}},
      .run = [](const std::vector<Tensor>& in,
                const Attrs& attrs) { return std::vector{take_along(in[0], in[1], attrs.dimension("dim"))}; },
      .problem =
          [](const Dims& d, const Attrs& attrs) {
            const Shape x = shape_of(d);
            const int dim = attrs.dimension("dim");
            const Shape y = x.with(dim, d.at("N"));
            const double n = double(y.count());
            return Problem{.inputs = {{.shape = x}, {.shape = y, .fill = Fill::index, .high = x[dim]}},
                           .backward_flops = n,
                           .forward_elements = 2 * n,
                           .backward_elements = n + double(x.count()),
                           .forward_bytes = 8 * n,
                           .backward_bytes = 8 * n};
          },
      .benches = {along(-1, 36096, 1, 512, 1, false), along(-1, 36096, 1, 512, 64, false),
                  along(0, 4096, 1, 512, 64, false)},
      .sweep =
          [](Draw& draw) {
            const int64_t dim = draw.pick({0, -1});
            return along(dim, draw.size(1, 20000), 1, draw.size(1, 20000), draw.size(1, 64), false);
          },
  };
  for (const int64_t dim : {0, 1, -1}) {
    for (const Placement placement : {Placement::pitched, Placement::strided, Placement::transposed})
      op.cases.push_back(along(dim, 3, 4, 5, 7, true, placement));
    op.cases.push_back(along(dim, 2, 3, 9, 1));
    op.cases.push_back(along(dim, 1, 1, 1, 3));
    op.cases.push_back(along(dim, 2, 3, 4, 0));
    op.cases.push_back(along(dim, 33, 65, 129, 31, false));
  }
  op.cases.push_back(along(-1, 0, 3, 4, 2));
  op.cases.push_back(along(1, 3, 5, 0, 2));
  op.cases.push_back(along(-1, 3, 1, 2053, 700, false));  // lines longer than a warp of a GPU holds
  // A GPU sorts what would take too many comparisons.
  op.cases.push_back(along(-1, 3, 1, 100003, 5003, false));
  op.cases.push_back(along(0, 40009, 1, 7, 3001, false, Placement::strided));
  return op;
}

/// src and indices [A, B, C] but for N along `dim`, y [A, B, C].
OpSpec scatter_add_spec() {
  OpSpec op{
      .name = "scatter_add",
      .summary = "y[..., r] = sum of src[..., n] over the n with indices[..., n] == r, along any dim",
      .inputs =
          {{"src", "[..., N, ...]"},
           {.name = "indices", .shape = "[..., N, ...]", .differentiable = false, .dtypes = index_dtypes()}},
      .attrs = {{"size", int64_t{1}, "size of y along dim"},
                {"dim", int64_t{-1}, "along which y is numbered"}},
      .outputs = {{"y", "[..., size, ...]"}},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            return std::vector{scatter_add(in[0], in[1], attrs.integer("size"), attrs.dimension("dim"))};
          },
      .problem =
          [](const Dims& d, const Attrs& attrs) {
            const int64_t size = attrs.integer("size");
            const int dim = attrs.dimension("dim");
            const Shape src = shape_of(d);
            const double n = double(src.count()), y = double(src.with(dim, size).count());
            return Problem{.inputs = {{.shape = src}, {.shape = src, .fill = Fill::index, .high = size}},
                           .forward_flops = n,
                           .forward_elements = n + y,
                           .backward_elements = 2 * n,
                           .forward_bytes = 8 * n,
                           .backward_bytes = 8 * n};
          },
      .benches = {{.dims = {{"A", 36096}, {"B", 1}, {"C", 64}},
                   .attrs = {{"dim", int64_t{-1}}, {"size", int64_t{512}}}}},
      .cpu_benches = {{.dims = {{"A", 4096}, {"B", 1}, {"C", 64}},
                       .attrs = {{"dim", int64_t{-1}}, {"size", int64_t{512}}}}},
  };
  const auto add = [&](int64_t dim, int64_t size, const Dims& dims, bool gradcheck = true,
                       Placement placement = Placement::pitched) {
    op.cases.push_back({.dims = dims,
                        .attrs = {{"dim", dim}, {"size", size}},
                        .placement = placement,
                        .gradcheck = gradcheck});
  };
  for (const int64_t dim : {0, 1, -1}) {
    for (const Placement placement : {Placement::pitched, Placement::strided, Placement::transposed})
      add(dim, 6, {{"A", 3}, {"B", 4}, {"C", 5}}, true, placement);
    add(dim, 1, {{"A", 1}, {"B", 1}, {"C", 1}});
    add(dim, 31, {{"A", 33}, {"B", 65}, {"C", 129}}, false);
  }
  add(-1, 3, {{"A", 2}, {"B", 3}, {"C", 0}});
  add(-1, 5003, {{"A", 3}, {"B", 1}, {"C", 5003}}, false);  // a GPU sorts what takes many comparisons
  return op;
}

OpSpec scatter_spec() {
  OpSpec op{
      .name = "scatter",
      .summary = "y = x, but y[..., indices[..., n]] = src[..., n], along any dim; the last n counts",
      .inputs =
          {{"x", "[..., R, ...]"},
           {.name = "indices", .shape = "[..., N, ...]", .differentiable = false, .dtypes = index_dtypes()},
           {"src", "[..., N, ...]"}},
      .attrs = {{"dim", int64_t{-1}, "along which elements are replaced"}},
      .outputs = {{"y", "as x"}},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            return std::vector{scatter(in[0], in[1], in[2], attrs.dimension("dim"))};
          },
      .problem =
          [](const Dims& d, const Attrs& attrs) {
            const Shape x = shape_of(d);
            const int dim = attrs.dimension("dim");
            const Shape src = x.with(dim, d.at("N"));
            const double n = double(src.count()), elements = double(x.count());
            return Problem{
                .inputs = {{.shape = x}, {.shape = src, .fill = Fill::index, .high = x[dim]}, {.shape = src}},
                .forward_elements = 2 * elements + n,
                .backward_elements = 2 * elements + n,
                .forward_bytes = 8 * n,
                .backward_bytes = 8 * n};
          },
      .benches = {along(-1, 36096, 1, 512, 64, false)},
  };
  for (const int64_t dim : {0, 1, -1}) {
    for (const Placement placement : {Placement::pitched, Placement::strided, Placement::transposed})
      op.cases.push_back(along(dim, 3, 4, 5, 3, true, placement));
    op.cases.push_back(along(dim, 1, 1, 1, 3));
    op.cases.push_back(along(dim, 33, 65, 129, 31, false));
  }
  op.cases.push_back(along(-1, 0, 3, 4, 2));
  return op;
}

OpSpec one_hot_spec() {
  const std::vector<DType> dtypes = {DType::f64, DType::f32, DType::bf16, DType::f16,    DType::f8e4m3,
                                     DType::i64, DType::i32, DType::u8,   DType::boolean};
  std::vector<std::string> names;
  for (const DType dtype : dtypes) names.emplace_back(name_of(dtype));
  const auto make = [](int64_t r, int64_t c, int64_t classes, const char* dtype = "f32",
                       Placement placement = Placement::pitched) {
    return Case{.dims = {{"R", r}, {"C", c}},
                .attrs = {{"classes", classes}, {"dtype", std::string(dtype)}},
                .placement = placement,
                .gradcheck = false};
  };
  OpSpec op{
      .name = "one_hot",
      .summary = "y[..., c] = 1 where indices == c, else 0",
      .inputs = {{.name = "indices", .shape = "[...]", .differentiable = false, .dtypes = index_dtypes()}},
      .attrs = {{"classes", int64_t{1}, "last size of y"},
                {"dtype", std::string("f32"), "dtype of y", names}},
      .outputs = {{.name = "y", .shape = "[..., classes]", .differentiable = false, .dtypes = dtypes}},
      .cpu_dtypes = {DType::i64},
      .cuda_dtypes = {DType::i64},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            return std::vector{one_hot(in[0], attrs.integer("classes"), parse_dtype(attrs.word("dtype")))};
          },
      .problem =
          [](const Dims& d, const Attrs& attrs) {
            const Shape shape{d.at("R"), d.at("C")};
            const int64_t classes = attrs.integer("classes");
            const double n = double(shape.count());
            return Problem{.inputs = {{.shape = shape, .fill = Fill::index, .high = classes}},
                           .forward_bytes =
                               n * (8 + double(classes) * double(size_of(parse_dtype(attrs.word("dtype")))))};
          },
      .cases = {make(5, 7, 3), make(3, 5, 1), make(2, 3, 129), make(0, 3, 4), make(67, 1, 1365),
                make(6, 9, 11, "f32", Placement::strided), make(6, 9, 11, "bf16", Placement::transposed)},
      .benches = {make(36096, 1, 1000)},
  };
  for (const std::string& name : names)
    if (name != "f64") op.cases.push_back(make(3, 4, 5, name.c_str()));
  return op;
}

}  // namespace

std::vector<OpSpec> take_along_specs() {
  return {take_along_spec(), scatter_add_spec(), scatter_spec(), one_hot_spec()};
}

}  // namespace tessera::ops

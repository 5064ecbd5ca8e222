#include "ops/cast/cast.h"
#include "ops/op.h"

namespace tessera::ops {

std::vector<OpSpec> cast_specs() {
  const auto to = [](const char* name) { return Attrs{{"to", std::string(name)}}; };
  std::vector<Case> cases = {
      {.dims = {{"R", 7}, {"C", 13}}, .attrs = to("f64")},
      {.dims = {{"R", 3}, {"C", 129}}, .attrs = to("f64"), .placement = Placement::strided}};
  for (const char* name : {"f32", "bf16", "f16"}) {
    cases.push_back({.dims = {{"R", 1}, {"C", 1}}, .attrs = to(name), .gradcheck = false});
    cases.push_back({.dims = {{"R", 0}, {"C", 5}}, .attrs = to(name), .gradcheck = false});
    cases.push_back({.dims = {{"R", 5}, {"C", 0}}, .attrs = to(name), .gradcheck = false});
    cases.push_back({.dims = {{"R", 67}, {"C", 1365}}, .attrs = to(name), .gradcheck = false});
    cases.push_back({.dims = {{"R", 3}, {"C", 129}},
                     .attrs = to(name),
                     .placement = Placement::strided,
                     .gradcheck = false});
    cases.push_back({.dims = {{"R", 17}, {"C", 11}},
                     .attrs = to(name),
                     .placement = Placement::transposed,
                     .gradcheck = false});
  }
  const std::vector<DType> dtypes = {DType::f64, DType::f32, DType::bf16, DType::f16,    DType::f8e4m3,
                                     DType::i64, DType::i32, DType::u8,   DType::boolean};
  std::vector<std::string> names;
  for (const DType dtype : dtypes) names.emplace_back(name_of(dtype));
  return {{
      .name = "cast",
      .summary = "y = x in another dtype",
      .inputs = {{"x", "[...]"}},
      .attrs = {{"to", std::string("f32"), "dtype of y", names}},
      .outputs = {{.name = "y", .shape = "as x", .dtypes = dtypes}},
      .run = [](const std::vector<Tensor>& in,
                const Attrs& attrs) { return std::vector{cast(in[0], parse_dtype(attrs.word("to")))}; },
      .problem =
          [](const Dims& d, const Attrs& attrs) {
            const double n = double(d.at("R")) * double(d.at("C"));
            const double other = n * double(size_of(parse_dtype(attrs.word("to"))));
            return Problem{.inputs = {{.shape = {d.at("R"), d.at("C")}}},
                           .forward_elements = n,
                           .backward_elements = n,
                           .forward_bytes = other,
                           .backward_bytes = other};
          },
      .cases = std::move(cases),
      .benches = {{.dims = {{"R", 36096}, {"C", 512}}, .attrs = to("f32")},
                  {.dims = {{"R", 36096}, {"C", 512}}, .attrs = to("bf16")}},
      .sweep =
          [to](Draw& draw) {
            const char* const names[] = {"f32", "bf16", "f16"};
            return Case{.dims = {{"R", draw.size(1, 300000)}, {"C", draw.size(1, 20000)}},
                        .attrs = to(names[draw.below(3)])};
          },
      .cpu_extra_ulp = 2.25,
      .cpu_extra_reason =
          "dy of a bf16 result is rounded to bf16, half an ulp of which is 4 ulp of f16 at a power of two",
  }};
}

}  // namespace tessera::ops

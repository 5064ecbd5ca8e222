#include "ops/op.h"
#include "ops/sparse_linear/sparse_linear_kernels.h"

namespace tessera::ops {
namespace {

enum Input : size_t { kX, kWeight, kBias, kResidual, kScales, kValues, kBitmaps, kGaps, kOffsets, kInfo };

/// Arrays that the format has not are empty.
std::vector<Tensor> arrays_of(const SparseWeight& weight) {
  const auto given = [&](const Tensor& array, DType dtype) {
    return array.defined() ? array : Tensor::empty({0}, dtype, Device::cpu());
  };
  return {weight.values, given(weight.bitmaps, DType::i64), given(weight.gaps, DType::i32),
          given(weight.offsets, DType::i32), given(weight.info, DType::i32)};
}

/// The weight [out, in] whose arrays begin at input `first`. A case's inputs come to a GPU by copies of the
/// driver, which no launch crosses, so that attribute "constant" holds.
SparseWeight weight_of(const std::vector<Tensor>& in, size_t first, int64_t out, const Attrs& attrs) {
  const SparseFormat format = parse_sparse_format(attrs.word("format"));
  const bool has_bitmaps = format == SparseFormat::tiled_cbc || format == SparseFormat::tca_bme,
             is_dense = format == SparseFormat::dense_columns;
  const auto kept = [](bool there, const Tensor& array) { return there ? array : Tensor(); };
  SparseWeight weight{.format = format,
                      .out = out,
                      .in = in[kWeight].size(1),
                      .values = in[first],
                      .bitmaps = kept(has_bitmaps, in[first + 1]),
                      .gaps = kept(has_distances(format), in[first + 2]),
                      .offsets = kept(!is_dense, in[first + 3]),
                      .info = kept(!is_dense, in[first + 4]),
                      .constant = attrs.flag("constant")};
  // That of the case's weight lies in the arrays, which may be on a GPU: the most that there can be.
  if (format == SparseFormat::tca_bme) weight.most = tca_bme::kGroupRows * tca_bme::kGroupColumns;
  return weight;
}

/// Throws unless the arrays from input `first` on are those of a weight [out, in].
void check_weight(const char* name, const std::vector<Tensor>& in, size_t first, int64_t out,
                  const Attrs& attrs) {
  validate_arrays(weight_of(in, first, out, attrs), name);
}

Gate gate_of(const Tensor& scales, const Attrs& attrs) {
  const std::string& kind = attrs.word("gate");
  check(!scales.defined() || kind != "none",
        "sparse_linear: scales are given, and gate is none, which has no use for them; leave them out");
  Gate gate{.scales = scales.defined() ? scales.packed() : Tensor()};
  if (kind == "threshold") gate.kind = Gate::Kind::threshold, gate.threshold = attrs.number("threshold");
  if (kind == "top_k") gate.kind = Gate::Kind::top_k, gate.keep = attrs.integer("keep");
  return gate;
}

/// The weight `parts` times in one call, each time under another threshold.
std::vector<SparsePart> parts_of(const std::vector<Tensor>& in, const Attrs& attrs) {
  std::vector<SparsePart> parts;
  for (int64_t i = 0; i < attrs.integer("parts"); ++i) {
    parts.push_back({weight_of(in, kValues, in[kWeight].size(0), attrs), gate_of(in[kScales], attrs)});
    parts.back().gate.threshold *= 1 + double(i) / 2;
  }
  return parts;
}

/// One bit per element, or four per stored one.
double bytes_of_positions(const std::string& format, double elements, double density) {
  if (format == "dense-columns") return 0;
  return has_distances(parse_sparse_format(format)) ? elements * density / 2 : elements / 8;
}

/// T tokens, out, in; 1 if there are a bias, a residual, scales; density: of the weight, in percent.
Problem sparse_linear_problem(const Dims& d, const Attrs& attrs) {
  const int64_t tokens = d.at("T"), in = d.at("in"), rows = d.at("out"), out = rows * attrs.integer("parts");
  const double density = double(d.at("density")) / 100, all = double(out) * double(in);
  const auto given = [&](const char* name, const Shape& shape, Fill fill = Fill::normal) {
    return InputCase{.shape = shape, .fill = d.contains(name) ? fill : Fill::absent};
  };
  const std::string& format = attrs.word("format");
  const bool is_dense = format == "dense-columns";
  const double positions = bytes_of_positions(format, all, density);
  return {.inputs = {{.shape = {tokens, in}},
                     {.shape = {rows, in}, .density = density},
                     given("bias", {out}),
                     given("residual", {tokens, out}),
                     given("scales", {in}, Fill::positive),
                     {},
                     {},
                     {},
                     {},
                     {}},
          .forward_flops = 2 * double(tokens) * all * density,
          .forward_elements = double(tokens) * double(in + out) + (is_dense ? all : all * density),
          .forward_bytes = positions};
}

std::vector<Case> sparse_linear_cases() {
  std::vector<Case> cases;
  struct Size {
    int64_t tokens, out, in, density;
  };
  const Size sizes[] = {{1, 1, 1, 100},     {1, 5, 7, 50},       {3, 64, 64, 50},  {1, 256, 64, 30},
                        {2, 257, 65, 50},   {4, 130, 1, 100},    {5, 1, 130, 60},  {8, 300, 515, 20},
                        {1, 520, 2056, 50}, {7, 63, 200, 0},     {9, 130, 70, 50}, {16, 100, 300, 50},
                        {31, 65, 129, 70},  {32, 192, 1000, 50}, {33, 70, 90, 40}, {129, 257, 130, 50},
                        {0, 5, 7, 50},      {3, 0, 7, 50},       {3, 5, 0, 100},   {2, 700, 4099, 50},
                        {300, 70, 130, 40}};
  const auto add = [&](const Size& size, const char* format, const char* gate,
                       std::initializer_list<const char*> with, Placement placement = Placement::pitched,
                       int64_t parts = 1, bool constant = false) {
    Dims dims{{"T", size.tokens}, {"out", size.out}, {"in", size.in}, {"density", size.density}};
    for (const char* const name : with) dims[name] = 1;
    cases.push_back({.dims = dims,
                     .attrs = {{"format", std::string(format)},
                               {"gate", std::string(gate)},
                               {"threshold", 0.6},
                               {"keep", size.in / 2},
                               {"parts", parts},
                               {"constant", constant}},
                     .placement = placement,
                     .gradcheck = false});
  };
  for (const char* const format : kSparseFormats) {
    for (const Size& size : sizes) add(size, format, "threshold", {"bias"});
    for (const Size& size : {sizes[4], sizes[7], sizes[12]}) {
      add(size, format, "none", {});
      add(size, format, "top_k", {"residual"});
      add(size, format, "top_k", {"bias", "residual", "scales"});
      add(size, format, "threshold", {"scales", "residual"}, Placement::strided);
      add(size, format, "threshold", {"bias", "residual"}, Placement::transposed);
    }
    for (const Size& size : {sizes[4], sizes[7], sizes[11]})
      for (const int64_t parts : {2, 5})
        add(size, format, "threshold", {"bias", "residual"}, Placement::pitched, parts, parts == 5);
    add({1, 300, 12000, 50}, format, "threshold", {"bias", "residual"}, Placement::pitched, 1, true);
    add({2, 90, 13000, 40}, format, "none", {}, Placement::pitched, 1, true);
    add({12, 4500, 1030, 50}, format, "none", {"residual"}, Placement::pitched, 2, true);
    add({40, 300, 11500, 50}, format, "top_k", {"bias"}, Placement::pitched, 3, true);
  }
  return cases;
}

InputSpec array_input(const char* name, const char* shape, std::vector<DType> dtypes = {}) {
  return {
      .name = name, .shape = shape, .differentiable = false, .dtypes = std::move(dtypes), .from = {"weight"}};
}

const AttrSpec kFormatAttr{"format",
                           std::string("tca-bme"),
                           "of the weight",
                           {std::begin(kSparseFormats), std::end(kSparseFormats)}},
    kGateAttr{"gate", std::string("none"), "which inputs count", {"none", "threshold", "top_k"}},
    kKeepAttr{.name = "keep",
              .fallback = int64_t{0},
              .help = "inputs of a token that count",
              .only_with = {"gate", "top_k"}},
    kConstantAttr{"constant", false,
                  "kernels may read the weight before the kernels ahead of them have ended"};

AttrSpec threshold_attr(const char* help) {
  return {.name = "threshold", .fallback = 0.0, .help = help, .only_with = {"gate", "threshold"}};
}

// ---- sparse_linear_swiglu ----

/// Inputs x, weight, and the arrays of gate and of up.
constexpr size_t kGateArrays = 2, kUpArrays = 7;

int64_t swiglu_width(const std::vector<Tensor>& in) {
  const Tensor& weight = in[kWeight];
  check(weight.rank() == 2 && weight.size(0) % 2 == 0, "sparse_linear_swiglu: weight is ", describe(weight),
        "; expected [2F, in], the rows of gate and then as many of up");
  return weight.size(0) / 2;
}

std::vector<Tensor> run_swiglu(const std::vector<Tensor>& in, const Attrs& attrs) {
  const int64_t width = swiglu_width(in);
  const Gate gate = gate_of({}, attrs);
  Gate other = gate;
  other.threshold *= 1.5;
  return {sparse_linear_swiglu(in[kX], {weight_of(in, kGateArrays, width, attrs), gate},
                               {weight_of(in, kUpArrays, width, attrs), other})};
}

std::vector<Tensor> derive_swiglu(const std::vector<Tensor>& in, const Attrs& attrs) {
  const int64_t width = swiglu_width(in);
  std::vector<Tensor> arrays;
  for (const int64_t first : {int64_t{0}, width}) {
    const Tensor rows = in[kWeight].detach().slice(0, first, first + width);
    for (const Tensor& array : arrays_of(compress(rows, parse_sparse_format(attrs.word("format")))))
      arrays.push_back(array);
  }
  return arrays;
}

void check_swiglu(const std::vector<Tensor>& in, const Attrs& attrs) {
  const int64_t width = swiglu_width(in);
  check_weight("sparse_linear_swiglu: gate", in, kGateArrays, width, attrs);
  check_weight("sparse_linear_swiglu: up", in, kUpArrays, width, attrs);
}

Problem swiglu_problem(const Dims& d, const Attrs& attrs) {
  const int64_t tokens = d.at("T"), in = d.at("in"), width = d.at("F");
  const double density = double(d.at("density")) / 100, all = 2 * double(width) * double(in);
  const bool is_dense = attrs.word("format") == "dense-columns";
  const double positions = bytes_of_positions(attrs.word("format"), all, density);
  std::vector<InputCase> inputs = {{.shape = {tokens, in}}, {.shape = {2 * width, in}, .density = density}};
  inputs.resize(12);
  return {.inputs = std::move(inputs),
          .forward_flops = 2 * double(tokens) * all * density,
          .forward_elements = double(tokens) * double(in + width) + (is_dense ? all : all * density),
          .forward_bytes = positions};
}

OpSpec swiglu_spec() {
  OpSpec op{.name = "sparse_linear_swiglu",
            .summary = "y = silu(gate(x) gate^T) (gate(x) up^T), the weights compressed",
            .inputs = {{.name = "x", .shape = "[T, in]", .differentiable = false},
                       {.name = "weight",
                        .shape = "[2F, in]: only its shape is used; gate's rows, then up's",
                        .differentiable = false}},
            .attrs = {kFormatAttr, kGateAttr,
                      threshold_attr("inputs of at most this magnitude do not count; for up, 1.5 times it"),
                      kKeepAttr, kConstantAttr},
            .outputs = {{"y", "[T, F]", false}},
            .cpu_dtypes = {DType::f32, DType::bf16, DType::f16},
            .cuda_dtypes = {DType::bf16, DType::f16},
            .run = run_swiglu,
            .derive = derive_swiglu,
            .check_given = check_swiglu,
            .problem = swiglu_problem};
  for (const char* const name : {"gate", "up"}) {
    const std::string of(name);
    const auto add = [&](const char* array, const char* shape, std::vector<DType> dtypes = {}) {
      InputSpec input = array_input("", shape, std::move(dtypes));
      input.name = of + "_" + array;
      op.inputs.push_back(std::move(input));
    };
    add("values", "[stored]");
    add("bitmaps", "[bitmaps]", {DType::i64});
    add("gaps", "[chunks * 32]", {DType::i32});
    add("offsets", "[groups + 1]", {DType::i32});
    add("info", "[entries]", {DType::i32});
  }
  op.variants = sparse_linear_swiglu_variants();
  const auto of = [](const char* format, const char* gate, int64_t tokens, int64_t width, int64_t in,
                     int64_t density, bool constant = false) {
    return Case{.dims = {{"T", tokens}, {"F", width}, {"in", in}, {"density", density}},
                .attrs = {{"format", std::string(format)},
                          {"gate", std::string(gate)},
                          {"threshold", 0.5},
                          {"keep", in / 2},
                          {"constant", constant}},
                .gradcheck = false};
  };
  for (const char* const format : kSparseFormats) {
    op.cases.push_back(of(format, "none", 1, 1, 1, 100));
    op.cases.push_back(of(format, "threshold", 1, 7, 5, 60));
    op.cases.push_back(of(format, "threshold", 1, 300, 700, 50, true));
    // More tiles than clusters of 8 blocks fit on a GPU.
    if (!std::string_view(format).starts_with("t"))
      op.cases.push_back(of(format, "none", 1, 7700, 1100, 50, true));
    op.cases.push_back(of(format, "top_k", 2, 257, 515, 40));
    op.cases.push_back(of(format, "threshold", 3, 130, 300, 50, true));
    op.cases.push_back(of(format, "none", 8, 260, 1030, 30));
    op.cases.push_back(of(format, "threshold", 9, 40, 70, 50));
    op.cases.push_back(of(format, "none", 0, 5, 7, 50));
    op.cases.push_back(of(format, "none", 3, 0, 7, 50));
    op.benches.push_back(of(format, reads_all_inputs(parse_sparse_format(format)) ? "none" : "top_k", 1,
                            11008, 4096, 50, true));
  }
  op.f32_checks = false;  // compressed weights in f32 have CPU kernels alone
  op.sweep = [](Draw& draw) {
    static constexpr const char* kGates[] = {"none", "threshold", "top_k"};
    const int64_t in = draw.size(1, 5000);
    return Case{.dims = {{"T", draw.size(1, 16)},
                         {"F", draw.size(1, 5000)},
                         {"in", in},
                         {"density", draw.size(1, 100)}},
                .attrs = {{"format", std::string(kSparseFormats[draw.pick({0, 1, 2, 3, 4})])},
                          {"gate", std::string(kGates[draw.pick({0, 1, 2})])},
                          {"threshold", 0.6},
                          {"keep", in / 2},
                          {"constant", draw.size(1, 2) == 2}},
                .gradcheck = false};
  };
  return op;
}

}  // namespace

std::vector<OpSpec> sparse_linear_specs() {
  OpSpec op{
      .name = "sparse_linear",
      .summary = "y = gate(x) weight^T + bias + residual, the weight compressed",
      .inputs = {{.name = "x", .shape = "[T, in]", .differentiable = false},
                 {.name = "weight", .shape = "[out, in]: only its shape is used", .differentiable = false},
                 {.name = "bias", .shape = "[parts * out]", .optional = true, .differentiable = false},
                 {.name = "residual", .shape = "[T, parts * out]", .optional = true, .differentiable = false},
                 {.name = "scales",
                  .shape = "[in]",
                  .optional = true,
                  .differentiable = false,
                  .dtypes = {DType::f32}},
                 array_input("values", "[stored]"),
                 array_input("bitmaps", "[bitmaps]", {DType::i64}),
                 array_input("gaps", "[chunks * 32]", {DType::i32}),
                 array_input("offsets", "[groups + 1]", {DType::i32}),
                 array_input("info", "[entries]", {DType::i32})},
      .attrs = {kFormatAttr,
                kGateAttr,
                threshold_attr("inputs of at most this magnitude, times their scale, do not count"),
                kKeepAttr,
                kConstantAttr,
                {"parts", int64_t{1}, "times that the weight is used, with thresholds t, 1.5 t, 2 t, ..."}},
      .outputs = {{"y", "[T, parts * out]", false}},
      .cpu_dtypes = {DType::f32, DType::bf16, DType::f16},
      .cuda_dtypes = {DType::bf16, DType::f16},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            return std::vector{sparse_linear(in[kX], parts_of(in, attrs), in[kBias], in[kResidual])};
          },
      .derive =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            return arrays_of(compress(in[kWeight], parse_sparse_format(attrs.word("format"))));
          },
      .check_given =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            check_weight("sparse_linear: the weight", in, kValues, in[kWeight].size(0), attrs);
          },
      .problem = sparse_linear_problem,
      .cases = sparse_linear_cases(),
  };
  op.variants = sparse_linear_variants();
  for (const char* const format : kSparseFormats)
    for (const auto& [out, in] : {std::pair<int64_t, int64_t>{4096, 4096}, {11008, 4096}, {4096, 11008}})
      op.benches.push_back(
          {.dims = {{"T", 1}, {"out", out}, {"in", in}, {"density", 50}},
           .attrs = {{"format", std::string(format)},
                     {"gate", reads_all_inputs(parse_sparse_format(format)) ? "none" : "top_k"},
                     {"keep", in / 2}}});
  op.f32_checks = false;  // compressed weights in f32 have CPU kernels alone
  op.sweep = [](Draw& draw) {
    static constexpr const char* kGates[] = {"none", "threshold", "top_k"};
    const int64_t in = draw.size(1, 5000);
    return Case{.dims = {{"T", draw.size(1, 64)},
                         {"out", draw.size(1, 5000)},
                         {"in", in},
                         {"density", draw.size(1, 100)}},
                .attrs = {{"format", std::string(kSparseFormats[draw.pick({0, 1, 2, 3, 4})])},
                          {"gate", std::string(kGates[draw.pick({0, 1, 2})])},
                          {"threshold", 0.6},
                          {"keep", in / 2},
                          {"parts", draw.size(1, 3)},
                          {"constant", draw.size(1, 2) == 2}},
                .gradcheck = false};
  };
  return {std::move(op), swiglu_spec()};
}

}  // namespace tessera::ops

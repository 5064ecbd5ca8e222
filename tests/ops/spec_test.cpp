#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "ops/verify.h"
#include "runtime/allocator.h"
#include "tests/errors.h"
#include "tests/ops/example_op.h"

/// What declarations say of dtypes, of inputs made from others and of random numbers, and what is made of it.

namespace tessera::ops {
namespace {

constexpr uint64_t kSpecSeed = 11;

std::vector<Tensor> made(const OpSpec& op, const Case& c, DType dtype) {
  const Attrs attrs = complete(op, c.attrs);
  return make_inputs(op, op.problem(c.dims, attrs), attrs, c.placement, dtype, Device::cpu(), kSpecSeed);
}

std::vector<Tensor> made_for_oracle(const OpSpec& op, const Case& c, DType dtype) {
  return oracle_inputs(op, made(op, c, dtype), c.placement);
}

Tensor bytes(const std::vector<uint8_t>& values) {
  return Tensor::from(values, {int64_t(values.size())});
}

TEST(OpSpecs, AreWellFormed) {
  std::set<std::string> names;
  for (const OpSpec& op : tested_ops()) {
    SCOPED_TRACE(op.name);
    EXPECT_TRUE(names.insert(op.name).second);
    std::set<std::string> inputs;
    bool derived = false;
    for (const InputSpec& input : op.inputs) {
      EXPECT_TRUE(inputs.insert(input.name).second) << input.name;
      derived = derived || input.is_derived();
      EXPECT_FALSE(input.is_derived() && input.optional) << input.name;
      for (const std::string& source : input.from) {
        const auto found = std::ranges::find(op.inputs, source, &InputSpec::name);
        ASSERT_NE(found, op.inputs.end()) << input.name << " from " << source;
        EXPECT_FALSE(found->is_derived()) << input.name << " from " << source;
      }
    }
    EXPECT_EQ(bool(op.derive), derived);
    if (!takes_floating(op)) EXPECT_TRUE(op.cpu_dtypes.size() == 1 && op.cuda_dtypes.size() == 1);
    for (const AttrSpec& attr : op.attrs) {
      const bool seeds = attr.name.find("seed") != std::string::npos;
      EXPECT_EQ(seeds, attr.name == op.seed) << attr.name;
      EXPECT_TRUE(!seeds || std::holds_alternative<int64_t>(attr.fallback)) << attr.name;
    }
    EXPECT_TRUE(op.seed.empty() || std::ranges::find(op.attrs, op.seed, &AttrSpec::name) != op.attrs.end());
  }
}

TEST(OpSpecs, OfRandomOperatorsNameTheSeedThatDecides) {
  int random = 0;
  for (const OpSpec& op : tested_ops()) {
    if (op.seed.empty()) continue;
    SCOPED_TRACE(op.name);
    ++random;
    bool differs = false;
    for (const Case& c : op.cases) {
      const std::vector<Tensor> inputs = made(op, c, DType::f32);
      int64_t elements = 0;
      for (const Tensor& input : inputs) elements += input.defined() ? input.count() : 0;
      if (elements > 10000) continue;
      const auto outputs = [&](int64_t seed) {
        Attrs attrs = complete(op, c.attrs);
        attrs.set(op.seed, seed);
        const auto results = run_with_gradients(op, inputs, attrs, {}).outputs;
        const Results ran =
            run_with_gradients(op, inputs, attrs, make_gradients(op, results, Device::cpu(), 3));
        std::vector<std::vector<double>> all;
        for (const auto* list : {&ran.outputs, &ran.gradients})
          for (const Tensor& y : *list)
            if (y.defined()) all.push_back(y.to_vector<double>());
        return all;
      };
      const auto first = outputs(1);
      EXPECT_EQ(outputs(1), first);
      differs = differs || outputs(2) != first;
    }
    EXPECT_TRUE(differs);
  }
  EXPECT_GE(random, 5);
}

TEST(OpSpecs, SeededRngDrawsTheFirstStreamsOfItsSeed) {
  Rng plain(5);
  SeededRng random(5, 2);
  for (int stream = 0; stream < 2; ++stream) {
    const RandomStream drawn = random.rng().reserve(Device::cpu());
    EXPECT_EQ(drawn.seed, 5u);
    EXPECT_EQ(drawn.offset(), uint64_t(stream));
  }
  EXPECT_NE(message_of([&] { random.rng().reserve(Device::cpu()); }), "");
}

TEST(OpSpecs, MakingInputsGivesEveryRunTheSameBytesAndTheSameInputsMadeFromThem) {
  const OpSpec op = example_op();
  for (const Case& c : op.cases) {
    const std::vector<Tensor> oracle = made_for_oracle(op, c, DType::bf16);
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
      const std::vector<Tensor> inputs = made(op, c, dtype);
      EXPECT_EQ(inputs[0].dtype(), dtype);
      EXPECT_EQ(inputs[1].dtype(), DType::u8);
      EXPECT_EQ(inputs[2].dtype(), DType::i32);
      for (const size_t i : {1, 2}) {
        EXPECT_EQ(inputs[i].dtype(), oracle[i].dtype());
        EXPECT_EQ(inputs[i].to_vector<double>(), oracle[i].to_vector<double>());
      }
      EXPECT_EQ(inputs[2].to_vector<int32_t>(), rows_of_weights(inputs[1])[0].to_vector<int32_t>());
    }
    EXPECT_EQ(oracle[0].dtype(), DType::f64);
  }
  EXPECT_GT(made(op, op.cases[0], DType::f32)[2].count(), 0);
}

/// A weight in the operator's dtype made from another: the oracle's is the rounded one, not another one.
TEST(OpSpecs, MakingInputsWidensTheOraclesDerivedInputs) {
  OpSpec op = example_op();
  op.inputs[2] = {.name = "twice", .shape = "[R, C]", .from = {"x"}};
  op.derive = [](const std::vector<Tensor>& in, const Attrs&) { return std::vector{add(in[0], in[0])}; };
  for (const DType dtype : {DType::bf16, DType::f32}) {
    const std::vector<Tensor> rounded = made(op, op.cases[0], dtype),
                              wide = made_for_oracle(op, op.cases[0], dtype);
    EXPECT_EQ(rounded[2].dtype(), dtype);
    EXPECT_EQ(wide[2].dtype(), DType::f64);
    EXPECT_EQ(wide[2].to_vector<double>(), rounded[2].to_vector<double>());
    EXPECT_EQ(wide[2].to_vector<double>()[3], 2 * wide[0].to_vector<double>()[3]);
  }
}

TEST(OpSpecs, ValuesOfPackedBitsHaveTheDensityAndAnEmptyTail) {
  for (const double density : {0.0, 0.25, 0.5, 1.0}) {
    const InputCase packed{.shape = {50, 3}, .fill = Fill::bits, .high = 70, .density = density};
    const auto words = input_values(packed, kSpecSeed, 0).to_vector<int64_t>();
    ASSERT_EQ(words.size(), 150u);
    int64_t ones = 0;
    for (size_t i = 0; i < words.size(); ++i) {
      EXPECT_EQ(int64_t(int32_t(words[i])), words[i]);
      for (int bit = 0; bit < 32; ++bit) {
        const bool set = uint32_t(words[i]) >> bit & 1;
        ones += set;
        EXPECT_FALSE(set && 32 * (i % 3) + size_t(bit) >= 70) << i << " " << bit;
      }
    }
    // 3500 bits: within 6 standard deviations.
    EXPECT_NEAR(double(ones), 3500 * density, 6 * std::sqrt(3500 * density * (1 - density)));
  }
}

TEST(OpSpecs, ValuesHaveTheirDensity) {
  const InputCase half{.shape = {4000}, .density = 0.5};
  const auto values = input_values(half, kSpecSeed, 0).to_vector<double>(),
             whole = input_values({.shape = {4000}}, kSpecSeed, 0).to_vector<double>();
  for (size_t i = 0; i < values.size(); ++i) EXPECT_TRUE(values[i] == 0 || values[i] == whole[i]) << i;
  EXPECT_EQ(std::ranges::count(whole, 0.0), 0);
  EXPECT_NEAR(double(std::ranges::count(values, 0.0)), 2000, 6 * std::sqrt(1000.0));
}

TEST(OpSpecs, DerivingMakesWhatIsLeftOutAndKeepsWhatIsGiven) {
  const OpSpec op = example_op();
  const Tensor x = Tensor::zeros({3, 2}, DType::f32, Device::cpu()), weights = bytes({2, 0, 1});
  std::vector<Tensor> inputs{x, weights, Tensor()};
  check_inputs(op, inputs);
  derive_inputs(op, inputs, {});
  EXPECT_EQ(inputs[2].to_vector<int32_t>(), (std::vector<int32_t>{0, 2}));
  check_inputs(op, inputs);
  const Tensor given = Tensor::from(std::vector<int32_t>{1}, {1});
  inputs[2] = given;
  derive_inputs(op, inputs, {});
  EXPECT_TRUE(inputs[2].shares_storage(given));
  if (Device::cuda_count() == 0) return;
  std::vector<Tensor> there{x.to(Device::cuda(0)), weights.to(Device::cuda(0)), Tensor()};
  derive_inputs(op, there, {});
  EXPECT_EQ(there[2].device(), Device::cuda(0));
  EXPECT_EQ(there[2].to_vector<int32_t>(), (std::vector<int32_t>{0, 2}));
}

TEST(OpSpecs, CheckingInputsSaysWhatIsMissingAndWhichDTypesFit) {
  OpSpec op = example_op();
  const Tensor x = Tensor::zeros({3, 2}, DType::f32, Device::cpu()), weights = bytes({2, 0, 1});
  EXPECT_EQ(
      message_of([&] {
        check_inputs(op, {x, Tensor(), Tensor()});
      }),
      "weighted_rows: input \"rows\" [K]: rows whose weight is not 0 is missing, and so is \"weights\", "
      "from which it could be made");
  EXPECT_EQ(message_of([&] {
              check_inputs(op, {x, weights.to(DType::i32), Tensor()});
            }),
            "weighted_rows: input \"weights\" is i32; expected u8");
  op.inputs[2].dtypes = index_dtypes();
  EXPECT_EQ(message_of([&] {
              check_inputs(op, {x, weights, x});
            }),
            "weighted_rows: input \"rows\" is f32; expected i64 or i32");
  const Tensor given = Tensor::from(std::vector<int32_t>{0, 2}, {2});
  op.inputs.push_back({.name = "count", .shape = "[]", .dtypes = {DType::i32}, .from = {"weights"}});
  EXPECT_EQ(message_of([&] {
              check_inputs(op, {x, weights, weights.to(DType::i32), Tensor()});
            }),
            "weighted_rows: input \"count\" is missing, but \"rows\" is given; expected all inputs that are "
            "made from others, or none");
  std::vector<Tensor> inputs{x, weights, Tensor(), Tensor()};
  EXPECT_NE(message_of([&] { derive_inputs(op, inputs, {}); }).find("OpSpec::derive made 1 inputs"),
            std::string::npos);
  op.derive = [&](const std::vector<Tensor>&, const Attrs&) { return std::vector{given, x}; };
  const std::string said = message_of([&] { derive_inputs(op, inputs, {}); });
  EXPECT_NE(said.find("OpSpec::derive made \"count\" as "), std::string::npos) << said;
  EXPECT_TRUE(said.ends_with("expected i32")) << said;
}

TEST(OpSpecs, DerivingChecksWhatIsGiven) {
  for (const auto& [name, format] : {std::pair("sparse_linear", "dense-columns"),
                                     {"sparse_linear", "tiled-cbc"},
                                     {"sparse_linear", "tca-bme"},
                                     {"sparse_linear", "sell-delta4"},
                                     {"sparse_linear", "mma-delta4"},
                                     {"sparse_linear_swiglu", "tiled-cbc"},
                                     {"sparse_linear_swiglu", "sell-delta4"},
                                     {"sparse_decoder_layers", ""}}) {
    const OpSpec& op = find_op(name);
    const Dims dims =
        *format ? Dims{{"T", 2}, {"out", 130}, {"F", 130}, {"in", 70}, {"density", 50}} : op.cases.at(0).dims;
    const Attrs attrs = complete(op, *format ? Attrs{{"format", std::string(format)}} : Attrs());
    std::vector<Tensor> given = made(op, {.dims = dims, .attrs = attrs}, DType::f32);
    EXPECT_EQ(message_of([&] { derive_inputs(op, given, attrs); }), "");
    for (size_t i = 0; i < given.size(); ++i) {
      if (!op.inputs[i].is_derived() || given[i].count() == 0) continue;
      std::vector<Tensor> broken = given;
      broken[i] = given[i].slice(0, 0, given[i].size(0) - 1);
      const std::string shorter = message_of([&] { derive_inputs(op, broken, attrs); });
      EXPECT_TRUE(shorter.starts_with(op.name)) << op.inputs[i].name << ": " << shorter;
      if (op.inputs[i].name.find("offsets") == std::string::npos) continue;
      for (const int32_t far : {1 << 28, -(1 << 28)}) {
        broken[i] = given[i].clone();
        broken[i].data<int32_t>()[broken[i].count() - 1] = far;
        EXPECT_NE(message_of([&] { derive_inputs(op, broken, attrs); }), "")
            << op.inputs[i].name << " " << far;
      }
    }
  }
  const OpSpec& swiglu = find_op("sparse_linear_swiglu");
  std::vector<Tensor> odd(swiglu.inputs.size());
  odd[0] = Tensor::zeros({1, 8}, DType::f32, Device::cpu());
  odd[1] = Tensor::zeros({5, 8}, DType::f32, Device::cpu());
  EXPECT_EQ(
      message_of([&] { derive_inputs(swiglu, odd, complete(swiglu, {})); }),
      "sparse_linear_swiglu: weight is f32[5, 8] on cpu; expected [2F, in], the rows of gate and then as "
      "many of up");
}

TEST(OpSpecs, WhatHasNoEffectIsRefused) {
  for (const OpSpec& op : all_ops())
    for (const AttrSpec& attr : op.attrs) {
      const auto& [other, value] = attr.only_with;
      if (other.empty()) continue;
      const auto found = std::ranges::find(op.attrs, other, &AttrSpec::name);
      ASSERT_NE(found, op.attrs.end()) << op.name << " " << attr.name;
      EXPECT_EQ(std::ranges::count(found->choices, value), 1) << op.name << " " << attr.name;
    }
  const OpSpec& keep_largest = find_op("keep_largest");
  EXPECT_EQ(
      message_of([&] {
        check_used(keep_largest, {{"group", int64_t{3}}});
      }),
      "keep_largest: attribute \"group\" has an effect with within=group alone, and within is row; leave it "
      "out");
  EXPECT_EQ(message_of([&] {
              check_used(keep_largest, {{"group", int64_t{3}}, {"within", std::string("group")}});
            }),
            "");
  const auto message = [](const char* name, const std::vector<Tensor>& inputs, const Attrs& attrs) {
    const OpSpec& op = find_op(name);
    std::vector<Tensor> all = inputs;
    all.resize(op.inputs.size());
    const Attrs complete_attrs = complete(op, attrs);
    return message_of([&] {
      derive_inputs(op, all, complete_attrs);
      op.run(all, complete_attrs);
    });
  };
  const Tensor x = Tensor::zeros({4, 8}, DType::f32, Device::cpu()),
               ones = Tensor::full({8}, 1, DType::f32, Device::cpu()),
               scale = Tensor::full({1}, 1, DType::f32, Device::cpu()),
               keep = Tensor::zeros({4, 8}, DType::u8, Device::cpu());
  EXPECT_EQ(message("sparse_linear", {x, x, {}, {}, ones}, {}),
            "sparse_linear: scales are given, and gate is none, which has no use for them; leave them out");
  EXPECT_EQ(message("compress24", {x, scale}, {}),
            "compress24: scale is given, and method is naive, which has no use for it; leave it out");
  for (const char* const attr : {"zeros", "group"})
    EXPECT_EQ(message("obs_columns", {x, x, {}, keep}, {{attr, int64_t{2}}}),
              "obs_columns: zeros and group have no effect next to keep; leave them out, or leave keep out");
  EXPECT_EQ(message("obs_columns", {x, x, {}, keep}, {}), "");
}

TEST(OpSpecs, ADimensionThatNoTensorHasIsNamedWithItsOperator) {
  const Tensor x = Tensor::zeros({4, 8}, DType::f32, Device::cpu());
  const OpSpec& sum = find_op("sum");
  EXPECT_EQ(message_of([&] {
              sum.run({x}, complete(sum, {{"dim", (int64_t{1} << 32) + 1}}));
            }),
            "sum: attribute \"dim\" is 4294967297; no tensor has such a dimension");
  const OpSpec& split = find_op("split");
  EXPECT_EQ(
      message_of([&] {
        split.run({x}, complete(split, {{"sizes", std::string("2, 1, 1")}}));
      }),
      "split: attribute \"sizes\" is \"2, 1, 1\"; expected integers with commas between and no spaces, for "
      "example 2,3,-1");
}

TEST(OpSpecs, SizesThatAreFlagsAreOffAt0) {
  constexpr std::pair<const char*, const char*> kFlags[] = {
      {"linear", "residual"},   {"mlp", "residual"},        {"multiply24", "residual"},
      {"multiply24", "bias"},   {"multiply24", "bias_m"},   {"layernorm", "vector"},
      {"rmsnorm", "vector"},    {"mlp_sparse24", "counts"}, {"gather_selected", "S"},
      {"scatter_selected", "S"}};
  for (const auto& [name, flag] : kFlags) {
    SCOPED_TRACE(std::string(name) + " " + flag);
    const OpSpec& op = find_op(name);
    const Attrs attrs = complete(op, op.cases.at(0).attrs);
    Dims dims = op.cases.at(0).dims;
    dims.erase(flag);
    const Problem without = op.problem(dims, attrs);
    dims[flag] = 0;
    const Problem at_0 = op.problem(dims, attrs);
    EXPECT_EQ(at_0.forward_flops, without.forward_flops);
    EXPECT_EQ(at_0.forward_elements, without.forward_elements);
    for (size_t i = 0; i < op.inputs.size(); ++i) {
      EXPECT_EQ(at_0.inputs[i].shape, without.inputs[i].shape) << op.inputs[i].name;
      EXPECT_EQ(at_0.inputs[i].fill, without.inputs[i].fill) << op.inputs[i].name;
    }
  }
}

TEST(OpSpecs, OfDecoderLayersRefuseANumberOfLayersThatFillsTheMemory) {
  for (const char* const name : {"decoder_layers", "sparse_decoder_layers"}) {
    const OpSpec& op = find_op(name);
    const std::vector<Tensor> inputs = made(op, op.cases.at(0), DType::f32);
    for (const int64_t layers : {int64_t{0}, int64_t{10'001}, int64_t{1} << 62}) {
      const Attrs attrs = complete(op, {{"layers", layers}});
      const std::string given = "layers is " + std::to_string(layers);
      expect_error([&] { op.run(inputs, attrs); }, {given.c_str(), "expected 1 to 10000"});
    }
  }
}

TEST(OpSpecs, CheckingOutputsRefusesAnotherNumberOrDType) {
  OpSpec op = example_op();
  const std::vector<Tensor> inputs = made(op, op.cases[0], DType::bf16);
  const auto run = [&] { run_with_gradients(op, inputs, complete(op, {}), {}); };
  run();
  op.outputs[1].dtypes = {DType::u8, DType::i64};
  EXPECT_EQ(message_of(run), "weighted_rows: output \"rows\" is i32; expected u8 or i64");
  op.outputs[1].dtypes = {};
  EXPECT_EQ(message_of(run), "weighted_rows: output \"rows\" is i32; expected bf16");
  op.outputs.pop_back();
  EXPECT_EQ(message_of(run), "weighted_rows: 2 outputs; expected 1");
}

/// Without floating inputs: words of bits in, numbers out.
TEST(OpSpecs, RunOperatorsWithoutFloatingInputs) {
  const OpSpec op{
      .name = "low_bits",
      .summary = "y = x as i64",
      .inputs = {{.name = "x", .shape = "[R, W]", .dtypes = {DType::i32}}},
      .outputs = {{"y", "[R, W]", false, {DType::i64}}},
      .cpu_dtypes = {DType::i32},
      .cuda_dtypes = {DType::i32},
      .run = [](const std::vector<Tensor>& in, const Attrs&) { return std::vector{in[0].to(DType::i64)}; },
      .problem =
          [](const Dims& d, const Attrs&) {
            return Problem{.inputs = {{.shape = {d.at("R"), (d.at("C") + 31) / 32},
                                       .fill = Fill::bits,
                                       .high = d.at("C"),
                                       .density = 0.5}}};
          },
      .cases = {{.dims = {{"R", 3}, {"C", 45}}}}};
  EXPECT_FALSE(takes_floating(op));
  const std::vector<Tensor> inputs = made(op, op.cases[0], DType::i32),
                            oracle = made_for_oracle(op, op.cases[0], DType::i32);
  check_inputs(op, inputs);
  EXPECT_EQ(oracle[0].dtype(), DType::i32);
  const Results ours = run_with_gradients(op, inputs, {}, {Tensor()});
  EXPECT_EQ(compare(ours.outputs[0], run_with_gradients(op, oracle, {}, {Tensor()}).outputs[0]).largest, 0);
}

}  // namespace
}  // namespace tessera::ops

#include "nn/module.h"

#include <gtest/gtest.h>

#include <optional>

#include "nn/dropout.h"
#include "nn/mlp.h"
#include "nn/norm.h"
#include "nn/sequential.h"
#include "nn/summary.h"
#include "nn/weights24.h"
#include "ops/reduce/reduce.h"
#include "tests/tensors.h"

namespace tessera::nn {
namespace {

struct Block {
  Block(int64_t width, Rng& rng) : mlp(width, 2 * width, rng), norm(width) {}
  void fields(auto&& visit) { visit("mlp", mlp), visit("norm", norm); }
  Mlp mlp;
  LayerNorm norm;
};

struct Model {
  explicit Model(Rng& rng) : embed(3, 4, rng), out(4, 3, rng, {.bias = false}) {
    for (int i = 0; i < 2; ++i) blocks.emplace_back(4, rng);
    position = Tensor::zeros({7, 4}, DType::f32, Device::cpu());  // no parameter
  }
  void fields(auto&& visit) {
    visit("embed", embed), visit("blocks", blocks), visit("last", last), visit("out", out);
    visit("position", position);
  }
  Linear embed;
  std::vector<Block> blocks;
  std::optional<LayerNorm> last;
  Linear out;
  Tensor position;
};

TEST(Module, FrozenParametersGetNoGradient) {
  Rng rng(1);
  Model model(rng);
  freeze(model, [](const std::string& name) { return name.starts_with("blocks.") || name == "out.weight"; });
  std::vector<std::string> names;
  for (const NamedParameter& parameter : parameters(model)) names.push_back(parameter.name);
  EXPECT_EQ(names, (std::vector<std::string>{"embed.weight", "embed.bias"}));
}

TEST(Module, APassThroughAFrozenCopyLeavesTheGradientsOfTheModelAlone) {
  Rng rng(1);
  const Mlp model(3, 4, rng);
  Mlp frozen = model;
  freeze(frozen, [](const std::string&) { return true; });
  EXPECT_TRUE(frozen.up.weight.shares_storage(model.up.weight));
  Tensor x = Tensor::full({2, 3}, 0.5, DType::f32, Device::cpu());
  require_grad(x);
  const auto gradients_of = [&](const auto& within) {
    zero_grad(model);
    Tape tape;
    const Tensor loss = ops::sum(model(x));
    tessera::zero_grad(x);
    {
      Tape inner;
      inner.backward(ops::sum(within(x)));
    }
    EXPECT_TRUE(grad(x).defined());
    tape.backward(loss);
    return grad(model.up.weight).to_vector<float>();
  };
  zero_grad(model);
  {
    Tape tape;
    tape.backward(ops::sum(model(x)));
  }
  const auto alone = grad(model.up.weight).to_vector<float>();
  EXPECT_EQ(gradients_of(frozen), alone);
  EXPECT_NE(gradients_of(model), alone);
}

TEST(Module, ATiedParameterIsFrozenUnderAllItsNames) {
  Rng rng(1);
  Model model(rng);
  model.out.weight = model.blocks[0].mlp.down.weight;
  freeze(model, [](const std::string& name) { return name == "blocks.0.mlp.down.weight"; });
  for (const NamedParameter& parameter : parameters(model)) EXPECT_NE(parameter.name, "out.weight");
  EXPECT_FALSE(requires_grad(model.out.weight));
}

TEST(Module, ParametersAreNamedInTheOrderOfFields) {
  Rng rng(1);
  const Model model(rng);
  const std::vector<NamedParameter> list = parameters(model);
  ASSERT_EQ(list.size(), 2u + 2u * 6u + 1u);
  EXPECT_EQ(list[0].name, "embed.weight");
  EXPECT_EQ(list[8].name, "blocks.1.mlp.up.weight");
  EXPECT_EQ(list.back().name, "out.weight");
  EXPECT_TRUE(list[0].tensor.shares_storage(model.embed.weight));
  EXPECT_EQ(count_parameters(model), 16 + 2 * (4 * 8 + 8 + 8 * 4 + 4 + 8) + 12);
}

TEST(Module, TiedTensorsAreListedOnceAndStayTied) {
  Rng rng(1);
  Model model(rng);
  model.out.weight = model.blocks[0].norm.weight;
  const size_t count = parameters(model).size();
  EXPECT_EQ(count, 14u);
  to(model, DType::bf16);
  EXPECT_EQ(parameters(model).size(), count);
  EXPECT_TRUE(model.out.weight.shares_storage(model.blocks[0].norm.weight));
}

TEST(Module, FrozenTiedTensorsStayTied) {
  Rng rng(1);
  Model model(rng);
  model.out.weight = model.blocks[0].norm.weight;
  freeze(model, [](const std::string&) { return true; });
  EXPECT_FALSE(requires_grad(model.out.weight));
  const Tensor whole = Tensor::zeros({8}, DType::f32, Device::cpu());
  model.embed.bias = whole.slice(0, 0, 4),
  model.out.bias = whole.slice(0, 4, 8);  // one storage, but not tied
  to(model, DType::f64);
  EXPECT_TRUE(model.out.weight.shares_storage(model.blocks[0].norm.weight));
  EXPECT_EQ(model.out.weight.dtype(), DType::f64);
  EXPECT_NE(model.embed.bias.raw(), model.out.bias.raw());
  EXPECT_FALSE(model.blocks[1].norm.weight.shares_storage(model.blocks[0].norm.weight));
}

TEST(Module, ConversionKeepsParametersAndValues) {
  Rng rng(1);
  Model model(rng);
  const std::vector<double> before = model.embed.weight.to(DType::f32).detach().to_vector<double>();
  to(model, DType::f64);
  EXPECT_EQ(model.embed.weight.dtype(), DType::f64);
  EXPECT_EQ(model.position.dtype(), DType::f64);
  EXPECT_FALSE(requires_grad(model.position));
  EXPECT_EQ(model.embed.weight.detach().to_vector<double>(), before);
  EXPECT_EQ(parameters(model).size(), 15u);
  to(model, DType::bf16);
  EXPECT_EQ(model.embed.weight.grad_state()->grad_dtype, DType::f32);
  EXPECT_THROW(to(model, DType::i64), Error);
}

TEST(Module, ACloneHasTheValuesInTensorsOfItsOwn) {
  Rng rng(1);
  Model model(rng);
  model.out.weight = model.blocks[0].norm.weight;  // tied
  freeze(model, [](const std::string& name) { return name == "blocks.1.norm.bias"; });
  to(model, DType::bf16);
  const Model copy = clone(model);
  std::map<std::string, Tensor> originals;
  for_each<Tensor>(model, [&](const std::string& name, Tensor& tensor) { originals[name] = tensor; });
  for_each<Tensor>(copy, [&](const std::string& name, const Tensor& tensor) {
    const Tensor& original = originals.at(name);
    ASSERT_EQ(tensor.defined(), original.defined()) << name;
    if (!tensor.defined()) return;
    EXPECT_TRUE(same_bits(tensor, original)) << name;
    EXPECT_FALSE(tensor.shares_storage(original)) << name;
    EXPECT_EQ(requires_grad(tensor), requires_grad(original)) << name;
    if (requires_grad(tensor)) {
      EXPECT_NE(tensor.grad_state(), original.grad_state()) << name;
      EXPECT_EQ(tensor.grad_state()->grad_dtype, DType::f32) << name;
      EXPECT_EQ(original.grad_state()->replaced_by, nullptr) << "it is a parameter of its model still";
    }
  });
  EXPECT_EQ(copy.out.weight.grad_state(), copy.blocks[0].norm.weight.grad_state());
  EXPECT_EQ(parameters(copy).size(), parameters(model).size());
}

TEST(Module, ACloneKeepsFormsAndTrainingMode) {
  Rng rng(1);
  Sequential model{Linear(8, 8, rng), Linear(8, 4, rng), Dropout(0.5, rng)};
  auto& [first, second, dropout] = model.layers;
  first.form = Scaled{2};
  set_weights24(second);
  set_training(model, false);
  const auto copy = clone(model);
  const auto& [first_copy, second_copy, dropout_copy] = copy.layers;
  EXPECT_EQ(first_copy.form, Form(Scaled{2}));
  EXPECT_FALSE(dropout_copy.training);
  EXPECT_EQ(dropout_copy.rng, rng);
  ASSERT_NE(weights24_of(second_copy), nullptr);
  const Tensor &mask = weights24_of(second_copy)->mask, &original = weights24_of(second)->mask;
  EXPECT_TRUE(same_bits(mask, original));
  EXPECT_FALSE(mask.shares_storage(original)) << "refreshing one would change the other";
  const Tensor x = Tensor::ones({2, 8});
  EXPECT_TRUE(same_bits(copy(x), model(x)));
}

TEST(Module, ParametersOfSeveralModelsHavePrefixes) {
  Rng rng(1);
  const Linear generator(2, 3, rng), discriminator(3, 1, rng, {.bias = false});
  std::vector<NamedParameter> both = parameters(generator, "generator");
  for (const NamedParameter& parameter : parameters(discriminator, "discriminator"))
    both.push_back(parameter);
  std::vector<std::string> names;
  for (const NamedParameter& parameter : both) names.push_back(parameter.name);
  EXPECT_EQ(names, (std::vector<std::string>{"generator.weight", "generator.bias", "discriminator.weight"}));
  EXPECT_EQ(parameters(generator.weight, "alone").at(0).name, "alone");
}

TEST(Module, LayersOfATypeAreFoundByName) {
  Rng rng(1);
  Model model(rng);
  std::vector<std::string> names;
  for_each<Linear>(model, [&](const std::string& name, Linear& layer) {
    names.push_back(name);
    layer.bias = Tensor();
  });
  EXPECT_EQ(names, (std::vector<std::string>{"embed", "blocks.0.mlp.up", "blocks.0.mlp.down",
                                             "blocks.1.mlp.up", "blocks.1.mlp.down", "out"}));
  EXPECT_EQ(parameters(model).size(), 10u);
}

TEST(Module, ZeroGradForgetsAll) {
  Rng rng(1);
  Model model(rng);
  Tensor& weight = model.out.weight;
  Tape tape;
  Tensor y = weight.detach().clone();
  tape.record("identity", {&weight}, {&y}, [](Backward& b) { b.accumulate(0, b.grad()); });
  tape.backward(std::vector{y}, std::vector{Tensor::full(y.shape(), 1, DType::f32, Device::cpu())});
  EXPECT_TRUE(grad(weight).defined());
  zero_grad(model);
  EXPECT_FALSE(grad(weight).defined());
}

TEST(Summary, CountsWhatIsThere) {
  Rng rng(1);
  const Model model(rng);
  const Summary table = summary(model, 10);
  std::vector<std::string> names;
  for (const SummaryRow& row : table.rows) names.push_back(row.name);
  EXPECT_EQ(names,
            (std::vector<std::string>{"", "embed", "blocks.0.mlp.up", "blocks.0.mlp.down", "blocks.0.norm",
                                      "blocks.1.mlp.up", "blocks.1.mlp.down", "blocks.1.norm", "out"}));
  EXPECT_EQ(table.total.parameters, count_parameters(model));
  EXPECT_EQ(table.total.bytes, 4.0 * double(count_parameters(model) + 28));
  // 2 FLOPs an element of the weights and token.
  EXPECT_EQ(table.total.flops, 2.0 * 10 * (12 + 4 * 32 + 12));
  const std::string text = table.text();
  for (const char* part :
       {"blocks.1.mlp.up", "Linear", "[8, 4] [8]", "LayerNorm", "10 tokens", "total", "kFLOP"})
    EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
}

}  // namespace
}  // namespace tessera::nn

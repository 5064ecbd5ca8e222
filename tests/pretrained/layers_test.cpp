#include "pretrained/layers.h"

#include <gtest/gtest.h>

#include "pretrained/load.h"
#include "tests/errors.h"
#include "tests/folder.h"
#include "tests/models/small_models.h"

namespace tessera::pretrained {
namespace {

std::vector<std::string> names(const std::vector<LinearModule>& modules) {
  std::vector<std::string> list;
  for (const LinearModule& module : modules) list.push_back(module.name);
  return list;
}

TEST(LinearModules, AreTheRowsThatFilesHoldUnderTheirNames) {
  models::for_each_model([]<class Model>(const std::string& what, Model& model) {
    if constexpr (!std::is_same_v<Model, models::Tnp>) {
      const LinearModules modules = linear_modules(model);
      io::NamedTensors ours;
      for (const nn::NamedParameter& one : nn::parameters(model)) ours.emplace_back(one.name, one.tensor);
      std::map<std::string, Tensor> files;
      for (const auto& [name, tensor] : export_tensors(ours, name_table(model.config))) files[name] = tensor;
      std::map<std::string, int64_t> covered;  // rows of each of our layers
      for (const LinearModule& module : modules.all) {
        const nn::Linear& layer = *module.layer;
        EXPECT_EQ(module.first, covered[module.ours]) << what << ": " << module.name;  // without a gap
        covered[module.ours] += module.rows;
        if (!layer.weight.defined()) continue;
        ASSERT_TRUE(files.contains(module.name + ".weight")) << what << ": " << module.name;
        const auto expect_part = [&](const Tensor& tensor, const std::string& theirs) {
          const Tensor part = tensor.detach().slice(0, module.first, module.first + module.rows),
                       file = files[theirs];
          EXPECT_EQ(part.to_vector<double>(),
                    (module.transposed && file.rank() == 2 ? file.transpose(0, 1) : file).to_vector<double>())
              << what << ": " << theirs;
        };
        expect_part(layer.weight, module.name + ".weight");
        EXPECT_EQ(module.transposed, what.find("gpt2") != what.npos && module.name != "lm_head")
            << module.name;
        EXPECT_EQ(files.contains(module.name + ".bias"), layer.bias.defined()) << module.name;
        if (layer.bias.defined()) expect_part(layer.bias, module.name + ".bias");
      }
      nn::for_each_linear(model, [&](const std::string& name, auto& layer) {
        EXPECT_EQ(covered[name], layer.out) << what << ": " << name;  // all rows of all layers
      });
    }
  });
}

TEST(SetForm, EquipsTheLayersThatPatternsName) {
  Rng rng(3);
  models::Bert bert(models::small_bert(models::BertHead::classify), rng, kCpu);
  const LinearModules modules = linear_modules(bert);
  const auto sliced = [&] {
    std::vector<std::string> list;
    nn::for_each_linear(bert, [&](const std::string& name, auto& layer) {
      if (!nn::is_dense(layer.form)) list.push_back(name);
      layer.form = nn::Dense{};
    });
    return list;
  };
  const nn::Form form = nn::SlicedBackward{.n = 3};
  const std::vector<std::string> outputs{"blocks.0.mlp.down", "blocks.1.mlp.down"};
  EXPECT_EQ(set_form(modules, "encoder.layer.*.output.dense", form), outputs);
  EXPECT_EQ(sliced(), outputs);
  EXPECT_EQ(set_form(modules, "encoder.layer.1.output.dense,encoder.layer.1.intermediate.dense", form),
            (std::vector<std::string>{"blocks.1.mlp.up", "blocks.1.mlp.down"}));
  sliced();
  EXPECT_EQ(set_form(modules, "encoder.layer.0.attention.self.*", form),
            (std::vector<std::string>{"blocks.0.attention.qkv"}));
  sliced();
  EXPECT_EQ(set_form(modules, "all", form).size(), 2 * 4 + 2u);
  EXPECT_EQ(sliced().size(), 2 * 4 + 2u);
  const auto message = [&](const char* patterns) {
    return message_of([&] { set_form(modules, patterns, form); });
  };
  EXPECT_EQ(message("encoder.layer.0.attention.self.query,encoder.layer.*.output.dense"),
            "set_form: 'bert.encoder.layer.0.attention.self.query' is one GEMM with "
            "'bert.encoder.layer.0.attention.self.key' (blocks.0.attention.qkv), which "
            "'encoder.layer.0.attention.self.query,encoder.layer.*.output.dense' leaves out; name both or "
            "neither");
  expect_parts(message("encoder.layer.7.output.dense"),
               {"no linear module of this model fits", "the names are"});
  expect_parts(message(""), {"the list of patterns is empty", "or all"});
  EXPECT_TRUE(sliced().empty()) << "an error sets nothing";
}

TEST(LinearModules, AreFoundByTheNamesOfTransformers) {
  Rng rng(3);
  models::Llama llama(models::small_llama(), rng, kCpu);
  const LinearModules modules = linear_modules(llama);
  EXPECT_EQ(
      names(modules.all),
      (std::vector<std::string>{"model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj",
                                "model.layers.0.self_attn.v_proj", "model.layers.0.self_attn.o_proj",
                                "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj",
                                "model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj",
                                "model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.v_proj",
                                "model.layers.1.self_attn.o_proj", "model.layers.1.mlp.gate_proj",
                                "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj", "lm_head"}));
  const LinearModule& v = modules.at("model.layers.1.self_attn.v_proj");
  EXPECT_EQ(v.ours, "blocks.1.attention.qkv");
  EXPECT_EQ(v.layer, &llama.blocks[1].attention.qkv);
  EXPECT_EQ(v.first, (4 + 2) * 6);
  EXPECT_EQ(v.rows, 2 * 6);
  EXPECT_EQ(&modules.at("layers.1.self_attn.v_proj"), &v);  // as in files of the bare model
  EXPECT_EQ(modules.at("model.layers.0.mlp.up_proj").first, 20);
  EXPECT_EQ(message_of([&] { modules.at("model.layers.2.mlp.up_proj"); }),
            "linear_modules: this model has no linear module 'model.layers.2.mlp.up_proj'; its first is "
            "'model.layers.0.self_attn.q_proj', its last 'lm_head'");
}

TEST(LinearModules, TiedHeadsAreModulesToo) {
  Rng rng(3);
  models::Gpt gpt(models::small_gpt(), rng, kCpu);
  const LinearModule head = linear_modules(gpt).at("lm_head");
  EXPECT_EQ(head.layer, &gpt.lm_head.out);
  EXPECT_EQ(head.rows, 19);
  EXPECT_EQ(linear_modules(gpt).at("h.1.attn.c_attn").rows, 3 * 12);
  models::Bert bert(models::small_bert(models::BertHead::masked_lm), rng, kCpu);
  EXPECT_EQ(linear_modules(bert).at("cls.predictions.decoder").layer, &bert.language->decoder.out);
}

TEST(LinearModules, PatternsChooseThem) {
  Rng rng(3);
  models::Bert bert(models::small_bert(models::BertHead::classify), rng, kCpu);
  const LinearModules modules = linear_modules(bert);
  const std::vector<std::string> outputs{"bert.encoder.layer.0.output.dense",
                                         "bert.encoder.layer.1.output.dense"};
  EXPECT_EQ(names(modules.matching("encoder.layer.*.output.dense")), outputs);
  EXPECT_EQ(names(modules.matching("bert.encoder.layer.*.output.dense")), outputs);
  EXPECT_EQ(names(modules.matching("encoder.layer.1.attention.self.*e*")),
            (std::vector<std::string>{"bert.encoder.layer.1.attention.self.query",
                                      "bert.encoder.layer.1.attention.self.key",
                                      "bert.encoder.layer.1.attention.self.value"}));
  EXPECT_EQ(names(modules.matching("**.output.dense")).size(), 4u);  // attention's and the network's
  EXPECT_EQ(names(modules.matching("**.layer.0.**")).size(), 6u);
  EXPECT_EQ(names(modules.matching("classifier")), std::vector<std::string>{"classifier"});
  EXPECT_EQ(modules.matching("**").size(), modules.all.size());
  for (const std::string pattern : {"", "encoder.layer.*", "encoder.layer.*.output.dens", "encoder..layer"})
    EXPECT_EQ(message_of([&] { modules.matching(pattern); }),
              "linear_modules: no linear module of this model fits '" + pattern +
                  "'; the names are like 'bert.encoder.layer.0.attention.self.query' and 'classifier'");
}

}  // namespace
}  // namespace tessera::pretrained

#include "pretrained/load.h"

#include <limits>
#include <nlohmann/json.hpp>

#include "nn/weights24.h"
#include "pretrained/sparse_model.h"
#include "tests/errors.h"
#include "tests/io/files.h"
#include "tests/io/torch_bytes.h"
#include "tests/tensors.h"

namespace tessera::pretrained {
namespace {

using models::BertHead;

models::BertConfig tiny_bert(BertHead head) {
  return {.vocabulary = 9,
          .positions = 8,
          .d_model = 4,
          .d_ff = 6,
          .heads = 2,
          .layers = 1,
          .head = head,
          .labels = 3,
          .init_deviation = 0.3};
}

class Load : public ::testing::Test {
 protected:
  Rng rng{7};
  TemporaryFolder folder;
  const models::Gpt gpt{{.vocabulary = 9,
                         .positions = 8,
                         .d_model = 4,
                         .d_ff = 6,
                         .heads = 2,
                         .layers = 2,
                         .init_deviation = 0.3},
                        rng,
                        kCpu};

  /// The saved tensors of a model, to be changed and written again.
  std::map<std::string, Tensor> tensors_in(const std::string& where) {
    std::map<std::string, Tensor> tensors;
    const io::WeightSource source(where);
    for (const io::WeightEntry& entry : source.entries())
      tensors.emplace(entry.name, source.load(entry.name));
    return tensors;
  }
  /// A folder with config.json of `like` and these tensors.
  std::string put(const std::string& name, const std::string& like,
                  const std::map<std::string, Tensor>& tensors) {
    io::make_folder(folder / name);
    io::write_file((folder / name) + "/config.json", io::read_file(like + "/config.json", 1 << 20));
    io::save_safetensors((folder / name) + "/model.safetensors", tensors);
    return folder / name;
  }
  /// A folder with `gpt` as the bare model's tensors, and a buffer, the causal mask.
  std::string put_bare() {
    save(gpt, folder / "good");
    std::map<std::string, Tensor> bare;
    for (const auto& [name, tensor] : tensors_in(folder / "good"))
      bare.emplace(name.substr(std::string("transformer.").size()), tensor);
    bare.emplace("h.0.attn.bias", Tensor::zeros({1, 1, 8, 8}, DType::boolean, kCpu));
    return put("bare", folder / "good", bare);
  }
};

template <class Model>
void expect_same(const Model& a, const Model& b) {
  const auto x = nn::parameters(a), y = nn::parameters(b);
  ASSERT_EQ(x.size(), y.size());
  for (size_t i = 0; i < x.size(); ++i) EXPECT_TRUE(io::test::same(x[i].tensor, y[i].tensor)) << x[i].name;
}

TEST_F(Load, WhatIsSavedLoadsTheSame) {
  save(gpt, folder / "one");
  save(gpt, folder / "many", {.shard_bytes = 100});
  EXPECT_GT(folder.names().size(), 1u);
  expect_same(load_gpt(folder / "one", rng, kCpu), gpt);
  expect_same(load_gpt(folder / "many", rng, kCpu), gpt);
  const models::Llama llama({.vocabulary = 9,
                             .positions = 8,
                             .d_model = 8,
                             .d_ff = 6,
                             .heads = 4,
                             .kv_heads = 2,
                             .layers = 1,
                             .attention_bias = true},
                            rng, kCpu);
  save(llama, folder / "llama");
  expect_same(load_llama(folder / "llama", rng, kCpu), llama);
  for (const BertHead head : {BertHead::none, BertHead::classify, BertHead::regress, BertHead::masked_lm}) {
    const models::Bert bert(tiny_bert(head), rng, kCpu);
    const std::string name = "bert" + std::to_string(int(head));
    save(bert, folder / name);
    expect_same(load_bert(folder / name, rng, kCpu), bert);
  }
}

TEST_F(Load, FrozenParametersAreSavedToo) {
  models::Gpt frozen = gpt;
  nn::freeze(frozen, [](const std::string& name) { return !name.starts_with("norm"); });
  save(gpt, folder / "all");
  save(frozen, folder / "frozen");
  EXPECT_EQ(io::read_file((folder / "frozen") + "/model.safetensors", 1 << 20),
            io::read_file((folder / "all") + "/model.safetensors", 1 << 20));
}

TEST_F(Load, WeightsUnderAMaskAreSavedAsTheyAreMultiplied) {
  const Tensor tokens = Tensor::from(std::vector<int64_t>{3, 1, 4, 1}, {1, 4});
  models::Gpt masked = gpt;
  nn::for_each<nn::Linear>(masked, [](const std::string&, nn::Linear& layer) {
    if (layer.weight.defined()) nn::set_weights24(layer);
  });
  save(masked, folder / "masked");
  EXPECT_TRUE(io::test::same(load_gpt(folder / "masked", rng, kCpu)(tokens), masked(tokens)));
}

TEST_F(Load, EveryParameterHasItsNames) {
  // A parameter that the table forgets would never be saved: the table's parts have as many elements.
  const auto elements = [](const NameTable& table) {
    int64_t count = 0;
    for (const NameRule& rule : table.rules)
      for (const NameRule::Part& part : rule.parts) count += part.shape.count();
    return count;
  };
  EXPECT_EQ(elements(name_table(gpt.config)), nn::count_parameters(gpt));
  for (const bool gated : {true, false}) {
    const models::Llama llama({.vocabulary = 9,
                               .positions = 8,
                               .d_model = 8,
                               .d_ff = 6,
                               .heads = 4,
                               .kv_heads = 1,
                               .layers = 2,
                               .gated = gated,
                               .attention_bias = true,
                               .mlp_bias = gated},
                              rng, kCpu);
    EXPECT_EQ(elements(name_table(llama.config)), nn::count_parameters(llama));
  }
  const models::Bert bert(tiny_bert(BertHead::masked_lm), rng, kCpu);
  EXPECT_EQ(elements(name_table(bert.config)), nn::count_parameters(bert));
}

TEST_F(Load, NamesOfEachFamilyAreThoseOfTransformersAndStay) {
  using models::LlamaFamily;
  struct Family {
    LlamaFamily family;
    std::vector<std::string> has, has_not;
  };
  const std::vector<std::string> apart{"self_attn.q_proj.weight", "self_attn.v_proj.weight",
                                       "mlp.gate_proj.weight", "mlp.up_proj.weight"},
      together{"self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"},
      norms{"self_attn.q_norm.weight", "self_attn.k_norm.weight"},
      biases{"self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"},
      others{"self_attn.o_proj.bias", "mlp.down_proj.bias"};
  const auto all = [](std::initializer_list<std::vector<std::string>> lists) {
    std::vector<std::string> names;
    for (const auto& list : lists) names.insert(names.end(), list.begin(), list.end());
    return names;
  };
  const Family families[] = {
      {LlamaFamily::mistral, apart, all({together, norms, biases, others})},
      {LlamaFamily::qwen2, all({apart, biases}), all({together, norms, others})},
      {LlamaFamily::qwen3, all({apart, norms}), all({together, biases, others})},
      {LlamaFamily::phi3, together, all({apart, norms, biases, others})},
      {LlamaFamily::arcee,
       {"self_attn.q_proj.weight", "mlp.up_proj.weight"},
       all({{"mlp.gate_proj.weight"}, together, norms, biases, others})},
  };
  for (const Family& one : families)
    for (const bool tied : {false, true}) {
      const models::Llama model({.family = one.family,
                                 .vocabulary = 9,
                                 .positions = 8,
                                 .d_model = 8,
                                 .d_ff = 6,
                                 .heads = 4,
                                 .kv_heads = 2,
                                 .head_dim = 6,
                                 .layers = 2,
                                 .gated = one.family != LlamaFamily::arcee,
                                 .tied = tied,
                                 .init_deviation = 0.3},
                                rng, kCpu);
      const std::string type = name_of(one.family), at = folder / (type + (tied ? "-tied" : ""));
      int64_t elements = 0;
      for (const NameRule& rule : name_table(model.config).rules)
        for (const NameRule::Part& part : rule.parts) elements += part.shape.count();
      EXPECT_EQ(elements, nn::count_parameters(model)) << type;
      save(model, at);
      EXPECT_EQ(read_config(at).type, type);
      const models::Llama back = load_llama(at, rng, kCpu);
      EXPECT_EQ(back.config.family, one.family);
      expect_same(back, model);
      const io::WeightSource source(at);
      for (const std::string& name : one.has)
        EXPECT_TRUE(source.has("model.layers.1." + name)) << type << " " << name;
      for (const std::string& name : one.has_not)
        EXPECT_FALSE(source.has("model.layers.1." + name)) << type << " " << name;
      EXPECT_EQ(source.has("lm_head.weight"), !tied);
      const Conversion done = convert(at, at + "-converted", {.dtype = DType::bf16});
      EXPECT_EQ(done.tensors, source.entries().size());
      EXPECT_EQ(load_llama(at + "-converted", rng, kCpu).config.dtype, DType::bf16);
    }
}

TEST_F(Load, DtypesConvert) {
  save(gpt, folder / "half", {.dtype = DType::bf16});
  EXPECT_EQ(load_gpt(folder / "half", rng, kCpu).token.weight.dtype(), DType::bf16);
  const models::Gpt wide = load_gpt(folder / "half", rng, kCpu, {.dtype = DType::f32});
  EXPECT_EQ(wide.token.weight.to_vector<float>(),
            gpt.token.weight.detach().to(DType::bf16).to_vector<float>());
  EXPECT_EQ(message_of([&] { save(gpt, folder / "wrong", {.dtype = DType::i64}); }),
            "save: parameters of i64; expected f32, bf16 or f16");
}

TEST_F(Load, TheDtypeIsThatOfTheWeightsWhateverConfigJsonSays) {
  const auto dtypes = [&](const std::string& at) {
    return std::pair(load_gpt(at, rng, kCpu).token.weight.dtype(), stored_dtype(at));
  };
  for (const auto& [dtype, stated] :
       {std::pair(DType::f32, "bfloat16"), {DType::bf16, "float32"}, {DType::bf16, ""}}) {
    const std::string at = folder / (std::string(name_of(dtype)) + stated);
    save(gpt, at, {.dtype = dtype});
    auto config = nlohmann::json::parse(io::read_file(at + "/config.json", 1 << 20));
    config.erase("torch_dtype");
    if (*stated) config["dtype"] = stated;
    io::write_file(at + "/config.json", config.dump());
    EXPECT_EQ(dtypes(at), std::pair(dtype, dtype)) << at;
    EXPECT_EQ(read_config(at).stated_dtype.has_value(), *stated != 0);
    EXPECT_EQ(convert_sparse(at, at + "-sparse", ops::SparseFormat::tca_bme).dtype, dtype);
    EXPECT_EQ(load_sparse_gpt(at + "-sparse", rng, kCpu).config.dtype, dtype);
    EXPECT_EQ(stored_dtype(at + "-sparse"), dtype);
  }
  // Norms of f32 in a file of bf16.
  save(gpt, folder / "half", {.dtype = DType::bf16});
  auto tensors = tensors_in(folder / "half");
  for (auto& [name, tensor] : tensors)
    if (name.find("ln_") != std::string::npos) tensor = tensor.to(DType::f32);
  EXPECT_EQ(dtypes(put("mixed", folder / "half", tensors)), std::pair(DType::bf16, DType::bf16));
}

TEST_F(Load, FiniteWeightsDoNotBecomeInfinite) {
  const models::Gpt large(gpt.config, rng, kCpu);
  large.token.weight.detach().slice(0, 2, 3).fill(-70000);
  const std::string error = "'transformer.wte.weight' has 4 finite values that f16 would make infinite";
  EXPECT_TRUE(io::test::throws([&] { save(large, folder / "out", {.dtype = DType::f16}); }, error));
  EXPECT_FALSE(io::test::fs::exists(folder / "out/model.safetensors"));
  save(large, folder / "wide", {.dtype = DType::bf16});
  EXPECT_TRUE(io::test::throws([&] { load_gpt(folder / "wide", rng, kCpu, {.dtype = DType::f16}); }, error));
  EXPECT_EQ(load_gpt(folder / "wide", rng, kCpu, {.dtype = DType::f32}).config.dtype, DType::f32);
}

TEST_F(Load, EndTokensAreThoseOfGeneration) {
  save(gpt, folder / "chat");
  const std::string path = folder / "chat", config = path + "/config.json";
  const auto put_ends = [&](const char* file, const char* text) { io::write_file(path + file, text); };
  auto fields = nlohmann::json::parse(io::read_file(config, 1 << 20));
  fields["eos_token_id"] = 2;
  io::write_file(config, fields.dump());
  EXPECT_EQ(read_config(path).end_tokens, (std::vector<int64_t>{2}));
  put_ends("/generation_config.json", R"({"eos_token_id": [7, 8], "top_p": 0.9})");
  EXPECT_EQ(read_config(path).end_tokens, (std::vector<int64_t>{7, 8}));
  EXPECT_EQ(read_config(config).end_tokens, (std::vector<int64_t>{2}));
  put_ends("/generation_config.json", R"({"eos_token_id": null})");
  EXPECT_EQ(read_config(path).end_tokens, (std::vector<int64_t>{2}));
  put_ends("/generation_config.json", R"({"eos_token_id": "x"})");
  EXPECT_TRUE(io::test::throws([&] { read_config(path); }, "generation_config.json: eos_token_id is not a"));
}

TEST_F(Load, AMismatchIsListedWhole) {
  save(gpt, folder / "good");
  auto tensors = tensors_in(folder / "good");
  tensors.erase("transformer.h.1.ln_2.bias");
  tensors.emplace("transformer.h.2.ln_2.bias", Tensor::zeros({4}, DType::f32, kCpu));
  tensors.insert_or_assign("transformer.wte.weight", Tensor::zeros({10, 4}, DType::f32, kCpu));
  tensors.insert_or_assign("transformer.ln_f.bias", Tensor::zeros({4}, DType::i64, kCpu));
  const std::string bad = put("bad", folder / "good", tensors);
  EXPECT_EQ(message_of([&] { load_gpt(bad, rng, kCpu); }),
            "weights: " + bad +
                "/model.safetensors does not fit the model of config.json:\n"
                "  mis-shaped  transformer.wte.weight [10, 4], expected [9, 4]\n"
                "  mis-typed   transformer.ln_f.bias i64, expected a floating dtype\n"
                "  missing     transformer.h.1.ln_2.bias [4]\n"
                "  unexpected  transformer.h.2.ln_2.bias [4]");
  const std::string none = message_of([&] {
    load_gpt(put("empty", folder / "good", {{"x", Tensor::zeros({1}, DType::f32, kCpu)}}), rng, kCpu);
  });
  // 28 are missing.
  EXPECT_NE(none.find("\n  missing     and 18 more\n  unexpected  x [1]"), std::string::npos) << none;
  EXPECT_NE(message_of([&] {
              load_llama(folder / "good", rng, kCpu);
            }).find("holds a model of type gpt2, not llama, mistral, qwen2, qwen3, phi3 or arcee"),
            std::string::npos);
}

TEST_F(Load, FilesOfTheBareModelAndItsBuffersAreUnderstood) {
  LoadReport report;
  expect_same(load_gpt(put_bare(), rng, kCpu, {}, &report), gpt);
  EXPECT_EQ(report.ignored, std::vector<std::string>{"h.0.attn.bias"});
}

TEST_F(Load, ATiedTensorMayBeThereIfItIsTheSame) {
  save(gpt, folder / "good");
  auto tensors = tensors_in(folder / "good");
  tensors.emplace("lm_head.weight", tensors.at("transformer.wte.weight"));
  expect_same(load_gpt(put("same", folder / "good", tensors), rng, kCpu), gpt);
  tensors.insert_or_assign("lm_head.weight", Tensor::zeros({9, 4}, DType::f32, kCpu));
  EXPECT_NE(message_of([&] {
              load_gpt(put("other", folder / "good", tensors), rng, kCpu);
            }).find("'lm_head.weight' differs from 'transformer.wte.weight', but config.json ties them"),
            std::string::npos);
}

TEST_F(Load, AClassifierBeginsFromAPretrainedEncoder) {
  // As the first BERT: norms with old names, a language head, and no classifier.
  const models::Bert source(tiny_bert(BertHead::masked_lm), rng, kCpu);
  save(source, folder / "good");
  std::map<std::string, Tensor> tensors;
  for (const auto& [modern, tensor] : tensors_in(folder / "good")) {
    std::string name = modern;
    if (name.ends_with("LayerNorm.weight")) name.replace(name.size() - 6, 6, "gamma");
    if (name.ends_with("LayerNorm.bias")) name.replace(name.size() - 4, 4, "beta");
    tensors.emplace(name, tensor);
  }
  tensors.emplace("bert.pooler.dense.weight", Tensor::full({4, 4}, 0.5, DType::f32, kCpu));
  tensors.emplace("bert.pooler.dense.bias", Tensor::full({4}, 0.25, DType::f32, kCpu));
  const std::string old_file = put("old", folder / "good", tensors);
  LoadReport report;
  const LoadOptions classify{.config = {.head = BertHead::classify, .labels = 3}};
  const models::Bert model = load_bert(old_file, rng, kCpu, classify, &report);
  EXPECT_EQ(report.fresh, (std::vector<std::string>{"classifier.out.weight", "classifier.out.bias"}));
  EXPECT_EQ(report.ignored.size(), 5u);  // cls.predictions.*
  EXPECT_TRUE(io::test::same(model.blocks[0].norm1.weight, source.blocks[0].norm1.weight));
  EXPECT_EQ(model.classifier->dense.bias.to_vector<float>(), std::vector<float>(4, 0.25f));
  double drawn = 0;
  for (const double value : model.classifier->out.weight.to_vector<double>()) drawn += std::abs(value);
  EXPECT_GT(drawn, 0);
  LoadOptions strict = classify;
  strict.fresh_head = false;
  EXPECT_NE(message_of([&] {
              load_bert(old_file, rng, kCpu, strict);
            }).find("missing     classifier.weight [3, 4]"),
            std::string::npos);
}

TEST_F(Load, ShapesAreComparedBeforeMemoryIsTaken) {
  // A configuration of terabytes next to a file of bytes.
  save(gpt, folder / "good");
  const auto tensors = tensors_in(folder / "good");
  const std::string bad = put("bad", folder / "good", tensors);
  std::string text = io::read_file(bad + "/config.json", 1 << 20);
  text.replace(text.find("\"vocab_size\": 9"), 15, "\"vocab_size\": 2000000000");
  io::write_file(bad + "/config.json", text);
  EXPECT_NE(message_of([&] { load_gpt(bad, rng, kCpu); }).find("[9, 4], expected [2000000000, 4]"),
            std::string::npos);
}

TEST_F(Load, ConvertWritesTheModelsOwnNamesInAnyDtypeAndShards) {
  const std::string from = put_bare();
  io::write_file(from + "/tokenizer.json", "{}");
  const Conversion done = convert(from, folder / "out", {.dtype = DType::f16, .shard_bytes = 200});
  EXPECT_EQ(done.tensors, 28u);
  EXPECT_EQ(done.bytes, uint64_t(nn::count_parameters(gpt)) * 2);
  EXPECT_EQ(done.ignored, std::vector<std::string>{"h.0.attn.bias"});
  EXPECT_TRUE(io::test::fs::exists(folder / "out/tokenizer.json"));
  const io::WeightSource out(folder / "out");
  EXPECT_TRUE(out.path().ends_with("model.safetensors.index.json"));
  EXPECT_EQ(out.entry("transformer.wte.weight").dtype, DType::f16);
  EXPECT_EQ(load_gpt(folder / "out", rng, kCpu).config.dtype, DType::f16);
  EXPECT_NE(
      message_of([&] { convert(from, folder / "out"); }).find("already; weights in two files are ambiguous"),
      std::string::npos);
}

TEST_F(Load, AClassifierOfOtherClassesIsDrawnForAnotherTask) {
  const models::Bert three(tiny_bert(BertHead::classify), rng, kCpu);
  save(three, folder / "three");
  LoadOptions two{.config = {.head = BertHead::classify, .labels = 2}};
  EXPECT_NE(message_of([&] {
              load_bert(folder / "three", rng, kCpu, two);
            }).find("mis-shaped  classifier.weight [3, 4], expected [2, 4]"),
            std::string::npos);
  two.fresh_classes = true;
  LoadReport report;
  const models::Bert model = load_bert(folder / "three", rng, kCpu, two, &report);
  EXPECT_EQ(report.fresh, (std::vector<std::string>{"classifier.out.weight", "classifier.out.bias"}));
  EXPECT_EQ(report.ignored, (std::vector<std::string>{"classifier.weight", "classifier.bias"}));
  EXPECT_EQ(model.classifier->out.weight.shape(), (Shape{2, 4}));
  EXPECT_TRUE(io::test::same(model.classifier->dense.weight, three.classifier->dense.weight));
  EXPECT_TRUE(io::test::same(model.blocks[0].norm1.weight, three.blocks[0].norm1.weight));
  // With as many classes it stays.
  two.config.labels = 3;
  const models::Bert same = load_bert(folder / "three", rng, kCpu, two, &report);
  EXPECT_TRUE(report.fresh.empty());
  EXPECT_TRUE(io::test::same(same.classifier->out.weight, three.classifier->out.weight));
}

TEST_F(Load, ConvertRefusesADtypeThatMakesFiniteWeightsInfinite) {
  const auto file = [&](const std::string& name, const std::vector<float>& values) {
    const std::string path = folder / (name + ".safetensors");
    io::save_safetensors(path, io::NamedTensors{{"w", Tensor::from(values, {int64_t(values.size())})}});
    return path;
  };
  const std::string large = file("large", {1, -70000, 65520, 65519});
  const std::string error = message_of([&] { convert(large, folder / "out", {.dtype = DType::f16}); });
  EXPECT_NE(error.find("'w' has 2 finite values that f16 would make infinite, such as -70000; bf16 or f32"),
            std::string::npos)
      << error;
  EXPECT_FALSE(io::test::fs::exists(folder / "out/model.safetensors"));
  convert(large, folder / "wide", {.dtype = DType::bf16});
  // What is infinite in the file, and the largest that f16 rounds to a number, pass.
  convert(file("edge", {65519, -std::numeric_limits<float>::infinity()}), folder / "edge",
          {.dtype = DType::f16});
  EXPECT_EQ(io::WeightSource(folder / "edge").load("w").to(DType::f32).to_vector<float>(),
            (std::vector<float>{65504, -std::numeric_limits<float>::infinity()}));
}

TEST_F(Load, ConvertCopiesTheFilesOfATokenizer) {
  save(gpt, folder / "from");
  for (const std::string name : {"spiece.model", "added_tokens.json", "chat_template.jinja"})
    io::write_file((folder / "from") + "/" + name, name);
  convert(folder / "from", folder / "out");
  for (const std::string name : {"spiece.model", "added_tokens.json", "chat_template.jinja"})
    EXPECT_EQ(io::read_file((folder / "out") + "/" + name, 100), name);
}

TEST_F(Load, ConvertKeepsThePoolerAndTheHeadsThatABareEncoderHasNot) {
  // As BertModel is saved: names without a prefix, a pooler; and as a pretrained one, with its heads.
  const models::Bert source(tiny_bert(BertHead::none), rng, kCpu);
  save(source, folder / "good");
  const Tensor pooler = io::test::random_bits({4, 4}, DType::f32, 3),
               bias = Tensor::full({4}, 0.25, DType::f32, kCpu);
  for (const bool prefixed : {false, true}) {
    std::map<std::string, Tensor> tensors;
    const std::string prefix = prefixed ? "bert." : "";
    for (const auto& [name, tensor] : tensors_in(folder / "good"))
      tensors.emplace(prefixed ? name : name.substr(5), tensor);
    tensors.emplace(prefix + "pooler.dense.weight", pooler);
    tensors.emplace(prefix + "pooler.dense.bias", bias);
    tensors.emplace(prefix + "embeddings.position_ids", Tensor::zeros({1, 8}, DType::i64, kCpu));
    if (prefixed) tensors.emplace("cls.seq_relationship.weight", Tensor::zeros({2, 4}, DType::f32, kCpu));
    const std::string from = put(prefixed ? "prefixed" : "bare", folder / "good", tensors);
    const std::string to = from + "-out";
    const Conversion done = convert(from, to);
    EXPECT_EQ(done.ignored, std::vector<std::string>{prefix + "embeddings.position_ids"});
    EXPECT_EQ(done.tensors, tensors.size() - 1);
    EXPECT_EQ(io::WeightSource(to).has("cls.seq_relationship.weight"), prefixed);
    // A classifier that starts from the copy starts as from the original.
    const LoadOptions classify{.config = {.head = BertHead::classify, .labels = 3}};
    Rng first(5), second(5);
    LoadReport report;
    const models::Bert original = load_bert(from, first, kCpu, classify),
                       copy = load_bert(to, second, kCpu, classify, &report);
    expect_same(original, copy);
    EXPECT_TRUE(io::test::same(copy.classifier->dense.weight, pooler));
    EXPECT_EQ(report.fresh, (std::vector<std::string>{"classifier.out.weight", "classifier.out.bias"}));
  }
}

TEST_F(Load, ConvertTakesOutTheFieldsThatItIsToldToIgnore) {
  save(gpt, folder / "good");
  std::string text = io::read_file(folder / "good/config.json", 1 << 20);
  text.insert(text.find('{') + 1, R"("mystery": 3,)");
  io::write_file(folder / "good/config.json", text);
  EXPECT_NE(message_of([&] { convert(folder / "good", folder / "out"); }).find("--ignore-field \"mystery\""),
            std::string::npos);
  convert(folder / "good", folder / "out", {}, {.ignored_fields = {"mystery"}});
  EXPECT_EQ(load_gpt(folder / "out", rng, kCpu).config.dtype, gpt.config.dtype);
}

TEST_F(Load, ConvertKeepsTheNamesOfWhatItDoesNotKnow) {
  io::save_safetensors(folder / "some.safetensors",
                       io::NamedTensors{{"w", Tensor::full({2}, 3, DType::f32, kCpu)},
                                        {"n", Tensor::full({2}, 3, DType::i64, kCpu)}});
  const Conversion done = convert(folder / "some.safetensors", folder / "out", {.dtype = DType::bf16});
  EXPECT_EQ(done.tensors, 2u);
  const io::WeightSource out(folder / "out");
  EXPECT_EQ(out.entry("w").dtype, DType::bf16);
  EXPECT_EQ(out.entry("n").dtype, DType::i64);
}

TEST_F(Load, ConvertNamesWhatIsNoTensor) {
  if (!io::has_torch_files()) GTEST_SKIP() << "skipped: this build has no libzip";
  using namespace io::test::pickle;
  const std::string inner =
      kEmptyDict + text("w") + matrix() + kSetItem + text("step") + integer(3) + kSetItem;
  io::write_file(
      folder / "some.pt",
      io::test::torch_bytes(program(
          {{"model", inner}, {"epoch", integer(7)}, {"note", text("best so far")}, {"hooks", kEmptyDict}})));
  const Conversion done = convert(folder / "some.pt", folder / "out");
  EXPECT_EQ(done.tensors, 1u);
  EXPECT_EQ(done.ignored, (std::vector<std::string>{"model.step (an integer)", "epoch (an integer)",
                                                    "note (a string)", "hooks (an empty dictionary)"}));
}

}  // namespace
}  // namespace tessera::pretrained

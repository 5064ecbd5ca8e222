#include "pretrained/config.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace tessera::pretrained {
namespace {

std::string config_message(const std::string& text, const ConfigOptions& options = {}) {
  try {
    parse_config("config.json", text, options);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

std::string with(const std::string& type, const std::string& fields) {
  return "{\"model_type\": \"" + type + "\"" + (fields.empty() ? "" : ", " + fields) + "}";
}

const models::LlamaConfig& llama(const Config& config) {
  return std::get<models::LlamaConfig>(config.model);
}
const models::BertConfig& bert(const Config& config) {
  return std::get<models::BertConfig>(config.model);
}
const models::GptConfig& gpt(const Config& config) {
  return std::get<models::GptConfig>(config.model);
}

TEST(Config, AbsentFieldsHaveTheDefaultsOfTransformers) {
  const auto gpt2 = gpt(parse_config("c", with("gpt2", "")));
  EXPECT_EQ(gpt2.vocabulary, 50257);
  EXPECT_EQ(gpt2.d_ff, 3072);
  EXPECT_EQ(gpt2.activation, ops::Activation::gelu_tanh);
  EXPECT_EQ(gpt2.attention_dropout, 0.1);
  EXPECT_TRUE(gpt2.tied);
  EXPECT_EQ(gpt2.dtype, DType::f32);
  const auto plain = llama(parse_config("c", with("llama", R"("num_attention_heads": 16)")));
  EXPECT_EQ(plain.kv_heads, 16);
  EXPECT_EQ(plain.effective_head_dim(), 256);
  EXPECT_EQ(plain.eps, 1e-6);
  EXPECT_FALSE(plain.tied);
  const auto roberta = bert(parse_config("c", with("roberta", "")));
  EXPECT_EQ(roberta.pad_token, 1);
  EXPECT_EQ(roberta.longest(), 510);
  EXPECT_EQ(roberta.classifier_dropout, 0.1);
  EXPECT_EQ(roberta.head, models::BertHead::none);
  EXPECT_EQ(gpt(parse_config("c", with("opt", ""))).position_offset(), 2);
}

TEST(Config, ReadsEachNameOfAnActivation) {
  const auto read = [](const std::string& name) {
    return gpt(parse_config("c", with("gpt2", "\"activation_function\": \"" + name + "\""))).activation;
  };
  for (const char* const name : {"gelu", "gelu_python"}) EXPECT_EQ(read(name), ops::Activation::gelu) << name;
  for (const char* const name :
       {"gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh", "gelu_pytorch_tanh"})
    EXPECT_EQ(read(name), ops::Activation::gelu_tanh) << name;
}

TEST(Config, ReadsBothWaysOfWritingRope) {
  // LLaMA 3.1 as its file has it, and as transformers 5 writes it.
  const std::string scaling = R"({"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                  "original_max_position_embeddings": 8192, "rope_type": "llama3")";
  const std::string before =
      R"("max_position_embeddings": 131072, "rope_theta": 500000.0, "rope_scaling": )" + scaling + "}";
  const std::string now =
      R"("max_position_embeddings": 131072, "rope_parameters": )" + scaling + R"(, "rope_theta": 500000.0})";
  for (const std::string& fields : {before, now}) {
    const ops::RopeOptions rope = llama(parse_config("c", with("llama", fields))).rope;
    EXPECT_EQ(rope.scaling, ops::RopeScaling::llama3);
    EXPECT_EQ(rope.base, 500000);
    EXPECT_EQ(rope.factor, 8);
    EXPECT_EQ(rope.trained_length, 8192);
    EXPECT_EQ(rope.high_freq_factor, 4);
  }
  const ops::RopeOptions old_linear =
      llama(parse_config("c", with("llama", R"("rope_scaling": {"type": "linear", "factor": 2})"))).rope;
  EXPECT_EQ(old_linear.scaling, ops::RopeScaling::linear);
  const ops::RopeOptions dynamic =
      llama(parse_config("c", with("llama", R"("rope_scaling": {"type": "dynamic", "factor": 2})"))).rope;
  EXPECT_EQ(dynamic.trained_length, 2048);
  EXPECT_EQ(llama(parse_config("c", with("llama", R"("rope_scaling": null)"))).rope.scaling,
            ops::RopeScaling::none);
}

TEST(Config, YarnScalesCosinesAsTransformersDoes) {
  const auto factor = [](const std::string& fields) {
    const std::string scaling = R"("rope_scaling": {"rope_type": "yarn", "factor": 4.0)" + fields + R"(})";
    return llama(parse_config("c", with("llama", scaling))).rope.attention_factor;
  };
  EXPECT_EQ(factor(""), 0);  // the default: 0.1 ln(4) + 1
  EXPECT_EQ(factor(R"(, "mscale": 0.5)"), 0);
  EXPECT_EQ(factor(R"(, "mscale_all_dim": 2)"), 0);
  EXPECT_EQ(factor(R"(, "mscale": 0.5, "mscale_all_dim": 0)"), 0);
  EXPECT_EQ(factor(R"(, "mscale": 0.7, "mscale_all_dim": 0.7)"), 1);
  // _compute_yarn_parameters of transformers 5.24.
  EXPECT_NEAR(factor(R"(, "mscale": 0.5, "mscale_all_dim": 2)"), 0.8371949816203595, 1e-15);
  EXPECT_EQ(factor(R"(, "mscale": 0.5, "mscale_all_dim": 2, "attention_factor": 1.5)"), 1.5);
}

TEST(Config, LlamasFamiliesHaveDefaultsOfTheirOwn) {
  const auto family = [](const std::string& type, const std::string& fields = "") {
    return llama(parse_config("c", with(type, fields)));
  };
  const auto mistral = family("mistral");
  EXPECT_EQ(mistral.family, models::LlamaFamily::mistral);
  EXPECT_EQ(mistral.kv_heads, 8);
  EXPECT_EQ(mistral.d_ff, 14336);
  EXPECT_EQ(mistral.window, 4096);  // if the file does not speak of it
  EXPECT_EQ(mistral.longest(), 4096);
  EXPECT_EQ(family("mistral", R"("num_key_value_heads": null)").kv_heads, 32);
  const auto second = family("mistral", R"("sliding_window": null, "head_dim": 64)");
  EXPECT_EQ(second.longest(), 131072);
  EXPECT_EQ(second.effective_head_dim(), 64);
  const auto qwen2 = family("qwen2");
  EXPECT_TRUE(qwen2.qkv_bias());
  EXPECT_FALSE(qwen2.attention_bias);  // none of the output projection
  EXPECT_EQ(qwen2.vocabulary, 151936);
  const auto qwen3 = family("qwen3", R"("hidden_size": 1024, "num_attention_heads": 64)");
  EXPECT_TRUE(qwen3.qk_norm());
  EXPECT_EQ(qwen3.effective_head_dim(), 128);
  EXPECT_FALSE(qwen3.qkv_bias());
  EXPECT_EQ(family("phi3").eps, 1e-5);
  EXPECT_EQ(family("phi3", R"("resid_pdrop": 0.1, "embd_pdrop": 0.2)").embedding_dropout, 0.2);
}

TEST(Config, AWindowOfQwenIsOnlyOneThatIsUsed) {
  const auto read = [](const std::string& fields) {
    return llama(parse_config("c", with("qwen2", R"("num_hidden_layers": 2, )" + fields)));
  };
  const auto window = [&](const std::string& fields) { return read(fields).window; };
  EXPECT_EQ(window(R"("sliding_window": 100)"), 0);
  EXPECT_EQ(window(R"("sliding_window": 100, "use_sliding_window": false)"), 0);
  EXPECT_EQ(window(R"("sliding_window": 100, "use_sliding_window": true)"), 0);  // from layer 28 on
  EXPECT_EQ(window(R"("sliding_window": 100, "use_sliding_window": true, "max_window_layers": 1)"), 100);
  EXPECT_EQ(window(R"("use_sliding_window": true, "max_window_layers": 0)"), 4096);
  EXPECT_EQ(window(R"("sliding_window": null, "use_sliding_window": true, "max_window_layers": 0)"), 0);
  EXPECT_EQ(window(R"("layer_types": ["full_attention", "full_attention"])"), 0);
  EXPECT_EQ(window(R"("layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": true)"),
            4096);
  EXPECT_EQ(window(R"("sliding_window": 0, "use_sliding_window": true, "max_window_layers": 1)"), 0);
  // The first layers without it are kept for the file that is written.
  for (const auto& [fields, full_layers] :
       {std::pair(R"("sliding_window": 100, "use_sliding_window": true, "max_window_layers": 1)", 1),
        {R"("layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": true)", 1},
        {R"("layer_types": ["sliding_attention", "sliding_attention"], "use_sliding_window": true)", 0}}) {
    const models::LlamaConfig config = read(fields);
    EXPECT_EQ(config.full_layers, full_layers) << fields;
    EXPECT_EQ(nlohmann::json::parse(config_text(config))["max_window_layers"], full_layers) << fields;
    EXPECT_EQ(llama(parse_config("c", config_text(config))).full_layers, full_layers) << fields;
  }
}

TEST(Config, ReadsPhi3sRopeAsItsFilesHaveIt) {
  // Phi-3-mini-128k's form, with fewer factors: no factor, the length of training next to the scaling.
  const std::string sizes =
      R"("hidden_size": 64, "num_attention_heads": 8, "max_position_embeddings": 131072, )";
  const auto phi3 = [&](const std::string& fields) {
    return llama(parse_config("c", with("phi3", sizes + fields)));
  };
  for (const char* const type : {"su", "longrope"}) {
    const auto config = phi3(R"("original_max_position_embeddings": 2048, "partial_rotary_factor": 0.5,
        "sliding_window": 262144, "rope_scaling": {"type": ")" +
                             std::string(type) + R"(", "long_factor": [2, 3.5], "short_factor": [1, 1.25]})");
    EXPECT_EQ(config.rope.scaling, ops::RopeScaling::longrope);
    EXPECT_EQ(config.rope.factor, 64);
    EXPECT_EQ(config.rope.trained_length, 2048);
    EXPECT_EQ(config.rope.long_factor, (std::vector<double>{2, 3.5}));
    EXPECT_EQ(config.rotary(), 4);
    EXPECT_EQ(config.window, 262144);
    EXPECT_EQ(config.longest(), 131072);
  }
  // As transformers 5 has it, and with a factor, which wins over the ratio of the lengths.
  const auto config = phi3(R"("rope_parameters": {"rope_type": "longrope", "factor": 8.0, "rope_theta": 500.0,
      "partial_rotary_factor": 0.25, "attention_factor": 1.5, "short_factor": [1], "long_factor": [9],
      "original_max_position_embeddings": 7})");
  EXPECT_EQ(config.rope.factor, 8);
  EXPECT_EQ(config.rope.trained_length, 4096);  // phi3's default, which transformers takes first
  EXPECT_EQ(config.rope.attention_factor, 1.5);
  EXPECT_EQ(config.rope.base, 500);
  EXPECT_EQ(config.rotary(), 2);
  EXPECT_EQ(phi3(R"("rope_scaling": null)").rope.scaling, ops::RopeScaling::none);
  // Fields that Phi-4-mini has besides.
  EXPECT_EQ(phi3(R"("full_attn_mod": 1, "interpolate_factor": 1)").rope.scaling, ops::RopeScaling::none);
  const auto of_llama = llama(parse_config(
      "c",
      with("llama", R"("hidden_size": 8, "num_attention_heads": 2, "rope_scaling": {"rope_type": "longrope",
      "original_max_position_embeddings": 512, "short_factor": [1, 2], "long_factor": [3, 4]})")));
  EXPECT_EQ(of_llama.rope.trained_length, 512);
  EXPECT_EQ(of_llama.rope.factor, 4);
}

TEST(Config, TheHeadIsThatOfTheArchitectureOrTheCallers) {
  const auto head = [](const std::string& type, const std::string& fields,
                       const ConfigOptions& options = {}) {
    return bert(parse_config("c", with(type, fields), options));
  };
  const std::string three = R"("id2label": {"0": "a", "1": "b", "2": "c"})";
  const std::string classify = R"("architectures": ["BertForSequenceClassification"])";
  EXPECT_EQ(head("bert", classify).labels, 2);
  EXPECT_EQ(head("bert", classify + "," + three).labels, 3);
  EXPECT_EQ(head("bert", classify + R"(, "id2label": {"0": "a"})").head, models::BertHead::regress);
  EXPECT_EQ(head("bert", R"("architectures": ["BertForPreTraining"])").head, models::BertHead::masked_lm);
  EXPECT_EQ(head("roberta", R"("architectures": ["RobertaForMaskedLM"])").head, models::BertHead::masked_lm);
  const auto own = head("bert", R"("architectures": ["BertForMaskedLM"])",
                        {.head = models::BertHead::classify, .labels = 5});
  EXPECT_EQ(own.head, models::BertHead::classify);
  EXPECT_EQ(own.labels, 5);
}

TEST(Config, TokensAndDtypes) {
  const Config config = parse_config(
      "c", with("llama", R"("bos_token_id": 1, "eos_token_id": [2, 7], "torch_dtype": "bfloat16")"));
  EXPECT_EQ(config.first_token, 1);
  EXPECT_EQ(config.end_tokens, (std::vector<int64_t>{2, 7}));
  EXPECT_EQ(llama(config).dtype, DType::bf16);
  EXPECT_EQ(llama(parse_config("c", with("llama", R"("dtype": "float16")"))).dtype, DType::f16);
  EXPECT_FALSE(parse_config("c", with("llama", R"("bos_token_id": null)")).first_token.has_value());
}

TEST(Config, UnknownFieldsAreRefusedUnlessTheCallerKnows) {
  EXPECT_EQ(
      config_message(with("gpt2", R"("mystery": 3)")),
      "config: config.json: the field \"mystery\" (3) is unknown and may change what the model "
      "computes; if it does not, take it out, by hand or with tessera convert --ignore-field \"mystery\"");
  EXPECT_EQ(config_message(with("gpt2", R"("mystery": 3)"), {.ignored_fields = {"mystery"}}), "");
  EXPECT_EQ(config_message(with("gpt2", R"("_name_or_path": "x", "transformers_version": "4.0")")), "");
  // As GPT-2 XL and SmolLM were published.
  EXPECT_EQ(config_message(with("gpt2", R"("output_past": true)")), "");
  EXPECT_EQ(config_message(with("llama", R"("is_llama_config": true, "rope_interleaved": false)")), "");
  EXPECT_NE(config_message(with("llama", R"("rope_interleaved": true)")).find("only false is supported"),
            std::string::npos);
  EXPECT_NE(config_message(with("llama", R"("rope_scaling": {"type": "linear", "factor": 2, "odd": 1})"))
                .find("rope_scaling: the field \"odd\""),
            std::string::npos);
}

struct Refused {
  const char* what;
  std::string text, error;
};

TEST(Config, RefusesWhatItCannotCompute) {
  const std::vector<Refused> refused = {
      {"nothing", "", "is not valid JSON at byte 1"},
      {"a list", "[]", "is not a JSON object"},
      {"a NUL", std::string("{\0}", 3), "holds a NUL byte"},
      {"cut short", "{\"model_type\": \"gpt2\"", "is not valid JSON at byte"},
      {"not UTF-8", "{\"\xFF\": 1}", "is not valid JSON"},
      {"too deep", "{\"a\":" + std::string(70, '[') + std::string(70, ']') + "}", "nests deeper than 64"},
      {"a field twice", R"({"model_type": "gpt2", "n_embd": 8, "n_embd": 16})",
       "the key \"n_embd\" occurs twice in one object"},
      {"twice further down", R"({"a": [{"b": 1, "b": 2}]})", "the key \"b\" occurs twice in one object"},
      {"no type", "{}", "has no model_type"},
      {"another type", with("gemma", ""),
       "model_type is \"gemma\"; expected gpt2, opt, llama, mistral, qwen2, qwen3, phi3, arcee, bert or "
       "roberta"},
      {"a type that is a number", R"({"model_type": 3})", "model_type is 3, expected a string"},
      {"a negative size", with("gpt2", R"("n_embd": -8)"),
       "n_embd is -8, expected a whole number of 0 ... 2147483647"},
      {"a fraction", with("gpt2", R"("n_embd": 8.5)"), "n_embd is 8.5, expected a whole number"},
      {"too large", with("gpt2", R"("n_embd": 2147483648)"), "expected a whole number of 0 ... 2147483647"},
      {"beyond 64 bits", with("gpt2", R"("n_embd": 18446744073709551616)"), "expected a whole number"},
      {"a size of text", with("gpt2", R"("n_embd": "8")"), "n_embd is \"8\", expected a whole number"},
      {"a size of 0", with("gpt2", R"("n_head": 0)"), "gpt: heads is 0; it must be at least 1"},
      {"no even split", with("gpt2", R"("n_embd": 10, "n_head": 3)"),
       "is not a multiple of the number of heads 3"},
      {"a million layers", with("gpt2", R"("n_layer": 1000000)"), "n_layer is 1000000, more than 10000"},
      {"eps of text", with("llama", R"("rms_norm_eps": "small")"), "expected a number"},
      {"eps of 1e999", with("llama", R"("rms_norm_eps": 1e999)"), "is not valid JSON"},
      {"a flag of 1", with("llama", R"("attention_bias": 1)"), "attention_bias is 1, expected true or false"},
      {"an activation", with("gpt2", R"("activation_function": "mish")"),
       "activation_function is \"mish\"; expected gelu"},
      {"a dtype", with("gpt2", R"("torch_dtype": "int8")"), "the dtype is \"int8\"; expected float32"},
      {"other scores", with("gpt2", R"("scale_attn_by_inverse_layer_idx": true)"),
       "scale_attn_by_inverse_layer_idx is true; only false is supported (scores are not divided by the "
       "layer's number)"},
      {"unscaled scores", with("gpt2", R"("scale_attn_weights": false)"), "only true is supported"},
      {"cross attention", with("gpt2", R"("add_cross_attention": true)"), "only false is supported"},
      {"OPT-350M", with("opt", R"("do_layer_norm_before": false)"),
       "only true is supported (norms stand before"},
      {"OPT's projection",
       with("opt", R"("hidden_size": 1024, "num_attention_heads": 16, "word_embed_proj_dim": 512)"),
       "word_embed_proj_dim is 512; only 1024 is supported"},
      {"quantised", with("llama", R"("quantization_config": {"bits": 4})"),
       "only null is supported (weights are not quantised)"},
      {"rope of another kind", with("llama", R"("rope_scaling": {"rope_type": "mrope", "factor": 2})"),
       "rope: there is no scaling \"mrope\"; expected none, linear, dynamic, llama3, yarn or longrope"},
      {"phi3 with rope of another kind", with("phi3", R"("rope_scaling": {"type": "linear", "factor": 2})"),
       "rope_scaling: rope_type is \"linear\"; phi3 has default and longrope"},
      {"phi3 with other attention", with("phi3", R"("full_attn_mod": 2)"),
       "full_attn_mod is 2; only 1 is supported (every layer"},
      {"phi3 with other positions", with("phi3", R"("interpolate_factor": 4)"),
       "interpolate_factor is 4; only 1 is supported (positions"},
      {"longrope without factors", with("llama", R"("rope_scaling": {"rope_type": "longrope"})"),
       "rope_scaling has no short_factor"},
      {"too few factors",
       with("llama", R"("rope_scaling": {"rope_type": "longrope", "short_factor": [1, 2]})"),
       "short_factor is [1,2], expected a list of 64 numbers"},
      {"factors of text",
       with("llama", R"("head_dim": 4, "rope_scaling": {"rope_type": "longrope", "short_factor": [1, "2"]})"),
       "short_factor holds \"2\", expected numbers"},
      {"a factor of 0", with("llama", R"("head_dim": 2, "rope_scaling": {"rope_type": "longrope",
                              "short_factor": [0], "long_factor": [1]})"),
       "short_factor[0] is 0; expected a positive number"},
      {"all of no head", with("phi3", R"("partial_rotary_factor": 1e300)"),
       "partial_rotary_factor is 1e+300; expected more than 0 and at most 1"},
      {"no heads", with("qwen3", R"("num_attention_heads": 0)"), "num_attention_heads is 0"},
      {"phi3 with biases", with("phi3", R"("attention_bias": true)"),
       "attention_bias is true; only false is supported (phi3 has no biases)"},
      {"mistral with biases", with("mistral", R"("attention_bias": true)"),
       "\"attention_bias\" (true) is unknown"},
      {"several positions", with("qwen2", R"("use_mrope": true)"),
       "use_mrope is true; only false is supported"},
      {"layers of another kind",
       with("qwen2", R"("num_hidden_layers": 1, "layer_types": ["chunked_attention"])"),
       "expected 1 times \"full_attention\" or \"sliding_attention\""},
      {"too few layer types", with("qwen3", R"("layer_types": ["full_attention"])"),
       "layer_types is [\"full_attention\"]; expected 32 times"},
      {"a window that is not used",
       with("qwen2", R"("num_hidden_layers": 1, "layer_types": ["sliding_attention"])"),
       "layer_types has \"sliding_attention\", but use_sliding_window is false"},
      {"a window of the first layers alone",
       with("qwen2", R"("num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
                        "use_sliding_window": true)"),
       "layer_types has \"full_attention\" after \"sliding_attention\"; only a window from some layer on"},
      {"a window without size", with("qwen2", R"("num_hidden_layers": 1, "layer_types": ["sliding_attention"],
                        "use_sliding_window": true, "sliding_window": null)"),
       "layer_types has \"sliding_attention\", but there is no sliding_window"},
      {"rope without factor", with("llama", R"("rope_scaling": {"type": "linear"})"),
       "rope_scaling has no factor"},
      {"a factor below 1", with("llama", R"("rope_scaling": {"type": "linear", "factor": 0.5})"),
       "rope: factor is 0.5; expected 1 or more"},
      {"rope of text", with("llama", R"("rope_scaling": "linear")"),
       "rope_scaling is \"linear\", expected an object"},
      {"rope twice", with("llama", R"("rope_scaling": {}, "rope_parameters": {})"),
       "rope_scaling is {}; only null is supported"},
      {"a part of the head",
       with("llama", R"("rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5})"),
       "partial_rotary_factor is 0.5; only 1.0 is supported (whole heads are rotated; phi3 alone rotates a "
       "part)"},
      {"a part of the head, next to the scaling", with("qwen2", R"("partial_rotary_factor": 0.5)"),
       "partial_rotary_factor is 0.5; only 1.0 is supported"},
      {"base of 0", with("llama", R"("rope_theta": 0)"), "rope: base is 0; expected more than 1"},
      {"uneven groups", with("llama", R"("num_key_value_heads": 5)"),
       "32 heads are not a multiple of 5 kv_heads"},
      {"an odd head", with("llama", R"("head_dim": 5)"), "heads of 5 elements"},
      {"relative positions", with("bert", R"("position_embedding_type": "relative_key")"),
       "only \"absolute\" is supported"},
      {"a decoder", with("bert", R"("is_decoder": true)"), "is_decoder is true; only false is supported"},
      {"pruned heads", with("bert", R"("pruned_heads": {"0": [1]})"),
       "pruned_heads is {\"0\":[1]}; only {} is supported"},
      {"an architecture", with("bert", R"("architectures": ["BertForQuestionAnswering"])"),
       "architectures names ForQuestionAnswering"},
      {"several labels at once",
       with(
           "bert",
           R"("architectures": ["BertForSequenceClassification"], "problem_type": "multi_label_classification")"),
       "problem_type is \"multi_label_classification\"; expected regression or single_label_classification"},
      {"regression of two",
       with("bert", R"("architectures": ["BertForSequenceClassification"], "problem_type": "regression")"),
       "regression of 2 numbers; only one is supported"},
      {"a pad token past the positions", with("roberta", R"("pad_token_id": 600)"),
       "512 positions leave none for tokens"},
      {"an end token below 0", with("llama", R"("eos_token_id": -1)"),
       "eos_token_id is not a token or a list of tokens"},
      {"an end token of text", with("llama", R"("eos_token_id": ["a"])"),
       "eos_token_id is not a token or a list"}};
  for (const Refused& one : refused)
    EXPECT_NE(config_message(one.text).find(one.error), std::string::npos)
        << one.what << ": " << config_message(one.text);
}

template <class Model>
std::string fields_of(Model config) {
  std::string text;
  for_each_field(config, [&](const std::string& name, const auto& value) {
    using Value = std::remove_cvref_t<decltype(value)>;
    if constexpr (std::is_enum_v<Value>)
      text += name + "=" + std::to_string(int64_t(value)) + " ";
    else if constexpr (std::is_arithmetic_v<Value>)
      text += name + "=" + std::to_string(value) + " ";
    else if constexpr (std::is_same_v<Value, std::vector<double>>)
      for (const double number : value) text += name + ":" + std::to_string(number) + " ";
  });
  return text;
}

TEST(Config, WhatIsWrittenReadsBackTheSame) {
  const models::GptConfig gpt2{.vocabulary = 61,
                               .positions = 24,
                               .d_model = 24,
                               .d_ff = 31,
                               .heads = 3,
                               .layers = 2,
                               .activation = ops::Activation::relu,
                               .eps = 1e-4,
                               .embedding_dropout = 0.3,
                               .attention_dropout = 0.2,
                               .residual_dropout = 0.1,
                               .tied = false,
                               .init_deviation = 0.01,
                               .dtype = DType::bf16};
  EXPECT_EQ(fields_of(gpt(parse_config("c", config_text(gpt2)))), fields_of(gpt2));
  models::GptConfig opt = gpt2;
  opt.family = models::GptFamily::opt;
  opt.embedding_dropout = 0;
  opt.eps = 1e-5;
  EXPECT_EQ(fields_of(gpt(parse_config("c", config_text(opt)))), fields_of(opt));
  for (const auto scaling : {ops::RopeScaling::none, ops::RopeScaling::linear, ops::RopeScaling::dynamic,
                             ops::RopeScaling::llama3, ops::RopeScaling::yarn}) {
    models::LlamaConfig config{.vocabulary = 61,
                               .positions = 24,
                               .d_model = 24,
                               .d_ff = 31,
                               .heads = 4,
                               .kv_heads = 2,
                               .head_dim = 8,
                               .layers = 2,
                               .eps = 1e-4,
                               .activation = ops::Activation::relu_squared,
                               .gated = false,
                               .attention_bias = true,
                               .mlp_bias = true,
                               .attention_dropout = 0.5,
                               .tied = true,
                               .init_deviation = 0.01};
    config.rope = {.base = 5000, .scaling = scaling, .factor = scaling == ops::RopeScaling::none ? 1.0 : 3.0};
    if (scaling == ops::RopeScaling::dynamic) config.rope.trained_length = 24;
    if (scaling == ops::RopeScaling::linear) config.rope.trained_length = 24;  // read, not used
    if (scaling == ops::RopeScaling::llama3) config.rope.low_freq_factor = 2;
    if (scaling == ops::RopeScaling::yarn) config.rope.beta_fast = 40, config.rope.attention_factor = 1.5;
    if (scaling == ops::RopeScaling::llama3 || scaling == ops::RopeScaling::yarn)
      config.rope.trained_length = 16;
    EXPECT_EQ(fields_of(llama(parse_config("c", config_text(config)))), fields_of(config));
  }
  using models::LlamaFamily;
  for (const LlamaFamily family :
       {LlamaFamily::llama, LlamaFamily::mistral, LlamaFamily::qwen2, LlamaFamily::qwen3, LlamaFamily::phi3})
    for (const int64_t window : {0, 12}) {
      models::LlamaConfig config{.family = family,
                                 .vocabulary = 61,
                                 .positions = 24,
                                 .d_model = 24,
                                 .d_ff = 31,
                                 .heads = 4,
                                 .kv_heads = 2,
                                 .head_dim = 8,
                                 .layers = 2,
                                 .window = family == LlamaFamily::llama ? 0 : window,
                                 .full_layers = family == LlamaFamily::qwen3 && window > 0 ? 1 : 0,
                                 .attention_bias = family == LlamaFamily::qwen3 && window > 0,
                                 .tied = window > 0,
                                 .dtype = DType::f16};
      config.rope = {.base = 700, .scaling = ops::RopeScaling::longrope, .factor = 3, .trained_length = 7};
      if (family == LlamaFamily::phi3)
        config.partial_rotary = 0.5, config.embedding_dropout = 0.25, config.residual_dropout = 0.5;
      for (int64_t i = 0; i < config.rotary() / 2; ++i)
        config.rope.short_factor.push_back(1 + double(i)), config.rope.long_factor.push_back(2.5 + double(i));
      if (window > 0) config.rope.attention_factor = 1.5;
      const Config back = parse_config("c", config_text(config));
      EXPECT_EQ(back.type, name_of(family));
      EXPECT_EQ(fields_of(llama(back)), fields_of(config));
    }
  for (const auto family : {models::BertFamily::bert, models::BertFamily::roberta})
    for (const auto head : {models::BertHead::none, models::BertHead::classify, models::BertHead::regress,
                            models::BertHead::masked_lm}) {
      const models::BertConfig config{.family = family,
                                      .vocabulary = 61,
                                      .positions = 24,
                                      .types = 1,
                                      .d_model = 24,
                                      .d_ff = 31,
                                      .heads = 3,
                                      .layers = 2,
                                      .pad_token = 3,
                                      .activation = ops::Activation::gelu_tanh,
                                      .eps = 1e-4,
                                      .hidden_dropout = 0.3,
                                      .attention_dropout = 0.2,
                                      .classifier_dropout = 0.1,
                                      .head = head,
                                      .labels = head == models::BertHead::classify  ? 5
                                                : head == models::BertHead::regress ? 1
                                                                                    : 2,
                                      .init_deviation = 0.01};
      EXPECT_EQ(fields_of(bert(parse_config("c", config_text(config)))), fields_of(config));
    }
}

}  // namespace
}  // namespace tessera::pretrained

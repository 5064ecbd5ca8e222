#include <gtest/gtest.h>

#include <cmath>

#include "autograd/tape.h"
#include "io/checksum.h"
#include "models/generate.h"
#include "nn/observe.h"
#include "pretrained/fingerprint.h"
#include "pretrained/sparse_model.h"
#include "tests/errors.h"
#include "tests/io/files.h"
#include "tests/models/small_models.h"
#include "tests/tensors.h"

// Compressed model directories: what convert writes, models that run it, gates by the names of layers.

namespace tessera::pretrained {
namespace {

constexpr ops::SparseFormat kFormats[] = {ops::SparseFormat::dense_columns, ops::SparseFormat::tiled_cbc,
                                          ops::SparseFormat::tca_bme, ops::SparseFormat::sell_delta4,
                                          ops::SparseFormat::mma_delta4};

/// Zeros about half of the elements of every matrix in a block; some become -0.
template <class Model>
void prune(Model& model) {
  for (const LinearModule& module : linear_modules(model).all) {
    if (!module.ours.starts_with("blocks.")) continue;
    const Tensor weight = module.layer->weight.detach();
    Rng rng(uint64_t(module.rows));
    const Tensor draws = Tensor::empty_packed(weight.shape(), DType::f32, kCpu);
    ops::fill_uniform(draws, 0, 1, rng);
    for (int64_t r = module.first; r < module.first + module.rows; ++r)
      for (int64_t c = 0; c < weight.size(1); ++c)
        if (const float draw = draws.at({r, c}).item<float>(); draw < 0.5)
          weight.at({r, c}).fill(draw < 0.25 ? -0.0 : 0.0);
  }
}

template <class Model>
Tensor logits(const Model& model) {
  const NoTape no_tape;
  return model(models::tokens_of({3, 1, 4, 1, 5, 9, 2, 6}, {2, 4})).detach().to(DType::f64);
}

/// Calls f(what, model, load_sparse, load) with a pruned model of every kind, in f16 values.
template <class F>
void for_each_pruned(F&& f) {
  Rng rng(7);
  for (const models::GptFamily family : {models::GptFamily::gpt2, models::GptFamily::opt}) {
    models::GptConfig config = models::small_gpt(family);
    config.dtype = DType::f16;
    models::Gpt model(config, rng, kCpu);
    prune(model);
    f(
        "gpt", model, [](auto&&... given) { return load_sparse_gpt(given...); },
        [](auto&&... given) { return load_gpt(given...); });
  }
  for (const models::LlamaFamily family : models::kFamilies) {
    models::LlamaConfig config = models::small_family(family);
    config.dtype = DType::f16;
    models::Llama model(config, rng, kCpu);
    prune(model);
    f(
        name_of(family), model, [](auto&&... given) { return load_sparse_llama(given...); },
        [](auto&&... given) { return load_llama(given...); });
  }
}

TEST(SparseModels, OfEveryKindGiveTheLogitsOfTheDenseOnes) {
  for_each_pruned([](const std::string& what, auto& model, auto&& load_sparse, auto&& load) {
    for (const ops::SparseFormat format : kFormats) {
      const TemporaryFolder at;
      save(model, at / "dense");
      const SparseConversion done = convert_sparse(at / "dense", at / "sparse", format);
      EXPECT_EQ(done.fingerprint, fingerprint_of(model)) << what;  // -0 and 0 are one value
      EXPECT_GT(done.negative_zeros, 0);
      EXPECT_TRUE(is_sparse_folder(at / "sparse"));
      Rng rng(1);
      const LoadOptions options{.dtype = DType::f32};
      const auto dense = load(at / "dense", rng, kCpu, options);
      const auto sparse = load_sparse(at / "sparse", rng, kCpu, options, false);
      EXPECT_EQ(sparse.blocks.size(), 2u);
      for (const LinearModule& module :
           linear_modules(const_cast<std::remove_const_t<decltype(sparse)>&>(sparse)).all)
        if (module.ours.starts_with("blocks.")) EXPECT_STREQ(nn::name_of(module.layer->form), "compressed");
      EXPECT_LT(largest_difference(logits(dense), logits(sparse)), 1e-4) << what << " " << name_of(format);
      // And back: the same bits, but for the sign of zeros.
      EXPECT_EQ(
          largest_difference(logits(dense), logits(load_sparse(at / "sparse", rng, kCpu, options, true))), 0);
      convert_dense(at / "sparse", at / "back");
      EXPECT_EQ(largest_difference(logits(dense), logits(load(at / "back", rng, kCpu, options))), 0) << what;
      EXPECT_NE(message_of([&] { save(sparse, at / "again"); }).find("compressed"), std::string::npos);
    }
  });
}

// Version 2 stores sell_delta4 alone differently.
TEST(SparseModels, OfVersionOneAreReadButForSellDelta4) {
  Rng rng(3);
  models::GptConfig config = models::small_gpt(models::GptFamily::gpt2);
  config.dtype = DType::f32;
  models::Gpt model(config, rng, kCpu);
  prune(model);
  for (const ops::SparseFormat format : kFormats) {
    const TemporaryFolder at;
    save(model, at / "dense");
    convert_sparse(at / "dense", at / "sparse", format);
    const std::string path = at / "sparse/sparse.safetensors";
    io::NamedTensors tensors;
    io::Metadata metadata;
    {
      const io::SafetensorsFile file(path);
      for (const io::SafetensorsEntry& entry : file.entries())
        tensors.emplace_back(entry.name, file.load(entry.name).clone());
      metadata = file.metadata();
    }
    EXPECT_EQ(metadata.at("tessera_sparse"), "2");
    metadata["tessera_sparse"] = "1";
    io::Xxh3 sum;
    for (const char* const key : {"tessera_sparse", "layers", "checksums", "fingerprint"})
      sum.add(metadata.at(key) + "\n");
    metadata["checksum"] = sum.digits();
    io::save_safetensors(path, tensors, metadata);
    const std::string error = message_of([&] { convert_dense(at / "sparse", at / "back"); });
    if (format == ops::SparseFormat::sell_delta4)
      EXPECT_NE(error.find("is sell-delta4 of version 1"), std::string::npos) << error;
    else
      EXPECT_EQ(error, "") << name_of(format);
  }
}

TEST(SparseModels, GenerateTheTextOfTheDenseOnes) {
  for_each_pruned([](const std::string& what, auto& model, auto&& load_sparse, auto&& load) {
    const TemporaryFolder at;
    save(model, at / "dense");
    convert_sparse(at / "dense", at / "sparse", ops::SparseFormat::tca_bme);
    Rng rng(1);
    const LoadOptions options{.dtype = DType::f32};
    const auto dense = load(at / "dense", rng, kCpu, options);
    const auto sparse = load_sparse(at / "sparse", rng, kCpu, options, false);
    const std::vector<int64_t> prompt = {3, 1, 4};
    const models::GenerateOptions greedy{.most_tokens = 8, .sampling = {.temperature = 0}};
    EXPECT_EQ(models::generate(dense, prompt, greedy), models::generate(sparse, prompt, greedy)) << what;
  });
}

models::Llama pruned_llama(Rng& rng) {
  models::LlamaConfig config = models::small_llama();
  config.dtype = DType::f32;
  models::Llama model(config, rng, kCpu);
  prune(model);
  return model;
}

TEST(SparseModels, ThrowWhileATapeIsRecording) {
  Rng rng(1);
  models::Llama model = pruned_llama(rng);
  make_sparse(model, {.threshold = 0.1});
  const Tensor tokens = models::tokens_of({3, 1}, {1, 2});
  const Tape tape;
  EXPECT_NE(message_of([&] { model(tokens); }).find("a tape is recording"), std::string::npos);
}

TEST(SparseModels, GatesLeaveOutInputsOfTheirOwnModule) {
  Rng rng(1);
  models::Llama model = pruned_llama(rng);
  const Tensor dense = logits(model);
  const std::string q = "model.layers.1.self_attn.q_proj", k = "model.layers.1.self_attn.k_proj";
  Gates gates;
  for (const LinearModule& module : linear_modules(model).all)
    if (module.ours.starts_with("blocks.")) gates.gates[module.name] = {.kind = ops::Gate::Kind::threshold};
  make_sparse(model, {.gates = gates});
  EXPECT_LT(largest_difference(dense, logits(model)), 1e-5);  // a threshold of 0 leaves out zeros alone
  gates.gates[q].threshold = 1e9;
  make_sparse(model, {.gates = gates});
  EXPECT_GT(largest_difference(dense, logits(model)), 1e-3);
  // The rows of q are 0, those of k are not.
  const nn::Observe scope(
      model.blocks[1], {.forward = [](const nn::LinearCall& call) {
        if (call.name != "attention.qkv") return;
        double q_sum = 0, k_sum = 0;
        for (const double y : call.output.slice(-1, 0, 24).clone().to(DType::f64).to_vector<double>())
          q_sum += std::fabs(y);
        for (const double y : call.output.slice(-1, 24, 36).clone().to(DType::f64).to_vector<double>())
          k_sum += std::fabs(y);
        EXPECT_EQ(q_sum, 0);
        EXPECT_GT(k_sum, 0.1);
      }});
  logits(model);
}

TEST(SparseModels, GatesByColumnNormsCompareTheProduct) {
  Rng rng(1);
  models::Llama model = pruned_llama(rng);
  Gates gates{.column_norms = true};
  for (const LinearModule& module : linear_modules(model).all)
    if (module.ours.starts_with("blocks."))
      gates.gates[module.name] = {.kind = ops::Gate::Kind::top_k, .keep = 5};
  const auto modules = make_sparse(model, {.gates = gates});
  for (const SparseModule& module : modules) {
    ASSERT_TRUE(module.gate.scales.defined());
    EXPECT_TRUE(module.is_sparse);
    EXPECT_EQ(module.format, "dense-columns");
  }
  const auto counts = count_gates(model, {{3, 1, 4, 1, 5}, {9, 2}, {}});
  ASSERT_EQ(counts.size(), modules.size());
  for (const auto& [name, count] : counts) {
    EXPECT_EQ(count.counted, 7 * 5) << name;  // tokens, and inputs of each
    EXPECT_EQ(count.followed, 5 * 5) << name;
    EXPECT_LE(count.repeated, count.followed);
  }
}

TEST(SparseModels, SayWhichLayerAndWhy) {
  Rng rng(1);
  models::Llama model = pruned_llama(rng);
  const auto says = [&](const SparseOptions& options) {
    return message_of([&] { make_sparse(model, options); });
  };
  expect_parts(says({}), {"model.layers.0.self_attn.q_proj", "its weight is dense", "--gates"});
  expect_parts(says({.threshold = 0.1, .tokens = 9}), {"model.layers.0.self_attn.q_proj", "at most 8"});
  Gates gates;
  for (const LinearModule& module : linear_modules(model).all)
    if (module.ours.starts_with("blocks.")) gates.gates[module.name] = {.kind = ops::Gate::Kind::threshold};
  Gates less = gates;
  less.gates.erase("model.layers.1.mlp.down_proj");
  expect_parts(says({.gates = less}), {"none for layer model.layers.1.mlp.down_proj"});
  Gates more = gates;
  more.gates["model.layers.7.mlp.down_proj"] = {};
  expect_parts(says({.gates = more}), {"no layer 'model.layers.7.mlp.down_proj'"});
  Gates misspelt = gates;
  misspelt.gates["model.layers.1.mlp.downproj"] = {};
  expect_parts(says({.gates = misspelt}), {"no layer 'model.layers.1.mlp.downproj'; did you mean "
                                           "'model.layers.1.mlp.down_proj'?"});
  Gates foreign = gates;
  foreign.fingerprint = "0123";
  expect_parts(says({.gates = foreign}), {"fingerprint 0123", fingerprint_of(model).c_str()});
}

TEST(SparseModels, ChooseByTheBreakEvenUnderAuto) {
  Rng rng(1);
  models::Llama model = pruned_llama(rng);
  const TemporaryFolder at;
  save(model, at / "dense");
  convert_sparse(at / "dense", at / "half", ops::SparseFormat::tca_bme);
  models::LlamaConfig config = models::small_llama();
  config.dtype = DType::f32;
  models::Llama full(config, rng, kCpu);
  save(full, at / "full");
  convert_sparse(at / "full", at / "none", ops::SparseFormat::tca_bme);
  const SparseOptions automatic{.mode = SparseMode::automatic};
  models::Llama half = load_sparse_llama(at / "half", rng, kCpu),
                none = load_sparse_llama(at / "none", rng, kCpu);
  const Tensor before = logits(none);
  for (const SparseModule& module : make_sparse(half, automatic))
    EXPECT_TRUE(module.is_sparse) << module.reason;
  for (const SparseModule& module : make_sparse(none, automatic)) {
    EXPECT_FALSE(module.is_sparse);
    expect_parts(module.reason, {"less than the break-even"});
    // The layer is named where it is another one: q for k and v.
    const bool other = module.name.ends_with("k_proj") || module.name.ends_with("v_proj") ||
                       module.name.ends_with("up_proj");
    EXPECT_EQ(module.reason.find("model.layers.") != std::string::npos, other)
        << module.name << ": " << module.reason;
  }
  for (const LinearModule& module : linear_modules(none).all) EXPECT_TRUE(nn::is_dense(module.layer->form));
  EXPECT_LT(largest_difference(before, logits(none)), 1e-5);
}

TEST(SparseModels, FiniteWeightsDoNotBecomeInfinite) {
  Rng rng(1);
  models::GptConfig config = models::small_gpt(models::GptFamily::gpt2);
  config.dtype = DType::bf16;
  models::Gpt model(config, rng, kCpu);
  const auto expect = [&](const Tensor& weight, const std::string& name) {
    const TemporaryFolder at;
    const Tensor before = weight.clone();
    weight.slice(0, 0, 1).slice(1, 0, 2).fill(70000);
    save(model, at / "dense");
    convert_sparse(at / "dense", at / "sparse", ops::SparseFormat::tca_bme);
    EXPECT_TRUE(
        io::test::throws([&] { load_sparse_gpt(at / "sparse", rng, kCpu, {.dtype = DType::f16}, true); },
                         "'" + name + "' has 2 finite values that f16 would make infinite"));
    weight.copy_from(before);
  };
  expect(model.blocks[0].mlp.up.weight.detach(), "transformer.h.0.mlp.c_fc.weight");  // compressed
  expect(model.token.weight.detach(), "transformer.wte.weight");
}

TEST(SparseModels, LayersThatRunDenseHaveTheDtypeOfTheModel) {
  for_each_pruned([](const std::string& what, auto& model, auto&& load_sparse, auto&& load) {
    for (const LinearModule& module : linear_modules(model).all)  // no zeros: auto runs all layers dense
      if (module.ours.starts_with("blocks.")) module.layer->weight.detach().fill(0.125);
    const TemporaryFolder at;
    save(model, at / "dense");
    convert_sparse(at / "dense", at / "sparse", ops::SparseFormat::tca_bme);
    Rng rng(1);
    const LoadOptions options{.dtype = DType::f32};  // of files in f16
    auto mixed = load_sparse(at / "sparse", rng, kCpu, options, false);
    for (const SparseModule& module : make_sparse(mixed, {.mode = SparseMode::automatic}))
      EXPECT_FALSE(module.is_sparse) << what;
    for (const LinearModule& module : linear_modules(mixed).all)
      EXPECT_EQ(module.layer->weight.dtype(), DType::f32) << what << " " << module.name;
    EXPECT_EQ(largest_difference(logits(load(at / "dense", rng, kCpu, options)), logits(mixed)), 0) << what;
  });
}

}  // namespace
}  // namespace tessera::pretrained

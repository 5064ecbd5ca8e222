#include "pretrained/language_model.h"

#include <gtest/gtest.h>

#include "autograd/tape.h"
#include "pretrained/sparse_file.h"
#include "tests/io/files.h"
#include "tests/models/small_models.h"
#include "tests/tensors.h"

// Language models from folders that may hold either kind, dense or compressed.

namespace tessera::pretrained {
namespace {

using io::test::throws;

/// Folders "gpt" and "llama" with models in f32, and the same compressed, "gpt-sparse" and "llama-sparse".
class LanguageFolders : public testing::Test {
 protected:
  LanguageFolders() {
    models::GptConfig gpt = models::small_gpt();
    models::LlamaConfig llama = models::small_llama();
    gpt.dtype = llama.dtype = DType::f32;
    Rng rng(5);
    save(models::Gpt(gpt, rng, kCpu), at_ / "gpt");
    save(models::Llama(llama, rng, kCpu), at_ / "llama");
    for (const std::string name : {"gpt", "llama"})
      convert_sparse(at_ / name, at_ / (name + "-sparse"), ops::SparseFormat::tca_bme);
  }
  LoadedLanguageModel load(const std::string& name, const std::optional<SparseOptions>& sparse = {}) const {
    Rng rng(1);
    return load_language(at_ / name, rng, kCpu, {}, sparse);
  }
  static Tensor logits(const LoadedLanguageModel& loaded) {
    const NoTape no_tape;
    return loaded.model(models::tokens_of({3, 1, 4, 1, 5, 9, 2, 6}, {2, 4})).detach();
  }
  TemporaryFolder at_;
};

TEST_F(LanguageFolders, HoldEitherModelDenseOrCompressed) {
  for (const std::string name : {"gpt", "llama"}) {
    const LoadedLanguageModel dense = load(name);
    EXPECT_EQ(dense.folder, at_ / name);
    EXPECT_EQ(dense.config.type, name == "gpt" ? "gpt2" : "llama");
    EXPECT_EQ(dense.model.get_if<models::Gpt>() != nullptr, name == "gpt");
    EXPECT_EQ(dense.stored, DType::f32);
    EXPECT_TRUE(dense.sparse.empty());
    LoadedLanguageModel opened = load(name + "-sparse");
    for (const LinearModule& module : linear_modules(opened.model).all)
      EXPECT_TRUE(nn::is_dense(module.layer->form)) << module.name;
    EXPECT_EQ(largest_difference(logits(opened), logits(dense)), 0) << name;
    LoadedLanguageModel sparse = load(name + "-sparse", SparseOptions{});
    EXPECT_FALSE(sparse.sparse.empty());
    for (const SparseModule& module : sparse.sparse) EXPECT_TRUE(module.is_sparse) << module.name;
    EXPECT_LT(largest_difference(logits(sparse), logits(dense)), 1e-4) << name;
    save(opened.model, at_ / (name + "-again"));
    EXPECT_EQ(largest_difference(logits(load(name + "-again")), logits(dense)), 0) << name;
  }
}

TEST_F(LanguageFolders, RefuseWhatDoesNotFitThem) {
  const SparseOptions off{.mode = SparseMode::off, .threshold = 0.1};
  for (const std::string name : {"gpt", "llama-sparse"})
    EXPECT_TRUE(throws([&] { load(name, off); }, "in the mode off"));
  EXPECT_TRUE(throws([&] { load("gpt", SparseOptions{}); }, "its weight is dense, and it has no gate"));
  EXPECT_TRUE(
      throws([&] { load("llama-sparse", SparseOptions{.prefill = 0.75}); }, "load: sparse.prefill 0.75 for"));
  Rng rng(5);
  EXPECT_TRUE(throws([&] { load_dense_language(at_ / "gpt-sparse", rng, kCpu); }, "make them dense first"));
  save(models::Bert(models::small_bert(models::BertHead::classify), rng, kCpu), at_ / "bert",
       {.dtype = DType::f32});
  EXPECT_TRUE(throws([&] { load("bert"); }, "holds a bert, which does not predict the next token"));
}

}  // namespace
}  // namespace tessera::pretrained

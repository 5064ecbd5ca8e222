#include "sparsity/mask_import.h"

#include <gtest/gtest.h>

#include "io/npy.h"
#include "io/torch_file.h"
#include "pretrained/fingerprint.h"
#include "sparsity/model_matrices.h"
#include "sparsity/patterns.h"
#include "tests/io/files.h"
#include "tests/io/torch_bytes.h"
#include "tests/sparsity/small.h"

namespace tessera::sparsity {
namespace {

using io::test::same;
using io::test::throws;
using test::SmallGpt;
using test::SmallLlama;
namespace fs = std::filesystem;

/// What torch.save writes for one bare f32 matrix.
std::string torch_matrix(const Tensor& x) {
  namespace pickle = io::test::pickle;
  const Tensor packed = x.clone().packed();
  const int64_t rows = x.size(0), columns = x.size(1);
  const std::string tensor = pickle::tensor_of(pickle::storage("FloatStorage", "0", rows * columns), 0,
                                               {rows, columns}, {columns, 1});
  return io::test::torch_bytes(pickle::kProto + tensor + pickle::kStop,
                               {reinterpret_cast<const char*>(packed.data<float>()), packed.bytes()});
}

/// A dense LLaMA "dense", and "pruned" of it, in a folder.
struct Models {
  explicit Models(const PruneOptions& options = {.score = Score::magnitude}) {
    SmallLlama small;
    pretrained::save(small.model, folder / "dense");
    pruned = prune(small.model, test::small_samples(), options);
    save_pruned(small.model, pruned, "{}\n", folder / "pruned");
  }
  /// The pruned matrices as files of one each, in the folder `to`; "q_proj" of block 1 is
  /// layer1-self_attn.q_proj<ending>.
  void split(const std::string& to, const std::string& ending) const {
    const ModelMatrices matrices(folder / "pruned");
    fs::create_directories(folder / to);
    for (const ModelMatrices::Matrix& matrix : matrices.all()) {
      const std::string path =
          folder / (to + "/layer" + std::to_string(matrix.block) + "-" + matrix.part + ending);
      if (ending.ends_with(".pt"))
        put(path, torch_matrix(matrices.load(matrix)));
      else
        io::save_npy(path, matrices.load(matrix));
    }
  }
  Imported import(const std::string& from, const ImportOptions& options = {}) const {
    return import_masks({folder / from}, folder / "dense", options);
  }
  std::string fails(const std::string& from, const ImportOptions& options = {.partial = true}) const {
    return message_of([&] { import(from, options); });
  }
  TemporaryFolder folder;
  Pruned pruned;
};

void expect_same_masks(const Masks& got, const Masks& expected) {
  ASSERT_EQ(got.layers.size(), expected.layers.size());
  for (size_t i = 0; i < got.layers.size(); ++i) {
    EXPECT_EQ(got.layers[i].first, expected.layers[i].first);
    EXPECT_EQ(got.layers[i].second.columns, expected.layers[i].second.columns);
    EXPECT_TRUE(same(got.layers[i].second.words, expected.layers[i].second.words)) << got.layers[i].first;
  }
}

TEST(ModelMatrices, HaveTheNamesShapesAndFingerprintOfTheModel) {
  const TemporaryFolder folder;
  const auto expect = [&](auto&& small, const std::string& name) {
    pretrained::save(small.model, folder / name);
    const ModelMatrices matrices(folder / name);
    EXPECT_EQ(matrices.fingerprint(), pretrained::fingerprint_of(small.model)) << name;
    for (const ModelMatrices::Matrix& matrix : matrices.all()) {
      EXPECT_EQ(matrices.load(matrix).shape(), (Shape{matrix.rows, matrix.columns})) << matrix.name;
      EXPECT_TRUE(matrix.name.ends_with("." + std::to_string(matrix.block) + "." + matrix.part))
          << matrix.name;
    }
  };
  expect(SmallLlama(), "llama");
  expect(SmallGpt(), "gpt2");
  expect(SmallGpt(models::GptFamily::opt), "opt");
}

TEST(FileNames, SayLayerComponentPatternAndSparsity) {
  const auto parsed = parse_matrix_file_name("layer12-mlp.down_proj-2-4-0_5");
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed->block, 12);
  EXPECT_EQ(parsed->component, "mlp.down_proj");
  EXPECT_EQ(parsed->pattern, "2:4");
  EXPECT_EQ(parsed->sparsity, "0.5");
  EXPECT_EQ(parse_matrix_file_name("layer0-q_proj-0-0-0.5")->pattern, "unstructured");
  EXPECT_EQ(parse_matrix_file_name("layer0-q_proj-0-0")->sparsity, "");
  for (const char* wrong : {"", "layer", "layer0", "layer-q-0-0-0.5", "layerx-q-0-0-0.5", "layer0--0-0-0.5",
                            "layer0-q-0-0-", "layer0-q-0-x-0.5", "layer0-q-0-0-half", "layer0-q-0-0-0.5-1",
                            "block0-q-0-0-0.5", "layer99999999999-q-0-0-0.5"})
    EXPECT_FALSE(parse_matrix_file_name(wrong)) << wrong;
}

TEST(Import, FilesFoldersModelsAndMasksGiveTheSameMasks) {
  const Models models;
  models.split("npy", "-0-0-0.5.npy");
  const Masks& expected = models.pruned.masks;
  const Imported imported = models.import("npy", {.method = "magnitude", .seed = "7"});
  expect_same_masks(imported.masks, expected);
  EXPECT_EQ(imported.masks.info, (MaskInfo{.fingerprint = expected.info.fingerprint,
                                           .model = "dense",
                                           .method = "magnitude",
                                           .pattern = "unstructured",
                                           .sparsity = "0.5",
                                           .seed = "7"}));
  EXPECT_TRUE(imported.matrices[0].from.ends_with("npy/layer0-self_attn.q_proj-0-0-0.5.npy"));
  const Imported of_model = models.import("pruned");
  expect_same_masks(of_model.masks, expected);
  EXPECT_EQ(of_model.masks.info.method, "magnitude");
  EXPECT_EQ(of_model.masks.info.seed, expected.info.seed);
  expect_same_masks(models.import("pruned/masks.safetensors").masks, expected);
  // A model that another program pruned says nothing of its origin.
  fs::remove(models.folder / "pruned/masks.safetensors");
  const Imported foreign = models.import("pruned");
  expect_same_masks(foreign.masks, expected);
  EXPECT_EQ(foreign.masks.info.method, "");
  EXPECT_EQ(foreign.masks.info.fingerprint, expected.info.fingerprint);
  if (!io::has_torch_files()) return;
  models.split("pt", "-0-0-0.5.pt");
  expect_same_masks(models.import("pt").masks, expected);
}

TEST(Import, TakesMasksAndWeightsThatWereUpdated) {
  const Models models({.score = Score::sparsegpt, .update = Update::obs, .pattern = {2, 4}});
  models.split("m", "-2-4-0.5.npy");
  expect_same_masks(models.import("m").masks, models.pruned.masks);
  // Masks of zeros and ones, named by their modules.
  fs::create_directories(models.folder / "bare");
  for (const auto& [name, mask] : models.pruned.masks.layers)
    io::save_npy(models.folder / ("bare/" + name + ".npy"), mask.unpacked());
  const Imported bare = models.import("bare");
  expect_same_masks(bare.masks, models.pruned.masks);
  EXPECT_EQ(bare.masks.info.pattern, "");
}

TEST(Import, GivesFilesThatAnalyzeAndCompareRead) {
  const Models models;
  models.split("m", "-0-0-0.5.npy");
  save_masks(models.folder / "imported.safetensors", models.import("m").masks);
  const auto all = compare(models.folder / "imported.safetensors", models.folder / "pruned", {});
  ASSERT_EQ(all.size(), models.pruned.masks.layers.size());
  for (const MatrixComparison& one : all) EXPECT_EQ(one.jaccard.mean, 1) << one.matrix;
}

TEST(Import, OfAPartHasTheMatricesThatAreThere) {
  const Models models;
  models.split("m", "-0-0-0.5.npy");
  fs::remove(models.folder / "m/layer1-mlp.up_proj-0-0-0.5.npy");
  fs::remove(models.folder / "m/layer1-mlp.down_proj-0-0-0.5.npy");
  const std::string message = models.fails("m", {});
  EXPECT_NE(message.find("2 of the 14 matrices"), std::string::npos) << message;
  EXPECT_NE(message.find(
                "the first 'model.layers.1.mlp.up_proj'; give files for them too, or allow it (--partial)"),
            std::string::npos)
      << message;
  const Masks part = models.import("m", {.partial = true}).masks;
  EXPECT_EQ(part.layers.size(), 12u);
  save_masks(models.folder / "part.safetensors", part);
  const auto compared = [&](const AnalyzeOptions& options) {
    return compare(models.folder / "part.safetensors", models.folder / "pruned", options).size();
  };
  EXPECT_TRUE(throws([&] { compared({}); }, "there is no mask of 'model.layers.1.mlp.up_proj'"));
  AnalyzeOptions first;
  first.only = {"layers.0."};
  EXPECT_EQ(compared(first), 7u);
}

TEST(Import, SaysWhatIsWrongWithNamesAndShapes) {
  const Models models;
  const TemporaryFolder& folder = models.folder;
  const ModelMatrices dense(folder / "dense");
  const ModelMatrices::Matrix& down = *dense.find("model.layers.0.mlp.down_proj");
  const Tensor w = dense.load(down).clone();
  const auto put = [&](const std::string& name, const Tensor& x) {
    fs::remove_all(folder / "one");
    fs::create_directories(folder / "one");
    io::save_npy(folder / ("one/" + name), x);
    return models.fails("one/" + name);
  };
  EXPECT_EQ(put("layer0-mlp.down_proj-0-0-0.npy", w), "");
  EXPECT_EQ(put("layer0-down_proj-0-0.npy", w), "");
  EXPECT_EQ(put("model.layers.0.mlp.down_proj.npy", w), "");
  const auto says = [](const std::string& message, const std::string& part) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  says(put("layer0-down.npy", w), "has no matrix 'layer0-down'");
  says(put("layer0-down.npy", w), "a file of one matrix is named layer{N}-{component}-{i}-{j}-{sparsity}");
  says(put("model.layers.0.mlp.down_prox.npy", w), "did you mean 'model.layers.0.mlp.down_proj'?");
  says(put("layer2-mlp.down_proj-0-0-0.5.npy", w), "its name says layer 2; the layers of");
  says(put("layer0-mlp.proj-0-0-0.5.npy", w), "component 'mlp.proj', which fits 0 of self_attn.q_proj");
  says(put("layer0-down_proj-4-2-0.5.npy", w),
       "i-j = 4:2 (n and m of an n:m pattern); expected 0-0, or n < m");
  says(put("layer0-down_proj-0-4-0.5.npy", w), "i-j = 0:4");
  says(put("layer0-down_proj-0-0-1.5.npy", w), "a sparsity of 1.5; expected a number from 0 to 1");
  says(put("layer0-down_proj-0-0-0.5.5.npy", w), "a sparsity of 0.5.5");
  says(put("layer0-down_proj-1-2-0.25.npy", w),
       "a pattern of 1:2, which drops 0.5 of the weights, and a sparsity of 0.25");
  says(put("layer0-down_proj-1-2-0.5.npy", w), "but row 0 has 0 zeros in columns 0 to 1");
  says(put("layer0-down_proj-0-0-0.5.npy", w.transpose(0, 1)), "transpose it");
  says(put("layer0-down_proj-0-0-0.5.npy", w.slice(1, 0, 3)), ", 3]; ");
  says(put("layer0-down_proj-0-0-0.5.npy", w.clone().packed().reshape({w.count()})), "expected a matrix [");
  SmallGpt gpt;
  pretrained::save(gpt.model, folder / "gpt2");
  io::save_npy(folder / "layer0-c_proj-0-0-0.5.npy", w);
  says(message_of([&] { import_masks({folder / "layer0-c_proj-0-0-0.5.npy"}, folder / "gpt2"); }),
       "component 'c_proj', which fits 2 of attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj of layer 0");
}

TEST(Import, RefusesSparsitiesOfNamesThatTheMasksDoNotHave) {
  const Models models;
  const fs::path folder = models.folder.path();
  models.split("m", "-0-0-0.9.npy");
  const std::string message = models.fails("m");
  EXPECT_NE(message.find("-0-0-0.9.npy: its name says a sparsity of 0.9, but the 14 files that say so have "
                         "0.5 together; rename them"),
            std::string::npos)
      << message;
  fs::remove_all(folder / "m");
  models.split("m", "-0-0-0.5.npy");
  EXPECT_EQ(models.fails("m"), "");
  fs::rename(folder / "m/layer0-mlp.up_proj-0-0-0.5.npy", folder / "m/layer0-mlp.up_proj-0-0-0.52.npy");
  EXPECT_NE(models.fails("m").find("the 1 files that say so have 0.5"), std::string::npos);
  // Of a pruning that takes more from one matrix than from another, what counts is the whole.
  fs::remove_all(folder / "m");
  const Models uneven(
      {.score = Score::magnitude, .assigned = {{"model.layers.0.**", 0.4}, {"model.layers.1.**", 0.6}}});
  uneven.split("m", "-0-0-0.5.npy");
  EXPECT_EQ(uneven.fails("m"), "");
}

TEST(Import, RefusesDuplicatesEmptyFoldersAndWhatCannotBeRead) {
  const Models models;
  models.split("m", "-0-0-0.5.npy");
  fs::copy_file(models.folder / "m/layer0-mlp.up_proj-0-0-0.5.npy",
                models.folder / "m/layer0-mlp.up_proj-0-0-0.6.npy");
  const auto says = [](const std::string& message, std::initializer_list<const char*> parts) {
    for (const char* part : parts) EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  says(models.fails("m"), {"'model.layers.0.mlp.up_proj' is given twice", "up_proj-0-0-0.5.npy and by",
                           "up_proj-0-0-0.6.npy; give one of them"});
  fs::create_directories(models.folder / "empty");
  says(models.fails("empty"), {"neither a config.json nor files *.pt or *.npy"});
  says(models.fails("none.npy"), {"none.npy"});
  says(models.fails("none"), {"none"});
  put(models.folder / "layer0-mlp.up_proj-0-0-0.5.npy", "not an array");
  says(models.fails("layer0-mlp.up_proj-0-0-0.5.npy"), {"layer0-mlp.up_proj-0-0-0.5.npy"});
  says(message_of([&] { import_masks({}, models.folder / "dense"); }), {"no input"});
  says(message_of([&] { import_masks({models.folder / "m"}, models.folder / "m"); }),
       {"has none of model.safetensors"});
  if (!io::has_torch_files()) return;
  const ModelMatrices pruned(models.folder / "pruned");
  const std::string bytes = torch_matrix(pruned.load(*pruned.find("model.layers.0.mlp.up_proj")));
  const std::string name = "layer0-mlp.up_proj-0-0-0.5.pt";
  for (size_t size = 1; size < bytes.size(); size += 97) {
    put(models.folder / name, bytes.substr(0, size));
    says(models.fails(name), {name.c_str()});
  }
  put(models.folder / name, bytes);
  EXPECT_EQ(models.fails(name), "");
  put(models.folder / "pt.bin", bytes);
  says(models.fails("pt.bin"), {"expected a name that ends with .pt"});
}

TEST(Import, RefusesMasksOfAnotherModel) {
  const Models models;
  const TemporaryFolder& folder = models.folder;
  // Another fingerprint.
  Masks masks = models.pruned.masks;
  masks.info.fingerprint = "0123";
  save_masks(folder / "other.safetensors", masks);
  EXPECT_NE(models.fails("other.safetensors").find("has masks of another model: its fingerprint is 0123"),
            std::string::npos);
  EXPECT_NE(message_of([&] {
              import_masks({folder / "pruned"}, folder / "pruned");
            }).find("has masks of another model"),
            std::string::npos);
  // Weights that are not related to the model's; a mask has none.
  Rng rng(99);
  const models::Llama stranger(SmallLlama::config(), rng, kCpu);
  pretrained::save(stranger, folder / "stranger");
  const std::string message = models.fails("stranger");
  EXPECT_NE(message.find("the weights of 'model.layers.0.self_attn.q_proj' are not those of"),
            std::string::npos)
      << message;
  const ModelMatrices matrices(folder / "stranger");
  const Tensor weight = matrices.load(*matrices.find("model.layers.1.mlp.up_proj"));
  io::save_npy(folder / "layer1-up_proj-0-0-0.5.npy", weight);
  EXPECT_NE(models.fails("layer1-up_proj-0-0-0.5.npy").find("masks of another model"), std::string::npos);
  io::save_npy(folder / "layer1-up_proj-0-0.npy", mask_of(weight).unpacked());
  EXPECT_EQ(models.fails("layer1-up_proj-0-0.npy"), "");
  const Tensor damaged =
      ModelMatrices(folder / "dense").load(*matrices.find("model.layers.1.mlp.up_proj")).clone();
  damaged.slice(0, 0, 1).fill(std::numeric_limits<double>::infinity());
  io::save_npy(folder / "layer1-up_proj-0-0-0.5.npy", damaged);
  EXPECT_NE(models.fails("layer1-up_proj-0-0-0.5.npy").find("not finite at [0, 0]"), std::string::npos);
}

}  // namespace
}  // namespace tessera::sparsity

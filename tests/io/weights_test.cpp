#include "io/weights.h"

#include <sys/stat.h>

#include "io/shard_index.h"
#include "tests/errors.h"
#include "tests/io/files.h"
#include "tests/io/torch_bytes.h"

namespace tessera::io::test {
namespace {

std::string index_of(const std::string& file) {
  return R"({"metadata":{"total_size":1},"weight_map":{"x":")" + file + "\"}}";
}

TEST(ShardIndex, MapsTensorsToFiles) {
  const auto files = parse_shard_index(
      "i",
      R"({"metadata":{"total_size":7,"more":[1,{"a":[null,true,-1,1.5,"s"]}]},"weight_map":{"a":"f.bin","b":"g"}})");
  EXPECT_EQ(files, (std::map<std::string, std::string>{{"a", "f.bin"}, {"b", "g"}}));
  for (const char* metadata : {"null", "1", "\"text\"", "[]", "{}", "true", "[[1]]"})
    EXPECT_EQ(
        parse_shard_index("i", std::string(R"({"weight_map":{"a":"f"},"metadata":)") + metadata + "}").size(),
        1u);
}

TEST(WeightSource, ItsDtypeIsThatOfMostElements) {
  const TemporaryFolder folder;
  const auto dtype = [&](std::initializer_list<std::pair<DType, int64_t>> tensors) {
    NamedTensors named;
    for (const auto& [dtype, count] : tensors)
      named.emplace_back("t" + std::to_string(named.size()), Tensor::zeros({count}, dtype, Device::cpu()));
    save_safetensors(folder / "w.safetensors", named);
    return WeightSource(folder / "w.safetensors").dtype();
  };
  EXPECT_EQ(dtype({{DType::f32, 3}, {DType::bf16, 2}, {DType::bf16, 2}, {DType::i64, 9}}), DType::bf16);
  EXPECT_EQ(dtype({{DType::bf16, 4}, {DType::f32, 4}}), DType::f32);
  EXPECT_EQ(dtype({{DType::f16, 1}}), DType::f16);
  EXPECT_EQ(dtype({{DType::i64, 1}}), DType::f32);
}

struct RefusedIndex {
  const char* what;
  std::string text, error;
};

TEST(ShardIndex, RefusesWhatIsNoIndex) {
  const std::string deep = R"({"metadata":)" + std::string(100'000, '[') + std::string(100'000, ']') +
                           R"(,"weight_map":{"a":"f"}})";
  EXPECT_EQ(parse_shard_index("i", deep).size(), 1u);  // depth costs nothing
  const std::vector<RefusedIndex> refused = {
      {"nothing", "", "does not begin with '{'"},
      {"a list", "[]", "does not begin with '{'"},
      {"a byte order mark", "\xEF\xBB\xBF{}", "does not begin with '{'"},
      {"a NUL", std::string("{\0}", 3), "holds a NUL byte"},
      {"an escaped NUL", R"({"weight_map":{"a\u0000":"f"}})", "holds a NUL byte"},
      {"cut short", R"({"weight_map":{"a":"f")", "is not valid JSON"},
      {"trailing text", index_of("f") + "x", "is not valid JSON"},
      {"not UTF-8", "{\"weight_map\":{\"\xFF\":\"f\"}}", "is not valid JSON"},
      {"no map", R"({"metadata":{}})", "has no part weight_map"},
      {"an empty map", R"({"weight_map":{}})", "names no tensors"},
      {"another part", R"({"weight_map":{"a":"f"},"x":1})", "an unknown part 'x'"},
      {"two maps", R"({"weight_map":{"a":"f"},"weight_map":{"a":"f"}})", "two parts 'weight_map'"},
      {"two metadata", R"({"metadata":1,"metadata":1})", "two parts 'metadata'"},
      {"a tensor twice", R"({"weight_map":{"a":"f","a":"g"}})", "the tensor 'a' occurs twice"},
      {"a map of lists", R"({"weight_map":["a"]})", "weight_map is a list, expected an object"},
      {"a map that is text", R"({"weight_map":"a"})", "weight_map is a string, expected an object"},
      {"a map that is null", R"({"weight_map":null})", "weight_map is null, expected an object"},
      {"a file that is a number", R"({"weight_map":{"a":1}})", "the file of a tensor 'a' is a number"},
      {"a file that is null", R"({"weight_map":{"a":null}})", "is null, expected a string"},
      {"a file that is an object", R"({"weight_map":{"a":{}}})", "is an object, expected a string"},
      {"a file that is a list", R"({"weight_map":{"a":["f"]}})", "is a list, expected a string"}};
  for (const RefusedIndex& one : refused)
    EXPECT_TRUE(throws([&] { parse_shard_index("i", one.text); }, one.error)) << one.what;
}

TEST(ShardIndex, FilesAreNamedPlainly) {
  const std::vector<std::string> escapes = {
      "",    ".",        "..",       "../x", "/etc/passwd",        "a/../../x",    "a/x",
      "./x", "..\\\\x",  "C:\\\\x",  "C:x",  "\\\\\\\\host\\\\x",  "x\\u0000.bin", "x\\n",
      " x",  "\\u202ex", "file://x", "~/x/", std::string(256, 'x')};
  for (const std::string& name : escapes)
    EXPECT_TRUE(throws([&] { parse_shard_index("i", index_of(name)); }, "not the plain name of a file"))
        << name;
}

class Weights : public ::testing::Test {
 protected:
  TemporaryFolder folder;
  const Tensor x = Tensor::from(std::vector<float>{1, 2, 3}, {3});

  void put(const std::string& name, const std::string& text) { folder.put(name, text); }
  std::string open_error() {
    return message_of([&] { WeightSource(folder.path()); });
  }
};

TEST_F(Weights, ComeFromTheFirstFileThatIsThere) {
  EXPECT_NE(open_error().find("has none of model.safetensors"), std::string::npos);
  put("sparse.safetensors", "");
  EXPECT_NE(
      open_error().find("compressed weights (sparse.safetensors); make them dense first: tessera convert"),
      std::string::npos)
      << open_error();
  save_safetensors(folder / "shard.safetensors", NamedTensors{{"x", x}});
  put("model.safetensors.index.json", index_of("shard.safetensors"));
  EXPECT_EQ(WeightSource(folder.path()).path(), folder / "model.safetensors.index.json");
  EXPECT_EQ(WeightSource(folder.path()).load("x").to_vector<float>(), (std::vector<float>{1, 2, 3}));
  save_safetensors(folder / "model.safetensors", NamedTensors{{"b", x}, {"a", x.to(DType::bf16)}});
  const WeightSource source(folder.path());
  EXPECT_EQ(source.path(), folder / "model.safetensors");
  ASSERT_EQ(source.entries().size(), 2u);
  EXPECT_EQ(source.entries()[0].name, "a");
  EXPECT_EQ(source.entries()[0].dtype, DType::bf16);
  EXPECT_TRUE(throws([&] { source.load("c"); }, "has no tensor 'c' among its 2"));
}

TEST_F(Weights, OfAnAdapterAreRefused) {
  put("adapter_config.json", "{}");
  EXPECT_NE(open_error().find("holds an adapter of peft (adapter_config.json), which is not read; merge it"),
            std::string::npos);
  save_safetensors(folder / "model.safetensors", NamedTensors{{"x", x}});
  EXPECT_NE(open_error().find("holds an adapter"), std::string::npos);
  EXPECT_TRUE(WeightSource(folder / "model.safetensors").has("x"));
}

TEST_F(Weights, OfTorchAreReadByContentWhateverTheirName) {
  if (!has_torch_files()) GTEST_SKIP() << "skipped: this build has no libzip";
  put("pytorch_model.bin", torch_bytes(pickle::program({{"x", pickle::matrix()}})));
  EXPECT_EQ(WeightSource(folder.path()).load("x").shape(), (Shape{2, 3}));
  put("weights.safetensors", get(folder / "pytorch_model.bin"));
  EXPECT_EQ(WeightSource(folder / "weights.safetensors").load("x").shape(), (Shape{2, 3}));
  put("pytorch_model.bin.index.json", index_of("pytorch_model.bin"));
  EXPECT_EQ(WeightSource(folder / "pytorch_model.bin.index.json").load("x").shape(), (Shape{2, 3}));
}

TEST_F(Weights, AreLoadedWholeFromAFileOrAFolder) {
  save_safetensors(folder / "model.safetensors", NamedTensors{{"b", x}, {"a", x.to(DType::bf16)}});
  for (const std::string& path : {folder.path(), folder / "model.safetensors"}) {
    const std::map<std::string, Tensor> all = load_weights(path);
    ASSERT_EQ(all.size(), 2u);
    EXPECT_EQ(all.at("a").dtype(), DType::bf16);
    EXPECT_EQ(all.at("b").to_vector<float>(), (std::vector<float>{1, 2, 3}));
  }
  if (!has_torch_files()) return;
  put("model.pt", torch_bytes(pickle::program({{"x", pickle::matrix()}})));
  EXPECT_EQ(load_weights(folder / "model.pt").at("x").shape(), (Shape{2, 3}));
}

TEST_F(Weights, OfSafetensorsAreToldFromThoseOfTorchForEveryLengthOfTheirHeader) {
  // The length is the first eight bytes: some begin as a zip archive or as a pickle does.
  for (int i = 0; i < 256; i += 8) {
    save_safetensors(folder / "model.safetensors", NamedTensors{{"x", x}},
                     {{"pad", std::string(size_t(i), 'p')}});
    EXPECT_TRUE(WeightSource(folder.path()).has("x")) << i;
  }
  const std::string header = "{\"x\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}";
  for (const size_t length : {0x4B50u, 0x44B50u}) {
    put("model.safetensors", safetensors_bytes(header + std::string(length - header.size(), ' ')));
    EXPECT_TRUE(WeightSource(folder.path()).has("x")) << length;
  }
}

TEST_F(Weights, OfAnIndexAgreeWithIt) {
  save_safetensors(folder / "a", NamedTensors{{"x", x}, {"y", x}});
  save_safetensors(folder / "b", NamedTensors{{"x", x}});
  const std::string index = "model.safetensors.index.json";
  put(index, R"({"weight_map":{"x":"a"}})");
  EXPECT_NE(open_error().find("a holds 'y', which"), std::string::npos);
  put(index, R"({"weight_map":{"x":"a","y":"a","z":"a"}})");
  EXPECT_NE(open_error().find("says that 'z' lies in a, which has no such tensor"), std::string::npos);
  put(index, R"({"weight_map":{"x":"a","y":"a","z":"c"}})");
  EXPECT_NE(open_error().find("there is no file"), std::string::npos);
  put(index, R"({"weight_map":{"x":"b","y":"a"}})");
  EXPECT_NE(open_error().find("a holds 'x', which " + (folder / index) + " says lies in b"),
            std::string::npos);
  put(index, R"({"weight_map":{"x":"model.safetensors.index.json"}})");
  EXPECT_FALSE(open_error().empty());
  put(index, std::string(17 << 20, ' '));
  EXPECT_NE(open_error().find("that are reasonable here"), std::string::npos);
}

TEST_F(Weights, OfAnIndexAreAllShardsOfItsSet) {
  const auto shard = [&](const std::string& name) {
    save_safetensors(folder / name, NamedTensors{{"x", x}});
  };
  shard("model-00001-of-00002.safetensors");
  put("model.safetensors.index.json", index_of("model-00001-of-00002.safetensors"));
  for (const char* const other :
       {"model-00001-of-00003.safetensors", "consolidated-00002-of-00002.safetensors",
        "model-00002-of-00002.bin", "consolidated.safetensors"})
    shard(other);
  EXPECT_EQ(open_error(), "");
  shard("model-00002-of-00002.safetensors");
  EXPECT_NE(open_error().find("names no tensor of model-00002-of-00002.safetensors"), std::string::npos);
}

TEST_F(Weights, OfAnIndexLieInItsFolder) {
  TemporaryFolder outside;
  save_safetensors(outside / "secret", NamedTensors{{"x", x}});
  const auto refused = [&](const std::string& name, const std::string& part) {
    put("model.safetensors.index.json", index_of(name));
    const std::string error = open_error();
    EXPECT_NE(error.find(part), std::string::npos) << name << ": " << error;
  };
  ASSERT_EQ(::symlink((outside / "secret").c_str(), (folder / "link").c_str()), 0);
  refused("link", "is a symbolic link, which may lead out of its folder");
  ASSERT_EQ(::link((outside / "secret").c_str(), (folder / "hard").c_str()), 0);
  refused("hard", "has another name elsewhere (a hard link)");
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  refused("pipe", "is not a regular file");
  fs::create_directory(folder / "folder");
  refused("folder", "is a directory");
  ASSERT_EQ(::symlink("/dev/zero", (folder / "zero").c_str()), 0);
  refused("zero", "is a symbolic link");
  ASSERT_EQ(::symlink("/proc/self/mem", (folder / "mem").c_str()), 0);
  refused("mem", "is a symbolic link");
  ASSERT_EQ(::symlink("../../blobs/../secret", (folder / "almost").c_str()), 0);
  refused("almost", "is a symbolic link");
  put("none", "");
  refused("none", "is empty");
}

TEST_F(Weights, OfTheCacheOfHuggingFaceAreFollowed) {
  const std::string digits(64, 'a');
  fs::create_directories(folder / "snapshots/1");
  fs::create_directories(folder / "blobs");
  save_safetensors(folder / ("blobs/" + digits), NamedTensors{{"x", x}});
  ASSERT_EQ(::symlink(("../../blobs/" + digits).c_str(), (folder / "snapshots/1/shard").c_str()), 0);
  put("snapshots/1/model.safetensors.index.json", index_of("shard"));
  EXPECT_EQ(WeightSource(folder / "snapshots/1").load("x").to_vector<float>(), (std::vector<float>{1, 2, 3}));
}

TEST_F(Weights, AreSavedInShardsThatReadBack) {
  std::vector<WeightToWrite> weights;
  for (int i = 0; i < 5; ++i)
    weights.push_back({{"t" + std::to_string(i), DType::f32, {3}}, [this] { return x; }});
  save_weights(folder / "one", weights);
  EXPECT_TRUE(fs::exists(folder / "one/model.safetensors"));
  EXPECT_EQ(SafetensorsFile(folder / "one/model.safetensors").metadata(), (Metadata{{"format", "pt"}}));
  save_weights(folder / "three", weights, 24);  // two tensors of 12 bytes each
  EXPECT_TRUE(fs::exists(folder / "three/model-00003-of-00003.safetensors"));
  EXPECT_FALSE(fs::exists(folder / "three/model.safetensors"));
  EXPECT_EQ(WeightSource(folder / "three").entries().size(), 5u);
  save_weights(folder / "five", weights, 1);  // none fits: one each
  EXPECT_TRUE(fs::exists(folder / "five/model-00005-of-00005.safetensors"));
  EXPECT_TRUE(throws([&] { save_weights(folder / "three", weights); },
                     "has model.safetensors.index.json already; weights in two files are ambiguous"));
  weights[0].entry.shape = Shape{4};
  EXPECT_TRUE(
      throws([&] { save_weights(folder / "wrong", weights); }, "'t0' is f32[3] on cpu, expected f32[4]"));
}

}  // namespace
}  // namespace tessera::io::test

#include "io/safetensors.h"

#include "tests/io/files.h"

namespace tessera::io::test {
namespace {

const std::vector<Shape>& shapes() {
  static const std::vector<Shape> shapes = {{},     {0},    {1},       {7},       {0, 3},
                                            {3, 0}, {5, 3}, {2, 0, 4}, {2, 3, 5}, {1, 1, 1, 1, 1, 1, 1, 2}};
  return shapes;
}

TEST(Safetensors, RoundTripsEveryDtypeAndShape) {
  const TemporaryFolder folder;
  NamedTensors tensors;
  uint32_t seed = 1;
  for (const DType dtype : all_dtypes())
    for (const Shape& shape : shapes())
      tensors.emplace_back("t" + std::to_string(seed), random_bits(shape, dtype, seed)), ++seed;
  save_safetensors(folder / "file", tensors, {{"key", "value"}, {"", "empty key"}});
  const SafetensorsFile file(folder / "file");
  EXPECT_EQ(file.entries().size(), tensors.size());
  EXPECT_EQ(file.metadata(), (Metadata{{"key", "value"}, {"", "empty key"}}));
  EXPECT_EQ(file.head().size() % 8, 0u);
  const auto all = load_safetensors(folder / "file");
  for (const auto& [name, tensor] : tensors) {
    EXPECT_TRUE(same(file.load(name), tensor)) << name;
    EXPECT_TRUE(same(all.at(name), tensor)) << name;
    EXPECT_EQ(file.load(name).row_stride(),
              Tensor::empty(tensor.shape(), tensor.dtype(), Device::cpu()).row_stride());
  }
  EXPECT_TRUE(throws([&] { file.load("t1x"); }, "has no tensor 't1x' among its 90; did you mean 't1'?"));
}

TEST(Safetensors, WritesTheElementsOfAnyLayout) {
  const TemporaryFolder folder;
  for (const DType dtype : all_dtypes()) {
    const Tensor base = random_bits({6, 10, 14}, dtype, 3);
    const Tensor pitched = base.clone();
    const std::map<std::string, Tensor> views = {{"pitched", pitched},
                                                 {"transposed", base.transpose(0, 2)},
                                                 {"sliced", base.slice(2, 1, 14, 3)},
                                                 {"offset", pitched.slice(0, 2, 5).slice(1, 1, 2)},
                                                 {"expanded", base.slice(1, 0, 1).expand({6, 4, 14})},
                                                 {"selected", base.select(2, 5)}};
    save_safetensors(folder / "file", views);
    for (const auto& [name, tensor] : load_safetensors(folder / "file"))
      EXPECT_TRUE(same(tensor, views.at(name))) << name << " " << dtype;
  }
}

/// Worked out by hand from the format's description; tests/io/interop_test.cpp compares with the reference
/// library.
TEST(Safetensors, GoldenBytes) {
  const TemporaryFolder folder;
  const Tensor a = Tensor::from(std::vector<float>{1, -2}, {2, 1});
  const Tensor b = Tensor::from(std::vector<int64_t>{3}, {});
  const Tensor c = Tensor::from(std::vector<uint8_t>{7, 8, 9}, {3});
  save_safetensors(folder / "file", NamedTensors{{"c", c}, {"a\"\n", a}, {"b", b}}, {{"k", "v"}});
  const std::string header =
      R"({"__metadata__":{"k":"v"},"b":{"dtype":"I64","shape":[],"data_offsets":[0,8]},)"
      R"("a\"\n":{"dtype":"F32","shape":[2,1],"data_offsets":[8,16]},)"
      R"("c":{"dtype":"U8","shape":[3],"data_offsets":[16,19]}})";
  const std::string padded = header + std::string((8 - header.size() % 8) % 8, ' ');
  const std::string data("\3\0\0\0\0\0\0\0\0\0\x80\x3f\0\0\0\xc0\7\10\11", 19);
  EXPECT_EQ(get(folder / "file"), safetensors_bytes(padded, data));
}

TEST(Safetensors, TheOrderOfTheBytesDoesNotDependOnTheOrderGiven) {
  const TemporaryFolder folder;
  NamedTensors tensors;
  for (const DType dtype : all_dtypes())
    for (const char* name : {"z", "a", "m"})
      tensors.emplace_back(name + std::to_string(int(dtype)), random_bits({3}, dtype, 1));
  save_safetensors(folder / "one", tensors);
  std::reverse(tensors.begin(), tensors.end());
  save_safetensors(folder / "two", tensors);
  EXPECT_EQ(get(folder / "one"), get(folder / "two"));
  const SafetensorsFile file(folder / "one");
  for (const SafetensorsEntry& entry : file.entries()) EXPECT_EQ(entry.offset % size_of(entry.dtype), 0u);
}

TEST(Safetensors, AnEmptySetIsAFile) {
  const TemporaryFolder folder;
  save_safetensors(folder / "file", NamedTensors{});
  EXPECT_EQ(get(folder / "file"), safetensors_bytes("{}      "));
  EXPECT_TRUE(load_safetensors(folder / "file").empty());
}

TEST(Safetensors, ReadsWhatOtherWritersMayWrite) {
  const std::string entry = R"("dtype":"U8","shape":[2],"data_offsets":[0,2])";
  const std::vector<std::string> headers = {
      R"({"x":{)" + entry + "}}",                                                        // not padded
      R"({ "x" : { "shape":[2], "data_offsets" : [ 0, 2 ],"dtype":"U8"}} )",             // spaces, order
      R"({"\u0078":{)" + entry + "}\n}\t",                                               // escapes
      R"({"x":{)" + entry + R"(},"__metadata__":{}})",                                   // metadata last
      R"({"y":{"dtype":"F32","shape":[0],"data_offsets":[2,2]},"x":{)" + entry + "}}"};  // not in order
  for (const std::string& header : headers) {
    const std::string bytes = safetensors_bytes(header, "\1\2");
    const SafetensorsFile file(InputFile("memory", bytes));
    EXPECT_EQ(file.load("x").to_vector<uint8_t>(), (std::vector<uint8_t>{1, 2})) << header;
  }
}

TEST(Safetensors, ReadsOtherIntegersIntoAWiderDtype) {
  const std::string bytes = safetensors_bytes(
      R"({"a":{"dtype":"U64","shape":[2],"data_offsets":[0,16]},"b":{"dtype":"U32","shape":[1],)"
      R"("data_offsets":[16,20]},"c":{"dtype":"I16","shape":[3,1],"data_offsets":[20,26]},)"
      R"("d":{"dtype":"U16","shape":[1],"data_offsets":[26,28]},"e":{"dtype":"I8","shape":[2],)"
      R"("data_offsets":[28,30]}})",
      std::string("\7\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x80", 16) + "\xFF\xFF\xFF\xFF" +
          std::string("\xFE\xFF\1\0\2\0", 6) + "\xFF\xFF" + "\x80\x7F");
  const SafetensorsFile file(InputFile("memory", bytes));
  EXPECT_EQ(file.load("b").dtype(), DType::i64);
  EXPECT_EQ(file.load("b").item<int64_t>(), 0xFFFFFFFF);
  EXPECT_EQ(file.entry("c").dtype, DType::i32);
  EXPECT_EQ(file.load("c").shape(), (Shape{3, 1}));
  EXPECT_EQ(file.load("c").to_vector<int32_t>(), (std::vector<int32_t>{-2, 1, 2}));
  EXPECT_EQ(file.load_rows("c", 1, 3).to_vector<int32_t>(), (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(file.load("d").item<int32_t>(), 65535);
  EXPECT_EQ(file.load("e").to_vector<int32_t>(), (std::vector<int32_t>{-128, 127}));
  EXPECT_TRUE(throws([&] { file.load("a"); },
                     "memory: element 1 of 'a' is 9223372036854775808, more than an i64 holds"));
  EXPECT_EQ(file.load_rows("a", 0, 1).to_vector<int64_t>(), std::vector<int64_t>{7});
}

TEST(Safetensors, RefusesToWriteWhatItCouldNotRead) {
  const TemporaryFolder folder;
  const Tensor x = Tensor::zeros({2}, DType::f32, Device::cpu());
  const auto save = [&](const NamedTensors& tensors, const Metadata& metadata = {}) {
    return [=, &folder] { save_safetensors(folder / "file", tensors, metadata); };
  };
  EXPECT_TRUE(throws(save({{"x", x}, {"x", x}}), "two tensors have the name 'x'"));
  EXPECT_TRUE(throws(save({{"__metadata__", x}}), "cannot be used for a tensor"));
  EXPECT_TRUE(throws(save({{std::string("a\0b", 3), x}}), "cannot be used for a tensor"));
  EXPECT_TRUE(throws(save({{"x", Tensor()}}), "tensor 'x' is undefined"));
  EXPECT_TRUE(throws(save({{"\xFF", x}}), "a tensor name is not UTF-8"));
  EXPECT_TRUE(throws(save({{"x", x}}, {{"k", "\xC0\x80"}}), "a metadata value is not UTF-8"));
  EXPECT_TRUE(throws(save({{"x", x}}, {{"\xED\xA0\x80", "v"}}), "a metadata key is not UTF-8"));
  EXPECT_TRUE(
      throws(save({{std::string(100'000'000, 'x'), x}}), "more than the 100000000 that readers accept"));
  EXPECT_TRUE(folder.names().empty());
}

}  // namespace
}  // namespace tessera::io::test

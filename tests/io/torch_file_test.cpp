#include "io/torch_file.h"

#include "tests/errors.h"
#include "tests/io/files.h"
#include "tests/io/torch_bytes.h"

namespace tessera::io::test {
namespace {

using namespace pickle;

class TorchFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_torch_files()) GTEST_SKIP() << "skipped: this build has no libzip";
  }
  static TorchFile open(const std::string& bytes) { return TorchFile(InputFile("model.bin", bytes)); }
};

TEST_F(TorchFiles, LoadsTensorsAndViewsOfTheirStorages) {
  const std::string bytes =
      torch_bytes(program({{"whole", matrix()},
                           {"turned", tensor_of(storage("FloatStorage", "0", 6), 0, {3, 2}, {1, 3})},
                           {"part", tensor_of(storage("FloatStorage", "0", 6), 4, {2}, {1})},
                           {"one", tensor_of(storage("FloatStorage", "0", 6), 5, {}, {})},
                           {"none", tensor_of(storage("FloatStorage", "0", 6), 6, {0, 3}, {3, 1})}}));
  const TorchFile file = open(bytes);
  EXPECT_EQ(file.entries().size(), 5u);
  EXPECT_EQ(file.load("whole").to_vector<float>(), (std::vector<float>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(file.load("turned").to_vector<float>(), (std::vector<float>{1, 4, 2, 5, 3, 6}));
  EXPECT_EQ(file.load("part").to_vector<float>(), (std::vector<float>{5, 6}));
  EXPECT_LT(file.load("part").storage()->bytes, 24u);  // not the whole storage
  EXPECT_EQ(file.load("one").to_vector<float>(), std::vector<float>{6});
  EXPECT_EQ(file.load("none").shape(), (Shape{0, 3}));
  EXPECT_TRUE(throws([&] { file.load("other"); }, "model.bin has no tensor 'other'"));
}

TEST_F(TorchFiles, LoadsF8e4m3) {
  const std::string bytes = untyped_storage("0", 6), e4m3 = global("torch", "float8_e4m3fn");
  const TorchFile file =
      open(torch_bytes(program({{"whole", typed_tensor_of(bytes, 0, {2, 3}, {3, 1}, e4m3)},
                                {"transposed", typed_tensor_of(bytes, 0, {3, 2}, {1, 3}, e4m3)}}),
                       std::string("\0\x38\x40\x44\x48\xCA", 6)));  // PyTorch's bytes of 0, 1, 2, 3, 4, -5
  const Tensor whole = file.load("whole");
  EXPECT_EQ(whole.dtype(), DType::f8e4m3);
  EXPECT_EQ(whole.to(DType::f32).to_vector<float>(), (std::vector<float>{0, 1, 2, 3, 4, -5}));
  EXPECT_EQ(file.load("transposed").to(DType::f32).to_vector<float>(),
            (std::vector<float>{0, 3, 1, 4, 2, -5}));
}

TEST_F(TorchFiles, AStorageWithManyTensorsIsReadOnce) {
  // Columns of a matrix, each of which spans the whole storage, and a second storage between them.
  constexpr int64_t kRows = 64, kColumns = 48;
  std::string data;
  for (int64_t i = 0; i < kRows * kColumns; ++i) data += raw(float(i));
  std::vector<std::pair<std::string, std::string>> items;
  for (int64_t c = 0; c < kColumns; ++c) {
    items.emplace_back("column" + std::to_string(c),
                       tensor_of(storage("FloatStorage", "0", kRows * kColumns), c, {kRows}, {kColumns}));
    items.emplace_back("six" + std::to_string(c), matrix("FloatStorage", "1"));
  }
  const TemporaryFolder folder;
  put(folder / "model.bin", zip_bytes({{"model/data.pkl", program(items)},
                                       {"model/byteorder", "little"},
                                       {"model/data/0", data},
                                       {"model/data/1", six_floats()}}));
  const TorchFile file(folder / "model.bin");
  const RestoreFileCalls restore;
  size_t bytes_read = 0;
  file_calls().pread = [&](int f, void* to, size_t bytes, off_t offset) {
    bytes_read += bytes;
    return ::pread(f, to, bytes, offset);
  };
  for (int64_t c = 0; c < kColumns; ++c) {
    const Tensor column = file.load("column" + std::to_string(c));
    EXPECT_EQ(column.storage()->bytes >= data.size(), false);  // a copy of its own
    const auto values = column.to_vector<float>();
    for (int64_t r = 0; r < kRows; ++r) ASSERT_EQ(values[size_t(r)], float(r * kColumns + c));
    EXPECT_EQ(file.load("six" + std::to_string(c)).to_vector<float>(),
              (std::vector<float>{1, 2, 3, 4, 5, 6}));
  }
  // Once, with what libzip reads of headers; 48 times would be 590,000 bytes.
  EXPECT_LT(bytes_read, data.size() + 4096);
  const Tensor a = file.load("six0"), b = file.load("six1");
  EXPECT_NE(a.raw(), b.raw());  // writing to one does not change the other
}

TEST_F(TorchFiles, BoolsAreZeroOrOne) {
  const std::string code = program({{"x", matrix("BoolStorage")}});
  EXPECT_EQ(open(torch_bytes(code, std::string("\0\1\1\0\1\0", 6))).load("x").bytes(), 6u);
  const std::string wrong = torch_bytes(code, std::string("\0\1\2\0\1\0", 6));
  EXPECT_TRUE(throws([&] { open(wrong).load("x"); }, "element 2 of the bool tensor 'x' is 2"));
}

std::vector<Malformed> malformed_torch_files() {
  const std::string code = program({{"x", matrix()}}), six = six_floats();
  const ZipPart pickle{"m/data.pkl", code}, data{"m/data/0", six};
  const auto with = [](ZipPart part, auto&& change) {
    change(part);
    return part;
  };
  const std::string good = zip_bytes({pickle, data});
  const std::string bomb = zip_bytes({pickle, with(data, [](ZipPart& p) { p.size = 0xFFFFFFF0; })});
  return {
      {"one byte", "P", "does not begin as a zip archive"},
      {"two bytes", "PK", "does not begin as a zip archive"},
      {"safetensors", safetensors_bytes("{}"), "does not begin as a zip archive"},
      {"a pickle before 1.6", std::string("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.", 15),
       "was saved by PyTorch before 1.6"},
      {"cut in the middle", good.substr(0, good.size() / 2), "is cut short: the end record"},
      {"cut by a byte", good.substr(0, good.size() - 1), "is cut short: the end record"},
      {"end record alone", "PK\3\4" + good.substr(good.size() - 22), "is damaged"},
      {"more entries than there are", zip_bytes({pickle, data}, 1), "is damaged"},
      {"fewer entries", zip_bytes({pickle, data}, uint16_t(-1)), "is damaged"},
      {"directory elsewhere", zip_bytes({pickle, data}, 0, 7), "is damaged"},
      {"directory past the end", zip_bytes({pickle, data}, 0, 1'000'000), "is damaged"},
      {"a directory of 4 GB",
       good.substr(0, good.size() - 10) + raw(uint32_t{0xFFFFFFF0}) + good.substr(good.size() - 6),
       "more than a file of torch.save has"},
      {"no data.pkl", zip_bytes({{"m/other.pkl", code}, data}), "has no entry data.pkl"},
      {"data.pkl at the top", zip_bytes({{"data.pkl", code}, data}), "has no entry data.pkl"},
      {"data.pkl further down", zip_bytes({{"m/n/data.pkl", code}, data}), "has no entry data.pkl"},
      {"two pickles", zip_bytes({pickle, {"n/data.pkl", code}, data}),
       "two entries of its zip archive are pickles"},
      {"the same entry twice", zip_bytes({pickle, data, data}), "already exists"},
      {"the pickle twice", zip_bytes({pickle, pickle, data}), "already exists"},
      {"other local name", zip_bytes({pickle, with(data, [](ZipPart& p) { p.local_name = "m/data/1"; })}),
       "is damaged"},
      {"said to be compressed", zip_bytes({pickle, with(data, [](ZipPart& p) { p.method = 8; })}),
       "is compressed"},
      {"an unknown method", zip_bytes({pickle, with(data, [](ZipPart& p) { p.method = 77; })}),
       "is compressed"},
      {"said to be encrypted", zip_bytes({pickle, with(data, [](ZipPart& p) { p.flags = 1; })}),
       "is encrypted"},
      {"unequal sizes", zip_bytes({pickle, with(data, [](ZipPart& p) { p.size = 25; })}), "is compressed"},
      {"a size of 4 GB", bomb, ""},
      {"sizes of 4 GB",
       zip_bytes({pickle, with(data, [](ZipPart& p) { p.size = p.packed_size = 0xFFFFFFF0; })}), ""},
      {"data elsewhere", zip_bytes({pickle, with(data, [](ZipPart& p) { p.offset_error = 3; })}),
       "is damaged"},
      {"data past the end", zip_bytes({pickle, with(data, [](ZipPart& p) { p.offset_error = 1 << 20; })}),
       "is damaged"},
      {"storage missing", zip_bytes({pickle}), "lies in storage '0', which its zip archive has not"},
      {"storage in another folder", zip_bytes({pickle, {"n/data/0", six}}), "which its zip archive has not"},
      {"storage too short", zip_bytes({pickle, {"m/data/0", six.substr(4)}}),
       "has 20 bytes, expected 6 elements of f32"},
      {"storage too long", zip_bytes({pickle, {"m/data/0", six + "1234"}}),
       "has 28 bytes, expected 6 elements of f32"},
      {"other dtype", zip_bytes({{"m/data.pkl", program({{"x", matrix("DoubleStorage")}})}, data}),
       "has 24 bytes, expected 6 elements of f64"},
      {"a storage of 2^61 doubles",
       zip_bytes({{"m/data.pkl",
                   program({{"x", tensor_of(storage("DoubleStorage", "0", int64_t{1} << 61), 0, {1}, {1})}})},
                  data}),
       "expected 2305843009213693952 elements of f64"},
      {"a key that leads elsewhere",
       zip_bytes({{"m/data.pkl", program({{"x", matrix("FloatStorage", "../../etc/passwd")}})}, data}),
       "which its zip archive has not"},
      {"big-endian", zip_bytes({pickle, data, {"m/byteorder", "big"}}), "its numbers are 'big' endian"},
      {"no endian at all", zip_bytes({pickle, data, {"m/byteorder", ""}}), "its numbers are '' endian"},
      {"an empty pickle", zip_bytes({{"m/data.pkl", ""}, data}), "is cut short"},
      {"code", zip_bytes({{"m/data.pkl", kProto + global("os", "system") + kStop}, data}), "names os.system"},
  };
}

TEST_F(TorchFiles, RefusesMalformedArchives) {
  for (const Malformed& file : malformed_torch_files()) {
    const std::string error = message_of([&] {
      const TorchFile opened = open(file.bytes);
      for (const PickledTensor& tensor : opened.entries()) opened.load(tensor.name);
    });
    EXPECT_FALSE(error.empty()) << file.what;
    EXPECT_NE(error.find(file.error), std::string::npos) << file.what << ": " << error;
    EXPECT_NE(error.find("model.bin"), std::string::npos) << file.what << ": " << error;
  }
}

TEST_F(TorchFiles, AWrongChecksumIsFoundWhereItMatters) {
  ZipPart data{"m/data/0", six_floats()};
  data.crc ^= 1;
  const std::string bytes = zip_bytes({{"m/data.pkl", program({{"x", matrix()}})}, data});
  const TorchFile file = open(bytes);
  EXPECT_TRUE(throws([&] { file.load("x"); }, "entry 'm/data/0' of its zip archive: CRC error"));
}

TEST_F(TorchFiles, EveryCutIsRefusedAndEveryChangedByteHarmless) {
  const std::string whole = torch_bytes(program({{"a", matrix()}}));
  const auto use = [](const std::string& bytes) {
    const TorchFile file = open(bytes);
    for (const PickledTensor& tensor : file.entries()) file.load(tensor.name);
  };
  use(whole);
  for (size_t length = 1; length < whole.size(); ++length)
    EXPECT_FALSE(message_of([&] { use(whole.substr(0, length)); }).empty()) << length;
  for (size_t at = 0; at < whole.size(); ++at) {
    std::string changed = whole;
    changed[at] = char(changed[at] ^ 0x41);
    message_of([&] { use(changed); });
  }
}

TEST(TorchFile, WithoutLibzipSaysSo) {
  if (has_torch_files()) GTEST_SKIP() << "skipped: this build has libzip";
  const std::string bytes = torch_bytes(program({{"x", matrix()}}));
  EXPECT_TRUE(throws([&] { TorchFile(InputFile("model.bin", bytes)); }, "made without libzip"));
}

}  // namespace
}  // namespace tessera::io::test

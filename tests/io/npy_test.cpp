#include "io/npy.h"

#include "io/torch_file.h"
#include "tests/errors.h"
#include "tests/io/files.h"
#include "tests/io/torch_bytes.h"

namespace tessera::io::test {
namespace {

/// A file of version `major`.0 with that header and data.
std::string npy_bytes(int major, const std::string& header, const std::string& data) {
  std::string bytes = "\x93NUMPY";
  bytes += {char(major), '\0', char(header.size() & 0xFF), char(header.size() >> 8 & 0xFF)};
  if (major > 1) bytes += {char(header.size() >> 16 & 0xFF), char(header.size() >> 24 & 0xFF)};
  return bytes + header + data;
}

const std::vector<DType> kNumpyDtypes = {DType::f64, DType::f32, DType::f16,    DType::i64,
                                         DType::i32, DType::u8,  DType::boolean};

TEST(Npy, RoundTripsEveryDtypeShapeAndLayout) {
  const TemporaryFolder folder;
  for (const DType dtype : kNumpyDtypes) {
    for (const Shape& shape : {Shape{}, Shape{0}, Shape{1}, Shape{13}, Shape{0, 5}, Shape{5, 0}, Shape{3, 7},
                               Shape{2, 3, 4, 5}, Shape{1, 2, 1, 2, 1, 2, 1, 2}}) {
      const Tensor tensor = random_bits(shape, dtype, 5);
      save_npy(folder / "file.npy", tensor);
      EXPECT_TRUE(same(load_npy(folder / "file.npy"), tensor)) << describe(tensor);
      EXPECT_EQ((get(folder / "file.npy").size() - tensor.bytes()) % 64, 0u);
    }
    const Tensor base = random_bits({6, 10, 14}, dtype, 6);
    for (const Tensor& view : {base.transpose(0, 2), base.slice(1, 0, 10, 3), base.clone(), base.select(2, 3),
                               base.slice(0, 0, 1).expand({3, 10, 14})}) {
      save_npy(folder / "file.npy", view);
      EXPECT_TRUE(same(load_npy(folder / "file.npy"), view)) << describe(view);
    }
  }
}

/// As numpy.save writes it (numpy 2.4): room for a first dimension of 21 digits, padding to 64 bytes.
TEST(Npy, GoldenBytes) {
  const TemporaryFolder folder;
  save_npy(folder / "file.npy", Tensor::from(std::vector<float>{1, -2}, {2, 1}));
  std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 1), }";
  header += std::string(117 - header.size(), ' ') + "\n";
  EXPECT_EQ(get(folder / "file.npy"), npy_bytes(1, header, std::string("\0\0\x80\x3f\0\0\0\xc0", 8)));
}

TEST(Npy, ReadsTheThreeVersionsAndOtherSpellings) {
  const std::vector<std::string> headers = {
      "{'descr': '|u1', 'fortran_order': False, 'shape': (2, 3), }",
      "{\"shape\":(2,3,),\"fortran_order\":False,\"descr\":\"|u1\"}",
      "{ 'descr' : '|u1' , 'fortran_order' : False , 'shape' : ( 2 , 3 ) } \n"};
  for (const int major : {1, 2, 3})
    for (const std::string& header : headers) {
      const std::string bytes = npy_bytes(major, header, "\1\2\3\4\5\6");
      const Tensor x = load_npy(InputFile("memory", bytes));
      EXPECT_EQ(x.shape(), (Shape{2, 3}));
      EXPECT_EQ(x.to_vector<uint8_t>(), (std::vector<uint8_t>{1, 2, 3, 4, 5, 6}));
    }
}

TEST(Npy, ReadsFortranOrder) {
  // Columns first: element (i, j, k) lies at i + 2 j + 6 k.
  std::string data;
  for (int k = 0; k < 4; ++k)
    for (int j = 0; j < 3; ++j)
      for (int i = 0; i < 2; ++i) data += char(100 * i + 10 * j + k);
  const std::string bytes =
      npy_bytes(1, "{'descr': '|u1', 'fortran_order': True, 'shape': (2, 3, 4), }", data);
  const Tensor x = load_npy(InputFile("memory", bytes));
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 3; ++j)
      for (int k = 0; k < 4; ++k) EXPECT_EQ(x.at({i, j, k}).item<uint8_t>(), 100 * i + 10 * j + k);
  const std::string vector =
      npy_bytes(1, "{'descr': '|u1', 'fortran_order': True, 'shape': (3,), }", "\1\2\3");
  EXPECT_EQ(load_npy(InputFile("memory", vector)).to_vector<uint8_t>(), (std::vector<uint8_t>{1, 2, 3}));
  const std::string none = npy_bytes(1, "{'descr': '<f8', 'fortran_order': True, 'shape': (0, 3), }", "");
  EXPECT_EQ(load_npy(InputFile("memory", none)).shape(), (Shape{0, 3}));
}

TEST(Npy, ReadsOtherIntegersIntoAWiderDtype) {
  const auto loaded = [](const std::string& descr, const std::string& data,
                         const std::string& order = "False") {
    const std::string bytes =
        npy_bytes(1, "{'descr': '" + descr + "', 'fortran_order': " + order + ", 'shape': (2, 1), }", data);
    return load_npy(InputFile("memory", bytes));
  };
  for (const char* const order : {"False", "True"}) {
    const Tensor x = loaded("<i2", std::string("\xFE\xFF\x00\x80", 4), order);
    EXPECT_EQ(x.dtype(), DType::i32);
    EXPECT_EQ(x.shape(), (Shape{2, 1}));
    EXPECT_EQ(x.to_vector<int32_t>(), (std::vector<int32_t>{-2, -32768}));
  }
  EXPECT_EQ(loaded("|i1", "\x80\x7F").to_vector<int32_t>(), (std::vector<int32_t>{-128, 127}));
  EXPECT_EQ(loaded("<u2", std::string("\xFF\xFF\1\0", 4)).to_vector<int32_t>(),
            (std::vector<int32_t>{65535, 1}));
  const Tensor wide = loaded("<u4", std::string("\xFF\xFF\xFF\xFF\1\0\0\0", 8));
  EXPECT_EQ(wide.dtype(), DType::i64);
  EXPECT_EQ(wide.to_vector<int64_t>(), (std::vector<int64_t>{0xFFFFFFFF, 1}));
  const std::string most("\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x7F", 8), more("\0\0\0\0\0\0\0\x80", 8);
  EXPECT_EQ(loaded("<u8", most + most).to_vector<int64_t>()[1], std::numeric_limits<int64_t>::max());
  EXPECT_TRUE(throws([&] { loaded("<u8", most + more); },
                     "element 1 of 'array' is 9223372036854775808, more than an i64 holds"));
  EXPECT_TRUE(throws([&] { loaded("<i2", "\1\2\3"); }, "has 3 bytes of elements, expected 4"));
}

TEST(Npz, HoldsArraysByName) {
  if (!has_torch_files()) GTEST_SKIP() << "skipped: this build has no libzip";
  const TemporaryFolder folder;
  const std::string header = "{'descr': '|u1', 'fortran_order': False, 'shape': (2,), }\n";
  const std::string first = npy_bytes(1, header, "\1\2"), second = npy_bytes(1, header, "\3\4");
  // A deflated entry whose one block is stored.
  const auto length = uint16_t(second.size());
  ZipPart deflated{"b.npy", second, 8};
  deflated.bytes = "\1" + raw(length) + raw(uint16_t(~length)) + second;
  deflated.packed_size = uint32_t(deflated.bytes.size());
  put(folder / "file.npz", zip_bytes({{"a.npy", first}, deflated}));
  const std::map<std::string, Tensor> arrays = load_npz(folder / "file.npz");
  ASSERT_EQ(arrays.size(), 2u);
  EXPECT_EQ(arrays.at("a").to_vector<uint8_t>(), (std::vector<uint8_t>{1, 2}));
  EXPECT_EQ(arrays.at("b").to_vector<uint8_t>(), (std::vector<uint8_t>{3, 4}));

  ZipPart bomb = deflated, damaged = deflated;
  bomb.size = 0x7FFFFFFF;
  damaged.crc += 1;
  const std::vector<Malformed> files = {
      {"no .npy", zip_bytes({{"a.txt", first}}), "file.npz: its entry 'a.txt' is no .npy file"},
      {"no array", zip_bytes({{"a.npy", "text"}}), "file.npz: a.npy does not begin like an .npy file"},
      {"a size beyond deflate", zip_bytes({bomb}), "entry 'b.npy' of its zip archive: is larger than"},
      {"damaged", zip_bytes({damaged}), "entry 'b.npy' of its zip archive: CRC error"},
      {"no archive", first, "the end record of its zip archive is missing"},
  };
  for (const Malformed& file : files) {
    put(folder / "file.npz", file.bytes);
    EXPECT_TRUE(throws([&] { load_npz(folder / "file.npz"); }, file.error)) << file.what;
  }
}

TEST(Npy, RefusesToWriteWhatNumpyHasNoNameFor) {
  const TemporaryFolder folder;
  for (const DType dtype : {DType::bf16, DType::f8e4m3})
    EXPECT_TRUE(
        throws([&] { save_npy(folder / "file.npy", Tensor::zeros({2}, dtype, Device::cpu())); },
               std::string("NumPy has no ") + name_of(dtype) + "; convert with to(DType::f32) first"));
  EXPECT_TRUE(throws([&] { save_npy(folder / "file.npy", Tensor()); }, "the tensor is undefined"));
  EXPECT_TRUE(folder.names().empty());
}

TEST(Npy, RefusesMalformedFilesByName) {
  const std::string good = "{'descr': '|u1', 'fortran_order': False, 'shape': (2,), }\n";
  const auto with = [](const std::string& descr, const std::string& order, const std::string& shape) {
    return npy_bytes(1, "{'descr': " + descr + ", 'fortran_order': " + order + ", 'shape': " + shape + ", }",
                     "\1\2");
  };
  std::string long_header = npy_bytes(2, good, "\1\2");
  long_header[11] = '\x7F';
  std::string claims = npy_bytes(1, good, "\1\2");
  claims[9] = '\x01';
  const std::vector<Malformed> files = {
      {"one byte", "\x93", "does not begin like an .npy file"},
      {"other magic", std::string("\x93NUMPZ\1\0\6\0{}    ", 16), "does not begin like an .npy file"},
      {"zip", std::string("PK\3\4\0\0\0\0\0\0\0\0", 12), "a zip archive: an .npz? read it with load_npz"},
      {"version 0", npy_bytes(0, good, "\1\2"), "is of version 0.0"},
      {"version 4", npy_bytes(4, good, "\1\2"), "is of version 4.0; expected 1.0, 2.0 or 3.0"},
      {"version 1.1", npy_bytes(1, good, "\1\2").replace(7, 1, "\1"), "is of version 1.1"},
      {"version 2 cut in its length", npy_bytes(2, "", "").substr(0, 10), "is cut short: 10 bytes"},
      {"header of 2 GB", long_header, "bytes, more than 65535"},
      {"header past the end", claims, "follow: the file is cut short"},
      {"empty header", npy_bytes(1, "", ""), "the header has no '{' at character 0"},
      {"spaces", npy_bytes(1, "      ", ""), "the header has no '{'"},
      {"open", npy_bytes(1, "{'descr': '|u1'", ""), "the header has no '}'"},
      {"no colon", npy_bytes(1, "{'descr' '|u1'}", ""), "the header has no ':'"},
      {"no quotes", npy_bytes(1, "{descr: '|u1'}", ""), "the header has no quoted text at character 1"},
      {"open quote", npy_bytes(1, "{'descr", ""), "the header has no proper text"},
      {"escape", npy_bytes(1, "{'de\\scr': '|u1'}", ""), "the header has no proper text"},
      {"control", npy_bytes(1, "{'de\nscr': '|u1'}", ""), "the header has no proper text"},
      {"NUL", npy_bytes(1, std::string("{'descr\0': '|u1'}", 17), ""), "the header has no proper text"},
      {"1 KB key", npy_bytes(1, "{'" + std::string(1024, 'x') + "': 1}", ""),
       "the header has no proper text"},
      {"unknown key", npy_bytes(1, "{'extra': 1}", ""), "the header has an unknown key 'extra'"},
      {"twice", npy_bytes(1, "{'descr': '|u1', 'descr': '<f4'}", ""), "has the key 'descr' twice"},
      {"shape twice", npy_bytes(1, "{'shape': (2,), 'shape': (2,)}", ""), "has the key 'shape' twice"},
      {"order twice", npy_bytes(1, "{'fortran_order': True, 'fortran_order': True}", ""),
       "has the key 'fortran_order' twice"},
      {"no descr", npy_bytes(1, "{'fortran_order': False, 'shape': (2,)}", "\1\2"),
       "the header has no descr"},
      {"no order", npy_bytes(1, "{'descr': '|u1', 'shape': (2,)}", "\1\2"),
       "the header has no fortran_order"},
      {"no shape", npy_bytes(1, "{'descr': '|u1', 'fortran_order': False}", "\1\2"),
       "the header has no shape"},
      {"two commas", npy_bytes(1, "{'descr': '|u1',, 'shape': (2,)}", ""), "the header has no quoted text"},
      {"goes on", npy_bytes(1, good + "x", "\1\2"), "the header goes on after '}'"},
      {"second dict", npy_bytes(1, good + good, "\1\2"), "the header goes on after '}'"},
      {"big-endian", with("'>f4'", "False", "(2,)"), "elements of type '>f4' are not supported: big-endian"},
      {"objects", with("'|O'", "False", "(2,)"), "Python objects (a pickle), which are never loaded"},
      {"void", with("'|V2'", "False", "(1,)"), "as NumPy writes bfloat16 and float8"},
      {"text", with("'<U4'", "False", "(2,)"), "elements of type '<U4' are not supported; expected <f8"},
      {"complex", with("'<c8'", "False", "(2,)"), "elements of type '<c8' are not supported"},
      {"dates", with("'<M8[ns]'", "False", "(2,)"), "elements of type '<M8[ns]' are not supported"},
      {"name in safetensors", with("'I16'", "False", "(1,)"), "elements of type 'I16' are not supported"},
      {"native order", with("'=f4'", "False", "(1,)"), "elements of type '=f4' are not supported"},
      {"case", with("'<F4'", "False", "(1,)"), "elements of type '<F4' are not supported"},
      {"no type", with("''", "False", "(2,)"), "elements of type '' are not supported"},
      {"records", with("[('a', '<f4')]", "False", "(2,)"), "holds a structured array"},
      {"number for a type", with("4", "False", "(2,)"), "the header has no quoted text"},
      {"order 0", with("'|u1'", "0", "(2,)"), "fortran_order is neither True nor False"},
      {"order true", with("'|u1'", "true", "(2,)"), "fortran_order is neither True nor False"},
      {"order None", with("'|u1'", "None", "(2,)"), "fortran_order is neither True nor False"},
      {"order Trueish", with("'|u1'", "Trueish", "(2,)"), "the header has no '}'"},
      {"list shape", with("'|u1'", "False", "[2]"), "the header has no '('"},
      {"number shape", with("'|u1'", "False", "(2)"), "the shape is a number, not a tuple"},
      {"open shape", with("'|u1'", "False", "(2,"), "no whole number of 0 and more"},
      {"no comma", with("'|u1'", "False", "(1 2)"), "the shape has no ','"},
      {"negative", with("'|u1'", "False", "(-1,)"), "no whole number of 0 and more"},
      {"fraction", with("'|u1'", "False", "(2.5,)"), "the shape has no ','"},
      {"long", with("'|u1'", "False", "(2L,)"), "the shape has no ','"},
      {"hexadecimal", with("'|u1'", "False", "(0x2,)"), "the shape has no ','"},
      {"2^63", with("'|u1'", "False", "(9223372036854775808,)"), "a size of more than 63 bits"},
      {"100 digits", with("'|u1'", "False", "(" + std::string(100, '9') + ",)"),
       "a size of more than 63 bits"},
      {"product wraps to 0", with("'<f4'", "False", "(4294967296, 4294967296)"),
       "the shape overflows 63 bits"},
      {"product wraps to 2", with("'|u1'", "False", "(2, 9223372036854775807)"),
       "the shape overflows 63 bits"},
      {"zero with huge others", with("'|u1'", "False", "(0, 4294967296, 4294967296)"),
       "the shape overflows 63 bits"},
      {"bytes overflow", with("'<f8'", "False", "(9223372036854775807,)"), "expected more than 2^64"},
      {"exabytes", with("'|u1'", "False", "(1152921504606846976,)"), "expected 1152921504606846976"},
      {"rank 9", with("'|u1'", "False", "(1,1,1,1,1,1,1,1,2)"), "the shape has more than 8 dimensions"},
      {"cut short", npy_bytes(1, good, "\1"),
       "has 1 bytes of elements, expected 2 for u8[2]: the file is cut short"},
      {"trailing bytes", npy_bytes(1, good, "\1\2\3"), "expected 2 for u8[2]: something follows the array"},
      {"no bool", with("'|b1'", "False", "(2,)"),
       "element 1 of the bool tensor 'array' is 2, expected 0 or 1"},
  };
  const TemporaryFolder folder;
  for (const Malformed& file : files) {
    EXPECT_TRUE(throws([&] { load_npy(InputFile("memory", file.bytes)); }, file.error)) << file.what;
    put(folder / "file.npy", file.bytes);
    EXPECT_TRUE(throws([&] { load_npy(folder / "file.npy"); }, folder / "file.npy")) << file.what;
  }
}

TEST(Npy, RefusesATruncationAtEveryByte) {
  const TemporaryFolder folder;
  save_npy(folder / "file.npy", random_bits({3, 5}, DType::f32, 1));
  const std::string whole = get(folder / "file.npy");
  for (size_t bytes = 0; bytes < whole.size(); ++bytes) {
    const std::string part = whole.substr(0, bytes);
    EXPECT_FALSE(message_of([&] { load_npy(InputFile("memory", part)); }).empty()) << bytes;
  }
}

}  // namespace
}  // namespace tessera::io::test

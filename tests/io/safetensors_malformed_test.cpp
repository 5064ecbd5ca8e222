#include "io/safetensors.h"
#include "tests/errors.h"
#include "tests/io/files.h"

namespace tessera::io::test {
namespace {

std::string with_length(uint64_t length, const std::string& rest) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + rest;
}

std::string joined(std::initializer_list<std::string_view> parts) {
  std::string whole;
  for (const std::string_view part : parts) whole += part;
  return whole;
}

/// A header of one tensor "x".
std::string one(std::string_view dtype, std::string_view shape, std::string_view offsets) {
  return joined({R"({"x":{"dtype":)", dtype, R"(,"shape":)", shape, R"(,"data_offsets":)", offsets, "}}"});
}

std::string entry(const std::string& name, uint64_t begin, uint64_t end) {
  return joined({"\"", name, R"(":{"dtype":"U8","shape":[)", std::to_string(end - begin),
                 R"(],"data_offsets":[)", std::to_string(begin), ",", std::to_string(end), "]}"});
}

std::vector<Malformed> malformed_safetensors() {
  const auto file = [](const std::string& header, const std::string& data = "\1\2") {
    return safetensors_bytes(header, data);
  };
  const std::string x = entry("x", 0, 2);
  std::string ten = "{";
  for (char c = '0'; c <= '9'; ++c) ten += joined({c == '0' ? "" : ",", entry({c}, 0, 2)});
  return {
      // The length of the header.
      {"1 byte", "x", "has 1 bytes, too few for a header"},
      {"7 bytes", "1234567", "has 7 bytes, too few for a header"},
      {"length 0", with_length(0, "{}"), "the header does not begin with '{'"},
      {"length 1", with_length(1, "{}"), "not valid JSON at byte"},
      {"length 7 of 2", with_length(7, "{}"), "the header claims 7 bytes, but only 2 follow"},
      {"length alone", with_length(2, ""), "the header claims 2 bytes, but only 0 follow"},
      {"one more than there is", with_length(3, "{}"), "the header claims 3 bytes, but only 2 follow"},
      {"100 MB + 1", with_length(100'000'001, "{}"),
       "claims 100000001 bytes, more than the 100000000 allowed"},
      {"100 MB", with_length(100'000'000, "{}"), "claims 100000000 bytes, but only 2 follow"},
      {"2^31", with_length(uint64_t{1} << 31, "{}"), "more than the 100000000 allowed"},
      {"2^32 - 1", with_length(0xFFFFFFFF, "{}"), "more than the 100000000 allowed"},
      {"2^63", with_length(uint64_t{1} << 63, "{}"), "more than the 100000000 allowed"},
      {"2^64 - 1", with_length(~uint64_t{0}, "{}"), "more than the 100000000 allowed"},
      {"2^64 - 4, wraps with 8", with_length(~uint64_t{3}, "{}"), "more than the 100000000 allowed"},
      {"text file", "# a text file, not a tensor\n", "more than the 100000000 allowed"},
      {"LFS pointer", "version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"},
      {"HTML page", "<!DOCTYPE html><html></html>", "is an HTML page"},
      // JSON.
      {"leading space", file(" {" + x + "}"), "the header does not begin with '{'"},
      {"byte order mark", file("\xEF\xBB\xBF{" + x + "}"), "the header does not begin with '{'"},
      {"list", file("[]"), "the header does not begin with '{'"},
      {"zero page", with_length(64, std::string(64, '\0')), "the header does not begin with '{'"},
      {"trailing NUL", file("{" + x + "}" + std::string(3, '\0')), "the header holds a NUL byte"},
      {"NUL and more", file("{" + x + "}" + std::string(1, '\0') + "{}"), "the header holds a NUL byte"},
      {"open", file("{" + x), "the header is not valid JSON at byte"},
      {"trailing comma", file("{" + x + ",}"), "not valid JSON at byte"},
      {"missing comma", file("{" + x + entry("y", 2, 2) + "}"), "not valid JSON at byte"},
      {"second object", file("{" + x + "}{}"), "not valid JSON at byte"},
      {"comment", file("{" + x + "}//"), "not valid JSON at byte"},
      {"single quotes", file("{'x':1}"), "not valid JSON at byte 9"},
      {"not UTF-8", file("{\"\xFF\":{}}"), "not valid JSON at byte"},
      {"overlong UTF-8", file("{\"\xC0\xAF\":{}}"), "not valid JSON at byte"},
      {"lone surrogate", file(R"({"\ud800":{}})"), "not valid JSON at byte"},
      {"raw newline in a name", file("{\"a\nb\":{}}"), "not valid JSON at byte"},
      {"NUL in a name", file(R"({"a\u0000b":{}})"), "holds a NUL byte"},
      {"depth 100,000 of lists", file(R"({"x":)" + std::string(100'000, '[')),
       "'x' is a list, expected an object"},
      {"depth 100,000 of objects",
       [&] {
         std::string deep;
         for (int i = 0; i < 100'000; ++i) deep += R"({"x":)";
         return file(deep);
       }(),
       "tensor 'x' has an unknown part 'x'"},
      {"1 MB name", file("{\"" + std::string(1 << 20, 'n') + "\":3}"),
       "nnn...' is a number, expected an object"},
      // Parts of an entry.
      {"number", file(R"({"x":3})"), "'x' is a number, expected an object"},
      {"null", file(R"({"x":null})"), "'x' is null, expected an object"},
      {"string", file(R"({"x":"F32"})"), "'x' is a string, expected an object"},
      {"true", file(R"({"x":true})"), "'x' is true or false, expected an object"},
      {"empty entry", file(R"({"x":{}})"), "tensor 'x' has no dtype"},
      {"no shape", file(R"({"x":{"dtype":"U8","data_offsets":[0,2]}})"), "tensor 'x' has no shape"},
      {"no offsets", file(R"({"x":{"dtype":"U8","shape":[2]}})"), "tensor 'x' has no data_offsets"},
      {"unknown part", file(R"({"x":{"strides":[1]}})"), "tensor 'x' has an unknown part 'strides'"},
      {"dtype twice", file(R"({"x":{"dtype":"U8","dtype":"F32"}})"), "tensor 'x' has two parts 'dtype'"},
      {"shape twice", file(R"({"x":{"shape":[2],"shape":[1]}})"), "tensor 'x' has two parts 'shape'"},
      {"offsets twice", file(R"({"x":{"data_offsets":[0,2],"data_offsets":[0,2]}})"),
       "tensor 'x' has two parts 'data_offsets'"},
      {"dtype number", file(one("8", "[2]", "[0,2]")), "'x' (dtype) is a number, expected a string"},
      {"dtype null", file(one("null", "[2]", "[0,2]")), "'x' (dtype) is null, expected a string"},
      {"dtype list", file(one("[]", "[2]", "[0,2]")), "'x' (dtype) is a list, expected a string"},
      {"unknown dtype", file(one(R"("F31")", "[2]", "[0,2]")), "has dtype F31, which is not supported"},
      {"known elsewhere", file(one(R"("F8_E5M2")", "[2]", "[0,2]")),
       "has dtype F8_E5M2, which is not supported"},
      {"name in NumPy", file(one(R"("<i2")", "[1]", "[0,2]")), "has dtype <i2, which is not supported"},
      {"lower case", file(one(R"("u8")", "[2]", "[0,2]")), "has dtype u8, which is not supported"},
      {"empty dtype", file(one(R"("")", "[2]", "[0,2]")), "has dtype , which is not supported"},
      {"dtype with NUL", file(one(R"("U8\u0000")", "[2]", "[0,2]")), "has dtype U8?, which is not supported"},
      // Shapes.
      {"shape number", file(one(R"("U8")", "2", "[0,2]")), "'x' (shape) is a number, expected a list"},
      {"shape string", file(one(R"("U8")", R"("2")", "[0,2]")), "'x' (shape) is a string, expected a list"},
      {"shape of lists", file(one(R"("U8")", "[[2]]", "[0,2]")),
       "'x' (shape) is a list, expected whole numbers"},
      {"shape of strings", file(one(R"("U8")", R"(["2"])", "[0,2]")), "is a string, expected whole numbers"},
      {"negative", file(one(R"("U8")", "[-2]", "[0,2]")), "'x' (shape) is a negative number"},
      {"minus zero", file(one(R"("U8")", "[-0]", "[0,0]")), "'x' (shape) is a negative number"},
      {"fraction", file(one(R"("U8")", "[1.5]", "[0,2]")), "is the number 1.5 (not a whole number"},
      {"2.0", file(one(R"("U8")", "[2.0]", "[0,2]")), "is the number 2.0 (not a whole number"},
      {"1e3", file(one(R"("U8")", "[1e3]", "[0,2]")), "is the number 1e3 (not a whole number"},
      {"1e400", file(one(R"("U8")", "[1e400]", "[0,2]")), "not valid JSON"},
      {"leading zero", file(one(R"("U8")", "[02]", "[0,2]")), "not valid JSON"},
      {"2^64 - 1", file(one(R"("U8")", "[18446744073709551615]", "[0,2]")), "more than 63 bits"},
      {"2^64", file(one(R"("U8")", "[18446744073709551616]", "[0,2]")), "not a whole number below 2^64"},
      {"2^63", file(one(R"("U8")", "[9223372036854775808]", "[0,2]")), "more than 63 bits"},
      {"product wraps to 0", file(one(R"("F32")", "[4294967296,4294967296]", "[0,0]"), ""), "overflows"},
      {"bytes wrap to 0", file(one(R"("F32")", "[4611686018427387904]", "[0,0]"), ""), "overflows"},
      {"product wraps to 2", file(one(R"("I32")", "[2,9223372036854775807]", "[0,2]")), "overflows"},
      {"zero with huge others", file(one(R"("U8")", "[0,4294967296,4294967296]", "[0,0]"), ""), "overflows"},
      {"2^63 - 1 elements", file(one(R"("U8")", "[9223372036854775807]", "[0,2]")),
       "has 2 bytes, expected 9223372036854775807"},
      {"rank 9", file(one(R"("U8")", "[1,1,1,1,1,1,1,1,2]", "[0,2]")), "has more than 8 dimensions"},
      {"rank 65",
       [&] {
         std::string ones = "[2";
         for (int i = 0; i < 64; ++i) ones += ",1";
         return file(one(R"("U8")", ones + "]", "[0,2]"));
       }(),
       "has more than 8 dimensions"},
      {"shape too small", file(one(R"("U8")", "[1]", "[0,2]")),
       "has 2 bytes, expected 1 from its dtype and shape"},
      {"shape too large", file(one(R"("F32")", "[1]", "[0,2]")),
       "has 2 bytes, expected 4 from its dtype and shape"},
      {"scalar of 2 bytes", file(one(R"("U8")", "[]", "[0,2]")),
       "has 2 bytes, expected 1 from its dtype and shape"},
      // Offsets.
      {"no offsets in it", file(one(R"("U8")", "[2]", "[]")), "has 0 data offsets, expected 2"},
      {"one offset", file(one(R"("U8")", "[2]", "[0]")), "has 1 data offsets, expected 2"},
      {"three offsets", file(one(R"("U8")", "[2]", "[0,2,2]")), "has more than 2 data offsets"},
      {"offsets object", file(one(R"("U8")", "[2]", "{}")),
       "'x' (data_offsets) is an object, expected a list"},
      {"negative offset", file(one(R"("U8")", "[2]", "[-1,1]")), "'x' (data_offsets) is a negative number"},
      {"fraction", file(one(R"("U8")", "[2]", "[0,2.0]")), "is the number 2.0"},
      {"backwards", file(one(R"("U8")", "[2]", "[2,0]")), "ends at 0 before it begins at 2"},
      {"wraps", file(one(R"("U8")", "[2]", "[18446744073709551614,0]")),
       "before it begins at 18446744073709551614"},
      {"begin near 2^64", file(one(R"("U8")", "[1]", "[18446744073709551614,18446744073709551615]")),
       "begins at 18446744073709551614 of the data, expected 0 (there is a hole)"},
      {"first not 0", file("{" + entry("x", 1, 2) + "}"),
       "begins at 1 of the data, expected 0 (there is a hole)"},
      {"hole", file("{" + entry("x", 0, 1) + "," + entry("y", 2, 3) + "}", "123"),
       "tensor 'y' begins at 2 of the data, expected 1 (there is a hole)"},
      {"overlap", file("{" + entry("x", 0, 2) + "," + entry("y", 1, 3) + "}", "123"),
       "tensor 'y' begins at 1 of the data, expected 2 (it overlaps another)"},
      {"inside another", file("{" + entry("x", 0, 3) + "," + entry("y", 1, 2) + "}", "123"),
       "it overlaps another"},
      {"ten on one range", file(ten + "}"), "it overlaps another"},
      {"past the end by 1", file("{" + entry("x", 0, 3) + "}"), "ends at 3 of the data, which has 2 bytes"},
      {"far past the end", file(one(R"("U8")", "[1152921504606846976]", "[0,1152921504606846976]")),
       "ends at 1152921504606846976 of the data, which has 2 bytes"},
      {"no data", file("{" + x + "}", ""), "ends at 2 of the data, which has 0 bytes"},
      {"trailing bytes", file("{" + x + "}", "123"), "1 bytes follow the last tensor"},
      {"trailing bytes, no tensor", file("{}", "1"), "1 bytes follow the last tensor"},
      // Names and metadata.
      {"tensor twice", file("{" + x + "," + x + "}"), "the name 'x' occurs twice"},
      {"twice by an escape", file("{" + x + R"(,"\u0078":{}})"), "the name 'x' occurs twice"},
      {"metadata twice", file(R"({"__metadata__":{},"__metadata__":{}})"), "'__metadata__' occurs twice"},
      {"metadata key twice", file(R"({"__metadata__":{"a":"1","a":"2"}})"),
       "the metadata key 'a' occurs twice"},
      {"metadata number", file(R"({"__metadata__":{"a":1}})"), "metadata 'a' is a number, expected a string"},
      {"metadata null", file(R"({"__metadata__":{"a":null}})"), "metadata 'a' is null, expected a string"},
      {"metadata object", file(R"({"__metadata__":{"a":{}}})"),
       "metadata 'a' is an object, expected a string"},
      {"metadata list", file(R"({"__metadata__":[]})"), "'__metadata__' is a list, expected an object"},
      {"metadata itself null", file(R"({"__metadata__":null})"),
       "'__metadata__' is null, expected an object"},
      {"metadata as a tensor", file("{" + entry("__metadata__", 0, 2) + "}"), "metadata 'shape' is a list"},
      {"control in a name", file(R"({"a\u001b[31m":3})"), "'a?[31m' is a number"},
  };
}

TEST(SafetensorsMalformed, EachIsRefusedByItsName) {
  const TemporaryFolder folder;
  const std::vector<Malformed> files = malformed_safetensors();
  EXPECT_GE(files.size(), 100u);
  for (const Malformed& file : files) {
    EXPECT_TRUE(throws([&] { SafetensorsFile(InputFile("memory", file.bytes)); }, file.error)) << file.what;
    put(folder / "file", file.bytes);
    EXPECT_TRUE(throws([&] { load_safetensors(folder / "file"); }, folder / "file")) << file.what;
  }
}

TEST(SafetensorsMalformed, ABoolIsZeroOrOne) {
  const std::string header = one(R"("BOOL")", "[3]", "[0,3]");
  const std::string bytes = safetensors_bytes(header, std::string("\0\1\2", 3));
  const SafetensorsFile file(InputFile("memory", bytes));
  EXPECT_TRUE(throws([&] { file.load("x"); }, "element 2 of the bool tensor 'x' is 2, expected 0 or 1"));
}

TEST(SafetensorsMalformed, ATruncationAtEveryByteIsRefused) {
  const TemporaryFolder folder;
  save_safetensors(folder / "file", NamedTensors{{"a", random_bits({2, 3}, DType::f32, 1)},
                                                 {"b", random_bits({5}, DType::u8, 2)}});
  const std::string whole = get(folder / "file");
  for (size_t bytes = 0; bytes < whole.size(); ++bytes) {
    const std::string part = whole.substr(0, bytes);
    EXPECT_FALSE(message_of([&] { SafetensorsFile(InputFile("memory", part)); }).empty()) << bytes;
  }
}

}  // namespace
}  // namespace tessera::io::test

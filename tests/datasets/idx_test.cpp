#include "datasets/idx.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "datasets/loader.h"
#include "runtime/philox.h"
#include "tests/folder.h"

namespace tessera::datasets {
namespace {

std::string bytes(std::initializer_list<int> values) {
  std::string text;
  for (const int value : values) text.push_back(char(value));
  return text;
}

Tensor parse_text(const std::string& text) {
  return parse_idx(std::span(text.data(), text.size()), "test.idx");
}

std::string message(const std::string& text) {
  try {
    parse_text(text);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(Idx, ReadsEveryTypeBigEndian) {
  EXPECT_EQ(parse_text(bytes({0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 1, 7, 255})).to_vector<uint8_t>(),
            (std::vector<uint8_t>{7, 255}));
  EXPECT_EQ(parse_text(bytes({0, 0, 9, 1, 0, 0, 0, 2, 255, 3})).to_vector<int32_t>(),
            (std::vector<int32_t>{-1, 3}));
  EXPECT_EQ(parse_text(bytes({0, 0, 11, 1, 0, 0, 0, 2, 1, 2, 255, 254})).to_vector<int32_t>(),
            (std::vector<int32_t>{258, -2}));
  EXPECT_EQ(parse_text(bytes({0, 0, 12, 1, 0, 0, 0, 1, 255, 255, 255, 253})).item<int32_t>(), -3);
  EXPECT_EQ(parse_text(bytes({0, 0, 13, 1, 0, 0, 0, 1, 0xC0, 0x20, 0, 0})).item<float>(), -2.5f);
  EXPECT_EQ(parse_text(bytes({0, 0, 14, 1, 0, 0, 0, 1, 0x3F, 0xF8, 0, 0, 0, 0, 0, 0})).item<double>(), 1.5);
  EXPECT_EQ(parse_text(bytes({0, 0, 8, 2, 0, 0, 0, 0, 0, 0, 0, 9})).shape(), Shape({0, 9}));
}

TEST(Idx, RefusesMalformedFilesWithAReason) {
  EXPECT_NE(message("").find("two zero bytes"), std::string::npos);
  EXPECT_NE(message(bytes({1, 0, 8, 1, 0, 0, 0, 0})).find("two zero bytes"), std::string::npos);
  EXPECT_NE(message(bytes({0, 0, 10, 1, 0, 0, 0, 0})).find("element type 10"), std::string::npos);
  EXPECT_NE(message(bytes({0, 0, 8, 9})).find("rank 9"), std::string::npos);
  EXPECT_NE(message(bytes({0, 0, 8, 0})).find("rank 0"), std::string::npos);
  EXPECT_NE(message(bytes({0, 0, 8, 2, 0, 0, 0})).find("ends inside its header"), std::string::npos);
  EXPECT_NE(message(bytes({0, 0, 8, 1, 0, 0, 0, 3, 1, 2})).find("its header says 3"), std::string::npos);
  EXPECT_NE(message(bytes({0, 0, 8, 1, 0, 0, 0, 1, 1, 2})).find("2 bytes"), std::string::npos);
  const std::string huge = bytes({0, 0, 14, 3}) + std::string(12, char(255));
  EXPECT_NE(message(huge).find("2^64"), std::string::npos);
}

TEST(Idx, SurvivesRandomBytes) {
  const std::string valid = bytes({0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6});
  int read = 0;
  for (uint64_t i = 0; i < 20000; ++i) {
    std::string text = valid;
    const Uint4 random = philox(1, 2, i);
    text[random.word[0] % text.size()] = char(random.word[1]);
    text.resize(text.size() - random.word[2] % 8 / 4 * (random.word[3] % text.size()));
    try {
      read += parse_text(text).count() >= 0;
    } catch (const Error&) {
    }
  }
  EXPECT_GT(read, 0);
  EXPECT_LT(read, 20000);
}

TEST(Idx, LoadsImagesWithLabels) {
  const TemporaryFolder folder;
  folder.put("digits-images.idx",
             bytes({0, 0, 8, 3, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0, 2, 0, 255, 51, 102, 153, 204}));
  folder.put("digits-labels.idx", bytes({0, 0, 8, 1, 0, 0, 0, 3, 4, 5, 6}));
  const Idx digits(folder / "digits");
  EXPECT_EQ(digits.size(), 3);
  Loader loader(digits, {.size = 2});
  for (const auto& [images, labels] : loader.epoch()) {
    EXPECT_EQ(images.size(1), 2);
    EXPECT_EQ(labels.size(0), images.size(0));
  }
  const std::vector<int64_t> picked{2, 0};
  const LabelledImages batch = digits.batch(picked);
  EXPECT_EQ(batch.labels.to_vector<int64_t>(), (std::vector<int64_t>{6, 4}));
  EXPECT_EQ(batch.images.to_vector<float>(), (std::vector<float>{0.6f, 0.8f, 0, 1}));
  std::filesystem::remove(folder / "digits-labels.idx");
  EXPECT_THROW(Idx(folder / "digits"), Error);
}

}  // namespace
}  // namespace tessera::datasets

#include "report/image.h"

#include <gtest/gtest.h>

#include "report/pdf.h"
#include "runtime/error.h"

#if defined(TESSERA_WITH_PNG)
#include <png.h>
#endif

namespace tessera::report {
namespace {

TEST(Base64, OfTheStandard) {  // RFC 4648, section 10
  const std::pair<const char*, const char*> vectors[] = {{"", ""},
                                                         {"f", "Zg=="},
                                                         {"fo", "Zm8="},
                                                         {"foo", "Zm9v"},
                                                         {"foob", "Zm9vYg=="},
                                                         {"fooba", "Zm9vYmE="},
                                                         {"foobar", "Zm9vYmFy"}};
  for (const auto& [plain, coded] : vectors) EXPECT_EQ(base64(plain), coded);
  EXPECT_EQ(base64(std::string("\xFB\xFF\x00\xFE", 4)),
            "+/8A/g==");  // both odd digits, a zero byte, no signs
}

TEST(Image, SetOutsideDoesNothing) {
  Image image(3, 2);
  for (const auto& [x, y] : {std::pair(-1, 0), {3, 0}, {0, -1}, {0, 2}, {1 << 20, 1 << 20}})
    image.set(x, y, 1, 2, 3);
  EXPECT_EQ(image.rgb, std::vector<uint8_t>(18, 255));
  image.set(2, 1, 1, 2, 3);
  EXPECT_EQ(image.rgb[15], 1);
  EXPECT_EQ(image.rgb[16], 2);
  EXPECT_EQ(image.rgb[17], 3);
}

TEST(HeatColour, DarkensAndStaysInRange) {
  int former = 3 * 255 + 1;
  for (int i = 0; i <= 100; ++i) {
    uint8_t rgb[3];
    heat_colour(i / 100.0, rgb);
    const int light = rgb[0] + rgb[1] + rgb[2];
    EXPECT_LT(light, former) << i;
    former = light;
  }
  uint8_t low[3], under[3], high[3], over[3];
  heat_colour(0, low), heat_colour(-5, under), heat_colour(1, high), heat_colour(7, over);
  EXPECT_TRUE(std::equal(low, low + 3, under) && std::equal(high, high + 3, over));
}

TEST(Png, ReadsBackAsItWas) {
  Image image(17, 5);
  for (size_t i = 0; i < image.rgb.size(); ++i) image.rgb[i] = uint8_t(i * 37);
#if defined(TESSERA_WITH_PNG)
  ASSERT_TRUE(has_png());
  const std::string bytes = encode_png(image);
  EXPECT_EQ(bytes.substr(0, 8), "\x89PNG\r\n\x1A\n");
  png_image header{};
  header.version = PNG_IMAGE_VERSION;
  ASSERT_TRUE(png_image_begin_read_from_memory(&header, bytes.data(), bytes.size()));
  EXPECT_EQ(header.width, 17u);
  EXPECT_EQ(header.height, 5u);
  header.format = PNG_FORMAT_RGB;
  std::vector<uint8_t> read(PNG_IMAGE_SIZE(header));
  ASSERT_TRUE(png_image_finish_read(&header, nullptr, read.data(), 0, nullptr));
  EXPECT_EQ(read, image.rgb);
#else
  EXPECT_FALSE(has_png());
  EXPECT_THROW(encode_png(image), Error);
#endif
}

TEST(Pdf, ItsTableNamesWhereEveryObjectBegins) {
  if (!has_png()) GTEST_SKIP() << "skipped: no libpng";
  Image image(31, 6);
  for (size_t i = 0; i < image.rgb.size(); ++i) image.rgb[i] = uint8_t(i * 37);
  const std::string file = encode_pdf(image);
  EXPECT_EQ(file, encode_pdf(image));
  const auto number_after = [&](const std::string& text, size_t from = 0) {
    const size_t at = file.find(text, from);
    return at == std::string::npos ? -1 : std::stol(file.substr(at + text.size(), 12));
  };
  EXPECT_NE(file.find("/MediaBox [0 0 15.5 3]"), std::string::npos);
  EXPECT_NE(file.find("/Width 31 /Height 6 "), std::string::npos);
  const auto table = size_t(number_after("startxref\n"));
  ASSERT_EQ(file.compare(table, 9, "xref\n0 6\n"), 0);
  constexpr size_t kEntry = 20;
  for (size_t object = 1; object <= 5; ++object) {
    const auto begin = size_t(std::stol(file.substr(table + 9 + object * kEntry, 10)));
    EXPECT_EQ(file.compare(begin, 8, std::to_string(object) + " 0 obj\n"), 0) << object;
    if (object < 4) continue;
    const std::string marker = "stream\n";
    const size_t stream = file.find(marker, begin) + marker.size();
    const auto length = size_t(number_after("/Length ", begin));
    EXPECT_EQ(file.compare(stream + length, 10, "\nendstream"), 0) << object;
    if (object == 5) EXPECT_NE(encode_png(image).find(file.substr(stream, length)), std::string::npos);
  }
}

}  // namespace
}  // namespace tessera::report

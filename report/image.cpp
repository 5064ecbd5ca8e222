#include "report/image.h"

#include <algorithm>

#include "runtime/error.h"

#if defined(TESSERA_WITH_PNG)
#include <png.h>
#endif

namespace tessera::report {

void Image::set(int x, int y, uint8_t red, uint8_t green, uint8_t blue) {
  if (x < 0 || y < 0 || x >= width || y >= height) return;
  uint8_t* const pixel = &rgb[(size_t(y) * size_t(width) + size_t(x)) * 3];
  pixel[0] = red, pixel[1] = green, pixel[2] = blue;
}

#if defined(TESSERA_WITH_PNG)
bool has_png() {
  return true;
}

std::string encode_png(const Image& image) {
  png_image header{};
  header.version = PNG_IMAGE_VERSION;
  header.width = png_uint_32(image.width);
  header.height = png_uint_32(image.height);
  header.format = PNG_FORMAT_RGB;
  png_alloc_size_t bytes = 0;
  check(png_image_write_to_memory(&header, nullptr, &bytes, 0, image.rgb.data(), 0, nullptr) != 0,
        "png: ", header.message);
  std::string out(bytes, '\0');
  check(png_image_write_to_memory(&header, out.data(), &bytes, 0, image.rgb.data(), 0, nullptr) != 0,
        "png: ", header.message);
  out.resize(bytes);
  return out;
}
#else
bool has_png() {
  return false;
}

std::string encode_png(const Image&) {
  fail_at(Site::here(), "png: this build has no libpng; install libpng-dev and build again");
}
#endif

std::string base64(const std::string& bytes) {
  constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t word = 0;
    for (size_t k = 0; k < 3; ++k) word = word << 8 | (i + k < bytes.size() ? uint8_t(bytes[i + k]) : 0u);
    for (size_t k = 0; k < 4; ++k) text += i + k > bytes.size() ? '=' : kDigits[word >> (18 - 6 * k) & 63u];
  }
  return text;
}

void heat_colour(double value, uint8_t rgb[3]) {
  constexpr double kStops[5][3] = {
      {255, 255, 255}, {198, 219, 239}, {107, 174, 214}, {33, 113, 181}, {8, 29, 88}};
  const double at = std::clamp(value, 0.0, 1.0) * 4;
  const int low = std::min(3, int(at));
  for (int c = 0; c < 3; ++c)
    rgb[c] = uint8_t(kStops[low][c] + (kStops[low + 1][c] - kStops[low][c]) * (at - low) + 0.5);
}

}  // namespace tessera::report

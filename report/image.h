#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::report {

/// A picture of 8-bit RGB pixels, row by row from the top.
struct Image {
  int width = 0, height = 0;
  std::vector<uint8_t> rgb;
  Image(int width, int height) : width(width), height(height), rgb(size_t(width) * size_t(height) * 3, 255) {}
  void set(int x, int y, uint8_t red, uint8_t green, uint8_t blue);  // outside: nothing
};

/// Whether this build can write PNG files.
bool has_png();
/// The bytes of a PNG file. Throws if the build has no libpng.
std::string encode_png(const Image& image);
std::string base64(const std::string& bytes);

/// A colour of the perceptually ordered map from near-white (0) over blue to near-black (1).
void heat_colour(double value, uint8_t rgb[3]);

}  // namespace tessera::report

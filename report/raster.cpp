#include "report/raster.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "report/font.h"

namespace tessera::report {
namespace {

/// A character of the font per code point.
std::string glyphs_of(std::string_view utf8) {
  std::string glyphs;
  for (const char c : utf8) {
    if ((uint8_t(c) & 0xC0u) == 0x80u) continue;  // a later byte of a code point
    glyphs += c >= kFontFirst && c <= kFontLast ? c : '?';
  }
  return glyphs;
}

/// `dot(column, row)` for each dot of the text, columns from its beginning, rows from its top.
template <class Dot>
void for_each_dot(std::string_view utf8, const Dot& dot) {
  const std::string glyphs = glyphs_of(utf8);
  for (size_t i = 0; i < glyphs.size(); ++i) {
    const char* const rows = kFont[glyphs[i] - kFontFirst];
    for (int row = 0; row < kFontHeight; ++row)
      for (int column = 0; column < kFontWidth; ++column)
        if (rows[row * (kFontWidth + 1) + column] == '#') dot(int(i) * (kFontWidth + 1) + column, row);
  }
}

}  // namespace

Colour palette(size_t index) {
  constexpr Colour kColours[] = {{33, 113, 181}, {217, 72, 1},  {35, 139, 69},  {106, 81, 163},
                                 {179, 0, 0},    {82, 82, 82},  {27, 158, 158}, {184, 134, 11},
                                 {194, 24, 91},  {93, 64, 55},  {0, 105, 92},   {124, 179, 66},
                                 {57, 73, 171},  {239, 108, 0}, {142, 36, 170}, {84, 110, 122}};
  return kColours[index % std::size(kColours)];
}

Colour heat(double value) {
  if (std::isnan(value)) return {200, 200, 200};
  uint8_t rgb[3];
  heat_colour(value, rgb);
  return {rgb[0], rgb[1], rgb[2]};
}

void fill(Image& image, int x, int y, int width, int height, Colour colour) {
  // Clipped first: a bar may be far larger than the image.
  const int left = std::max(x, 0), right = int(std::min<int64_t>(int64_t{x} + width, image.width));
  const int top = std::max(y, 0), bottom = int(std::min<int64_t>(int64_t{y} + height, image.height));
  for (int j = top; j < bottom; ++j)
    for (int i = left; i < right; ++i) image.set(i, j, colour.red, colour.green, colour.blue);
}

void draw_line(Image& image, int x0, int y0, int x1, int y1, Colour colour, int thickness) {
  const int width = std::abs(x1 - x0), height = std::abs(y1 - y0);
  const int right = x0 < x1 ? 1 : -1, down = y0 < y1 ? 1 : -1;
  int error = width - height;  // Bresenham
  for (;;) {
    fill(image, x0 - thickness / 2, y0 - thickness / 2, thickness, thickness, colour);
    if (x0 == x1 && y0 == y1) return;
    const int twice = 2 * error;
    if (twice > -height) error -= height, x0 += right;
    if (twice < width) error += width, y0 += down;
  }
}

void draw_disc(Image& image, int x, int y, int radius, Colour colour) {
  for (int j = -radius; j <= radius; ++j)
    for (int i = -radius; i <= radius; ++i)
      if (i * i + j * j <= radius * radius + radius)  // + radius: rounder than with corners cut off
        image.set(x + i, y + j, colour.red, colour.green, colour.blue);
}

int text_width(std::string_view utf8) {
  const auto count = int(glyphs_of(utf8).size());
  return count == 0 ? 0 : count * kTextStep - kTextScale;
}

void draw_text(Image& image, int x, int y, std::string_view utf8, Colour colour) {
  for_each_dot(utf8, [&](int column, int row) {
    fill(image, x + column * kTextScale, y + row * kTextScale, kTextScale, kTextScale, colour);
  });
}

void draw_text_up(Image& image, int x, int y, std::string_view utf8, Colour colour) {
  for_each_dot(utf8, [&](int column, int row) {
    fill(image, x + row * kTextScale, y - (column + 1) * kTextScale, kTextScale, kTextScale, colour);
  });
}

std::string shortened(std::string_view utf8, size_t most) {
  const std::string glyphs = glyphs_of(utf8);
  if (glyphs.size() <= most) return glyphs;
  const size_t kept = most < 3 ? 0 : most - 2, head = kept / 2;
  return glyphs.substr(0, head) + ".." + glyphs.substr(glyphs.size() - (kept - head));
}

}  // namespace tessera::report

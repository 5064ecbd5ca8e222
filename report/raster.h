#pragma once

#include <string>
#include <string_view>

#include "report/image.h"

/// Drawing on an Image: rectangles, lines, discs, and text in a built-in bitmap font. Coordinates are pixels
/// from the top left; what lies outside the image is not drawn. The same calls give the same pixels.

namespace tessera::report {

struct Colour {
  uint8_t red = 0, green = 0, blue = 0;
  bool operator==(const Colour&) const = default;
};

inline constexpr Colour kInk{27, 31, 36}, kSoft{91, 101, 112}, kRule{215, 220, 225}, kBand{185, 198, 210};
/// Sixteen colours that are told apart, and then the same again.
Colour palette(size_t index);
/// heat_colour (report/image.h); grey for NaN.
Colour heat(double value);

void fill(Image& image, int x, int y, int width, int height, Colour colour);
/// `thickness` pixels wide, ends included.
void draw_line(Image& image, int x0, int y0, int x1, int y1, Colour colour, int thickness = 1);
void draw_disc(Image& image, int x, int y, int radius, Colour colour);

/// Dots of the font are `kTextScale` pixels wide: glyphs are 10 x 14 pixels, 12 apart.
inline constexpr int kTextScale = 2, kTextHeight = 7 * kTextScale, kTextStep = 6 * kTextScale;
int text_width(std::string_view utf8);
/// (x, y) is the top left of the text. Code points that the font lacks are drawn as '?'.
void draw_text(Image& image, int x, int y, std::string_view utf8, Colour colour = kInk);
/// Text that reads from the bottom to the top; (x, y) is the bottom left of what it covers.
void draw_text_up(Image& image, int x, int y, std::string_view utf8, Colour colour = kInk);
/// At most `most` code points of the text; one that is longer loses its middle: "model..q_proj".
std::string shortened(std::string_view utf8, size_t most);

}  // namespace tessera::report

#include "report/category_chart.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/errors.h"

namespace tessera::report {
namespace {

Colour pixel(const Image& image, int x, int y) {
  const uint8_t* const rgb = &image.rgb[(size_t(y) * size_t(image.width) + size_t(x)) * 3];
  return {rgb[0], rgb[1], rgb[2]};
}
int64_t count(const Image& image, Colour colour) {
  int64_t pixels = 0;
  for (int y = 0; y < image.height; ++y)
    for (int x = 0; x < image.width; ++x) pixels += pixel(image, x, y) == colour;
  return pixels;
}

TEST(Raster, TextIsDrawnInBothDirections) {
  Image across(30, 30), up(30, 30);
  draw_text(across, 2, 3, "-");  // the fourth row of seven, five dots of 2 x 2 pixels
  draw_text_up(up, 2, 20, "-");
  EXPECT_EQ(count(across, kInk), 20);
  EXPECT_EQ(count(up, kInk), 20);
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(pixel(across, 2 + i, 3 + 6), kInk) << i;
    EXPECT_EQ(pixel(up, 2 + 6, 19 - i), kInk) << i;
  }
  EXPECT_EQ(text_width(""), 0);
  EXPECT_EQ(text_width("ab"), 22);
  EXPECT_EQ(text_width("\xC3\xA4"), text_width("?"));  // one code point
  EXPECT_EQ(shortened("model.layers.0.q_proj", 10), "mode..proj");
  EXPECT_EQ(shortened("q_proj", 10), "q_proj");
}

TEST(Raster, ShapesStayInTheImage) {
  Image image(8, 8);
  fill(image, -100, 6, 2'000'000'000, 2'000'000'000, {1, 2, 3});
  EXPECT_EQ(count(image, {1, 2, 3}), 16);
  draw_line(image, -3, -3, 12, 12, {4, 5, 6});
  EXPECT_EQ(count(image, {4, 5, 6}), 8);
  draw_disc(image, 0, 0, 2, {7, 8, 9});
  EXPECT_EQ(pixel(image, 0, 0), (Colour{7, 8, 9}));
}

TEST(Chart, RangesAreNeverEmpty) {
  const std::vector<double> none, one{3, 3}, values{1, NAN, 2, INFINITY};
  EXPECT_EQ(range_of(none).high, 1);
  EXPECT_EQ(range_of(one).low, 1.5);
  EXPECT_EQ(range_of(one).high, 4.5);
  EXPECT_EQ(range_of(values).low, 1);
  EXPECT_EQ(range_of(values).high, 2);
  EXPECT_EQ(range_of(values, true).low, 0);
  expect_error(
      [] {
        Chart({.text = {"t", "", ""}, .x = {1, 1}, .y = {0, 1}});
      },
      {"chart 't'", "an axis from 1 to 1"});
}

TEST(Chart, DataStandWhereTheAxesSay) {
  const ChartOptions options{.text = {"title", "x", "y"},
                             .x = {0, 10},
                             .y = {4, 0},
                             .legend = {{"a", {9, 9, 9}}},
                             .width = 100,
                             .height = 40};
  Chart chart(options);
  EXPECT_EQ(chart.x(0), chart.left());
  EXPECT_EQ(chart.x(10), chart.left() + 100);
  EXPECT_EQ(chart.y(0), chart.top());  // this axis runs down
  EXPECT_EQ(chart.y(4), chart.top() + 40);
  chart.cell(2, 3, 1, 2, {1, 2, 3});
  EXPECT_EQ(count(chart.image(), {1, 2, 3}), 10 * 10);
  EXPECT_EQ(pixel(chart.image(), chart.left() + 20, chart.top() + 10), (Colour{1, 2, 3}));
  EXPECT_EQ(count(chart.image(), {9, 9, 9}), 12 * 12);  // in the legend
  chart.point(NAN, 1, {5, 5, 5}), chart.bar(0, 1, INFINITY, {5, 5, 5});
  EXPECT_EQ(count(chart.image(), {5, 5, 5}), 0);
  const Chart again(options), other(options);
  EXPECT_EQ(again.image().rgb, other.image().rgb);
}

TEST(Chart, ALineBreaksAtAPointThatIsNotFinite) {
  Chart chart({.text = {"t", "", ""}, .x = {0, 4}, .y = {0, 2}, .width = 80, .height = 40});
  const std::vector<std::pair<double, double>> points{{0, 1}, {1, 1}, {2, NAN}, {3, 1}, {4, 1}};
  chart.line(points, {5, 5, 5});
  EXPECT_EQ(pixel(chart.image(), chart.x(0.5), chart.y(1)), (Colour{5, 5, 5}));
  EXPECT_EQ(pixel(chart.image(), chart.x(3.5), chart.y(1)), (Colour{5, 5, 5}));
  EXPECT_NE(pixel(chart.image(), chart.x(2), chart.y(1)), (Colour{5, 5, 5}));
}

TEST(Chart, BarsAndCellsHaveTheirColours) {
  Bars bars{.text = {"bars", "", "y"}, .categories = {"first", "second"}, .groups = {"a", "b"}};
  bars.bars[{0, 0}].value = 1, bars.bars[{1, 1}].value = 2, bars.bars[{1, 0}].value = NAN;
  const Image image = bar_chart(bars, "chance");
  // 640 x 400 for 2 x 2 bars of 0.4: 128 pixels wide, 200 and 400 high; 12 x 12 in the legend.
  EXPECT_EQ(count(image, palette(0)), 128 * 200 + 144);
  EXPECT_EQ(count(image, palette(1)), 128 * 400 + 144);
  const Image map = heat_chart({"map", "", ""}, {"r"}, {"c", "d"}, {{{0, 0}, 3.0}});
  EXPECT_GT(count(map, heat(0.5)), 96 * 100);  // one number is in the middle of the colours
  EXPECT_GT(count(map, heat(NAN)), 96 * 100);  // the other is unknown
}

}  // namespace
}  // namespace tessera::report

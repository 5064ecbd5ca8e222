#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "report/raster.h"

namespace tessera::report {

/// Of an axis; low > high is an axis that runs the other way.
struct Range {
  double low = 0, high = 1;
};
/// Of the values that are finite; of one value, or none, a range that is not empty. With `from_zero` it
/// contains 0.
Range range_of(std::span<const double> values, bool from_zero = false);

struct ChartText {
  std::string title, x_label, y_label;
};
struct ChartOptions {
  ChartText text;
  Range x, y;
  /// Names of categories in place of numbers, at 0.5, 1.5, ... of the axis; those of x are drawn upwards.
  std::vector<std::string> x_names = {}, y_names = {};
  std::vector<std::pair<std::string, Colour>> legend = {};  // right of the plotting area
  int width = 640, height = 400;                            // of the plotting area
};

/// A chart as an image of its own size: title, axes with ticks, and a legend are drawn by the constructor,
/// the data by what is called afterwards. Coordinates are those of the axes; what is not finite is not drawn.
class Chart {
 public:
  explicit Chart(const ChartOptions& options);

  int left() const { return left_; }
  int top() const { return top_; }
  int x(double value) const;
  int y(double value) const;

  /// Has a gap at points that are not finite.
  void line(std::span<const std::pair<double, double>> points, Colour colour);
  void point(double x, double y, Colour colour);
  /// From 0, or the end of the axis that is nearest to it, to y.
  void bar(double x0, double x1, double y, Colour colour);
  /// A horizontal stroke, such as the chance level of a bar.
  void level(double x0, double x1, double y, Colour colour = kInk);
  /// An error bar.
  void interval(double x, double low, double high);
  /// Fills x0 ... x1 by y0 ... y1.
  void cell(double x0, double x1, double y0, double y1, Colour colour);
  /// Text in the middle of such a cell.
  void cell_text(double x, double y, const std::string& text, Colour colour);

  Image& image() { return image_; }
  const Image& image() const { return image_; }

 private:
  struct Layout;
  Chart(const ChartOptions& options, const Layout& layout);
  void draw_axes(const ChartOptions& options);

  Range x_, y_;
  int left_, top_, width_, height_;
  Image image_;
};

/// Legend of a heat map: colours of five values from low to high.
std::vector<std::pair<std::string, Colour>> heat_legend(Range range);
/// A number of at most `digits` significant digits.
std::string number_text(double value, int digits = 4);

}  // namespace tessera::report

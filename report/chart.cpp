#include "report/chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "runtime/error.h"

namespace tessera::report {
namespace {

constexpr int kMargin = 12, kGap = 8, kLegendStep = 20, kTick = 5;
constexpr size_t kLongestName = 36;

/// Multiples of 1, 2 or 5 times a power of ten, about `most` of them.
std::vector<double> ticks_of(Range range, int most) {
  const double low = std::min(range.low, range.high), high = std::max(range.low, range.high);
  const double least = (high - low) / most, power = std::pow(10.0, std::floor(std::log10(least)));
  double step = 10 * power;
  for (const double factor : {5.0, 2.0, 1.0})
    if (factor * power >= least * (1 - 1e-9)) step = factor * power;
  std::vector<double> ticks;
  const double first = std::ceil(low / step - 1e-9);
  for (int i = 0; i <= 2 * most; ++i) {
    const double tick = (first + i) * step;
    if (tick > high + 1e-9 * (high - low)) break;
    ticks.push_back(tick == 0 ? 0 : tick);  // -0 is 0
  }
  return ticks;
}

/// Where labels of an axis are and what they say.
using Labels = std::vector<std::pair<double, std::string>>;
Labels labels_of(const std::vector<std::string>& names, Range range, int most) {
  Labels labels;
  for (size_t i = 0; i < names.size(); ++i)
    labels.emplace_back(double(i) + 0.5, shortened(names[i], kLongestName));
  if (names.empty())
    for (const double tick : ticks_of(range, most)) labels.emplace_back(tick, number_text(tick, 6));
  return labels;
}
Labels x_labels(const ChartOptions& options) {
  return labels_of(options.x_names, options.x, std::max(2, options.width / 110));
}
Labels y_labels(const ChartOptions& options) {
  return labels_of(options.y_names, options.y, std::max(2, options.height / 50));
}
int widest(const Labels& labels) {
  int width = 0;
  for (const auto& [at, text] : labels) width = std::max(width, text_width(text));
  return width;
}

}  // namespace

std::string number_text(double value, int digits) {
  return std::isfinite(value) ? fmt::format("{:.{}g}", value, digits) : "-";
}

Range range_of(std::span<const double> values, bool from_zero) {
  Range range{INFINITY, -INFINITY};
  for (const double value : values)
    if (std::isfinite(value)) range = {std::min(range.low, value), std::max(range.high, value)};
  if (range.low > range.high) return {};
  if (from_zero) range = {std::min(range.low, 0.0), std::max(range.high, 0.0)};
  if (range.low == range.high) {
    const double half = range.low == 0 ? 0.5 : std::abs(range.low) / 2;
    range = {range.low - half, range.high + half};
  }
  return range;
}

std::vector<std::pair<std::string, Colour>> heat_legend(Range range) {
  std::vector<std::pair<std::string, Colour>> legend;
  for (int i = 4; i >= 0; --i)
    legend.emplace_back(number_text(range.low + (range.high - range.low) * i / 4), heat(i / 4.0));
  return legend;
}

struct Chart::Layout {
  int left, top = kMargin + kTextHeight + kMargin, width, height;

  explicit Layout(const ChartOptions& options) {
    const ChartText& text = options.text;
    for (const Range axis : {options.x, options.y})
      check(axis.low != axis.high && std::isfinite(axis.high - axis.low), "chart '", text.title,
            "': an axis from ", axis.low, " to ", axis.high, "; expected a range (range_of)");
    const Labels across = x_labels(options);
    left =
        kMargin + (text.y_label.empty() ? 0 : kTextHeight + kGap) + widest(y_labels(options)) + kGap + kTick;
    const int below = options.x_names.empty() ? kTextHeight : widest(across);
    const int bottom = kTick + kGap + below + (text.x_label.empty() ? 0 : kGap + kTextHeight) + kMargin;
    // Half of the last tick's number reaches past the axis.
    int right = options.x_names.empty() ? widest(across) / 2 + kMargin : kMargin;
    for (const auto& [name, colour] : options.legend)
      right = std::max(right, 2 * kMargin + kTextHeight + kGap + text_width(shortened(name, kLongestName)));
    const int legend = kLegendStep * int(options.legend.size());
    width = std::max(left + options.width + right, 2 * kMargin + text_width(text.title));
    height = std::max(top + options.height + bottom, top + legend + kMargin);
  }
};

Chart::Chart(const ChartOptions& options) : Chart(options, Layout(options)) {}

Chart::Chart(const ChartOptions& options, const Layout& layout)
    : x_(options.x),
      y_(options.y),
      left_(layout.left),
      top_(layout.top),
      width_(options.width),
      height_(options.height),
      image_(layout.width, layout.height) {
  draw_axes(options);
}

void Chart::draw_axes(const ChartOptions& options) {
  const ChartText& text = options.text;
  const int right = left_ + width_, bottom = top_ + height_;
  draw_text(image_, kMargin, kMargin, text.title);
  fill(image_, left_ - 1, top_, 1, height_ + 1, kSoft);
  fill(image_, left_ - 1, bottom, width_ + 1, 1, kSoft);
  const Labels across = x_labels(options), up = y_labels(options);
  for (const auto& [at, label] : across) {
    const int place = x(at);
    fill(image_, place, bottom, 1, kTick, kSoft);
    if (options.x_names.empty())
      draw_text(image_, place - text_width(label) / 2, bottom + kTick + kGap, label, kSoft);
    else
      draw_text_up(image_, place - kTextHeight / 2, bottom + kTick + kGap + text_width(label), label, kSoft);
  }
  for (const auto& [at, label] : up) {
    const int place = y(at);
    fill(image_, left_ - kTick, place, kTick, 1, kSoft);
    draw_text(image_, left_ - kTick - kGap - text_width(label) + kTextScale, place - kTextHeight / 2, label,
              kSoft);
  }
  if (!text.x_label.empty()) {
    const int below = options.x_names.empty() ? kTextHeight : widest(across);
    draw_text(image_, left_ + std::max(0, (width_ - text_width(text.x_label)) / 2),
              bottom + kTick + kGap + below + kGap, text.x_label);
  }
  if (!text.y_label.empty())
    draw_text_up(image_, kMargin, std::min(bottom, top_ + (height_ + text_width(text.y_label)) / 2),
                 text.y_label);
  int line = top_;
  for (const auto& [name, colour] : options.legend) {
    const int place = right + kMargin;
    fill(image_, place, line, kTextHeight, kTextHeight, kRule);
    fill(image_, place + 1, line + 1, kTextHeight - 2, kTextHeight - 2, colour);
    draw_text(image_, place + kTextHeight + kGap, line, shortened(name, kLongestName));
    line += kLegendStep;
  }
}

int Chart::x(double value) const {
  return left_ + int(std::lround((value - x_.low) / (x_.high - x_.low) * width_));
}
int Chart::y(double value) const {
  return top_ + height_ - int(std::lround((value - y_.low) / (y_.high - y_.low) * height_));
}

void Chart::line(std::span<const std::pair<double, double>> points, Colour colour) {
  const std::pair<double, double>* former = nullptr;
  for (const auto& at : points) {
    const bool is_known = std::isfinite(at.first) && std::isfinite(at.second);
    if (is_known && former)
      draw_line(image_, x(former->first), y(former->second), x(at.first), y(at.second), colour, 2);
    former = is_known ? &at : nullptr;
  }
}

void Chart::point(double at_x, double at_y, Colour colour) {
  if (std::isfinite(at_x) && std::isfinite(at_y)) draw_disc(image_, x(at_x), y(at_y), 3, colour);
}

void Chart::bar(double x0, double x1, double value, Colour colour) {
  if (!std::isfinite(value)) return;
  const double base = std::clamp(0.0, std::min(y_.low, y_.high), std::max(y_.low, y_.high));
  cell(x0, x1, std::min(base, value), std::max(base, value), colour);
}

void Chart::level(double x0, double x1, double value, Colour colour) {
  if (std::isfinite(value)) fill(image_, x(x0), y(value) - 1, x(x1) - x(x0), 3, colour);
}

void Chart::interval(double at, double low, double high) {
  if (!std::isfinite(low) || !std::isfinite(high)) return;
  fill(image_, x(at), y(high), 1, y(low) - y(high) + 1, kInk);
  for (const double end : {low, high}) fill(image_, x(at) - 3, y(end), 7, 1, kInk);
}

void Chart::cell(double x0, double x1, double y0, double y1, Colour colour) {
  const int top = std::min(y(y0), y(y1)), bottom = std::max(y(y0), y(y1));
  fill(image_, x(x0), top, x(x1) - x(x0), bottom - top, colour);
}

void Chart::cell_text(double at_x, double at_y, const std::string& text, Colour colour) {
  draw_text(image_, x(at_x) - text_width(text) / 2, y(at_y) - kTextHeight / 2, text, colour);
}

}  // namespace tessera::report

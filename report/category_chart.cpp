#include "report/category_chart.h"

#include <algorithm>
#include <cmath>

namespace tessera::report {

Image bar_chart(const Bars& bars, const std::string& chance) {
  std::vector<double> values;
  bool has_chance = false;
  for (const auto& [key, bar] : bars.bars) {
    values.insert(values.end(), {bar.value, bar.chance, bar.low, bar.high});
    has_chance = has_chance || std::isfinite(bar.chance);
  }
  const auto categories = int(bars.categories.size()), groups = int(bars.groups.size());
  ChartOptions options{.text = bars.text,
                       .x = {0, double(categories)},
                       .y = range_of(values, true),
                       .x_names = bars.categories,
                       .width = std::max(640, categories * std::max(24, 12 * groups))};
  for (size_t group = 0; group < bars.groups.size(); ++group)
    options.legend.emplace_back(bars.groups[group], palette(group));
  if (has_chance) options.legend.emplace_back(chance, kInk);
  Chart chart(options);
  for (const auto& [key, bar] : bars.bars) {
    const auto& [category, group] = key;
    const double x0 = double(category) + 0.1 + 0.8 * double(group) / groups, x1 = x0 + 0.8 / groups;
    chart.bar(x0, x1, bar.value, palette(group));
    chart.level(x0, x1, bar.chance, kInk);
    chart.interval((x0 + x1) / 2, bar.low, bar.high);
  }
  return std::move(chart.image());
}

Image heat_chart(const ChartText& text, const std::vector<std::string>& rows,
                 const std::vector<std::string>& columns, const Cells& cells) {
  constexpr int kCellWidth = 96, kCellHeight = 24;
  std::vector<double> values;
  for (const auto& [key, value] : cells) values.push_back(value);
  const Range range = range_of(values);
  Chart chart({.text = text,
               .x = {0, double(columns.size())},
               .y = {double(rows.size()), 0},
               .x_names = columns,
               .y_names = rows,
               .legend = heat_legend(range),
               .width = kCellWidth * int(columns.size()),
               .height = std::max(kCellHeight * int(rows.size()), 5 * kCellHeight)});
  for (size_t r = 0; r < rows.size(); ++r)
    for (size_t c = 0; c < columns.size(); ++c) {
      const auto found = cells.find({r, c});
      const double value = found == cells.end() ? Bar::kUnknown : found->second;
      const double shade = (value - range.low) / (range.high - range.low);
      chart.cell(double(c), double(c + 1), double(r), double(r + 1), heat(shade));
      chart.cell_text(double(c) + 0.5, double(r) + 0.5, number_text(value, 3),
                      shade > 0.55 ? Colour{255, 255, 255} : kInk);
    }
  return std::move(chart.image());
}

}  // namespace tessera::report

#pragma once

#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "report/chart.h"

/// Charts of categories: bars and heat maps. What is NaN is unknown.

namespace tessera::report {

struct Bar {
  static constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
  double value = kUnknown;
  double chance = kUnknown;                // a stroke across the bar
  double low = kUnknown, high = kUnknown;  // its interval
};
/// A bar per category and group; a group has one colour.
struct Bars {
  ChartText text;
  std::vector<std::string> categories, groups;
  std::map<std::pair<size_t, size_t>, Bar> bars = {};  // by (category, group)
};
/// `chance`: the stroke's name in the legend.
Image bar_chart(const Bars& bars, const std::string& chance);

/// By (row, column).
using Cells = std::map<std::pair<size_t, size_t>, double>;
/// A cell per row and column with its number in it; the colours span the numbers that there are, and a cell
/// without one is grey.
Image heat_chart(const ChartText& text, const std::vector<std::string>& rows,
                 const std::vector<std::string>& columns, const Cells& cells);

}  // namespace tessera::report

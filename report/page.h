#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "report/facts.h"

namespace tessera::report {

/// A line of a chart.
struct Series {
  std::string name;
  /// (x, y). The line has a gap where y is not finite; a point whose x is not finite is left out.
  std::vector<std::pair<double, double>> points;
  bool dashed = false;
  /// Series of one number belong together; below 0: the next one. Six numbers have a colour of their own, the
  /// next six the same colours dashed, six more dotted.
  int colour = -1;
  std::vector<double> spread = {};  // of each point: half the length of its error bar; empty: no bars
};

/// A self-contained HTML page, built from top to bottom and opened from disk: no network, no other file.
/// Charts are drawn by Chart.js, which is inlined; a build without it shows the charts' data as tables and
/// says so.
class Page {
 public:
  /// `chart_js`: the library that draws the charts; "" is a build without it.
  explicit Page(std::string title, const char* chart_js = kChartJs)
      : title_(std::move(title)), chart_js_(chart_js) {}
  void heading(const std::string& text);
  void paragraph(const std::string& text);
  void table(const std::vector<std::string>& header, const std::vector<std::vector<std::string>>& rows);
  void chart(const std::string& title, const std::string& x_label, const std::string& y_label,
             const std::vector<Series>& series, bool logarithmic_x = false);
  /// A bar chart: one group of bars per label. `spreads`: half the lengths of the error bars, as `groups`;
  /// empty: none.
  void bars(const std::string& title, const std::string& y_label, const std::vector<std::string>& labels,
            const std::vector<std::pair<std::string, std::vector<double>>>& groups,
            const std::vector<std::vector<double>>& spreads = {});
  void image(const std::string& png, const std::string& caption);
  /// Several pictures side by side: (PNG bytes, caption).
  void images(const std::vector<std::pair<std::string, std::string>>& pictures);
  std::string html() const;
  void write(const std::filesystem::path& path) const;

 private:
  std::string title_, body_;
  const char* chart_js_;
  int charts_ = 0;
  bool error_bars_ = false;
};

}  // namespace tessera::report

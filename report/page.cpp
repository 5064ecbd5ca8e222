#include "report/page.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "io/file.h"
#include "io/utf8.h"
#include "report/image.h"

namespace tessera::report {
namespace {

using nlohmann::json;

constexpr const char* kStyle = R"css(
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#5b6570;--line:#d7dce1;--paper:#fff;--panel:#f6f8fa}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ec;--soft:#98a2ad;--line:#343b43;--paper:#14181c;--panel:#1d2329}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:60rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0 0 .2rem}h2{font-size:1.1rem;margin:2rem 0 .5rem}
p{color:var(--soft);margin:.3rem 0}table{border-collapse:collapse;margin:.6rem 0;font-variant-numeric:tabular-nums}
th,td{padding:.2rem .8rem .2rem 0;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}
td:nth-child(n+2){font-family:ui-monospace,monospace;font-size:.9em}td.long{overflow-wrap:anywhere}
figure{margin:.8rem 0;background:var(--panel);padding:.8rem;border-radius:6px}figcaption{color:var(--soft);font-size:.9em}
.row img{width:100%}.row{display:flex;flex-wrap:wrap;gap:1rem}.row figure{flex:1;min-width:18rem}img{max-width:100%;background:#fff}
.plot{height:22rem;position:relative}
)css";

/// Error bars: a plugin for Chart.js that draws what a dataset has as its "spread"; nothing where that is
/// null or 0: the mean of one run would seem to be without noise.
constexpr const char* kErrorBars = R"js(Chart.register({id:'spread',afterDatasetsDraw(chart){
chart.data.datasets.forEach((set,index)=>{if(!set.spread||!chart.isDatasetVisible(index))return;
const pen=chart.ctx,y=chart.scales.y;pen.save();pen.strokeStyle=set.inkColor;pen.lineWidth=1.3;
chart.getDatasetMeta(index).data.forEach((point,i)=>{const half=set.spread[i];if(!half)return;
const value=set.data[i].y??set.data[i];
const low=y.getPixelForValue(value-half),high=y.getPixelForValue(value+half);pen.beginPath();
pen.moveTo(point.x,low);pen.lineTo(point.x,high);
for(const end of[low,high]){pen.moveTo(point.x-4,end);pen.lineTo(point.x+4,end)}pen.stroke()});pen.restore()})}});)js";

constexpr const char* kPalette[] = {"#2171b5", "#d94801", "#238b45", "#6a51a3", "#b30000", "#525252"};

/// Dashes and gaps of a line, in pixels: those of the second and third six lines tell them from the first
/// six.
std::vector<int> dashes_of(const Series& line, size_t colour) {
  constexpr int kDashed = 1, kPatterns = 3;
  const std::vector<int> patterns[kPatterns] = {{}, {6, 4}, {2, 3}};
  return patterns[line.dashed ? kDashed : colour / std::size(kPalette) % kPatterns];
}

/// Whether a word of the text is longer than any number or name: it may be broken to keep the table narrow.
/// Other words stay whole, since half a number reads as another one.
bool has_long_word(const std::string& text) {
  constexpr size_t kLongest = 24;
  size_t length = 0;
  for (const char c : text) {
    length = c == ' ' ? 0 : length + 1;
    if (length > kLongest) return true;
  }
  return false;
}

std::string escape(const std::string& text) {
  std::string out;
  for (const char c : io::utf8_text(text)) {
    switch (c) {
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '&':
        out += "&amp;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

/// JSON inside a <script>: "</script" would end it, "<!--<script" would keep it from ending.
std::string script_json(const json& value) {
  std::string out;
  for (const char c : io::json_text(value)) out += c == '<' ? std::string("\\u003c") : std::string(1, c);
  return out;
}

/// Lets the axis reach the ends of an error bar; on its own it would end at the points.
void widen(json& axis, double value, double half) {
  if (!std::isfinite(value) || !std::isfinite(half)) return;
  axis["suggestedMin"] = std::min(axis.value("suggestedMin", value - half), value - half);
  axis["suggestedMax"] = std::max(axis.value("suggestedMax", value + half), value + half);
}

}  // namespace

void Page::heading(const std::string& text) {
  body_ += "<h2>" + escape(text) + "</h2>\n";
}
void Page::paragraph(const std::string& text) {
  body_ += "<p>" + escape(text) + "</p>\n";
}

void Page::table(const std::vector<std::string>& header, const std::vector<std::vector<std::string>>& rows) {
  body_ += "<table>";
  if (!header.empty()) {
    body_ += "<tr>";
    for (const std::string& cell : header) body_ += "<th>" + escape(cell) + "</th>";
    body_ += "</tr>";
  }
  for (const auto& row : rows) {
    body_ += "<tr>";
    for (const std::string& cell : row)
      body_ += (has_long_word(cell) ? "<td class=\"long\">" : "<td>") + escape(cell) + "</td>";
    body_ += "</tr>\n";
  }
  body_ += "</table>\n";
}

void Page::chart(const std::string& title, const std::string& x_label, const std::string& y_label,
                 const std::vector<Series>& series, bool logarithmic_x) {
  heading(title);
  if (!*chart_js_) {
    paragraph(
        "This build has no Chart.js (package libjs-chart.js): the data of the chart follows as a table.");
    std::vector<std::vector<std::string>> rows;
    for (const Series& line : series)
      for (size_t i = 0; i < line.points.size(); ++i) {
        const auto& [x, y] = line.points[i];
        rows.push_back({line.name, fmt::format("{:g}", x),
                        fmt::format("{:.6g}", y) +
                            (line.spread.empty() ? "" : fmt::format(" +- {:.3g}", line.spread[i]))});
      }
    table({"series", x_label, y_label}, rows);
    return;
  }
  json datasets = json::array();
  json y_axis = {{"title", {{"display", true}, {"text", y_label}}}};
  size_t colour = 0;
  for (const Series& line : series) {
    json points = json::array(), spread = json::array();
    bool has_gap = false;
    for (size_t i = 0; i < line.points.size(); ++i) {
      const auto& [x, y] = line.points[i];
      if (!std::isfinite(x)) continue;
      const bool is_known = std::isfinite(y);
      has_gap = has_gap || !is_known;
      points.push_back({{"x", x}, {"y", is_known ? json(y) : json()}});  // null ends the line there
      if (line.spread.empty()) continue;
      spread.push_back(is_known ? json(line.spread[i]) : json());
      widen(y_axis, y, line.spread[i]);
    }
    const size_t own = line.colour >= 0 ? size_t(line.colour) : colour++;
    const char* const paint = kPalette[own % std::size(kPalette)];
    datasets.push_back({{"label", line.name},
                        {"data", points},
                        {"borderColor", paint},
                        {"backgroundColor", paint},
                        // A point between two gaps has no line that would show it.
                        {"pointRadius", line.points.size() > 60 && !has_gap ? 0 : 2},
                        {"borderWidth", 1.5},
                        {"showLine", true},
                        {"borderDash", dashes_of(line, own)}});
    if (line.spread.empty()) continue;
    datasets.back().update({{"spread", spread}, {"inkColor", paint}});
    error_bars_ = true;
  }
  const json config = {{"type", "scatter"},
                       {"data", {{"datasets", datasets}}},
                       {"options",
                        {{"animation", false},
                         {"maintainAspectRatio", false},
                         {"scales",
                          {{"x",
                            {{"type", logarithmic_x ? "logarithmic" : "linear"},
                             {"title", {{"display", true}, {"text", x_label}}}}},
                           {"y", y_axis}}}}}};
  body_ += fmt::format(
      "<figure><div class=\"plot\"><canvas id=\"chart{0}\"></canvas></div></figure>\n"
      "<script>new Chart(document.getElementById('chart{0}'),{1});</script>\n",
      charts_++, script_json(config));
}

void Page::bars(const std::string& title, const std::string& y_label, const std::vector<std::string>& labels,
                const std::vector<std::pair<std::string, std::vector<double>>>& groups,
                const std::vector<std::vector<double>>& spreads) {
  heading(title);
  if (!*chart_js_) {
    std::vector<std::string> header{""};
    for (const auto& group : groups) header.push_back(group.first);
    std::vector<std::vector<std::string>> rows;
    for (size_t i = 0; i < labels.size(); ++i) {
      rows.push_back({labels[i]});
      for (size_t g = 0; g < groups.size(); ++g)
        rows.back().push_back(fmt::format("{:.4g}", groups[g].second[i]) +
                              (spreads.empty() ? "" : fmt::format(" +- {:.2g}", spreads[g][i])));
    }
    return table(header, rows);
  }
  json datasets = json::array();
  json y_axis = {{"title", {{"display", true}, {"text", y_label}}}};
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto& [name, values] = groups[g];
    datasets.push_back(
        {{"label", name}, {"data", values}, {"backgroundColor", kPalette[g % std::size(kPalette)]}});
    if (spreads.empty()) continue;
    json spread = json::array();
    for (size_t i = 0; i < values.size(); ++i) {
      spread.push_back(std::isfinite(values[i]) ? json(spreads[g][i]) : json());
      widen(y_axis, values[i], spreads[g][i]);
    }
    datasets.back().update({{"spread", spread}, {"inkColor", "#808890"}});
    error_bars_ = true;
  }
  const json config = {
      {"type", "bar"},
      {"data", {{"labels", labels}, {"datasets", datasets}}},
      {"options", {{"animation", false}, {"maintainAspectRatio", false}, {"scales", {{"y", y_axis}}}}}};
  body_ += fmt::format(
      "<figure><div class=\"plot\"><canvas id=\"chart{0}\"></canvas></div></figure>\n"
      "<script>new Chart(document.getElementById('chart{0}'),{1});</script>\n",
      charts_++, script_json(config));
}

void Page::image(const std::string& png, const std::string& caption) {
  body_ += "<figure><img alt=\"" + escape(caption) + "\" src=\"data:image/png;base64," + base64(png) +
           "\"><figcaption>" + escape(caption) + "</figcaption></figure>\n";
}

void Page::images(const std::vector<std::pair<std::string, std::string>>& pictures) {
  body_ += "<div class=\"row\">\n";
  for (const auto& [png, caption] : pictures) image(png, caption);
  body_ += "</div>\n";
}

std::string Page::html() const {
  std::string page =
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n<title>" +
      escape(title_) + "</title>\n<style>" + kStyle + "</style>\n";
  if (charts_ > 0)
    page += std::string("<script>") + chart_js_ + (error_bars_ ? "\n" : "") +
            (error_bars_ ? kErrorBars : "") + "</script>\n";
  return page + "</head><body>\n<h1>" + escape(title_) + "</h1>\n" + body_ + "</body></html>\n";
}

void Page::write(const std::filesystem::path& path) const {
  io::write_file(path.string(), html());
}

}  // namespace tessera::report

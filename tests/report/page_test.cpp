#include "report/page.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "report/facts.h"

namespace tessera::report {
namespace {

using nlohmann::json;

constexpr const char* kDrawer = "/* draws */";

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++count;
  return count;
}

/// The settings that the page gives chart number `index`.
json chart_of(const std::string& page, int index) {
  const std::string before = "new Chart(document.getElementById('chart" + std::to_string(index) + "'),";
  const size_t begin = page.find(before), end = page.find(");</script>", begin);
  EXPECT_NE(begin, std::string::npos);
  return json::parse(page.substr(begin + before.size(), end - begin - before.size()));
}

TEST(Page, EscapesWhateverItIsGiven) {
  const std::string bad = "<b>&\"</script><!--<script>alert(1)</script>",
                    good = "&lt;b&gt;&amp;&quot;&lt;/script&gt;";
  Page report(bad, kDrawer);
  report.heading(bad);
  report.paragraph(bad);
  report.table({bad}, {{bad, bad}});
  report.image("png", bad);
  report.chart(bad, bad, bad, {{bad, {{1, 2}}}});
  report.bars(bad, bad, {bad}, {{bad, {1.0}}});
  const std::string page = report.html();
  // Title, h1 and heading, paragraph, three cells, alt and caption, the headings of two charts.
  EXPECT_EQ(count_of(page, good), 11u);
  EXPECT_EQ(count_of(page, "<b>"), 0u);
  EXPECT_EQ(count_of(page, "<script>"), 3u);  // the library and two charts
  EXPECT_EQ(count_of(page, "</script>"), 3u);
  // The texts come out of the JSON as they went in.
  EXPECT_EQ(chart_of(page, 0)["data"]["datasets"][0]["label"], bad);
  EXPECT_EQ(chart_of(page, 1)["data"]["labels"][0], bad);
}

TEST(Page, EighteenLinesDifferInColourOrDashes) {
  std::vector<Series> lines;
  for (int i = 0; i < 18; ++i) lines.push_back({.name = std::to_string(i), .points = {{1, 2}}, .colour = i});
  Page report("t", kDrawer);
  report.chart("c", "x", "y", lines);
  const json chart = chart_of(report.html(), 0);
  std::set<std::string> looks;
  for (const json& line : chart["data"]["datasets"])
    looks.insert(line["borderColor"].dump() + line["borderDash"].dump());
  EXPECT_EQ(looks.size(), 18u);
}

TEST(Page, OnlyLongWordsOfATableAreBroken) {
  const std::string path = "runs/a-name-that-is-longer-than-numbers-are";
  Page report("t", kDrawer);
  report.table({"run", "loss"}, {{"a b", "12345.67890 +- 0.0012345"}, {"c", "in " + path}});
  const std::string page = report.html();
  EXPECT_NE(page.find("<td>12345.67890 +- 0.0012345</td>"), std::string::npos);
  EXPECT_NE(page.find("<td class=\"long\">in " + path + "</td>"), std::string::npos);
}

TEST(Page, ABarWithoutAValueHasNoErrorBar) {
  Page report("t", kDrawer);
  report.bars("d", "y", {"one", "two"}, {{"g", {1.5, std::nan("")}}}, {{0.25, 0.5}});
  const json bars = chart_of(report.html(), 0)["data"]["datasets"][0];
  EXPECT_EQ(bars["data"], json::parse("[1.5, null]"));
  EXPECT_EQ(bars["spread"], json::parse("[0.25, null]"));
}

TEST(Page, ALineBreaksWhereItsValueIsNotFinite) {
  const double nan = std::nan("");
  Page report("t", kDrawer);
  Series bars{"bars", {{1, 0.5}, {2, nan}, {3, 0.25}}}, many{"many", {}}, broken{"broken", {}};
  bars.spread = {0.1, nan, 0.2};
  for (int i = 0; i < 100; ++i)
    many.points.emplace_back(i, i), broken.points.emplace_back(i, i % 2 ? i : nan);
  report.chart("c", "x", "y", {bars, many, broken});
  const json chart = chart_of(report.html(), 0), sets = chart["data"]["datasets"];
  EXPECT_EQ(sets[0]["data"], json::parse(R"([{"x":1.0,"y":0.5},{"x":2.0,"y":null},{"x":3.0,"y":0.25}])"));
  EXPECT_EQ(sets[0]["spread"], json::parse("[0.1, null, 0.2]"));
  EXPECT_FALSE(sets[0].contains("spanGaps"));  // Chart.js draws across them only if asked
  EXPECT_EQ(sets[1]["pointRadius"], 0);
  EXPECT_EQ(sets[2]["pointRadius"], 2) << "points between two gaps are not seen";
}

TEST(Page, ChartsAreValidJsonOfNumbersAndGaps) {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::nan("");
  Page report("t", kDrawer);
  report.chart("c", "x", "y", {{"a", {{1, 0.1}, {2, nan}, {3, inf}, {nan, 4}, {5, -1e300}}}, {"b", {}, true}},
               true);
  report.bars("d", "y", {"one", "two"}, {{"g", {1.5, nan}}});
  const json chart = chart_of(report.html(), 0);
  EXPECT_EQ(chart["type"], "scatter");
  EXPECT_EQ(chart["data"]["datasets"][0]["data"],
            json::parse(R"([{"x":1.0,"y":0.1},{"x":2.0,"y":null},{"x":3.0,"y":null},{"x":5.0,"y":-1e300}])"));
  EXPECT_EQ(chart["data"]["datasets"][1]["data"], json::array());
  EXPECT_EQ(chart["data"]["datasets"][1]["borderDash"].size(), 2u);
  EXPECT_EQ(chart["options"]["scales"]["x"]["type"], "logarithmic");
  EXPECT_EQ(chart["options"]["scales"]["y"]["title"]["text"], "y");
  const json bars = chart_of(report.html(), 1);
  EXPECT_EQ(bars["data"]["datasets"][0]["data"], json::parse("[1.5, null]"));
}

TEST(Page, TextThatIsNoUtf8StillGivesAPage) {
  Page report("t", kDrawer);
  report.chart("c", "x", "y", {{"bad \xFF byte", {{1, 1}}}});
  EXPECT_TRUE(chart_of(report.html(), 0)["data"]["datasets"][0]["label"].is_string());
}

TEST(Page, WithoutChartJsShowsTables) {
  Page report("t", "");
  report.chart("c", "steps", "nats", {{"loss", {{10, 0.5}, {20, 0.25}}}});
  report.bars("d", "y", {"one", "two"}, {{"g", {1.5, 2.5}}});
  const std::string page = report.html();
  EXPECT_EQ(page.find("<script"), std::string::npos);
  EXPECT_EQ(page.find("<canvas"), std::string::npos);
  for (const char* part :
       {"libjs-chart.js", "<th>steps</th>", "<th>nats</th>", "<td>loss</td><td>10</td><td>0.5</td>",
        "<td>20</td><td>0.25</td>", "<td>one</td><td>1.5</td>", "<td>two</td><td>2.5</td>"})
    EXPECT_NE(page.find(part), std::string::npos) << part;
}

TEST(Page, IsSelfContainedAndInlinesTheLibraryOnlyForCharts) {
  Page plain("t", kDrawer), drawn("t", kDrawer);
  plain.paragraph("no chart");
  drawn.chart("c", "x", "y", {{"a", {{1, 1}}}});
  EXPECT_EQ(plain.html().find(kDrawer), std::string::npos);
  EXPECT_NE(drawn.html().find(kDrawer), std::string::npos);
  for (const std::string& page : {plain.html(), drawn.html()}) {
    EXPECT_TRUE(page.starts_with("<!doctype html>"));
    EXPECT_TRUE(page.ends_with("</body></html>\n"));
    for (const char* outside : {"src=\"http", "href=", "@import", "url("})
      EXPECT_EQ(page.find(outside), std::string::npos) << outside;
  }
}

TEST(Page, TheLibraryOfTheBuildDoesNotEndItsScript) {
  EXPECT_EQ(std::string(kChartJs).find("</script"), std::string::npos);
}

TEST(Page, PicturesAreInlined) {
  Page report("t");
  report.images({{"foobar", "left"}, {"fooba", "right"}});
  const std::string page = report.html();
  EXPECT_NE(page.find("data:image/png;base64,Zm9vYmFy"), std::string::npos);
  EXPECT_NE(page.find("data:image/png;base64,Zm9vYmE="), std::string::npos);
}

}  // namespace
}  // namespace tessera::report

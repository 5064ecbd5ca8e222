#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "io/file.h"
#include "io/utf8.h"
#include "report/facts.h"
#include "report/image.h"
#include "report/page.h"
#include "sparsity/gradient_tasks.h"

namespace tessera::sparsity {
namespace {

using nlohmann::json;
using report::TableCell;

/// The figures of a module that are least, largest and mean over batches, by their names in files.
struct Figure {
  const char* name;
  OverBatches ModuleGradient::*of;
};
constexpr Figure kFigures[] = {{"rows", &ModuleGradient::all_rows},
                               {"rows_read", &ModuleGradient::read_rows},
                               {"element_sparsity", &ModuleGradient::zero_elements},
                               {"element_sparsity_read", &ModuleGradient::zero_elements_read},
                               {"row_sparsity", &ModuleGradient::zero_rows},
                               {"row_sparsity_read", &ModuleGradient::zero_rows_read}};

void add_cells(std::vector<TableCell>& row, const OverBatches& figure) {
  if (figure.batches == 0) {
    row.insert(row.end(), 3, TableCell());
    return;
  }
  row.insert(row.end(), {figure.mean(), figure.largest, figure.least});
}

json to_json(const OverBatches& figure) {
  if (figure.batches == 0) return nullptr;
  return {{"avg", figure.mean()}, {"max", figure.largest}, {"min", figure.least}};
}

json json_of(const GradientTasks& what, const std::vector<TaskGradients>& all) {
  json tasks = json::array();
  for (const TaskGradients& task : all) {
    json modules = json::array();
    for (const ModuleGradient& module : task.modules) {
      json one = {
          {"module", module.name}, {"batches", module.read_rows.batches}, {"columns", module.columns}};
      for (const Figure& figure : kFigures) one[figure.name] = to_json(module.*figure.of);
      for (size_t i = 0; i < module.energy.size(); ++i)
        one["energy"][what.options.top[i].text()] = to_json(module.energy[i]);
      one["magnitudes"]["zeros"] = module.magnitudes.zeros();
      for (int e = Binades::kLowest; e < Binades::kHighest; ++e)
        if (module.magnitudes.count(e) > 0)
          one["magnitudes"]["binades"].push_back({e, module.magnitudes.count(e)});
      modules.push_back(one);
    }
    tasks.push_back({{"task", task.name},
                     {"batches", task.batches},
                     {"tokens", task.tokens},
                     {"loss", task.loss},
                     {"drawn_parameters", task.fresh},
                     {"modules", modules}});
  }
  return {{"model", what.model},
          {"seed", what.seed},
          {"batch", what.batch},
          {"max_length", what.max_length},
          {"padding", what.padding == Padding::max_length ? "max"
                      : what.padding == Padding::longest  ? "longest"
                                                          : "none"},
          {"dropout", what.dropout},
          {"dtype", name_of(what.dtype)},
          {"tolerance", what.options.tolerance},
          {"build", report::build_facts()},
          {"tasks", tasks}};
}

// ---- pictures ----

/// From near-white, 0, to near-black, 1; NaN is grey.
void paint(report::Image& image, int x, int y, int width, int height, double value) {
  uint8_t colour[3] = {200, 200, 200};
  if (!std::isnan(value)) report::heat_colour(std::clamp(value, 0.0, 1.0), colour);
  for (int j = 0; j < height; ++j)
    for (int i = 0; i < width; ++i) image.set(x + i, y + j, colour[0], colour[1], colour[2]);
}

/// A line per module, a column per task.
template <class Value>
report::Image map_of_tasks(const std::vector<TaskGradients>& all, Value&& value) {
  constexpr int kWidth = 40, kHeight = 8;
  const std::vector<ModuleGradient>& modules = all.back().modules;
  report::Image image(kWidth * int(all.size()), kHeight * int(modules.size()));
  for (size_t t = 0; t < all.size(); ++t)
    for (size_t m = 0; m < modules.size(); ++m) {
      const auto found = std::ranges::find(all[t].modules, modules[m].name, &ModuleGradient::name);
      paint(image, kWidth * int(t), kHeight * int(m), kWidth, kHeight,
            found == all[t].modules.end() ? std::nan("") : value(*found));
    }
  return image;
}

/// A line per module, over the tokens of the first batch: norms on a logarithmic scale, from a millionth of
/// the module's largest to the largest. Of more tokens than pixels the largest of each pixel.
report::Image map_of_rows(const TaskGradients& task) {
  constexpr size_t kMostWidth = 1024;
  constexpr int kHeight = 8;
  size_t tokens = 1;
  for (const ModuleGradient& module : task.modules) tokens = std::max(tokens, module.first_norms.size());
  const size_t width = std::min(kMostWidth, tokens);
  report::Image image(int(width), kHeight * int(task.modules.size()));
  for (size_t m = 0; m < task.modules.size(); ++m) {
    const std::vector<double>& norms = task.modules[m].first_norms;
    double most = 0;
    for (const double norm : norms)
      if (norm > most) most = norm;
    for (size_t x = 0; x < width; ++x) {
      double largest = std::nan("");
      for (size_t r = x * tokens / width; r < std::min(norms.size(), (x + 1) * tokens / width); ++r)
        if (!(largest >= norms[r])) largest = norms[r];
      const double value = largest > 0 ? 1 + std::log10(largest / most) / 6 : largest;
      paint(image, int(x), kHeight * int(m), 1, kHeight, value);
    }
  }
  return image;
}

void add_pictures(report::Page& page, const GradientTasks& what, const std::vector<TaskGradients>& all) {
  page.heading("Heat maps");
  if (!report::has_png()) {
    page.paragraph("This build has no libpng: install libpng-dev and build again for pictures.");
    return;
  }
  std::string names;
  for (const TaskGradients& task : all) names += (names.empty() ? "" : ", ") + task.name;
  page.paragraph("Lines are modules in the order of the tables, from the top; columns are the tasks " +
                 names + ". White is 0, black is 1, grey is no value.");
  std::vector<std::pair<std::string, std::string>> pictures;
  const auto add = [&](const std::string& caption, auto&& value) {
    pictures.emplace_back(report::encode_png(map_of_tasks(all, value)), caption);
  };
  add("row sparsity, all rows", [](const ModuleGradient& m) { return m.zero_rows.mean(); });
  add("row sparsity, read rows", [](const ModuleGradient& m) { return m.zero_rows_read.mean(); });
  add("element sparsity, read rows", [](const ModuleGradient& m) { return m.zero_elements_read.mean(); });
  for (size_t i = 0; i < what.options.top.size(); ++i)
    add("energy in the top " + what.options.top[i].text(),
        [&](const ModuleGradient& m) { return i < m.energy.size() ? m.energy[i].mean() : std::nan(""); });
  page.images(pictures);
  page.paragraph(
      "Norms of the rows of the first batch: lines are modules, from left to right its tokens, one text "
      "after the other. Black is the module's largest norm, white a millionth of it or less, grey a row "
      "that nothing reads.");
  for (const TaskGradients& task : all)
    if (task.name != kAllTasks) page.image(report::encode_png(map_of_rows(task)), task.name);
}

// ---- the page ----

/// "0.123 (0.1 ... 0.2)".
std::string shown(const OverBatches& figure) {
  if (figure.batches == 0) return "";
  if (figure.least == figure.largest) return fmt::format("{:.4g}", figure.mean());
  return fmt::format("{:.4g} ({:.4g} ... {:.4g})", figure.mean(), figure.least, figure.largest);
}

void add_table(report::Page& page, const GradientTasks& what, const TaskGradients& task) {
  page.heading(task.name == kAllTasks ? "All tasks" : "Task " + task.name);
  std::vector<std::string> header = {"module",       "rows read", "elements",
                                     "of read rows", "rows",      "of read rows"};
  for (const TopRows& top : what.options.top) header.push_back("energy, top " + top.text());
  std::vector<std::vector<std::string>> rows;
  for (const ModuleGradient& module : task.modules) {
    std::vector<std::string> cells = {module.name};
    for (const OverBatches* figure : {&module.read_rows, &module.zero_elements, &module.zero_elements_read,
                                      &module.zero_rows, &module.zero_rows_read})
      cells.push_back(shown(*figure));
    for (const OverBatches& energy : module.energy) cells.push_back(shown(energy));
    cells.resize(header.size());
    rows.push_back(cells);
  }
  page.table(header, rows);
}

/// The name without its block: modules of one kind.
std::string kind_of(const std::string& module) {
  constexpr std::string_view kLayer = ".layer.";
  const size_t begin = module.find(kLayer);
  if (begin == std::string::npos) return module;
  return module.substr(module.find('.', begin + kLayer.size()) + 1);
}

void add_magnitudes(report::Page& page, const TaskGradients& task) {
  std::vector<std::pair<std::string, Binades>> kinds;
  for (const ModuleGradient& module : task.modules) {
    const std::string kind = kind_of(module.name);
    auto found = std::ranges::find(kinds, kind, &std::pair<std::string, Binades>::first);
    if (found == kinds.end()) found = kinds.insert(kinds.end(), {kind, Binades()});
    found->second.add(module.magnitudes);
  }
  std::vector<report::Series> lines;
  for (const auto& [kind, magnitudes] : kinds) {
    report::Series line{.name = kind, .points = {}};
    for (int e = Binades::kLowest; e < Binades::kHighest; ++e)
      if (magnitudes.count(e) > 0)
        line.points.emplace_back(e, double(magnitudes.count(e)) / double(magnitudes.all()));
    lines.push_back(line);
  }
  page.heading("Magnitudes");
  page.paragraph("Elements of read rows, of all blocks together, by the binade of their magnitude.");
  page.chart("Magnitudes of " + (task.name == kAllTasks ? "all tasks" : task.name),
             "exponent e: magnitudes from 2^e to 2^(e + 1)", "share of the elements", lines);
}

}  // namespace

std::vector<report::Table> gradient_tables(const GradientTasks& what, const std::vector<TaskGradients>& all) {
  report::Table figures{"gradients", {"task", "module", "batches", "columns"}, {}};
  for (const Figure& figure : kFigures)
    for (const char* const which : {"avg", "max", "min"})
      figures.columns.push_back(std::string(figure.name) + "_" + which);
  report::Table energy{"energy", {"task", "module", "top", "batches", "avg", "max", "min"}, {}};
  report::Table magnitudes{"magnitudes", {"task", "module", "from", "below", "elements"}, {}};
  for (const TaskGradients& task : all)
    for (const ModuleGradient& module : task.modules) {
      std::vector<TableCell> row = {task.name, module.name, module.read_rows.batches, module.columns};
      for (const Figure& figure : kFigures) add_cells(row, module.*figure.of);
      figures.rows.push_back(row);
      for (size_t i = 0; i < module.energy.size(); ++i) {
        energy.rows.push_back({task.name, module.name, what.options.top[i].text(), module.energy[i].batches});
        add_cells(energy.rows.back(), module.energy[i]);
      }
      magnitudes.rows.push_back({task.name, module.name, 0.0, 0.0, module.magnitudes.zeros()});
      for (int e = Binades::kLowest; e < Binades::kHighest; ++e)
        if (module.magnitudes.count(e) > 0)
          magnitudes.rows.push_back({task.name, module.name, std::ldexp(1.0, e), std::ldexp(1.0, e + 1),
                                     module.magnitudes.count(e)});
    }
  return {figures, energy, magnitudes};
}

std::string gradient_page(const GradientTasks& what, const std::vector<TaskGradients>& all) {
  report::Page page("Gradients of " + io::utf8_text(what.model));
  page.paragraph(fmt::format(
      "Gradients of the outputs of linear layers. Batches of {} texts, at most {} tokens each, {} dropout, "
      "{}. An element counts as zero up to a magnitude of {:g}. All rows are those of a padded batch; "
      "read rows are those of tokens that a later layer reads. Means over batches, with the least and the "
      "largest.",
      what.batch, what.max_length, what.dropout ? "with" : "without", name_of(what.dtype),
      what.options.tolerance));
  std::vector<std::vector<std::string>> rows;
  for (const TaskGradients& task : all)
    rows.push_back({task.name, std::to_string(task.batches), std::to_string(task.tokens),
                    fmt::format("{:.4f}", task.loss), std::to_string(task.fresh.size())});
  page.table({"task", "batches", "tokens", "loss", "parameters that were drawn"}, rows);
  add_pictures(page, what, all);
  add_magnitudes(page, all.back());
  for (auto task = all.rbegin(); task != all.rend(); ++task) add_table(page, what, *task);
  return page.html();
}

std::string write_gradients(const GradientTasks& what, const std::vector<TaskGradients>& all,
                            const std::string& folder) {
  io::AtomicFolder files(folder, io::AtomicFolder::Existing::merge);
  for (const report::Table& table : gradient_tables(what, all))
    io::write_file(files.path() + "/" + table.name + ".csv", report::csv_text(table));
  io::write_file(files.path() + "/gradients.json", io::json_text(json_of(what, all), 1) + "\n");
  io::write_file(files.path() + "/gradients.html", gradient_page(what, all));
  files.publish();
  return (std::filesystem::path(folder) / "gradients.html").string();
}

}  // namespace tessera::sparsity

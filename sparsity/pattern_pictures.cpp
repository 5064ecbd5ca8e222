#include "sparsity/pattern_pictures.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <set>

#include "runtime/error.h"
#include "sparsity/pattern_page.h"
#include "sparsity/pattern_pictures_internal.h"

namespace tessera::sparsity {
namespace pictures {
namespace {

/// As part of the name of a file: nothing that a path could be made of.
std::string file_part(const std::string& text) {
  std::string part;
  for (const char c : text) part += std::isalnum(uint8_t(c)) || c == '-' || c == '_' || c == '.' ? c : '_';
  return part.empty() || part[0] == '.' ? "_" + part : part;
}

/// "model.layers.0.mlp.up_proj": "layer0-mlp.up_proj".
std::string label_of(const std::string& name, int64_t layer) {
  const std::string middle = "." + std::to_string(layer) + ".";
  const size_t at = ("." + name).find(middle);
  if (layer < 0 || at == std::string::npos) return name;
  return fmt::format("layer{}-{}", layer, name.substr(at + middle.size() - 1));
}

/// The end of the original's names: "-2-4-0.5", n and m of the pattern and the sparsity.
std::string end_of(const std::string& pattern, const std::string& sparsity) {
  if (pattern.empty()) return "";
  std::string end = pattern == "unstructured" ? "-0-0" : "-" + pattern;
  std::ranges::replace(end, ':', '-');
  return end + (sparsity.empty() ? "" : "-" + sparsity);
}

std::string unlike(const std::string& name, std::set<std::string>& taken) {
  std::string free = name;
  for (int number = 2; !taken.insert(free).second; ++number) free = fmt::format("{}_{}", name, number);
  return free;
}

std::vector<PictureMatrix> matrices_of(report::Database& database, const PictureOptions& options) {
  const report::Table rows = database.run(
      "SELECT id, layer, rows, columns, length, input, matrix, projection, axis, pattern, asked, "
      "input_norm_pearson, input_norm_spearman FROM matrices ORDER BY id");
  std::vector<PictureMatrix> matrices;
  std::map<std::string, std::string> inputs;
  std::set<std::string> taken_inputs, taken;
  for (const auto& row : rows.rows) {
    PictureMatrix matrix{.id = integer_in(row[0]),
                         .layer = integer_in(row[1]),
                         .rows = integer_in(row[2]),
                         .columns = integer_in(row[3]),
                         .length = integer_in(row[4]),
                         .input = text_in(row[5]),
                         .name = text_in(row[6]),
                         .projection = text_in(row[7]),
                         .axis = text_in(row[8]),
                         .label = {},
                         .file_input = {},
                         .stem = {},
                         .pearson = number_in(row[11]),
                         .spearman = number_in(row[12])};
    check(matrix.rows >= 1 && matrix.columns >= 1 && matrix.length >= 1, "sparsity.sqlite: '", matrix.name,
          "' is ", matrix.rows, " x ", matrix.columns, "; it is damaged: run tessera sparsity analyze again");
    matrix.label = label_of(matrix.name, matrix.layer);
    if (!inputs.contains(matrix.input)) inputs[matrix.input] = unlike(file_part(matrix.input), taken_inputs);
    matrix.file_input = inputs[matrix.input];
    // Names are given before some are left out, so that --only does not change them.
    matrix.stem = unlike(
        matrix.file_input + "-" + file_part(matrix.label + end_of(text_in(row[9]), text_in(row[10]))), taken);
    const auto is_in_name = [&](const std::string& part) {
      return matrix.name.find(part) != std::string::npos;
    };
    if (options.only.empty() || std::ranges::any_of(options.only, is_in_name))
      matrices.push_back(std::move(matrix));
  }
  check(!matrices.empty(), "export: --only leaves none of the ", rows.rows.size(), " matrices",
        rows.rows.empty() ? "" : "; the first is '" + text_in(rows.rows[0][6]) + "'");
  return matrices;
}

}  // namespace
}  // namespace pictures

void export_pictures(report::Database& database, const std::string& folder, const PictureOptions& options,
                     const std::function<void(const std::string&)>& tell) {
  check_version(database);
  const std::vector<pictures::PictureMatrix> matrices = pictures::matrices_of(database, options);
  PictureFolder files(folder, options.format, tell);
  const auto write = [&](const std::string& name, const report::Image& image) { files.write(name, image); };
  pictures::draw_analysis(database, matrices, write);
  for (const pictures::PictureMatrix& matrix : matrices)
    pictures::draw_matrix(database, matrix, options, write, tell);
  files.publish();
}

}  // namespace tessera::sparsity

#include "sparsity/mask_import.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>

#include "io/torch_file.h"
#include "io/utf8.h"
#include "runtime/interrupt.h"
#include "runtime/text.h"
#include "sparsity/model_matrices.h"
#include "sparsity/prune.h"
#include "sparsity/prune_options.h"

namespace tessera::sparsity {
namespace {

namespace fs = std::filesystem;
using Matrix = ModelMatrices::Matrix;

constexpr const char* kForm = "layer{N}-{component}-{i}-{j}-{sparsity}, as layer0-mlp.down_proj-2-4-0.5.pt";
constexpr double kRelated = 0.5;  // least cosine of pruned and dense weights

/// The value that all have, or "".
std::string common(const std::vector<std::string>& values) {
  const bool same = std::ranges::all_of(values, [&](const std::string& value) { return value == values[0]; });
  return same && !values.empty() ? values[0] : "";
}

class Importer {
 public:
  Importer(const std::string& model, const ImportOptions& options) : model_(model), options_(options) {
    fingerprint_ = model_.fingerprint();
  }

  void add(const std::string& input) {
    std::error_code ignored;
    if (!fs::is_directory(input, ignored)) return add_file(input);
    if (fs::exists(fs::path(input) / "config.json", ignored)) return add_model(input);
    std::vector<std::string> files;
    for (const fs::directory_entry& entry : fs::directory_iterator(input))
      if (is_matrix_name(entry.path())) files.push_back(entry.path().string());
    check(!files.empty(), "masks: ", input, " has neither a config.json nor files *.pt or *.npy; expected a ",
          "pruned model directory, or files named ", kForm);
    std::ranges::sort(files);
    for (const std::string& file : files) add_file(file);
  }

  Imported finish();

 private:
  struct Found {
    Mask mask;
    ImportedMatrix from;
    MaskInfo info;                // of the input it came with
    bool names_sparsity = false;  // the name of its file gives a sparsity and no n:m pattern that implies it
  };

  static bool is_matrix_name(const fs::path& path) {
    return path.extension() == ".pt" || path.extension() == ".npy";
  }

  void add_file(const std::string& path) {
    if (!is_matrix_name(path)) {
      if (io::is_torch_file(io::InputFile(path)))
        fail_at(Site::here(), "masks: ", path, ": expected a name that ends with .pt: ", kForm);
      return add_masks(path, load_masks(path));
    }
    const std::string stem = fs::path(path).stem().string();
    const auto named = parse_matrix_file_name(stem);
    const Matrix& matrix = named ? matrix_of(path, *named) : matrix_of(path, stem);
    const Tensor values = read_matrix_file(path);
    check(values.rank() == 2, "masks: ", path, " holds ", describe(values), "; expected a matrix ",
          shape_text(matrix));
    check_shape(path, matrix, values.size(0), values.size(1));
    check_related(path, matrix, values);
    Found found{.mask = mask_of(values), .from = {matrix.name, path, "", ""}, .info = {}};
    if (named) {
      found.from.pattern = named->pattern, found.from.sparsity = named->sparsity;
      check_pattern(path, found.mask, *named);
      found.names_sparsity = !named->sparsity.empty() && !parse_pattern(named->pattern).structured();
    }
    put(matrix, std::move(found));
  }

  void add_model(const std::string& folder) {
    MaskInfo info;
    std::error_code ignored;
    const fs::path noted = fs::path(folder) / kMasksFile;
    if (fs::exists(noted, ignored)) info = load_masks(noted.string()).info;
    check_fingerprint(noted.string(), info);
    const ModelMatrices pruned(folder);
    for (const Matrix& its : pruned.all()) {
      check_interrupt();
      const Matrix& matrix = matrix_of(folder, its.name);
      check_shape(folder, matrix, its.rows, its.columns);
      const Tensor values = pruned.load(its);
      check_related(folder, matrix, values);
      put(matrix, {.mask = mask_of(values),
                   .from = {matrix.name, folder, info.pattern, info.sparsity},
                   .info = info});
    }
  }

  void add_masks(const std::string& path, Masks masks) {
    check_fingerprint(path, masks.info);
    for (auto& [name, mask] : masks.layers) {
      const Matrix& matrix = matrix_of(path, name);
      check_shape(path, matrix, mask.rows(), mask.columns);
      put(matrix, {.mask = std::move(mask),
                   .from = {matrix.name, path, masks.info.pattern, masks.info.sparsity},
                   .info = masks.info});
    }
  }

  void put(const Matrix& matrix, Found found) {
    const auto [at, is_new] = found_.try_emplace(matrix.name, std::move(found));
    check(is_new, "masks: '", matrix.name, "' is given twice, by ", at->second.from.from, " and by ",
          found.from.from, "; give one of them");
  }

  const Matrix& matrix_of(const std::string& path, const std::string& name) const {
    if (const Matrix* const matrix = model_.find(name)) return *matrix;
    std::vector<std::string> names;
    for (const Matrix& matrix : model_.all()) names.push_back(matrix.name);
    const std::string near = nearest(name, names);
    fail_at(Site::here(), "masks: ", path, ": ", model_.folder(), " has no matrix '", io::shown(name), "'",
            near.empty() ? "" : " (did you mean '" + near + "'?)", "; a file of one matrix is named ", kForm,
            ", or like '", names.front(), ".npy'");
  }

  const Matrix& matrix_of(const std::string& path, const MatrixFileName& named) const {
    const std::string end = "." + named.component;
    std::vector<const Matrix*> fitting;
    std::string parts;
    for (const Matrix& matrix : model_.all()) {
      if (matrix.block != named.block) continue;
      parts += (parts.empty() ? "" : ", ") + matrix.part;
      if (matrix.part == named.component || matrix.part.ends_with(end)) fitting.push_back(&matrix);
    }
    check(!parts.empty(), "masks: ", path, ": its name says layer ", named.block, "; the layers of ",
          model_.folder(), " are 0 to ", model_.all().back().block);
    check(fitting.size() == 1, "masks: ", path, ": its name says component '", io::shown(named.component),
          "', which fits ", fitting.size(), " of ", parts, " of layer ", named.block, "; expected one");
    return *fitting[0];
  }

  static std::string shape_text(const Matrix& matrix) {
    return "[" + std::to_string(matrix.rows) + ", " + std::to_string(matrix.columns) + "]";
  }

  void check_shape(const std::string& path, const Matrix& matrix, int64_t rows, int64_t columns) const {
    const bool is_turned = rows == matrix.columns && columns == matrix.rows;
    check(rows == matrix.rows && columns == matrix.columns, "masks: ", path, ": '", matrix.name, "' is [",
          rows, ", ", columns, "]; ", model_.folder(), " has ", shape_text(matrix),
          is_turned ? ", [outputs, inputs]: transpose it" : "");
  }

  void check_fingerprint(const std::string& path, const MaskInfo& info) const {
    check(info.fingerprint.empty() || info.fingerprint == fingerprint_, "masks: ", path,
          " has masks of another model: its fingerprint is ", info.fingerprint, ", that of ", model_.folder(),
          " is ", fingerprint_, "; give --model the dense model that was pruned");
  }

  /// Throws if the values are weights that are not the model's, pruned.
  void check_related(const std::string& path, const Matrix& matrix, const Tensor& values) const;
  /// Throws unless the mask has the pattern that the name of its file gives.
  static void check_pattern(const std::string& path, const Mask& mask, const MatrixFileName& named);
  /// Throws unless files whose names give one sparsity have it together: a pruning may divide it unevenly
  /// among the matrices (OWL).
  void check_named_sparsities() const;

  ModelMatrices model_;
  ImportOptions options_;
  std::string fingerprint_;
  std::map<std::string, Found> found_;
};

void Importer::check_related(const std::string& path, const Matrix& matrix, const Tensor& values) const {
  const std::vector<float> pruned = values.to(DType::f32).to_vector<float>();
  if (std::ranges::all_of(pruned, [](float w) { return w == 0 || w == 1; })) return;  // a mask
  const std::vector<float> dense = model_.load(matrix).to(DType::f32).clone().to_vector<float>();
  double both = 0, own = 0, theirs = 0;
  for (size_t i = 0; i < pruned.size(); ++i) {
    check(std::isfinite(pruned[i]), "masks: ", path, ": '", matrix.name,
          "' has a value that is not finite at [", int64_t(i) / matrix.columns, ", ",
          int64_t(i) % matrix.columns, "]; prune the model again");
    if (pruned[i] == 0) continue;
    both += double(pruned[i]) * double(dense[i]);
    own += double(pruned[i]) * double(pruned[i]), theirs += double(dense[i]) * double(dense[i]);
  }
  const double cosine = own > 0 && theirs > 0 ? both / std::sqrt(own * theirs) : 0;
  check(
      cosine >= kRelated, "masks: ", path, ": the weights of '", matrix.name, "' are not those of ",
      model_.folder(), " (cosine ", cosine, " over the kept ones, expected at least ", kRelated,
      "): masks of another model; give --model the dense model that was pruned. Matrices of zeros and ones ",
      "are not compared");
}

void Importer::check_pattern(const std::string& path, const Mask& mask, const MatrixFileName& named) {
  const Pattern pattern = [&] {
    try {
      return parse_pattern(named.pattern);
    } catch (const Error&) {
      fail_at(Site::here(), "masks: ", path, ": its name says i-j = ", named.pattern,
              " (n and m of an n:m pattern); expected 0-0, or n < m as in 2-4");
    }
  }();
  char* end = nullptr;
  const double sparsity = std::strtod(named.sparsity.c_str(), &end);
  check(named.sparsity.empty() || (*end == 0 && 0 <= sparsity && sparsity <= 1), "masks: ", path,
        ": its name says a sparsity of ", named.sparsity, "; expected a number from 0 to 1");
  if (!pattern.structured()) return;
  const double share = double(pattern.zeros) / double(pattern.group);
  constexpr double kDigits = 0.005;  // names have two digits, as in 0.67
  check(named.sparsity.empty() || std::abs(sparsity - share) <= kDigits, "masks: ", path,
        ": its name says a pattern of ", named.pattern, ", which drops ", share, " of the weights, and a ",
        "sparsity of ", named.sparsity, "; rename the file");
  check(mask.columns % pattern.group == 0, "masks: ", path, ": groups of ", pattern.group,
        " do not divide its ", mask.columns, " columns");
  for (int64_t row = 0; row < mask.rows(); ++row)
    for (int64_t begin = 0; begin < mask.columns; begin += pattern.group) {
      int64_t zeros = 0;
      for (int64_t c = begin; c < begin + pattern.group; ++c) zeros += !mask.at(row, c);
      check(zeros >= pattern.zeros, "masks: ", path, ": its name says a pattern of ", named.pattern,
            ", but row ", row, " has ", zeros, " zeros in columns ", begin, " to ",
            begin + pattern.group - 1);
    }
}

void Importer::check_named_sparsities() const {
  struct Sum {
    int64_t files = 0, zeros = 0, all = 0;
    std::string first;
  };
  std::map<std::string, Sum> sums;
  for (const auto& [name, found] : found_) {
    if (!found.names_sparsity) continue;
    Sum& sum = sums[found.from.sparsity];
    if (++sum.files == 1) sum.first = found.from.from;
    sum.zeros += found.mask.count() - found.mask.ones(), sum.all += found.mask.count();
  }
  constexpr double kMost = 0.01;  // names have two digits, and rows of few weights drop whole ones
  for (const auto& [asked, sum] : sums) {
    const double counted = sum.all > 0 ? double(sum.zeros) / double(sum.all) : 0;
    check(std::abs(std::strtod(asked.c_str(), nullptr) - counted) <= kMost, "masks: ", sum.first,
          ": its name says a sparsity of ", asked, ", but the ", sum.files, " files that say so have ",
          counted, " together; rename them, or leave the sparsity out of their names");
  }
}

Imported Importer::finish() {
  check_named_sparsities();
  Imported result;
  std::vector<std::string> methods, seeds, patterns, sparsities, missing;
  for (const Matrix& matrix : model_.all()) {
    const auto found = found_.find(matrix.name);
    if (found == found_.end()) {
      missing.push_back(matrix.name);
      continue;
    }
    Found& one = found->second;
    methods.push_back(one.info.method), seeds.push_back(one.info.seed);
    patterns.push_back(one.from.pattern), sparsities.push_back(one.from.sparsity);
    result.masks.layers.emplace_back(matrix.name, std::move(one.mask));
    result.matrices.push_back(std::move(one.from));
  }
  check(options_.partial || missing.empty(), "masks: ", missing.size(), " of the ", model_.all().size(),
        " matrices of ", model_.folder(), " are missing, the first '", missing.empty() ? "" : missing[0],
        "'; give files for them too, or allow it (--partial)");
  result.masks.info = {.fingerprint = fingerprint_,
                       .model = io::utf8_name(model_.folder()),
                       .method = options_.method.empty() ? common(methods) : options_.method,
                       .pattern = common(patterns),
                       .sparsity = common(sparsities),
                       .seed = options_.seed.empty() ? common(seeds) : options_.seed};
  return result;
}

}  // namespace

Imported import_masks(const std::vector<std::string>& inputs, const std::string& model,
                      const ImportOptions& options) {
  check(!inputs.empty(), "masks: no input; expected files, pruned model directories or folders of files");
  Importer importer(model, options);
  for (const std::string& input : inputs) {
    check_interrupt();
    importer.add(input);
  }
  return importer.finish();
}

}  // namespace tessera::sparsity

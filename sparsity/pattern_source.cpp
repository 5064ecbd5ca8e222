#include "sparsity/pattern_source.h"

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "io/file.h"
#include "io/utf8.h"

namespace tessera::sparsity {

namespace fs = std::filesystem;

PatternSource::PatternSource(const std::string& path) : path_(path), masks_(read_masks(path)) {
  name_ = io::utf8_name(path);
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) return;
  weights_ = std::make_unique<ModelMatrices>(path);
  const fs::path noted = fs::path(path) / "masks.safetensors";
  if (fs::exists(noted, ignored)) masks_.info = load_masks(noted.string()).info;
  const fs::path norms = fs::path(path) / kInputNormsFile;
  if (fs::exists(norms, ignored)) norms_ = load_input_norms(norms.string(), masks_);
}
PatternSource::PatternSource(PatternSource&&) noexcept = default;
PatternSource::~PatternSource() = default;

Tensor PatternSource::weight(const std::string& matrix) const {
  if (!weights_) return {};
  const Tensor rows = weights_->load(*weights_->find(matrix)).to(DType::f64).clone().with_rows();
  for (int64_t i = 0; i < rows.size(0); ++i)
    for (int64_t j = 0; j < rows.size(1); ++j)
      check(std::isfinite(rows.data<double>()[i * rows.row_stride() + j]), "sparsity: ", path_, ": '",
            io::shown(matrix), "' has a value that is not finite at [", i, ", ", j,
            "]; prune the model again from finite weights");
  return rows;
}

std::vector<double> PatternSource::input_norms(const std::string& matrix) const {
  const auto found = norms_.find(matrix);
  return found == norms_.end() ? std::vector<double>() : found->second.to_vector<double>();
}

void PatternSource::take_input_norms(const InputNorms& norms) {
  for (const auto& [name, mask] : masks_.layers) {
    const auto found = norms.find(name);
    check(found != norms.end(), "sparsity: ", path_, ": the dense model has no matrix '", io::shown(name),
          "'; give the masks their model's names with tessera sparsity import");
    check(found->second.count() == mask.columns, "sparsity: ", path_, ": '", io::shown(name), "' has ",
          mask.columns, " columns, in the dense model ", found->second.count(),
          "; name the model that the masks are of");
  }
  norms_ = norms;
}

std::map<std::string, double> PatternSource::perplexities() const {
  std::map<std::string, double> found;
  std::error_code ignored;
  const fs::path report = fs::path(path_) / "pruning.json";
  if (!weights_ || !fs::exists(report, ignored)) return found;
  const nlohmann::json json = nlohmann::json::parse(io::read_file(report.string(), 64 << 20), nullptr, false);
  if (!json.is_object() || !json.contains("perplexity") || !json["perplexity"].is_object()) return found;
  for (const char* const name : {"before", "after", "gated_before", "gated_after"})
    if (const auto value = json["perplexity"].find(name);
        value != json["perplexity"].end() && value->is_number())
      found[name] = value->get<double>();
  return found;
}

}  // namespace tessera::sparsity

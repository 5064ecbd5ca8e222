#include "sparsity/prune_progress.h"

#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "sparsity/prune_report.h"

namespace tessera::sparsity {

namespace fs = std::filesystem;

namespace {
constexpr const char* kNormsOf = ".input_norms";  // after the name of a matrix: no module is called that
}

PruneProgress::PruneProgress(std::string folder, std::string request)
    : folder_(std::move(folder)), request_(std::move(request)) {
  std::error_code none;
  if (!fs::is_directory(folder_, none)) return;
  io::remove_stale_temporaries(folder_);
  for (const auto& entry : fs::directory_iterator(folder_)) check_request(entry.path().string());
}

std::string PruneProgress::path_of(int64_t block) const {
  return fmt::format("{}/block-{:05}.safetensors", folder_, block);
}

io::SafetensorsFile PruneProgress::open(const std::string& path) const {
  try {
    return io::SafetensorsFile(path);
  } catch (const Error& error) {
    fail_at(Site::here(), "prune: a finished block is damaged (", error.message(), "); remove ", folder_,
            " to start over");
  }
}

void PruneProgress::check_request(const std::string& path) const {
  const io::SafetensorsFile file = open(path);
  const auto found = file.metadata().find("request");
  check(found != file.metadata().end() && found->second == request_, "prune: ", folder_,
        " holds blocks of a pruning of another model, text or other options; remove it to start over, or "
        "write to ",
        "another folder");
}

bool PruneProgress::has(int64_t block) const {
  std::error_code ignored;
  return fs::is_regular_file(path_of(block), ignored);
}

std::vector<PrunedMatrix> PruneProgress::restore(int64_t block, std::span<const Target> targets) const {
  const io::SafetensorsFile file = open(path_of(block));
  const auto report = file.metadata().find("matrices");
  check(report != file.metadata().end(), "prune: ", file.path(), " is damaged; remove ", folder_);
  std::vector<PrunedMatrix> matrices =
      matrices_from_json(nlohmann::ordered_json::parse(report->second), file.path());
  for (const Target& target : targets) {
    const Tensor weight = weight_of(target.module), kept = file.load(target.module.name);
    check(kept.shape() == weight.shape(), "prune: ", file.path(), " is damaged; remove ", folder_);
    weight.copy_from(kept);
  }
  for (PrunedMatrix& matrix : matrices)
    if (file.has(matrix.name + kNormsOf)) matrix.input_norms = file.load(matrix.name + kNormsOf);
  return matrices;
}

void PruneProgress::keep(int64_t block, std::span<const Target> targets,
                         const std::vector<PrunedMatrix>& matrices) const {
  io::make_folder(folder_);
  io::NamedTensors tensors;
  for (const Target& target : targets) tensors.emplace_back(target.module.name, weight_of(target.module));
  for (const PrunedMatrix& matrix : matrices)
    if (matrix.input_norms.defined()) tensors.emplace_back(matrix.name + kNormsOf, matrix.input_norms);
  io::save_safetensors(path_of(block), tensors,
                       {{"request", request_}, {"matrices", matrices_to_json(matrices).dump()}});
}

std::string request_digest(const PruneOptions& options, const Samples& samples,
                           const std::string& fingerprint, Device device, DType dtype) {
  io::Xxh3 sum;
  sum.add(to_json(options).dump() + "\n" + fingerprint + "\n" + device.name() + "\n" +
          tessera::name_of(dtype) + "\n" + std::to_string(samples.length) + "\n");
  sum.add(samples.tokens.data(), samples.tokens.size() * sizeof(int64_t));
  return sum.digits();
}

}  // namespace tessera::sparsity

#include "sparsity/chain.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "io/file.h"
#include "io/safetensors.h"
#include "io/weights.h"
#include "pretrained/load.h"
#include "sparsity/modules.h"
#include "sparsity/prune.h"

namespace tessera::sparsity {
namespace {

namespace fs = std::filesystem;

/// The fingerprint that a pruning left for its result; "" without a pruning.
std::string pruned_fingerprint(const std::string& folder) {
  const std::string path = (fs::path(folder) / kReportFile).string();
  std::error_code ignored;
  if (!fs::is_regular_file(path, ignored)) return "";
  constexpr uint64_t kMost = uint64_t{256} << 20;
  const auto report = nlohmann::json::parse(io::read_file(path, kMost), nullptr, false);
  check(report.is_object(), "sparse: ", path, " is damaged: no JSON of a pruning; prune again");
  const auto found = report.find("pruned_fingerprint");
  return found != report.end() && found->is_string() ? found->get<std::string>() : "";
}

}  // namespace

void check_pruned(const char* step, const std::string& folder, const std::string& fingerprint) {
  const std::string expected = pruned_fingerprint(folder);
  check(expected.empty() || expected == fingerprint, step, ": ", folder, "/", kReportFile,
        " is of a pruning that made the fingerprint ", io::shown(expected), ", but the weights there have ",
        fingerprint, ": they were changed, or another --dtype rounds them; prune again, or remove ",
        kReportFile);
}

pretrained::SparseConversion convert(const std::string& from, const std::string& to, ops::SparseFormat format,
                                     const ConvertOptions& options) {
  std::optional<Calibration> calibration;
  std::string expected = pruned_fingerprint(from);
  if (!options.calibration.empty()) {
    calibration = read_calibration(options.calibration);
    check(expected.empty() || expected == calibration->fingerprint, "convert: ", options.calibration,
          " was calibrated on the model with fingerprint ", calibration->fingerprint, ", and ", from,
          " was pruned to ", expected, "; calibrate that model");
    std::error_code ignored;
    check(!fs::exists(fs::path(to) / kCalibrationFile, ignored), "convert: ", to, " has a ", kCalibrationFile,
          " already; name another folder");
    expected = calibration->fingerprint;
  }
  if (!calibration)
    return pretrained::convert_sparse(from, to, format, options.dtype, options.config, expected);
  io::AtomicFolder files(to, io::AtomicFolder::Existing::merge, pretrained::check_no_model);
  pretrained::SparseConversion done =
      pretrained::convert_sparse(from, files.path(), format, options.dtype, options.config, expected);
  calibration->fingerprint = done.fingerprint;
  save_calibration(*calibration, files.path());
  files.publish();
  return done;
}

pretrained::SparseOptions options_of(const Calibration& calibration, double activation_sparsity,
                                     bool by_greedy) {
  return {.gates = calibration.gates(activation_sparsity, by_greedy), .prefill = calibration.prefill};
}

PruneGates prune_gates_of(const Calibration& dense, double activation_sparsity, bool by_greedy) {
  return {.gates = dense.gates(activation_sparsity, by_greedy), .prefill = dense.prefill};
}

pretrained::LoadedLanguageModel load(const std::string& folder, const Rng& rng, Device device,
                                     const LoadOptions& options) {
  pretrained::SparseOptions sparse = options.sparse;
  if (options.activation_sparsity) {
    check(!sparse.gates && !sparse.threshold, "load: activation_sparsity ", *options.activation_sparsity,
          ", which takes the gates of a calibration, and sparse.", sparse.gates ? "gates" : "threshold",
          " for ", folder, "; leave one of the two out");
    const Calibration calibration =
        read_calibration(options.calibration.empty() ? folder : options.calibration);
    const auto chosen =
        options_of(calibration, *options.activation_sparsity, options.greedy && !calibration.greedy.empty());
    sparse.gates = chosen.gates;
    if (!sparse.prefill) sparse.prefill = chosen.prefill;
  } else {
    check(options.calibration.empty(), "load: the calibration ", options.calibration, " for ", folder,
          " without activation_sparsity; say which share of the inputs its gates leave out");
  }
  const bool has_gates = sparse.gates || sparse.threshold || sparse.prefill;
  const bool may_run_sparse = has_gates || pretrained::is_sparse_folder(folder);
  return pretrained::load_language(folder, rng, device, {.dtype = options.dtype},
                                   may_run_sparse ? std::optional(sparse) : std::nullopt);
}

double counted_sparsity(models::LanguageRef model, std::span<const eval::PerplexityWindow> windows) {
  std::vector<std::vector<int64_t>> texts;
  for (const eval::PerplexityWindow& window : windows)
    texts.emplace_back(window.tokens.begin(), window.tokens.end());
  const auto counts = pretrained::count_gates(model, texts);
  double all = 0, left_out = 0;
  for (const pretrained::LinearModule& module : block_modules(model)) {
    const double weights = double(module.rows) * double(module.layer->in);
    all += weights;
    if (const auto found = counts.find(module.name); found != counts.end())
      left_out += weights * found->second.sparsity();
  }
  return all > 0 ? left_out / all : 0;
}

}  // namespace tessera::sparsity

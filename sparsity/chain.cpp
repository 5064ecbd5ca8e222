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

SparseLanguageModel load(const std::string& folder, Rng& rng, Device device, const LoadOptions& options) {
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
  const bool off = sparse.mode == pretrained::SparseMode::off, has_gates = sparse.gates || sparse.threshold;
  check(!off || !has_gates, "load: gates for ", folder,
        " in the mode off, in which all layers are dense; leave one of the two out");
  check(!sparse.prefill || has_gates, "load: sparse.prefill ", sparse.prefill.value_or(1), " for ", folder,
        " without gates; give activation_sparsity, sparse.gates or sparse.threshold too");
  const auto config = pretrained::read_config(folder).model;
  const pretrained::LoadOptions load{.dtype = options.dtype};
  const bool compressed = pretrained::is_sparse_folder(folder);
  const bool runs_sparse = !off && (compressed || has_gates);
  if (runs_sparse) pretrained::check_sparse(folder, sparse);
  const auto finish = [&](auto model) {
    std::vector<pretrained::SparseModule> layers;
    if (runs_sparse) layers = pretrained::make_sparse(model, sparse, folder);
    return SparseLanguageModel{std::move(model), std::move(layers)};
  };
  if (std::holds_alternative<models::GptConfig>(config))
    return finish(compressed ? pretrained::load_sparse_gpt(folder, rng, device, load, off)
                             : pretrained::load_gpt(folder, rng, device, load));
  return finish(compressed ? pretrained::load_sparse_llama(folder, rng, device, load, off)
                           : pretrained::load_llama(folder, rng, device, load));
}

template <class Model>
double counted_sparsity(Model& model, std::span<const train::PerplexityWindow> windows) {
  std::vector<std::vector<int64_t>> texts;
  for (const train::PerplexityWindow& window : windows)
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

template double counted_sparsity(models::Gpt&, std::span<const train::PerplexityWindow>);
template double counted_sparsity(models::Llama&, std::span<const train::PerplexityWindow>);

}  // namespace tessera::sparsity

#include "cli/sparse_flags.h"

#include <fmt/format.h>

#include <iterator>

#include "cli/commands.h"
#include "io/safetensors.h"
#include "report/progress.h"
#include "sparsity/chain.h"
#include "sparsity/split.h"

namespace tessera::cli {

void ShareFlag::add_to(CLI::App& command, const char* name, const char* alias, const char* help) {
  name_ = name, alias_ = alias;
  auto* const own = command.add_option(name, value_, help)->check(kFinite)->check(between(0, 1));
  command.add_option(alias, alias_value_, std::string("Alias used by SPDP's scripts"))
      ->check(kFinite)
      ->check(between(0, 1))
      ->excludes(own);
}

std::optional<double> ShareFlag::get() const {
  if (alias_value_)
    report::tell(fmt::format("tessera: {} {} is taken as {}\n", alias_, *alias_value_, name_));
  return alias_value_ ? alias_value_ : value_;
}

void add_activation_sparsity(CLI::App& command, ShareFlag& flag, const char* help) {
  flag.add_to(command, "--activation-sparsity", "--sp-ratio", help);
}
void add_weight_sparsity(CLI::App& command, ShareFlag& flag, const char* help) {
  flag.add_to(command, "--weight-sparsity", "--dp-ratio", help);
}

void SparseFlags::add_to(CLI::App& command) {
  command
      .add_option(
          "--sparse", mode,
          "Sparse execution of compressed or gated linear layers: all, else an error (required); where "
          "faster, printed per layer (auto); none (off). Default: required for a compressed model or a gate")
      ->check(CLI::IsMember({"required", "auto", "off"}));
  auto* const one = command
                        .add_option("--gate-threshold", threshold,
                                    "Drop inputs of linear layers whose magnitude is at most this")
                        ->check(kFinite)
                        ->check(between(0, 1e30));
  command
      .add_option("--gates", gates,
                  "Calibration (tessera calibrate), or file with a threshold per linear layer; default: the "
                  "calibration in the model's directory, if a sparsity is given")
      ->excludes(one);
  add_activation_sparsity(command, activation, "Share of the inputs that the calibrated gates drop");
  command
      .add_option("--total", total,
                  "Total sparsity 1 - (1 - s1)(1 - s2), with s1 of the compressed weights and s2 of the "
                  "inputs; instead of --activation-sparsity")
      ->check(kFinite)
      ->check(between(0, 1));
  command
      .add_option(
          "--allocation", allocation,
          "Allocation of calibrated gates: the same share everywhere, or greedy; default: as calibrated")
      ->check(CLI::IsMember({"uniform", "greedy"}));
  command
      .add_option("--gate-prefill", prefill,
                  "Share of a prompt's tokens, counted from the end, that gates apply to; default: "
                  "the calibration's, else 1")
      ->check(kFinite)
      ->check(between(0, 1));
}

namespace {

/// Share of the weights that a compressed model does not store.
double weight_sparsity_of(const std::string& folder) {
  if (!pretrained::is_sparse_folder(folder)) return 0;
  const pretrained::SparseFile file(folder);
  double all = 0, stored = 0;
  for (const auto& [name, layer] : file.layers())
    all += double(layer.out) * double(layer.in), stored += double(layer.stored);
  return all > 0 ? 1 - stored / all : 0;
}

}  // namespace

void SparseFlags::set_gates(pretrained::SparseOptions& options, const std::string& folder) const {
  const std::optional<double> given = activation.get();
  const std::string path = gates.empty() ? folder : gates;
  const bool is_calibration = (given || total || !gates.empty()) && sparsity::is_calibration(path);
  if (!is_calibration) {
    if (given || total || !allocation.empty())
      throw UsageError(
          fmt::format("--activation-sparsity, --total, --allocation: these need a calibration, and {} has "
                      "none; make one with tessera calibrate, and name it with --gates",
                      io::shown(path)));
    if (!gates.empty()) options.gates = pretrained::read_gates(gates);
    return;
  }
  if (!given && !total)
    throw UsageError("--gates: " + io::shown(path) +
                     " is a calibration; say which --activation-sparsity or --total");
  if (given && total)
    throw UsageError("--activation-sparsity and --total: one follows from the other; give one");
  const sparsity::Calibration calibration = sparsity::read_calibration(path);
  const double weights = weight_sparsity_of(folder);
  const double share = given ? *given : sparsity::activations_for(*total, weights);
  if (total) report::tell(fmt::format("tessera: total sparsity {}\n", sparsity::split_text(weights, share)));
  const bool greedy = allocation.empty() ? !calibration.greedy.empty() : allocation == "greedy";
  const pretrained::SparseOptions chosen = sparsity::options_of(calibration, share, greedy);
  options.gates = chosen.gates, options.prefill = chosen.prefill;
}

std::optional<pretrained::SparseOptions> SparseFlags::options(const std::string& folder,
                                                              int64_t tokens) const {
  pretrained::SparseOptions options{.threshold = threshold, .tokens = tokens};
  set_gates(options, folder);
  const bool has_gates = threshold || options.gates, is_sparse = pretrained::is_sparse_folder(folder);
  if (mode == "off" && has_gates)
    throw UsageError(
        "--sparse off: a gate is given with --gate-threshold, --gates or --activation-sparsity; leave out "
        "one "
        "of the two");
  if (prefill && !has_gates) throw UsageError("--gate-prefill: there are no gates that it could apply to");
  if (mode == "off" || (mode.empty() && !has_gates && !is_sparse)) return {};
  options.mode = pretrained::parse_sparse_mode(mode.empty() ? "required" : mode);
  if (prefill) options.prefill = prefill;
  return options;
}

std::vector<std::string> sparse_format_names() {
  return {std::begin(ops::kSparseFormats), std::end(ops::kSparseFormats)};
}

void tell_sparse(const std::vector<pretrained::SparseModule>& modules,
                 const pretrained::SparseOptions& options) {
  if (options.mode != pretrained::SparseMode::automatic) return;
  for (const pretrained::SparseModule& module : modules)
    report::tell(fmt::format("tessera: {}: {}{}: {}\n", module.name, module.format,
                             module.is_sparse ? fmt::format(" ({})", module.variant) : "", module.reason));
}

nlohmann::json sparse_json(const std::vector<pretrained::SparseModule>& modules,
                           const std::map<std::string, pretrained::GateCounts>& counts) {
  nlohmann::json list = nlohmann::json::array();
  for (const pretrained::SparseModule& module : modules) {
    nlohmann::json one{
        {"layer", module.name},   {"format", module.format},           {"variant", module.variant},
        {"bytes", module.bytes},  {"dense_bytes", module.dense_bytes}, {"weight_sparsity", module.sparsity},
        {"reason", module.reason}};
    if (module.gate.kind == ops::Gate::Kind::threshold) one["threshold"] = module.gate.threshold;
    if (module.gate.kind == ops::Gate::Kind::top_k) one["top_k"] = module.gate.keep;
    if (const auto found = counts.find(module.name); found != counts.end()) {
      one["activation_sparsity"] = found->second.sparsity();
      one["gate_overlap"] = found->second.overlap();
    }
    list.push_back(std::move(one));
  }
  return list;
}

}  // namespace tessera::cli

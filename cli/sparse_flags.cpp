#include "cli/sparse_flags.h"

#include <fmt/format.h>

#include "cli/commands.h"
#include "io/safetensors.h"
#include "train/progress.h"

namespace tessera::cli {

void SparseFlags::add_to(CLI::App& command) {
  command
      .add_option("--sparse", mode,
                  "Linear layers compressed or gated: all or none (required), where faster\n(auto, told per "
                  "layer), none (off). Default: required for a compressed model\nor a gate")
      ->check(CLI::IsMember({"required", "auto", "off"}));
  auto* const one = command
                        .add_option("--gate-threshold", threshold,
                                    "Leave out inputs of linear layers of at most this magnitude")
                        ->check(kFinite)
                        ->check(CLI::Range(0.0, 1e30));
  command.add_option("--gates", gates, "File with a threshold per linear layer (docs/sparse_inference.md)")
      ->excludes(one);
}

std::optional<pretrained::SparseOptions> SparseFlags::options(const std::string& folder,
                                                              int64_t tokens) const {
  const bool has_gates = threshold || !gates.empty(), is_sparse = pretrained::is_sparse_folder(folder);
  if (mode == "off" && has_gates)
    throw UsageError(
        "--sparse off: a gate is given with --gate-threshold or --gates; leave out one of the two");
  if (mode == "off" || (mode.empty() && !has_gates && !is_sparse)) return {};
  pretrained::SparseOptions options{.mode = pretrained::parse_sparse_mode(mode.empty() ? "required" : mode),
                                    .threshold = threshold,
                                    .tokens = tokens};
  if (!gates.empty()) options.gates = pretrained::read_gates(gates);
  return options;
}

void tell_sparse(const std::vector<pretrained::SparseModule>& modules,
                 const pretrained::SparseOptions& options) {
  if (options.mode != pretrained::SparseMode::automatic) return;
  for (const pretrained::SparseModule& module : modules)
    train::tell(fmt::format("tessera: {}: {}{}: {}\n", module.name, module.format,
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

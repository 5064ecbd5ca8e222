#include "sparsity/split_pruning.h"

#include <algorithm>

#include "sparsity/chain.h"

namespace tessera::sparsity {

void check_gate_aware(const char* command, const SweepOptions& options) {
  check(!options.gate_aware.empty(), command, ": gate_aware is empty; expected false, true, or both");
  check(!options.prune.gates, command,
        ": the gates of gate-aware pruning follow from each split; leave out those of the pruning options");
  const bool asked = std::ranges::find(options.gate_aware, true) != options.gate_aware.end();
  check(!asked || options.prune.update != Update::none, command,
        ": gate-aware pruning updates the remaining weights, and ", options.prune.method(),
        " leaves them as they are; take the score sparsegpt (--method sparsegpt)");
  check(!asked || !options.prune.sequential, command,
        ": gate-aware pruning collects the inputs of whole blocks; leave out sequential pruning");
}

bool allocates_greedily(const Split& split, const GateOptions& gates) {
  return split.activations > 0 && gates.greedy && split.activations <= gates.most;
}

PruneOptions prune_options_of(const Split& split, const SweepOptions& options,
                              const std::optional<Calibration>& dense) {
  PruneOptions prune = options.prune;
  prune.sparsity = split.weights;
  if (split.gate_aware)
    prune.gates = prune_gates_of(dense.value(), split.activations, allocates_greedily(split, options.gates));
  return prune;
}

std::string pruning_of(const Split& split, const PruneOptions& options) {
  if (split.weights == 0) return "none";
  PruneOptions named = options;
  if (split.gate_aware) named.gates.emplace();
  return named.method();
}

bool is_gate_aware(const std::string& pruning) {
  return pruning.starts_with("gate-aware ");
}

}  // namespace tessera::sparsity

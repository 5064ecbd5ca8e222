#pragma once

#include <optional>
#include <string>

#include "sparsity/split_sweep.h"

/// How the weights of a split are pruned: with their own inputs, or gate-aware (sparsity/gate_aware.h), for
/// the gates that the pruned model will run under. Those are not known before: the thresholds of the dense
/// model stand for them, and after pruning the model gets thresholds of its own.

namespace tessera::sparsity {

/// Throws, in a message that begins with `command`, if gate-aware pruning is asked for and the pruning
/// options do not combine with it, or if they have gates of their own.
void check_gate_aware(const char* command, const SweepOptions& options);

/// Whether gates leave out the split's share of the inputs by the greedy allocation: where that is calibrated
/// and reaches so far. Else by the uniform one.
bool allocates_greedily(const Split& split, const GateOptions& gates);

/// Options of prune() for the split. `dense`: the dense model's calibration, which gate-aware pruning needs.
PruneOptions prune_options_of(const Split& split, const SweepOptions& options,
                              const std::optional<Calibration>& dense);

/// How it is called in results: "none", "wanda", "gate-aware sparsegpt".
std::string pruning_of(const Split& split, const PruneOptions& options);
/// Whether a result with that name was pruned gate-aware.
bool is_gate_aware(const std::string& pruning);

}  // namespace tessera::sparsity

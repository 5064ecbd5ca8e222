#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "sparsity/prune.h"

namespace tessera::sparsity {

/// A list of objects, one per matrix: name, rows, columns, zeros, sparsity, asked, dead_inputs, damping,
/// damping_raised, relative_output_error (null where it is not known); of gate-aware pruning also gate_error,
/// corrected_error.
nlohmann::ordered_json matrices_to_json(const std::vector<PrunedMatrix>& matrices);
/// Throws, naming `path`, for anything else.
std::vector<PrunedMatrix> matrices_from_json(const nlohmann::ordered_json& json, const std::string& path);

/// The sparsity of each matrix as a table: a line per block, a column per module ("q_proj"), the block's own
/// last.
std::string sparsity_table(const std::vector<PrunedMatrix>& matrices);

}  // namespace tessera::sparsity

#pragma once

#include <string>
#include <utility>
#include <vector>

namespace tessera::sparsity {

/// An allocation file: a JSON object of sparsities by module names or patterns of names, as
/// PruneOptions::assigned has them: {"k_proj": 0.3, "model.layers.0.**": 0.2}. Throws, naming the file, for
/// anything else, an empty object and sparsities outside [0, 1).
std::vector<std::pair<std::string, double>> read_allocation(const std::string& path);

}  // namespace tessera::sparsity

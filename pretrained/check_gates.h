#pragma once

#include "pretrained/layers.h"
#include "pretrained/sparse_model.h"

namespace tessera::pretrained {

/// Throws, naming the first that does not fit, unless the gates have the model's fingerprint (or none), one
/// gate for each of the modules, and no other.
void check_gates(const Gates& gates, const std::vector<LinearModule>& modules,
                 const std::string& fingerprint);

}  // namespace tessera::pretrained

#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace tessera::cli {

/// What several ranks depend on: the GPUs of each machine and the links between them, measured; NCCL; limits
/// of this system; the variables that each rank sees. Under a launcher all ranks call it: one rank of each
/// machine measures while the others wait, and rank 0 gets all of it; the others get null.
nlohmann::json links_json();
/// The same for a terminal.
std::string links_text(const nlohmann::json& links);

}  // namespace tessera::cli

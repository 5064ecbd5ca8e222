#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"

namespace tessera::train {

/// Sizes known by a name, small to large: "demo", which learns the licence texts of a Debian on two cores
/// within five minutes; GPT-2's small, medium, large and xl (Radford et al., 2019, table 2); of LLaMA 60m,
/// 130m, 350m, 1b and 7b (Zhao et al., arXiv:2403.03507, table 5). The vocabulary stays as it was.
std::vector<std::string> size_names(bool llama);
/// Throws if the name is unknown.
void apply_size(plan::LanguageConfig& config, const std::string& name);

}  // namespace tessera::train

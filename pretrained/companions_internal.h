#pragma once

#include <optional>
#include <set>
#include <string>

#include "tensor/dtype.h"

/// Shared by the commands that rewrite model directories; not part of the public interface.

namespace tessera::pretrained {

bool is_file(const std::string& path);

/// Copies what folder `from` holds besides weights that its user needs (config.json, the tokenizer's files),
/// config.json with another dtype if one is given, and without the ignored fields.
void copy_companions(const std::string& from, const std::string& to, std::optional<DType> dtype,
                     const std::set<std::string>& ignored);

}  // namespace tessera::pretrained

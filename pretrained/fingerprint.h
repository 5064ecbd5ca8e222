#pragma once

#include <string>

#include "models/language_model.h"

namespace tessera::io {
class Xxh3;
}

namespace tessera::pretrained {

/// 32 hexadecimal digits (XXH3) of the matrices of a model's blocks: their names in transformers, their
/// shapes [out, in] and their elements as f32, so that a model loaded as f32 has the fingerprint of its bf16
/// file; 0 and -0 are one value. Masks carry that of the model that was pruned, compressed weights that of
/// the pruned one. Throws if a layer in a block has no dense weight.
std::string fingerprint_of(models::LanguageRef model);

/// Adds one of those matrices, [out, in], to such a sum; they come in the order of linear_modules.
void add_to_fingerprint(io::Xxh3& sum, const std::string& module, const Tensor& matrix);

}  // namespace tessera::pretrained

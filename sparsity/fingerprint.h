#pragma once

#include <string>

#include "models/gpt.h"
#include "models/llama.h"

namespace tessera::sparsity {

/// 32 hexadecimal digits (XXH3) of the matrices of a model's blocks: their names in transformers, their
/// shapes and their elements as f32, so that a model loaded as f32 has the fingerprint of its bf16 file.
/// Masks carry that of the model that was pruned.
std::string fingerprint_of(models::Gpt& model);
std::string fingerprint_of(models::Llama& model);

}  // namespace tessera::sparsity

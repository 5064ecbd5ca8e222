#pragma once

#include <string>

#include "train/language_job.h"

namespace tessera::train {

/// Writes a Hugging Face model directory with the trained model and its tokenizer (the folder `tokenizer`).
/// An export that an earlier end of the same run left is replaced once the new one is complete.
void export_language(LanguageJob& job, const LanguageData& data, const std::string& tokenizer,
                     const std::string& folder);

}  // namespace tessera::train

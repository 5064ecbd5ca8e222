#pragma once

#include <map>
#include <string>
#include <string_view>

#include "io/file.h"

/// The index of weights that are spread over several files (model.safetensors.index.json,
/// pytorch_model.bin.index.json):
///   {"metadata": {"total_size": ...}, "weight_map": {"<tensor>": "<file>", ...}}

namespace tessera::io {

/// Tensor to file. The file names are plain names: no folder, no "..", nothing that leads elsewhere. Throws,
/// naming `path`, for anything else, for names that occur twice and for other parts than those two; what
/// metadata says is not used.
std::map<std::string, std::string> parse_shard_index(const std::string& path, std::string_view text);

/// The file `name` in the folder, which an index from elsewhere named. Throws for symbolic links, except the
/// one that the cache of Hugging Face makes ("../../blobs/<digits>"), and for hard links.
InputFile open_shard(const std::string& folder, const std::string& name);

}  // namespace tessera::io

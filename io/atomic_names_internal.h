#pragma once

#include <cstdint>
#include <string>
#include <vector>

/// What AtomicFile and AtomicFolder share: the names of what is not published yet, and the flush of a folder.

namespace tessera::io {

/// Between a name and "<process>-<number>": of a file or folder that is being written; of a folder that has
/// stepped aside for the one that replaces it.
inline constexpr const char kTemporary[] = ".tmp-";
inline constexpr const char kAside[] = ".old-";

/// Names the folder of what is to be merged into the one around it.
inline constexpr const char kFiles[] = "files-to-merge";
/// Where a file in folders that are being written will be, for messages.
std::string published_name(const std::string& path);

/// ".name.tmp-<process>-<number>"
std::string marked_name(const std::string& name, const char* kind, uint64_t number);

/// As remove_stale_temporaries, of this name alone; "": of all.
std::vector<std::string> remove_stale(const std::string& folder, const std::string& name);

/// Makes the names in a folder durable. 0 or errno.
int flush_folder(const std::string& folder);

}  // namespace tessera::io

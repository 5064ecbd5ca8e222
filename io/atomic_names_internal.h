#pragma once

#include <cstdint>
#include <string>
#include <vector>

/// Shared by AtomicFile and AtomicFolder: the names of what is not published yet, and flushing a folder.

namespace tessera::io {

/// What stands between a name and "<process>-<number>": kTemporary for a file or folder that is being
/// written, kAside for a folder that was moved aside for the one that replaces it.
inline constexpr const char kTemporary[] = ".tmp-";
inline constexpr const char kAside[] = ".old-";

/// Name of the subfolder that holds the files to merge into the folder around it.
inline constexpr const char kFiles[] = "files-to-merge";
/// The final path of a file in a folder that is still being written, for messages.
std::string published_name(const std::string& path);

/// ".name.tmp-<process>-<number>"
std::string marked_name(const std::string& name, const char* kind, uint64_t number);

/// Like remove_stale_temporaries, but for this name alone; "": for all names.
std::vector<std::string> remove_stale(const std::string& folder, const std::string& name);

/// Makes the names in a folder durable. 0 or errno.
int flush_folder(const std::string& folder);

}  // namespace tessera::io

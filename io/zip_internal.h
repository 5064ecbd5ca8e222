#pragma once

#include <map>
#include <string>
#include <vector>

#include "io/file.h"

/// Reading zip archives, as far as io/torch_file.h and io/npy.h need it. Either zip_libzip.cpp or
/// zip_absent.cpp is compiled.

namespace tessera::io {

class ZipArchive {
 public:
  struct Entry {
    std::string name;
    uint64_t bytes = 0;
  };

  enum class Entries : uint8_t { stored, stored_or_deflated };
  /// Throws, naming the file, for anything that is not a whole archive of distinct names, all of them not
  /// encrypted and stored as they are or, where that is allowed, deflated.
  explicit ZipArchive(InputFile file, Entries allowed = Entries::stored);
  ~ZipArchive();
  ZipArchive(const ZipArchive&) = delete;

  const std::string& path() const;
  const std::vector<Entry>& entries() const { return entries_; }
  /// Null if there is none.
  const Entry* find(const std::string& name) const;
  /// All bytes of an entry; verifies its checksum. `bytes` is the entry's size.
  void read(const Entry& entry, void* to) const;

 private:
  struct Handle;
  Handle* handle_;
  std::vector<Entry> entries_;  // by number
  std::map<std::string, size_t> index_;
};

}  // namespace tessera::io

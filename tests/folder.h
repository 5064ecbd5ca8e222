#pragma once

#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

/// Folders and files that tests make, straight to the disk and without the code under test.

namespace tessera {

inline void put(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), std::streamsize(bytes.size()));
}
/// "" if there is no such file.
inline std::string get(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// A folder that lives as long as the object. Names are relative to it.
class TemporaryFolder {
 public:
  TemporaryFolder() : path_((std::filesystem::temp_directory_path() / "tessera-test-XXXXXX").string()) {
    if (!::mkdtemp(path_.data())) throw std::runtime_error("mkdtemp failed");
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  /// With the folders that it lies in.
  void put(const std::string& name, const std::string& bytes) const {
    std::filesystem::create_directories(std::filesystem::path(*this / name).parent_path());
    tessera::put(*this / name, bytes);
  }
  std::string get(const std::string& name) const { return tessera::get(*this / name); }
  /// Files and folders directly in it, sorted.
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_))
      names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  }

 private:
  std::string path_;
};

/// This process, and those that it starts, as a user other than root, as long as it lives: root may write
/// everywhere.
struct UnprivilegedUser {
  UnprivilegedUser() {
    if (own == 0 && ::seteuid(65534) != 0) throw std::runtime_error("seteuid failed");
  }
  ~UnprivilegedUser() {
    if (own == 0 && ::seteuid(own) != 0) std::abort();
  }
  const uid_t own = ::geteuid();
};

}  // namespace tessera

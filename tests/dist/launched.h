#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "dist/launch.h"

/// Runs dist::launch in a folder of its own, and keeps what the ranks say.

namespace tessera::dist::test {

namespace fs = std::filesystem;

/// A folder for one test.
struct Folder {
  Folder()
      : path(fs::temp_directory_path() /
             ("launch-" + std::to_string(::getpid()) + "-" + std::to_string(next++))) {
    fs::create_directories(path);
  }
  ~Folder() { fs::remove_all(path); }
  std::string operator/(const std::string& name) const { return (path / name).string(); }
  std::string get(const std::string& name) const {
    std::ifstream file(path / name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  fs::path path;
  static inline int next = 0;
};

struct Said {
  LaunchEnd end;
  std::string out, err;
};

inline Said launched(const Folder& folder, LaunchOptions options) {
  Said said;
  options.logs = folder / "ranks";
  options.out = [&](const std::string& line) { said.out += line; };
  options.err = [&](const std::string& line) { said.err += line; };
  said.end = launch(options);
  return said;
}

}  // namespace tessera::dist::test

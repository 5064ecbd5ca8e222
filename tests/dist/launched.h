#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "dist/launch.h"
#include "tests/folder.h"

/// Runs dist::launch in a folder of its own, and keeps what the ranks say.

namespace tessera::dist::test {

namespace fs = std::filesystem;

struct Said {
  LaunchEnd end;
  std::string out, err;
};

inline Said launched(const TemporaryFolder& folder, LaunchOptions options) {
  Said said;
  options.logs = folder / "ranks";
  options.out = [&](const std::string& line) { said.out += line; };
  options.err = [&](const std::string& line) { said.err += line; };
  said.end = launch(options);
  return said;
}

}  // namespace tessera::dist::test

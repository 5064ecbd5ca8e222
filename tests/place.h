#pragma once

#include <cstdlib>
#include <string>

/// Where a test finds what it needs next to itself. The programs know the paths of the machine that built
/// them; on another one the environment says where these things are: TESSERA_PROGRAM names the command
/// `tessera`, TESSERA_TEST_DATA the folder tests/ of the sources. `tools/gpu run` sets both.

namespace tessera::test {

/// What the variable says; `built` if it is not set or empty.
inline std::string place(const char* variable, const char* built) {
  const char* const value = std::getenv(variable);
  return value && *value ? value : built;
}

}  // namespace tessera::test

#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::cli {

/// One `key = value` of a TOML file.
struct TomlEntry {
  std::string name;
  /// One, or the elements of an array. Texts are decoded. Numbers are as the file writes them (0.1 stays
  /// "0.1"), but without a leading + and _, and integers in decimal digits.
  std::vector<std::string> values;
  bool is_array = false;
  uint32_t line = 0;  // from 1
};

/// A [table], or one element of an array of tables.
struct TomlSection {
  std::string name;  // "arm", or "arm.x"; "": what comes before the first section
  uint32_t line = 0;
  std::vector<TomlEntry> entries;  // in the order of the file
};

/// Reads a file in TOML 1.0: first the section without a name, then the others in the order of the file.
/// Throws UsageError "FILE:LINE: ..." if it is not TOML, and for dates, nested arrays and tables in arrays of
/// other values; Error if the file cannot be read.
std::vector<TomlSection> read_toml(const std::string& path);

/// "FILE:LINE: ", the beginning of an error message.
std::string place_in(const std::string& path, uint32_t line);

}  // namespace tessera::cli

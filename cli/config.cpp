#include <algorithm>
#include <sstream>

#include "cli/commands.h"
#include "io/file.h"
#include "runtime/error.h"

namespace tessera::cli {
namespace {

constexpr uint64_t kLargestConfig = 1 << 20;

}  // namespace

std::vector<CLI::ConfigItem> read_toml(const std::string& path) {
  std::string bytes = io::read_file(path, kLargestConfig);
  if (bytes.starts_with("\xEF\xBB\xBF")) bytes.erase(0, 3);
  std::istringstream text(bytes);
  try {
    return CLI::ConfigTOML().from_config(text);
  } catch (const CLI::Error& error) {
    throw UsageError(path + ": " + error.what());
  }
}

void apply_config(CLI::App& command, const std::string& path) {
  if (path.empty()) return;
  std::vector<std::string> names;
  std::vector<const CLI::Option*> seen;
  for (const CLI::Option* option : command.get_options())
    for (const std::string& name : option->get_lnames())
      if (name != "help" && name != "config") names.push_back(name);
  for (const CLI::ConfigItem& item : read_toml(path)) {
    if (!item.parents.empty())
      throw UsageError(path + ": section [" + item.parents.front() + "]: expected flags without sections");
    if (std::find(names.begin(), names.end(), item.name) == names.end()) {
      const std::string near = nearest(item.name, names);
      throw UsageError(path + ": \"" + item.name + "\" is not a flag of " + command.get_name() +
                       (near.empty() ? "" : "; did you mean " + near + "?"));
    }
    CLI::Option* const option = command.get_option("--" + item.name);
    if (std::find(seen.begin(), seen.end(), option) != seen.end())  // perhaps by its other name
      throw UsageError(path + ": \"" + item.name + "\" is given twice");
    seen.push_back(option);
    if (item.inputs.size() != 1 && (item.inputs.empty() || option->get_expected_max() <= 1))
      throw UsageError(path + ": \"" + item.name + "\": expected one value");
    if (option->count() > 0) continue;  // the command line wins
    const std::string& value = item.inputs.front();
    if (option->get_expected_max() == 0) {
      if (value != "true" && value != "false")
        throw UsageError(path + ": \"" + item.name + "\" is \"" + value + "\"; expected true or false");
      if (value == "false") continue;
    }
    try {
      for (const std::string& one : item.inputs) option->add_result(one);
      option->run_callback();
    } catch (const CLI::ParseError& error) {
      throw UsageError(path + ": " + error.what());
    }
  }
}

}  // namespace tessera::cli

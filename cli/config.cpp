#include <algorithm>
#include <sstream>

#include "cli/commands.h"
#include "io/file.h"
#include "runtime/error.h"

namespace tessera::cli {
namespace {

constexpr uint64_t kLargestConfig = 1 << 20;

std::vector<CLI::ConfigItem> parse(const std::string& path) {
  std::istringstream text(io::read_file(path, kLargestConfig));
  try {
    return CLI::ConfigTOML().from_config(text);
  } catch (const CLI::Error& error) {
    throw UsageError(path + ": " + error.what());
  }
}

}  // namespace

void apply_config(CLI::App& command, const std::string& path) {
  if (path.empty()) return;
  std::vector<std::string> names, seen;
  for (const CLI::Option* option : command.get_options())
    for (const std::string& name : option->get_lnames())
      if (name != "help" && name != "config") names.push_back(name);
  for (const CLI::ConfigItem& item : parse(path)) {
    if (!item.parents.empty())
      throw UsageError(path + ": section [" + item.parents.front() + "]: expected flags without sections");
    if (std::find(names.begin(), names.end(), item.name) == names.end()) {
      const std::string near = nearest(item.name, names);
      throw UsageError(path + ": \"" + item.name + "\" is no flag of " + command.get_name() +
                       (near.empty() ? "" : "; did you mean " + near + "?"));
    }
    if (std::find(seen.begin(), seen.end(), item.name) != seen.end())
      throw UsageError(path + ": \"" + item.name + "\" is given twice");
    seen.push_back(item.name);
    if (item.inputs.size() != 1) throw UsageError(path + ": \"" + item.name + "\": expected one value");
    CLI::Option* const option = command.get_option("--" + item.name);
    if (option->count() > 0) continue;  // the command line wins
    const std::string& value = item.inputs.front();
    if (option->get_expected_max() == 0) {
      if (value != "true" && value != "false")
        throw UsageError(path + ": \"" + item.name + "\" is \"" + value + "\"; expected true or false");
      if (value == "false") continue;
    }
    try {
      option->add_result(value);
      option->run_callback();
    } catch (const CLI::ParseError& error) {
      throw UsageError(path + ": " + error.what());
    }
  }
}

}  // namespace tessera::cli

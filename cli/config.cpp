#include <algorithm>
#include <set>

#include "cli/commands.h"
#include "cli/toml.h"
#include "runtime/error.h"
#include "runtime/text.h"

namespace tessera::cli {
namespace {

/// The flag of a key. Throws UsageError, naming the nearest flag, if there is none.
CLI::Option* option_of_key(CLI::App& command, const TomlEntry& entry, const std::string& at) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options())
    for (const std::string& name : option->get_lnames())
      if (name != "help" && name != "config") names.push_back(name);
  if (std::ranges::find(names, entry.name) != names.end()) return command.get_option("--" + entry.name);
  throw UsageError(at + "\"" + entry.name + "\" is not a flag of " + command.get_name() +
                   did_you_mean(entry.name, names));
}

/// Gives the flag the values of the entry, as the command line would.
void give_values(CLI::Option& option, const TomlEntry& entry, const std::string& at) {
  if (option.get_expected_max() == 0) {
    const std::string& value = entry.values.front();
    if (value != "true" && value != "false")
      throw UsageError(at + "\"" + entry.name + "\" is \"" + value + "\"; expected true or false");
    if (value == "false") return;
  }
  try {
    for (const std::string& value : entry.values) option.add_result(value);
    option.run_callback();
  } catch (const CLI::ParseError& error) {
    throw UsageError(at + error.what());
  }
}

}  // namespace

void apply_config(CLI::App& command, const std::string& path) {
  if (path.empty()) return;
  const std::vector<TomlSection> sections = read_toml(path);
  if (sections.size() > 1)
    throw UsageError(place_in(path, sections[1].line) + "section [" + sections[1].name +
                     "]: expected flags without sections");
  std::set<const CLI::Option*> on_line, seen;
  for (const CLI::Option* option : command.get_options())
    if (option->count() > 0) on_line.insert(option);
  for (const TomlEntry& entry : sections.front().entries) {
    const std::string at = place_in(path, entry.line);
    CLI::Option* const option = option_of_key(command, entry, at);
    if (!seen.insert(option).second)  // perhaps by its other name
      throw UsageError(at + "\"" + entry.name + "\" is given twice");
    if (entry.values.size() != 1 && (entry.values.empty() || option->get_expected_max() <= 1))
      throw UsageError(at + "\"" + entry.name + "\": expected one value");
    // The command line wins: over the same flag, and over one that cannot go with its flags.
    const std::set<CLI::Option*> excluded = option->get_excludes();
    if (on_line.contains(option) ||
        std::ranges::any_of(excluded, [&](const CLI::Option* other) { return on_line.contains(other); }))
      continue;
    for (const CLI::Option* other : excluded)
      if (other->count() > 0)
        throw UsageError(at + "\"" + entry.name + "\" and \"" + other->get_lnames().front() +
                         "\" exclude each other; give one of them");
    give_values(*option, entry, at);
  }
}

void require_flags(const CLI::App& command, std::initializer_list<const char*> flags) {
  for (const char* const flag : flags)
    if (command.get_option(flag)->count() == 0) throw UsageError(std::string(flag) + " is required");
}

}  // namespace tessera::cli

#include "cli/explain.h"

#include <algorithm>
#include <sstream>
#include <string_view>

#include "runtime/error.h"
#include "runtime/text.h"

namespace tessera::cli {
namespace {

constexpr size_t kColumn = 36, kWidth = 120;  // of the flags and of a whole line

/// The text in lines that fit next to the flags.
std::string wrapped(const std::string& text) {
  constexpr size_t kRoom = kWidth - kColumn;
  std::string lines;
  size_t line = 0;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const bool fits = line + 1 + word.size() <= kRoom;
    if (line > 0) lines += fits ? ' ' : '\n';
    lines += word;
    line = line > 0 && fits ? line + 1 + word.size() : word.size();
  }
  return lines;
}

class CompactHelp : public CLI::Formatter {
 public:
  std::string make_option_opts(const CLI::Option* option) const override {
    if (option->get_expected_max() == 0) return "";
    // "INT:INT in [1 - 8]" is a kind with its checks, "TEXT:{on,off}" one with its choices.
    const std::string kinds = option->get_type_name();
    const size_t choices = kinds.find('{');
    std::string text =
        " " + (choices == std::string::npos ? kinds.substr(0, kinds.find(':'))
                                            : kinds.substr(choices, kinds.find('}') - choices + 1));
    if (!option->get_default_str().empty()) text += "=" + option->get_default_str();
    return text;
  }
  /// Of a flag with former names the present one.
  std::string make_option_name(const CLI::Option* option, bool is_positional) const override {
    const bool has_short = !option->get_snames().empty();
    return is_positional || has_short ? Formatter::make_option_name(option, is_positional)
                                      : option->get_name();
  }
  std::string make_option_desc(const CLI::Option* option) const override {
    return wrapped(Formatter::make_option_desc(option));
  }
  std::string make_subcommand(const CLI::App* command) const override {
    std::ostringstream line;
    CLI::detail::format_help(line, command->get_display_name(true), wrapped(command->get_description()),
                             column_width_);
    return line.str();
  }
  std::string make_usage(const CLI::App* app, std::string name) const override {
    return Formatter::make_usage(app, name) + "\n";
  }
  std::string make_group(std::string group, bool positional,
                         std::vector<const CLI::Option*> options) const override {
    std::string text = group + ":\n";
    for (const CLI::Option* option : options) text += make_option(option, positional);
    return text;
  }
};

std::vector<const CLI::App*> subcommands(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App*) { return true; });
}

/// The innermost subcommand that the line reached.
const CLI::App* innermost(const CLI::App& app) {
  const CLI::App* current = &app;
  while (!current->get_subcommands().empty()) current = current->get_subcommands().front();
  return current;
}

std::string unknown_word(const CLI::App& at, const std::string& word) {
  if (!word.starts_with('-') || word == "--") {
    // Commands that print tables print JSON instead; those that run long write a record to a file.
    const CLI::Option* const json = at.get_option_no_throw("--json");
    const bool for_json = word.ends_with(".json") && json && json->get_expected_min() == 0;
    return "unexpected argument \"" + word + "\"" +
           (for_json ? "; here --json takes no file: it prints to the standard output" : "");
  }
  std::vector<std::string> names;
  for (const CLI::Option* option : at.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    for (const std::string& name : option->get_snames()) names.push_back("-" + name);
  }
  const std::string flag = word.substr(0, word.find('='));
  if (std::find(names.begin(), names.end(), flag) != names.end())
    return flag + " comes too early: flags go after the subcommand that they belong to, " + at.get_name();
  const std::string near = did_you_mean(flag, names);
  if (near.empty() && at.get_name() == "launch")
    return "unknown flag " + flag + "; the command to start goes after --, with all of its flags";
  return "unknown flag " + flag + near;
}

}  // namespace

std::shared_ptr<CLI::Formatter> compact_help() {
  auto help = std::make_shared<CompactHelp>();
  help->column_width(kColumn);
  return help;
}

std::string explain(const CLI::App& app, const CLI::ParseError& error,
                    const std::vector<std::string>& words) {
  const CLI::App& at = *innermost(app);
  std::string command = "tessera";
  for (const CLI::App* step = &app; !step->get_subcommands().empty();) {
    step = step->get_subcommands().front();
    command += " " + step->get_name();
  }
  // What was not parsed, in the order of the line; an unknown flag explains the words after it.
  const auto code = static_cast<CLI::ExitCodes>(error.get_exit_code());
  const bool about_words = code == CLI::ExitCodes::ExtrasError || code == CLI::ExitCodes::RequiredError;
  const std::vector<std::string> left = app.remaining(true);
  std::vector<std::string> unknown;
  for (const std::string& word : words)
    if (about_words && std::find(left.begin(), left.end(), word) != left.end()) unknown.push_back(word);
  const auto flag = std::find_if(unknown.begin(), unknown.end(),
                                 [](const std::string& word) { return word.starts_with('-'); });

  std::string message = error.what();
  std::vector<std::string> names;
  for (const CLI::App* sub : subcommands(at)) names.push_back(sub->get_name());
  if (!names.empty() && at.get_subcommands().empty()) {
    if (unknown.empty()) {
      message = "a subcommand is needed: one of " + joined(names);
    } else if (std::find(names.begin(), names.end(), unknown.front()) != names.end()) {
      message = "the subcommand " + unknown.front() + " cannot follow \"--\"";
    } else if (!unknown.front().starts_with('-')) {
      message = "unknown subcommand \"" + unknown.front() + "\"" + did_you_mean(unknown.front(), names) +
                "; expected one of " + joined(names);
    } else {
      message = unknown_word(at, unknown.front());
    }
  } else if (flag != unknown.end()) {
    message = unknown_word(at, *flag);
  } else if (!unknown.empty()) {
    message = unknown_word(at, unknown.front());
  }
  std::replace(message.begin(), message.end(), '\n', ' ');
  if (code == CLI::ExitCodes::ExcludesError) message += "; give one of them";
  constexpr std::string_view kTwice = "At Most 1 required but ";
  if (const size_t at = message.find(kTwice); at != std::string::npos)
    message.replace(at, kTwice.size(), "given more than once; ");
  return message + " (see " + command + " --help)";
}

}  // namespace tessera::cli

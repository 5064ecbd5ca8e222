#include <fmt/format.h>

#include <exception>

#include "cli/commands.h"
#include "runtime/error.h"
#include "train/build_info.h"

namespace tessera::cli {
namespace {

void collect_names(const CLI::App& app, std::vector<std::string>& names) {
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    for (const std::string& name : option->get_snames()) names.push_back("-" + name);
  }
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; }))
    names.push_back(sub->get_name());
}

/// The innermost subcommand that the line reached: whose flags a misspelt word was meant to be.
const CLI::App* innermost(const CLI::App& app) {
  const CLI::App* current = &app;
  while (!current->get_subcommands().empty()) current = current->get_subcommands().front();
  return current;
}

/// One line: what is wrong, the nearest name, where help is.
std::string explain(const CLI::App& app, const CLI::ParseError& error,
                    const std::vector<std::string>& words) {
  const CLI::App* const at = innermost(app);
  std::vector<std::string> names;
  collect_names(*at, names);
  std::string command = "tessera";
  for (const CLI::App* step = &app; !step->get_subcommands().empty();) {
    step = step->get_subcommands().front();
    command += " " + step->get_name();
  }
  std::string message = error.what();
  while (!message.empty() && message.back() == '\n') message.pop_back();
  for (const std::string& word : words) {
    const std::string flag = word.substr(0, word.find('='));
    const bool known = std::find(names.begin(), names.end(), flag) != names.end();
    if (known || message.find(flag) == std::string::npos) continue;
    if (const std::string near = nearest(flag, names); !near.empty())
      message += "; did you mean " + near + "?";
    break;
  }
  return message + " (see " + command + " --help)";
}

int run(int argc, char** argv) {
  CLI::App app{"tessera: train, check and measure deep learning operators and models", "tessera"};
  app.set_version_flag("--version",
                       std::string("tessera ") + train::kVersion + " (" + train::kRevision + ")");
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);
  app.option_defaults()->always_capture_default();
  Action action;
  add_doctor(app, action);
  add_train(app, action);
  add_eval(app, action);
  add_op(app, action);
  add_bench(app, action);
  add_plan(app, action);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& wanted) {  // --help, --version
    return app.exit(wanted);
  } catch (const CLI::ParseError& error) {
    fmt::print(stderr, "tessera: {}\n", explain(app, error, std::vector<std::string>(argv + 1, argv + argc)));
    return 2;
  }
  try {
    return action();
  } catch (const UsageError& error) {
    fmt::print(stderr, "tessera: {}\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    fmt::print(stderr, "tessera: {}\n", error.what());
    return 1;
  }
}

}  // namespace
}  // namespace tessera::cli

int main(int argc, char** argv) {
  return tessera::cli::run(argc, argv);
}

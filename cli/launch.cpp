#include "dist/launch.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <optional>

#include "cli/commands.h"
#include "cli/toml.h"
#include "cli/train_run.h"
#include "report/progress.h"

namespace tessera::cli {
namespace {

/// This program's file, for the ranks.
std::string own_program() {
  std::string path(4096, 0);
  const ssize_t size = ::readlink("/proc/self/exe", path.data(), path.size());
  if (size <= 0 || size_t(size) == path.size()) throw UsageError("launch: /proc/self/exe cannot be read");
  path.resize(size_t(size));
  return path;
}

/// "train gpt --text a.txt" to the program and its arguments.
std::vector<std::string> command_of(const std::vector<std::string>& words) {
  if (words.empty())
    throw UsageError(
        "launch: there is no command to run; give it after --, such as -- train gpt --text FILE");
  if (words[0].find('/') != std::string::npos) return words;
  const auto is = [&](const char* command, std::initializer_list<const char*> subcommands) {
    return words[0] == command && words.size() > 1 &&
           std::ranges::find(subcommands, words[1]) != subcommands.end();
  };
  const bool examines = words[0] == "doctor" && std::ranges::find(words, "--links") != words.end();
  if (words[0] != "train" && words[0] != "generate" && !is("bench", {"step", "decode", "collective"}) &&
      !is("eval", {"ppl"}) && !examines)
    throw UsageError(
        "launch: \"" + words[0] +
        "\" does not run on several ranks; expected train, generate, eval ppl, bench step, bench "
        "decode, bench collective, doctor --links, or a program of your own with its path, such "
        "as ./my_program" +
        (words[0] == "tessera" ? "; leave \"tessera\" out after --" : ""));
  std::vector<std::string> command = words;
  command.insert(command.begin(), own_program());
  return command;
}

/// The value of a flag among the words of a command line; none if it is not there.
std::optional<std::string> value_of(const std::vector<std::string>& words, const std::string& flag) {
  for (size_t i = 0; i < words.size(); ++i)
    if (words[i] == flag && i + 1 < words.size())
      return words[i + 1];
    else if (words[i].starts_with(flag + "="))
      return words[i].substr(flag.size() + 1);
  return std::nullopt;
}

/// The entries of the file of --config, which the ranks have read; none if it is gone since.
std::vector<TomlEntry> config_of(const std::vector<std::string>& words) {
  const std::optional<std::string> path = value_of(words, "--config");
  if (!path || path->empty()) return {};
  try {
    return read_toml(*path).front().entries;
  } catch (const std::exception& error) {
    report::tell(fmt::format("tessera: launch: the restart does without --config: {}\n", error.what()));
    return {};
  }
}

/// What continues a run of `train` after a failure: the flags of this call alone are kept, whether the
/// command line gave them or its --config, and all others are in its run.json.
std::vector<std::string> resumed(const std::vector<std::string>& words, const std::string& run) {
  std::vector<std::string> command = {own_program(), words[0]};
  if (words.size() > 1) command.push_back(words[1]);
  command.insert(command.end(), {"--resume", run});
  const std::vector<TomlEntry> config = config_of(words);
  const auto in_config = [&](const std::string& flag) {
    const auto entry =
        std::ranges::find_if(config, [&](const TomlEntry& one) { return "--" + one.name == flag; });
    return entry == config.end() || entry->values.empty() ? std::nullopt
                                                          : std::optional(entry->values.front());
  };
  for (const std::string flag : {"--device", "--json", "--json-out"})  // the last is a former name
    if (const auto given = value_of(words, flag), value = given ? given : in_config(flag); value)
      command.insert(command.end(), {flag, *value});
  for (const std::string flag : {"--quiet", "--check-finite"})
    if (std::ranges::find(words, flag) != words.end() || in_config(flag) == "true") command.push_back(flag);
  return command;
}

std::string prefix_of(const dist::LaunchOptions& options) {
  std::string text = fmt::format("tessera launch -n {}", options.ranks);
  if (options.nodes > 1)
    text +=
        fmt::format(" --nodes {} --node {} --master {}", options.nodes, options.node, quoted(options.master));
  if (options.restarts > 0) text += fmt::format(" --restarts {}", options.restarts);
  if (options.logs != dist::LaunchOptions().logs) text += " --logs " + quoted(options.logs);
  return text + " -- ";
}

int run_launch(dist::LaunchOptions options, const std::vector<std::string>& words) {
  options.command = command_of(words);
  if (words[0] == "train") options.resumed = [&words](const std::string& run) { return resumed(words, run); };
  options.out = [](const std::string& line) {
    fmt::print("{}", line);
    std::fflush(stdout);
  };
  options.err = [](const std::string& line) { report::tell(line); };
  ::setenv(kLaunchedVariable, prefix_of(options).c_str(), 1);
  const dist::LaunchEnd end = dist::launch(options);
  if (!end.cause.empty()) report::tell(fmt::format("tessera: {}\n", end.cause));
  return end.code;
}

}  // namespace

void add_launch(CLI::App& app, Action& action) {
  auto* command =
      app.add_subcommand("launch", "Start the ranks of a job on the GPUs or cores of this machine");
  auto options = std::make_shared<dist::LaunchOptions>();
  auto words = std::make_shared<std::vector<std::string>>();
  command
      ->add_option("-n,--ranks", options->ranks,
                   "Number of ranks on this machine, each with its own GPU if there are GPUs")
      ->check(whole(1, 4096));
  command->add_option("--nodes", options->nodes, "Number of machines; start this command on each")
      ->check(whole(1, 65536));
  command->add_option("--node", options->node, "Index of this machine, from 0")->check(whole(0, 65535));
  command->add_option("--master", options->master, "HOST:PORT of node 0, with a port that is free there")
      ->default_str("");
  command
      ->add_option("--restarts", options->restarts,
                   "Number of times to restart all ranks after a failure, from the newest checkpoint")
      ->check(whole(0, 1000000));
  command->add_option(
      "--logs", options->logs,
      "Directory for rank-<N>.log, the full output of each rank; a launch adds to logs that are there");
  command->add_option("command", *words, "After --: train ..., or a program of your own with its path")
      ->check(kMayBeEmpty);
  command->footer(
      "Sets torchrun's environment variables, tags each line with its rank, and stops all ranks if one "
      "fails, naming it.\nExample: tessera launch -n 2 --restarts 3 -- train gpt --text shakespeare.txt "
      "--accumulate 4");
  command->callback(
      [&action, options, words] { action = [options, words] { return run_launch(*options, *words); }; });
}

}  // namespace tessera::cli

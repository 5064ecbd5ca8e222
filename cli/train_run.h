#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "cli/setting_flags.h"
#include "train/run.h"

/// What the subcommands of `tessera train` share: the flags of a run, and the way from the command line to
/// the run folder and back. A model adds its own file, train_<model>.cpp.

namespace tessera::cli {

/// The flags of every run, whatever is trained.
struct RunFlags {
  std::string config, device, runs = "runs", name, resume, json;
  bool quiet = false;
  train::TrainerOptions options = {.loss_scale = 65536, .loss_scale_interval = 2000, .bucket_mb = -1};

  /// Those of this call alone; `default_name`: of the run folder, for the help: "tnp-<prior>-<time>".
  train::SettingList list(const std::string& default_name);
  void add_to(CLI::App& command, const std::string& default_name);
};

/// The ranks that train together: those of the launcher that started this process, else it alone. An error
/// while this rank computes ends the process, with one line. Errors of device_of are thrown before it waits
/// for another rank.
dist::World join_job(const std::string& device);
/// What --device names; by default the first GPU, else the CPU. Of several ranks on GPUs each has its own.
Device device_of(const std::string& device, const dist::Place& place);
/// The environment variable that says how this process was launched: "tessera launch -n 2 -- ".
inline constexpr const char* kLaunchedVariable = "TESSERA_LAUNCHED";

/// As a shell reads it back.
std::string quoted(const std::string& text);

/// Throws a UsageError for a --name that is no plain name, and for what cannot go with --resume; an Error if
/// --json would replace an input.
void check_run_flags(const RunFlags& flags, const CLI::App& command);
/// Messages of a training's InterruptGuard at the first signal: before the steps, and from then on.
extern const char* const kStoppingEarly;
extern const char* const kStopping;

/// What the flags ask of run_recipe, without the checks of the model's settings; prints to the standard
/// output.
train::RunRequest request_of(const RunFlags& flags, const CLI::App& command, Device device);
/// The command that continues the run in a folder.
std::string resume_command(const std::string& model, const std::filesystem::path& folder,
                           const RunFlags& flags);
/// Prints the result of a run, or the command that continues it.
void print_end(train::Recipe& recipe, const train::RunEnd& end, const std::string& resume);

/// From the parsed command line to the exit code. `settings`: those of the model.
int run_train(train::Recipe& recipe, const RunFlags& flags, const CLI::App& command,
              const train::SettingList& settings);

void add_train_tnp(CLI::App& train, Action& action);
void add_train_language(CLI::App& train, Action& action, bool llama);
void add_train_bert(CLI::App& train, Action& action);

}  // namespace tessera::cli
